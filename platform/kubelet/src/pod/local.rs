//! The node's state of a pod beyond its object: which containers ran, how they ended, when the next may start.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use mayfly_api::k8s::{
    api::core::v1::{Container, ContainerStatus, Pod, PodSpec, ResourceStatus},
    jiff::Timestamp,
};
use mayfly_informer::Backoff;
use mayfly_runtime::{ContainerId, ContainerState, PodUid};
use tokio::time::Instant;

use super::plan;
use crate::{job, probe::ProbeKind};

/// A container that ran at least this long is restarted without a pause.
const STABLE_AFTER: Duration = Duration::from_secs(600);
/// Pauses between restarts: none at first, then these, doubling (upstream's values).
const CRASH: Backoff = Backoff { first: Duration::from_secs(10), most: Duration::from_secs(300) };
/// Pauses after a failed start or a failed collection: a missing component may be uploaded soon, and disk space may be
/// freed.
const START: Backoff = Backoff { first: Duration::from_secs(1), most: Duration::from_secs(60) };
/// Pauses for a missing image or component: it may be uploaded at any time, and a lookup is cheap.
const PULL: Backoff = Backoff { first: START.first, most: Duration::from_secs(5) };

/// Pauses for an image that the registry does not provide (upstream's values).
const PULL_REMOTE: Backoff = Backoff { first: Duration::from_secs(10), most: Duration::from_secs(300) };

/// The waiting reasons of a container whose image is missing: at the first attempt, and after it.
pub(crate) const REASON_PULL: &str = "ErrImagePull";
const REASON_PULL_AGAIN: &str = "ImagePullBackOff";
/// The waiting reason of a container whose volumes are not ready, or that has not been started yet.
pub(crate) const REASON_CREATING: &str = "ContainerCreating";
/// The waiting reason of a container whose environment refers to something that does not exist, or that would not meet
/// its own requirements.
pub(crate) const REASON_CONFIG: &str = "CreateContainerConfigError";
/// The reason and the exit code of an attempt whose process could not be started (those of upstream's runtimes), and
/// the waiting reason after it.
const REASON_START_ERROR: &str = "StartError";
const EXIT_NOT_STARTED: i32 = 128;
pub(crate) const REASON_RUN: &str = "RunContainerError";
/// The reason for the end of a container that ran when the kubelet stopped, and that its runtime does not know any
/// more.
pub(crate) const REASON_LOST: &str = "ContainerStatusUnknown";

/// A moment on two clocks. Times in objects, which outlive this process, use the wall clock; pauses use the monotonic
/// one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    pub(crate) wall: Timestamp,
    pub(crate) steady: Instant,
}

impl Clocks {
    pub(crate) fn now() -> Self {
        Self { wall: Timestamp::now(), steady: Instant::now() }
    }
}

/// The result of a container.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Exit {
    pub(crate) started: Timestamp,
    pub(crate) finished: Timestamp,
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// The state of a container.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ContainerPhase {
    /// Not started yet, or not restarted yet; `kubectl get pods` shows the reason.
    Waiting {
        reason: String,
        message: String,
    },
    Running {
        started: Timestamp,
    },
    Exited(Exit),
}

/// The results of the probes of a container's current attempt; `None`: no result yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProbeVerdicts {
    pub(crate) startup: Option<bool>,
    pub(crate) liveness: Option<bool>,
    pub(crate) readiness: Option<bool>,
}

/// The image of a container, as its runtime names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UsedImage {
    /// The full reference.
    pub(crate) reference: String,
    /// The digest with the image's name, or the digest of its configuration.
    pub(crate) id: String,
}

