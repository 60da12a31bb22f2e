//! The number of replicas that one metric requires; pure. (Upstream: `replica_calculator.go`.)

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::{
        api::core::v1::{Container, Pod},
        jiff::{SignedDuration, Timestamp},
    },
    quantity,
};

use super::Config;
use crate::pods::is_ready;

/// One pod's usage, in thousandths of the metric's unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MetricSample {
    pub(super) value: u64,
    pub(super) at: Timestamp,
    pub(super) window: SignedDuration,
}

/// Samples by the pod's name.
pub(super) type Samples = BTreeMap<String, MetricSample>;

/// The number of replicas that a metric requires, and its current value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Proposal {
    pub(super) replicas: i32,
    /// The utilization in percent of the requests, where the target is one.
    pub(super) utilization: Option<i32>,
    /// Average over the pods, in thousandths.
    pub(super) average: u64,
}

/// The reason for which a metric has no value, with upstream's message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoProposal {
    #[error("no pods returned by selector while calculating replica count")]
    NoPods,
    #[error("did not receive metrics for targeted pods (pods might be unready)")]
    NoMetrics,
    #[error("missing request for {resource} in container {container} of Pod {pod}")]
    MissingRequest { resource: String, container: String, pod: String },
    #[error("container {container} not present in metrics for pod {pod}")]
    MissingContainer { container: String, pod: String },
    #[error("{0}")]
    Fetch(String),
}

impl NoProposal {
    /// Adds to the error of a request the metric that it asked for.
    pub(super) fn about(self, metric: &str, verb: &str) -> Self {
        match self {
            Self::Fetch(error) => Self::Fetch(format!("unable to {verb} {metric}: {error}")),
            other => other,
        }
    }
}

/// The pods, grouped by whether their samples count.
struct Groups {
    ready: usize,
    unready: Vec<String>,
    missing: Vec<String>,
    /// The samples that count.
    samples: BTreeMap<String, u64>,
}

/// The state of a target's pods at one evaluation.
#[derive(Clone, Copy)]
pub(super) struct MetricUsage<'a> {
    pub(super) current: i32,
    pub(super) samples: &'a Samples,
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) config: &'a Config,
    pub(super) now: Timestamp,
}

/// The replicas for a target in percent of the pods' requests of `resource`.
pub(super) fn by_utilization(
    usage: MetricUsage<'_>,
    target_percent: i32,
    resource: &str,
    container: Option<&str>,
) -> Result<Proposal, NoProposal> {
    let groups = group(usage, resource == "cpu")?;
    let requests = requests(usage.pods, resource, container)?;
    let used: u64 = groups.samples.values().sum();
    let requested: u64 = groups.samples.keys().filter_map(|pod| requests.get(pod)).sum();
    let percent = |used: u64, requested: u64| {
        i32::try_from(used.saturating_mul(100) / requested.max(1)).unwrap_or(i32::MAX)
    };
    let utilization = percent(used, requested);
    let ratio = |samples: &BTreeMap<String, u64>| {
        let used: u64 = samples.values().sum();
        let requested: u64 = samples.keys().filter_map(|pod| requests.get(pod)).sum();
        f64::from(percent(used, requested)) / f64::from(target_percent.max(1))
    };
    // A pod without a sample counts as one that uses all it may when scaling down, and nothing when scaling up.
    let fallback = u64::try_from(target_percent.max(100)).unwrap_or(100);
    let assumed = |pod: &str| requests.get(pod).copied().unwrap_or(0).saturating_mul(fallback) / 100;
    let average = used / u64::try_from(groups.samples.len()).unwrap_or(1).max(1);
    let replicas = decide(usage.current, groups, ratio, assumed, usage.config.tolerance);
    Ok(Proposal { replicas, utilization: Some(utilization), average })
}

/// The replicas for a target average, in thousandths.
pub(super) fn by_average(usage: MetricUsage<'_>, target: u64, is_cpu: bool) -> Result<Proposal, NoProposal> {
    let groups = group(usage, is_cpu)?;
    let mean = |samples: &BTreeMap<String, u64>| {
        samples.values().sum::<u64>() / u64::try_from(samples.len()).unwrap_or(1).max(1)
    };
    let average = mean(&groups.samples);
    let ratio = |samples: &BTreeMap<String, u64>| float(mean(samples)) / float(target.max(1));
    let replicas = decide(usage.current, groups, ratio, |_| target, usage.config.tolerance);
    Ok(Proposal { replicas, utilization: None, average })
}

/// The replicas for a value of another object: as a whole (`Value`) or for each pod (`AverageValue`).
pub(super) fn by_object(
    current: i32,
    status_replicas: i32,
    value: u64,
    target: u64,
    per_pod: bool,
    pods: &[Arc<Pod>],
    tolerance: f64,
) -> Proposal {
    let target = float(target.max(1));
    let replicas = if per_pod {
        let ratio = float(value) / (target * f64::from(status_replicas.max(1)));
        if within(ratio, tolerance) { status_replicas } else { ceil(float(value) / target) }
    } else {
        let ratio = float(value) / target;
        let ready = pods.iter().filter(|pod| is_ready(pod)).count();
        match current {
            0 => ceil(ratio),
            _ if within(ratio, tolerance) => current,
            _ => ceil(ratio * float(u64::try_from(ready).unwrap_or(0))),
        }
    };
    let average = value / u64::try_from(status_replicas.max(1)).unwrap_or(1);
    Proposal { replicas, utilization: None, average: if per_pod { average } else { value } }
}

