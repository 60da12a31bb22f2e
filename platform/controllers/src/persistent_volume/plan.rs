//! Plans the next step of all claims and volumes; pure.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod},
            storage::v1::StorageClass,
        },
        apimachinery::pkg::api::resource::Quantity,
    },
    node_fit::NodeFacts,
    volume_claims::{
        self, ANNOTATION_BIND_COMPLETED, ANNOTATION_SELECTED_NODE, LOCAL_PROVISIONER, NO_PROVISIONER,
        class_of_claim,
    },
};

use super::{LocalVolumes, protection};
use crate::metadata::uid;

/// The annotation of a claim and a volume that a controller has bound; other tools read it.
pub(super) const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
pub(crate) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
pub(crate) const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The inputs of the plan.
#[derive(Default)]
pub(super) struct VolumeState {
    pub(super) claims: Vec<Arc<PersistentVolumeClaim>>,
    pub(super) volumes: Vec<Arc<PersistentVolume>>,
    pub(super) classes: BTreeMap<String, Arc<StorageClass>>,
    pub(super) pods: Vec<Arc<Pod>>,
    pub(super) nodes: BTreeMap<String, NodeFacts>,
    pub(super) local: Option<LocalVolumes>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Sets the volume's claimRef to the claim.
    Reserve {
        volume: Arc<PersistentVolume>,
        claim: Arc<PersistentVolumeClaim>,
    },
    /// Releases the reservation of a volume whose claim is bound to another one.
    Unreserve {
        volume: Arc<PersistentVolume>,
    },
    /// Sets the volume's name in the claim. `by_controller`: the claim left the choice open.
    Bind {
        claim: Arc<PersistentVolumeClaim>,
        volume: Arc<PersistentVolume>,
        by_controller: bool,
    },
    /// Sets the claim's status to that of a bound one: phase, capacity, access modes.
    ShowBound {
        claim: Arc<PersistentVolumeClaim>,
        volume: Arc<PersistentVolume>,
    },
    ClaimPhase {
        claim: Arc<PersistentVolumeClaim>,
        phase: &'static str,
    },
    VolumePhase {
        volume: Arc<PersistentVolume>,
        phase: &'static str,
        message: &'static str,
    },
    /// Creates a local volume for the claim.
    Provision {
        claim: Arc<PersistentVolumeClaim>,
        class: Arc<StorageClass>,
    },
    /// Asks a provisioner outside of this process for a volume.
    AskProvisioner {
        claim: Arc<PersistentVolumeClaim>,
        provisioner: String,
    },
    /// The chosen node cannot have the volume: the scheduler chooses again.
    RejectNode {
        claim: Arc<PersistentVolumeClaim>,
        node: String,
    },
    /// Sets the volume's capacity. `bytes`: its driver expands it on the nodes that mount it, to this size.
    Expand {
        volume: Arc<PersistentVolume>,
        size: Quantity,
        bytes: Option<u64>,
    },
    /// Removes the data of a released local volume, then the object.
    Reclaim {
        volume: Arc<PersistentVolume>,
    },
    UnprotectClaim {
        claim: Arc<PersistentVolumeClaim>,
    },
    UnprotectVolume {
        volume: Arc<PersistentVolume>,
    },
    /// Creates the claim of a pod's generic ephemeral volume.
    CreateClaim {
        pod: Arc<Pod>,
        volume: String,
    },
    /// An event about a claim.
    Notice {
        claim: Arc<PersistentVolumeClaim>,
        reason: &'static str,
        message: String,
    },
}

/// All steps that can be done now.
pub(super) fn plan(state: &VolumeState) -> Vec<Step> {
    let mut pass = Pass::new(state);
    for claim in &state.claims {
        pass.claim(claim);
    }
    for volume in &state.volumes {
        pass.volume(volume);
    }
    pass.steps.extend(protection::plan(state));
    pass.steps
}

/// One pass over the state.
struct Pass<'a> {
    state: &'a VolumeState,
    volumes: HashMap<&'a str, &'a Arc<PersistentVolume>>,
    claims: HashMap<ObjectKey, &'a Arc<PersistentVolumeClaim>>,
    /// Volumes whose claimRef names a claim, by that claim.
    reserved: HashMap<ObjectKey, Vec<&'a Arc<PersistentVolume>>>,
    /// Volumes that this pass has assigned.
    taken: HashSet<&'a str>,
    steps: Vec<Step>,
}

pub(super) fn name_of<K: kube::Resource>(object: &K) -> &str {
    object.meta().name.as_deref().unwrap_or_default()
}