/// One container of the pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalContainer {
    pub(crate) now: ContainerPhase,
    /// The result of the previous attempt.
    pub(crate) last: Option<Exit>,
    /// The number of the current attempt, which is also the restart count.
    pub(crate) attempt: u32,
    pub(crate) probes: ProbeVerdicts,
    /// `None`: not determined yet, or its runtime has no image store.
    pub(crate) image: Option<UsedImage>,
    /// The runtime has accepted the current attempt and starts it by itself, when its queue has room.
    pub(crate) queued: bool,
    /// The current attempt is ended because of a probe.
    pub(crate) killed_by_probe: bool,
    /// The current attempt is ended because the container's definition changed.
    pub(crate) is_replaced: bool,
    /// Ends in succession, which determine the pause before a restart.
    crashes: u32,
    /// Failed starts and pulls in succession, which determine the pause before another try.
    start_failures: u32,
    /// The earliest time of the next start.
    pub(crate) not_before: Option<Instant>,
}

/// The pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalPod {
    pub(crate) uid: PodUid,
    pub(crate) sandbox: bool,
    pub(crate) address: Option<IpAddr>,
    /// The pod's addresses of other families.
    pub(crate) more_addresses: Vec<IpAddr>,
    pub(crate) containers: BTreeMap<String, LocalContainer>,
    /// The first attempts in this sandbox of application containers that ran in an earlier one.
    first_attempts: BTreeMap<String, u32>,
    /// The health of the containers' devices; empty until they have any.
    pub(crate) devices: BTreeMap<String, Vec<ResourceStatus>>,
    /// The GPU time that the containers used until the pod ended; `None`: they had no GPU, or it has not ended.
    pub(crate) gpu_time: Option<Duration>,
    /// The reason (`DeadlineExceeded`, …) and message, if the pod as a whole was ended.
    pub(crate) ended: Option<(&'static str, String)>,
    /// Whether the pod's outputs are stored, and recorded on its object.
    pub(crate) collected: bool,
    /// Failures in succession to create the sandbox, and the time of the next attempt.
    sandbox_failures: u32,
    pub(crate) sandbox_not_before: Option<Instant>,
    /// Failures in succession to store the outputs, and the time of the next attempt.
    collect_failures: u32,
    pub(crate) collect_not_before: Option<Instant>,
}

impl Default for LocalContainer {
    fn default() -> Self {
        let now = ContainerPhase::Waiting { reason: "ContainerCreating".into(), message: String::new() };
        let probes = ProbeVerdicts::default();
        Self {
            now,
            last: None,
            attempt: 0,
            probes,
            image: None,
            queued: false,
            killed_by_probe: false,
            is_replaced: false,
            crashes: 0,
            start_failures: 0,
            not_before: None,
        }
    }
}

impl LocalPod {
    /// The state of a pod that is new to this process, from the status that an earlier process wrote. A container that
    /// was running then and that the runtime does not know now is lost.
    pub(crate) fn from_status(pod: &Pod, known_to_host: &[(ContainerId, ContainerState)]) -> Self {
        let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
        let status = pod.status.clone().unwrap_or_default();
        let address = status.pod_ip.as_deref().and_then(|text| text.parse().ok());
        let more = status.pod_ips.iter().flatten().filter_map(|of| of.ip.parse().ok());
        let more_addresses = more.filter(|of| Some(*of) != address).collect();
        let statuses = status.init_container_statuses.into_iter().chain(status.container_statuses);
        let statuses = statuses.chain(status.ephemeral_container_statuses);
        let mut containers = BTreeMap::new();
        for status in statuses.flatten() {
            let attempt = u32::try_from(status.restart_count).unwrap_or(0);
            // The runtime still knows how earlier attempts ended.
            let known = known_to_host.iter().any(|(id, _)| id.name == status.name && id.attempt == attempt);
            containers.insert(status.name.clone(), LocalContainer::from_status(&status, known));
        }
        Self {
            uid,
            sandbox: !known_to_host.is_empty(),
            address,
            more_addresses,
            containers,
            first_attempts: BTreeMap::new(),
            devices: BTreeMap::new(),
            gpu_time: None,
            ended: job::unsent(pod).map(|why| (job::UNSENT, why)),
            collected: false,
            sandbox_failures: 0,
            sandbox_not_before: None,
            collect_failures: 0,
            collect_not_before: None,
        }
    }

