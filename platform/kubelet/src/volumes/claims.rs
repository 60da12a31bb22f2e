//! The PersistentVolumes behind a pod's claims.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod},
    volume_claims::{bound_volume, claim_of, is_owned_by},
};
use mayfly_informer::{Informer, Informers};

/// A volume that a claim of a pod is bound to.
#[derive(Clone, Debug)]
pub(crate) struct ClaimedVolume {
    pub(crate) volume: Arc<PersistentVolume>,
    pub(crate) read_only: bool,
}

/// By the name of the pod's volume.
pub(crate) type ClaimedVolumes = BTreeMap<String, ClaimedVolume>;

/// The node's caches of claims and volumes, started for the first pod with a claim.
pub(crate) struct PodClaims {
    informers: Informers,
    followed: OnceLock<(Informer<PersistentVolumeClaim>, Informer<PersistentVolume>)>,
}

impl PodClaims {
    pub(crate) fn new(informers: &Informers) -> Self {
        Self { informers: informers.clone(), followed: OnceLock::new() }
    }

    /// The volumes of all claims of a pod.
    ///
    /// # Errors
    /// A message for the pod's status: a claim does not exist, or is not bound (yet).
    pub(crate) async fn of_pod(&self, pod: &Pod) -> Result<ClaimedVolumes, String> {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let wanted: Vec<_> =
            volumes.filter_map(|volume| Some((volume.name.clone(), claim_of(pod, volume)?))).collect();
        if wanted.is_empty() {
            return Ok(ClaimedVolumes::new());
        }
        let (claims, volumes) = self.followed.get_or_init(|| (self.informers.of(), self.informers.of()));
        claims.synced().await;
        volumes.synced().await;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut found = ClaimedVolumes::new();
        for (name, wanted) in wanted {
            let claim = claims.get(&ObjectKey::new(namespace, &wanted.name));
            let claim = claim.ok_or_else(|| format!("persistentvolumeclaim {:?} not found", wanted.name))?;
            if wanted.ephemeral && !is_owned_by(&claim, pod) {
                return Err(format!("persistentvolumeclaim {:?} was not made for this pod", wanted.name));
            }
            let bound = bound_volume(&claim).and_then(|name| volumes.get(&ObjectKey::cluster(name)));
            let volume = bound.filter(|volume| is_for(volume, &claim));
            let volume =
                volume.ok_or_else(|| format!("persistentvolumeclaim {:?} is not bound", wanted.name))?;
            found.insert(name, ClaimedVolume { volume, read_only: wanted.read_only });
        }
        Ok(found)
    }
}

/// Whether the volume is bound to this claim, and not to an older one of the same name.
fn is_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    reference.is_some_and(|reference| reference.uid == claim.metadata.uid)
}
