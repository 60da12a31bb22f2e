//! The scheduler's copies of claims, volumes and classes.

use std::sync::Arc;

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{PersistentVolume, PersistentVolumeClaim, Pod},
        storage::v1::StorageClass,
    },
    volume_claims::used_claims,
};
use mayfly_informer::{Changes, Index, Informer, Informers};

use crate::{request::is_finished, volumes::VolumeObjects};

/// An index of pods by the claims that they use.
const BY_CLAIM: &str = "claim";

pub(crate) struct Storage {
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    pods_by_claim: Index<Pod>,
}

/// Changes of any of the three kinds.
pub(crate) struct StorageChanges {
    claims: Changes,
    volumes: Changes,
    classes: Changes,
}

impl StorageChanges {
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.claims.next() => {}
            _ = self.volumes.next() => {}
            _ = self.classes.next() => {}
        }
    }
}

impl Storage {
    pub(crate) fn create(informers: &Informers, pods: &Informer<Pod>) -> Self {
        let pods_by_claim =
            pods.index(BY_CLAIM, |pod: &Pod| used_claims(pod).iter().map(ToString::to_string).collect());
        Self { claims: informers.of(), volumes: informers.of(), classes: informers.of(), pods_by_claim }
    }

    pub(crate) async fn synced(&self) {
        self.claims.synced().await;
        self.volumes.synced().await;
        self.classes.synced().await;
    }

    pub(crate) fn subscribe(&self) -> StorageChanges {
        StorageChanges {
            claims: self.claims.subscribe(),
            volumes: self.volumes.subscribe(),
            classes: self.classes.subscribe(),
        }
    }
}

impl VolumeObjects for Storage {
    fn claim(&self, key: &ObjectKey) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(key)
    }

    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.get(&ObjectKey::cluster(name))
    }

    fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
        self.classes.get(&ObjectKey::cluster(name))
    }

    fn volumes(&self) -> Vec<Arc<PersistentVolume>> {
        self.volumes.list()
    }

    fn is_used(&self, claim: &ObjectKey, except: &ObjectKey) -> bool {
        let pods = self.pods_by_claim.get(&claim.to_string());
        pods.iter().any(|pod| ObjectKey::of(&**pod) != *except && !is_finished(pod))
    }
}
