//! Runs the tests of the Python and JavaScript SDKs in their own languages.

use std::{path::Path, process::Command};

/// Runs a program with a file of `sdk/tests`; skips a program that is not installed.
fn passes(test: &str, program: &str, arguments: &[&str], file: &str) {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/tests");
    let ended = Command::new(program).args(arguments).arg(tests.join(file)).output();
    match ended {
        Err(error) => eprintln!("SKIPPED {test}: {program}: {error}"),
        Ok(ended) => assert!(
            ended.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&ended.stdout),
            String::from_utf8_lossy(&ended.stderr)
        ),
    }
}

#[test]
fn the_python_sdk_passes_its_tests() {
    passes("the_python_sdk_passes_its_tests", "python3", &["-B"], "python_sdk.py");
}

#[test]
fn the_javascript_sdk_passes_its_tests() {
    passes("the_javascript_sdk_passes_its_tests", "node", &["--test"], "javascript_sdk.mjs");
}
