//! One revision in the request path: its upstream, its gate and its counters.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use mayfly_api::{ObjectKey, function::Scaling, validation::TIMEOUT_MAX};
use mayfly_runtime::HostedFunction;
use parking_lot::{Mutex, RwLock};
use tokio::{sync::Notify, sync::oneshot, time::Instant};

use crate::{
    admission::{Arrival, Gate},
    load::{COUNT_MAX, Reading, RequestLoad},
    metrics::Traffic,
    nodes::replicas::RevisionReplicas,
    pods::PodUpstream,
    refusal::Refusal,
};

/// One revision. Lives as long as the revision, independently of its routes, so that its queue and its counters survive
/// every change of the table.
pub(crate) struct RevisionTarget {
    pub(crate) uid: String,
    pub(crate) key: ObjectKey,
    pub(crate) function: String,
    pub(crate) timeout: Duration,
    pub(crate) scaling: Scaling,
    pub(crate) gate: Gate,
    /// The number of requests that one replica processes at a time.
    pub(crate) concurrency: u32,
    /// The ready replicas of each node; not tracked while there is only one node.
    pub(crate) replicas: RevisionReplicas,
    /// Those of the gate's requests that another gateway sent, and counts itself.
    relayed: RequestLoad,
    pub(crate) traffic: Traffic,
    /// The upstream of the revision's requests. Replaced when its Secrets, its ConfigMaps or its readiness change.
    pub(crate) upstream: ArcSwap<Upstream>,
    /// The number of running replicas, from the revision's status.
    pub(crate) ready_replicas: AtomicU32,
    /// The autoscaler's number of replicas.
    pub(crate) desired_replicas: AtomicU32,
    /// Whether any route leads here. Without one its replicas are not needed.
    pub(crate) routed: AtomicBool,
    /// Whether the component is missing in the artifact store, according to its status or the last call: no replica can
    /// start.
    pub(crate) lacks_component: AtomicBool,
    /// Whether the revision was removed.
    pub(crate) deleted: AtomicBool,
    /// Whether the autoscaler evaluates the revision.
    watched: AtomicBool,
}

/// The upstream of a revision's requests.
pub(crate) enum Upstream {
    /// A call in this process.
    Local(Arc<dyn HostedFunction>),
    /// HTTP to the pods of a container image.
    Pod(Arc<PodUpstream>),
    /// It cannot answer, for this reason.
    Unavailable(Refusal),
}

/// The inputs of a decision about a revision besides its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TargetState {
    /// The number of running replicas.
    pub(crate) ready: u32,
    /// Whether any route leads to it.
    pub(crate) routed: bool,
}

impl RevisionTarget {
    /// Whether it has an upstream that can be called.
    pub(crate) fn is_hosted(&self) -> bool {
        matches!(&**self.upstream.load(), Upstream::Local(_) | Upstream::Pod(_))
    }

    pub(crate) fn new(
        uid: String,
        key: ObjectKey,
        spec: &mayfly_api::RevisionSpec,
        upstream: Arc<Upstream>,
        queue_max: u32,
    ) -> Self {
        // Requests are admitted before the replicas for them run, so that a request need not wait for the replica that
        // it causes. The limit is the capacity of all replicas together; the host protects the machine.
        let limit = spec.limits.concurrency.saturating_mul(spec.scaling.max).clamp(1, COUNT_MAX);
        Self {
            uid,
            key,
            function: spec.function.clone(),
            // Older revisions may not have passed today's validation.
            timeout: spec.limits.timeout.0.min(TIMEOUT_MAX),
            scaling: spec.scaling.clone(),
            gate: Gate::new(Instant::now(), limit, queue_max),
            concurrency: spec.limits.concurrency.max(1),
            replicas: RevisionReplicas::default(),
            relayed: RequestLoad::new(Instant::now()),
            traffic: Traffic::default(),
            upstream: ArcSwap::new(upstream),
            ready_replicas: AtomicU32::new(0),
            desired_replicas: AtomicU32::new(0),
            routed: AtomicBool::new(false),
            lacks_component: AtomicBool::new(false),
            deleted: AtomicBool::new(false),
            watched: AtomicBool::new(false),
        }
    }

