//! The format of test files for a definition.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use jiff::{Span, SpanRelativeTo, Timestamp};
use mayfly_workflows_language::definition::StateMachineType;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::super::ordered::Ordered;
use super::subject::Subject;
use crate::{
    failure::{ErrorCode, Failure},
    yaml,
};

/// The suffixes of test files.
pub(super) const ENDINGS: [&str; 3] = [".test.yaml", ".test.yml", ".test.json"];
/// The suffixes of a definition beside a test file.
const DEFINITION_ENDINGS: [&str; 6] = [".yaml", ".yml", ".json", ".asl.json", ".asl.yaml", ".asl.yml"];
/// The largest test file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// Mocks by state or by resource.
pub(super) type Mocks = BTreeMap<String, Mock>;

/// One file of cases for one definition.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TestFile {
    /// The path of the definition; by default the file beside the test file.
    pub(super) definition: Option<PathBuf>,
    /// The type of the workflow; standard by default.
    #[serde(rename = "type")]
    pub(super) kind: Option<StateMachineType>,
    /// The start time of executions.
    pub(super) now: Option<Timestamp>,
    /// Mocks for all cases.
    #[serde(default)]
    pub(super) mocks: Mocks,
    /// The files for the item readers of distributed maps, by `bucket/key`.
    #[serde(default)]
    pub(super) files: HashMap<String, Value>,
    /// The cases in order.
    #[serde(default)]
    pub(super) cases: Vec<TestCase>,
}

/// One execution and its expected result.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TestCase {
    pub(super) name: String,
    #[serde(default = "empty")]
    pub(super) input: Ordered,
    #[serde(default)]
    pub(super) now: Option<Timestamp>,
    /// Override mocks of the same name in the file.
    #[serde(default)]
    pub(super) mocks: Mocks,
    #[serde(default)]
    pub(super) expect: Expect,
}

impl Default for TestCase {
    fn default() -> Self {
        Self {
            name: String::new(),
            input: empty(),
            now: None,
            mocks: Mocks::new(),
            expect: Expect::default(),
        }
    }
}

fn empty() -> Ordered {
    Ordered::Object(Vec::new())
}

/// The answers for one state's tasks.
#[derive(Debug)]
pub(super) struct Mock {
    pub(super) answers: Vec<ScriptedAnswer>,
    /// Whether the answers are a list: each is used once unless `times` is set.
    pub(super) listed: bool,
}

impl Mock {
    pub(super) fn always(answer: ScriptedAnswer) -> Self {
        Self { answers: vec![answer], listed: false }
    }
}

impl<'de> Deserialize<'de> for Mock {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        // Parsed generically first, so that an error is about the intended form.
        let written = Ordered::deserialize(deserializer)?;
        let answer = |written: &Ordered| -> Result<ScriptedAnswer, D::Error> {
            if written.as_str() == Some("never") {
                return Ok(ScriptedAnswer { never: true, ..ScriptedAnswer::default() });
            }
            let text = serde_json::to_string(written).map_err(D::Error::custom)?;
            let answer: ScriptedAnswer = serde_json::from_str(&text).map_err(|error| {
                // The position refers to internal text, so it is removed.
                let told = error.to_string();
                D::Error::custom(told.split(" at line ").next().unwrap_or_default())
            })?;
            answer.check().map_err(D::Error::custom)?;
            Ok(answer)
        };
        match &written {
            Ordered::Array(items) if items.is_empty() => {
                Err(D::Error::custom("a list of answers needs at least one"))
            }
            Ordered::Array(items) => {
                Ok(Self { answers: items.iter().map(answer).collect::<Result<_, _>>()?, listed: true })
            }
            one => Ok(Self { answers: vec![answer(one)?], listed: false }),
        }
    }
}

