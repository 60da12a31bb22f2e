//! Plans the next step for a pod, from its object, the local state and the time. Pure.

use std::time::Duration;

use mayfly_api::k8s::{
    api::core::v1::{Container, Pod, PodSpec},
    jiff::{SignedDuration, Timestamp},
};
use tokio::time::Instant;

use super::{
    definition,
    local::{Clocks, ContainerPhase, Exit, LocalContainer, LocalPod},
};
use crate::job;

/// The reason of a pod that was active for too long.
const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// Upstream's default grace period.
const GRACE_DEFAULT: Duration = Duration::from_secs(30);

/// The next step for a pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    CreateSandbox,
    /// Start this container's current attempt.
    Start(Box<Container>),
    /// Restart an ended container after a pause.
    Restart(String),
    /// Kill a container that failed its liveness or startup probe, or has another definition, so that it is restarted.
    Kill(Box<ContainerKill>),
    /// Stop the remaining containers within the grace period and remove the sandbox; the pod's phase is final.
    Finish {
        grace: Duration,
    },
    /// All containers have ended: store the job's outputs.
    Collect,
    /// The pod as a whole has to end for this reason.
    End {
        reason: &'static str,
        message: String,
    },
    /// The pod was deleted: stop the remaining containers within the grace period, then delete the object.
    Terminate {
        grace: Duration,
    },
    /// Nothing to do for this long; `None`: until something changes.
    Wait(Option<Duration>),
}

/// A container to kill because of a failed probe, or because its definition changed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ContainerKill {
    pub(crate) container: Container,
    pub(crate) message: String,
    pub(crate) grace: Duration,
    /// Whether another attempt follows whatever the restart policy.
    pub(crate) replaces: bool,
}

/// The condition under which ended containers are restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

