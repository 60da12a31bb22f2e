//! Checks all nodes periodically, and carries out the steps of [`super::plan`].

use std::{collections::HashMap, sync::Arc};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    k8s::{
        api::{
            coordination::v1::Lease,
            core::v1::{Node, NodeCondition, Pod, PodCondition},
        },
        apimachinery::pkg::apis::meta::v1::Time,
        jiff::Timestamp,
    },
    wellknown::NAMESPACE_NODE_LEASE,
};
use mayfly_informer::{EventRecorder, Index, Informer, Informers};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    plan::{ANNOTATION_TTL, Health, Step, UNSCHEDULABLE, is_own, mark},
};
use crate::{
    metadata::{is_gone, only, status_patch, uid},
    resync::ResyncTicker,
};

/// An index of pods by the node they are bound to.
const BY_NODE: &str = "node";
/// Upstream's reason.
const SILENT_REASON: &str = "NodeStatusUnknown";
const SILENT_MESSAGE: &str = "Kubelet stopped posting node status.";

/// Monitors the nodes' Leases.
pub(crate) struct NodeController {
    config: Config,
    client: Client,
    nodes: Informer<Node>,
    leases: Informer<Lease>,
    pods: Informer<Pod>,
    pods_by_node: Index<Pod>,
    health: Health,
    /// The nodes at the last check.
    known: HashMap<String, Arc<Node>>,
}

impl NodeController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = informers.of::<Pod>();
        let pods_by_node = pods.index(BY_NODE, |pod: &Pod| {
            pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).into_iter().collect()
        });
        let (nodes, leases) = (informers.of(), informers.of());
        Self {
            config,
            client,
            nodes,
            leases,
            pods,
            pods_by_node,
            health: Health::default(),
            known: HashMap::new(),
        }
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let events = EventRecorder::start(self.client.clone(), "node-controller", None, stop.clone());
        let mut resync = ResyncTicker::every(self.config.every, stop.clone());
        let mut changes = self.nodes.subscribe();
        loop {
            tokio::select! {
                goes_on = resync.next() => if !goes_on { return },
                changed = changes.next() => {
                    for node in changed.iter().filter_map(|key| self.nodes.get(key)) {
                        let Some(step) = mark(&node) else { continue };
                        // After a conflict, the node's next change starts another check.
                        if let Err(error) = act(&self.client, &self.nodes, step, &events).await {
                            tracing::debug!(%error, "cannot mark a node");
                        }
                    }
                    continue;
                }
            }
            if !(self.nodes.is_synced() && self.leases.is_synced() && self.pods.is_synced()) {
                continue;
            }
            let leases = self.leases.list_namespace(NAMESPACE_NODE_LEASE).into_iter();
            let leases: HashMap<_, _> = leases.map(|lease| (lease.name_any(), lease)).collect();
            let nodes = self.nodes.list();
            self.announce(&nodes, &events);
            let pods_of = |node: &str| self.pods_by_node.get(node);
            for step in self.health.plan(&nodes, &leases, pods_of, &self.config, Instant::now()) {
                if let Err(error) = act(&self.client, &self.nodes, step, &events).await {
                    tracing::warn!(%error, "cannot act on a node; will retry");
                }
            }
        }
    }
}

impl NodeController {
    /// Records the nodes that came and went since the last check.
    fn announce(&mut self, nodes: &[Arc<Node>], events: &EventRecorder) {
        let before = std::mem::take(&mut self.known);
        self.known = nodes.iter().map(|node| (node.name_any(), node.clone())).collect();
        for (name, node) in self.known.iter().filter(|(name, _)| !before.contains_key(*name)) {
            let message = format!("Node {name} event: Registered Node {name} in Controller");
            events.normal(&**node, "RegisteredNode", message);
        }
        for (name, node) in before.iter().filter(|(name, _)| !self.known.contains_key(*name)) {
            let message = format!("Node {name} event: Removing Node {name} from Controller");
            events.normal(&**node, "RemovingNode", message);
        }
    }
}

