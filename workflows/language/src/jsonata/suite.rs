//! Runs the official JSONata test suite through the same compilation, guards and functions as a workflow's expressions.
//!
//! The suite is test data and not part of the project: `MAYFLY_TESTDATA`, or `../shared/testdata` next to the
//! repository. Without it the test is skipped with a message.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use jsonata_core::evaluator::EvaluatorOptions;
use jsonata_core::value::JValue;

use super::evaluate::Data;
use super::{JsonataProgram, convert};
use crate::dataflow::Ambient;
use crate::value::Value;

/// The number of cases that `jsonata-core` itself passes; Mayfly's guards and functions must not break any.
const PASSES_AT_LEAST: usize = 1668;

fn folder() -> PathBuf {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/testdata");
    std::env::var_os("MAYFLY_TESTDATA").map_or(beside, PathBuf::from).join("jsonata")
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Value::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every case with its name.
fn cases(folder: &Path) -> Vec<(String, PathBuf, Value)> {
    let mut files: Vec<PathBuf> = Vec::new();
    for group in std::fs::read_dir(folder.join("groups")).expect("groups").flatten() {
        if group.path().is_dir() {
            files.extend(std::fs::read_dir(group.path()).expect("a group").flatten().map(|file| file.path()));
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let name = file.strip_prefix(folder.join("groups")).unwrap_or(&file).display().to_string();
        match read(&file) {
            Value::Array(items) => {
                for (at, case) in items.iter().enumerate() {
                    cases.push((format!("{name}[{at}]"), file.clone(), case.clone()));
                }
            }
            case => cases.push((name, file, case)),
        }
    }
    cases
}

/// The difference between actual and expected result, if any.
fn check(folder: &Path, file: &Path, case: &Value) -> Result<(), String> {
    let source = match case.get("expr").and_then(Value::as_str) {
        Some(source) => source.to_owned(),
        None => {
            let name = case.get("expr-file").and_then(Value::as_str).expect("an expression");
            std::fs::read_to_string(file.with_file_name(name)).expect("the expression's file")
        }
    };
    let root = match case.get("dataset").and_then(Value::as_str) {
        Some(name) => convert::to_jsonata(&read(&folder.join("datasets").join(format!("{name}.json")))),
        None => case.get("data").map_or(JValue::Undefined, convert::to_jsonata),
    };
    let outcome = JsonataProgram::compile(&source).and_then(|mut program| {
        // AWS forbids it; it stays allowed here, so that its cases run.
        program.uses.functions.remove("eval");
        let bindings = case.get("bindings").and_then(Value::as_object);
        let variables = bindings
            .into_iter()
            .flat_map(|map| map.iter().map(|(name, value)| (name.to_string(), value.clone())));
        let data = Data {
            variables: variables.collect(),
            states: None,
            ambient: Ambient::new(jiff::Timestamp::now().as_millisecond(), 7),
        };
        let timeout_ms = case.get("timelimit").and_then(Value::as_f64).map_or(20_000, |_| 2_000);
        let bounds = EvaluatorOptions { timeout_ms: Some(timeout_ms), ..EvaluatorOptions::default() };
        data.evaluate(&program, &root, bounds)
    });
    let code = case.get("code").or_else(|| case.get("error")?.get("code")).and_then(Value::as_str);
    match (outcome, code) {
        (Err(error), Some(code)) if error.starts_with(code) => Ok(()),
        (Err(error), Some(code)) => Err(format!("wanted {code}, failed with {error}")),
        (Ok(value), Some(code)) => Err(format!("wanted {code}, gave {value:?}")),
        (Err(error), None) => Err(format!("failed with {error}")),
        (Ok(value), None) => match (value, case.get("result")) {
            (None, None) => Ok(()),
            (Some(value), Some(expected)) if value == *expected => Ok(()),
            // The suite's results are JSON: an undefined result is either null or omitted.
            (None, Some(Value::Null)) => Ok(()),
            (value, expected) => Err(format!("wanted {expected:?}, gave {value:?}")),
        },
    }
}

#[test]
fn official_suite() {
    let folder = folder();
    if !folder.is_dir() {
        eprintln!("skipped: no {}", folder.display());
        return;
    }
    let cases = cases(&folder);
    let mut failures = Vec::new();
    let mut changed = BTreeSet::new();
    for (name, file, case) in &cases {
        let source = case.get("expr").and_then(Value::as_str).unwrap_or_default();
        if source.contains("$eval(") {
            changed.insert(name.clone());
        }
        if let Err(what) = check(&folder, file, case) {
            failures.push(format!("{name}: {what}: {source}"));
        }
    }
    let passes = cases.len() - failures.len();
    eprintln!("JSONata suite: {passes} of {} pass", cases.len());
    failures.iter().for_each(|failure| eprintln!("  {failure}"));
    eprintln!("AWS has no $eval; it is in {} of the cases: {changed:?}", changed.len());
    assert!(passes >= PASSES_AT_LEAST, "{passes} of {} pass", cases.len());
}
