//! Warnings about valid definitions. They do not prevent the creation of a machine.

use std::collections::{HashMap, HashSet};

use super::{DiagnosticCode, ProblemReport};
use crate::definition::{Flow, QueryLanguage, Resource, State, StateId, StateKind, StateMachine, Transition};
use crate::parse::FlowDraft;
use crate::value::Value;

/// Reports warnings about every state; `drafts` have the paths of the flows, `root` is the definition's JSON.
pub(crate) fn check(machine: &StateMachine, drafts: &[FlowDraft], root: &Value, report: &mut ProblemReport) {
    states(root, "", machine.query_language, report);
    for (flow, draft) in machine.flows().iter().zip(drafts) {
        for id in &flow.states {
            let state = machine.state(*id);
            kind(&state.kind, &place(draft, state), report);
        }
        loops(machine, flow, draft, report);
    }
}

fn place(draft: &FlowDraft, state: &State) -> String {
    format!("{}/States/{}", draft.at, state.name)
}

fn kind(kind: &StateKind, at: &str, report: &mut ProblemReport) {
    match kind {
        StateKind::Task(task) if !task.resource.is_supported() => {
            let message = match &task.resource {
                Resource::Integration { service, .. } => format!(
                    "{} is carried out where its service is pointed at an endpoint \
                     (mayfly up --task-endpoint {service}=URL); elsewhere the state fails when it is reached",
                    task.arn
                ),
                _ => format!("{} is not carried out here: the state fails when it is reached", task.arn),
            };
            report.integration(&format!("{at}/Resource"), &task.arn, message);
        }
        StateKind::Choice(choice) if choice.default.is_none() => {
            let message = "There is no 'Default': the state fails with States.Runtime when no choice matches";
            report.warning(DiagnosticCode::MissingDefault, at, message);
        }
        _ => {}
    }
}

/// Walks over the states of the definition's JSON, including nested ones.
fn states(flow: &Value, at: &str, language: QueryLanguage, report: &mut ProblemReport) {
    let Some(states) = flow.get("States").and_then(Value::as_object) else { return };
    for (name, state) in states.iter() {
        let at = format!("{at}/States/{name}");
        let own = state.get("QueryLanguage").and_then(Value::as_str);
        let json_path = own.map_or(language == QueryLanguage::JsonPath, |own| own == "JSONPath");
        if json_path {
            json_path_state(state, &at, report);
        }
        connection(state, &at, report);
        for processor in ["ItemProcessor", "Iterator"] {
            if let Some(flow) = state.get(processor) {
                self::states(flow, &format!("{at}/{processor}"), language, report);
            }
        }
        let branches = state.get("Branches").and_then(Value::as_array).unwrap_or_default();
        for (position, flow) in branches.iter().enumerate() {
            self::states(flow, &format!("{at}/Branches[{position}]"), language, report);
        }
    }
}

/// An HTTP task's credentials are in a connection of EventBridge, which is not checked.
fn connection(state: &Value, at: &str, report: &mut ProblemReport) {
    if state.get("Resource").and_then(Value::as_str) != Some("arn:aws:states:::http:invoke") {
        return;
    }
    for field in ["Parameters", "Arguments"] {
        if state.get(field).and_then(|arguments| arguments.get("Authentication")).is_some() {
            let message =
                "Connections are not supported: the request is sent without the connection's credentials";
            report.warning(
                DiagnosticCode::UnsupportedIntegration,
                &format!("{at}/{field}/Authentication"),
                message,
            );
        }
    }
}

