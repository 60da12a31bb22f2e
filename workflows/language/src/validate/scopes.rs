//! Variables of nested flows: a variable that an outer flow assigns must not be assigned by its branches and iterations
//! ("no other scope (inside a Map or Parallel) can assign to myVariable as well", as the guide says).
//!
//! The items of a distributed Map are executions of their own and start without variables.

use std::collections::HashSet;

use super::{DiagnosticCode, ProblemReport};
use crate::value::Value;

/// Reports names that an outer flow assigns as well, at the inner `Assign`.
pub(crate) fn check(root: &Value, report: &mut ProblemReport) {
    flow(root, "", &HashSet::new(), report);
}

fn flow(flow: &Value, at: &str, outer: &HashSet<&str>, report: &mut ProblemReport) {
    let Some(states) = flow.get("States").and_then(Value::as_object) else { return };
    let mut visible = outer.clone();
    for (name, state) in states.iter() {
        let state_at = format!("{at}/States/{name}");
        assigned(state, &state_at, &mut |variable, at| {
            if outer.contains(variable) {
                // The message is from gabrielmoreira/tiny-asl-machine, which is verified against AWS.
                let message =
                    format!("The variable name '{variable}' was already defined in a parent scope.");
                report.error(DiagnosticCode::InvalidVariableName, at, message);
            }
            visible.insert(variable);
        });
    }
    for (name, state) in states.iter() {
        let state_at = format!("{at}/States/{name}");
        for (inner, inner_at, is_own_execution) in inner_flows(state, &state_at) {
            let none = HashSet::new();
            self::flow(inner, &inner_at, if is_own_execution { &none } else { &visible }, report);
        }
    }
}

/// Calls `tell` with each variable that a state, its rules or its catchers assign, and the path of that `Assign`.
fn assigned<'a>(state: &'a Value, at: &str, tell: &mut dyn FnMut(&'a str, &str)) {
    let mut of = |holder: &'a Value, at: &str| {
        let Some(assign) = holder.get("Assign").and_then(Value::as_object) else { return };
        let at = format!("{at}/Assign");
        for (key, _) in assign.iter() {
            tell(key.strip_suffix(".$").unwrap_or(key), &at);
        }
    };
    of(state, at);
    for list in ["Choices", "Catch"] {
        let entries = state.get(list).and_then(Value::as_array).unwrap_or_default();
        for (position, entry) in entries.iter().enumerate() {
            of(entry, &format!("{at}/{list}[{position}]"));
        }
    }
}

/// The flows in a state with their paths, and whether each of their runs is a child execution.
fn inner_flows<'a>(state: &'a Value, at: &str) -> Vec<(&'a Value, String, bool)> {
    let mut flows = Vec::new();
    let branches = state.get("Branches").and_then(Value::as_array).unwrap_or_default();
    for (position, branch) in branches.iter().enumerate() {
        flows.push((branch, format!("{at}/Branches[{position}]"), false));
    }
    for field in ["ItemProcessor", "Iterator"] {
        let Some(processor) = state.get(field) else { continue };
        let mode = processor.get("ProcessorConfig").and_then(|config| config.get("Mode"));
        let is_own_execution = mode.and_then(Value::as_str) == Some("DISTRIBUTED");
        flows.push((processor, format!("{at}/{field}"), is_own_execution));
    }
    flows
}
