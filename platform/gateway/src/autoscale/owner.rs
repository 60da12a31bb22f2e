//! Watches the revisions that have requests or replicas, and writes their numbers of replicas.
//!
//! ```text
//!            first request, replicas to add or remove
//!   at rest ────────────────────────────────────────────▶ watched: decided on each second, and at once
//!      ▲                                                    │      when a request has to wait
//!      └───── fewest replicas reached, written, running ────┘
//! ```
//!
//! One task. Requests are answered whether or not a write succeeds; a failed write is retried while its value is still
//! the desired one.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::k8s::api::apps::v1::ReplicaSet;
use mayfly_informer::Backoff;
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use super::policy::{Observation, Policy};
use crate::{
    admission::RevisionDemand,
    metrics::GatewayCounts,
    target::{DemandSignal, RevisionTarget, TargetState, Upstream},
};

/// The interval of decisions while any revision is watched.
const TICK: Duration = Duration::from_secs(1);
/// The shortest pause between two decisions about a revision, even if more are requested.
const DECISIONS_APART_MIN: Duration = Duration::from_millis(100);
/// The largest number of concurrent writes.
const WRITES_MAX: usize = 16;
/// The timeout of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses between attempts of one write.
const RETRY: Backoff = Backoff { first: Duration::from_millis(50), most: Duration::from_secs(10) };
/// Replicas that still differ from the written number after this time are written again: another client may have
/// changed them.
const WRITE_AGAIN: Duration = Duration::from_secs(30);

/// The autoscaler's task.
pub(crate) struct Autoscaler {
    client: Client,
    demand: Arc<DemandSignal>,
    counts: Arc<GatewayCounts>,
    origin: Instant,
    /// Watched revisions by uid.
    watched: HashMap<String, Watched>,
    /// Revisions with a pending write that is not running yet.
    to_write: VecDeque<String>,
    writes: JoinSet<Written>,
    decided_at: Instant,
}

struct Watched {
    target: Arc<RevisionTarget>,
    policy: Policy,
    seen: RevisionDemand,
    spent: Duration,
    replicas: u32,
    /// Whether the component was unloaded since its last request.
    unloaded: bool,
    write: Write,
}

/// The progress of a write of `replicas`.
struct Write {
    state: WriteState,
    failures: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteState {
    /// To be attempted at this time; not attempted yet, or failed before.
    Due(Instant),
    /// In `to_write`, or being written.
    Busy,
    Done {
        replicas: u32,
        at: Instant,
    },
}

/// The result of a write.
struct Written {
    uid: String,
    replicas: u32,
    outcome: Result<(), kube::Error>,
}

impl Autoscaler {
    pub(crate) fn new(client: Client, demand: Arc<DemandSignal>, counts: Arc<GatewayCounts>) -> Self {
        let origin = Instant::now();
        Self {
            client,
            demand,
            counts,
            origin,
            watched: HashMap::new(),
            to_write: VecDeque::new(),
            writes: JoinSet::new(),
            decided_at: origin,
        }
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let demand = self.demand.clone();
        let mut next = None;
        loop {
            self.counts.watched.store(self.watched.len(), Ordering::Relaxed);
            tokio::select! {
                () = stop.cancelled() => return,
                () = demand.woken() => {
                    for target in demand.take() {
                        self.watch(target);
                    }
                    next = Some(self.decided_at + DECISIONS_APART_MIN);
                }
                () = sleep_until(next) => next = self.decide_all(),
                Some(written) = self.writes.join_next() => {
                    if let Ok(written) = written {
                        self.written(written);
                    }
                    self.start_writes();
                    if !self.watched.is_empty() {
                        next = Some(next.unwrap_or(self.decided_at + TICK).min(self.next_retry()));
                    }
                }
            }
        }
    }

    /// Starts to watch a revision, and decides for it at once.
    fn watch(&mut self, target: Arc<RevisionTarget>) {
        let now = Instant::now();
        let uid = target.uid.clone();
        if !self.watched.contains_key(&uid) {
            let seen = target.gate.demand(now);
            let start = observe(&target, now - self.origin, Duration::ZERO, &seen);
            let watched = Watched {
                policy: Policy::new(&target.scaling, &start),
                seen,
                spent: Duration::ZERO,
                replicas: 0,
                unloaded: false,
                write: Write { state: WriteState::Due(now), failures: 0 },
                target,
            };
            self.watched.insert(uid.clone(), watched);
        }
        self.decide(&uid, now);
        self.start_writes();
    }

    /// Decides for all watched revisions. Returns the time of the next decision, if any revision is still watched.
    fn decide_all(&mut self) -> Option<Instant> {
        let now = Instant::now();
        self.decided_at = now;
        let uids: Vec<_> = self.watched.keys().cloned().collect();
        for uid in uids {
            self.decide(&uid, now);
        }
        self.start_writes();
        (!self.watched.is_empty()).then(|| (now + TICK).min(self.next_retry()))
    }

