//! The compiler from text to the model; it reports every problem that it finds.
//!
//! [`compile`] validates like CreateStateMachine: it returns the model, or a [`Rejection`] whose message is AWS's
//! `InvalidDefinition`. [`compile_state`] compiles a single state, for TestState.
//!
//! The compiler reads the text once ([`flow`], one file per group of states) and builds the model while it checks the
//! fields, so that the checks and the model cannot disagree. Transitions between states are checked afterwards, and
//! only when all fields are valid, as on AWS.

mod allowed;
mod choice;
mod errors;
pub(crate) mod expressions;
mod fields;
mod flow;
mod map;
mod state;
mod task;
mod templates;

use std::fmt;
use std::sync::Arc;

use crate::definition::{QueryLanguage, StateMachine, StateMachineType};
use crate::validate::{Diagnostic, DiagnosticCode, ProblemReport, Severity, graph, lint, scopes};
use crate::value::{JsonErrorKind, Value};

pub(crate) use flow::{Compiler, FlowDraft};

/// AWS's limit on the size of a definition, in bytes. The API rejects longer ones before they are parsed.
pub const DEFINITION_BYTES_MAX: usize = 1_048_576;
/// The maximum length of a state's name, in characters.
pub const STATE_NAME_CHARS_MAX: usize = 80;
/// The maximum nesting of Parallel and Map states.
pub const FLOW_DEPTH_MAX: usize = 50;
/// The maximum nesting of JSON in a definition: enough for the deepest flows.
const JSON_DEPTH_MAX: usize = 400;

/// The rejection of a definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// At least one error; no warnings.
    pub diagnostics: Vec<Diagnostic>,
    definition: Arc<str>,
}

