//! The definitions of the asl-validator project: valid ones are accepted, invalid ones rejected. Skipped with a message
//! if there is no test data.

mod common;

use std::path::PathBuf;

use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::parse::compile;

use common::testdata;

/// Definitions that asl-validator rejects because of missing blanks inside `{% … %}`. The States Language only forbids
/// blanks outside the delimiters, and definitions without inner blanks are deployed on AWS.
const VALID_ON_AWS: [&str; 2] =
    ["invalid-jsonata-surround-syntax-no-spaces.json", "invalid-json-surround-syntax-extra-spaces.json"];

#[test]
fn valid_definitions_are_accepted_and_invalid_ones_refused() {
    let Some(folder) = testdata("asl-validator") else { return };
    let mut files: Vec<PathBuf> =
        folder.read_dir().expect("a readable folder").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    let (mut valid, mut invalid) = ((0, 0), (0, 0));
    let mut wrong = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|ending| ending == "json")) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let text = std::fs::read_to_string(file).expect("a readable file");
        let compiled = compile(&text, StateMachineType::Standard);
        let (count, right) = match name.starts_with("valid-") || VALID_ON_AWS.contains(&&*name) {
            true => (&mut valid, compiled.is_ok()),
            false => (&mut invalid, compiled.is_err()),
        };
        count.1 += 1;
        match (right, compiled) {
            (true, _) => count.0 += 1,
            (false, Ok(_)) => wrong.push(format!("{name}: accepted")),
            (false, Err(rejection)) => wrong.push(format!("{name}: {rejection}")),
        }
    }
    eprintln!(
        "asl-validator: {} of {} valid accepted, {} of {} invalid refused",
        valid.0, valid.1, invalid.0, invalid.1
    );
    assert!(valid.1 > 0 && invalid.1 > 0, "no definitions in {}", folder.display());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