    /// Admits a request, or queues it. Dropping the permit releases the slot.
    pub(crate) fn admit(
        self: &Arc<Self>,
        demand: &DemandSignal,
        now: Instant,
        deadline: Instant,
    ) -> Result<Admission, Refusal> {
        self.traffic.counts();
        let arrival = self.gate.arrive(now, deadline);
        demand.raise(self);
        match arrival {
            Arrival::Running => Ok(Admission::Running(self.permit(now, now))),
            Arrival::Full => Err(Refusal::queue_full(self)),
            Arrival::Waiting(receiver) => {
                demand.wake();
                Ok(Admission::Waiting(Waiting { target: self.clone(), arrived: now, receiver }))
            }
        }
    }

    /// The state recorded by the owner of the routes.
    pub(crate) fn seen(&self) -> TargetState {
        TargetState {
            ready: self.ready_replicas.load(Ordering::SeqCst),
            routed: self.routed.load(Ordering::SeqCst),
        }
    }

    /// Counts a request that another gateway sent, until the value is dropped.
    pub(crate) fn relay(self: &Arc<Self>, now: Instant) -> RelayedRequest {
        self.relayed.begin(now);
        RelayedRequest(self.clone())
    }

    /// The requests of this gateway's own clients that are served here.
    pub(crate) fn own_demand(&self, now: Instant) -> Reading {
        self.gate.demand(now).total().minus(self.relayed.read(now))
    }

    /// The number of running and waiting requests here, and of those that other gateways serve by themselves.
    pub(crate) fn requests(&self) -> u32 {
        let here = self.gate.running() + self.gate.waiting();
        here.saturating_add(self.replicas.requests_elsewhere())
    }

    fn permit(self: &Arc<Self>, arrived: Instant, started: Instant) -> Permit {
        Permit { target: self.clone(), arrived, started, status: None, relayed: None }
    }
}

/// A running request. It ends with the last byte of its response, or when the client disconnects.
pub(crate) struct Permit {
    target: Arc<RevisionTarget>,
    arrived: Instant,
    started: Instant,
    /// `None` until there is a response.
    pub(crate) status: Option<u16>,
    /// Ends with the permit.
    pub(crate) relayed: Option<RelayedRequest>,
}

/// A request that another gateway sent.
pub(crate) struct RelayedRequest(Arc<RevisionTarget>);

impl Drop for RelayedRequest {
    fn drop(&mut self) {
        self.0.relayed.end(Instant::now());
    }
}

impl Permit {
    /// The time of admission.
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// The deadline of its response.
    pub(crate) fn deadline(&self) -> Instant {
        self.arrived + self.target.timeout
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let now = Instant::now();
        self.target.gate.leave(now);
        self.target.traffic.counts().ended(self.status, now.saturating_duration_since(self.arrived));
    }
}

/// The result of an arrival.
pub(crate) enum Admission {
    Running(Permit),
    Waiting(Waiting),
}

/// A request in the queue. May be dropped at any time: a granted slot that was not taken is returned.
pub(crate) struct Waiting {
    target: Arc<RevisionTarget>,
    arrived: Instant,
    receiver: oneshot::Receiver<()>,
}