pub(super) fn annotation<'a, K: kube::Resource>(object: &'a K, name: &str) -> Option<&'a str> {
    object.meta().annotations.as_ref()?.get(name).map(String::as_str)
}

fn is_going<K: kube::Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some()
}

fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

fn ref_uid(reference: &ObjectReference) -> &str {
    reference.uid.as_deref().unwrap_or_default()
}

fn ref_key(reference: &ObjectReference) -> ObjectKey {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    ObjectKey::new(text(&reference.namespace), text(&reference.name))
}

pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

fn claim_phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub(super) fn volume_phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

impl<'a> Pass<'a> {
    fn new(state: &'a VolumeState) -> Self {
        let mut reserved: HashMap<_, Vec<_>> = HashMap::new();
        for volume in &state.volumes {
            if let Some(reference) = claim_ref(volume) {
                reserved.entry(ref_key(reference)).or_default().push(volume);
            }
        }
        Self {
            state,
            volumes: state.volumes.iter().map(|volume| (name_of(&**volume), volume)).collect(),
            claims: state.claims.iter().map(|claim| (ObjectKey::of(&**claim), claim)).collect(),
            reserved,
            taken: HashSet::new(),
            steps: Vec::new(),
        }
    }

    fn claim(&mut self, claim: &'a Arc<PersistentVolumeClaim>) {
        match volume_name(claim) {
            "" if is_going(&**claim) => {}
            "" => self.unbound_claim(claim),
            name => match self.volumes.get(name).copied() {
                Some(volume) => self.claim_of(claim, volume),
                None => self.without_volume(claim),
            },
        }
    }

    /// Binds a claim that names an existing volume.
    fn claim_of(&mut self, claim: &'a Arc<PersistentVolumeClaim>, volume: &'a Arc<PersistentVolume>) {
        let is_complete = annotation(&**claim, ANNOTATION_BIND_COMPLETED).is_some();
        let (claim, volume) = (claim.clone(), volume.clone());
        match claim_ref(&volume) {
            Some(reference)
                if ref_key(reference) == ObjectKey::of(&*claim) && ref_uid(reference) == uid(&*claim) =>
            {
                self.bound_claim(claim, volume, is_complete);
            }
            Some(reference)
                if ref_key(reference) != ObjectKey::of(&*claim) || !ref_uid(reference).is_empty() =>
            {
                if is_complete {
                    self.lost(claim);
                } else {
                    self.pending(&claim);
                    let message =
                        format!("volume {:?} already bound to a different claim.", name_of(&*volume));
                    self.steps.push(Step::Notice { claim, reason: "FailedBinding", message });
                }
            }
            _ if is_going(&*claim) => {}
            _ => match volume_claims::mismatch(&claim, &volume).filter(|_| !is_complete) {
                Some(why) => {
                    self.pending(&claim);
                    let message = format!("Cannot bind to requested volume {:?}: {why}", name_of(&*volume));
                    self.steps.push(Step::Notice { claim, reason: "VolumeMismatch", message });
                }
                None => self.steps.push(Step::Reserve { volume, claim }),
            },
        }
    }

    /// Handles a claim and a volume that name each other.
    fn bound_claim(
        &mut self,
        claim: Arc<PersistentVolumeClaim>,
        volume: Arc<PersistentVolume>,
        is_complete: bool,
    ) {
        if !is_complete {
            self.steps.push(Step::Bind { claim, volume, by_controller: false });
            return;
        }
        self.expand(&claim, &volume);
        let (status, spec) = (claim.status.as_ref(), volume.spec.as_ref());
        let shown = status.is_some_and(|status| {
            status.phase.as_deref() == Some("Bound")
                && status.capacity == spec.and_then(|spec| spec.capacity.clone())
                && status.access_modes == spec.and_then(|spec| spec.access_modes.clone())
        });
        if !shown {
            self.steps.push(Step::ShowBound { claim, volume });
        }
    }

