//! The handling of an error: retriers first, then catchers.

use mayfly_workflows_language::dataflow;
use mayfly_workflows_language::definition::{Catcher, QueryLanguage, State};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::value::Value;

use super::TestStatus;
use super::inspection::{InspectedStage, InspectionData};
use super::request::StateTest;
use super::run::{StageEvaluator, TestOutcome};
use mayfly_workflows_machine::{interval_seconds, takes};

/// An error's name and cause; a mock may leave out either.
#[derive(Clone, Debug)]
pub(super) struct MockedError {
    pub(super) error: Option<String>,
    pub(super) cause: Option<String>,
}

impl From<StateError> for MockedError {
    fn from(error: StateError) -> MockedError {
        MockedError { error: Some(error.error.into_owned()), cause: Some(error.cause) }
    }
}

impl MockedError {
    fn output(&self) -> Value {
        let told = |text: &Option<String>| Value::from(text.as_deref().unwrap_or_default());
        Value::object([("Error", told(&self.error)), ("Cause", told(&self.cause))])
    }
}

/// Lets the state's retriers and catchers look at a failure.
pub(super) fn settle(
    request: &StateTest,
    state: &State,
    stage: &StageEvaluator<'_>,
    mut inspection: InspectionData,
    failure: MockedError,
) -> TestOutcome {
    let name = failure.error.as_deref();
    let ended = |status, inspection, output, next| TestOutcome {
        status,
        output,
        next,
        error: failure.error.clone(),
        cause: failure.cause.clone(),
        inspection,
    };
    if let Some(index) = state.retry.iter().position(|retrier| takes(&retrier.error_equals, name)) {
        let retrier = &state.retry[index];
        let used = request.retries;
        inspection.error_handling.retry_index = Some(index);
        if used < retrier.max_attempts {
            let wait = interval_seconds(retrier, u32::try_from(used).unwrap_or(u32::MAX));
            inspection.error_handling.retry_backoff_seconds = Some(whole_seconds(wait));
            return ended(TestStatus::Retriable, inspection, None, None);
        }
    }
    let Some(index) = state.catch.iter().position(|catcher| takes(&catcher.error_equals, name)) else {
        return ended(TestStatus::Failed, inspection, None, None);
    };
    inspection.error_handling.catch_index = Some(index);
    let catcher = &state.catch[index];
    match caught(request, state, stage, (index, catcher), &failure) {
        Ok((output, assigned)) => {
            if let Some(assigned) = assigned {
                inspection.stage(InspectedStage::Variables, &assigned);
            }
            let next = super::run::target(request, &catcher.next);
            ended(TestStatus::CaughtError, inspection, Some(output), next)
        }
        Err(error) => {
            let failure = MockedError::from(error);
            TestOutcome {
                status: TestStatus::Failed,
                output: None,
                next: None,
                error: failure.error,
                cause: failure.cause,
                inspection,
            }
        }
    }
}

/// The output of a catcher, and the variables it assigned.
fn caught(
    request: &StateTest,
    state: &State,
    stage: &StageEvaluator<'_>,
    (index, catcher): (usize, &Catcher),
    failure: &MockedError,
) -> Result<(Value, Option<Value>), StateError> {
    let error_output = failure.output();
    let scope = stage.scope(&request.input);
    let (output, scope_input) = match state.query_language {
        QueryLanguage::JsonPath => {
            let placed = dataflow::place_result(&catcher.result_path, &request.input, error_output.clone())?;
            (placed, &error_output)
        }
        QueryLanguage::Jsonata => {
            let scope = scope.with_error_output(&error_output);
            let field = format!("Catch[{index}]/Output");
            (dataflow::output(catcher.output.as_ref(), &scope, &error_output, &field)?, &request.input)
        }
    };
    let Some(assign) = &catcher.assign else { return Ok((output, None)) };
    let scope = stage.scope(scope_input).with_error_output(&error_output);
    let assigned = dataflow::assign(Some(assign), &scope, &format!("Catch[{index}]/Assign"))?;
    Ok((output, Some(Value::from(stage.variables.assign(&assigned).visible()))))
}

/// Intervals are whole seconds where they can be.
#[expect(clippy::cast_possible_truncation, reason = "an interval is far below 2^63 seconds")]
fn whole_seconds(seconds: f64) -> i64 {
    seconds.round() as i64
}