impl Waiting {
    /// Waits for a slot.
    pub(crate) async fn turn(mut self, deadline: Instant) -> Result<Permit, Refusal> {
        match tokio::time::timeout_at(deadline, &mut self.receiver).await {
            Ok(Ok(())) => Ok(self.target.permit(self.arrived, Instant::now())),
            Ok(Err(_)) | Err(_) => Err(Refusal::queue_too_slow(&self.target)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.receiver.close();
        let now = Instant::now();
        self.target.gate.stop_waiting(now);
        // After `close` no slot can be granted any more, and one that was granted before but not received is found
        // here.
        if self.receiver.try_recv().is_ok() {
            self.target.gate.leave(now);
        }
    }
}

/// Every revision that has had a route.
#[derive(Default)]
pub(crate) struct Targets {
    by_uid: RwLock<HashMap<String, Arc<RevisionTarget>>>,
}

impl Targets {
    pub(crate) fn get(&self, uid: &str) -> Option<Arc<RevisionTarget>> {
        self.by_uid.read().get(uid).cloned()
    }

    pub(crate) fn insert(&self, target: Arc<RevisionTarget>) {
        self.by_uid.write().insert(target.uid.clone(), target);
    }

    pub(crate) fn remove(&self, uid: &str) -> Option<Arc<RevisionTarget>> {
        self.by_uid.write().remove(uid)
    }

    /// The number of running and waiting requests.
    pub(crate) fn requests(&self) -> u64 {
        let of = |target: &Arc<RevisionTarget>| {
            u64::from(target.gate.running()) + u64::from(target.gate.waiting())
        };
        self.with_traffic().iter().map(of).sum()
    }

    /// Revisions that got a request since the start.
    pub(crate) fn with_traffic(&self) -> Vec<Arc<RevisionTarget>> {
        let by_uid = self.by_uid.read();
        let mut asked: Vec<_> =
            by_uid.values().filter(|target| target.traffic.get().is_some()).cloned().collect();
        asked.sort_by(|a, b| a.key.cmp(&b.key));
        asked
    }
}

/// The queue through which the request path notifies the autoscaler of revisions with work. It contains each revision
/// at most once.
#[derive(Default)]
pub(crate) struct DemandSignal {
    raised: Mutex<Vec<Arc<RevisionTarget>>>,
    notify: Notify,
    /// Whether no autoscaler takes revisions from the queue: it stays empty.
    ignored: bool,
}

impl DemandSignal {
    /// A signal without an autoscaler.
    pub(crate) fn ignored() -> Self {
        Self { ignored: true, ..Self::default() }
    }

    /// Makes the autoscaler evaluate the revision from now on. A single load if it already does.
    pub(crate) fn raise(&self, target: &Arc<RevisionTarget>) {
        if !target.watched.load(Ordering::SeqCst)
            && !target.watched.swap(true, Ordering::SeqCst)
            && !self.ignored
        {
            self.raised.lock().push(target.clone());
            self.notify.notify_one();
        }
    }

    /// Makes the autoscaler evaluate all revisions in its queue now.
    pub(crate) fn wake(&self) {
        self.notify.notify_one();
    }

    pub(crate) async fn woken(&self) {
        self.notify.notified().await;
    }

    pub(crate) fn take(&self) -> Vec<Arc<RevisionTarget>> {
        std::mem::take(&mut *self.raised.lock())
    }

    /// Ends the autoscaler's watch of a revision, whose last observed state is `seen`. An arrival or a change after
    /// this call registers the revision again; an earlier one is part of `seen` or found the revision still watched.
    pub(crate) fn release(&self, target: &Arc<RevisionTarget>, seen: TargetState) {
        target.watched.store(false, Ordering::SeqCst);
        if target.requests() > 0 || target.seen() != seen {
            self.raise(target);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_timeout_beyond_all_bounds_still_has_a_deadline() {
        let limits = json!({"timeout": "5000000000000000h"});
        let spec = serde_json::from_value(json!({"function": "f", "source": {}, "limits": limits})).unwrap();
        let upstream = Arc::new(Upstream::Unavailable(Refusal::shutting_down()));
        let key = ObjectKey::new("ns", "f-00001");
        let target = Arc::new(RevisionTarget::new("uid".into(), key, &spec, upstream, 1));
        let now = Instant::now();
        let admitted = target.admit(&DemandSignal::default(), now, now + target.timeout);
        let Ok(Admission::Running(permit)) = admitted else { panic!("there is room for one") };
        assert_eq!(permit.deadline(), now + TIMEOUT_MAX);
    }

    /// The autoscaler decides on an observation that the routes' owner changes before the revision is released.
    #[test]
    fn what_changes_while_it_is_released_is_looked_at_again() {
        let spec = serde_json::from_value(json!({"function": "f", "source": {}})).unwrap();
        let upstream = Arc::new(Upstream::Unavailable(Refusal::shutting_down()));
        let key = ObjectKey::new("ns", "f-00001");
        let target = Arc::new(RevisionTarget::new("uid".into(), key, &spec, upstream, 1));
        let demand = DemandSignal::default();
        let looks = |change: &dyn Fn()| {
            demand.raise(&target);
            assert_eq!(demand.take().len(), 1, "it is watched");
            let seen = target.seen();
            change();
            demand.raise(&target);
            assert!(demand.take().is_empty(), "it is still watched");
            demand.release(&target, seen);
            let again = demand.take().len();
            if again > 0 {
                demand.release(&target, target.seen());
            }
            again
        };
        assert_eq!(looks(&|| ()), 0);
        assert_eq!(looks(&|| target.routed.store(true, Ordering::SeqCst)), 1);
        assert_eq!(looks(&|| target.routed.store(false, Ordering::SeqCst)), 1);
        assert_eq!(looks(&|| target.ready_replicas.store(2, Ordering::SeqCst)), 1);
        assert_eq!(looks(&|| ()), 0);
    }
}