async fn act(
    client: &Client,
    nodes: &Informer<Node>,
    step: Step,
    events: &EventRecorder,
) -> kube::Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    match step {
        Step::MarkUnknown { node } => {
            let Some(known) = nodes.get(&mayfly_api::ObjectKey::cluster(&node)) else { return Ok(()) };
            events.normal(&*known, "NodeNotReady", format!("Node {node} status is now: NodeNotReady"));
            let patch = Patch::Merge(json!({"status": {"conditions": silent_conditions(&known)}}));
            api.patch_status(&node, &PatchParams::default(), &patch).await?;
        }
        Step::Mark { node, resource_version, taints } => {
            let mut patch = json!({"metadata": {"annotations": {ANNOTATION_TTL: "0"}}});
            if let Some(mut taints) = taints {
                for taint in taints.iter_mut().filter(|taint| taint.key == UNSCHEDULABLE) {
                    taint.time_added.get_or_insert_with(|| Time(Timestamp::now()));
                }
                patch["metadata"]["resourceVersion"] = json!(resource_version);
                patch["spec"] = json!({"taints": taints});
            }
            api.patch(&node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        Step::MarkPodNotReady { pod } => {
            events.warning(&*pod, "NodeNotReady", "Node is not ready".to_owned());
            let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
            // The kubelet writes the condition again once it is back.
            let patch = Patch::Strategic(status_patch(&*pod, json!({"conditions": [not_ready()]})));
            let result = pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Step::SetTaints { node, resource_version, mut taints } => {
            for taint in taints.iter_mut().filter(|taint| is_own(taint)) {
                taint.time_added.get_or_insert_with(|| Time(Timestamp::now()));
            }
            let metadata = json!({"resourceVersion": resource_version});
            let patch = Patch::Merge(json!({"metadata": metadata, "spec": {"taints": taints}}));
            api.patch(&node, &PatchParams::default(), &patch).await?;
        }
        Step::Evict { pod } => {
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            let message = format!("Marking for deletion Pod {namespace}/{name}");
            events.normal(&*pod, "TaintManagerEviction", message);
            let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            // The `podFailurePolicy` of the pod's Job may ignore a failure with this condition.
            let patch = Patch::Strategic(status_patch(&*pod, json!({"conditions": [disrupted()]})));
            let result = pods.patch_status(&name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
            let result = pods.delete(&name, &only(uid(&*pod))).await;
            if !is_gone(&result) {
                result?;
            }
        }
    }
    Ok(())
}

/// The condition of the pods of a silent node, without the fields that stay.
fn not_ready() -> PodCondition {
    PodCondition {
        type_: "Ready".into(),
        status: "False".into(),
        last_transition_time: Some(Time(Timestamp::now())),
        ..PodCondition::default()
    }
}

/// Upstream's condition of a pod that a taint evicts.
fn disrupted() -> PodCondition {
    PodCondition {
        type_: "DisruptionTarget".into(),
        status: "True".into(),
        reason: Some("DeletionByTaintManager".into()),
        message: Some("Taint manager: deleting due to NoExecute taint".into()),
        last_transition_time: Some(Time(Timestamp::now())),
        ..PodCondition::default()
    }
}

/// All of a node's conditions, with status Unknown.
fn silent_conditions(node: &Node) -> Vec<NodeCondition> {
    let known = node.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    let mut conditions: Vec<_> = known
        .into_iter()
        .map(|condition| NodeCondition {
            status: "Unknown".into(),
            reason: Some(SILENT_REASON.into()),
            message: Some(SILENT_MESSAGE.into()),
            last_transition_time: Some(Time(Timestamp::now())),
            ..condition
        })
        .collect();
    if !conditions.iter().any(|condition| condition.type_ == "Ready") {
        conditions.push(NodeCondition {
            type_: "Ready".into(),
            status: "Unknown".into(),
            reason: Some("NodeStatusNeverUpdated".into()),
            message: Some("Kubelet never posted node status.".into()),
            last_transition_time: Some(Time(Timestamp::now())),
            ..NodeCondition::default()
        });
    }
    conditions
}
