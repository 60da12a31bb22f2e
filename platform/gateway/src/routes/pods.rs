//! The upstreams of revisions that are container images, updated as their pods change.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use mayfly_api::{ObjectKey, Revision, k8s::api::core::v1::Pod};
use mayfly_informer::{Index, Informer};

use crate::pods::{PodUpstream, revision_of};

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

    /// Updates the upstreams of pods that were created, changed or removed.
    pub(super) fn update(&mut self, changed: &BTreeSet<ObjectKey>) {
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
        for revision in revisions {
            if let Some((_, upstream)) = self.upstreams.get(&revision) {
                upstream.update(&self.by_revision.get(&revision.to_string()));
            }
        }
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
