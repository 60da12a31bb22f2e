//! Watches claims and volumes, and carries out the steps of [`super::plan`].

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
    io,
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod},
        storage::v1::StorageClass,
    },
    node_fit::NodeFacts,
    volume_claims::{
        ANNOTATION_BIND_COMPLETED, ANNOTATION_NODE_EXPANSION, ANNOTATION_SELECTED_NODE, LOCAL_PROVISIONER,
        claims_of, used_claims,
    },
    wellknown::LABEL_HOSTNAME,
};
use mayfly_informer::{
    EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    Config, LOCAL_CLASS, LocalVolumes, local,
    new_volume::{new_volume, reference},
    plan::{
        BOUND_BY_CONTROLLER, STORAGE_PROVISIONER, Step, VolumeState, annotation, name_of, plan, volume_phase,
    },
    protection::{CLAIM_PROTECTION, VOLUME_PROTECTION},
};
use crate::metadata::{is_gone, only, uid};

const DEFAULT_CLASS_ANNOTATION: &str = "storageclass.kubernetes.io/is-default-class";
/// The pause after a plan of which a step was refused.
const PLAN_AGAIN: Duration = Duration::from_secs(1);
/// The one value of the index of pods with claims.
const WITH_CLAIMS: &str = "with-claims";

#[derive(Debug, thiserror::Error)]
pub(super) enum VolumeError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("local volume {volume}: {source}")]
    Folder { volume: String, source: io::Error },
    #[error("{failed} of {steps} steps failed, the first: {first}")]
    Steps { failed: usize, steps: usize, first: String },
}

