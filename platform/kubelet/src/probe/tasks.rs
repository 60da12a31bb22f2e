//! One task for each probe of the containers that run.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Container, Pod},
        jiff::Timestamp,
    },
};
use mayfly_informer::{EventRecorder, reconcile::WorkQueue};
use mayfly_runtime::{ContainerId, PodUid, Runtime};
use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::task::AbortOnDropHandle;

use super::{
    check::{ProbeResult, ProbeTarget, check},
    thresholds::{ProbeCounter, ProbeKind, ProbeTiming},
};
use crate::pod::{
    local::{ContainerPhase, LocalPod},
    plan,
};

/// Attempts of one probe that cannot be executed (upstream's `maxProbeRetries`).
const TRIES_MAX: usize = 3;

/// A probe of one attempt of a container.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ProbeId {
    container: String,
    attempt: u32,
    kind: ProbeKind,
}

struct ProbeTask {
    verdict: Option<bool>,
    _task: AbortOnDropHandle<()>,
}

type TaskTable = Mutex<HashMap<PodUid, HashMap<ProbeId, ProbeTask>>>;

/// The probes of a node's pods.
pub(crate) struct ProbeTasks {
    tasks: Arc<TaskTable>,
    events: EventRecorder,
    queue: WorkQueue<ObjectKey>,
    /// The start of this process: the probes of containers that are older begin at random times.
    began: Timestamp,
}

impl ProbeTasks {
    /// `queue` receives a pod's key when one of its verdicts changes.
    pub(crate) fn new(events: EventRecorder, queue: WorkQueue<ObjectKey>) -> Self {
        Self { tasks: Arc::default(), events, queue, began: Timestamp::now() }
    }

    /// Starts the probes that a pod needs now, and stops those of containers that have ended.
    pub(crate) fn sync(&self, pod: &Arc<Pod>, local: &LocalPod, runtime: &Arc<dyn Runtime>) {
        let wanted = wanted(pod, local);
        let mut tasks = self.tasks.lock();
        if wanted.is_empty() {
            tasks.remove(&local.uid);
            return;
        }
        let of_pod = tasks.entry(local.uid.clone()).or_default();
        of_pod.retain(|id, _| wanted.iter().any(|(known, ..)| known == id));
        for (id, container, started) in wanted {
            if of_pod.contains_key(&id) {
                continue;
            }
            let target = ProbeTarget {
                pod: pod.clone(),
                container: container.clone(),
                id: ContainerId { pod: local.uid.clone(), name: id.container.clone(), attempt: id.attempt },
                address: local.address,
                runtime: runtime.clone(),
            };
            let run = ProbeRun {
                id: id.clone(),
                target,
                is_adopted: started < self.began,
                started,
                events: self.events.clone(),
                queue: self.queue.clone(),
                tasks: Arc::downgrade(&self.tasks),
            };
            let task = AbortOnDropHandle::new(tokio::spawn(run.run()));
            of_pod.insert(id, ProbeTask { verdict: None, _task: task });
        }
    }

    /// The results of a pod's probes so far: container, attempt, kind, verdict.
    pub(crate) fn verdicts(&self, uid: &PodUid) -> Vec<(String, u32, ProbeKind, bool)> {
        let tasks = self.tasks.lock();
        let of_pod = tasks.get(uid).into_iter().flatten();
        of_pod
            .filter_map(|(id, task)| Some((id.container.clone(), id.attempt, id.kind, task.verdict?)))
            .collect()
    }

    /// Stops one container's probes. Those that are still configured start again.
    pub(crate) fn restart(&self, uid: &PodUid, container: &str) {
        if let Some(of_pod) = self.tasks.lock().get_mut(uid) {
            of_pod.retain(|id, _| id.container != container);
        }
    }

    /// Stops all probes of a pod.
    pub(crate) fn forget(&self, uid: &PodUid) {
        self.tasks.lock().remove(uid);
    }
}

