//! `JobQueue`: Jobs that share a quota and start in turn.
//!
//! A Job joins a queue by the label [`LABEL_QUEUE`]. The API server suspends it when it is created, and the queue's
//! controller resumes it when its turn comes. The contract is `spec.suspend` alone, so that it works with every
//! controller of Jobs. [`plan`] decides, purely; `mayfly why job` asks the same function.

pub mod flavors;
pub mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::flavors::{FlavorUsage, JobNodes, QueueFlavor};
use crate::{
    gang,
    k8s::{
        api::batch::v1::Job,
        apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector},
        jiff::{SignedDuration, Timestamp},
    },
    names::ObjectKey,
    resources::Amounts,
    selector::Selector,
    validation::FieldError,
};

/// On a Job: the queue that it waits in.
pub const LABEL_QUEUE: &str = "mayfly.dev/queue";
/// On a Job: a number; those with larger ones start first. The default is 0.
pub const ANNOTATION_QUEUE_PRIORITY: &str = "mayfly.dev/queue-priority";
/// Quotas for namespaces in one queue. Each is compared with every namespace of the queue.
const NAMESPACE_QUOTAS_MAX: usize = 100;

/// A queue of Jobs with a quota.
#[derive(CustomResource, Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[kube(
    group = "mayfly.dev",
    version = "v1",
    kind = "JobQueue",
    doc = "Jobs that share a quota and start in turn. A Job joins by the label mayfly.dev/queue.",
    plural = "jobqueues",
    shortname = "jq",
    status = "JobQueueStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct JobQueueSpec {
    /// The amounts that the running Jobs of the queue request together, at most, by resource name. A resource that is
    /// not named has no limit.
    pub quota: BTreeMap<String, Quantity>,
    /// The namespaces whose Jobs may use the queue. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Kinds of nodes with quotas of their own, such as those with one model of GPU, in the order in which they are
    /// tried. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flavors: Vec<QueueFlavor>,
    /// Additional quotas, each of which limits every namespace that it selects separately.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespace_quotas: Vec<NamespaceQuota>,
    /// Whether a Job may start before another one that waits for room, if it does not delay it. Default: true.
    #[serde(default = "yes")]
    pub backfill: bool,
    /// Whether the queue starts no further Jobs; running ones continue.
    #[serde(default)]
    pub paused: bool,
}

/// The quota of every namespace that is selected.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceQuota {
    /// The namespaces; the label kubernetes.io/metadata.name selects one by its name.
    pub namespace_selector: LabelSelector,
    /// The name of a flavor: only its Jobs count. Default: all Jobs count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flavor: Option<String>,
    /// The amounts that the running Jobs of one namespace request together, at most.
    pub quota: BTreeMap<String, Quantity>,
}

/// The state of a queue.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct JobQueueStatus {
    #[serde(default)]
    pub waiting: u32,
    #[serde(default)]
    pub running: u32,
    /// The amounts that the running Jobs request, of the resources that the quota names.
    #[serde(default)]
    pub used: BTreeMap<String, Quantity>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flavors: Vec<FlavorUsage>,
    /// The Job that starts next, `namespace/name`, and what it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

fn yes() -> bool {
    true
}