/// One answer of a task's service; a bare `never` stands for `{never: true}`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "never, or an answer such as {result: {ok: true}}")]
pub(super) struct ScriptedAnswer {
    /// The service's result, as seen by the state.
    #[serde(default, deserialize_with = "there")]
    pub(super) result: Option<Ordered>,
    /// The function's payload; `lambda:invoke` wraps it in its envelope.
    #[serde(default, deserialize_with = "there")]
    pub(super) payload: Option<Ordered>,
    pub(super) error: Option<String>,
    /// Text; other values are converted to JSON text.
    pub(super) cause: Option<Value>,
    /// Whether it never answers: only a timeout ends the task.
    #[serde(default)]
    pub(super) never: bool,
    /// The delay of the answer.
    pub(super) after: Option<Time>,
    /// The interval of heartbeats during the delay.
    pub(super) heartbeat: Option<Time>,
    /// The number of calls that it answers.
    pub(super) times: Option<u32>,
    /// Restricts the answer to calls whose arguments include this value.
    pub(super) when: Option<Value>,
}

/// Distinguishes `result: null`, which is a result, from an absent one.
fn there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Ordered>, D::Error> {
    Ordered::deserialize(deserializer).map(Some)
}

impl ScriptedAnswer {
    fn check(&self) -> Result<(), String> {
        let said = [self.result.is_some(), self.payload.is_some(), self.error.is_some(), self.never];
        if said.iter().filter(|said| **said).count() != 1 {
            return Err("an answer says one of result, payload, error, never".into());
        }
        if self.cause.is_some() && self.error.is_none() {
            return Err("a cause belongs to an error".into());
        }
        Ok(())
    }
}

/// A duration: `1h 30m`, `2d`, `PT5S`, or a number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Time(pub(super) Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unclear = || format!("{text:?} is not a duration; write 90s, 1h 30m or 2d");
        let span: Span = text.trim().parse().map_err(|_| unclear())?;
        let length = span.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(|_| unclear())?;
        Duration::try_from(length).map(Self).map_err(|_| unclear())
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        match Value::deserialize(deserializer)? {
            Value::String(text) => text.parse().map_err(D::Error::custom),
            Value::Number(seconds) => {
                let seconds = seconds.as_f64().unwrap_or(-1.0);
                Duration::try_from_secs_f64(seconds).map(Self).map_err(D::Error::custom)
            }
            other => Err(D::Error::custom(format!("{other} is not a duration; write 90s, 1h 30m or 2d"))),
        }
    }
}

/// The expected result. Absent fields are not compared; without a status or an error, success is expected.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Expect {
    pub(super) status: Option<String>,
    #[serde(default, deserialize_with = "value_there")]
    pub(super) output: Option<Value>,
    pub(super) output_includes: Option<Value>,
    pub(super) error: Option<String>,
    pub(super) cause: Option<String>,
    pub(super) cause_includes: Option<String>,
    /// States in the order of their entry.
    pub(super) path: Option<Vec<String>>,
    /// Retries by Task state.
    #[serde(default)]
    pub(super) retries: BTreeMap<String, u32>,
    /// Calls by Task state, including retries.
    #[serde(default)]
    pub(super) calls: BTreeMap<String, u32>,
    /// The arguments of a Task state's last call, or a part of them.
    #[serde(default)]
    pub(super) arguments: BTreeMap<String, Value>,
    pub(super) elapsed: Option<Time>,
    /// Whether nothing is expected, not even success.
    #[serde(skip)]
    pub(super) nothing: bool,
}

fn value_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

const STATUSES: [&str; 4] = ["SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED"];

impl Expect {
    pub(super) fn nothing() -> Self {
        Self { nothing: true, ..Self::default() }
    }

    /// Checks the names of states: an expectation about a misspelt name would never be checked.
    pub(super) fn check_names(&self, subject: &Subject, case: &str) -> anyhow::Result<()> {
        if let Some(status) = self.status.as_deref().filter(|status| !STATUSES.contains(status)) {
            let todo = format!("a status is one of {}", STATUSES.join(", "));
            return Err(Failure::error(
                ErrorCode::InvalidFile,
                format!("case {case:?} expects the status {status}"),
                todo,
            ));
        }
        let path = self.path.iter().flatten();
        for name in path.chain(self.retries.keys()).chain(self.calls.keys()).chain(self.arguments.keys()) {
            if !subject.has_state(name) {
                let what =
                    format!("case {case:?} has an expectation about {name}, but there is no such state");
                return Err(Failure::error(ErrorCode::InvalidFile, what, subject.nearest(name)));
            }
        }
        Ok(())
    }
}