    /// The capacity follows the claim, where the class allows that: a local volume has no size of its own, and a
    /// FlexVolume driver is called by the nodes.
    fn expand(&mut self, claim: &PersistentVolumeClaim, volume: &Arc<PersistentVolume>) {
        let wanted = volume_claims::requested_bytes(claim);
        let is_local = annotation(&**volume, PROVISIONED_BY) == Some(LOCAL_PROVISIONER);
        let is_flex = volume.spec.as_ref().is_some_and(|spec| spec.flex_volume.is_some());
        if wanted <= volume_claims::capacity_bytes(volume) || !(is_local || is_flex) {
            return;
        }
        let class = self.state.classes.get(class_of_claim(claim));
        let allowed = class.is_some_and(|class| class.allow_volume_expansion == Some(true));
        let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
        let size = resources.and_then(|resources| resources.requests.as_ref()?.get("storage").cloned());
        if let Some(size) = size.filter(|_| allowed) {
            let bytes = Some(wanted).filter(|_| is_flex);
            self.steps.push(Step::Expand { volume: volume.clone(), size, bytes });
        }
    }

    /// Handles a claim that names a volume that does not exist.
    fn without_volume(&mut self, claim: &Arc<PersistentVolumeClaim>) {
        if annotation(&**claim, ANNOTATION_BIND_COMPLETED).is_some() {
            self.lost(claim.clone());
        } else {
            self.pending(claim);
        }
    }

    fn lost(&mut self, claim: Arc<PersistentVolumeClaim>) {
        if claim_phase(&claim) != "Lost" {
            let message = "Bound claim has lost its PersistentVolume. Data on the volume is lost!".to_owned();
            self.steps.push(Step::ClaimPhase { claim: claim.clone(), phase: "Lost" });
            self.steps.push(Step::Notice { claim, reason: "ClaimLost", message });
        }
    }

    fn pending(&mut self, claim: &Arc<PersistentVolumeClaim>) {
        if claim_phase(claim) != "Pending" {
            self.steps.push(Step::ClaimPhase { claim: claim.clone(), phase: "Pending" });
        }
    }

    /// Handles a claim that names no volume yet: it gets one that is reserved for it, one that fits, or a new one.
    fn unbound_claim(&mut self, claim: &'a Arc<PersistentVolumeClaim>) {
        let key = ObjectKey::of(&**claim);
        let reserved = self.reserved.get(&key).cloned().unwrap_or_default();
        let mut reserved = reserved.into_iter();
        if let Some(volume) =
            reserved.clone().find(|volume| claim_ref(volume).is_some_and(|one| ref_uid(one) == uid(&**claim)))
        {
            let (claim, volume) = (claim.clone(), volume.clone());
            self.steps.push(Step::Bind { claim, volume, by_controller: true });
            return;
        }
        self.pending(claim);
        let named = reserved.find(|volume| {
            claim_ref(volume).is_some_and(|one| ref_uid(one).is_empty())
                && volume_claims::mismatch(claim, volume).is_none()
                && !is_going(&***volume)
        });
        if let Some(volume) = named {
            self.steps.push(Step::Reserve { volume: volume.clone(), claim: claim.clone() });
            return;
        }
        let class = self.state.classes.get(class_of_claim(claim));
        let waits =
            class.is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"));
        let node = annotation(&**claim, ANNOTATION_SELECTED_NODE).filter(|node| !node.is_empty());
        if waits && node.is_none() {
            let message = "waiting for first consumer to be created before binding".to_owned();
            self.steps.push(Step::Notice { claim: claim.clone(), reason: "WaitForFirstConsumer", message });
            return;
        }
        let facts = node.and_then(|node| self.state.nodes.get(node));
        let (state, taken) = (self.state, &self.taken);
        // The volumes of an unknown node are unknown, too: only those without a node can be used on it.
        let is_usable = |volume: &PersistentVolume| {
            let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
            node.is_none() || facts.is_some() || affinity.is_none()
        };
        let free =
            state.volumes.iter().filter(|volume| !taken.contains(name_of(&***volume)) && is_usable(volume));
        if let Some(best) = volume_claims::best(claim, free.map(|volume| &**volume), facts)
            && let Some(volume) = self.volumes.get(name_of(best)).copied()
        {
            self.taken.insert(name_of(&**volume));
            self.steps.push(Step::Reserve { volume: volume.clone(), claim: claim.clone() });
            return;
        }
        self.provision(claim, class, node);
    }

