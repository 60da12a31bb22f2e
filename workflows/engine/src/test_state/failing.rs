//! The handling of an error: retriers first, then catchers.

use std::sync::Arc;

use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::value::Value;

use super::TestStatus;
use super::inspection::InspectionData;
use super::request::StateTest;
use super::run::{TestOutcome, target};
use mayfly_workflows_machine::stages::{DataStage, StageObserver, StateStages, error_output};
use mayfly_workflows_machine::{error_matches, interval_seconds};

/// An error's name and cause; a mock may leave out either.
#[derive(Clone, Debug)]
pub(super) struct MockedError {
    pub(super) error: Option<Arc<str>>,
    pub(super) cause: Option<Arc<str>>,
}

impl MockedError {
    /// The error of a mock.
    pub(super) fn mocked(error: &Option<String>, cause: &Option<String>) -> Self {
        Self { error: error.as_deref().map(Into::into), cause: cause.as_deref().map(Into::into) }
    }
}

impl From<StateError> for MockedError {
    fn from(error: StateError) -> MockedError {
        MockedError { error: Some(error.error.into()), cause: Some(error.cause.into()) }
    }
}

/// Lets the state's retriers and catchers look at a failure.
pub(super) fn settle(
    test: &StateTest,
    stages: &StateStages<'_>,
    mut inspection: InspectionData,
    failure: MockedError,
) -> TestOutcome {
    let (state, name) = (test.state(), failure.error.as_deref());
    let ended = |status, inspection, output, next| TestOutcome {
        status,
        output,
        next,
        error: failure.error.clone(),
        cause: failure.cause.clone(),
        inspection,
    };
    if let Some(index) = state.retry.iter().position(|retrier| error_matches(&retrier.error_equals, name)) {
        let retrier = &state.retry[index];
        let used = test.retries;
        inspection.error_handling.retry_index = Some(index);
        if used < retrier.max_attempts {
            let wait = interval_seconds(retrier, u32::try_from(used).unwrap_or(u32::MAX));
            inspection.error_handling.retry_backoff_seconds = Some(whole_seconds(wait));
            return ended(TestStatus::Retriable, inspection, None, None);
        }
    }
    let Some(index) = state.catch.iter().position(|catcher| error_matches(&catcher.error_equals, name))
    else {
        return ended(TestStatus::Failed, inspection, None, None);
    };
    inspection.error_handling.catch_index = Some(index);
    let catcher = &state.catch[index];
    let output = error_output(failure.error.as_ref(), failure.cause.as_ref());
    match stages.finish_caught((index, catcher), &output) {
        Ok(left) => {
            if catcher.assign.is_some() {
                let variables = stages.variables.assign(&left.assigned).visible();
                inspection.observe(DataStage::Variables, &Value::from(variables));
            }
            let next = target(test, &catcher.next);
            ended(TestStatus::CaughtError, inspection, Some(left.output), next)
        }
        Err(error) => {
            let MockedError { error, cause } = MockedError::from(error);
            TestOutcome { status: TestStatus::Failed, output: None, next: None, error, cause, inspection }
        }
    }
}

/// Intervals are whole seconds where they can be.
#[expect(clippy::cast_possible_truncation, reason = "an interval is far below 2^63 seconds")]
fn whole_seconds(seconds: f64) -> i64 {
    seconds.round() as i64
}
