//! The pods of revisions: the upstreams of container images, and the numbers of replicas on each node.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use mayfly_api::{ObjectKey, Revision, k8s::api::core::v1::Pod};
use mayfly_informer::{Index, Informer};

use crate::{
    nodes::replicas::ready_on,
    pods::{PodUpstream, revision_of},
};

/// One [`PodUpstream`] for each revision that is an image.
pub(super) struct PodRoutes {
    pods: Informer<Pod>,
    by_revision: Index<Pod>,
    upstreams: HashMap<ObjectKey, (String, Arc<PodUpstream>)>,
    /// The revision of each known pod, since a deleted pod is not available any more.
    revisions: HashMap<ObjectKey, ObjectKey>,
}

impl PodRoutes {
    pub(super) fn new(pods: Informer<Pod>) -> Self {
        let key = |pod: &Pod| revision_of(pod).map(|revision| revision.to_string()).into_iter().collect();
        let by_revision = pods.index("gateway/revision", key);
        Self { pods, by_revision, upstreams: HashMap::new(), revisions: HashMap::new() }
    }

    /// The upstream of a revision's pods: the same value for the revision's lifetime.
    pub(super) fn upstream(&mut self, revision: &Revision) -> Arc<PodUpstream> {
        let key = ObjectKey::of(revision);
        let uid = revision.metadata.uid.clone().unwrap_or_default();
        if let Some((known, upstream)) = self.upstreams.get(&key)
            && *known == uid
        {
            return upstream.clone();
        }
        let upstream = PodUpstream::new(key.clone(), &revision.spec);
        upstream.update(&self.by_revision.get(&key.to_string()));
        if let Some((_, before)) = self.upstreams.insert(key, (uid, upstream.clone())) {
            before.close();
        }
        upstream
    }

    /// Updates the upstreams of pods that were created, changed or removed; returns the revisions of these pods.
    pub(super) fn update(&mut self, changed: &BTreeSet<ObjectKey>) -> BTreeSet<ObjectKey> {
        let mut revisions = BTreeSet::new();
        for key in changed {
            match self.pods.get(key) {
                Some(pod) => {
                    if let Some(revision) = revision_of(&pod) {
                        revisions.insert(revision.clone());
                        self.revisions.insert(key.clone(), revision);
                    }
                }
                None => revisions.extend(self.revisions.remove(key)),
            }
        }
        for revision in &revisions {
            if let Some((_, upstream)) = self.upstreams.get(revision) {
                upstream.update(&self.by_revision.get(&revision.to_string()));
            }
        }
        revisions
    }

    /// The number of ready replicas of a revision on each node.
    pub(super) fn ready_by_node(&self, revision: &ObjectKey) -> BTreeMap<String, u32> {
        let mut by_node = BTreeMap::new();
        for pod in self.by_revision.get(&revision.to_string()) {
            if let Some(node) = ready_on(&pod) {
                *by_node.entry(node.to_owned()).or_insert(0) += 1;
            }
        }
        by_node
    }

    /// Whether a node has any pod of a revision, even one that is starting or being removed.
    pub(super) fn is_on(&self, revision: &ObjectKey, node: &str) -> bool {
        let pods = self.by_revision.get(&revision.to_string());
        let node_of = |pod: &Pod| pod.spec.as_ref()?.node_name.clone();
        pods.iter().any(|pod| node_of(pod).as_deref() == Some(node))
    }

    /// Removes a deleted revision.
    pub(super) fn forget(&mut self, key: &ObjectKey, uid: &str) {
        if self.upstreams.get(key).is_some_and(|(known, _)| known == uid)
            && let Some((_, upstream)) = self.upstreams.remove(key)
        {
            upstream.close();
        }
    }
}
