//! Computes the number of replicas and the status from the proposals of all metrics; pure.

use mayfly_api::k8s::{
    api::autoscaling::v2::{
        HorizontalPodAutoscaler, HorizontalPodAutoscalerCondition, HorizontalPodAutoscalerStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};

use super::{
    behavior::{ScalingHistory, limit},
    metrics::{Evaluated, Unavailable},
};

pub(super) const ABLE_TO_SCALE: &str = "AbleToScale";
pub(super) const SCALING_ACTIVE: &str = "ScalingActive";
pub(super) const SCALING_LIMITED: &str = "ScalingLimited";
pub(super) const GOT_SCALE: &str = "the HPA controller was able to get the target's current scale";

#[derive(Debug)]
pub(super) struct AutoscalerPlan {
    pub(super) replicas: i32,
    /// The reason why the number changes.
    pub(super) reason: String,
    pub(super) status: HorizontalPodAutoscalerStatus,
    /// The metrics that could not be evaluated, if that prevents a decision.
    pub(super) failures: Vec<Unavailable>,
    /// The number of metrics.
    pub(super) metrics: usize,
}

/// Sets a condition; the transition time is kept while the status is unchanged.
pub(super) fn set(
    status: &mut HorizontalPodAutoscalerStatus,
    type_: &str,
    value: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) {
    let conditions = status.conditions.get_or_insert_default();
    let known = conditions.iter().position(|condition| condition.type_ == type_);
    let same = known.filter(|at| conditions[*at].status == value);
    let since = same.and_then(|at| conditions[at].last_transition_time.clone()).unwrap_or(Time(now));
    let condition = HorizontalPodAutoscalerCondition {
        type_: type_.into(),
        status: value.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_transition_time: Some(since),
    };
    match known {
        Some(at) => conditions[at] = condition,
        None => conditions.push(condition),
    }
}

/// The initial status of an evaluation.
pub(super) fn status(autoscaler: &HorizontalPodAutoscaler) -> HorizontalPodAutoscalerStatus {
    let known = autoscaler.status.clone().unwrap_or_default();
    HorizontalPodAutoscalerStatus { observed_generation: autoscaler.metadata.generation, ..known }
}

/// `current`: the target's `spec.replicas`; `shown`: its `status.replicas`.
pub(super) fn plan(
    autoscaler: &HorizontalPodAutoscaler,
    (current, shown): (i32, i32),
    evaluated: Vec<Result<Evaluated, Unavailable>>,
    history: &mut ScalingHistory,
    now: Timestamp,
) -> AutoscalerPlan {
    let spec = autoscaler.spec.clone().unwrap_or_default();
    let (min, max) = (spec.min_replicas.unwrap_or(1), spec.max_replicas);
    let mut plan = AutoscalerPlan {
        replicas: current,
        reason: String::new(),
        status: status(autoscaler),
        failures: Vec::new(),
        metrics: evaluated.len(),
    };
    plan.status.current_replicas = Some(shown);
    plan.status.desired_replicas = current;
    history.begin(current, now);
    set(&mut plan.status, ABLE_TO_SCALE, "True", "SucceededGetScale", GOT_SCALE, now);
    if current == 0 && min != 0 {
        let message = "scaling is disabled since the replica count of the target is zero";
        set(&mut plan.status, SCALING_ACTIVE, "False", "ScalingDisabled", message, now);
        plan.status.desired_replicas = 0;
        return plan;
    }
    if current > max || current < min {
        let (bound, word) =
            if current > max { (max, "above Spec.MaxReplicas") } else { (min, "below Spec.MinReplicas") };
        plan.replicas = bound;
        plan.reason = format!("Current number of replicas {word}");
        plan.status.desired_replicas = bound;
        return plan;
    }
    let Some((proposed, name)) = proposal(current, evaluated, &mut plan, now) else { return plan };
    let limited = limit(spec.behavior.as_ref(), history, (current, proposed), (min, max), now);
    let (reason, message) = limited.stabilized;
    set(&mut plan.status, ABLE_TO_SCALE, "True", reason, message, now);
    match limited.limited {
        Some((reason, message)) => set(&mut plan.status, SCALING_LIMITED, "True", reason, message, now),
        None => {
            let message = "the desired count is within the acceptable range";
            set(&mut plan.status, SCALING_LIMITED, "False", "DesiredWithinRange", message, now);
        }
    }
    plan.replicas = limited.replicas;
    plan.reason = if limited.replicas > current {
        format!("{name} above target")
    } else {
        "All metrics below target".into()
    };
    plan.status.desired_replicas = limited.replicas;
    plan
}

/// The largest proposal and its metric. With a metric missing, nothing is scaled down.
fn proposal(
    current: i32,
    evaluated: Vec<Result<Evaluated, Unavailable>>,
    plan: &mut AutoscalerPlan,
    now: Timestamp,
) -> Option<(i32, String)> {
    let (mut best, mut metrics, mut failures): (Option<(i32, String)>, Vec<_>, Vec<Unavailable>) =
        (None, Vec::new(), Vec::new());
    for result in evaluated {
        match result {
            Err(unavailable) => failures.push(unavailable),
            Ok(Evaluated { proposal, name, status }) => {
                metrics.push(status);
                if best.as_ref().is_none_or(|(replicas, _)| proposal.replicas > *replicas) {
                    best = Some((proposal.replicas, name));
                }
            }
        }
    }
    plan.status.current_metrics = Some(metrics).filter(|metrics| !metrics.is_empty());
    let holds = best.as_ref().is_some_and(|(replicas, _)| failures.is_empty() || *replicas >= current);
    if let (false, Some(failure)) = (holds, failures.first()) {
        let message = format!("the HPA was unable to compute the replica count: {}", failure.message);
        set(&mut plan.status, SCALING_ACTIVE, "False", failure.reason, &message, now);
        plan.failures = failures;
        return None;
    }
    let (replicas, name) = best?;
    let message = format!("the HPA was able to successfully calculate a replica count from {name}");
    set(&mut plan.status, SCALING_ACTIVE, "True", "ValidMetricFound", &message, now);
    Some((replicas, name))
}
