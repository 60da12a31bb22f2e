//! The result of a test run, as text or as data.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::check::{Difference, seconds};
use super::coverage::Coverage;
use super::run::CaseResult;

/// The length limit of a value, in characters.
const VALUE_LETTERS_MAX: usize = 400;

/// The report about all files.
#[derive(Default)]
pub(super) struct TestReport {
    files: Vec<FileReport>,
}

/// The report about one file.
pub(super) struct FileReport {
    file: String,
    pub(super) definition: String,
    /// The reason why its cases could not be run.
    pub(super) problem: Option<String>,
    pub(super) cases: Vec<CaseReport>,
    pub(super) coverage: Option<Coverage>,
}

/// The report about one case.
pub(super) struct CaseReport {
    name: String,
    pub(super) ran: CaseResult,
    differences: Vec<Difference>,
}

impl TestReport {
    pub(super) fn add(&mut self, file: FileReport) {
        self.files.push(file);
    }

    fn cases(&self) -> impl Iterator<Item = &CaseReport> {
        self.files.iter().flat_map(|file| &file.cases)
    }

    /// The number of failed cases, and of files that could not be run.
    pub(super) fn failed(&self) -> usize {
        let broken = self.files.iter().filter(|file| file.problem.is_some()).count();
        broken + self.cases().filter(|case| !case.passed()).count()
    }

    pub(super) fn to_json(&self) -> Value {
        let passed = self.cases().filter(|case| case.passed()).count();
        json!({
            "passed": passed, "failed": self.failed(),
            "files": self.files.iter().map(FileReport::to_json).collect::<Vec<_>>(),
        })
    }

    /// A line `passed file: case` for each case.
    pub(super) fn names(&self) -> String {
        let mut text = String::new();
        for file in &self.files {
            for case in &file.cases {
                let word = if case.passed() { "passed" } else { "failed" };
                let _ = writeln!(text, "{word} {}: {}", file.file, case.name);
            }
        }
        text
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for file in &self.files {
            file.write(&mut text);
        }
        let passed = self.cases().filter(|case| case.passed()).count();
        let _ = writeln!(text, "{passed} passed, {} failed", self.failed());
        text
    }
}

impl FileReport {
    pub(super) fn new(file: String) -> Self {
        Self { file, definition: String::new(), problem: None, cases: Vec::new(), coverage: None }
    }

    fn to_json(&self) -> Value {
        json!({
            "file": self.file, "definition": self.definition, "problem": self.problem,
            "cases": self.cases.iter().map(CaseReport::to_json).collect::<Vec<_>>(),
            "coverage": self.coverage.as_ref().map(Coverage::to_json),
        })
    }

    fn write(&self, text: &mut String) {
        let _ = writeln!(text, "{}", self.file);
        if let Some(problem) = &self.problem {
            let _ = writeln!(text, "  FAIL  {}", problem.replace('\n', "\n        "));
        }
        for case in &self.cases {
            case.write(text);
        }
        for line in self.coverage.iter().flat_map(Coverage::lines) {
            let _ = writeln!(text, "  reached: {line}");
        }
        text.push('\n');
    }
}

impl CaseReport {
    pub(super) fn new(name: String, ran: CaseResult, differences: Vec<Difference>) -> Self {
        Self { name, ran, differences }
    }

    fn passed(&self) -> bool {
        self.ran.problem.is_none() && self.differences.is_empty()
    }

    pub(super) fn to_json(&self) -> Value {
        let ran = &self.ran;
        json!({
            "name": self.name, "passed": self.passed(), "status": ran.status, "output": ran.output,
            "error": ran.error, "cause": ran.cause, "path": ran.path, "retries": ran.retries, "calls": ran.calls,
            "elapsedSeconds": ran.elapsed.as_secs_f64(), "problem": ran.problem, "differences": self.differences,
        })
    }

    fn write(&self, text: &mut String) {
        let ran = &self.ran;
        let retries: u32 = ran.retries.values().sum();
        let retried = match retries {
            0 => String::new(),
            1 => ", 1 retry".to_owned(),
            more => format!(", {more} retries"),
        };
        let word = if self.passed() { "ok  " } else { "FAIL" };
        let states = if ran.path.len() == 1 { "state" } else { "states" };
        let count = ran.path.len();
        let _ = writeln!(
            text,
            "  {word}  {} ({count} {states}{retried}, {} elapsed)",
            self.name,
            seconds(ran.elapsed)
        );
        if let Some(problem) = &ran.problem {
            let _ = writeln!(text, "        {problem}");
            return;
        }
        for difference in &self.differences {
            difference.write(text);
        }
        let expected_end = !self.differences.iter().any(|difference| difference.what == "status");
        if let Some(error) = ran.error.as_ref().filter(|_| !expected_end) {
            let cause = ran.cause.as_deref().unwrap_or_default();
            let _ = writeln!(text, "        it failed with {error}: {}", cut(cause));
        }
        if !self.passed() {
            let _ = writeln!(text, "        states: {}", shown_path(&ran.path));
        }
    }

    /// The result of a run without a test file.
    pub(super) fn end(&self) -> String {
        let ran = &self.ran;
        let mut text = String::new();
        if let Some(problem) = &ran.problem {
            let _ = writeln!(text, "{problem}");
        }
        let _ = writeln!(text, "{} after {} of the virtual clock", ran.status, seconds(ran.elapsed));
        let _ = writeln!(text, "states: {}", shown_path(&ran.path));
        for (state, retries) in &ran.retries {
            let _ = writeln!(text, "retries: {state} {retries}");
        }
        if let Some(error) = &ran.error {
            let _ = writeln!(text, "error: {error}: {}", ran.cause.as_deref().unwrap_or_default());
        }
        if let Some(output) = &ran.output {
            let _ = writeln!(text, "output: {}", serde_json::to_string_pretty(output).unwrap_or_default());
        }
        text
    }
}

impl Difference {
    fn write(&self, text: &mut String) {
        let (expected, got) = (value_text(&self.expected), value_text(&self.got));
        let _ = writeln!(text, "        {}", self.what);
        let _ = writeln!(text, "          - expected {expected}\n          +      got {got}");
    }
}

/// The number of states shown at the beginning and at the end of a path; those in between are counted.
const PATH_SHOWN: usize = 20;

/// The states in the order of entry.
fn shown_path(path: &[String]) -> String {
    if path.len() <= 2 * PATH_SHOWN {
        return path.join(" → ");
    }
    let (first, last) = (&path[..PATH_SHOWN], &path[path.len() - PATH_SHOWN..]);
    let between = path.len() - 2 * PATH_SHOWN;
    format!("{} → … {between} more … → {}", first.join(" → "), last.join(" → "))
}

/// Arrays of strings are shown as paths, other values as JSON.
fn value_text(value: &Value) -> String {
    match value {
        Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_string) => {
            items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" → ")
        }
        Value::String(text) => cut(text),
        Value::Null => "nothing".into(),
        other => cut(&other.to_string()),
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(VALUE_LETTERS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
