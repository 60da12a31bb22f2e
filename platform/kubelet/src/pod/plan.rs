//! What to do next for a pod: its object, what is known here, and the time in; one step out. Pure.

use std::time::Duration;

use mayfly_api::k8s::{
    api::core::v1::{Container, Pod, PodSpec},
    jiff::{SignedDuration, Timestamp},
};
use tokio::time::Instant;

use super::local::{LocalPod, Moment, Now};
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
    /// Nothing to do for this long, or before something changes.
    Wait(Option<Duration>),
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
pub(crate) fn plan(pod: &Pod, local: &LocalPod, now: Moment) -> Step {
    let Some(spec) = &pod.spec else { return Step::Wait(None) };
    if pod.metadata.deletion_timestamp.is_some() {
        return Step::Terminate { grace: grace(pod, now.wall) };
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return if local.sandbox { Step::Finish } else { Step::Wait(None) };
    }
    if local.ended.is_some() {
        return over(pod, local, now);
    }
    let left = active_for(pod, now.wall);
    if left.is_some_and(|left| left.is_zero()) {
        let message = "Pod was active on the node longer than the specified deadline".into();
        return Step::End { reason: "DeadlineExceeded", message };
    }
    if init_failed(spec, local) || is_over(spec, local) {
        return over(pod, local, now);
    }
    if !local.sandbox {
        return match rest(local.sandbox_not_before, now) {
            Some(rest) => Step::Wait(Some(rest).into_iter().chain(left).min()),
            None => Step::CreateSandbox,
        };
    }
    match next_container(spec, local, now) {
        Step::Wait(rest) => Step::Wait(rest.into_iter().chain(left).min()),
        step => step,
    }
}

/// The rest of a pod that is over: its outputs are taken in before its phase is told.
fn over(pod: &Pod, local: &LocalPod, now: Moment) -> Step {
    if local.sandbox {
        Step::Finish
    } else if needs_collecting(pod, local) {
        match rest(local.collect_not_before, now) {
            Some(rest) => Step::Wait(Some(rest)),
            None => Step::Collect,
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
fn next_container(spec: &PodSpec, local: &LocalPod, now: Moment) -> Step {
    for container in spec.init_containers.iter().flatten() {
        match local.container(&container.name).now {
            Now::Exited(exit) if exit.exit_code == 0 => {}
            Now::Exited(_) => return Step::Restart(container.name.clone()),
            Now::Running { .. } => return Step::Wait(None),
            Now::Waiting { .. } => return start_or_wait(container, local, now),
        }
    }
    let policy = RestartPolicy::of(spec);
    let mut shortest: Option<Duration> = None;
    for container in &spec.containers {
        match local.container(&container.name).now {
            Now::Exited(exit) if policy.restarts(exit.exit_code) => {
                return Step::Restart(container.name.clone());
            }
            Now::Exited(_) | Now::Running { .. } => {}
            Now::Waiting { .. } => match start_or_wait(container, local, now) {
                Step::Wait(rest) => shortest = shortest.into_iter().chain(rest).min(),
                start => return start,
            },
        }
    }
    Step::Wait(shortest)
}

fn start_or_wait(container: &Container, local: &LocalPod, now: Moment) -> Step {
    match rest(local.container(&container.name).not_before, now) {
        Some(rest) => Step::Wait(Some(rest)),
        None => Step::Start(Box::new(container.clone())),
    }
}

/// What is left of a pause; none when it is over.
fn rest(not_before: Option<Instant>, now: Moment) -> Option<Duration> {
    not_before?.checked_duration_since(now.steady).filter(|rest| !rest.is_zero())
}

/// What is left of the grace period. The API sets the deletion time to the moment the grace ends; a clock that was set
/// back since makes it no longer.
pub(super) fn grace(pod: &Pod, now: Timestamp) -> Duration {
    let ends = pod.metadata.deletion_timestamp.as_ref().map_or(now, |time| time.0);
    let left = Duration::try_from(ends.duration_since(now)).unwrap_or_default();
    let seconds =
        pod.metadata.deletion_grace_period_seconds.map(|seconds| u64::try_from(seconds).unwrap_or(0));
    seconds.map(Duration::from_secs).map_or(left, |whole| left.min(whole))
}

/// How long it may still be active, where that is limited. It began in an earlier process, maybe.
fn active_for(pod: &Pod, now: Timestamp) -> Option<Duration> {
    let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
    let started = pod.status.as_ref()?.start_time.as_ref()?.0;
    let ends = started.checked_add(SignedDuration::from_secs(seconds)).ok()?;
    Some(Duration::try_from(ends.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::pod::local::Exit;

    fn pod(metadata: Value) -> Pod {
        let spec = json!({"containers": [{"name": "main"}]});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[test]
    fn a_pause_is_as_long_whatever_the_wall_clock_says() {
        let (pod, begin) = (pod(json!({"name": "p"})), Moment::now());
        let mut local = LocalPod::learn(&pod, &[]);
        local.sandbox_made();
        let container = local.containers.entry("main".into()).or_default();
        // The first restart is at once, the second after ten seconds.
        for _ in 0..2 {
            let (started, finished) = (begin.wall, begin.wall);
            let (reason, message) = ("Error".into(), String::new());
            container.now = Now::Exited(Exit { started, finished, exit_code: 1, reason, message });
            container.restart_later("main", begin);
        }
        for set_secs in [-3600, 0, 3600] {
            let after = |seconds| Moment {
                wall: begin.wall + SignedDuration::from_secs(set_secs),
                steady: begin.steady + Duration::from_secs(seconds),
            };
            assert_eq!(plan(&pod, &local, after(4)), Step::Wait(Some(Duration::from_secs(6))), "{set_secs}");
            assert!(matches!(plan(&pod, &local, after(10)), Step::Start(_)), "{set_secs}");
        }
    }

    #[test]
    fn a_pause_goes_on_after_a_restart_of_this_process() {
        let mut container = LocalPod::learn(&pod(json!({"name": "p"})), &[]).container("main");
        let now = Moment::now();
        for _ in 0..2 {
            let finished = now.wall - SignedDuration::from_secs(7);
            let (reason, message) = ("Error".into(), String::new());
            container.now = Now::Exited(Exit { started: finished, finished, exit_code: 1, reason, message });
            container.restart_later("main", now);
        }
        assert_eq!(container.not_before, Some(now.steady + Duration::from_secs(3)));
    }

    #[test]
    fn a_grace_period_is_never_longer_than_it_was_asked_for() {
        let ends: Timestamp = "2026-01-01T12:00:30Z".parse().unwrap();
        let deleted =
            json!({"name": "p", "deletionTimestamp": ends.to_string(), "deletionGracePeriodSeconds": 30});
        let pod = pod(deleted);
        for (before_secs, left_secs) in [(20, 20), (30, 30), (3600, 30), (-1, 0)] {
            let now = ends - SignedDuration::from_secs(before_secs);
            assert_eq!(grace(&pod, now), Duration::from_secs(left_secs), "{before_secs}");
        }
    }
}