/// Reads a test file.
pub(super) fn read(path: &Path) -> anyhow::Result<TestFile> {
    let source = path.display();
    let unreadable = |error: std::io::Error| {
        Failure::new(ErrorCode::FileError, format!("cannot read {source}: {error}"), "name a test file")
    };
    let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(Failure::error(
            ErrorCode::InvalidFile,
            format!("{source} has {bytes} bytes"),
            "split it: a test file may have 8 MiB",
        ));
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    let todo = "see mayfly workflow test --help for the form of a test file";
    let told = |why: String| {
        mistaken(&text, &source.to_string())
            .unwrap_or_else(|| Failure::new(ErrorCode::InvalidFile, format!("{source}: {why}"), todo))
    };
    let file: TestFile = if path.extension().is_some_and(|ending| ending == "json") {
        serde_json::from_str(&text).map_err(|error| told(error.to_string()))?
    } else {
        yaml::read(&text).map_err(told)?
    };
    if file.cases.is_empty() {
        return Err(Failure::error(ErrorCode::InvalidFile, format!("{source} has no cases"), todo));
    }
    Ok(file)
}

/// The error for a file that is not a test file but belongs to one.
fn mistaken(text: &str, source: &str) -> Option<Failure> {
    let written: Ordered = yaml::read(text).ok()?;
    let is_there = |name: &str| written.get(name).is_some();
    if is_there("apiVersion") && is_there("kind") {
        let todo = format!("apply it: mayfly apply -f {source}");
        return Some(Failure::new(
            ErrorCode::InvalidFile,
            format!("{source} is a manifest, not a test file"),
            todo,
        ));
    }
    is_there("StartAt").then(|| {
        Failure::new(
            ErrorCode::InvalidFile,
            format!("{source} is a definition, not a test file"),
            format!("run it once: mayfly workflow test --definition {source}"),
        )
    })
}

/// The path of the definition under test.
pub(super) fn definition_of(path: &Path, file: &TestFile) -> anyhow::Result<PathBuf> {
    let folder = path.parent().unwrap_or(Path::new(""));
    if let Some(definition) = &file.definition {
        return Ok(folder.join(definition));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = ENDINGS.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(&name);
    let beside = DEFINITION_ENDINGS.iter().map(|ending| folder.join(format!("{stem}{ending}")));
    beside.into_iter().find(|candidate| candidate.is_file()).ok_or_else(|| {
        Failure::error(
            ErrorCode::InvalidFile,
            format!(
                "{} names no definition, and there is no {stem}.yaml or {stem}.json beside it",
                path.display()
            ),
            "say which: definition: FILE",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_people_write_them() {
        let seconds = |text: &str| text.parse::<Time>().map(|time| time.0.as_secs());
        assert_eq!(seconds("90s"), Ok(90));
        assert_eq!(seconds("1h 30m"), Ok(5_400));
        assert_eq!(seconds("365d"), Ok(31_536_000));
        assert_eq!(seconds("PT5S"), Ok(5));
        for text in ["soon", "-5s", "1y", ""] {
            assert!(text.parse::<Time>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_answer_says_one_thing() {
        let mock = |text: &str| serde_json::from_str::<Mock>(text).map_err(|error| error.to_string());
        assert!(mock(r#"{"result": null}"#).is_ok());
        assert_eq!(mock(r#"[{"error": "E"}, {"result": 1}]"#).unwrap().answers.len(), 2);
        for text in [r#""never""#, r#"{"never": true}"#, r#"["never"]"#] {
            assert!(mock(text).unwrap().answers[0].never, "{text}");
        }
        for (text, reason) in [
            (r#""nevr""#, "invalid type: string \"nevr\", expected never, or an answer such as {result"),
            ("{}", "says one of"),
            (r#"{"result": 1, "error": "E"}"#, "says one of"),
            (r#"{"result": 1, "cause": "c"}"#, "belongs to an error"),
            (r#"{"resutl": 1}"#, "unknown field"),
            ("[]", "at least one"),
        ] {
            let error = mock(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
