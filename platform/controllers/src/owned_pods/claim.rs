//! Whose pod is whose: pure.

use std::sync::Arc;

use mayfly_api::{k8s::api::core::v1::Pod, selector::Selector};

use crate::metadata::{controller_of, uid};

/// The pods of one owner, and those whose owner has to change first.
#[derive(Debug, Default)]
pub(crate) struct Claim {
    /// Controlled by it and matching its selector.
    pub(crate) owned: Vec<Arc<Pod>>,
    /// Matching, without a controller.
    pub(crate) adopt: Vec<Arc<Pod>>,
    /// Controlled by it, not matching any more.
    pub(crate) release: Vec<Arc<Pod>>,
}

pub(crate) fn claim<K: kube::Resource>(
    owner: &K,
    selector: &Selector,
    pods: impl IntoIterator<Item = Arc<Pod>>,
) -> Claim {
    let mut claim = Claim::default();
    let deleting = owner.meta().deletion_timestamp.is_some();
    let empty = std::collections::BTreeMap::new();
    for pod in pods {
        let matches = selector.matches(pod.metadata.labels.as_ref().unwrap_or(&empty));
        match controller_of(&*pod) {
            Some(controller) if controller.uid != uid(owner) => {}
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