/// A Job of a queue.
#[derive(Clone, Debug, PartialEq)]
pub struct QueuedJob {
    pub key: ObjectKey,
    pub priority: i64,
    pub created: Timestamp,
    pub request: Amounts,
    pub nodes: JobNodes,
    /// The time for which it may run once it is started.
    pub deadline: Option<SignedDuration>,
    pub state: QueuedJobState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuedJobState {
    Waiting,
    /// It holds its requested amounts, until this time at the latest.
    Running {
        until: Option<Timestamp>,
    },
}

/// The queue that a Job names.
pub fn queue_of(job: &Job) -> Option<&str> {
    job.metadata.labels.as_ref()?.get(LABEL_QUEUE).map(String::as_str).filter(|name| !name.is_empty())
}

impl QueuedJob {
    /// The state of a Job for its queue; `None` for one that has ended.
    pub fn of(job: &Job, now: Timestamp) -> Option<Self> {
        let (spec, status) = (job.spec.as_ref()?, job.status.clone().unwrap_or_default());
        let ended = status.conditions.iter().flatten().any(|condition| {
            matches!(&*condition.type_, "Complete" | "Failed") && condition.status == "True"
        });
        if ended {
            return None;
        }
        let deadline = spec.active_deadline_seconds.map(SignedDuration::from_secs);
        let is_suspended = spec.suspend == Some(true);
        // The pods of a Job that was just suspended still hold their resources.
        let holding = [status.active, status.terminating].into_iter().flatten().any(|pods| pods > 0);
        let state = if is_suspended && !holding {
            QueuedJobState::Waiting
        } else {
            let started = status.start_time.map_or(now, |time| time.0);
            QueuedJobState::Running { until: deadline.and_then(|span| started.checked_add(span).ok()) }
        };
        let annotations = job.metadata.annotations.as_ref();
        let priority = annotations.and_then(|all| all.get(ANNOTATION_QUEUE_PRIORITY));
        Some(Self {
            key: ObjectKey::of(job),
            priority: priority.and_then(|text| text.parse().ok()).unwrap_or(0),
            created: job.metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0),
            request: request(job),
            nodes: JobNodes::of(job, spec.template.spec.as_ref()),
            deadline,
            state,
        })
    }
}

/// The amounts that the pods of a Job request together.
pub fn request(job: &Job) -> Amounts {
    let template = job.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let pods = u64::from(gang::pods_at_once(job));
    let each = template.map(Amounts::of_pod).unwrap_or_default();
    let mut total = BTreeMap::new();
    for (name, amount) in each.0 {
        *total.entry(canonical(&name)).or_insert(0_u64) += amount.saturating_mul(pods);
    }
    Amounts(total)
}

/// The name of a resource that nodes offer: aliases are renamed as in pods.
pub(crate) fn canonical(name: &str) -> String {
    name.strip_prefix("tencent.com/").map_or(name.to_owned(), |rest| format!("mayfly.dev/{rest}"))
}

/// The validation of a queue.
pub fn validate(spec: &JobQueueSpec) -> Vec<FieldError> {
    let mut errors = Vec::new();
    check_quota("spec.quota", &spec.quota, &mut errors);
    if let Some(selector) = &spec.namespace_selector {
        check_selector("spec.namespaceSelector", selector, &mut errors);
    }
    flavors::validate(&spec.flavors, &mut errors);
    if spec.namespace_quotas.len() > NAMESPACE_QUOTAS_MAX {
        let detail = format!("must have at most {NAMESPACE_QUOTAS_MAX} items");
        errors.push(FieldError::invalid("spec.namespaceQuotas", spec.namespace_quotas.len(), detail));
    }
    for (at, rule) in spec.namespace_quotas.iter().enumerate() {
        let path = format!("spec.namespaceQuotas[{at}]");
        check_selector(&format!("{path}.namespaceSelector"), &rule.namespace_selector, &mut errors);
        check_quota(&format!("{path}.quota"), &rule.quota, &mut errors);
        let is_known = |name: &String| spec.flavors.iter().any(|flavor| flavor.name == *name);
        if let Some(name) = rule.flavor.as_ref().filter(|name| !is_known(name)) {
            let detail = "must be the name of one of spec.flavors";
            errors.push(FieldError::invalid(format!("{path}.flavor"), format!("{name:?}"), detail));
        }
    }
    errors
}

fn check_selector(path: &str, selector: &LabelSelector, errors: &mut Vec<FieldError>) {
    if let Err(error) = Selector::from_object(selector) {
        errors.push(FieldError::invalid(path, "selector", error.to_string()));
    }
}

fn check_quota(path: &str, quota: &BTreeMap<String, Quantity>, errors: &mut Vec<FieldError>) {
    if quota.is_empty() {
        errors.push(FieldError::required(path, "name at least one resource, such as cpu or nvidia.com/gpu"));
    }
    for (name, amount) in quota {
        let read =
            if name == "cpu" { crate::quantity::millis(amount) } else { crate::quantity::whole(amount) };
        if let Err(error) = read {
            errors.push(FieldError::invalid(
                format!("{path}[{name}]"),
                format!("{:?}", amount.0),
                error.to_string(),
            ));
        }
    }
}
