//! The user's operations on volumes, claims and quotas.

use mayfly_store::Key;
use serde_json::{Value, json};

use super::Operations;
use crate::{
    model::{is_terminating, text},
    workloads::{claim, quota, volume},
};

/// Volumes of a run; their names are used again.
const VOLUMES: u64 = 5;
/// Names of claims in a namespace.
const CLAIMS: u64 = 4;

impl Operations {
    /// The volumes that exist from the beginning.
    pub(super) async fn create_volumes(&mut self) {
        for number in 0..VOLUMES {
            let gib = self.random.below(1..4);
            self.create(volume(number, gib)).await;
        }
    }

    pub(super) async fn create_quota(&self, namespace: &str) {
        self.create(quota(namespace)).await;
    }

    pub(super) async fn create_or_delete_storage(&mut self) {
        match self.random.below(0..4) {
            0..=1 => self.create_claim().await,
            2 => self.delete_claim().await,
            _ => self.replace_volume().await,
        }
    }

    async fn create_claim(&mut self) {
        let name = self.random.below(0..CLAIMS);
        let gib = self.random.below(1..4);
        let namespace = self.builder().namespace;
        self.create(claim(&namespace, name, gib)).await;
    }

    async fn delete_claim(&mut self) {
        let Some((key, object)) = self.any(&["persistentvolumeclaims"], |_| true) else { return };
        self.delete(&key, &object, "Background", None).await;
    }

    /// Removes a volume that is not bound, or makes one that is absent.
    async fn replace_volume(&mut self) {
        let number = self.random.below(0..VOLUMES);
        let gib = self.random.below(1..4);
        let object = volume(number, gib);
        let key = Key::new("persistentvolumes", "", text(&object, "/metadata/name"));
        let known = self.simulation.oracle.lock().get(&key).cloned();
        match known {
            None => self.create(object).await,
            Some(known) if text(&known, "/status/phase") != "Bound" => {
                self.delete(&key, &known, "Background", None).await;
            }
            Some(_) => {}
        }
    }

    /// Deletes the claims of volumes that are being deleted, which wait for them.
    pub(super) async fn release_deleted_volumes(&self) {
        let claims: Vec<(Key, Value)> = {
            let oracle = self.simulation.oracle.lock();
            let volumes = oracle.model.of("persistentvolumes").filter(|(_, volume)| is_terminating(volume));
            let claims =
                volumes.filter_map(|(_, volume)| oracle.model.by_uid(text(volume, "/spec/claimRef/uid")));
            claims.map(|(key, claim)| (key.clone(), claim.clone())).collect()
        };
        for (key, claim) in claims.into_iter().filter(|(_, claim)| !is_terminating(claim)) {
            self.delete(&key, &claim, "Background", None).await;
        }
    }

    /// Stops the schedules: their Jobs would keep the cluster from coming to rest.
    pub(super) async fn suspend_cron_jobs(&self) {
        for (key, _) in self.objects(&["cronjobs.batch"], |object| object["spec"]["suspend"] != true) {
            self.patch("suspend", &key, json!({"spec": {"suspend": true}})).await;
        }
    }
}
