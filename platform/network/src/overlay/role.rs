//! Keeps the routes to the pods of other nodes, and publishes this node's end of the tunnels.

use std::{collections::BTreeSet, io, sync::Arc, time::Duration};

use kube::{
    Api,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Pod},
};
use mayfly_informer::{Changes, Informer, Informers};
use serde_json::json;
use tokio::{sync::watch, task::spawn_blocking};
use tokio_util::sync::CancellationToken;

use super::{
    ANNOTATION_TUNNEL,
    kernel::{KernelState, OverlayStep, execute},
    plan::{OverlayConfig, OverlayNode, OverlayPlan, plan, removal},
};
use crate::demand::is_container_pod;

/// The interval at which failed steps are retried and the kernel's state is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The number of plans after one change: one for devices, one for their entries, one that finds nothing to do.
const PLANS_MAX: usize = 3;

/// The routes from a node to the pods of the cluster's other nodes, created and not yet running.
pub struct NodeRoutes {
    config: OverlayConfig,
    client: kube::Client,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    pod_mtu: watch::Sender<Option<u32>>,
}

impl std::fmt::Debug for NodeRoutes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeRoutes").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The nodes as the plan sees them.
#[derive(Debug, Default, PartialEq, Eq)]
struct OverlayCluster {
    /// This node, once its range and its address are known.
    own: Option<OverlayNode>,
    peers: Vec<OverlayNode>,
    problems: BTreeSet<String>,
}

impl OverlayCluster {
    fn of<'a>(nodes: impl IntoIterator<Item = &'a Node>, config: &OverlayConfig) -> Self {
        let mut cluster = Self::default();
        for node in nodes {
            match OverlayNode::of(node, config.pods) {
                Ok(Some(node)) if node.name == config.node => cluster.own = Some(node),
                Ok(Some(node)) => cluster.peers.push(node),
                Ok(None) => {}
                Err(error) => {
                    let name = node.metadata.name.as_deref().unwrap_or_default();
                    cluster.problems.insert(format!("node {name}: {error}"));
                }
            }
        }
        cluster.peers.sort_by(|one, other| one.name.cmp(&other.name));
        cluster
    }
}

impl NodeRoutes {
    /// `client` may read Nodes, and change the annotations of the Node of this name.
    #[must_use]
    pub fn create(config: OverlayConfig, informers: &Informers, client: kube::Client) -> Self {
        let pod_mtu = watch::Sender::new(None);
        Self { config, client, nodes: informers.of(), pods: informers.of(), pod_mtu }
    }

    /// The MTU for new pods, in bytes; `None`: that of the machine's links, since no node is reached through a tunnel.
    #[must_use]
    pub fn pod_mtu(&self) -> watch::Receiver<Option<u32>> {
        self.pod_mtu.subscribe()
    }

    /// Runs until `stop`. Then the routes are removed, unless the node has pods of containers: they keep running until
    /// the next start, which takes the routes over.
    pub async fn run(self, stop: CancellationToken) {
        let synced = async { tokio::join!(self.nodes.synced(), self.pods.synced()) };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let mut changes = self.nodes.subscribe();
        let mut reported = BTreeSet::new();
        loop {
            let cluster = self.cluster();
            let working = self.reconcile(&cluster);
            let Some(problems) = stop.run_until_cancelled(working).await else { break };
            for problem in problems.difference(&reported) {
                tracing::warn!(problem, "cannot reach the pods of all nodes; will try again");
            }
            if problems.is_empty() && !reported.is_empty() {
                tracing::info!("the pods of all nodes have routes again");
            }
            reported = problems;
            let changed = async {
                tokio::select! {
                    () = self.moved(&cluster, &mut changes) => {}
                    () = tokio::time::sleep(CHECK_INTERVAL) => {}
                }
            };
            if stop.run_until_cancelled(changed).await.is_none() {
                break;
            }
        }
        self.leave().await;
    }

    fn cluster(&self) -> OverlayCluster {
        let nodes = self.nodes.list();
        OverlayCluster::of(nodes.iter().map(|node| &**node), &self.config)
    }

    /// Waits until the nodes are not as planned for. Most changes of Nodes are heartbeats.
    async fn moved(&self, planned: &OverlayCluster, changes: &mut Changes) {
        while self.cluster() == *planned {
            changes.next().await;
        }
    }

    /// Makes the kernel's state the wanted one. Returns what is not.
    async fn reconcile(&self, cluster: &OverlayCluster) -> BTreeSet<String> {
        let mut problems = cluster.problems.clone();
        // Without its own range and address, a node is not reached either: what an earlier process left stays.
        let Some(own) = &cluster.own else { return problems };
        let mut failed = Vec::new();
        for _ in 0..PLANS_MAX {
            let plan = match self.plan(own, &cluster.peers).await {
                Ok(plan) => plan,
                Err(error) => {
                    problems.insert(format!("the kernel's routes cannot be read: {error}"));
                    return problems;
                }
            };
            self.pod_mtu.send_if_modified(|mtu| std::mem::replace(mtu, plan.pod_mtu) != plan.pod_mtu);
            if let Err(error) = self.publish(plan.endpoint.to_annotation()).await {
                tracing::warn!(%error, "cannot publish this node's tunnel in its Node; will try again");
            }
            let is_last = plan.steps.is_empty() || !failed.is_empty();
            problems.extend(plan.problems);
            if is_last {
                break;
            }
            failed = carry_out(plan.steps).await;
        }
        problems.extend(failed);
        problems
    }

    async fn plan(&self, own: &OverlayNode, peers: &[OverlayNode]) -> io::Result<OverlayPlan> {
        let state = blocking(KernelState::read).await?;
        Ok(plan(&self.config, own, peers, &state))
    }

    /// Writes the annotation, if it has another value.
    async fn publish(&self, endpoint: String) -> Result<(), kube::Error> {
        let node: Option<Arc<Node>> = self.nodes.get(&ObjectKey::cluster(&*self.config.node));
        let annotations = node.as_ref().and_then(|node| node.metadata.annotations.as_ref());
        if annotations.and_then(|all| all.get(ANNOTATION_TUNNEL)) == Some(&endpoint) {
            return Ok(());
        }
        let patch = json!({"metadata": {"annotations": {ANNOTATION_TUNNEL: endpoint}}});
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.patch(&self.config.node, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop)
    }

    async fn leave(&self) {
        let pods = self.pods.list();
        if pods.iter().any(|pod| is_container_pod(pod, &self.config.node)) {
            return;
        }
        let steps = match blocking(KernelState::read).await {
            Ok(state) => removal(&self.config, &state),
            Err(error) => return tracing::warn!(%error, "cannot remove the routes to other nodes"),
        };
        for problem in carry_out(steps).await {
            tracing::warn!(problem, "cannot remove the routes to other nodes");
        }
    }
}

/// Executes steps; returns a message about each failed one.
async fn carry_out(steps: Vec<OverlayStep>) -> Vec<String> {
    if steps.is_empty() {
        return Vec::new();
    }
    tracing::info!(steps = steps.len(), first = ?steps.first(), "changing the routes to other nodes");
    match blocking(move || execute(&steps)).await {
        Ok(failed) => failed.iter().map(|(step, error)| format!("{step:?}: {error}")).collect(),
        Err(error) => vec![format!("the kernel's routes cannot be changed: {error}")],
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)?
}
