//! Every definition in the recordings: definitions that AWS accepted are accepted, others are rejected with the same
//! message, and diagnostics and lists of variable references are equal. Skipped with a message if there is no test
//! data.

mod common;

use std::path::{Path, PathBuf};

use mayfly_workflows_language::definition::{StateMachineType, variable_references};
use mayfly_workflows_language::parse::{Rejection, compile, compile_state};
use mayfly_workflows_language::validate::check;
use mayfly_workflows_language::value::Value;

use common::testdata;

fn cases() -> Vec<(String, Value)> {
    let Some(root) = testdata("aws-recorded") else { return Vec::new() };
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in root.read_dir().expect("a readable folder").flatten().filter(|entry| entry.path().is_dir())
    {
        files
            .extend(folder.path().read_dir().expect("a readable folder").flatten().map(|entry| entry.path()));
    }
    files.sort();
    let read =
        |file: &Path| Value::parse(&std::fs::read_to_string(file).expect("a readable file")).expect("JSON");
    files.iter().map(|file| (file.display().to_string(), read(file))).collect()
}

/// All messages of `InvalidDefinition` in a recording.
fn refusals(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            if map.get("Code").and_then(Value::as_str) == Some("InvalidDefinition") {
                found.extend(map.get("Message").and_then(Value::as_str).map(str::to_string));
            }
            if map.get("exception_typename").and_then(Value::as_str) == Some("InvalidDefinition") {
                let text = map.get("exception_value").and_then(Value::as_str).unwrap_or_default();
                found.extend(text.split_once(" operation: ").map(|(_, message)| message.to_string()));
            }
            map.values().for_each(|value| refusals(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| refusals(value, found)),
        _ => {}
    }
}

fn machine_type(params: &Value) -> StateMachineType {
    match params.get("type").and_then(Value::as_str) {
        Some("EXPRESS") => StateMachineType::Express,
        _ => StateMachineType::Standard,
    }
}

#[test]
fn definitions_are_accepted_and_refused_as_recorded_from_aws() {
    let (mut accepted, mut refused) = (0, 0);
    let mut wrong = Vec::new();
    for (name, case) in cases() {
        let mut expected = Vec::new();
        refusals(&case, &mut expected);
        // The API's own message, raised before the definition is parsed.
        expected.retain(|message| !message.starts_with("TestState API"));
        let mut got = Vec::new();
        for call in case.get("calls").and_then(Value::as_array).unwrap_or_default() {
            let (Some(operation), Some(params)) =
                (call.get("operation").and_then(Value::as_str), call.get("params"))
            else {
                continue;
            };
            let Some(text) = params.get("definition").and_then(Value::as_str) else { continue };
            let outcome: Result<(), Rejection> = match operation {
                "CreateStateMachine" | "UpdateStateMachine" => compile(text, machine_type(params)).map(drop),
                "TestState" if params.get("stateName").is_some() => {
                    compile(text, StateMachineType::Standard).map(drop)
                }
                "TestState" => compile_state(text, "TestState").map(drop),
                _ => continue,
            };
            match outcome {
                Ok(()) => accepted += 1,
                Err(rejection) => got.push(rejection.message()),
            }
        }
        if got == expected {
            refused += got.len();
        } else {
            wrong.push(format!("{name}:\n  AWS: {expected:?}\n  got: {got:?}"));
        }
    }
    eprintln!(
        "recorded definitions: {accepted} accepted, {refused} refused in AWS's words, {} differ",
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn diagnostics_are_aws_s() {
    let mut agree = 0;
    for (name, case) in cases() {
        let calls = case.get("calls").and_then(Value::as_array).unwrap_or_default();
        let validations = calls.iter().filter(|call| {
            call.get("operation").and_then(Value::as_str) == Some("ValidateStateMachineDefinition")
        });
        for call in validations {
            let params = call.get("params").expect("parameters");
            let text = params.get("definition").and_then(Value::as_str).expect("a definition");
            let diagnostics =
                serde_json::to_string(&check(text, machine_type(params), |_| false)).expect("JSON");
            let got = Value::parse(&diagnostics).expect("JSON");
            let expected = case.get("expected").and_then(|steps| steps.get("validation_response"));
            assert_eq!(expected.and_then(|answer| answer.get("diagnostics")), Some(&got), "{name}");
            agree += 1;
        }
    }
    eprintln!("recorded validations: {agree} agree");
}

#[test]
fn variable_references_are_aws_s() {
    let mut agree = 0;
    for (name, case) in cases() {
        described(case.get("expected").expect("what AWS answered"), &mut |description, definition| {
            let Ok(machine) = compile(&definition.to_text(), StateMachineType::Standard) else { return };
            let got = Value::object(
                variable_references(&machine)
                    .into_iter()
                    .map(|(state, names)| (state, names.into_iter().map(Value::from).collect::<Value>())),
            );
            let expected = description.get("variableReferences").cloned().unwrap_or_else(Value::empty_object);
            assert_eq!(expected, got, "{name}");
            agree += 1;
        });
    }
    eprintln!("recorded descriptions: {agree} agree in their variable references");
}

/// Calls `tell` with every description of a state machine, and its definition.
fn described(value: &Value, tell: &mut dyn FnMut(&Value, &Value)) {
    match value {
        Value::Object(map) => {
            if let Some(definition) = map.get("definition").filter(|found| found.get("States").is_some()) {
                tell(value, definition);
            }
            map.values().for_each(|value| described(value, tell));
        }
        Value::Array(items) => items.iter().for_each(|value| described(value, tell)),
        _ => {}
    }
}