/// Binds claims and releases volumes.
pub(crate) struct PersistentVolumeController {
    config: Config,
    client: Client,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    pods_with_claims: Index<Pod>,
    /// The last event about each claim, by its uid, so that each notice is recorded once.
    noticed: Mutex<HashMap<String, (&'static str, String)>>,
}

impl PersistentVolumeController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = informers.of::<Pod>();
        let pods_with_claims = pods.index(WITH_CLAIMS, |pod: &Pod| {
            has_claims(pod).then(|| WITH_CLAIMS.to_owned()).into_iter().collect()
        });
        Self {
            config,
            client,
            claims: informers.of(),
            volumes: informers.of(),
            classes: informers.of(),
            nodes: informers.of(),
            pods,
            pods_with_claims,
            noticed: Mutex::default(),
        }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.claims.synced().await;
            self.volumes.synced().await;
            self.classes.synced().await;
            self.nodes.synced().await;
            self.pods.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        if let Some(local) = &self.config.local {
            self.recover(local).await;
            if let Err(error) = self.ensure_class(local).await {
                tracing::warn!(%error, "cannot create the StorageClass of local volumes; will retry at the next start");
            }
        }
        let events =
            EventRecorder::start(self.client.clone(), "persistentvolume-controller", None, stop.clone());
        // The queue has one key, because binding is planned over all claims and volumes at once.
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.claims.handle(move |_| changed.add(()));
        let changed = queue.clone();
        self.volumes.handle(move |_| changed.add(()));
        let changed = queue.clone();
        self.classes.handle(move |_| changed.add(()));
        let changed = queue.clone();
        self.pods.handle(move |change| {
            if change.states().any(|pod| has_claims(pod)) {
                changed.add(());
            }
        });
        let controller = Arc::new(self);
        reconcile::run("persistentvolume", queue, 1, stop, move |()| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(&events).await }
        })
        .await;
    }

    async fn reconcile(&self, events: &EventRecorder) -> Result<Outcome, VolumeError> {
        let state = self.state();
        let steps = plan(&state);
        let known: HashSet<&str> = state.claims.iter().map(|claim| uid(&**claim)).collect();
        self.noticed.lock().retain(|claim, _| known.contains(claim.as_str()));
        let (count, mut failures, mut is_outdated) = (steps.len(), Vec::new(), false);
        for step in steps {
            match self.act(step, &state, events).await {
                Ok(()) => {}
                // The plan is from an old version; the event of the new one starts another plan, unless the refusal had
                // another reason.
                Err(VolumeError::Api(kube::Error::Api(status)))
                    if status.is_conflict() || status.is_not_found() || status.is_already_exists() =>
                {
                    is_outdated = true;
                }
                Err(error) => failures.push(error.to_string()),
            }
        }
        match failures.first() {
            None if is_outdated => Ok(Outcome::RequeueAfter(PLAN_AGAIN)),
            None => Ok(Outcome::Done),
            Some(first) => {
                Err(VolumeError::Steps { failed: failures.len(), steps: count, first: first.clone() })
            }
        }
    }

    fn state(&self) -> VolumeState {
        let nodes = self.nodes.list().into_iter().map(|node| (node.name_any(), NodeFacts::of(&node)));
        let classes = self.classes.list().into_iter().map(|class| (class.name_any(), class));
        let mut claims = self.claims.list();
        // The oldest claim gets its volume first.
        claims.sort_by_key(|claim| {
            (claim.metadata.creation_timestamp.as_ref().map(|time| time.0), ObjectKey::of(&**claim))
        });
        VolumeState {
            claims,
            volumes: self.volumes.list(),
            classes: classes.collect(),
            pods: self.pods_with_claims.get(WITH_CLAIMS),
            nodes: nodes.collect(),
            local: self.config.local.clone(),
        }
    }

    async fn act(&self, step: Step, state: &VolumeState, events: &EventRecorder) -> Result<(), VolumeError> {
        match step {
            Step::Reserve { volume, claim } => self.reserve(&volume, &claim).await,
            Step::Unreserve { volume } => {
                let annotations = json!({BOUND_BY_CONTROLLER: null});
                self.patch_volume(&volume, json!({"claimRef": null}), annotations).await
            }
            Step::Bind { claim, volume, by_controller } => {
                let mut annotations = json!({ANNOTATION_BIND_COMPLETED: "yes"});
                if by_controller {
                    annotations[BOUND_BY_CONTROLLER] = "yes".into();
                }
                self.patch_claim(&claim, json!({"volumeName": name_of(&*volume)}), annotations).await
            }
            Step::ShowBound { claim, volume } => {
                let spec = volume.spec.as_ref();
                let (capacity, modes) =
                    (spec.map(|spec| &spec.capacity), spec.map(|spec| &spec.access_modes));
                self.claim_status(
                    &claim,
                    json!({"phase": "Bound", "capacity": capacity, "accessModes": modes}),
                )
                .await
            }
            Step::ClaimPhase { claim, phase } => self.claim_status(&claim, json!({"phase": phase})).await,
            Step::VolumePhase { volume, phase, message } => {
                self.volume_phase(&volume, phase, message, events).await
            }
            Step::Provision { claim, class } => self.provision(&claim, &class, state, events).await,
            Step::AskProvisioner { claim, provisioner } => {
                self.patch_claim(&claim, json!({}), json!({STORAGE_PROVISIONER: provisioner})).await
            }
            Step::RejectNode { claim, node } => {
                let here = state.local.as_ref().map_or("", |local| local.node.as_str());
                let message = format!(
                    "failed to provision volume: node {node:?} has no local volumes; they are folders of node {here:?}"
                );
                events.warning(&*claim, "ProvisioningFailed", message);
                self.patch_claim(&claim, json!({}), json!({ANNOTATION_SELECTED_NODE: null})).await
            }
            Step::Expand { volume, size, bytes } => {
                let by_nodes = bytes.map(|bytes| json!({ANNOTATION_NODE_EXPANSION: bytes.to_string()}));
                let annotations = by_nodes.unwrap_or_else(|| json!({}));
                self.patch_volume(&volume, json!({"capacity": {"storage": size}}), annotations).await
            }
            Step::Reclaim { volume } => self.reclaim(&volume, events).await,
            Step::UnprotectClaim { claim } => self.unprotect_claim(&claim).await,
            Step::UnprotectVolume { volume } => {
                let api: Api<PersistentVolume> = Api::all(self.client.clone());
                unprotect(&api, &*volume, VOLUME_PROTECTION).await
            }
            Step::CreateClaim { pod, volume } => self.create_claim(&pod, &volume).await,
            Step::Notice { claim, reason, message } => {
                self.notice(&claim, reason, message, events);
                Ok(())
            }
        }
    }

    fn notice(
        &self,
        claim: &PersistentVolumeClaim,
        reason: &'static str,
        message: String,
        events: &EventRecorder,
    ) {
        let notice = (reason, message.clone());
        let last = self.noticed.lock().insert(uid(claim).to_owned(), notice.clone());
        if last == Some(notice) {
            return;
        }
        match reason {
            "WaitForFirstConsumer" | "ExternalProvisioning" | "FailedBinding" => {
                events.normal(claim, reason, message)
            }
            _ => events.warning(claim, reason, message),
        }
    }

    async fn reserve(
        &self,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
    ) -> Result<(), VolumeError> {
        let named = volume.spec.as_ref().is_some_and(|spec| spec.claim_ref.is_some());
        let annotations = if named { json!({}) } else { json!({BOUND_BY_CONTROLLER: "yes"}) };
        self.patch_volume(volume, json!({"claimRef": reference(claim)}), annotations).await
    }

    async fn patch_volume(
        &self,
        volume: &PersistentVolume,
        spec: Value,
        annotations: Value,
    ) -> Result<(), VolumeError> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let metadata =
            json!({"resourceVersion": volume.metadata.resource_version, "annotations": annotations});
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": spec}));
        api.patch(name_of(volume), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    fn claims_of(&self, claim: &PersistentVolumeClaim) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &claim.namespace().unwrap_or_default())
    }

    async fn patch_claim(
        &self,
        claim: &PersistentVolumeClaim,
        spec: Value,
        annotations: Value,
    ) -> Result<(), VolumeError> {
        let metadata =
            json!({"resourceVersion": claim.metadata.resource_version, "annotations": annotations});
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": spec}));
        self.claims_of(claim).patch(name_of(claim), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    async fn claim_status(&self, claim: &PersistentVolumeClaim, status: Value) -> Result<(), VolumeError> {
        let metadata = json!({"resourceVersion": claim.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": metadata, "status": status}));
        self.claims_of(claim).patch_status(name_of(claim), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    async fn volume_phase(
        &self,
        volume: &PersistentVolume,
        phase: &str,
        message: &str,
        events: &EventRecorder,
    ) -> Result<(), VolumeError> {
        if phase == "Released" && self.claim_exists(volume).await? {
            return Ok(());
        }
        if !message.is_empty() {
            events.warning(volume, "VolumeFailedDelete", message.to_owned());
        }
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let metadata = json!({"resourceVersion": volume.metadata.resource_version});
        let message = (!message.is_empty()).then_some(message);
        let patch =
            Patch::Merge(json!({"metadata": metadata, "status": {"phase": phase, "message": message}}));
        api.patch_status(name_of(volume), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Reads from the API whether the claim that a volume names exists: the informer may be behind.
    async fn claim_exists(&self, volume: &PersistentVolume) -> Result<bool, VolumeError> {
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.clone()).unwrap_or_default();
        let api: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.clone(), &reference.namespace.unwrap_or_default());
        let known = api.get_opt(&reference.name.unwrap_or_default()).await?;
        Ok(known
            .is_some_and(|claim| claim.metadata.uid == reference.uid && volume_is_free_for(&claim, volume)))
    }

    async fn unprotect_claim(&self, claim: &PersistentVolumeClaim) -> Result<(), VolumeError> {
        // The informer may lack a new pod that uses it: list the pods at the API.
        let namespace = claim.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let pods = pods.list(&ListParams::default()).await?;
        if pods.iter().any(|pod| used_claims(pod).contains(&ObjectKey::of(claim))) {
            return Ok(());
        }
        unprotect(&self.claims_of(claim), claim, CLAIM_PROTECTION).await
    }

    async fn create_claim(&self, pod: &Pod, volume: &str) -> Result<(), VolumeError> {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let source =
            volumes.into_iter().find(|known| known.name == volume).and_then(|known| known.ephemeral.as_ref());
        let Some(template) = source.and_then(|source| source.volume_claim_template.as_ref()) else {
            return Ok(());
        };
        let from = template.metadata.clone().unwrap_or_default();
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {
                "name": format!("{}-{volume}", pod.name_any()),
                "labels": from.labels, "annotations": from.annotations,
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": uid(pod),
                    "controller": true, "blockOwnerDeletion": true}]},
            "spec": template.spec}))
        .map_err(kube::Error::SerdeError)?;
        let api: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        api.create(&PostParams::default(), &claim).await?;
        Ok(())
    }

    /// Folder first, then the object, which is already bound to the claim.
    async fn provision(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        state: &VolumeState,
        events: &EventRecorder,
    ) -> Result<(), VolumeError> {
        let Some(local) = &state.local else { return Ok(()) };
        let name = format!("pvc-{}", uid(claim));
        if let Err(error) = on_folder(local, &name, local::prepare).await {
            self.notice(claim, "ProvisioningFailed", format!("failed to provision volume: {error}"), events);
            return Err(error);
        }
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let created = api.create(&PostParams::default(), &new_volume(&name, claim, class, local)?).await;
        match created {
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            created => {
                created?;
                let message = format!("Successfully provisioned volume {name}");
                events.normal(claim, "ProvisioningSucceeded", message);
            }
        }
        on_folder(local, &name, local::finish).await
    }

    async fn reclaim(&self, volume: &PersistentVolume, events: &EventRecorder) -> Result<(), VolumeError> {
        let Some(local) = &self.config.local else { return Ok(()) };
        if volume_phase(volume) != "Released" || self.claim_exists(volume).await? {
            return Ok(());
        }
        if let Err(error) = on_folder(local, name_of(volume), local::remove).await {
            events.warning(volume, "VolumeFailedDelete", error.to_string());
            return Err(error);
        }
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let deleted = api.delete(name_of(volume), &only(uid(volume))).await;
        if !is_gone(&deleted) {
            deleted?;
        }
        Ok(())
    }

    async fn recover(&self, local: &LocalVolumes) {
        let known: HashSet<String> = self.volumes.list().iter().map(|volume| volume.name_any()).collect();
        let folder = local.folder.clone();
        let recovered = tokio::task::spawn_blocking(move || local::recover(&folder, &known)).await;
        if let Ok(Err(error)) = recovered {
            let folder = local.folder.display();
            tracing::warn!(%folder, %error, "cannot recover the folders of local volumes");
        }
    }

    /// The class of local volumes; the default one, unless there is a default already.
    async fn ensure_class(&self, local: &LocalVolumes) -> Result<(), VolumeError> {
        let api: Api<StorageClass> = Api::all(self.client.clone());
        let topologies =
            json!([{"matchLabelExpressions": [{"key": LABEL_HOSTNAME, "values": [local.node]}]}]);
        let classes = self.classes.list();
        if let Some(class) = classes.iter().find(|class| class.name_any() == LOCAL_CLASS) {
            if class.provisioner == LOCAL_PROVISIONER && json!(class.allowed_topologies) != topologies {
                let patch = Patch::Merge(json!({"allowedTopologies": topologies}));
                api.patch(LOCAL_CLASS, &PatchParams::default(), &patch).await?;
            }
            return Ok(());
        }
        let is_default =
            classes.iter().all(|class| annotation(&**class, DEFAULT_CLASS_ANNOTATION) != Some("true"));
        let class: StorageClass = serde_json::from_value(json!({
            "metadata": {"name": LOCAL_CLASS, "annotations": {DEFAULT_CLASS_ANNOTATION: is_default.to_string()}},
            "provisioner": LOCAL_PROVISIONER, "reclaimPolicy": "Delete", "allowVolumeExpansion": true,
            "volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": topologies}))
        .map_err(kube::Error::SerdeError)?;
        match api.create(&PostParams::default(), &class).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            created => created.map(|_| ()).map_err(VolumeError::from),
        }
    }
}

