//! Memoised tasks: a Job that has done the same before answers in the place of a new one.
//!
//! "The same" is a digest of the program, its arguments and its inputs, or a key that the author chooses. A Job has it
//! as a label; there is no other record of it, so a result is remembered as long as its Job (`TtlSeconds`), and
//! forgotten by deleting it. An image is known by the name that is written: only a digest in it names one content.

use std::sync::Arc;

use mayfly_api::{
    Digest, ObjectKey,
    k8s::{api::batch::v1::Job, jiff::Timestamp},
};
use mayfly_informer::{Index, Informer};
use serde_json::Value;

/// On a Job: a digest of what it does.
pub(super) const LABEL_MEMO: &str = "mayfly.dev/memo";
/// A label's value has 63 characters at most; these are 128 bits.
const LABEL_CHARS: usize = 32;

/// The value of the label for what a Job does. `content` are the members that decide about the result.
pub(super) fn label(content: &Value) -> String {
    Digest::of(sorted(content).to_string().as_bytes()).hex()[..LABEL_CHARS].to_owned()
}

/// The same value, members in the order of their names.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut members: Vec<_> = map.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            Value::Object(members.into_iter().map(|(name, value)| (name.clone(), sorted(value))).collect())
        }
        Value::Array(items) => items.iter().map(sorted).collect(),
        other => other.clone(),
    }
}

/// The Jobs by what they do.
pub(super) fn index(jobs: &Informer<Job>) -> Index<Job> {
    jobs.index("memo", |job: &Job| {
        let label = job.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_MEMO));
        label.cloned().into_iter().collect()
    })
}

/// The Jobs that may answer, the newest first: complete, in the namespace, and no older than `age_seconds_max`.
pub(super) fn candidates(
    jobs: Vec<Arc<Job>>,
    namespace: &str,
    age_seconds_max: Option<u64>,
    now: Timestamp,
) -> Vec<Arc<Job>> {
    let mut found: Vec<(Timestamp, Arc<Job>)> = jobs
        .into_iter()
        .filter(|job| {
            ObjectKey::of(&**job).namespace == namespace && job.metadata.deletion_timestamp.is_none()
        })
        .filter_map(|job| Some((completed_at(&job)?, job)))
        .filter(|(at, _)| {
            let age = now.duration_since(*at).as_secs();
            age_seconds_max.is_none_or(|max| u64::try_from(age).unwrap_or(0) <= max)
        })
        .collect();
    found.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    found.into_iter().map(|(_, job)| job).collect()
}

/// When a Job was complete; none for one that is not, or has failed.
fn completed_at(job: &Job) -> Option<Timestamp> {
    let status = job.status.as_ref()?;
    let complete =
        status.conditions.iter().flatten().any(|one| one.type_ == "Complete" && one.status == "True");
    status.completion_time.as_ref().filter(|_| complete).map(|time| time.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn content_decides_and_order_does_not() {
        let one = label(&json!({"image": "x", "env": {"a": 1, "b": 2}, "args": ["1", "2"]}));
        assert_eq!(one, label(&json!({"args": ["1", "2"], "env": {"b": 2, "a": 1}, "image": "x"})));
        assert_ne!(one, label(&json!({"args": ["2", "1"], "env": {"b": 2, "a": 1}, "image": "x"})));
        assert_eq!(one.len(), LABEL_CHARS);
    }

    #[test]
    fn the_newest_complete_job_answers() {
        let job = |name: &str, namespace: &str, condition: &str, at: &str| -> Arc<Job> {
            let job = json!({"metadata": {"name": name, "namespace": namespace}, "status": {
                "completionTime": at, "conditions": [{"type": condition, "status": "True"}]}});
            Arc::new(serde_json::from_value(job).unwrap())
        };
        let jobs = vec![
            job("old", "default", "Complete", "2026-11-25T10:00:00Z"),
            job("new", "default", "Complete", "2026-11-25T11:00:00Z"),
            job("failed", "default", "Failed", "2026-11-25T11:30:00Z"),
            job("elsewhere", "shop", "Complete", "2026-11-25T11:30:00Z"),
        ];
        let now = "2026-11-25T12:00:00Z".parse().unwrap();
        let names = |max: Option<u64>| -> Vec<String> {
            let found = candidates(jobs.clone(), "default", max, now);
            found.iter().filter_map(|job| job.metadata.name.clone()).collect()
        };
        assert_eq!(names(None), ["new", "old"]);
        assert_eq!(names(Some(3600)), ["new"]);
        assert_eq!(names(Some(60)), Vec::<String>::new());
    }
}
