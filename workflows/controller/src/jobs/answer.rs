//! The answer of a task at its Job's end; pure.

use std::sync::Arc;

use mayfly_api::{
    ObjectKey,
    job_io::{JobOutcome, Outputs},
    k8s::api::batch::v1::{Job, JobCondition},
};
use mayfly_workflows_engine::engine::FunctionError;
use serde_json::{Value, json};

use super::arguments::Arguments;

/// AWS cuts a cause after 32,768 characters; one that is cut is no JSON any more.
const CAUSE_BYTES_MAX: usize = 32_000;
/// Of stderr, when the cause is too long otherwise.
const STDERR_BYTES_SHORT: usize = 4 << 10;
/// Exit code of a trap, as the wasm host counts.
const EXIT_TRAPPED: i32 = 134;

/// A Job that is complete or has failed, and its pods in the order of their ends.
pub(super) struct EndedJob {
    pub(super) job: Arc<Job>,
    pub(super) pods: Vec<(JobOutcome, Option<Outputs>)>,
}

fn condition<'a>(job: &'a Job, type_: &str) -> Option<&'a JobCondition> {
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True")
}

pub(super) fn is_finished(job: &Job) -> bool {
    condition(job, "Complete").is_some() || condition(job, "Failed").is_some()
}

/// The answer, or the error that one can retry on and catch.
pub(super) fn answer(
    key: &ObjectKey,
    arguments: &Arguments,
    ended: EndedJob,
) -> Result<Value, FunctionError> {
    if let Some(failed) = condition(&ended.job, "Failed") {
        return Err(failure(key, failed, &ended.pods));
    }
    let mut well: Vec<_> = ended.pods.iter().filter(|(outcome, _)| outcome.succeeded).collect();
    let mut answer = json!({"jobName": key.name, "namespace": key.namespace});
    if arguments.single {
        if let Some((outcome, outputs)) = well.last() {
            merge(&mut answer, pod_result(outcome, outputs.as_ref()));
        }
        return Ok(answer);
    }
    well.sort_by_key(|(outcome, _)| outcome.index);
    let status = ended.job.status.as_ref();
    answer["succeeded"] = json!(status.and_then(|status| status.succeeded).unwrap_or(0));
    answer["failed"] = json!(status.and_then(|status| status.failed).unwrap_or(0));
    answer["pods"] = well.iter().map(|(outcome, outputs)| pod_result(outcome, outputs.as_ref())).collect();
    Ok(answer)
}

fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

/// One pod's end and what it left.
fn pod_result(outcome: &JobOutcome, outputs: Option<&Outputs>) -> Value {
    let mut result = json!({"exitCode": outcome.exit_code, "pod": outcome.pod});
    if let Some(index) = outcome.index {
        result["index"] = json!(index);
    }
    let Some(outputs) = outputs else { return result };
    let members = json!({
        "result": outputs.result,
        "parameters": outputs.parameters,
        "artifacts": outputs.artifacts,
        "oomKilled": outputs.oom_killed,
        "wallMs": outputs.wall_ms,
        "startedAt": outputs.started.to_string(),
        "finishedAt": outputs.finished.to_string(),
    });
    merge(&mut result, members);
    if let Some(gpu_ms) = outputs.gpu_ms {
        result["gpuMs"] = json!(gpu_ms);
    }
    if outputs.result_truncated {
        result["resultTruncated"] = json!(true);
    }
    if !outputs.problems.is_empty() {
        result["problems"] = json!(outputs.problems);
    }
    result
}

