//! The GPU time of a Job: the sum over its pods, each once, whether the Job counts the pod or not; pure.
//!
//! The node writes a pod's time before the pod's phase is final. A pod that a Job does not need any more keeps
//! [`GPU_TIME_FINALIZER`] in the place of the Job's finalizer until then. The sum is written before a finalizer is
//! removed, and with it the uids of the pods in it that still have one, so that a repeated evaluation adds nothing.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use mayfly_api::{
    gpu_placement::GpuNeeds,
    job_io::{ANNOTATION_GPU_SECONDS, gpu_ms, gpu_seconds},
    k8s::api::{batch::v1::Job, core::v1::Pod},
};
use serde_json::{Value, json};

use super::{
    GPU_TIME_FINALIZER,
    pods::{is_tracked, phase},
};
use crate::metadata::uid;

/// The uids of the pods in the sum that may be evaluated again, separated by commas.
const ANNOTATION_PODS: &str = "mayfly.dev/gpu-seconds-pods";
/// The largest number of these uids; the other pods keep their finalizers until there is room.
const PODS_MAX: usize = 500;

/// The recorded GPU time of a Job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct JobGpuTime {
    ms: u64,
    pods: BTreeSet<String>,
}

/// The actions on the GPU time of a Job.
#[derive(Debug, Default)]
pub(super) struct GpuTimePlan {
    /// The sum with the pods that ended, if it is news.
    record: Option<JobGpuTime>,
    /// Pods whose time is recorded once `record` is written, or will never be: they lose [`GPU_TIME_FINALIZER`].
    pub(super) done: Vec<Arc<Pod>>,
    /// Pods that must be evaluated again.
    later: BTreeSet<String>,
}

impl GpuTimePlan {
    pub(super) fn new(job: &Job, pods: &[Arc<Pod>]) -> Self {
        let old = recorded(job);
        let held: Vec<_> = pods.iter().filter(|pod| is_tracked(pod) || waits(pod)).collect();
        let mut new = JobGpuTime { ms: old.ms, pods: BTreeSet::new() };
        new.pods.extend(held.iter().map(|pod| uid(&***pod).to_owned()).filter(|uid| old.pods.contains(uid)));
        let mut plan = Self::default();
        let mut is_news = false;
        for pod in held {
            let uid = uid(&**pod).to_owned();
            if let Some(ms) = time_of(pod).filter(|_| has_ended(pod) && !new.pods.contains(&uid)) {
                if new.pods.len() >= PODS_MAX {
                    plan.later.insert(uid);
                    continue;
                }
                new.ms = new.ms.saturating_add(ms);
                new.pods.insert(uid);
                is_news = true;
            }
            if waits(pod) && (has_ended(pod) || is_forced(pod)) {
                plan.done.push(pod.clone());
            }
        }
        plan.record = is_news.then_some(new);
        plan
    }

    /// Whether the time of a pod is recorded, or is not known yet.
    pub(super) fn may_release(&self, pod: &Pod) -> bool {
        !self.later.contains(uid(pod))
    }

    /// The Job's annotations with the sum, if it is news.
    pub(super) fn annotations(&self) -> Option<[(&'static str, Value); 2]> {
        let record = self.record.as_ref()?;
        let pods: Vec<_> = record.pods.iter().map(String::as_str).collect();
        let seconds = gpu_seconds(Duration::from_millis(record.ms));
        Some([(ANNOTATION_GPU_SECONDS, json!(seconds)), (ANNOTATION_PODS, json!(pods.join(",")))])
    }
}

/// Whether the time of a pod will be known only later, when the pod has ended.
pub(super) fn is_awaited(pod: &Pod) -> bool {
    let Some(spec) = pod.spec.as_ref() else { return false };
    spec.node_name.is_some() && !GpuNeeds::of(spec).is_empty() && !has_ended(pod) && !is_forced(pod)
}

fn recorded(job: &Job) -> JobGpuTime {
    let annotation = |name: &str| job.metadata.annotations.as_ref()?.get(name).map(String::as_str);
    let pods = annotation(ANNOTATION_PODS).unwrap_or_default().split(',').filter(|uid| !uid.is_empty());
    let ms = annotation(ANNOTATION_GPU_SECONDS).and_then(gpu_ms).unwrap_or(0);
    JobGpuTime { ms, pods: pods.map(str::to_owned).collect() }
}

fn time_of(pod: &Pod) -> Option<u64> {
    gpu_ms(pod.metadata.annotations.as_ref()?.get(ANNOTATION_GPU_SECONDS)?)
}

fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), Some("Succeeded" | "Failed"))
}

/// Whether no node will report the pod's end.
fn is_forced(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some() && pod.metadata.deletion_grace_period_seconds == Some(0)
}

