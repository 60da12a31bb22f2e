//! Decides which EndpointSlices to create, rewrite and delete so that they hold a Service's endpoints; pure.
//!
//! Endpoints stay in the slice they are in, so that a change rewrites few slices. The remaining ones fill slices that
//! change anyway, then the fullest one with space for all of them, then new ones.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use kube::{Resource, ResourceExt as _};
use mayfly_api::k8s::{
    api::{
        core::v1::{Endpoints, Service},
        discovery::v1::{Endpoint, EndpointSlice},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use super::addresses::{Family, Group, Grouped, Port, families, is_headless};
use crate::{ownership::controller_reference, template_hash::short_hash};

pub(super) const LABEL_SERVICE: &str = "kubernetes.io/service-name";
pub(super) const LABEL_MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
pub(super) const MANAGED_BY: &str = "endpointslice-controller.k8s.io";
pub(super) const MIRRORED_BY: &str = "endpointslicemirroring-controller.k8s.io";
pub(super) const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";

/// Annotations of Endpoints that their slices do not get.
const UNMIRRORED_ANNOTATIONS: [&str; 2] =
    ["endpoints.kubernetes.io/last-change-trigger-time", "kubectl.kubernetes.io/last-applied-configuration"];

/// The object whose endpoints are in the slices.
#[derive(Debug)]
pub(super) struct SliceOwner {
    namespace: Option<String>,
    /// The Service's name, and that of its Endpoints.
    service: String,
    uid: String,
    reference: Option<OwnerReference>,
    /// Of the slices.
    labels: BTreeMap<String, String>,
    /// Of the slices; without, those that a slice has are left alone.
    annotations: Option<BTreeMap<String, String>>,
    /// The families that have a slice even without endpoints.
    families: Vec<Family>,
}

impl SliceOwner {
    /// A Service, for its pods. With `placeholder`, a family without endpoints has one empty slice.
    pub(super) fn of_service(service: &Service, placeholder: bool) -> Self {
        let mut labels = service.labels().clone();
        labels.remove(LABEL_HEADLESS);
        if is_headless(service) {
            labels.insert(LABEL_HEADLESS.into(), String::new());
        }
        Self {
            reference: controller_reference(service),
            families: if placeholder { families(service) } else { Vec::new() },
            annotations: None,
            ..Self::with_labels(service, labels, MANAGED_BY)
        }
    }

    /// A user's Endpoints, which are mirrored with their labels and annotations (upstream:
    /// `pkg/controller/endpointslicemirroring`).
    pub(super) fn of_endpoints(endpoints: &Endpoints) -> Self {
        let mut annotations = endpoints.annotations().clone();
        annotations.retain(|name, _| !UNMIRRORED_ANNOTATIONS.contains(&name.as_str()));
        Self {
            reference: controller_reference(endpoints),
            annotations: Some(annotations),
            families: Vec::new(),
            ..Self::with_labels(endpoints, endpoints.labels().clone(), MIRRORED_BY)
        }
    }

    fn with_labels<O: Resource>(owner: &O, mut labels: BTreeMap<String, String>, manager: &str) -> Self {
        let service = owner.name_any();
        labels.insert(LABEL_SERVICE.into(), service.clone());
        labels.insert(LABEL_MANAGED_BY.into(), manager.into());
        Self {
            namespace: owner.namespace(),
            service,
            uid: owner.uid().unwrap_or_default(),
            reference: None,
            labels,
            annotations: None,
            families: Vec::new(),
        }
    }

    /// The value of the managed-by label.
    pub(super) fn manager(&self) -> &str {
        &self.labels[LABEL_MANAGED_BY]
    }
}

#[derive(Debug, Default)]
pub(super) struct SlicePlan {
    pub(super) create: Vec<EndpointSlice>,
    pub(super) update: Vec<EndpointSlice>,
    pub(super) delete: Vec<Arc<EndpointSlice>>,
}

/// A slice that is being filled.
struct Draft {
    known: Arc<EndpointSlice>,
    endpoints: Vec<Endpoint>,
    changed: bool,
}

/// `known` are the slices of the same manager.
pub(super) fn plan(
    owner: &SliceOwner,
    known: &[Arc<EndpointSlice>],
    mut wanted: Grouped,
    slice_max: usize,
) -> SlicePlan {
    for family in &owner.families {
        if !wanted.keys().any(|(known, _)| known == family) {
            wanted.insert((*family, Vec::new()), Vec::new());
        }
    }
    let mut plan = SlicePlan::default();
    let mut by_group: BTreeMap<Group, Vec<Arc<EndpointSlice>>> = BTreeMap::new();
    for slice in known {
        match group(slice).filter(|group| wanted.contains_key(group)) {
            Some(group) => by_group.entry(group).or_default().push(slice.clone()),
            None => plan.delete.push(slice.clone()),
        }
    }
    let mut names: BTreeSet<String> = known.iter().map(|slice| slice.name_any()).collect();
    for (group, endpoints) in wanted {
        let slices = by_group.remove(&group).unwrap_or_default();
        let is_placeholder = endpoints.is_empty();
        let (drafts, left) = fill(slices, endpoints, slice_max.max(1));
        let mut kept = 0;
        for mut draft in drafts {
            let keep = !draft.endpoints.is_empty() || (is_placeholder && kept == 0);
            draft.changed |= is_outdated(owner, &draft.known.metadata);
            match (keep, draft.changed) {
                (false, _) => plan.delete.push(draft.known),
                (true, false) => kept += 1,
                (true, true) => {
                    kept += 1;
                    plan.update.push(rewritten(&draft, owner));
                }
            }
        }
        let mut chunks: Vec<_> = left.chunks(slice_max.max(1)).map(<[Endpoint]>::to_vec).collect();
        if is_placeholder && kept == 0 {
            chunks.push(Vec::new());
        }
        for chunk in chunks {
            let name = free_name(owner, &group, &names);
            names.insert(name.clone());
            plan.create.push(new_slice(owner, name, &group, chunk));
        }
    }
    plan
}

fn group(slice: &EndpointSlice) -> Option<Group> {
    let family = match slice.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        _ => return None,
    };
    let mut ports: Vec<_> = slice.ports.iter().flatten().map(Port::read).collect();
    ports.sort();
    Some((family, ports))
}

/// The identity of an endpoint: its address and its pod.
fn identity(endpoint: &Endpoint) -> (String, Option<String>) {
    let uid = endpoint.target_ref.as_ref().and_then(|target| target.uid.clone());
    (endpoint.addresses.first().cloned().unwrap_or_default(), uid)
}

/// Distributes endpoints over the known slices; returns those that did not fit.
fn fill(
    slices: Vec<Arc<EndpointSlice>>,
    endpoints: Vec<Endpoint>,
    slice_max: usize,
) -> (Vec<Draft>, Vec<Endpoint>) {
    let order: Vec<_> = endpoints.iter().map(identity).collect();
    let mut left: HashMap<_, _> =
        endpoints.into_iter().map(|endpoint| (identity(&endpoint), endpoint)).collect();
    let mut drafts: Vec<_> = slices
        .into_iter()
        .map(|known| {
            let kept = known.endpoints.iter().filter_map(|endpoint| left.remove(&identity(endpoint)));
            let endpoints: Vec<_> = kept.take(slice_max).collect();
            let changed = endpoints != known.endpoints;
            Draft { known, endpoints, changed }
        })
        .collect();
    let mut left: Vec<_> = order.iter().filter_map(|identity| left.remove(identity)).collect();
    for draft in drafts.iter_mut().filter(|draft| draft.changed && !draft.endpoints.is_empty()) {
        let room = slice_max.saturating_sub(draft.endpoints.len()).min(left.len());
        draft.endpoints.extend(left.drain(..room));
    }
    let rest = left.len() % slice_max;
    if rest > 0 {
        let fits = |draft: &&mut Draft| draft.endpoints.len() + rest <= slice_max;
        if let Some(draft) = drafts.iter_mut().filter(fits).max_by_key(|draft| draft.endpoints.len()) {
            draft.endpoints.extend(left.drain(left.len() - rest..));
            draft.changed = true;
        }
    }
    (drafts, left)
}

/// Whether a slice lacks labels, annotations or the owner that it should have.
fn is_outdated(owner: &SliceOwner, metadata: &ObjectMeta) -> bool {
    metadata.labels.as_ref() != Some(&owner.labels)
        || owner
            .annotations
            .as_ref()
            .is_some_and(|own| *own != metadata.annotations.clone().unwrap_or_default())
        || metadata.owner_references.as_deref() != owner.reference.as_ref().map(std::slice::from_ref)
}

fn rewritten(draft: &Draft, owner: &SliceOwner) -> EndpointSlice {
    let mut slice = (*draft.known).clone();
    slice.metadata.labels = Some(owner.labels.clone());
    if let Some(annotations) = &owner.annotations {
        slice.metadata.annotations = Some(annotations.clone()).filter(|annotations| !annotations.is_empty());
    }
    slice.metadata.owner_references = owner.reference.clone().map(|reference| vec![reference]);
    slice.endpoints = draft.endpoints.clone();
    slice
}

/// A name from the owner and the group with the first free number: a second creation from a stale copy has the same
/// name and fails, instead of creating a second slice.
fn free_name(owner: &SliceOwner, (family, ports): &Group, taken: &BTreeSet<String>) -> String {
    let ports: Vec<_> = ports.iter().map(Port::write).collect();
    let mut number = 0_u32;
    loop {
        let hash = short_hash(&(&owner.uid, owner.manager(), family.name(), &ports, number));
        // A Service's name has at most 63 characters.
        let name = format!("{}-{hash}", owner.service);
        if !taken.contains(&name) {
            return name;
        }
        number = number.saturating_add(1);
    }
}

fn new_slice(
    owner: &SliceOwner,
    name: String,
    (family, ports): &Group,
    endpoints: Vec<Endpoint>,
) -> EndpointSlice {
    EndpointSlice {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: owner.namespace.clone(),
            labels: Some(owner.labels.clone()),
            annotations: owner.annotations.clone().filter(|annotations| !annotations.is_empty()),
            owner_references: owner.reference.clone().map(|reference| vec![reference]),
            ..ObjectMeta::default()
        },
        address_type: family.name().into(),
        endpoints,
        ports: Some(ports.iter().map(Port::write).collect()),
    }
}
