//! The range of a node's pods, which the cluster assigns.

use ipnet::Ipv4Net;
use mayfly_api::{ObjectKey, k8s::api::core::v1::Node};
use mayfly_informer::Informer;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Follows `spec.podCIDR` of one node.
pub(super) struct PodRangeFollower {
    key: ObjectKey,
    nodes: Informer<Node>,
    range: watch::Sender<Option<Ipv4Net>>,
}

impl PodRangeFollower {
    /// The follower of the node with this name, and the range, `None` until it is assigned.
    pub(super) fn new(node: &str, nodes: Informer<Node>) -> (Self, watch::Receiver<Option<Ipv4Net>>) {
        let (range, assigned) = watch::channel(None);
        (Self { key: ObjectKey::cluster(node), nodes, range }, assigned)
    }

    /// Runs until `stop`.
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut changes = self.nodes.subscribe();
        loop {
            let assigned = self.nodes.get(&self.key).as_deref().and_then(range_of);
            // A node whose object is created again keeps its range until it is assigned another.
            if assigned.is_some() {
                self.range.send_if_modified(|range| std::mem::replace(range, assigned) != assigned);
            }
            if stop.run_until_cancelled(changes.next()).await.is_none() {
                return;
            }
        }
    }
}

fn range_of(node: &Node) -> Option<Ipv4Net> {
    let spec = node.spec.as_ref()?;
    let ranges = spec.pod_cidrs.iter().flatten().chain(&spec.pod_cidr);
    ranges.filter_map(|range| range.parse().ok()).next()
}