fn json_path_state(state: &Value, at: &str, report: &mut ProblemReport) {
    for field in ["Parameters", "ResultSelector", "ItemSelector"] {
        if let Some(template) = state.get(field) {
            static_paths(template, &format!("{at}/{field}"), &mut |at| {
                report.warning(
                    DiagnosticCode::NoDollar,
                    at,
                    "The value looks like a JSONPath or an intrinsic function, but the field name does not end with '.$'",
                );
            });
        }
    }
    if state.get("Type").and_then(Value::as_str) == Some("Pass")
        && let Some(result) = state.get("Result")
    {
        dynamic_keys(result, &format!("{at}/Result"), &mut |at| {
            report.warning(
                DiagnosticCode::PassResultIsStatic,
                at,
                "The 'Result' of a Pass state is static: paths in it are not evaluated",
            );
        });
    }
    for field in ["Seconds", "Timestamp", "TimeoutSeconds", "HeartbeatSeconds", "Error", "Cause"] {
        if state.get(field).and_then(Value::as_str).is_some_and(|text| text.starts_with("$.")) {
            report.warning(
                DiagnosticCode::NoPath,
                &format!("{at}/{field}"),
                "The value looks like a path, but the field name does not end with 'Path'",
            );
        }
    }
}

/// Finds strings that look like paths or intrinsic functions under keys without `.$`.
fn static_paths(template: &Value, at: &str, tell: &mut dyn FnMut(&str)) {
    match template {
        Value::Object(map) => {
            for (key, value) in map.iter() {
                let at = format!("{at}/{key}");
                match value.as_str() {
                    Some(text) if !key.ends_with(".$") && looks_dynamic(text) => tell(&at),
                    _ => static_paths(value, &at, tell),
                }
            }
        }
        Value::Array(items) => {
            for (position, item) in items.iter().enumerate() {
                static_paths(item, &format!("{at}[{position}]"), tell);
            }
        }
        _ => {}
    }
}

fn looks_dynamic(text: &str) -> bool {
    text == "$"
        || ["$.", "$[", "$$."].iter().any(|start| text.starts_with(start))
        || (text.starts_with("States.") && text.ends_with(')'))
}

/// Finds keys that end with `.$`.
fn dynamic_keys(value: &Value, at: &str, tell: &mut dyn FnMut(&str)) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter() {
                let at = format!("{at}/{key}");
                if key.ends_with(".$") && value.as_str().is_some_and(looks_dynamic) {
                    tell(&at);
                }
                dynamic_keys(value, &at, tell);
            }
        }
        Value::Array(items) => {
            for (position, item) in items.iter().enumerate() {
                dynamic_keys(item, &format!("{at}[{position}]"), tell);
            }
        }
        _ => {}
    }
}

/// Finds states from which no end is reachable: the execution loops until it fails or is stopped.
fn loops(machine: &StateMachine, flow: &Flow, draft: &FlowDraft, report: &mut ProblemReport) {
    let mut ends: Vec<StateId> =
        flow.states.iter().copied().filter(|id| is_end(machine.state(*id))).collect();
    let mut can_end: HashSet<StateId> = ends.iter().copied().collect();
    let mut before: HashMap<StateId, Vec<StateId>> = HashMap::new();
    for id in &flow.states {
        for target in targets(machine.state(*id)) {
            before.entry(target).or_default().push(*id);
        }
    }
    while let Some(id) = ends.pop() {
        for earlier in before.get(&id).into_iter().flatten() {
            if can_end.insert(*earlier) {
                ends.push(*earlier);
            }
        }
    }
    for id in flow.states.iter().filter(|id| !can_end.contains(id)) {
        let state = machine.state(*id);
        let message = format!("State \"{}\" cannot reach a terminal state", state.name);
        report.warning(DiagnosticCode::EndlessLoop, &place(draft, state), message);
    }
}

fn is_end(state: &State) -> bool {
    match &state.kind {
        StateKind::Choice(_) => false,
        StateKind::Succeed | StateKind::Fail(_) => true,
        _ => state.next == Transition::End,
    }
}

fn targets(state: &State) -> Vec<StateId> {
    let mut all: Vec<&Transition> = vec![&state.next];
    all.extend(state.catch.iter().map(|catcher| &catcher.next));
    if let StateKind::Choice(choice) = &state.kind {
        all.extend(choice.rules.iter().map(|rule| &rule.next));
        all.extend(&choice.default);
    }
    all.into_iter()
        .filter_map(|transition| match transition {
            Transition::Next(id) => Some(*id),
            Transition::End | Transition::Outside(_) => None,
        })
        .collect()
}