/// Whether a pod is kept for its GPU time only.
pub(super) fn waits(pod: &Pod) -> bool {
    pod.metadata.finalizers.as_ref().is_some_and(|all| all.iter().any(|name| name == GPU_TIME_FINALIZER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{FINALIZER, tests};

    fn job(annotations: Value) -> Job {
        let mut job = tests::job(json!({}), json!({}));
        job.metadata.annotations = serde_json::from_value(annotations).unwrap();
        job
    }

    fn pod(name: &str, phase: &str, finalizer: &str, seconds: Option<&str>) -> Arc<Pod> {
        let mut pod = Pod::clone(&tests::pod_with(name, phase, false, json!({})));
        pod.metadata.finalizers = Some(vec![finalizer.to_owned()]);
        pod.metadata.annotations =
            seconds.map(|seconds| [(ANNOTATION_GPU_SECONDS.to_owned(), seconds.to_owned())].into());
        Arc::new(pod)
    }

    fn written(plan: &GpuTimePlan) -> Option<(String, String)> {
        let [(_, seconds), (_, pods)] = plan.annotations()?;
        Some((seconds.as_str()?.to_owned(), pods.as_str()?.to_owned()))
    }

    /// Retries and pods that do not count are in the sum, each once however often it is evaluated.
    #[test]
    fn each_pod_is_in_the_sum_once() {
        let pods = [
            pod("failed", "Failed", FINALIZER, Some("2.500")),
            pod("again", "Succeeded", FINALIZER, Some("1.000")),
            pod("suspended", "Failed", GPU_TIME_FINALIZER, Some("4.000")),
            pod("stopping", "Running", GPU_TIME_FINALIZER, None),
            pod("runs", "Running", FINALIZER, None),
            pod("plain", "Succeeded", FINALIZER, None),
        ];
        let first = GpuTimePlan::new(&job(json!({})), &pods);
        let done: Vec<_> = first.done.iter().map(|pod| uid(&**pod)).collect();
        assert_eq!(done, ["suspended"]);
        let (seconds, uids) = written(&first).unwrap();
        assert_eq!((seconds.as_str(), uids.as_str()), ("7.500", "again,failed,suspended"));

        let known = json!({ANNOTATION_GPU_SECONDS: seconds, ANNOTATION_PODS: uids});
        let again = GpuTimePlan::new(&job(known.clone()), &pods);
        assert_eq!((written(&again), again.done.len()), (None, 1));

        // Two of them have lost their finalizers, and one more has ended.
        let left = [pods[1].clone(), pod("stopping", "Failed", GPU_TIME_FINALIZER, Some("0.250"))];
        let last = GpuTimePlan::new(&job(known), &left);
        assert_eq!(written(&last), Some(("7.750".into(), "again,stopping".into())));
    }

    #[test]
    fn pods_beyond_the_limit_are_added_later() {
        let pods: Vec<_> = (0..PODS_MAX + 1)
            .map(|at| pod(&format!("p{at}"), "Succeeded", FINALIZER, Some("1.000")))
            .collect();
        let plan = GpuTimePlan::new(&job(json!({})), &pods);
        assert_eq!(written(&plan).unwrap().0, format!("{PODS_MAX}.000"));
        assert_eq!(pods.iter().filter(|pod| !plan.may_release(pod)).count(), 1);
    }

    #[test]
    fn a_pod_with_gpus_is_awaited_until_it_has_ended() {
        let with = |limits: Value, node: Option<&str>, phase: &str| {
            let mut pod = Pod::clone(&tests::pod_with("p", phase, true, json!({})));
            let containers = json!([{"name": "c", "resources": {"limits": limits}}]);
            pod.spec = serde_json::from_value(json!({"containers": containers, "nodeName": node})).unwrap();
            pod
        };
        let gpu = json!({"nvidia.com/gpu": "1"});
        assert!(is_awaited(&with(gpu.clone(), Some("n"), "Running")));
        assert!(!is_awaited(&with(gpu.clone(), Some("n"), "Failed")));
        assert!(!is_awaited(&with(gpu.clone(), None, "Pending")), "no node has it");
        assert!(!is_awaited(&with(json!({"cpu": "1"}), Some("n"), "Running")));
        // A pod of a lost node is deleted by force, and reports nothing.
        let mut lost = with(gpu, Some("n"), "Running");
        lost.metadata.deletion_timestamp =
            Some(mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(tests::now()));
        lost.metadata.deletion_grace_period_seconds = Some(0);
        assert!(!is_awaited(&lost));
        lost.metadata.finalizers = Some(vec![GPU_TIME_FINALIZER.to_owned()]);
        assert_eq!(GpuTimePlan::new(&job(json!({})), &[Arc::new(lost)]).done.len(), 1);
    }
}
