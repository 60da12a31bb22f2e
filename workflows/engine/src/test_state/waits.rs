//! The duration of a Wait state, with the checks of the machine.

use mayfly_workflows_language::dataflow::EvaluationScope;
use mayfly_workflows_language::definition::WaitState;
use mayfly_workflows_language::error::StateError;

use mayfly_workflows_machine::quantity;

/// Whether the state would know how long to wait.
pub(super) fn check(wait: &WaitState, scope: &EvaluationScope<'_>) -> Result<(), StateError> {
    match wait {
        WaitState::Seconds(seconds) => quantity::wait_seconds(scope, seconds).map(drop),
        WaitState::Timestamp(field) => quantity::wait_timestamp(scope, field).map(drop),
    }
}
