//! Fetches the metrics of an autoscaler, and computes a proposal from each.

use std::sync::Arc;

use kube::{
    Client,
    api::ListParams,
    core::{GroupVersionKind, Request},
};
use mayfly_api::{
    k8s::{
        api::{
            autoscaling::v2::{
                ContainerResourceMetricStatus, ExternalMetricStatus, MetricSpec, MetricStatus, MetricTarget,
                MetricValueStatus, ObjectMetricStatus, PodsMetricStatus, ResourceMetricStatus,
            },
            core::v1::Pod,
        },
        apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector},
        jiff::{SignedDuration, Timestamp},
    },
    quantity,
};
use serde_json::Value;

use super::{
    Config,
    replicas::{
        MetricSample, MetricUsage, NoProposal, Proposal, Samples, by_average, by_object, by_utilization,
    },
};

use crate::metadata::api_message;

/// The window of a sample that names none. Upstream's value for the pods' custom metrics.
const WINDOW: SignedDuration = SignedDuration::from_secs(60);

/// The target and its pods, at one evaluation.
pub(super) struct ScaleTarget<'a> {
    pub(super) namespace: &'a str,
    pub(super) selector: &'a str,
    pub(super) current: i32,
    pub(super) status_replicas: i32,
    pub(super) pods: &'a [Arc<Pod>],
}

/// A metric that was evaluated.
pub(super) struct Evaluated {
    pub(super) proposal: Proposal,
    /// The metric's name in messages.
    pub(super) name: String,
    pub(super) status: MetricStatus,
}

/// A metric that could not be evaluated: the reason and message of an event, and of the condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unavailable {
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// The message with the metric that it is about, for the event about all metrics.
    pub(super) summary: String,
}

pub(super) async fn evaluate(
    client: &Client,
    metric: &MetricSpec,
    target: &ScaleTarget<'_>,
    config: &Config,
    now: Timestamp,
) -> Result<Evaluated, Unavailable> {
    let (reason, prefix, what, result) = match metric.type_.as_str() {
        "Resource" | "ContainerResource" => {
            let source = metric.resource.as_ref().map(|source| (&source.name, &source.target, None));
            let source = source.or(metric
                .container_resource
                .as_ref()
                .map(|source| (&source.name, &source.target, Some(source.container.as_str()))));
            let Some((name, wanted, container)) = source else { return Err(malformed(metric)) };
            let (reason, what) = match container {
                None => ("FailedGetResourceMetric", "resource"),
                Some(_) => ("FailedGetContainerResourceMetric", "container"),
            };
            let kind = if wanted.average_utilization.is_some() { "utilization" } else { "usage" };
            let result = resource(client, name, wanted, container, target, config, now).await;
            let prefix = format!("failed to get {name} {kind}: ");
            (reason, prefix, format!("{name} {what} metric"), result)
        }
        "Pods" => {
            let result = pods_metric(client, metric, target, config, now).await;
            ("FailedGetPodsMetric", String::new(), "pods metric".into(), result)
        }
        "Object" => {
            let result = object(client, metric, target, config).await;
            ("FailedGetObjectMetric", String::new(), "object metric".into(), result)
        }
        "External" => {
            let source = metric.external.as_ref();
            let what = format!("{} external metric", source.map_or("", |source| &source.metric.name));
            let result = external(client, metric, target, config).await;
            ("FailedGetExternalMetric", format!("failed to get {what}: "), what, result)
        }
        _ => return Err(malformed(metric)),
    };
    result.map_err(|error| {
        let message = format!("{prefix}{error}");
        Unavailable { reason, summary: format!("failed to get {what} value: {message}"), message }
    })
}

fn malformed(metric: &MetricSpec) -> Unavailable {
    let message = format!("unknown metric source type {:?}", metric.type_);
    Unavailable { reason: "InvalidMetricSourceType", summary: message.clone(), message }
}

