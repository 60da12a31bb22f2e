//! Workflows as a graph of tasks: `tasks` with `dependencies`, compiled to the Amazon States Language.
//!
//! ```yaml
//! tasks:
//!   extract: {job: {Image: "tools:1", Command: [extract]}}
//!   count: {function: count, dependencies: [extract]}
//!   report: {state: {Type: Pass, Parameters: {n.$: $.tasks.count}}, dependencies: [count]}
//! ```
//! **Data.** A task's input is `{"input": …, "tasks": {"extract": …}}`: the input of the execution, and the output of
//! each task in `dependencies` under its name. The output of the execution is an object of the outputs of the tasks
//! that no other task depends on.
//! **Order.** Independent tasks run in parallel. A series-parallel graph is compiled exactly: each task starts as soon
//! as its own dependencies have ended. For the parts that are not series-parallel, see [`graph`].
//!
//! The compiled definition uses JSONPath for the states that this module adds; a task's own state may use JSONata. Its
//! other fields are not checked here: the definition is checked like any other.
//!
//! [`document`] parses and checks the tasks, [`graph`] arranges them, [`states`] generates the definition. Pure.

mod document;
mod graph;
mod states;
#[cfg(test)]
mod tests;

use crate::error::Problem;
use crate::parse::DEFINITION_BYTES_MAX;
use crate::value::Value;

/// The maximum number of tasks of one workflow. A task adds at least five events to the history, whose limit is 25,000,
/// and a Retry or a Map repeats them.
pub const TASKS_MAX: usize = 500;

/// Whether a document is a graph of tasks, as opposed to a definition in the Amazon States Language.
pub fn is_tasks(document: &Value) -> bool {
    document.get("tasks").is_some()
}

/// Compiles the `tasks` of a Workflow object to the text of a definition, indented.
///
/// # Errors
/// As [`compile`].
pub fn definition_text(tasks: &serde_json::Value) -> Result<String, Vec<Problem>> {
    let document = Value::object([("tasks", Value::from(tasks))]);
    Ok(serde_json::to_string_pretty(&compile(&document)?).unwrap_or_default())
}

/// Compiles `{"tasks": {…}, "comment": …, "timeoutSeconds": …}` to a definition in the Amazon States Language.
///
/// # Errors
/// All problems, each with its location as a JSON pointer, such as `/tasks/load/dependencies[0]`. A returned definition
/// may still have problems within the states of the tasks.
pub fn compile(document: &Value) -> Result<Value, Vec<Problem>> {
    let document = document::TasksDocument::parse(document)?;
    let arranged = graph::arrange(&document.tasks)?;
    let definition = states::definition(&document, &arranged);
    match definition.text_len() {
        bytes if bytes > DEFINITION_BYTES_MAX => {
            let message = format!(
                "the compiled state machine has {bytes} bytes, more than the {DEFINITION_BYTES_MAX} of the largest \
                 definition"
            );
            Err(vec![Problem::at("/tasks", message)])
        }
        _ => Ok(definition),
    }
}