impl Rejection {
    /// The message of `InvalidDefinition`, word for word.
    pub fn message(&self) -> String {
        let mut errors = self.diagnostics.iter();
        if let Some(label) = errors.clone().find(|error| error.code == DiagnosticCode::InvalidLabelName) {
            // Labels are parsed by a part of the service that has its own exception.
            let quoted = python_repr(&label.message);
            return format!("Error=ValueError Args=[{quoted}] in definition '{}'.", self.definition);
        }
        let mut text = String::from("Invalid State Machine Definition: '");
        if let Some(first) = errors.next() {
            text.push_str(&first.to_string());
        }
        for error in errors {
            text.push_str(&format!(", {error}"));
        }
        text.push('\'');
        text
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}

impl std::error::Error for Rejection {}

/// Compiles a definition, or returns all of its errors.
pub fn compile(text: &str, machine_type: StateMachineType) -> Result<StateMachine, Rejection> {
    let (machine, report) = read(text, machine_type);
    finish(machine, report, text)
}

/// Like [`compile`], for a definition that was accepted earlier: checks that only later versions have are skipped.
pub fn compile_accepted(text: &str, machine_type: StateMachineType) -> Result<StateMachine, Rejection> {
    let (machine, report) = read_as(text, machine_type, true);
    finish(machine, report, text)
}

/// Like [`compile`], for a definition that is already parsed JSON, as in a `Workflow` object.
pub fn compile_value(definition: &Value, machine_type: StateMachineType) -> Result<StateMachine, Rejection> {
    compile(&definition.to_text(), machine_type)
}

/// Compiles a single state, for TestState: it is the only state of the machine, with the name `name` (the API has none;
/// any will do). Targets of transitions are not checked.
pub fn compile_state(text: &str, name: &str) -> Result<StateMachine, Rejection> {
    let mut report = ProblemReport::default();
    let machine = match document(text, &mut report) {
        Some(state) => {
            let mut compiler = Compiler::new(StateMachineType::Standard, QueryLanguage::JsonPath, report);
            compiler.lone_state(&state, name);
            let (machine, flows, rest) = compiler.finish();
            report = rest;
            if !report.has_errors() {
                graph::check(&flows[1..], &mut report);
            }
            machine
        }
        None => None,
    };
    finish(machine, report, text)
}

fn finish(
    machine: Option<StateMachine>,
    report: ProblemReport,
    text: &str,
) -> Result<StateMachine, Rejection> {
    match machine {
        Some(machine) if !report.has_errors() => Ok(machine),
        _ => {
            let errors =
                report.into_diagnostics().into_iter().filter(|found| found.severity == Severity::Error);
            Err(Rejection { diagnostics: errors.collect(), definition: text.into() })
        }
    }
}

/// Compiles as much of a definition as possible. The machine is complete only if the report has no errors.
pub(crate) fn read(text: &str, machine_type: StateMachineType) -> (Option<StateMachine>, ProblemReport) {
    read_as(text, machine_type, false)
}

fn read_as(
    text: &str,
    machine_type: StateMachineType,
    accepted: bool,
) -> (Option<StateMachine>, ProblemReport) {
    let mut report = ProblemReport::default();
    let Some(root) = document(text, &mut report) else {
        return (None, report);
    };
    let mut compiler = Compiler::new(machine_type, QueryLanguage::JsonPath, report);
    compiler.accepted = accepted;
    compiler.machine(&root);
    let (machine, flows, mut report) = compiler.finish();
    if !report.has_errors() {
        graph::check(&flows, &mut report);
        scopes::check(&root, &mut report);
    }
    if let Some(machine) = machine.as_ref().filter(|_| !report.has_errors()) {
        lint::check(machine, &flows, &root, &mut report);
    }
    (machine, report)
}

pub(crate) fn missing_targets(text: &str, machine_type: StateMachineType) -> ProblemReport {
    let mut report = ProblemReport::default();
    if let Some(root) = document(text, &mut ProblemReport::default()) {
        let mut compiler = Compiler::new(machine_type, QueryLanguage::JsonPath, ProblemReport::default());
        compiler.machine(&root);
        let (_, flows, _) = compiler.finish();
        flows.iter().for_each(|flow| graph::targets(flow, &mut report));
    }
    report
}

/// Parses the text as a JSON object.
fn document(text: &str, report: &mut ProblemReport) -> Option<Value> {
    let invalid =
        |report: &mut ProblemReport, code: DiagnosticCode, message: String, location: Option<String>| {
            report.add(Severity::Error, code, message, location);
            None
        };
    match Value::parse(text) {
        Ok(value) if !value.is_within_depth(JSON_DEPTH_MAX) => invalid(
            report,
            DiagnosticCode::TooDeeplyNested,
            "The definition is too deeply nested".to_string(),
            None,
        ),
        Ok(value @ Value::Object(_)) => Some(value),
        Ok(_) => not_an_object(report),
        Err(error) if error.kind == JsonErrorKind::Incomplete && text.trim().is_empty() => {
            not_an_object(report)
        }
        Err(error) => {
            let location = error.location(text);
            invalid(report, DiagnosticCode::InvalidJsonDescription, error.message, Some(location))
        }
    }
}

fn not_an_object(report: &mut ProblemReport) -> Option<Value> {
    let message = "Definition must be a valid JSON object";
    report.add(Severity::Error, DiagnosticCode::SchemaValidationFailed, message, None);
    None
}

/// Python's `repr` of a text.
fn python_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::from(quote);
    for letter in text.chars() {
        match letter {
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            letter if letter == quote => quoted.extend(['\\', letter]),
            letter if is_printable(letter) => quoted.push(letter),
            letter if u32::from(letter) < 0x100 => quoted.push_str(&format!("\\x{:02x}", u32::from(letter))),
            letter if u32::from(letter) < 0x1_0000 => {
                quoted.push_str(&format!("\\u{:04x}", u32::from(letter)))
            }
            letter => quoted.push_str(&format!("\\U{:08x}", u32::from(letter))),
        }
    }
    quoted.push(quote);
    quoted
}

/// Whether Python prints the character unescaped: no control characters, no space except U+0020.
fn is_printable(letter: char) -> bool {
    letter == ' '
        || !(letter.is_control()
            || letter.is_whitespace()
            || matches!(letter, '\u{ad}' | '\u{fffe}' | '\u{ffff}' | '\u{e000}'..='\u{f8ff}' | '\u{10_ffff}'))
}

#[cfg(test)]
mod tests;