async fn resource(
    client: &Client,
    name: &str,
    wanted: &MetricTarget,
    container: Option<&str>,
    target: &ScaleTarget<'_>,
    config: &Config,
    now: Timestamp,
) -> Result<Evaluated, NoProposal> {
    let path = format!("/apis/metrics.k8s.io/v1beta1/namespaces/{}/pods", target.namespace);
    let list = get(client, RESOURCE_API, &path, target.selector).await;
    let list = list.map_err(|error| error.about(&format!("resource {name}"), "get metrics for"))?;
    let samples = resource_samples(&list, name, container, now)?;
    let usage = MetricUsage { current: target.current, samples: &samples, pods: target.pods, config, now };
    let (proposal, word) = match wanted.average_utilization {
        Some(percent) => {
            (by_utilization(usage, percent, name, container)?, "utilization (percentage of request)")
        }
        None => {
            let average = millis(wanted.average_value.as_ref())?;
            (by_average(usage, average, name == "cpu")?, "resource")
        }
    };
    let current = MetricValueStatus {
        average_utilization: proposal.utilization,
        average_value: Some(written(proposal.average)),
        value: None,
    };
    let mut status = MetricStatus { type_: "Resource".into(), ..MetricStatus::default() };
    let described = match container {
        None => {
            status.resource = Some(ResourceMetricStatus { current, name: name.into() });
            format!("{name} resource {word}")
        }
        Some(container) => {
            status.type_ = "ContainerResource".into();
            let container = container.to_owned();
            let described = format!("{name} container {container} {word}");
            status.container_resource =
                Some(ContainerResourceMetricStatus { container, current, name: name.into() });
            described
        }
    };
    Ok(Evaluated { proposal, name: described, status })
}

/// The pods' usage of a resource: of one container, or of all of them together.
fn resource_samples(
    list: &Value,
    resource: &str,
    container: Option<&str>,
    now: Timestamp,
) -> Result<Samples, NoProposal> {
    let mut samples = Samples::new();
    for item in list["items"].as_array().into_iter().flatten() {
        let pod = item["metadata"]["name"].as_str().unwrap_or_default();
        let containers = item["containers"].as_array().into_iter().flatten();
        let mut containers =
            containers.filter(|known| container.is_none_or(|name| known["name"] == name)).peekable();
        if let (Some(container), None) = (container, containers.peek()) {
            return Err(NoProposal::MissingContainer { container: container.into(), pod: pod.into() });
        }
        // A pod of which one container has no value counts as missing.
        let values = containers.map(|known| parse(&known["usage"][resource]));
        let Some(value) = values.sum::<Option<u64>>() else { continue };
        let at = item["timestamp"].as_str().and_then(|text| text.parse().ok()).unwrap_or(now);
        let window = item["window"].as_str().and_then(|text| text.parse().ok()).unwrap_or(WINDOW);
        samples.insert(pod.to_owned(), MetricSample { value, at, window });
    }
    Ok(samples)
}

async fn pods_metric(
    client: &Client,
    metric: &MetricSpec,
    target: &ScaleTarget<'_>,
    config: &Config,
    now: Timestamp,
) -> Result<Evaluated, NoProposal> {
    let source = metric.pods.clone().unwrap_or_default();
    let name = source.metric.name.clone();
    let path = format!("/apis/custom.metrics.k8s.io/v1beta2/namespaces/{}/pods/*/{name}", target.namespace);
    let list = get(client, CUSTOM_API, &path, target.selector).await;
    let list = list.map_err(|error| error.about(&format!("metric {name}"), "get"))?;
    let mut samples = Samples::new();
    for item in list["items"].as_array().into_iter().flatten() {
        if let (Some(pod), Some(value)) = (item["describedObject"]["name"].as_str(), parse(&item["value"])) {
            samples.insert(pod.to_owned(), MetricSample { value, at: now, window: WINDOW });
        }
    }
    let wanted = millis(source.target.average_value.as_ref())?;
    let usage = MetricUsage { current: target.current, samples: &samples, pods: target.pods, config, now };
    let proposal = by_average(usage, wanted, false)?;
    let current =
        MetricValueStatus { average_value: Some(written(proposal.average)), ..MetricValueStatus::default() };
    let status = PodsMetricStatus { current, metric: source.metric };
    let status = MetricStatus { type_: "Pods".into(), pods: Some(status), ..MetricStatus::default() };
    Ok(Evaluated { proposal, name: format!("pods metric {name}"), status })
}

async fn object(
    client: &Client,
    metric: &MetricSpec,
    target: &ScaleTarget<'_>,
    config: &Config,
) -> Result<Evaluated, NoProposal> {
    let Some(source) = metric.object.clone() else { return Err(NoProposal::Fetch("no source".into())) };
    let (name, object) = (&source.metric.name, &source.described_object);
    let plural = kube::core::ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", &object.kind)).plural;
    let path = format!(
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/{}/{plural}/{}/{name}",
        target.namespace, object.name
    );
    let list = get(client, CUSTOM_API, &path, &selector_text(source.metric.selector.as_ref())).await;
    let list = list.map_err(|error| error.about(&format!("metric {name}"), "get"))?;
    let value = parse(&list["items"][0]["value"]).ok_or_else(|| NoProposal::Fetch("no value".into()))?;
    let (proposal, current) = whole_or_average(value, &source.target, target, config)?;
    let described = format!("{} metric {name}", object.kind);
    let status =
        ObjectMetricStatus { current, described_object: source.described_object, metric: source.metric };
    let status = MetricStatus { type_: "Object".into(), object: Some(status), ..MetricStatus::default() };
    Ok(Evaluated { proposal, name: described, status })
}

