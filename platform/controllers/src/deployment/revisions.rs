//! The ReplicaSets of a Deployment as its revision history: which is the new one, names, hashes, annotations.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::{
        api::{
            apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec},
            core::v1::PodTemplateSpec,
        },
        apimachinery::pkg::apis::meta::v1::ObjectMeta,
    },
    wellknown::ANNOTATION_LAST_APPLIED,
};

use crate::{ownership::controller_reference, template_hash::template_hash};

pub(super) const LABEL_TEMPLATE_HASH: &str = "pod-template-hash";
pub(super) const ANNOTATION_REVISION: &str = "deployment.kubernetes.io/revision";
const ANNOTATION_REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
pub(super) const ANNOTATION_DESIRED: &str = "deployment.kubernetes.io/desired-replicas";
pub(super) const ANNOTATION_MAX: &str = "deployment.kubernetes.io/max-replicas";
/// Annotations of a Deployment that are not copied to its ReplicaSets: each has its own.
const NOT_COPIED: [&str; 6] = [
    ANNOTATION_LAST_APPLIED,
    ANNOTATION_REVISION,
    ANNOTATION_REVISION_HISTORY,
    ANNOTATION_DESIRED,
    ANNOTATION_MAX,
    "deprecated.deployment.rollback.to",
];
/// Revision numbers that one ReplicaSet remembers, in bytes of the annotation. Upstream's value.
const REVISION_HISTORY_BYTES_MAX: usize = 2000;

/// The ReplicaSets of one Deployment by age: the one of the current template, and all others.
pub(super) struct Sets {
    pub(super) new: Option<Arc<ReplicaSet>>,
    /// Oldest first.
    pub(super) old: Vec<Arc<ReplicaSet>>,
}

