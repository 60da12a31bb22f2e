//! Whose pod is whose: pure.

use std::sync::Arc;

use mayfly_api::{
    k8s::api::{apps::v1::ReplicaSet, core::v1::Pod},
    selector::Selector,
};

use crate::metadata::{controller_of, uid};

/// The pods of one ReplicaSet, and those whose owner has to change first.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// Controlled by the ReplicaSet and matching its selector.
    pub(super) owned: Vec<Arc<Pod>>,
    /// Matching, without a controller.
    pub(super) adopt: Vec<Arc<Pod>>,
    /// Controlled by the ReplicaSet, not matching any more.
    pub(super) release: Vec<Arc<Pod>>,
}

pub(super) fn claim(
    set: &ReplicaSet,
    selector: &Selector,
    pods: impl IntoIterator<Item = Arc<Pod>>,
) -> Claim {
    let mut claim = Claim::default();
    let deleting = set.metadata.deletion_timestamp.is_some();
    let empty = std::collections::BTreeMap::new();
    for pod in pods {
        let matches = selector.matches(pod.metadata.labels.as_ref().unwrap_or(&empty));
        match controller_of(&*pod) {
            Some(owner) if owner.uid != uid(set) => {}
            Some(_) if matches => claim.owned.push(pod),
            Some(_) if !deleting => claim.release.push(pod),
            None if matches && !deleting && pod.metadata.deletion_timestamp.is_none() => {
                claim.adopt.push(pod);
            }
            _ => {}
        }
    }
    claim
}
