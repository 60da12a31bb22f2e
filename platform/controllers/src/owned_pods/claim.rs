//! Decides which objects an owner controls, adopts and releases: pure.

use std::sync::Arc;

use kube::Resource;
use mayfly_api::selector::Selector;

use crate::metadata::{controller_of, uid};

/// The dependents of one owner, and those whose owner reference has to change first.
#[derive(Debug)]
pub(crate) struct Claim<T> {
    /// Controlled by the owner and matching its selector.
    pub(crate) owned: Vec<Arc<T>>,
    /// Matching, without a controller.
    pub(crate) adopt: Vec<Arc<T>>,
    /// Controlled by the owner, no longer matching.
    pub(crate) release: Vec<Arc<T>>,
}

pub(crate) fn claim<K: Resource, T: Resource>(
    owner: &K,
    selector: &Selector,
    candidates: impl IntoIterator<Item = Arc<T>>,
) -> Claim<T> {
    let mut claim = Claim { owned: Vec::new(), adopt: Vec::new(), release: Vec::new() };
    let deleting = owner.meta().deletion_timestamp.is_some();
    let empty = std::collections::BTreeMap::new();
    for object in candidates {
        let matches = selector.matches(object.meta().labels.as_ref().unwrap_or(&empty));
        match controller_of(&*object) {
            Some(controller) if controller.uid != uid(owner) => {}
            Some(_) if matches => claim.owned.push(object),
            Some(_) if !deleting => claim.release.push(object),
            None if matches && !deleting && object.meta().deletion_timestamp.is_none() => {
                claim.adopt.push(object);
            }
            _ => {}
        }
    }
    claim
}