/// The error's name: what ended the Job, else how its last failed pod ended.
fn name(failed: &JobCondition, last: Option<&JobOutcome>) -> String {
    if failed.reason.as_deref() == Some("DeadlineExceeded") {
        return "Job.DeadlineExceeded".into();
    }
    let Some(last) = last else { return "Job.Failed".into() };
    match (last.reason.as_str(), last.exit_code) {
        ("OOMKilled", _) => "Job.OOMKilled".into(),
        ("Evicted", _) => "Job.OutputTooLarge".into(),
        ("DeadlineExceeded", _) => "Job.DeadlineExceeded".into(),
        ("ArtifactNotFetched", _) => "Job.ArtifactNotFetched".into(),
        ("ArtifactNotSent", _) => "Job.ArtifactNotSent".into(),
        // A program may exit with this code itself; only a trap says where it was.
        (_, Some(EXIT_TRAPPED)) if !last.message.is_empty() => "Job.Trap".into(),
        (_, Some(code)) => format!("Job.ExitCode.{code}"),
        (_, None) => "Job.Failed".into(),
    }
}

fn failure(key: &ObjectKey, failed: &JobCondition, pods: &[(JobOutcome, Option<Outputs>)]) -> FunctionError {
    let last = pods.iter().rev().find(|(outcome, _)| !outcome.succeeded);
    let error_type = name(failed, last.map(|(outcome, _)| outcome));
    let job_says = failed.message.as_deref().unwrap_or_default();
    let mut cause = json!({
        "errorType": error_type,
        "errorMessage": job_says,
        "jobName": key.name,
        "namespace": key.namespace,
        "reason": failed.reason,
    });
    if let Some((outcome, outputs)) = last {
        merge(&mut cause, pod_result(outcome, outputs.as_ref()));
        cause["podReason"] = json!(outcome.reason);
        if !outcome.message.is_empty() {
            cause["errorMessage"] = json!(format!("{}: {job_says}", outcome.message));
        }
        cause["stderr"] = json!(outputs.as_ref().map_or("", |outputs| outputs.stderr.as_str()));
    }
    FunctionError::new(error_type, shortened(cause))
}