fn has_claims(pod: &Pod) -> bool {
    !claims_of(pod).is_empty()
}

/// Whether the claim has this volume, or none yet.
fn volume_is_free_for(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let named = super::plan::volume_name(claim);
    named.is_empty() || named == name_of(volume)
}

async fn on_folder(
    local: &LocalVolumes,
    volume: &str,
    work: fn(&std::path::Path, &str) -> io::Result<()>,
) -> Result<(), VolumeError> {
    let (folder, name) = (local.folder.clone(), volume.to_owned());
    let done = tokio::task::spawn_blocking(move || work(&folder, &name)).await;
    let done = done.unwrap_or_else(|error| Err(io::Error::other(error)));
    done.map_err(|source| VolumeError::Folder { volume: volume.to_owned(), source })
}

/// Removes a finalizer.
async fn unprotect<K>(api: &Api<K>, object: &K, finalizer: &str) -> Result<(), VolumeError>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    let meta = object.meta();
    let left: Vec<_> = meta.finalizers.iter().flatten().filter(|known| *known != finalizer).collect();
    let metadata = json!({"resourceVersion": meta.resource_version, "uid": meta.uid, "finalizers": left});
    let patch = Patch::Merge(json!({"metadata": metadata}));
    api.patch(meta.name.as_deref().unwrap_or_default(), &PatchParams::default(), &patch).await?;
    Ok(())
}
