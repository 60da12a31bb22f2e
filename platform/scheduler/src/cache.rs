//! What every node has, and what has been given away: bound pods, and pods assumed to be bound soon.
//!
//! ```text
//!            assume                 seen bound in the API
//!  (waiting) ──────▶ Assumed ────────────────────────────▶ Bound ──▶ gone or finished
//!                       │ binding failed                     
//!                       └──────▶ forgotten
//! ```
//!
//! A plain struct: no lock, no clock. A [`Snapshot`] shares the rows; only rows that changed since the last
//! one are exchanged.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Pod, Taint},
    resources::Amounts,
};

use crate::request::{self, PodRequest};

/// One node, as decisions see it.
#[derive(Clone, Debug, Default)]
pub struct NodeRow {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub unschedulable: bool,
    pub allocatable: Amounts,
    pub requested: Amounts,
    pub host_ports: HashSet<(i32, String)>,
    /// Replicas by revision.
    pub revisions: HashMap<ObjectKey, u32>,
    /// A node whose object is gone but whose pods are not.
    pub missing: bool,
}

/// The rows of all nodes at one moment, in the order of their names' first appearance.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub nodes: Vec<Arc<NodeRow>>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Cache {
    rows: Vec<Arc<NodeRow>>,
    index: HashMap<String, usize>,
    pods: HashMap<String, CachedPod>,
    dirty: HashSet<usize>,
}

#[derive(Debug)]
struct CachedPod {
    node: String,
    assumed: bool,
    request: PodRequest,
}

impl Cache {
    /// A node appeared or changed.
    pub fn set_node(&mut self, node: &Node) {
        let name = node.metadata.name.clone().unwrap_or_default();
        let spec = node.spec.clone().unwrap_or_default();
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let at = self.row_at(&name);
        let row = self.edit(at);
        row.labels = node.metadata.labels.clone().unwrap_or_default();
        row.taints = spec.taints.unwrap_or_default();
        row.unschedulable = spec.unschedulable.unwrap_or(false);
        row.allocatable = allocatable.map(Amounts::from_quantities).unwrap_or_default();
        row.missing = false;
    }

    /// A node's object is gone. What its pods take stays booked until they are gone too.
    pub fn remove_node(&mut self, name: &str) {
        if let Some(&at) = self.index.get(name) {
            let row = self.edit(at);
            *row = NodeRow {
                name: name.to_owned(),
                requested: std::mem::take(&mut row.requested),
                host_ports: std::mem::take(&mut row.host_ports),
                revisions: std::mem::take(&mut row.revisions),
                missing: true,
                ..NodeRow::default()
            };
        }
    }

    /// The API says where a pod is. A finished or unbound pod takes nothing.
    pub fn set_pod(&mut self, pod: &Pod) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("");
        if request::is_finished(pod) {
            return self.remove_pod(uid);
        }
        if node.is_empty() {
            return;
        }
        match self.pods.get_mut(uid) {
            Some(known) if known.node == node => known.assumed = false,
            _ => {
                self.remove_pod(uid);
                self.add(PodRequest::of(pod), node, false);
            }
        }
    }

    /// A pod is gone from the API, or its binding failed.
    pub fn remove_pod(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        let Some(&at) = self.index.get(&pod.node) else { return };
        let row = self.edit(at);
        row.requested.subtract(&pod.request.amounts);
        for port in &pod.request.host_ports {
            row.host_ports.remove(port);
        }
        if let Some(revision) = &pod.request.revision
            && let Some(count) = row.revisions.get_mut(revision)
        {
            *count -= 1;
            if *count == 0 {
                row.revisions.remove(revision);
            }
        }
    }

    /// Books a pod on a node before the API knows.
    pub fn assume(&mut self, request: PodRequest, node: &str) {
        self.remove_pod(&request.uid.clone());
        self.add(request, node, true);
    }

    /// Takes an assumption back; a pod that the API has meanwhile shown as bound stays.
    pub fn forget(&mut self, uid: &str) {
        if self.pods.get(uid).is_some_and(|pod| pod.assumed) {
            self.remove_pod(uid);
        }
    }

    /// Whether the pod is booked somewhere.
    pub fn holds(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// Brings a snapshot up to date. Costs as much as changed.
    pub fn update(&mut self, snapshot: &mut Snapshot) {
        for at in self.dirty.drain() {
            if at < snapshot.nodes.len() {
                snapshot.nodes[at] = self.rows[at].clone();
            }
        }
        for row in &self.rows[snapshot.nodes.len()..] {
            snapshot.nodes.push(row.clone());
        }
    }

    fn add(&mut self, request: PodRequest, node: &str, assumed: bool) {
        let at = self.row_at(node);
        let row = self.edit(at);
        row.requested.add(&request.amounts);
        row.host_ports.extend(request.host_ports.iter().cloned());
        if let Some(revision) = &request.revision {
            *row.revisions.entry(revision.clone()).or_default() += 1;
        }
        self.pods.insert(request.uid.clone(), CachedPod { node: node.to_owned(), assumed, request });
    }

    fn row_at(&mut self, name: &str) -> usize {
        if let Some(&at) = self.index.get(name) {
            return at;
        }
        let at = self.rows.len();
        self.rows.push(Arc::new(NodeRow { name: name.to_owned(), missing: true, ..NodeRow::default() }));
        self.index.insert(name.to_owned(), at);
        at
    }

    fn edit(&mut self, at: usize) -> &mut NodeRow {
        self.dirty.insert(at);
        Arc::make_mut(&mut self.rows[at])
    }
}
