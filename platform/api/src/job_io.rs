//! The inputs and outputs of jobs: one contract for every runtime.
//!
//! **Inputs.** A pod with the annotation [`ANNOTATION_INPUTS`] takes part. The annotation's value is an [`Inputs`] as
//! JSON (`{}` is enough), or the digest of one in the artifact store. Each parameter and each artifact is a file
//! `/mayfly/in/<name>`: a text parameter as it is, any other as JSON; an artifact that is a directory (stored as a
//! tar) is unpacked. All parameters together are one JSON object on stdin. The files are read-only. An artifact may
//! also come from elsewhere, and outputs may be sent elsewhere ([`InputArtifact`], [`ArtifactTarget`]).
//!
//! **Outputs.** A file `/mayfly/out/<name>` is a parameter, a file or folder `/mayfly/out/artifacts/<name>` an
//! artifact; stdout is the result. Text that is valid JSON is read as JSON. The node collects the outputs from the
//! pod's own folder after the container's end of any kind: exit, trap, out of memory, kill.
//!
//! The collected outputs are an [`Outputs`] in the artifact store; [`ANNOTATION_OUTPUTS`] on the pod has its digest
//! before the pod's phase becomes final. The job controller copies the outcomes of a job's pods to
//! [`ANNOTATION_OUTCOMES`] of the Job before it counts the pods, so that they outlive the pods.
//!
//! Artifacts are content-addressed. A folder is stored as a tar with sorted entries, without times and owners: equal
//! folders have equal digests. Symbolic and hard links in it are left out.

mod sources;

use std::collections::{BTreeMap, HashSet};

pub use sources::{
    ArtifactSource, ArtifactTarget, GitLocation, HttpLocation, InputArtifact, S3Location,
    TRANSFER_SECONDS_DEFAULT, TRANSFER_SECONDS_MAX,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Digest, k8s::jiff::Timestamp};

/// On a pod (or a pod template): the inputs of the job, an [`Inputs`] or its digest.
pub const ANNOTATION_INPUTS: &str = "mayfly.dev/inputs";
/// On a pod: a [`Collected`], written by the node.
pub const ANNOTATION_OUTPUTS: &str = "mayfly.dev/outputs";
/// On a pod that had GPUs: the GPU time that it used on all of them together, in seconds with three decimals. Written by
/// the node before the pod's phase becomes final. On a Job: the sum over its pods, also those that failed, were replaced
/// or were deleted when the Job was suspended; written by the job controller as pods end.
pub const ANNOTATION_GPU_SECONDS: &str = "mayfly.dev/gpu-seconds";
/// On a Job: a list of [`JobOutcome`], written by the job controller.
pub const ANNOTATION_OUTCOMES: &str = "mayfly.dev/outcomes";

/// The folder of a container's inputs.
pub const FOLDER_IN: &str = "/mayfly/in";
/// The folder of a container's outputs.
pub const FOLDER_OUT: &str = "/mayfly/out";
/// The folder of artifacts in [`FOLDER_OUT`].
pub const ARTIFACTS: &str = "artifacts";

/// The largest parameter, in bytes.
pub const PARAMETER_BYTES_MAX: u64 = 1 << 20;
/// The maximum number of parameters, and of artifacts, of one job.
pub const NAMES_MAX: usize = 256;
/// The end of stdout that is kept as the result, in bytes.
pub const RESULT_BYTES_MAX: usize = 256 << 10;
/// The end of stderr that is kept, in bytes.
pub const STDERR_BYTES_MAX: usize = 16 << 10;
/// The number of first bytes that show whether a content is an [`Outputs`].
pub const OUTPUTS_BYTES: usize = 64;
/// Outcomes that a Job's annotation holds; of further pods only the counts are known.
pub const OUTCOMES_MAX: usize = 500;

/// The inputs of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Inputs {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, Value>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub artifacts: BTreeMap<String, InputArtifact>,
    /// The destinations of output artifacts, by their names. Used when the program has ended with code 0.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub targets: BTreeMap<String, ArtifactTarget>,
}

/// A file or a folder in the artifact store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ArtifactRef {
    pub digest: Digest,
    /// A folder, kept as a tar.
    #[serde(default, skip_serializing_if = "is_false")]
    pub directory: bool,
    /// The content's length. Informational: ignored in inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// The location of a pod's inputs.