impl Sets {
    pub(super) fn of(deployment: &Deployment, mut all: Vec<Arc<ReplicaSet>>) -> Self {
        all.sort_by_key(|set| (created(set), set.name_any()));
        let template = deployment.spec.as_ref().map(|spec| &spec.template);
        // The oldest of several with the same template: a stable choice.
        let new = all.iter().position(|set| template.is_some_and(|template| has_template(set, template)));
        let new = new.map(|at| all.remove(at));
        Self { new, old: all }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<ReplicaSet>> {
        self.old.iter().chain(&self.new)
    }
}

pub(super) fn created(set: &ReplicaSet) -> Option<mayfly_api::k8s::jiff::Timestamp> {
    set.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// Whether a ReplicaSet makes pods of this template, apart from the hash label.
pub(super) fn has_template(set: &ReplicaSet, template: &PodTemplateSpec) -> bool {
    let own = set.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default();
    without_hash(own) == without_hash(template.clone())
}

fn without_hash(mut template: PodTemplateSpec) -> PodTemplateSpec {
    let mut metadata = template.metadata.take().unwrap_or_default();
    if let Some(labels) = &mut metadata.labels {
        labels.remove(LABEL_TEMPLATE_HASH);
    }
    metadata.labels = metadata.labels.filter(|labels| !labels.is_empty());
    metadata.annotations = metadata.annotations.filter(|annotations| !annotations.is_empty());
    metadata.creation_timestamp = None;
    template.metadata = Some(metadata);
    template
}

pub(super) fn revision(set: &ReplicaSet) -> i64 {
    set.annotations().get(ANNOTATION_REVISION).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The number that the ReplicaSet of the current template has or gets.
pub(super) fn next_revision(sets: &Sets) -> i64 {
    sets.old.iter().map(|set| revision(set)).max().unwrap_or(0).saturating_add(1)
}

/// The annotations that the new ReplicaSet should have, if it lacks some: the Deployment's own, and its number.
pub(super) fn annotations(
    deployment: &Deployment,
    set: &ReplicaSet,
    next: i64,
) -> Option<BTreeMap<String, String>> {
    let known = set.annotations();
    let mut wanted = known.clone();
    wanted.extend(copied(deployment));
    let current = revision(set);
    if current < next {
        wanted.insert(ANNOTATION_REVISION.into(), next.to_string());
        if current > 0 {
            let history = known.get(ANNOTATION_REVISION_HISTORY).map(String::as_str).unwrap_or_default();
            wanted.insert(ANNOTATION_REVISION_HISTORY.into(), with_number(history, current));
        }
    }
    (wanted != *known).then_some(wanted)
}

/// The list with one more number, without the oldest ones where it gets too long.
fn with_number(history: &str, number: i64) -> String {
    let mut numbers: Vec<&str> = history.split(',').filter(|text| !text.is_empty()).collect();
    let number = number.to_string();
    numbers.push(&number);
    while numbers.len() > 1
        && numbers.iter().map(|text| text.len() + 1).sum::<usize>() > REVISION_HISTORY_BYTES_MAX
    {
        numbers.remove(0);
    }
    numbers.join(",")
}

fn copied(deployment: &Deployment) -> impl Iterator<Item = (String, String)> + '_ {
    let annotations = deployment.annotations().iter();
    let copied = annotations.filter(|(name, _)| !NOT_COPIED.contains(&name.as_str()));
    copied.map(|(name, value)| (name.clone(), value.clone()))
}

/// The ReplicaSet of the current template, to be created with `replicas` pods.
pub(super) fn new_set(deployment: &Deployment, next: i64, replicas: i32, max: i32) -> ReplicaSet {
    let spec = deployment.spec.clone().unwrap_or_default();
    let collisions = deployment.status.as_ref().and_then(|status| status.collision_count);
    let hash = template_hash(&spec.template, collisions);
    let mut template = spec.template;
    let labels = &mut template.metadata.get_or_insert_default().labels;
    labels.get_or_insert_default().insert(LABEL_TEMPLATE_HASH.into(), hash.clone());
    let labels = labels.clone();
    let mut selector = spec.selector;
    selector.match_labels.get_or_insert_default().insert(LABEL_TEMPLATE_HASH.into(), hash.clone());
    let mut annotations: BTreeMap<_, _> = copied(deployment).collect();
    annotations.insert(ANNOTATION_REVISION.into(), next.to_string());
    annotations.insert(ANNOTATION_DESIRED.into(), spec.replicas.unwrap_or(1).to_string());
    annotations.insert(ANNOTATION_MAX.into(), max.to_string());
    ReplicaSet {
        metadata: ObjectMeta {
            name: Some(format!("{}-{hash}", deployment.name_any())),
            namespace: deployment.namespace(),
            labels,
            annotations: Some(annotations),
            owner_references: controller_reference(deployment).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(ReplicaSetSpec {
            replicas: Some(replicas),
            min_ready_seconds: spec.min_ready_seconds,
            selector,
            template: Some(template),
        }),
        status: None,
    }
}

/// The ReplicaSets past `revisionHistoryLimit` that hold no pods, oldest revision first.
pub(super) fn surplus(deployment: &Deployment, old: &[Arc<ReplicaSet>]) -> Vec<Arc<ReplicaSet>> {
    let limit = deployment.spec.as_ref().and_then(|spec| spec.revision_history_limit).unwrap_or(10);
    let Ok(limit) = usize::try_from(limit) else { return Vec::new() };
    let mut live: Vec<_> = old.iter().filter(|set| set.metadata.deletion_timestamp.is_none()).collect();
    live.sort_by_key(|set| (revision(set), created(set)));
    let count = live.len().saturating_sub(limit);
    let is_empty = |set: &ReplicaSet| {
        let status = set.status.clone().unwrap_or_default();
        status.replicas == 0
            && super::scaling::replicas(set) == 0
            && status.observed_generation >= set.metadata.generation
    };
    live.into_iter().take(count).filter(|set| is_empty(set)).cloned().collect()
}