async fn external(
    client: &Client,
    metric: &MetricSpec,
    target: &ScaleTarget<'_>,
    config: &Config,
) -> Result<Evaluated, NoProposal> {
    let Some(source) = metric.external.clone() else { return Err(NoProposal::Fetch("no source".into())) };
    let name = &source.metric.name;
    let path = format!("/apis/external.metrics.k8s.io/v1beta1/namespaces/{}/{name}", target.namespace);
    let list = get(client, EXTERNAL_API, &path, &selector_text(source.metric.selector.as_ref())).await;
    let list = list.map_err(|error| error.about(&format!("external metric {name}"), "get"))?;
    let items = list["items"].as_array().filter(|items| !items.is_empty());
    let values = items.map(|items| items.iter().map(|item| parse(&item["value"])).sum::<Option<u64>>());
    let value = values.flatten().ok_or_else(|| NoProposal::Fetch("no values".into()))?;
    let (proposal, current) = whole_or_average(value, &source.target, target, config)?;
    let described = format!("external metric {name}");
    let status = ExternalMetricStatus { current, metric: source.metric };
    let status = MetricStatus { type_: "External".into(), external: Some(status), ..MetricStatus::default() };
    Ok(Evaluated { proposal, name: described, status })
}

fn whole_or_average(
    value: u64,
    wanted: &MetricTarget,
    target: &ScaleTarget<'_>,
    config: &Config,
) -> Result<(Proposal, MetricValueStatus), NoProposal> {
    let per_pod = wanted.type_ == "AverageValue";
    let limit = millis(if per_pod { wanted.average_value.as_ref() } else { wanted.value.as_ref() })?;
    let (current, replicas) = (target.current, target.status_replicas);
    let proposal = by_object(current, replicas, value, limit, per_pod, target.pods, config.tolerance);
    let shown = Some(written(proposal.average));
    let status = match per_pod {
        true => MetricValueStatus { average_value: shown, ..MetricValueStatus::default() },
        false => MetricValueStatus { value: shown, ..MetricValueStatus::default() },
    };
    Ok((proposal, status))
}

const RESOURCE_API: &str = "resource metrics API";
const CUSTOM_API: &str = "custom metrics API";
const EXTERNAL_API: &str = "external metrics API";

/// Lists metrics. `api`: the name of the API in messages.
async fn get(client: &Client, api: &str, path: &str, selector: &str) -> Result<Value, NoProposal> {
    let fail = |error: String| NoProposal::Fetch(format!("unable to fetch metrics from {api}: {error}"));
    let mut params = ListParams::default();
    if !selector.is_empty() {
        params = params.labels(selector);
    }
    let request = Request::new(path).list(&params).map_err(|error| fail(error.to_string()))?;
    // The metrics APIs are not typed resources: the path is complete.
    let list = client.request::<Value>(request).await.map_err(|error| fail(api_message(&error)))?;
    match list["items"].as_array().is_some_and(|items| !items.is_empty()) {
        true => Ok(list),
        false => Err(NoProposal::Fetch(format!("no metrics returned from {api}"))),
    }
}

fn selector_text(selector: Option<&LabelSelector>) -> String {
    let labels = selector.and_then(|selector| selector.match_labels.as_ref()).into_iter().flatten();
    labels.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
}

fn parse(value: &Value) -> Option<u64> {
    quantity::millis(&Quantity(value.as_str()?.to_owned())).ok()
}

fn millis(quantity: Option<&Quantity>) -> Result<u64, NoProposal> {
    let quantity =
        quantity.ok_or_else(|| NoProposal::Fetch("invalid metric source: the target has no value".into()))?;
    quantity::millis(quantity).map_err(|error| NoProposal::Fetch(error.to_string()))
}

fn written(millis: u64) -> Quantity {
    Quantity(if millis.is_multiple_of(1000) { (millis / 1000).to_string() } else { format!("{millis}m") })
}