/// The cause as JSON text that is not cut: what is longest goes first.
fn shortened(mut cause: Value) -> String {
    for step in ["result", "parameters", "stderr", "artifacts", "problems"] {
        if cause.to_string().len() <= CAUSE_BYTES_MAX {
            break;
        }
        match (step, cause[step].as_str()) {
            ("stderr", Some(text)) => {
                let mut from = text.len().saturating_sub(STDERR_BYTES_SHORT);
                while !text.is_char_boundary(from) {
                    from += 1;
                }
                cause[step] = json!(text[from..]);
            }
            _ => cause[step] = json!("(too long for a cause)"),
        }
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::jiff::Timestamp;

    use super::*;

    fn outcome(succeeded: bool, exit_code: i32, reason: &str, message: &str) -> JobOutcome {
        JobOutcome {
            pod: "p".into(),
            index: None,
            succeeded,
            exit_code: Some(exit_code),
            reason: reason.into(),
            message: message.into(),
            outputs: None,
            gpu_ms: None,
        }
    }

    fn outputs(stderr: &str) -> Outputs {
        Outputs {
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            oom_killed: false,
            started: Timestamp::UNIX_EPOCH,
            finished: Timestamp::UNIX_EPOCH,
            wall_ms: 0,
            gpu_ms: Some(1500),
            result: json!({"n": 1}),
            result_truncated: false,
            stderr: stderr.into(),
            parameters: [("count".to_owned(), json!(3))].into(),
            artifacts: Default::default(),
            problems: vec![],
        }
    }

    fn ended(type_: &str, reason: &str, pods: Vec<(JobOutcome, Option<Outputs>)>) -> EndedJob {
        let job = json!({"metadata": {}, "status": {"succeeded": 1,
            "conditions": [{"type": type_, "status": "True", "reason": reason, "message": "m"}]}});
        EndedJob { job: Arc::new(serde_json::from_value(job).unwrap()), pods }
    }

    fn arguments(extra: Value) -> Arguments {
        let mut arguments = json!({"Image": "x"});
        merge(&mut arguments, extra);
        Arguments::parse(&arguments).unwrap()
    }

    #[test]
    fn errors_have_names_to_catch() {
        let key = ObjectKey::new("ns", "j");
        for (reason, pod, expected) in [
            ("BackoffLimitExceeded", outcome(false, 3, "Error", ""), "Job.ExitCode.3"),
            ("BackoffLimitExceeded", outcome(false, 137, "OOMKilled", "too much"), "Job.OOMKilled"),
            ("BackoffLimitExceeded", outcome(false, 134, "Error", "unreachable"), "Job.Trap"),
            ("BackoffLimitExceeded", outcome(false, 134, "Error", ""), "Job.ExitCode.134"),
            ("BackoffLimitExceeded", outcome(false, 137, "Evicted", "m"), "Job.OutputTooLarge"),
            ("DeadlineExceeded", outcome(false, 137, "Error", ""), "Job.DeadlineExceeded"),
        ] {
            let pods = vec![(pod, Some(outputs("the end of stderr")))];
            let error = answer(&key, &arguments(json!({})), ended("Failed", reason, pods)).unwrap_err();
            assert_eq!(error.error_type, expected);
            let cause: Value = serde_json::from_str(&error.cause).unwrap();
            assert_eq!(
                (&cause["stderr"], &cause["parameters"]["count"]),
                (&json!("the end of stderr"), &json!(3))
            );
        }
        let error =
            answer(&key, &arguments(json!({})), ended("Failed", "BackoffLimitExceeded", vec![])).unwrap_err();
        assert_eq!(error.error_type, "Job.Failed");
    }

    #[test]
    fn a_cause_stays_json_however_much_there_is() {
        let long = "ä".repeat(100_000);
        let pods = vec![(outcome(false, 3, "Error", ""), Some(outputs(&long)))];
        let ended = ended("Failed", "BackoffLimitExceeded", pods);
        let error = answer(&ObjectKey::new("ns", "j"), &arguments(json!({})), ended).unwrap_err();
        assert!(error.cause.len() <= CAUSE_BYTES_MAX && serde_json::from_str::<Value>(&error.cause).is_ok());
    }

    #[test]
    fn one_pod_or_several() {
        let key = ObjectKey::new("ns", "j");
        let pods = || {
            vec![
                (outcome(false, 1, "Error", ""), None),
                (JobOutcome { index: Some(1), ..outcome(true, 0, "Completed", "") }, Some(outputs(""))),
                (JobOutcome { index: Some(0), ..outcome(true, 0, "Completed", "") }, Some(outputs(""))),
            ]
        };
        let one = answer(&key, &arguments(json!({})), ended("Complete", "", pods())).unwrap();
        assert_eq!(
            (&one["result"], &one["exitCode"], &one["jobName"]),
            (&json!({"n": 1}), &json!(0), &json!("j"))
        );
        assert_eq!(one["gpuMs"], 1500);
        let several = arguments(json!({"Completions": 2, "Indexed": true}));
        let several = answer(&key, &several, ended("Complete", "", pods())).unwrap();
        assert_eq!(several["pods"].as_array().unwrap().len(), 2);
        assert_eq!(several["pods"][0]["index"], 0);
    }

    /// Catchers name the errors, so each is documented with its cause and remedy.
    #[test]
    fn every_error_is_documented() {
        let page = include_str!("../../../../docs/errors.md");
        let mut names = std::collections::BTreeSet::new();
        for source in [include_str!("answer.rs"), include_str!("../jobs.rs")] {
            for text in source.split("\"Job.").skip(1) {
                let end = text.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(text.len());
                names.insert(&text[..end]);
            }
        }
        // The literal of the search itself.
        names.remove("");
        assert!(names.contains("OOMKilled") && names.contains("Unavailable"), "{names:?}");
        for name in names {
            assert!(page.contains(&format!("| `Job.{name}")), "docs/errors.md has no row for Job.{name}");
        }
    }
}