fn decide(
    current: i32,
    groups: Groups,
    ratio: impl Fn(&BTreeMap<String, u64>) -> f64,
    assumed: impl Fn(&str) -> u64,
    tolerance: f64,
) -> i32 {
    let Groups { ready, unready, missing, mut samples } = groups;
    let first = ratio(&samples);
    let up_with_unready = !unready.is_empty() && first > 1.0;
    if !up_with_unready && missing.is_empty() {
        if within(first, tolerance) {
            return current;
        }
        return ceil(first * float(u64::try_from(ready).unwrap_or(0)));
    }
    for pod in missing {
        let value = if first < 1.0 { assumed(&pod) } else { 0 };
        if first != 1.0 {
            samples.insert(pod, value);
        }
    }
    if up_with_unready {
        samples.extend(unready.into_iter().map(|pod| (pod, 0)));
    }
    let second = ratio(&samples);
    let turned = (first < 1.0 && second > 1.0) || (first > 1.0 && second < 1.0);
    if within(second, tolerance) || turned {
        return current;
    }
    let wanted = ceil(second * float(u64::try_from(samples.len()).unwrap_or(0)));
    let against = (second < 1.0 && wanted > current) || (second > 1.0 && wanted < current);
    if against { current } else { wanted }
}

fn within(ratio: f64, tolerance: f64) -> bool {
    (1.0 - ratio).abs() <= tolerance
}

#[expect(clippy::cast_precision_loss, reason = "a ratio needs no more than 52 bits")]
fn float(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_possible_truncation, reason = "clamped to the range")]
fn ceil(number: f64) -> i32 {
    number.ceil().clamp(0.0, f64::from(i32::MAX)) as i32
}

fn group(usage: MetricUsage<'_>, is_cpu: bool) -> Result<Groups, NoProposal> {
    let MetricUsage { samples, pods, config, now, .. } = usage;
    if pods.is_empty() {
        return Err(NoProposal::NoPods);
    }
    let mut groups = Groups { ready: 0, unready: Vec::new(), missing: Vec::new(), samples: BTreeMap::new() };
    for pod in pods {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if pod.metadata.deletion_timestamp.is_some() || phase == Some("Failed") {
            continue;
        }
        let name = pod.name_any();
        match samples.get(&name) {
            _ if phase == Some("Pending") => groups.unready.push(name),
            None => groups.missing.push(name),
            Some(sample) if is_cpu && is_initializing(pod, sample, config, now) => groups.unready.push(name),
            Some(sample) => {
                groups.ready += 1;
                groups.samples.insert(name, sample.value);
            }
        }
    }
    if groups.samples.is_empty() { Err(NoProposal::NoMetrics) } else { Ok(groups) }
}

/// Whether a pod's CPU usage still shows its start rather than its work.
fn is_initializing(pod: &Pod, sample: &MetricSample, config: &Config, now: Timestamp) -> bool {
    let Some(status) = &pod.status else { return true };
    let condition = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready");
    let (Some(condition), Some(start)) = (condition, &status.start_time) else { return true };
    let since = condition.last_transition_time.as_ref().map_or(start.0, |time| time.0);
    let later = |time: Timestamp, by: SignedDuration| time.checked_add(by).unwrap_or(Timestamp::MAX);
    let signed = |duration| SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX);
    let unready = condition.status == "False";
    if later(start.0, signed(config.cpu_initialization)) > now {
        return unready || sample.at < later(since, sample.window);
    }
    unready && later(start.0, signed(config.initial_readiness_delay)) > since
}

/// The requests of each pod for a resource, in thousandths.
fn requests(
    pods: &[Arc<Pod>],
    resource: &str,
    container: Option<&str>,
) -> Result<BTreeMap<String, u64>, NoProposal> {
    let mut requests = BTreeMap::new();
    for pod in pods {
        let containers = pod.spec.iter().flat_map(|spec| {
            let sidecars = spec.init_containers.iter().flatten();
            let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
            spec.containers.iter().chain(sidecars)
        });
        let containers = containers.filter(|known| container.is_none_or(|name| known.name == name));
        let mut sum = 0_u64;
        for container in containers {
            let request = request(container, resource).ok_or_else(|| NoProposal::MissingRequest {
                resource: resource.into(),
                container: container.name.clone(),
                pod: pod.name_any(),
            })?;
            sum = sum.saturating_add(request);
        }
        requests.insert(pod.name_any(), sum);
    }
    Ok(requests)
}

fn request(container: &Container, resource: &str) -> Option<u64> {
    let requests = container.resources.as_ref()?.requests.as_ref()?;
    quantity::millis(requests.get(resource)?).ok()
}