impl RestartPolicy {
    /// The container's own policy, otherwise the pod's.
    fn of(spec: &PodSpec, container: &Container) -> Self {
        match container.restart_policy.as_deref().or(spec.restart_policy.as_deref()) {
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

/// Whether an application container has ended for the last time, and how.
pub(crate) enum Completion {
    /// Running, waiting, or to be restarted.
    Alive,
    Succeeded,
    Failed,
}

/// Whether an application container has ended for the last time, and how.
pub(crate) fn completion(spec: &PodSpec, local: &LocalPod, container: &Container) -> Completion {
    let known = local.container(&container.name);
    match &known.now {
        ContainerPhase::Exited(exit) if starts_again(spec, container, &known, exit) => Completion::Alive,
        ContainerPhase::Exited(exit) if exit.exit_code == 0 => Completion::Succeeded,
        ContainerPhase::Exited(_) => Completion::Failed,
        ContainerPhase::Running { .. } | ContainerPhase::Waiting { .. } => Completion::Alive,
    }
}

/// Whether an ended container is restarted. One that was killed by a probe is, whatever its exit code; one with another
/// definition is in any case.
fn starts_again(spec: &PodSpec, container: &Container, known: &LocalContainer, exit: &Exit) -> bool {
    let policy = RestartPolicy::of(spec, container);
    policy.restarts(exit.exit_code)
        || known.is_replaced
        || (known.killed_by_probe && policy != RestartPolicy::Never)
}

/// Whether an init container is a sidecar: it starts in the order of the init containers, and runs as long as the pod.
pub(crate) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The sidecars of a pod, in the order of their start.
pub(crate) fn sidecars(spec: &PodSpec) -> impl DoubleEndedIterator<Item = &Container> {
    spec.init_containers.iter().flatten().filter(|container| is_sidecar(container))
}

/// The containers that may have probes.
pub(crate) fn probed_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    sidecars(spec).chain(&spec.containers)
}

/// Whether a container runs and its startup probe, if it has one, has succeeded.
pub(crate) fn is_started(container: &Container, known: &LocalContainer) -> bool {
    let is_running = matches!(known.now, ContainerPhase::Running { .. });
    is_running && (container.startup_probe.is_none() || known.probes.startup == Some(true))
}

/// Whether a container has started and its readiness probe, if it has one, succeeds.
pub(crate) fn is_ready(container: &Container, known: &LocalContainer) -> bool {
    let is_ready = container.readiness_probe.is_none() || known.probes.readiness == Some(true);
    is_started(container, known) && is_ready
}

/// Whether an application container has been started in this sandbox: from then on init containers block nothing.
pub(crate) fn has_initialised(spec: &PodSpec, local: &LocalPod) -> bool {
    spec.containers.iter().any(|container| {
        let (known, first) = (local.container(&container.name), local.first_attempt(&container.name));
        let is_first = known.attempt == first && !matches!(known.now, ContainerPhase::Waiting { .. });
        is_first || known.attempt > first
    })
}

/// Whether an init container has failed and is not restarted, which ends the pod.
pub(crate) fn init_failed(spec: &PodSpec, local: &LocalPod) -> bool {
    spec.init_containers.iter().flatten().any(|container| {
        let never = RestartPolicy::of(spec, container) == RestartPolicy::Never;
        matches!(local.container(&container.name).now, ContainerPhase::Exited(exit) if exit.exit_code != 0 && never)
    })
}

/// One step, or how long to wait.
pub(crate) fn plan(pod: &Pod, local: &LocalPod, now: Clocks) -> Step {
    let Some(spec) = &pod.spec else { return Step::Wait(None) };
    if pod.metadata.deletion_timestamp.is_some() {
        return Step::Terminate { grace: grace(pod, now.wall) };
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return if local.sandbox { finish(spec, local) } else { Step::Wait(None) };
    }
    if local.ended.is_some() {
        return plan_finished(pod, spec, local, now);
    }
    let left = active_for(pod, now.wall);
    if left.is_some_and(|left| left.is_zero()) {
        let message = "Pod was active on the node longer than the specified deadline".into();
        return Step::End { reason: DEADLINE_EXCEEDED, message };
    }
    if init_failed(spec, local) || is_over(spec, local) {
        return plan_finished(pod, spec, local, now);
    }
    if !local.sandbox {
        return match remaining(local.sandbox_not_before, now) {
            Some(rest) => Step::Wait(Some(rest).into_iter().chain(left).min()),
            None => Step::CreateSandbox,
        };
    }
    if let Some(kill) = definition::changed(spec, local).or_else(|| probe_failure(spec, local)) {
        return Step::Kill(Box::new(kill));
    }
    match next_container(spec, local, now) {
        Step::Wait(rest) => Step::Wait(rest.into_iter().chain(left).min()),
        step => step,
    }
}

/// The steps for a pod that has ended: its outputs are stored before its phase becomes final.
fn plan_finished(pod: &Pod, spec: &PodSpec, local: &LocalPod, now: Clocks) -> Step {
    if local.sandbox {
        finish(spec, local)
    } else if needs_collecting(pod, local) {
        match remaining(local.collect_not_before, now) {
            Some(rest) => Step::Wait(Some(rest)),
            None => Step::Collect,
        }
    } else {
        Step::Wait(None)
    }
}

/// Whether it is a job whose outputs are not stored yet.
pub(crate) fn needs_collecting(pod: &Pod, local: &LocalPod) -> bool {
    job::is_job(pod) && !job::is_collected(pod) && !local.collected
}

/// Whether no application container is running or will be restarted.
pub(crate) fn is_over(spec: &PodSpec, local: &LocalPod) -> bool {
    spec.containers.iter().all(|container| !matches!(completion(spec, local, container), Completion::Alive))
}

/// A pod that ended by itself gives its sidecars their grace period, and one past its deadline all of its containers, as
/// upstream; a pod that was ended for another reason is killed at once.
fn finish(spec: &PodSpec, local: &LocalPod) -> Step {
    let is_killed = local.ended.as_ref().is_some_and(|(reason, _)| *reason != DEADLINE_EXCEEDED);
    let grace = if is_killed { Duration::ZERO } else { grace_of(spec) };
    Step::Finish { grace }
}

/// The grace period of a pod's containers unless its deletion sets another.
pub(super) fn grace_of(spec: &PodSpec) -> Duration {
    seconds(spec.termination_grace_period_seconds).unwrap_or(GRACE_DEFAULT)
}

fn seconds(value: Option<i64>) -> Option<Duration> {
    value.and_then(|value| u64::try_from(value).ok()).map(Duration::from_secs)
}

/// A running container whose liveness or startup probe failed.
fn probe_failure(spec: &PodSpec, local: &LocalPod) -> Option<ContainerKill> {
    probed_containers(spec).find_map(|container| {
        let known = local.container(&container.name);
        if !matches!(known.now, ContainerPhase::Running { .. }) {
            return None;
        }
        let (probe, word) = match (known.probes.liveness, known.probes.startup) {
            (Some(false), _) => (&container.liveness_probe, "liveness"),
            (_, Some(false)) => (&container.startup_probe, "startup"),
            _ => return None,
        };
        let own = seconds(probe.as_ref()?.termination_grace_period_seconds);
        let restarts = RestartPolicy::of(spec, container) != RestartPolicy::Never;
        let then = if restarts { ", will be restarted" } else { "" };
        Some(ContainerKill {
            message: format!("Container {} failed {word} probe{then}", container.name),
            grace: own.unwrap_or_else(|| grace_of(spec)),
            container: container.clone(),
            replaces: false,
        })
    })
}

/// The next container to start: ephemeral ones at any time; init containers one after the other, where a sidecar blocks
/// the next one only until it has started; then all others at once.
fn next_container(spec: &PodSpec, local: &LocalPod, now: Clocks) -> Step {
    let mut shortest: Option<Duration> = None;
    for container in ephemeral_containers(spec) {
        // Ephemeral containers are never restarted.
        if matches!(local.container(&container.name).now, ContainerPhase::Waiting { .. })
            && let Some(start) = unless_wait(start_or_wait(&container, local, now), &mut shortest)
        {
            return start;
        }
    }
    let initialised = has_initialised(spec, local);
    for container in spec.init_containers.iter().flatten() {
        let known = local.container(&container.name);
        let is_done = match is_sidecar(container) {
            true => is_started(container, &known),
            false => initialised || matches!(&known.now, ContainerPhase::Exited(exit) if exit.exit_code == 0),
        };
        let step = match known.now {
            _ if is_done => Step::Wait(None),
            ContainerPhase::Exited(_) => return Step::Restart(container.name.clone()),
            ContainerPhase::Running { .. } => Step::Wait(None),
            ContainerPhase::Waiting { .. } => start_or_wait(container, local, now),
        };
        if let Some(start) = unless_wait(step, &mut shortest) {
            return start;
        }
        if !is_done && !initialised {
            return Step::Wait(shortest);
        }
    }
    for container in &spec.containers {
        let known = local.container(&container.name);
        let step = match &known.now {
            ContainerPhase::Exited(exit) if starts_again(spec, container, &known, exit) => {
                return Step::Restart(container.name.clone());
            }
            ContainerPhase::Exited(_) | ContainerPhase::Running { .. } => Step::Wait(None),
            ContainerPhase::Waiting { .. } => start_or_wait(container, local, now),
        };
        if let Some(start) = unless_wait(step, &mut shortest) {
            return start;
        }
    }
    Step::Wait(shortest)
}

/// Returns the step, or merges a pause into the shortest one.
fn unless_wait(step: Step, shortest: &mut Option<Duration>) -> Option<Step> {
    match step {
        Step::Wait(rest) => {
            *shortest = (*shortest).into_iter().chain(rest).min();
            None
        }
        step => Some(step),
    }
}

/// The ephemeral containers as ordinary ones: the fields are the same except for the target container.
pub(crate) fn ephemeral_containers(spec: &PodSpec) -> impl Iterator<Item = Container> {
    spec.ephemeral_containers.iter().flatten().map(|ephemeral| {
        let one = ephemeral.clone();
        Container {
            args: one.args,
            command: one.command,
            env: one.env,
            env_from: one.env_from,
            image: one.image,
            image_pull_policy: one.image_pull_policy,
            name: one.name,
            security_context: one.security_context,
            stdin: one.stdin,
            stdin_once: one.stdin_once,
            termination_message_path: one.termination_message_path,
            termination_message_policy: one.termination_message_policy,
            tty: one.tty,
            volume_mounts: one.volume_mounts,
            working_dir: one.working_dir,
            ..Container::default()
        }
    })
}

fn start_or_wait(container: &Container, local: &LocalPod, now: Clocks) -> Step {
    let known = local.container(&container.name);
    if known.queued {
        return Step::Wait(None);
    }
    match remaining(known.not_before, now) {
        Some(rest) => Step::Wait(Some(rest)),
        None => Step::Start(Box::new(container.clone())),
    }
}

/// The remaining pause; `None` when it is over.
fn remaining(not_before: Option<Instant>, now: Clocks) -> Option<Duration> {
    not_before?.checked_duration_since(now.steady).filter(|rest| !rest.is_zero())
}

/// The remaining grace period. The API sets the deletion time to the end of the grace period; a clock that was set back
/// since then does not prolong it.
pub(super) fn grace(pod: &Pod, now: Timestamp) -> Duration {
    let ends = pod.metadata.deletion_timestamp.as_ref().map_or(now, |time| time.0);
    let left = Duration::try_from(ends.duration_since(now)).unwrap_or_default();
    let seconds =
        pod.metadata.deletion_grace_period_seconds.map(|seconds| u64::try_from(seconds).unwrap_or(0));
    seconds.map(Duration::from_secs).map_or(left, |whole| left.min(whole))
}

/// The remaining active deadline, if there is one. The pod may have started before this process.
fn active_for(pod: &Pod, now: Timestamp) -> Option<Duration> {
    let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
    let started = pod.status.as_ref()?.start_time.as_ref()?.0;
    let ends = started.checked_add(SignedDuration::from_secs(seconds)).ok()?;
    Some(Duration::try_from(ends.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::{ContainerId, ContainerState};
    use serde_json::{Value, json};

    use super::*;
    use crate::pod::local::Exit;

    fn pod(metadata: Value) -> Pod {
        let spec = json!({"containers": [{"name": "main"}]});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[test]
    fn a_pause_is_as_long_whatever_the_wall_clock_says() {
        let (pod, begin) = (pod(json!({"name": "p"})), Clocks::now());
        let mut local = LocalPod::from_status(&pod, &[]);
        local.sandbox_made();
        let container = local.containers.entry("main".into()).or_default();
        // The first restart is immediate, the second after ten seconds.
        for _ in 0..2 {
            let (started, finished) = (begin.wall, begin.wall);
            let (reason, message) = ("Error".into(), String::new());
            container.now = ContainerPhase::Exited(Exit { started, finished, exit_code: 1, reason, message });
            container.restart_later("main", begin);
        }
        for set_secs in [-3600, 0, 3600] {
            let after = |seconds| Clocks {
                wall: begin.wall + SignedDuration::from_secs(set_secs),
                steady: begin.steady + Duration::from_secs(seconds),
            };
            assert_eq!(plan(&pod, &local, after(4)), Step::Wait(Some(Duration::from_secs(6))), "{set_secs}");
            assert!(matches!(plan(&pod, &local, after(10)), Step::Start(_)), "{set_secs}");
        }
    }

    #[test]
    fn a_container_in_the_runtimes_queue_is_not_started_again() {
        let (pod, now) = (pod(json!({"name": "p"})), Clocks::now());
        let mut local = LocalPod::from_status(&pod, &[]);
        local.sandbox_made();
        assert!(matches!(plan(&pod, &local, now), Step::Start(_)));
        let id = ContainerId { pod: local.uid.clone(), name: "main".into(), attempt: 0 };
        let waiting = |message: &str| {
            let (reason, message) = ("Queued".into(), message.into());
            [(id.clone(), ContainerState::Waiting { reason, message })]
        };
        assert!(local.is_news(&waiting("a")));
        assert!(local.observe_starts(&waiting("a")).is_empty());
        assert_eq!(plan(&pod, &local, now), Step::Wait(None));
        assert!(!local.is_news(&waiting("a")) && local.is_news(&waiting("b")));
        let running = [(id.clone(), ContainerState::Running { started: now.wall })];
        assert!(local.is_news(&running));
        assert_eq!(local.observe_starts(&running), ["main"]);
        assert!(local.observe_starts(&running).is_empty(), "it starts once");
        assert!(!local.is_news(&waiting("a")), "it does not wait again");
    }

    #[test]
    fn a_lost_attempt_is_noticed_although_an_earlier_one_is_known() {
        let (mut pod, now) = (pod(json!({"name": "p"})), Clocks::now());
        let main = json!({"name": "main", "restartCount": 1, "image": "", "imageID": "", "ready": true,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}});
        pod.status = Some(serde_json::from_value(json!({"containerStatuses": [main]})).unwrap());
        let uid = LocalPod::from_status(&pod, &[]).uid;
        let running = |attempt| {
            let id = ContainerId { pod: uid.clone(), name: "main".into(), attempt };
            [(id, ContainerState::Running { started: now.wall })]
        };
        let is_alive = |known: &[_]| {
            let main = LocalPod::from_status(&pod, known).container("main");
            matches!(main.now, ContainerPhase::Running { .. })
        };
        assert!(is_alive(&running(1)));
        assert!(!is_alive(&running(0)), "another attempt");
        assert!(!is_alive(&[]));
    }

    #[test]
    fn a_pause_goes_on_after_a_restart_of_this_process() {
        let mut container = LocalPod::from_status(&pod(json!({"name": "p"})), &[]).container("main");
        let now = Clocks::now();
        for _ in 0..2 {
            let finished = now.wall - SignedDuration::from_secs(7);
            let (reason, message) = ("Error".into(), String::new());
            container.now =
                ContainerPhase::Exited(Exit { started: finished, finished, exit_code: 1, reason, message });
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

#[cfg(test)]
mod lifecycle_tests;
