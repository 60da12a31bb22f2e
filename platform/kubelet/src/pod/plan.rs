//! What to do next for a pod: its object, what is known here, and the time in; one step out. Pure.

use std::time::Duration;

use mayfly_api::k8s::{
    api::core::v1::{Container, Pod, PodSpec},
    jiff::Timestamp,
};

use super::local::{LocalPod, Now};
use crate::job;

/// The next step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    CreateSandbox,
    /// Start this container's current attempt.
    Start(Box<Container>),
    /// An ended container starts again after a pause.
    Restart(String),
    /// End what runs and remove the sandbox; the pod's phase is final.
    Finish,
    /// All has ended: take in what the job left.
    Collect,
    /// The pod is over for a reason of its own.
    End {
        reason: &'static str,
        message: String,
    },
    /// The pod was deleted: end what runs within the grace, then delete the object.
    Terminate {
        grace: Duration,
    },
    /// Nothing to do before this time, or before something changes.
    Wait(Option<Timestamp>),
}

/// When containers start again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

impl RestartPolicy {
    fn of(spec: &PodSpec) -> Self {
        match spec.restart_policy.as_deref() {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            _ => Self::Always,
        }
    }

    fn restarts(self, exit_code: i32) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => exit_code != 0,
            Self::Never => false,
        }
    }
}

/// How a container stands to its pod's end.
pub(crate) enum Standing {
    /// Runs, waits or will start again.
    Alive,
    Succeeded,
    Failed,
}

/// Whether an application container is over for good.
pub(crate) fn standing(spec: &PodSpec, local: &LocalPod, name: &str) -> Standing {
    match local.container(name).now {
        Now::Exited(exit) if RestartPolicy::of(spec).restarts(exit.exit_code) => Standing::Alive,
        Now::Exited(exit) if exit.exit_code == 0 => Standing::Succeeded,
        Now::Exited(_) => Standing::Failed,
        Now::Running { .. } | Now::Waiting { .. } => Standing::Alive,
    }
}

/// Whether an init container failed for good, which ends the pod.
pub(crate) fn init_failed(spec: &PodSpec, local: &LocalPod) -> bool {
    let never = RestartPolicy::of(spec) == RestartPolicy::Never;
    spec.init_containers.iter().flatten().any(|container| {
        matches!(local.container(&container.name).now, Now::Exited(exit) if exit.exit_code != 0 && never)
    })
}

/// One step, or how long to wait.
pub(crate) fn plan(pod: &Pod, local: &LocalPod, now: Timestamp) -> Step {
    let Some(spec) = &pod.spec else { return Step::Wait(None) };
    if pod.metadata.deletion_timestamp.is_some() {
        return Step::Terminate { grace: grace(pod, now) };
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return if local.sandbox { Step::Finish } else { Step::Wait(None) };
    }
    if local.ended.is_some() {
        return over(pod, local, now);
    }
    let deadline = active_deadline(pod);
    if deadline.is_some_and(|deadline| deadline <= now) {
        let message = "Pod was active on the node longer than the specified deadline".into();
        return Step::End { reason: "DeadlineExceeded", message };
    }
    if init_failed(spec, local) || is_over(spec, local) {
        return over(pod, local, now);
    }
    if !local.sandbox {
        return match local.sandbox_not_before {
            Some(at) if at > now => Step::Wait(Some(at).into_iter().chain(deadline).min()),
            _ => Step::CreateSandbox,
        };
    }
    match next_container(spec, local, now) {
        Step::Wait(at) => Step::Wait(at.into_iter().chain(deadline).min()),
        step => step,
    }
}

/// The rest of a pod that is over: its outputs are taken in before its phase is told.
fn over(pod: &Pod, local: &LocalPod, now: Timestamp) -> Step {
    if local.sandbox {
        Step::Finish
    } else if needs_collecting(pod, local) {
        match local.collect_not_before {
            Some(at) if at > now => Step::Wait(Some(at)),
            _ => Step::Collect,
        }
    } else {
        Step::Wait(None)
    }
}

/// Whether it is a job whose outputs nobody has taken in yet.
pub(crate) fn needs_collecting(pod: &Pod, local: &LocalPod) -> bool {
    job::is_job(pod) && !job::is_collected(pod) && !local.collected
}

/// Whether no application container runs, nor will again.
pub(crate) fn is_over(spec: &PodSpec, local: &LocalPod) -> bool {
    spec.containers.iter().all(|container| !matches!(standing(spec, local, &container.name), Standing::Alive))
}

/// Init containers one after the other, then all others at once.
fn next_container(spec: &PodSpec, local: &LocalPod, now: Timestamp) -> Step {
    for container in spec.init_containers.iter().flatten() {
        match local.container(&container.name).now {
            Now::Exited(exit) if exit.exit_code == 0 => {}
            Now::Exited(_) => return Step::Restart(container.name.clone()),
            Now::Running { .. } => return Step::Wait(None),
            Now::Waiting { .. } => return start_or_wait(container, local, now),
        }
    }
    let policy = RestartPolicy::of(spec);
    let mut wake: Option<Timestamp> = None;
    for container in &spec.containers {
        match local.container(&container.name).now {
            Now::Exited(exit) if policy.restarts(exit.exit_code) => {
                return Step::Restart(container.name.clone());
            }
            Now::Exited(_) | Now::Running { .. } => {}
            Now::Waiting { .. } => match start_or_wait(container, local, now) {
                Step::Wait(at) => wake = wake.into_iter().chain(at).min(),
                start => return start,
            },
        }
    }
    Step::Wait(wake)
}

fn start_or_wait(container: &Container, local: &LocalPod, now: Timestamp) -> Step {
    match local.container(&container.name).not_before {
        Some(at) if at > now => Step::Wait(Some(at)),
        _ => Step::Start(Box::new(container.clone())),
    }
}

/// What is left of the grace period. The API sets the deletion time to the moment the grace ends.
fn grace(pod: &Pod, now: Timestamp) -> Duration {
    let ends = pod.metadata.deletion_timestamp.as_ref().map_or(now, |time| time.0);
    Duration::try_from(ends.duration_since(now)).unwrap_or_default()
}

fn active_deadline(pod: &Pod) -> Option<Timestamp> {
    let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
    let started = pod.status.as_ref()?.start_time.as_ref()?.0;
    started.checked_add(mayfly_api::k8s::jiff::SignedDuration::from_secs(seconds)).ok()
}
