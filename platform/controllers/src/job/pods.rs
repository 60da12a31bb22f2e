//! Properties of one pod of a Job: pure.

use mayfly_api::{
    job_io::{ANNOTATION_GPU_SECONDS, ANNOTATION_INPUTS, ANNOTATION_OUTPUTS, JobOutcome, gpu_ms},
    k8s::{
        api::{
            batch::v1::JobSpec,
            core::v1::{ContainerStateTerminated, Pod},
        },
        jiff::{SignedDuration, Timestamp},
    },
};

use super::{COMPLETION_INDEX, FINALIZER};

/// The state of a pod in the counts of its Job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodCountState {
    Active,
    /// Its deletion was requested, and it counts once it has ended.
    Terminating,
    Succeeded,
    Failed,
}

pub(super) fn count_state(spec: &JobSpec, pod: &Pod) -> PodCountState {
    match phase(pod) {
        Some("Succeeded") => PodCountState::Succeeded,
        Some("Failed") => PodCountState::Failed,
        _ if is_terminating(pod) && (only_replaces_failed(spec) || has_inputs(spec)) => {
            PodCountState::Terminating
        }
        // As upstream, a deleted pod has failed, whatever its containers do until they are killed.
        _ if pod.metadata.deletion_timestamp.is_some() => PodCountState::Failed,
        _ => PodCountState::Active,
    }
}

pub(super) fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// Whether the pod's deletion was requested and it has not ended.
pub(super) fn is_terminating(pod: &Pod) -> bool {
    // Without grace, no kubelet will stop it: it never ran, its node is lost, or its deletion was forced.
    let is_forced = pod.metadata.deletion_grace_period_seconds == Some(0);
    let has_ended = matches!(phase(pod), Some("Succeeded" | "Failed"));
    pod.metadata.deletion_timestamp.is_some() && !is_forced && !has_ended
}

/// Whether a pod is replaced only once it has ended, not at its deletion.
pub(super) fn only_replaces_failed(spec: &JobSpec) -> bool {
    spec.pod_replacement_policy.as_deref() == Some("Failed") || spec.pod_failure_policy.is_some()
}

/// Whether the Job's pods get files, and the Job records their results ([`mayfly_api::job_io`]).
pub(super) fn has_inputs(spec: &JobSpec) -> bool {
    let metadata = spec.template.metadata.as_ref();
    metadata.and_then(|metadata| metadata.annotations.as_ref()?.get(ANNOTATION_INPUTS)).is_some()
}

/// Whether the pod is not counted yet.
pub(super) fn is_tracked(pod: &Pod) -> bool {
    pod.metadata.finalizers.as_ref().is_some_and(|finalizers| finalizers.iter().any(|name| name == FINALIZER))
}

pub(super) fn index(pod: &Pod) -> Option<i32> {
    pod.metadata.annotations.as_ref()?.get(COMPLETION_INDEX)?.parse().ok()
}

/// The pod's containers that have ended, with their names.
pub(super) fn ends(pod: &Pod) -> impl Iterator<Item = (&str, &ContainerStateTerminated)> {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.filter_map(|status| Some((status.name.as_str(), status.state.as_ref()?.terminated.as_ref()?)))
}

/// The pod's init containers that have ended, with their names.
pub(super) fn init_ends(pod: &Pod) -> impl Iterator<Item = (&str, &ContainerStateTerminated)> {
    let statuses = pod.status.iter().flat_map(|status| status.init_container_statuses.iter().flatten());
    statuses.filter_map(|status| Some((status.name.as_str(), status.state.as_ref()?.terminated.as_ref()?)))
}

/// The time of its end: that of its last container, else of the request to delete it, else of its creation.
pub(super) fn finished_at(pod: &Pod) -> Option<Timestamp> {
    let ended = ends(pod).filter_map(|(_, end)| Some(end.finished_at.as_ref()?.0)).max();
    let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
    let deleted = pod.metadata.deletion_timestamp.as_ref().and_then(|time| time.0.checked_sub(grace).ok());
    ended.or(deleted).or(pod.metadata.creation_timestamp.as_ref().map(|time| time.0))
}

/// The reason and message for which a pod's container cannot start without intervention, as `kubectl get pods` shows
/// them.
pub(super) fn stuck(pod: &Pod) -> Option<(&str, &str)> {
    let status = pod.status.as_ref()?;
    let statuses = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    statuses.into_iter().find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().filter(|reason| STUCK.contains(reason))?;
        Some((reason, waiting.message.as_deref().unwrap_or_default()))
    })
}

/// Waiting reasons that do not resolve without intervention. `ErrImagePull` is the first attempt only.
const STUCK: [&str; 4] =
    ["ImagePullBackOff", "InvalidImageName", "CreateContainerError", "CreateContainerConfigError"];

/// Restarts of its containers and init containers within the pod.
pub(super) fn restarts(pod: &Pod) -> i32 {
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten());
    statuses.map(|status| status.restart_count).fold(0, i32::saturating_add)
}

/// The result of a pod that has ended.
pub(super) fn outcome(pod: &Pod) -> JobOutcome {
    let status = pod.status.clone().unwrap_or_default();
    let end = ends(pod).find(|(_, end)| end.exit_code != 0).or_else(|| ends(pod).next()).map(|(_, end)| end);
    let of_container = |field: fn(&ContainerStateTerminated) -> Option<String>| end.and_then(field);
    let annotation = |name: &str| pod.metadata.annotations.as_ref().and_then(|all| all.get(name));
    JobOutcome {
        pod: pod.metadata.name.clone().unwrap_or_default(),
        index: index(pod),
        succeeded: phase(pod) == Some("Succeeded"),
        exit_code: end.map(|end| end.exit_code),
        // The pod's own reason (a deadline, an eviction) takes precedence.
        reason: status.reason.or_else(|| of_container(|end| end.reason.clone())).unwrap_or_default(),
        message: status.message.or_else(|| of_container(|end| end.message.clone())).unwrap_or_default(),
        outputs: annotation(ANNOTATION_OUTPUTS).and_then(|text| serde_json::from_str(text).ok()),
        gpu_ms: annotation(ANNOTATION_GPU_SECONDS).and_then(|seconds| gpu_ms(seconds)),
    }
}
