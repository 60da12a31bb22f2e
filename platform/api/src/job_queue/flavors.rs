//! Flavors: kinds of nodes, such as those with one model of GPU, with quotas of their own in a queue (after Kueue's
//! ResourceFlavor). Pure.
//!
//! A Job that requests a resource of the flavors' quotas is started in one of them: the first, in the queue's order,
//! that its node selector and required node affinity permit and that has room. It then gets the flavor's labels as its
//! node selector, so that its pods run on these nodes, and counts against the flavor's quota.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    job_queue::{JobQueueSpec, QueuedJob, canonical, check_quota, check_selector},
    k8s::{
        api::{
            batch::v1::Job,
            core::v1::{NodeSelector, NodeSelectorTerm, PodSpec},
        },
        apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector},
    },
    names,
    node_fit::{Constraints, NodeFacts},
    validation::FieldError,
};

/// The flavors of a queue. Each is tried for each Job that waits.
const FLAVORS_MAX: usize = 64;

/// A kind of node with a quota.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct QueueFlavor {
    pub name: String,
    /// The labels of its nodes, such as nvidia.com/gpu.product.
    pub node_labels: BTreeMap<String, String>,
    /// The amounts that the running Jobs of this flavor request together, at most. All flavors of a queue name the same
    /// resources.
    pub quota: BTreeMap<String, Quantity>,
}

/// The amounts that the running Jobs of a flavor request, of the resources that its quota names.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FlavorUsage {
    pub name: String,
    #[serde(default)]
    pub used: BTreeMap<String, Quantity>,
}

/// The nodes that a Job's pods may run on, as far as labels decide.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobNodes {
    pub selector: BTreeMap<String, String>,
    pub required: Option<NodeSelector>,
    /// Whether the Job has run before: its node selector cannot be changed any more.
    pub is_fixed: bool,
}

impl JobNodes {
    pub(super) fn of(job: &Job, template: Option<&PodSpec>) -> Self {
        let wanted = template.map(Constraints::of).unwrap_or_default();
        let is_fixed = job.status.as_ref().is_some_and(|status| status.start_time.is_some());
        Self { selector: wanted.node_selector.into_iter().collect(), required: wanted.required, is_fixed }
    }

    /// Whether nothing that the Job requires contradicts the flavor's labels. Other labels of its nodes are not known.
    fn permits(&self, flavor: &QueueFlavor) -> bool {
        let labels = &flavor.node_labels;
        let contradicts =
            |(key, value): (&String, &String)| self.selector.get(key).is_some_and(|own| own != value);
        if labels.iter().any(contradicts) {
            return false;
        }
        let facts = NodeFacts { labels: labels.clone(), ..NodeFacts::default() };
        let holds = |term: &NodeSelectorTerm| {
            let about_labels = term.match_expressions.iter().flatten();
            let about_labels: Vec<_> =
                about_labels.filter(|one| labels.contains_key(&one.key)).cloned().collect();
            let term = NodeSelectorTerm { match_expressions: Some(about_labels.clone()), match_fields: None };
            about_labels.is_empty()
                || facts.matches_selector(&NodeSelector { node_selector_terms: vec![term] })
        };
        self.required.as_ref().is_none_or(|selector| selector.node_selector_terms.iter().any(holds))
    }
}

/// The position of a flavor in its queue.
pub(super) type FlavorId = usize;

/// The flavors that a Job may be started in, or that it runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum JobFlavors {
    /// It requests none of the flavors' resources.
    NotConcerned,
    /// In the order in which they are tried; empty: no flavor has nodes for it.
    AnyOf(Vec<FlavorId>),
}

impl JobFlavors {
    /// The flavors for a Job that waits.
    pub(super) fn of_waiting(spec: &JobQueueSpec, job: &QueuedJob) -> Self {
        match Self::is_concerned(spec, job) {
            false => Self::NotConcerned,
            true if job.nodes.is_fixed => Self::AnyOf(Self::of_running(spec, job).into_iter().collect()),
            true => Self::AnyOf(permitted(spec, job).collect()),
        }
    }