    fn provision(
        &mut self,
        claim: &Arc<PersistentVolumeClaim>,
        class: Option<&Arc<StorageClass>>,
        node: Option<&str>,
    ) {
        let claim = claim.clone();
        let Some(class) = class else {
            let message = match class_of_claim(&claim) {
                "" => "no persistent volumes available for this claim and no storage class is set".to_owned(),
                name => format!("storageclass.storage.k8s.io {name:?} not found"),
            };
            let reason =
                if class_of_claim(&claim).is_empty() { "FailedBinding" } else { "ProvisioningFailed" };
            self.steps.push(Step::Notice { claim, reason, message });
            return;
        };
        match (class.provisioner.as_str(), &self.state.local) {
            (NO_PROVISIONER, _) => {
                let message = format!("no volume plugin matched name: {NO_PROVISIONER}");
                self.steps.push(Step::Notice { claim, reason: "ProvisioningFailed", message });
            }
            (LOCAL_PROVISIONER, Some(local)) if node.is_none_or(|node| node == local.node) => {
                match cannot_be_local(&claim) {
                    None => self.steps.push(Step::Provision { claim, class: class.clone() }),
                    Some(why) => {
                        let message = format!("failed to provision volume: {why}");
                        self.steps.push(Step::Notice { claim, reason: "ProvisioningFailed", message });
                    }
                }
            }
            (LOCAL_PROVISIONER, Some(_)) => {
                let node = node.unwrap_or_default().to_owned();
                self.steps.push(Step::RejectNode { claim, node });
            }
            (provisioner, _) => {
                let provisioner = provisioner.to_owned();
                let message = format!(
                    "Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually \
                     by the system administrator. If volume creation is delayed, please verify that the provisioner is \
                     running and correctly registered."
                );
                if annotation(&*claim, STORAGE_PROVISIONER) != Some(&provisioner) {
                    self.steps.push(Step::AskProvisioner { claim: claim.clone(), provisioner });
                }
                self.steps.push(Step::Notice { claim, reason: "ExternalProvisioning", message });
            }
        }
    }

    fn volume(&mut self, volume: &Arc<PersistentVolume>) {
        let Some(reference) = claim_ref(volume) else { return self.volume_is(volume, "Available", "") };
        if ref_uid(reference).is_empty() {
            return self.volume_is(volume, "Available", "");
        }
        let claim = self.claims.get(&ref_key(reference)).copied();
        let claim = claim.filter(|claim| uid(&***claim) == ref_uid(reference));
        let Some(claim) = claim else { return self.released(volume) };
        match volume_name(claim) {
            // Planned with the claims, which binds it.
            "" => {}
            name if name == name_of(&**volume) => self.volume_is(volume, "Bound", ""),
            _ if annotation(&**volume, PROVISIONED_BY).is_some() => self.released(volume),
            _ if annotation(&**volume, BOUND_BY_CONTROLLER).is_some() => {
                self.steps.push(Step::Unreserve { volume: volume.clone() });
            }
            _ => {}
        }
    }

    fn volume_is(&mut self, volume: &Arc<PersistentVolume>, phase: &'static str, message: &'static str) {
        if volume_phase(volume) != phase {
            self.steps.push(Step::VolumePhase { volume: volume.clone(), phase, message });
        }
    }

    /// Handles a volume whose claim is deleted.
    fn released(&mut self, volume: &Arc<PersistentVolume>) {
        let phase = volume_phase(volume);
        if phase != "Released" && phase != "Failed" {
            return self.volume_is(volume, "Released", "");
        }
        let spec = volume.spec.as_ref();
        let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
        match (policy.unwrap_or("Retain"), annotation(&**volume, PROVISIONED_BY)) {
            ("Delete", Some(LOCAL_PROVISIONER)) => self.steps.push(Step::Reclaim { volume: volume.clone() }),
            // The volume's own provisioner deletes it.
            ("Retain", _) | ("Delete", Some(_)) => {}
            ("Recycle", _) => {
                self.volume_is(volume, "Failed", "Recycle is not supported: use Retain or Delete")
            }
            _ => {
                self.volume_is(volume, "Failed", "no provisioner made this volume, so none deletes its data")
            }
        }
    }
}

/// The feature that a claim requests and that a folder on one node does not have.
fn cannot_be_local(claim: &PersistentVolumeClaim) -> Option<&'static str> {
    let spec = claim.spec.as_ref()?;
    let many: BTreeSet<_> = ["ReadOnlyMany", "ReadWriteMany"].into();
    if spec.access_modes.iter().flatten().any(|mode| many.contains(mode.as_str())) {
        return Some("a local volume is ReadWriteOnce or ReadWriteOncePod: it lies on one node");
    }
    if spec.selector.is_some() {
        return Some("a claim with a selector is only bound to volumes that exist");
    }
    if spec.volume_mode.as_deref() == Some("Block") {
        return Some("a local volume is a folder, not a block device");
    }
    spec.data_source.as_ref().map(|_| "local volumes cannot be made from a data source")
}
