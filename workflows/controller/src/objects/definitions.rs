//! The definitions of objects and of state machines.

use mayfly_api::{WorkflowSpec, workflow::definition};
use mayfly_workflows_engine::catalog::MachineRecord;
use mayfly_workflows_language::tasks;
use serde_json::Value;

/// The definition of an object's state machine, which is compiled from the object's tasks if it has some. Null for
/// tasks with problems, which the API server does not accept.
pub(super) fn definition_of_object(spec: &WorkflowSpec) -> Value {
    match spec.tasks.is_null() {
        true => spec.definition.clone(),
        false => tasks::definition_text(&spec.tasks).map_or(Value::Null, Value::String),
    }
}

/// The definition of a state machine as an object; as its text where it is none.
pub(super) fn definition_of_machine(machine: &MachineRecord) -> Value {
    let text = Value::String(machine.revision.definition.to_string());
    definition::value(&text).unwrap_or(text)
}
