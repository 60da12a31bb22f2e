//! The ranges of nodes' pods: every Node without `spec.podCIDR` gets a free range of the cluster's pod network.
//!
//! A node that has chosen a range itself names it in the annotation `mayfly.dev/pod-range`; it is taken over if it is
//! free. Other nodes get the lowest free range. The range of a deleted Node is free again. (Behaviour: upstream
//! `pkg/controller/nodeipam/ipam`, the range allocator.)

mod plan;

use std::{collections::HashMap, sync::Arc};

use ipnet::Ipv4Net;
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::k8s::api::core::v1::Node;
use mayfly_informer::{
    EventRecorder, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::metadata::{is_gone, uid};
use plan::{RangeAssignment, ranges_of};

/// On a Node: the range of pod addresses that the node has chosen itself, an IPv4 network.
pub const ANNOTATION_POD_RANGE: &str = "mayfly.dev/pod-range";

/// The pod network of the cluster and the size of a node's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIpam {
    /// The network of all pods, `10.212.0.0/16` for example.
    pub network: Ipv4Net,
    /// The prefix length of a node's range: 24 for 254 pods.
    pub prefix: u8,
}

/// A range that was written.
#[derive(Clone, Copy, Debug)]
struct WrittenRange {
    range: Ipv4Net,
    /// False while the result of the request is unknown: it is repeated for the same node.
    is_certain: bool,
}

/// Assigns the ranges. Inactive without settings.
pub(crate) struct NodeIpamController {
    config: Option<NodeIpam>,
    client: Client,
    nodes: Informer<Node>,
    /// Ranges that were written, by the uids of their nodes, while the informer may not have them yet.
    written: Mutex<HashMap<String, WrittenRange>>,
    /// The last event about each node, by its uid, so that it is recorded once.
    noticed: Mutex<HashMap<String, String>>,
}

impl NodeIpamController {
    pub(crate) fn create(config: Option<NodeIpam>, client: Client, informers: &Informers) -> Self {
        let (written, noticed) = (Mutex::default(), Mutex::default());
        Self { config, client, nodes: informers.of(), written, noticed }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let Some(config) = self.config else { return };
        if stop.run_until_cancelled(self.nodes.synced()).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "cidrAllocator", None, stop.clone());
        // The queue has one key: a range is free only with regard to all nodes.
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.nodes.handle(move |_| changed.add(()));
        let controller = Arc::new(self);
        reconcile::run("node-ipam", queue, 1, stop, move |()| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.assign(&config, &events).await }
        })
        .await;
    }

    async fn assign(&self, config: &NodeIpam, events: &EventRecorder) -> kube::Result<Outcome> {
        let nodes = self.nodes.list();
        self.forget(&nodes);
        let written = self.written.lock().clone();
        let mut first_error = None;
        let ranges = written.iter().map(|(uid, written)| (uid.clone(), written.range)).collect();
        let uncertain = nodes.iter().filter_map(|node| {
            let written = written.get(uid(&**node)).filter(|written| !written.is_certain)?;
            Some(RangeAssignment::Assign { node: node.clone(), range: written.range })
        });
        for assignment in uncertain.chain(plan::plan(config, &nodes, &ranges)) {
            match assignment {
                RangeAssignment::Assign { node, range } => {
                    if let Err(error) = self.write(&node, range).await {
                        first_error.get_or_insert(error);
                    }
                }
                RangeAssignment::Notice { node, reason, message } => {
                    let last = self.noticed.lock().insert(uid(&*node).to_owned(), message.clone());
                    if last.as_ref() != Some(&message) {
                        events.warning(&*node, reason, message);
                    }
                }
            }
        }
        first_error.map_or(Ok(Outcome::Done), Err)
    }

    /// Forgets what the informer shows by now, and deleted nodes.
    fn forget(&self, nodes: &[Arc<Node>]) {
        let known: HashMap<_, _> = nodes.iter().map(|node| (uid(&**node), node)).collect();
        let is_waiting = |uid: &str| known.get(uid).is_some_and(|node| ranges_of(node).is_empty());
        self.written.lock().retain(|uid, _| is_waiting(uid));
        self.noticed.lock().retain(|uid, _| known.contains_key(uid.as_str()));
    }

    /// Writes a node's range. It counts as taken from before the request until it is certain that it was not written.
    async fn write(&self, node: &Node, range: Ipv4Net) -> kube::Result<()> {
        let (api, name): (Api<Node>, _) = (Api::all(self.client.clone()), node.name_any());
        let is_now = |is_certain: bool| {
            self.written.lock().insert(uid(node).to_owned(), WrittenRange { range, is_certain });
        };
        is_now(false);
        let metadata = json!({"resourceVersion": node.metadata.resource_version, "uid": uid(node)});
        let text = range.to_string();
        let spec = json!({"podCIDR": text, "podCIDRs": [text]});
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": spec}));
        let written = api.patch(&name, &PatchParams::default(), &patch).await;
        let Err(error) = written else {
            tracing::info!(node = name, %range, "assigned a range of pod addresses");
            is_now(true);
            return Ok(());
        };
        if matches!(error, kube::Error::Api(_)) {
            // A conflict may be one with an earlier write of this range.
            let current = api.get(&name).await;
            if is_gone(&current) || current.is_ok_and(|current| ranges_of(&current).is_empty()) {
                self.written.lock().remove(uid(node));
            }
        }
        Err(error)
    }
}