    pub(crate) fn container(&self, name: &str) -> LocalContainer {
        self.containers.get(name).cloned().unwrap_or_default()
    }

    /// The number of the first attempt of an application container in this sandbox.
    pub(crate) fn first_attempt(&self, name: &str) -> u32 {
        self.first_attempts.get(name).copied().unwrap_or(0)
    }

    /// Makes the init containers of a pod run again whose application containers ran in an earlier sandbox, for example
    /// before a restart of the machine: their work on the pod's network and in its memory is gone (upstream's rule).
    pub(crate) fn initialise_again(&mut self, spec: &PodSpec) {
        if !plan::has_initialised(spec, self) {
            return;
        }
        for container in &spec.containers {
            let known = self.container(&container.name);
            let has_ended = matches!(known.now, ContainerPhase::Exited(_));
            self.first_attempts.insert(container.name.clone(), known.attempt + u32::from(has_ended));
        }
        for init in spec.init_containers.iter().flatten().filter(|init| !plan::is_sidecar(init)) {
            if let Some(known) = self.containers.get_mut(&init.name) {
                known.run_again();
            }
        }
    }

    /// Whether the runtime reports a state that is not recorded yet.
    pub(crate) fn is_news(&self, observed: &[(ContainerId, ContainerState)]) -> bool {
        observed.iter().any(|(id, state)| {
            self.containers.get(&id.name).is_none_or(|container| container.is_news(id.attempt, state))
        })
    }

    pub(crate) fn sandbox_made(&mut self) {
        self.sandbox = true;
        self.sandbox_failures = 0;
        self.sandbox_not_before = None;
    }

    /// Records that the sandbox could not be created: retried after a pause, and all containers wait.
    pub(crate) fn sandbox_failed(&mut self, containers: &[Container], message: &str, now: Instant) {
        self.sandbox_failures = self.sandbox_failures.saturating_add(1);
        self.sandbox_not_before = Some(now + START.full(self.sandbox_failures));
        for container in containers {
            let waiting =
                ContainerPhase::Waiting { reason: "ContainerCreating".into(), message: message.into() };
            self.containers.entry(container.name.clone()).or_default().now = waiting;
        }
    }

    /// Records that the outputs could not be stored: retried after a pause.
    pub(crate) fn collect_failed(&mut self, now: Instant) {
        self.collect_failures = self.collect_failures.saturating_add(1);
        self.collect_not_before = Some(now + START.full(self.collect_failures));
    }

    /// Makes containers whose environment or volumes could not be made retry at once. Returns whether there are any.
    pub(crate) fn retry_sources(&mut self) -> bool {
        let may_need = |reason: &str| [REASON_CONFIG, REASON_CREATING].contains(&reason);
        let mut any = false;
        for container in self.containers.values_mut() {
            let waits = matches!(&container.now, ContainerPhase::Waiting { reason, .. } if may_need(reason));
            if waits && container.not_before.is_some() {
                container.not_before = None;
                any = true;
            }
        }
        any
    }

    /// Records the results of the containers' probes.
    pub(crate) fn observe_probes(&mut self, verdicts: Vec<(String, u32, ProbeKind, bool)>) {
        for (name, attempt, kind, verdict) in verdicts {
            let Some(container) = self.containers.get_mut(&name) else { continue };
            if container.attempt != attempt || !matches!(container.now, ContainerPhase::Running { .. }) {
                continue;
            }
            let known = match kind {
                ProbeKind::Startup => &mut container.probes.startup,
                ProbeKind::Liveness => &mut container.probes.liveness,
                ProbeKind::Readiness => &mut container.probes.readiness,
            };
            *known = Some(verdict);
        }
    }

