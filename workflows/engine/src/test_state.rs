//! TestState: one state, run alone, with its intermediate data.
//!
//! [`request`] checks the request and refuses what cannot be tested, [`run`] takes the state through the machine's
//! own stages, of which [`inspection`] records the intermediate data, and [`failing`] applies retriers and catchers to an
//! error. A task without a mock is carried out for real, as an express execution of a machine with
//! this one task.
//!
//! Not here: the state's place in a machine. Nothing is stored.

mod context;
mod failing;
mod fan_out;
mod http_trace;
mod inspection;
mod request;
mod run;
mod schema;
mod waits;

pub use inspection::{ErrorHandling, HttpRequestTrace, HttpResponseTrace, InspectionData};
pub use mayfly_workflows_machine::stages::DataStage;
pub use request::{InspectionLevel, MockValidation, StateConfiguration, StateMock, TestState};

use crate::engine::Engine;
use crate::service::ServiceError;

/// The environment of a test.
pub(crate) struct TestEnvironment<'a> {
    pub(crate) engine: &'a Engine,
    /// Milliseconds since the epoch.
    pub(crate) now_ms: i64,
    /// Randomness for this test.
    pub(crate) seed: u64,
    /// `arn:aws:states:<region>:<account>`.
    pub(crate) arn_prefix: String,
    /// A fresh name.
    pub(crate) uuid: String,
}

/// The status of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestStatus {
    /// The state has an output.
    Succeeded,
    /// The state failed, and no retrier and no catcher matches its error.
    Failed,
    /// A retrier matches the state's error.
    Retriable,
    /// A catcher matches the state's error.
    CaughtError,
}

impl TestStatus {
    /// The API's name of the status.
    pub fn as_str(self) -> &'static str {
        match self {
            TestStatus::Succeeded => "SUCCEEDED",
            TestStatus::Failed => "FAILED",
            TestStatus::Retriable => "RETRIABLE",
            TestStatus::CaughtError => "CAUGHT_ERROR",
        }
    }
}

/// The result of a test.
#[derive(Clone, PartialEq)]
pub struct TestedState {
    /// The status.
    pub status: TestStatus,
    /// The state's output, or that of the catcher, as JSON text.
    pub output: Option<String>,
    /// The error's name.
    pub error: Option<String>,
    /// The error's cause.
    pub cause: Option<String>,
    /// The state that follows; none at the end of the machine.
    pub next_state: Option<String>,
    /// The intermediate data, unless the request asks for the result only.
    pub inspection: Option<InspectionData>,
}

/// Shows no payloads.
impl std::fmt::Debug for TestedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestedState")
            .field("status", &self.status)
            .field("error", &self.error)
            .field("next_state", &self.next_state)
            .field("inspection", &self.inspection)
            .finish_non_exhaustive()
    }
}

/// Checks the request and runs the test.
pub(crate) async fn run_test(
    request: &TestState,
    environment: &TestEnvironment<'_>,
) -> Result<TestedState, ServiceError> {
    let test = request::StateTest::check(request)?;
    let outcome = run::run(&test, environment).await?;
    Ok(TestedState {
        status: outcome.status,
        output: outcome.output.as_ref().map(inspection::spaced),
        error: outcome.error.map(|error| error.to_string()),
        cause: outcome.cause.map(|cause| cause.to_string()),
        next_state: outcome.next,
        inspection: test.level.shows_stages().then_some(outcome.inspection),
    })
}