/// The probes that should run: a startup probe alone until it has succeeded, then the others.
fn wanted<'a>(pod: &'a Pod, local: &LocalPod) -> Vec<(ProbeId, &'a Container, Timestamp)> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let mut wanted = Vec::new();
    for container in plan::probed_containers(spec) {
        let known = local.container(&container.name);
        let ContainerPhase::Running { started } = known.now else { continue };
        let kinds: &[ProbeKind] = match plan::is_started(container, &known) {
            false => &[ProbeKind::Startup],
            true => &[ProbeKind::Liveness, ProbeKind::Readiness],
        };
        for kind in kinds.iter().copied().filter(|kind| kind.of(container).is_some()) {
            let id = ProbeId { container: container.name.clone(), attempt: known.attempt, kind };
            wanted.push((id, container, started));
        }
    }
    wanted
}

/// One probe's task.
struct ProbeRun {
    id: ProbeId,
    target: ProbeTarget,
    started: Timestamp,
    is_adopted: bool,
    events: EventRecorder,
    queue: WorkQueue<ObjectKey>,
    tasks: Weak<TaskTable>,
}

impl ProbeRun {
    async fn run(self) {
        let Some(probe) = self.id.kind.of(&self.target.container).cloned() else { return };
        let timing = ProbeTiming::of(&probe);
        sleep(self.delay(&timing)).await;
        let mut ticks = interval(timing.period);
        // A slow probe delays the next ones instead of causing a burst.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut counter = ProbeCounter::default();
        loop {
            ticks.tick().await;
            let succeeded = match self.check(&probe, &timing).await {
                ProbeResult::Success => true,
                ProbeResult::Failure(why) => {
                    self.warn(format!("{} probe failed: {why}", self.id.kind.title()));
                    false
                }
                ProbeResult::Unknown(why) => {
                    let kind = self.id.kind.title();
                    self.warn(format!("{kind} probe errored and resulted in unknown state: {why}"));
                    continue;
                }
            };
            let Some(verdict) = counter.record(succeeded, &timing) else { continue };
            if !self.report(verdict) {
                return;
            }
            let is_final = match self.id.kind {
                ProbeKind::Startup => true,
                // The container is going to be killed.
                ProbeKind::Liveness => !verdict,
                ProbeKind::Readiness => false,
            };
            if is_final {
                return;
            }
        }
    }

    /// The delay of the first probe. It is randomised for containers that an earlier process started, so that their
    /// probes do not all begin at once.
    fn delay(&self, timing: &ProbeTiming) -> Duration {
        let ran = Duration::try_from(Timestamp::now().duration_since(self.started)).unwrap_or_default();
        let delay = timing.initial_delay.saturating_sub(ran);
        match self.is_adopted {
            true => delay + timing.period.mul_f64(rand::rng().random_range(0.0..1.0)),
            false => delay,
        }
    }

    async fn check(
        &self,
        probe: &mayfly_api::k8s::api::core::v1::Probe,
        timing: &ProbeTiming,
    ) -> ProbeResult {
        let mut result = check(probe, timing, &self.target).await;
        for _ in 1..TRIES_MAX {
            if !matches!(result, ProbeResult::Unknown(_)) {
                break;
            }
            result = check(probe, timing, &self.target).await;
        }
        result
    }

    fn warn(&self, message: String) {
        self.events.warning(&*self.target.pod, "Unhealthy", message);
    }

    /// Records the verdict and wakes the pod's worker when it changed. Returns whether this probe is still current.
    fn report(&self, verdict: bool) -> bool {
        let Some(tasks) = self.tasks.upgrade() else { return false };
        let mut tasks = tasks.lock();
        let task = tasks.get_mut(&self.target.id.pod).and_then(|of_pod| of_pod.get_mut(&self.id));
        let Some(task) = task else { return false };
        if task.verdict.replace(verdict) != Some(verdict) {
            self.queue.add(ObjectKey::of(&*self.target.pod));
        }
        true
    }
}