#[derive(Clone, Debug, PartialEq)]
pub enum InputsSource {
    Inline(Box<Inputs>),
    Stored(Digest),
}

impl InputsSource {
    /// Reads an annotation's value.
    ///
    /// # Errors
    /// The problem of the value, as text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Ok(digest) = text.trim().parse() {
            return Ok(Self::Stored(digest));
        }
        Ok(Self::Inline(Box::new(Inputs::parse(text.as_bytes())?)))
    }
}

impl Inputs {
    /// Reads the JSON of inputs, and checks their names.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let inputs: Self = serde_json::from_slice(json).map_err(|error| {
            format!("expected {{\"parameters\": {{…}}, \"artifacts\": {{…}}}} or a digest: {error}")
        })?;
        inputs.check()?;
        Ok(inputs)
    }

    /// Names become files of one folder, so they are file names and differ. Each artifact has one source.
    pub fn check(&self) -> Result<(), String> {
        let mut seen = HashSet::new();
        for name in self.parameters.keys().chain(self.artifacts.keys()) {
            if !is_name(name) {
                return Err(format!(
                    "{name:?} is not an input's name: letters, digits, '-', '_' and '.', without a '.' in front"
                ));
            }
            if !seen.insert(name) {
                return Err(format!("{name:?} names a parameter and an artifact"));
            }
        }
        if [self.parameters.len(), self.artifacts.len(), self.targets.len()]
            .iter()
            .any(|count| *count > NAMES_MAX)
        {
            return Err(format!("there are more than {NAMES_MAX} parameters, artifacts or targets"));
        }
        for (name, artifact) in &self.artifacts {
            artifact.source().map_err(|why| format!("artifact {name:?}: {why}"))?;
        }
        for (name, target) in &self.targets {
            if !is_name(name) {
                return Err(format!("target {name:?}: not an output's name"));
            }
            target.check().map_err(|why| format!("target {name:?}: {why}"))?;
        }
        let large =
            self.parameters.iter().find(|(_, value)| text_of(value).len() as u64 > PARAMETER_BYTES_MAX);
        match large {
            Some((name, _)) => Err(format!(
                "parameter {name:?} has more than {PARAMETER_BYTES_MAX} bytes: make an artifact of it"
            )),
            None => Ok(()),
        }
    }
}

/// Whether a text is a valid name of a parameter or an artifact.
pub fn is_name(name: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(good)
}

/// The content of a parameter's file.
pub fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The content of a file, or stdout, as a parameter: JSON if it is valid, else text without its last line end.
pub fn value_of(bytes: &[u8]) -> Value {
    if let Ok(value) = serde_json::from_slice(bytes) {
        return value;
    }
    let text = String::from_utf8_lossy(bytes);
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Value::String(text.strip_suffix('\r').unwrap_or(text).to_owned())
}

/// The result of one attempt of a job, and its outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outputs {
    pub exit_code: i32,
    /// `Completed`, `Error`, `OOMKilled`, `DeadlineExceeded`, …
    pub reason: String,
    /// A message for users, such as the trap.
    pub message: String,
    pub oom_killed: bool,
    pub started: Timestamp,
    pub finished: Timestamp,
    pub wall_ms: i64,
    /// The time for which the pod's containers used GPUs, summed over the GPUs: of shares the time of their kernels, of
    /// whole GPUs the time in which they were busy. Missing without GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_ms: Option<u64>,
    /// Stdout.
    pub result: Value,
    /// Whether stdout was longer, so that its beginning is missing.
    pub result_truncated: bool,
    /// The end of stderr.
    pub stderr: String,
    pub parameters: BTreeMap<String, Value>,
    pub artifacts: BTreeMap<String, ArtifactRef>,
    /// Outputs that were not collected, with the reasons.
    pub problems: Vec<String>,
}

/// Whether a content is an [`Outputs`] as a node writes it, by its first bytes ([`OUTPUTS_BYTES`] are enough).
pub fn is_outputs(beginning: &[u8]) -> bool {
    let Some(code) = beginning.strip_prefix(b"{\"exitCode\":") else { return false };
    let digits = code.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'-').count();
    digits > 0 && code[digits..].starts_with(b",\"reason\":\"")
}

/// The location of a pod's outputs. It names the artifacts as well, so that they count as used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// An [`Outputs`].
    pub document: Digest,
    pub artifacts: Vec<Digest>,
    /// The error of an artifact that did not reach its target; the pod fails with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsent: Option<String>,
}

