//! The duration of a Wait state, with the checks of the machine.

use mayfly_workflows_language::dataflow::Scope;
use mayfly_workflows_language::definition::Wait;
use mayfly_workflows_language::error::StateError;

use mayfly_workflows_machine::{EDITION, quantity};

/// Whether the state would know how long to wait.
pub(super) fn check(wait: &Wait, scope: &Scope<'_>) -> Result<(), StateError> {
    match wait {
        Wait::Seconds(seconds) => quantity::wait_seconds(scope, seconds, EDITION).map(drop),
        Wait::Timestamp(field) => quantity::wait_timestamp(scope, field).map(drop),
    }
}