    /// The flavor of a Job that runs: the one that it selects. A Job that was started without a flavor counts as one of
    /// the first that it may run on.
    pub(super) fn of_running(spec: &JobQueueSpec, job: &QueuedJob) -> Option<FlavorId> {
        if !Self::is_concerned(spec, job) {
            return None;
        }
        selected(spec, &job.nodes.selector).or_else(|| permitted(spec, job).next())
    }

    fn is_concerned(spec: &JobQueueSpec, job: &QueuedJob) -> bool {
        let mut resources = spec.flavors.iter().flat_map(|flavor| flavor.quota.keys());
        resources.any(|name| job.request.get(&canonical(name)) > 0)
    }
}

/// The flavor whose labels a node selector has; of several the one with the most labels.
fn selected(spec: &JobQueueSpec, selector: &BTreeMap<String, String>) -> Option<FlavorId> {
    let has_labels =
        |flavor: &QueueFlavor| flavor.node_labels.iter().all(|(key, value)| selector.get(key) == Some(value));
    let flavors = spec.flavors.iter().enumerate().filter(|(_, flavor)| has_labels(flavor));
    flavors.min_by_key(|(_, flavor)| Reverse(flavor.node_labels.len())).map(|(id, _)| id)
}

/// The flavors that the Job may be started in. One is left out if the Job, with its labels, would count as one of
/// another flavor: its quota would not limit the Job.
fn permitted(spec: &JobQueueSpec, job: &QueuedJob) -> impl Iterator<Item = FlavorId> {
    let counts = move |id: FlavorId, flavor: &QueueFlavor| {
        let labels = job.nodes.selector.iter().chain(&flavor.node_labels);
        let selector: BTreeMap<_, _> = labels.map(|(key, value)| (key.clone(), value.clone())).collect();
        selected(spec, &selector) == Some(id)
    };
    let flavors = spec.flavors.iter().enumerate();
    flavors.filter(move |(id, flavor)| job.nodes.permits(flavor) && counts(*id, flavor)).map(|(id, _)| id)
}

/// The validation of a queue's flavors.
pub(super) fn validate(flavors: &[QueueFlavor], errors: &mut Vec<FieldError>) {
    if flavors.len() > FLAVORS_MAX {
        let detail = format!("must have at most {FLAVORS_MAX} items");
        errors.push(FieldError::invalid("spec.flavors", flavors.len(), detail));
    }
    let mut known = BTreeSet::new();
    for (at, flavor) in flavors.iter().enumerate() {
        let path = format!("spec.flavors[{at}]");
        let mut refuse = |field: &str, value: &str, detail: String| {
            errors.push(FieldError::invalid(format!("{path}.{field}"), format!("{value:?}"), detail));
        };
        if let Err(why) = names::dns_label(&flavor.name) {
            refuse("name", &flavor.name, why);
        } else if !known.insert(&flavor.name) {
            refuse("name", &flavor.name, "must be unique".into());
        } else if flavors[..at].iter().any(|other| other.node_labels == flavor.node_labels) {
            let own = flavor.node_labels.iter().map(|(key, value)| format!("{key}={value}"));
            let detail = "must differ from those of the flavors before it";
            refuse("nodeLabels", &own.collect::<Vec<_>>().join(","), detail.into());
        }
        if flavor.quota.keys().ne(flavors[0].quota.keys()) {
            let names = flavors[0].quota.keys().cloned().collect::<Vec<_>>().join(", ");
            let own = flavor.quota.keys().cloned().collect::<Vec<_>>().join(", ");
            refuse("quota", &own, format!("must name the same resources as the first flavor: {names}"));
        }
        if flavor.node_labels.is_empty() {
            let detail = "name at least one label of its nodes, such as nvidia.com/gpu.product";
            errors.push(FieldError::required(format!("{path}.nodeLabels"), detail));
        }
        let labels =
            LabelSelector { match_labels: Some(flavor.node_labels.clone()), match_expressions: None };
        check_selector(&format!("{path}.nodeLabels"), &labels, errors);
        check_quota(&format!("{path}.quota"), &flavor.quota, errors);
    }
}
