//! The controller of CSI volumes: calls the drivers for claims and volumes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, SecretReference},
        storage::v1::{CSIDriver, CSINode, StorageClass, VolumeAttachment},
    },
    volume_claims::{
        ANNOTATION_NODE_EXPANSION, ANNOTATION_SELECTED_NODE, bound_volume, capacity_bytes, claims_of,
        class_of_claim, requested_bytes,
    },
};
use mayfly_csi::{
    ControllerAbilities, CsiDriver, CsiError,
    proto::{CapacityRange, ControllerExpandVolumeRequest, DeleteVolumeRequest},
};
use mayfly_informer::{
    Change, EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tokio_util::sync::CancellationToken;

use super::{Config, attach, provision};
use crate::{
    metadata::{is_gone, only, uid},
    persistent_volume::{PROVISIONED_BY, STORAGE_PROVISIONER},
};

/// An index of the pods that have claims.
pub(super) const WITH_CLAIMS: &str = "claims";
/// The pause before work is retried whose driver has its maximum number of calls in progress.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// A unit of work.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum CsiKey {
    Claim(ObjectKey),
    Volume(String),
    Attachment(String),
    /// The set of attachments.
    Attachments,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CsiActError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Driver(#[from] CsiError),
    #[error("{0}")]
    Other(String),
}

/// Provisions, attaches, expands and removes volumes through drivers.
pub(crate) struct CsiController {
    config: Config,
    pub(super) client: Client,
    pods: Informer<Pod>,
    pub(super) pods_with_claims: Index<Pod>,
    pub(super) claims: Informer<PersistentVolumeClaim>,
    pub(super) volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    pub(super) nodes: Informer<Node>,
    pub(super) csi_nodes: Informer<CSINode>,
    pub(super) drivers: Informer<CSIDriver>,
    pub(super) attachments: Informer<VolumeAttachment>,
    /// The permits of calls by driver, so that a driver that hangs leaves workers to the others.
    permits: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl CsiController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = informers.of::<Pod>();
        let pods_with_claims = pods.index(WITH_CLAIMS, |pod: &Pod| {
            (!claims_of(pod).is_empty()).then(|| WITH_CLAIMS.to_owned()).into_iter().collect()
        });
        Self {
            config,
            client,
            pods,
            pods_with_claims,
            claims: informers.of(),
            volumes: informers.of(),
            classes: informers.of(),
            nodes: informers.of(),
            csi_nodes: informers.of(),
            drivers: informers.of(),
            attachments: informers.of(),
            permits: Mutex::default(),
        }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.pods.synced().await;
            self.claims.synced().await;
            self.volumes.synced().await;
            self.classes.synced().await;
            self.nodes.synced().await;
            self.csi_nodes.synced().await;
            self.drivers.synced().await;
            self.attachments.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "csi-controller", None, stop.clone());
        let queue = WorkQueue::default();
        self.listen(&queue);
        let workers_max = self.config.workers_max;
        let mut driver_changes = self.config.drivers.changes();
        let controller = Arc::new(self);
        let (again, queued) = (controller.clone(), queue.clone());
        let on_drivers = async {
            // Work that failed without a driver may succeed once the driver has returned.
            while let Some(Ok(())) = stop.run_until_cancelled(driver_changes.changed()).await {
                again.look_at_all(&queued);
            }
        };
        let work = reconcile::run("csi", queue, workers_max, stop.clone(), move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        });
        tokio::join!(on_drivers, work);
    }

    fn listen(&self, queue: &WorkQueue<CsiKey>) {
        let changed = queue.clone();
        self.claims.handle(move |change| changed.add(CsiKey::Claim(ObjectKey::of(&**change.latest()))));
        let changed = queue.clone();
        self.volumes.handle(move |change| {
            changed.add(CsiKey::Volume(change.latest().name_any()));
            changed.add(CsiKey::Attachments);
        });
        let changed = queue.clone();
        self.attachments.handle(move |change| {
            let attachment = change.latest();
            changed.add(CsiKey::Attachment(attachment.name_any()));
            // A volume is removed when it is not attached any more.
            if let Some(volume) = &attachment.spec.source.persistent_volume_name {
                changed.add(CsiKey::Volume(volume.clone()));
            }
            changed.add(CsiKey::Attachments);
        });
        let changed = queue.clone();
        self.nodes.handle(move |change| {
            let is_news = match change {
                Change::Added(_) => false,
                Change::Updated { old, new } => attach::in_use(old) != attach::in_use(new),
                Change::Deleted(_) => true,
            };
            if is_news {
                changed.add(CsiKey::Attachments);
            }
        });
        let changed = queue.clone();
        self.pods.handle(move |change| {
            if change.states().any(|pod| !claims_of(pod).is_empty()) {
                changed.add(CsiKey::Attachments);
            }
        });
    }

    fn look_at_all(&self, queue: &WorkQueue<CsiKey>) {
        for claim in self.claims.keys() {
            queue.add(CsiKey::Claim(claim));
        }
        for volume in self.volumes.keys() {
            queue.add(CsiKey::Volume(volume.name));
        }
        for attachment in self.attachments.keys() {
            queue.add(CsiKey::Attachment(attachment.name));
        }
    }

    async fn reconcile(&self, key: CsiKey, events: &EventRecorder) -> Result<Outcome, CsiActError> {
        let permit = self.driver_of(&key).map(|driver| self.permit_of(&driver));
        // Held until the end.
        let Ok(_permit) = permit.transpose() else { return Ok(Outcome::RequeueAfter(BUSY_PAUSE)) };
        match key {
            CsiKey::Claim(key) => {
                if let Some(claim) = self.claims.get(&key) {
                    self.claim(&claim, events).await?;
                }
            }
            CsiKey::Volume(name) => {
                if let Some(volume) = self.volumes.get(&ObjectKey::cluster(&name)) {
                    self.reclaim(&volume, events).await?;
                }
            }
            CsiKey::Attachment(name) => {
                if let Some(attachment) = self.attachments.get(&ObjectKey::cluster(&name)) {
                    self.attach(&attachment).await?;
                }
            }
            CsiKey::Attachments => self.plan_attachments().await?,
        }
        Ok(Outcome::Done)
    }

    /// The driver that the work on a key may call.
    fn driver_of(&self, key: &CsiKey) -> Option<String> {
        let of_volume = |name: &str| {
            let volume = self.volumes.get(&ObjectKey::cluster(name))?;
            Some(volume.spec.as_ref()?.csi.as_ref()?.driver.clone())
        };
        match key {
            CsiKey::Claim(key) => {
                let claim = self.claims.get(key)?;
                match bound_volume(&claim) {
                    Some(volume) => of_volume(volume),
                    None => claim.annotations().get(STORAGE_PROVISIONER).cloned(),
                }
            }
            CsiKey::Volume(name) => of_volume(name),
            CsiKey::Attachment(name) => self
                .attachments
                .get(&ObjectKey::cluster(name))
                .map(|attachment| attachment.spec.attacher.clone()),
            CsiKey::Attachments => None,
        }
    }

    fn permit_of(&self, driver: &str) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        let per_driver = (self.config.workers_max / 4).max(1);
        let mut permits = self.permits.lock();
        if !permits.contains_key(driver) {
            // Names come from objects that any user may write, so unused entries are removed.
            permits.retain(|_, known| known.available_permits() < per_driver);
        }
        let new = || Arc::new(Semaphore::new(per_driver));
        permits.entry(driver.to_owned()).or_insert_with(new).clone().try_acquire_owned()
    }

    /// The driver, if it has a controller service that answers here.
    pub(super) fn driver(&self, name: &str) -> Option<(Arc<CsiDriver>, ControllerAbilities)> {
        let driver = self.config.drivers.get(name)?;
        let abilities = driver.controller?;
        Some((driver, abilities))
    }

    async fn claim(&self, claim: &PersistentVolumeClaim, events: &EventRecorder) -> Result<(), CsiActError> {
        if claim.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        if let Some(name) = bound_volume(claim) {
            return match self.volumes.get(&ObjectKey::cluster(name)) {
                Some(volume) => self.expand(claim, &volume, events).await,
                None => Ok(()),
            };
        }
        let wanted = claim.annotations().get(STORAGE_PROVISIONER).map(String::as_str).unwrap_or_default();
        let Some((driver, abilities)) = self.driver(wanted).filter(|(_, abilities)| abilities.create) else {
            return Ok(());
        };
        let class = self.classes.get(&ObjectKey::cluster(class_of_claim(claim)));
        let Some(class) = class.filter(|class| class.provisioner == wanted) else { return Ok(()) };
        let node = claim.annotations().get(ANNOTATION_SELECTED_NODE);
        let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        if waits && node.is_none() {
            return Ok(());
        }
        if self.volumes.get(&ObjectKey::cluster(provision::volume_name(claim))).is_some() {
            return Ok(());
        }
        let made = self.provision(claim, &class, &driver, abilities, node.map(String::as_str)).await;
        match &made {
            Ok(()) => {
                let message = format!("Successfully provisioned volume {}", provision::volume_name(claim));
                events.normal(claim, "ProvisioningSucceeded", message);
            }
            Err(error) => {
                let message = format!("failed to provision volume: {error}");
                events.warning(claim, "ProvisioningFailed", message);
            }
        }
        made
    }

    async fn provision(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        driver: &CsiDriver,
        abilities: ControllerAbilities,
        node: Option<&str>,
    ) -> Result<(), CsiActError> {
        let topology = match (abilities.topology, node) {
            (true, Some(node)) => self.topology(node, &driver.name)?,
            _ => BTreeMap::new(),
        };
        let secrets = match provision::provisioner_secret(claim, class) {
            Some((name, namespace)) => self.secret(&namespace, &name).await?,
            None => HashMap::new(),
        };
        let request = provision::request(claim, class, topology, secrets);
        let made = driver.create_volume(request).await?.volume.unwrap_or_default();
        if made.volume_id.is_empty() {
            return Err(driver.invalid_response("CreateVolume", "the volume has no id".to_owned()).into());
        }
        if made.capacity_bytes > 0 && u64::try_from(made.capacity_bytes).unwrap_or(0) < requested_bytes(claim)
        {
            return Err(driver
                .invalid_response("CreateVolume", "the volume is smaller than was asked for".to_owned())
                .into());
        }
        let volume = provision::new_volume(claim, class, &made).map_err(kube::Error::SerdeError)?;
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        match api.create(&PostParams::default(), &volume).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            created => Ok(created.map(|_| ())?),
        }
    }

    /// The topology of a node, as its driver reports it.
    fn topology(&self, node: &str, driver: &str) -> Result<BTreeMap<String, String>, CsiActError> {
        let missing = || CsiActError::Other(format!("CSI driver {driver} is not registered on node {node}"));
        let csi_node = self.csi_nodes.get(&ObjectKey::cluster(node)).ok_or_else(missing)?;
        let known = csi_node.spec.drivers.iter().find(|one| one.name == driver).ok_or_else(missing)?;
        let node = self.nodes.get(&ObjectKey::cluster(node)).ok_or_else(missing)?;
        let keys = known.topology_keys.iter().flatten();
        Ok(keys.filter_map(|key| Some((key.clone(), node.labels().get(key)?.clone()))).collect())
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<HashMap<String, String>, CsiActError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let data = api.get(name).await?.data.unwrap_or_default();
        Ok(data
            .into_iter()
            .map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned()))
            .collect())
    }

    pub(super) async fn secret_of(
        &self,
        reference: Option<&SecretReference>,
    ) -> Result<HashMap<String, String>, CsiActError> {
        let named = reference.and_then(|one| Some((one.namespace.as_deref()?, one.name.as_deref()?)));
        match named {
            Some((namespace, name)) => self.secret(namespace, name).await,
            None => Ok(HashMap::new()),
        }
    }

    /// Expands a volume to the size that its claim requests.
    async fn expand(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        events: &EventRecorder,
    ) -> Result<(), CsiActError> {
        let wanted = requested_bytes(claim);
        let Some(source) = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()) else { return Ok(()) };
        let class = self.classes.get(&ObjectKey::cluster(class_of_claim(claim)));
        let allowed = class.is_some_and(|class| class.allow_volume_expansion == Some(true));
        if wanted <= capacity_bytes(volume) || !allowed {
            return Ok(());
        }
        let Some((driver, abilities)) = self.driver(&source.driver) else { return Ok(()) };
        let required_bytes = i64::try_from(wanted).unwrap_or(i64::MAX);
        let (mut bytes, mut by_node) = (wanted, driver.node.expand);
        if abilities.expand {
            let request = ControllerExpandVolumeRequest {
                volume_id: source.volume_handle.clone(),
                capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
                secrets: self.secret_of(source.controller_expand_secret_ref.as_ref()).await?,
                volume_capability: Some(capability_of(volume)),
            };
            let answer = match driver.controller_expand_volume(request).await {
                Ok(answer) => answer,
                Err(error) => {
                    events.warning(claim, "VolumeResizeFailed", error.to_string());
                    return Err(error.into());
                }
            };
            bytes = u64::try_from(answer.capacity_bytes).unwrap_or(0).max(wanted);
            by_node &= answer.node_expansion_required;
        } else if !by_node {
            return Ok(());
        }
        let annotations = by_node.then(|| json!({ANNOTATION_NODE_EXPANSION: bytes.to_string()}));
        let metadata =
            json!({"resourceVersion": volume.metadata.resource_version, "annotations": annotations});
        let size = provision::size(claim, bytes);
        let patch = json!({"metadata": metadata, "spec": {"capacity": {"storage": size}}});
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        api.patch(&volume.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        events.normal(claim, "VolumeResizeSuccessful", format!("the volume has {bytes} bytes"));
        Ok(())
    }

    /// Removes the data of a volume whose claim is deleted, then its object.
    async fn reclaim(&self, volume: &PersistentVolume, events: &EventRecorder) -> Result<(), CsiActError> {
        let Some(spec) = &volume.spec else { return Ok(()) };
        let Some(source) = &spec.csi else { return Ok(()) };
        let is_released =
            volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Released");
        let is_ours = volume.annotations().get(PROVISIONED_BY) == Some(&source.driver);
        let deletes = spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
        if !(is_released && is_ours && deletes) || self.is_attached(volume) {
            return Ok(());
        }
        let Some((driver, _)) = self.driver(&source.driver).filter(|(_, abilities)| abilities.create) else {
            return Ok(());
        };
        let annotation = |name: &str| volume.annotations().get(name).cloned();
        let secrets =
            match (annotation(provision::DELETION_SECRET[0]), annotation(provision::DELETION_SECRET[1])) {
                (Some(name), Some(namespace)) => self.secret(&namespace, &name).await?,
                _ => HashMap::new(),
            };
        let request = DeleteVolumeRequest { volume_id: source.volume_handle.clone(), secrets };
        if let Err(error) = driver.delete_volume(request).await {
            events.warning(volume, "VolumeFailedDelete", error.to_string());
            return Err(error.into());
        }
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let deleted = api.delete(&volume.name_any(), &only(uid(volume))).await;
        if !is_gone(&deleted) {
            deleted?;
        }
        Ok(())
    }

    fn is_attached(&self, volume: &PersistentVolume) -> bool {
        let name = volume.name_any();
        let of = |attachment: &VolumeAttachment| {
            attachment.spec.source.persistent_volume_name.as_deref() == Some(&*name)
        };
        self.attachments.list().iter().any(|attachment| of(attachment))
    }
}

pub(super) fn capability_of(volume: &PersistentVolume) -> mayfly_csi::proto::VolumeCapability {
    let spec = volume.spec.clone().unwrap_or_default();
    let fs_type = spec.csi.and_then(|source| source.fs_type).unwrap_or_default();
    let block = spec.volume_mode.as_deref() == Some("Block");
    let flags = spec.mount_options.unwrap_or_default();
    mayfly_csi::capability(block, &fs_type, flags, &spec.access_modes.unwrap_or_default())
}