    fn decide(&mut self, uid: &str, now: Instant) {
        let Some(watched) = self.watched.get_mut(uid) else { return };
        let target = watched.target.clone();
        if target.deleted.load(Ordering::Acquire) {
            self.watched.remove(uid);
            return;
        }
        let demand = target.gate.demand(now);
        watched.spent += demand.spent_since(watched.seen);
        watched.seen = demand;
        let seen = observe(&target, now - self.origin, watched.spent, &demand);
        let decision = watched.policy.decide(&seen);
        if watched.replicas != decision.replicas {
            tracing::debug!(
                revision = %target.key, from = watched.replicas, to = decision.replicas,
                panicking = decision.panicking, requests = seen.requests, ready = seen.ready, "replicas"
            );
        }
        watched.replicas = decision.replicas;
        target.desired_replicas.store(decision.replicas, Ordering::Relaxed);
        watched.unload_when_idle(&seen);
        if watched.write.is_due(decision.replicas, seen.ready, now) {
            watched.write.state = WriteState::Busy;
            self.to_write.push_back(uid.to_owned());
        } else if decision.at_rest
            && seen.ready == decision.replicas
            && watched.write.is_done(decision.replicas)
        {
            self.watched.remove(uid);
            self.demand.release(&target, TargetState { ready: seen.ready, routed: seen.routed });
        }
    }

    fn start_writes(&mut self) {
        while self.writes.len() < WRITES_MAX {
            let Some(uid) = self.to_write.pop_front() else { return };
            let Some(watched) = self.watched.get(&uid) else { continue };
            let (replicas, key) = (watched.replicas, watched.target.key.clone());
            let api: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &key.namespace);
            self.counts.scale_writes.fetch_add(1, Ordering::Relaxed);
            self.writes.spawn(async move {
                let write = write(&api, &key.name, replicas);
                let outcome = match tokio::time::timeout(WRITE_TIMEOUT, write).await {
                    Ok(outcome) => outcome,
                    Err(_) => Err(kube::Error::Service("the API did not answer in time".into())),
                };
                Written { uid, replicas, outcome }
            });
        }
    }

    fn written(&mut self, written: Written) {
        let Written { uid, replicas, outcome } = written;
        let Some(watched) = self.watched.get_mut(&uid) else { return };
        let now = Instant::now();
        let write = &mut watched.write;
        match outcome {
            Ok(()) => *write = Write { state: WriteState::Done { replicas, at: now }, failures: 0 },
            Err(error) => {
                self.counts.scale_write_failures.fetch_add(1, Ordering::Relaxed);
                write.failures = write.failures.saturating_add(1);
                write.state = WriteState::Due(now + RETRY.pause(write.failures));
                let revision = &watched.target.key;
                if write.failures == FAILURES_NOTICED {
                    tracing::info!(%revision, replicas, %error, "cannot write replicas; will try again (functions keep answering)");
                } else {
                    tracing::debug!(%revision, replicas, %error, failures = write.failures, "cannot write replicas");
                }
            }
        }
    }

    /// The time of the next retry of a failed write, or of the next tick. Writes that failed often are only retried at
    /// ticks: while the API is unavailable there may be thousands of them.
    fn next_retry(&self) -> Instant {
        let due = self.watched.values().filter_map(|watched| match watched.write.state {
            WriteState::Due(at) if (1..FAILURES_NOTICED).contains(&watched.write.failures) => Some(at),
            _ => None,
        });
        due.min().unwrap_or_else(|| self.decided_at + TICK).max(self.decided_at + DECISIONS_APART_MIN)
    }
}

/// The number of failures from which on a write is logged: at first, a new revision's ReplicaSet may not exist yet.
const FAILURES_NOTICED: u32 = 5;

impl Watched {
    /// Unloads the component when no replica is left. This does not wait for the pod's removal, so that memory is freed
    /// even while the API is unavailable.
    fn unload_when_idle(&mut self, seen: &Observation) {
        if seen.requests > 0 || self.replicas > 0 {
            self.unloaded = false;
        } else if !std::mem::replace(&mut self.unloaded, true)
            && let Upstream::Local(function) = &**self.target.upstream.load()
            && function.is_loaded()
        {
            tracing::debug!(revision = %self.target.key, "idle: dropping the component");
            function.unload();
        }
    }
}

impl Write {
    fn is_due(&self, replicas: u32, ready: u32, now: Instant) -> bool {
        match self.state {
            WriteState::Due(at) => now >= at,
            WriteState::Busy => false,
            WriteState::Done { replicas: written, at } => {
                written != replicas || (ready != replicas && now >= at + WRITE_AGAIN)
            }
        }
    }

    fn is_done(&self, replicas: u32) -> bool {
        matches!(self.state, WriteState::Done { replicas: written, .. } if written == replicas)
    }
}

fn observe(target: &RevisionTarget, at: Duration, spent: Duration, demand: &RevisionDemand) -> Observation {
    let TargetState { ready, routed } = target.seen();
    let lacks_component = target.lacks_component.load(Ordering::Relaxed);
    // Requests that other nodes' gateways serve by themselves need replicas, too.
    let requests = demand.count().saturating_add(target.replicas.requests_elsewhere());
    let spent = spent + target.replicas.spent_elsewhere();
    Observation { at, spent, requests, ready, routed, lacks_component }
}

/// Writes the replicas of a revision's ReplicaSet, which has the revision's name.
async fn write(api: &Api<ReplicaSet>, name: &str, replicas: u32) -> Result<(), kube::Error> {
    let patch = serde_json::json!({"spec": {"replicas": replicas}});
    match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        // A missing ReplicaSet counts as scaled to zero.
        Err(kube::Error::Api(status)) if status.is_not_found() && replicas == 0 => Ok(()),
        Err(error) => Err(error),
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
