//! TestState: one state, run alone, with its intermediate data.
//!
//! [`request`] reads the request and refuses what cannot be tested, [`run`] takes the state through its stages with the
//! same functions that the machine uses, [`inspection`] records the intermediate data, and [`failing`] applies retriers
//! and catchers to an error. A task without a mock is carried out for real, as an express execution of a machine with
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

pub use request::{Request, TestRejection};

use serde_json::{Map, Value, json};

use crate::engine::Engine;

/// The environment of the test.
pub struct TestOptions<'a> {
    pub engine: &'a Engine,
    /// Milliseconds since the epoch.
    pub now_ms: i64,
    /// Randomness for this test.
    pub seed: u64,
    /// `arn:aws:states:<region>:<account>`.
    pub arn_prefix: String,
    /// A fresh name.
    pub uuid: String,
}

/// Runs the test; the answer has the shape of the API.
pub async fn answer(request: &Request, around: &TestOptions<'_>) -> Result<Value, TestRejection> {
    let outcome = run::run(request, around).await?;
    let mut fields = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    set("status", Some(json!(outcome.status.as_str())));
    set("output", outcome.output.as_ref().map(|output| json!(inspection::spaced(output))));
    set("error", outcome.error.map(|error| json!(error)));
    set("cause", outcome.cause.map(|cause| json!(cause)));
    set("nextState", outcome.next.map(|next| json!(next)));
    if request.level.shows_stages() {
        set("inspectionData", Some(outcome.inspection.done()));
    }
    Ok(Value::Object(fields))
}

/// The status of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Succeeded,
    Failed,
    Retriable,
    CaughtError,
}

impl Status {
    fn as_str(self) -> &'static str {
        match self {
            Status::Succeeded => "SUCCEEDED",
            Status::Failed => "FAILED",
            Status::Retriable => "RETRIABLE",
            Status::CaughtError => "CAUGHT_ERROR",
        }
    }
}