    /// Records the states that the runtime reports. Returns the containers that left the runtime's queue.
    pub(crate) fn observe_starts(&mut self, observed: &[(ContainerId, ContainerState)]) -> Vec<String> {
        let is_queued =
            |known: &LocalContainer| known.queued && matches!(known.now, ContainerPhase::Waiting { .. });
        let queued: Vec<String> = self
            .containers
            .iter()
            .filter(|(_, known)| is_queued(known))
            .map(|(name, _)| name.clone())
            .collect();
        self.observe(observed);
        queued
            .into_iter()
            .filter(|name| matches!(self.container(name).now, ContainerPhase::Running { .. }))
            .collect()
    }

    /// Records the states that the runtime reports.
    pub(crate) fn observe(&mut self, observed: &[(ContainerId, ContainerState)]) {
        for (id, state) in observed {
            let container = self.containers.entry(id.name.clone()).or_default();
            if id.attempt == container.attempt {
                container.observe(state);
            }
        }
    }
}

impl LocalContainer {
    fn from_status(status: &ContainerStatus, known_to_host: bool) -> Self {
        let attempt = u32::try_from(status.restart_count).unwrap_or(0);
        let mut container = Self { attempt, ..Self::default() };
        let terminated = |state: &Option<_>| -> Option<Exit> {
            let state: &mayfly_api::k8s::api::core::v1::ContainerState = state.as_ref()?;
            let ended = state.terminated.as_ref()?;
            Some(Exit {
                started: ended.started_at.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0),
                finished: ended.finished_at.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0),
                exit_code: ended.exit_code,
                reason: ended.reason.clone().unwrap_or_default(),
                message: ended.message.clone().unwrap_or_default(),
            })
        };
        container.last = terminated(&status.last_state);
        container.image = (!status.image_id.is_empty())
            .then(|| UsedImage { reference: status.image.clone(), id: status.image_id.clone() });
        if let Some(exit) = terminated(&status.state) {
            container.now = ContainerPhase::Exited(exit);
        } else if let Some(running) = status.state.as_ref().and_then(|state| state.running.as_ref()) {
            let started = running.started_at.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
            container.now = ContainerPhase::Running { started };
            // The last probe results stay valid until there are new ones.
            container.probes.startup = status.started.filter(|started| *started);
            container.probes.readiness = Some(status.ready);
            if !known_to_host {
                container.now = ContainerPhase::Exited(Exit {
                    started,
                    finished: Timestamp::now(),
                    exit_code: 137,
                    reason: REASON_LOST.into(),
                    message: "The container could not be located when the node's agent started again".into(),
                });
            }
        }
        container
    }

    fn is_news(&self, attempt: u32, state: &ContainerState) -> bool {
        let known = match (&self.now, state) {
            (ContainerPhase::Running { started: known }, ContainerState::Running { started }) => {
                known == started
            }
            (ContainerPhase::Exited(_), ContainerState::Exited { .. }) => true,
            (ContainerPhase::Waiting { .. }, ContainerState::Exited { .. }) => self.not_before.is_some(),
            (
                ContainerPhase::Waiting { reason: known, message: why },
                ContainerState::Waiting { reason, message },
            ) => self.queued && known == reason && why == message,
            // A container that has run does not return to waiting within the same attempt.
            (_, ContainerState::Waiting { .. }) => true,
            _ => false,
        };
        attempt == self.attempt && !known
    }

    fn observe(&mut self, state: &ContainerState) {
        match state {
            ContainerState::Waiting { reason, message } => {
                if matches!(self.now, ContainerPhase::Waiting { .. }) {
                    self.queued = true;
                    self.not_before = None;
                    self.now = ContainerPhase::Waiting { reason: reason.clone(), message: message.clone() };
                }
            }
            ContainerState::Running { started } => {
                self.now = ContainerPhase::Running { started: *started };
                self.start_failures = 0;
            }
            ContainerState::Exited { started, finished, exit_code, reason, message } => {
                if matches!(self.now, ContainerPhase::Exited(_)) || self.not_before.is_some() {
                    return;
                }
                self.now = ContainerPhase::Exited(Exit {
                    started: *started,
                    finished: *finished,
                    exit_code: *exit_code,
                    reason: reason.clone(),
                    message: message.clone(),
                });
            }
        }
    }

    /// The container ended and is to be restarted: the next attempt follows after a pause. `name` is `container=…
    /// pod=…`, for the message. Returns whether there is a pause: the first restart is immediate.
    pub(crate) fn restart_later(&mut self, name: &str, now: Clocks) -> bool {
        let ContainerPhase::Exited(exit) = self.now.clone() else { return false };
        let ran = Duration::try_from(exit.finished.duration_since(exit.started)).unwrap_or_default();
        self.crashes = if ran >= STABLE_AFTER { 1 } else { self.crashes.saturating_add(1) };
        // An attempt that ended was started, even if it was never seen running.
        self.start_failures = 0;
        let pause = match self.crashes {
            0 | 1 => Duration::ZERO,
            more => CRASH.full(more - 1),
        };
        // The container may have ended during an earlier process.
        let rested = Duration::try_from(now.wall.duration_since(exit.finished)).unwrap_or_default();
        self.not_before = Some(now.steady + pause.saturating_sub(rested));
        self.last = Some(exit);
        self.attempt += 1;
        self.queued = false;
        self.probes = ProbeVerdicts::default();
        self.killed_by_probe = false;
        self.is_replaced = false;
        let span = mayfly_api::duration::Span(pause);
        let (reason, message) = match self.last.as_ref().filter(|_| pause.is_zero()) {
            Some(exit) if exit.reason == REASON_START_ERROR => (REASON_RUN, exit.message.clone()),
            _ => ("CrashLoopBackOff", format!("back-off {span} restarting failed {name}")),
        };
        self.now = ContainerPhase::Waiting { reason: reason.into(), message };
        !pause.is_zero()
    }

    /// A container that ended gets another attempt at once.
    fn run_again(&mut self) {
        if let ContainerPhase::Exited(exit) = &self.now {
            *self = Self { last: Some(exit.clone()), attempt: self.attempt + 1, ..Self::default() };
        }
    }

    /// The process of the current attempt could not be started: the attempt has ended, and the restart policy decides
    /// about another one.
    pub(crate) fn process_failed(&mut self, message: String, now: Timestamp) {
        let (reason, exit_code) = (REASON_START_ERROR.to_owned(), EXIT_NOT_STARTED);
        self.not_before = None;
        self.now = ContainerPhase::Exited(Exit { started: now, finished: now, exit_code, reason, message });
    }

    /// The container could not be made: the same attempt is retried after a pause.
    pub(crate) fn start_failed(&mut self, reason: &str, message: String, now: Instant) {
        self.wait(reason, message, START, now);
    }

    /// The image could not be pulled: the same attempt is retried after a pause. Returns whether the previous attempt
    /// failed for the same reason.
    pub(crate) fn pull_failed(&mut self, image: &str, why: &str, is_remote: bool, now: Instant) -> bool {
        let again = match &self.now {
            ContainerPhase::Waiting { reason, .. } => reason == REASON_PULL || reason == REASON_PULL_AGAIN,
            ContainerPhase::Running { .. } | ContainerPhase::Exited(_) => false,
        };
        let (reason, message) = match again {
            true => (REASON_PULL_AGAIN, format!("Back-off pulling image {image:?}: {REASON_PULL}: {why}")),
            false => (REASON_PULL, why.to_owned()),
        };
        self.wait(reason, message, if is_remote { PULL_REMOTE } else { PULL }, now);
        again
    }

    fn wait(&mut self, reason: &str, message: String, pauses: Backoff, now: Instant) {
        self.start_failures = self.start_failures.saturating_add(1);
        self.not_before = Some(now + pauses.full(self.start_failures));
        self.now = ContainerPhase::Waiting { reason: reason.into(), message };
    }

    pub(crate) fn started(&mut self, at: Timestamp) {
        self.now = ContainerPhase::Running { started: at };
        self.start_failures = 0;
        self.not_before = None;
    }
}

#[cfg(test)]
mod tests;
