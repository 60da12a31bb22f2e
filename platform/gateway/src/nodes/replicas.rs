//! The replicas of a revision on each node, and the choice of a node for each request.

use std::{
    cmp::Ordering as Order,
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use mayfly_api::k8s::api::core::v1::Pod;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

/// The time for which a node gets no requests after a failed connection. The leader's readings of a node's load, one a
/// second, extend it while the node stays unreachable.
const AVOIDED_FOR: Duration = Duration::from_secs(2);

/// The requests and replicas of a revision at one place.
#[derive(Clone, Copy, Debug)]
struct PlaceLoad {
    requests: u32,
    replicas: u32,
}

impl PlaceLoad {
    fn has_room(self, concurrency: u32) -> bool {
        u64::from(self.requests) < u64::from(concurrency) * u64::from(self.replicas)
    }

    /// Compares the requests for each replica.
    fn by_load(&self, other: &Self) -> Order {
        let share = |of: &Self, others: &Self| u64::from(of.requests) * u64::from(others.replicas);
        share(self, other).cmp(&share(other, self))
    }
}

/// Chooses the place of the next request: `None` is this node. Other nodes are used only while this one has no room;
/// then the one with the lowest load that has room. `others` has `None` for a node that must not be used.
fn choose(
    here: PlaceLoad,
    others: impl Iterator<Item = Option<PlaceLoad>>,
    concurrency: u32,
) -> Option<usize> {
    if here.has_room(concurrency) {
        return None;
    }
    let usable = others.enumerate().filter_map(|(at, load)| Some((at, load?)));
    let free = usable.filter(|(_, load)| load.has_room(concurrency));
    free.min_by(|(_, a), (_, b)| a.by_load(b)).map(|(at, _)| at)
}

/// The node of a pod that is a ready replica.
pub(crate) fn ready_on(pod: &Pod) -> Option<&str> {
    let status = pod.status.as_ref()?;
    let mut conditions = status.conditions.iter().flatten();
    let is_ready = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let is_over = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
        || pod.metadata.deletion_timestamp.is_some();
    pod.spec.as_ref()?.node_name.as_deref().filter(|_| is_ready && !is_over)
}

/// Another node of the cluster.
pub(crate) struct PeerNode {
    pub(crate) name: Arc<str>,
    /// The time from which it gets requests again, in microseconds after `origin`.
    avoided_until_us: AtomicU64,
    origin: Instant,
}

impl PeerNode {
    pub(crate) fn new(name: Arc<str>) -> Self {
        Self { name, avoided_until_us: AtomicU64::new(0), origin: Instant::now() }
    }

    /// A connection failed: no request is sent for a while.
    pub(crate) fn avoid(&self) {
        let until = (self.origin.elapsed() + AVOIDED_FOR).as_micros();
        self.avoided_until_us.store(u64::try_from(until).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The node has answered.
    pub(crate) fn answered(&self) {
        if self.avoided_until_us.load(Ordering::Relaxed) != 0 {
            self.avoided_until_us.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_avoided(&self) -> bool {
        let until_us = self.avoided_until_us.load(Ordering::Relaxed);
        until_us != 0 && self.origin.elapsed().as_micros() < u128::from(until_us)
    }
}

/// The other nodes that have replicas of any revision.
#[derive(Default)]
pub(crate) struct PeerNodes {
    by_name: Mutex<HashMap<Arc<str>, Weak<PeerNode>>>,
    appeared: Notify,
}

impl PeerNodes {
    fn get(&self, name: &str) -> Arc<PeerNode> {
        let mut by_name = self.by_name.lock();
        if let Some(node) = by_name.get(name).and_then(Weak::upgrade) {
            return node;
        }
        by_name.retain(|_, node| node.strong_count() > 0);
        let node = Arc::new(PeerNode::new(name.into()));
        by_name.insert(node.name.clone(), Arc::downgrade(&node));
        self.appeared.notify_one();
        node
    }

    pub(crate) fn list(&self) -> Vec<Arc<PeerNode>> {
        self.by_name.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Waits until there is a node that was not there before.
    pub(crate) async fn appeared(&self) {
        self.appeared.notified().await;
    }
}

/// A revision's replicas on another node.
struct NodeReplicas {
    node: Arc<PeerNode>,
    ready: AtomicU32,
    /// The requests that were sent there and have not ended.
    in_flight: AtomicU32,
    /// The requests that the node's gateway got from its own clients, as last reported.
    own: AtomicU32,
}

impl NodeReplicas {
    fn load(&self) -> PlaceLoad {
        let own = self.own.load(Ordering::Relaxed);
        PlaceLoad {
            requests: self.in_flight.load(Ordering::Relaxed).saturating_add(own),
            replicas: self.ready.load(Ordering::Relaxed),
        }
    }
}

/// The ready replicas of one revision. Written by the owner of the routes, read by requests without a lock.
#[derive(Default)]
pub(crate) struct RevisionReplicas {
    /// Whether other nodes have any.
    elsewhere: AtomicBool,
    /// The number on this node.
    here: AtomicU32,
    nodes: ArcSwap<Vec<Arc<NodeReplicas>>>,
    /// The total time of the requests that other gateways served by themselves, in microseconds.
    served_elsewhere_us: AtomicU64,
}

impl RevisionReplicas {
    /// Replaces the numbers of ready replicas; `by_node` includes this node. Counts of requests are kept.
    pub(crate) fn set(&self, mut by_node: BTreeMap<String, u32>, this_node: &str, peers: &PeerNodes) {
        self.here.store(by_node.remove(this_node).unwrap_or(0), Ordering::SeqCst);
        let known = self.nodes.load();
        let nodes: Vec<_> = by_node
            .into_iter()
            .map(|(name, ready)| {
                if let Some(replicas) = known.iter().find(|known| *known.node.name == *name) {
                    replicas.ready.store(ready, Ordering::Relaxed);
                    return replicas.clone();
                }
                Arc::new(NodeReplicas {
                    node: peers.get(&name),
                    ready: AtomicU32::new(ready),
                    in_flight: AtomicU32::new(0),
                    own: AtomicU32::new(0),
                })
            })
            .collect();
        let elsewhere = !nodes.is_empty();
        self.nodes.store(Arc::new(nodes));
        self.elsewhere.store(elsewhere, Ordering::Relaxed);
    }

    /// Whether other nodes have ready replicas. A single relaxed load: every request of a leader reads it.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.elsewhere.load(Ordering::Relaxed)
    }

    /// The number of ready replicas on this node.
    pub(crate) fn here(&self) -> u32 {
        self.here.load(Ordering::SeqCst)
    }

    /// A slot on another node, unless this node has room, or no other node has. `running`: the revision's requests in
    /// flight here and elsewhere, including the one to be placed. `excluded`: nodes that must not be used.
    pub(crate) fn acquire(&self, running: u32, concurrency: u32, excluded: &[Arc<str>]) -> Option<NodeSlot> {
        let nodes = self.nodes.load();
        let away = nodes.iter().map(|node| node.in_flight.load(Ordering::Relaxed)).sum::<u32>();
        // This node's host runs functions without a replica, too: a request must not wait for one.
        let here = PlaceLoad {
            requests: running.saturating_sub(1).saturating_sub(away),
            replicas: self.here().max(1),
        };
        let others = nodes.iter().map(|replicas| {
            let node = &replicas.node;
            (!excluded.contains(&node.name) && !node.is_avoided()).then(|| replicas.load())
        });
        let chosen = nodes.get(choose(here, others, concurrency)?)?;
        chosen.in_flight.fetch_add(1, Ordering::Relaxed);
        Some(NodeSlot(chosen.clone()))
    }

    /// Records the load that a node's gateway reported: its own requests, and the time that they spent since the last
    /// report.
    pub(super) fn report(&self, node: &str, requests: u32, spent: Duration) {
        let micros = u64::try_from(spent.as_micros()).unwrap_or(u64::MAX);
        self.served_elsewhere_us.fetch_add(micros, Ordering::Relaxed);
        if let Some(replicas) = self.nodes.load().iter().find(|replicas| *replicas.node.name == *node) {
            replicas.own.store(requests, Ordering::Relaxed);
        }
    }

    /// The requests that other gateways serve by themselves, as last reported.
    pub(crate) fn requests_elsewhere(&self) -> u32 {
        if !self.is_elsewhere() {
            return 0;
        }
        self.nodes.load().iter().map(|node| node.own.load(Ordering::Relaxed)).sum()
    }

    /// The total time of those requests.
    pub(crate) fn spent_elsewhere(&self) -> Duration {
        Duration::from_micros(self.served_elsewhere_us.load(Ordering::Relaxed))
    }
}

/// A request's slot on another node; released on drop.
pub(crate) struct NodeSlot(Arc<NodeReplicas>);

impl NodeSlot {
    pub(crate) fn node(&self) -> &Arc<PeerNode> {
        &self.0.node
    }
}

impl Drop for NodeSlot {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "replicas_tests.rs"]
mod tests;