/// The result of one pod of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobOutcome {
    pub pod: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<i32>,
    pub succeeded: bool,
    /// The exit code of the first container that failed, else of the first container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    pub reason: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outputs: Option<Collected>,
    /// The GPU time that the pod used; `None`: it had no GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_ms: Option<u64>,
}

/// The value of [`ANNOTATION_GPU_SECONDS`].
pub fn gpu_seconds(time: std::time::Duration) -> String {
    format!("{:.3}", time.as_secs_f64())
}

/// The milliseconds in a value of [`ANNOTATION_GPU_SECONDS`]; `None`: it has another form.
pub fn gpu_ms(seconds: &str) -> Option<u64> {
    let (seconds, thousandths) = seconds.split_once('.')?;
    let thousandths = Some(thousandths).filter(|digits| digits.len() == 3)?;
    seconds.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(thousandths.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn gpu_time_is_written_in_seconds() {
        for ms in [0, 7, 1500, 61_050, 86_400_000] {
            assert_eq!(gpu_ms(&gpu_seconds(std::time::Duration::from_millis(ms))), Some(ms));
        }
        assert_eq!(gpu_seconds(std::time::Duration::from_millis(61_050)), "61.050");
        for other in ["", "5", "5.1", "-1.000", "1.00x", "1.0000"] {
            assert_eq!(gpu_ms(other), None, "{other}");
        }
    }

    #[test]
    fn inputs_are_checked() {
        let digest = Digest::of(b"x");
        let good = json!({"parameters": {"n": 1, "name": "Ada"}, "artifacts": {"data": {"digest": digest}}});
        let Ok(InputsSource::Inline(inputs)) = InputsSource::parse(&good.to_string()) else { panic!() };
        assert!(!inputs.artifacts["data"].directory && inputs.parameters["n"] == 1);
        assert_eq!(InputsSource::parse(&digest.to_string()), Ok(InputsSource::Stored(digest)));
        for (bad, why) in [
            (json!({"parameters": {"../x": 1}}), "not an input's name"),
            (json!({"parameters": {".x": 1}}), "not an input's name"),
            (
                json!({"parameters": {"data": 1}, "artifacts": {"data": {"digest": digest}}}),
                "and an artifact",
            ),
            (json!({"artifacts": {"data": {"digest": "x"}}}), "not a digest"),
            (json!({"artifacts": {"data": {}}}), "artifact \"data\": one of digest"),
            (json!({"targets": {"data": {}}}), "target \"data\": one of http"),
            (json!({"targets": {"../x": {"http": {"url": "https://example.com"}}}}), "not an output's name"),
            (json!({"paramters": {}}), "unknown field"),
            (json!({"parameters": {"x": "y".repeat(1 << 21)}}), "make an artifact"),
        ] {
            let error = InputsSource::parse(&bad.to_string()).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn outputs_are_told_by_their_beginning() {
        let outputs = |exit_code| Outputs {
            exit_code,
            reason: "Completed".into(),
            message: String::new(),
            oom_killed: false,
            started: Timestamp::UNIX_EPOCH,
            finished: Timestamp::UNIX_EPOCH,
            wall_ms: 0,
            gpu_ms: None,
            result: Value::Null,
            result_truncated: false,
            stderr: String::new(),
            parameters: BTreeMap::new(),
            artifacts: BTreeMap::new(),
            problems: Vec::new(),
        };
        for code in [0, 137, i32::MIN] {
            let text = serde_json::to_vec(&outputs(code)).unwrap();
            assert!(is_outputs(&text[..OUTPUTS_BYTES]), "{}", String::from_utf8_lossy(&text));
        }
        for other in
            ["", "{\"exitCode\":", "{\"exitCode\":1}", "{\"exitCode\":\"x\",\"reason\":\"y\"}", "a,b\n"]
        {
            assert!(!is_outputs(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn text_that_is_json_counts_as_json() {
        assert_eq!(value_of(b"{\"a\": 1}\n"), json!({"a": 1}));
        assert_eq!(value_of(b"42"), json!(42));
        assert_eq!(value_of(b"hello\n"), json!("hello"));
        assert_eq!(value_of(b""), json!(""));
        assert_eq!(value_of(b"a\xff"), json!("a\u{fffd}"));
        assert_eq!((text_of(&json!("a b")), text_of(&json!([1]))), ("a b".into(), "[1]".into()));
    }
}
