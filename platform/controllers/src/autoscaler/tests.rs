//! Proposals, missing and unready pods, policies and windows, as data.

use std::sync::Arc;

use mayfly_api::k8s::{
    api::{
        autoscaling::v2::{HorizontalPodAutoscaler, HorizontalPodAutoscalerBehavior, MetricStatus},
        core::v1::Pod,
    },
    jiff::{SignedDuration, Timestamp},
};
use serde_json::{Value, json};

use super::{
    Config,
    behavior::{ScalingHistory, limit},
    metrics::{Evaluated, Unavailable},
    plan::plan,
    replicas::{
        MetricSample, MetricUsage, NoProposal, Proposal, Samples, by_average, by_object, by_utilization,
    },
};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn after(seconds: i64) -> Timestamp {
    now().checked_add(SignedDuration::from_secs(seconds)).unwrap()
}

/// A pod that has been running for an hour and requests one CPU.
fn pod(name: &str, ready: bool, phase: &str) -> Arc<Pod> {
    let (ready, since) =
        if ready { ("True", "2026-01-01T11:00:10Z") } else { ("False", "2026-01-01T11:00:05Z") };
    let object = json!({"metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
        "status": {"phase": phase, "startTime": "2026-01-01T11:00:00Z",
            "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}]}});
    Arc::new(serde_json::from_value(object).unwrap())
}

fn samples(values: &[(&str, u64)]) -> Samples {
    let sample = |value| MetricSample { value, at: now(), window: SignedDuration::from_secs(60) };
    values.iter().map(|(pod, value)| ((*pod).to_owned(), sample(*value))).collect()
}

fn ready(names: &[&str]) -> Vec<Arc<Pod>> {
    names.iter().map(|name| pod(name, true, "Running")).collect()
}

fn utilization(
    current: i32,
    percent: i32,
    values: &[(&str, u64)],
    pods: &[Arc<Pod>],
) -> Result<i32, NoProposal> {
    let (config, samples) = (Config::default(), samples(values));
    let usage = MetricUsage { current, samples: &samples, pods, config: &config, now: now() };
    by_utilization(usage, percent, "cpu", None).map(|proposal| proposal.replicas)
}

#[test]
fn utilization_scales_in_proportion_and_tolerates_a_tenth() {
    let three = ready(&["a", "b", "c"]);
    assert_eq!(utilization(3, 30, &[("a", 300), ("b", 500), ("c", 700)], &three), Ok(5));
    assert_eq!(utilization(3, 50, &[("a", 100), ("b", 100), ("c", 100)], &three), Ok(1));
    assert_eq!(utilization(3, 50, &[("a", 540), ("b", 540), ("c", 540)], &three), Ok(3), "8 % above");
}

#[test]
fn missing_and_unready_pods_damp_the_change() {
    let four = ready(&["a", "b", "c", "d"]);
    // d has no sample: it counts as idle when scaling up …
    assert_eq!(utilization(4, 50, &[("a", 900), ("b", 900), ("c", 900)], &four), Ok(6));
    // … and as fully used when scaling down.
    assert_eq!(utilization(4, 50, &[("a", 100), ("b", 100), ("c", 100)], &four), Ok(3));
    let mut starting = ready(&["a", "b"]);
    starting.push(pod("c", false, "Pending"));
    assert_eq!(utilization(3, 50, &[("a", 900), ("b", 900)], &starting), Ok(4));
    assert_eq!(utilization(3, 50, &[("a", 700), ("b", 700)], &starting), Ok(3), "with the third it fits");
    assert_eq!(utilization(1, 50, &[], &[]), Err(NoProposal::NoPods));
    assert_eq!(utilization(1, 50, &[], &ready(&["a"])), Err(NoProposal::NoMetrics));
}

#[test]
fn a_pod_that_just_started_does_not_count_as_busy() {
    let mut young = (*pod("b", true, "Running")).clone();
    let status = young.status.as_mut().unwrap();
    let time = |seconds| Some(mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(after(seconds)));
    status.start_time = time(-60);
    status.conditions.as_mut().unwrap()[0].last_transition_time = time(-30);
    let pods = [pod("a", true, "Running"), Arc::new(young)];
    // The sample of b covers its start: only a counts, and b as idle.
    assert_eq!(utilization(2, 50, &[("a", 600), ("b", 1000)], &pods), Ok(2));
    assert_eq!(utilization(2, 50, &[("a", 600), ("b", 1000)], &ready(&["a", "b"])), Ok(4));
}

#[test]
fn averages_and_objects() {
    let (config, pods, samples) =
        (Config::default(), ready(&["a", "b"]), samples(&[("a", 20_000), ("b", 10_000)]));
    let usage = MetricUsage { current: 2, samples: &samples, pods: &pods, config: &config, now: now() };
    assert_eq!(
        by_average(usage, 5000, false).unwrap(),
        Proposal { replicas: 6, utilization: None, average: 15_000 }
    );
    assert_eq!(by_object(2, 2, 30_000, 10_000, false, &pods, 0.1).replicas, 6);
    assert_eq!(by_object(2, 2, 30_000, 10_000, true, &pods, 0.1).replicas, 3);
    assert_eq!(by_object(2, 2, 10_500, 10_000, false, &pods, 0.1).replicas, 2);
}

fn limited(behavior: Value, history: &mut ScalingHistory, change: (i32, i32), at: i64) -> i32 {
    let behavior: HorizontalPodAutoscalerBehavior = serde_json::from_value(behavior).unwrap();
    limit(Some(&behavior), history, change, (1, 100), after(at)).replicas
}

#[test]
fn policies_limit_the_rate() {
    let pods = json!({"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 60}]}});
    let mut history = ScalingHistory::default();
    assert_eq!(limited(pods.clone(), &mut history, (10, 50), 0), 13);
    history.scaled(10, 13, after(0));
    assert_eq!(limited(pods.clone(), &mut history, (13, 50), 15), 13, "the period's three are used up");
    assert_eq!(limited(pods, &mut history, (13, 50), 61), 16);
    let both = |select: &str| {
        json!({"scaleDown": {"stabilizationWindowSeconds": 0, "selectPolicy": select, "policies": [
        {"type": "Pods", "value": 2, "periodSeconds": 60}, {"type": "Percent", "value": 50, "periodSeconds": 60}]}})
    };
    assert_eq!(limited(both("Max"), &mut ScalingHistory::default(), (20, 1), 0), 10);
    assert_eq!(limited(both("Min"), &mut ScalingHistory::default(), (20, 1), 0), 18);
    assert_eq!(limited(both("Disabled"), &mut ScalingHistory::default(), (20, 1), 0), 20);
    assert_eq!(
        limited(json!({}), &mut ScalingHistory::default(), (1, 50), 0),
        5,
        "four pods or twice as many"
    );
    assert_eq!(limited(json!({}), &mut ScalingHistory::default(), (20, 90), 0), 40);
    // Without `behavior` there are no policies, and the limit is fixed.
    for (current, expected) in [(1, 4), (3, 6), (20, 40)] {
        let mut history = ScalingHistory::default();
        let found = limit(None, &mut history, (current, 90), (1, 100), now());
        assert_eq!(found.replicas, expected);
        assert_eq!(found.limited.map(|(reason, _)| reason), Some("ScaleUpLimit"));
    }
}

#[test]
fn the_highest_recent_recommendation_holds_a_scale_down() {
    let mut history = ScalingHistory::default();
    assert_eq!(limited(json!({}), &mut history, (10, 9), 0), 9);
    assert_eq!(limited(json!({}), &mut history, (9, 2), 60), 9);
    assert_eq!(limited(json!({}), &mut history, (9, 3), 301), 3, "the first recommendation is too old");
    let slow = json!({"scaleUp": {"stabilizationWindowSeconds": 60}});
    let mut history = ScalingHistory::default();
    assert_eq!(limited(slow.clone(), &mut history, (2, 2), 0), 2);
    assert_eq!(limited(slow.clone(), &mut history, (2, 4), 30), 2);
    assert_eq!(limited(slow, &mut history, (2, 4), 61), 4);
}

fn evaluated(replicas: i32) -> Result<Evaluated, Unavailable> {
    let proposal = Proposal { replicas, utilization: None, average: 0 };
    Ok(Evaluated { proposal, name: "cpu".into(), status: MetricStatus::default() })
}

fn unavailable() -> Result<Evaluated, Unavailable> {
    let (message, summary) = ("no metrics".into(), "failed to get cpu: no metrics".into());
    Err(Unavailable { reason: "FailedGetResourceMetric", message, summary })
}

#[test]
fn the_largest_metric_wins_and_a_missing_one_stops_scaling_down() {
    let object = json!({"metadata": {"name": "web"}, "spec": {"minReplicas": 2, "maxReplicas": 10,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}, "scaleTargetRef": {"kind": "Deployment", "name": "web"}}});
    let web: HorizontalPodAutoscaler = serde_json::from_value(object).unwrap();
    let replicas = |current: i32, metrics| {
        plan(&web, (current, current), metrics, &mut ScalingHistory::default(), now()).replicas
    };
    assert_eq!(replicas(4, vec![evaluated(3), evaluated(6)]), 6);
    assert_eq!(replicas(4, vec![evaluated(3), unavailable()]), 4);
    assert_eq!(replicas(4, vec![evaluated(6), unavailable()]), 6);
    assert_eq!(replicas(4, vec![evaluated(1)]), 2, "not below minReplicas");
    assert_eq!(replicas(12, vec![unavailable()]), 10, "the bounds hold without metrics");
    assert_eq!(replicas(0, vec![evaluated(5)]), 0, "zero switches it off");
    let failed = plan(&web, (4, 4), vec![unavailable(), evaluated(3)], &mut ScalingHistory::default(), now());
    assert_eq!((failed.failures.len(), failed.metrics), (1, 2));
    assert_eq!(failed.failures[0].message, "no metrics", "the event's message is that of the metric");
    let conditions = failed.status.conditions.unwrap();
    let active = conditions.iter().find(|condition| condition.type_ == "ScalingActive").unwrap();
    let expected = "the HPA was unable to compute the replica count: no metrics";
    assert_eq!(active.message.as_deref(), Some(expected));
}
