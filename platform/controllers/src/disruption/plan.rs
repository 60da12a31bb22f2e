//! The numbers of a budget: the object, its pods and the time in; pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::{
        core::v1::Pod,
        policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus},
    },
    apimachinery::pkg::util::intstr::IntOrString,
    jiff::{SignedDuration, Timestamp},
};

use crate::{
    metadata::condition,
    pods::{is_finished, is_ready},
    scaled_value::resolve,
};

/// The time for which a granted eviction counts against the budget while its pod is not marked for deletion.
/// Upstream's value.
const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_secs(120);
const DISRUPTION_ALLOWED: &str = "DisruptionAllowed";

/// The object whose `scale` gives the expected number of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Scaled {
    By {
        uid: String,
        replicas: i32,
    },
    /// The controller's resource (`jobs.batch`) has no scale.
    Unscalable(String),
    /// The pod's controller does not exist.
    Nothing,
    /// The pod has no controller. As upstream, it does not count towards the expected pods.
    Unmanaged,
}

#[derive(Debug)]
pub(super) struct DisruptionPlan {
    pub(super) status: PodDisruptionBudgetStatus,
    pub(super) again: Option<Duration>,
    /// Whether it is a warning, its reason and message.
    pub(super) events: Vec<(bool, &'static str, String)>,
}

/// The pods that a budget expects.
struct ExpectedPods {
    expected: i32,
    /// How many of them have to be healthy.
    desired: i32,
    /// Whether the budget selects pods that do not count, because they have no controller.
    has_unmanaged: bool,
}

pub(super) fn plan(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    scaled: impl Fn(&Pod) -> Scaled,
    now: Timestamp,
) -> DisruptionPlan {
    let old = budget.status.clone().unwrap_or_default();
    let (disrupted, again) = disrupted(&old, pods, now);
    let conditions = old.conditions.clone().unwrap_or_default();
    let generation = budget.metadata.generation;
    let is_healthy = |pod: &&Arc<Pod>| {
        is_ready(pod) && pod.metadata.deletion_timestamp.is_none() && !disrupted.contains_key(&pod.name_any())
    };
    let healthy = i32::try_from(pods.iter().filter(is_healthy).count()).unwrap_or(i32::MAX);
    let mut status = PodDisruptionBudgetStatus {
        observed_generation: generation,
        current_healthy: healthy,
        disrupted_pods: Some(disrupted).filter(|pods| !pods.is_empty()),
        ..old
    };
    let mut events = Vec::new();
    if pods.is_empty() {
        events.push((false, "NoPods", "No matching pods found".into()));
    }
    let (allowed, reason, message) = match expected(budget, pods, scaled) {
        Err(message) => {
            let event = format!("Failed to calculate the number of expected pods: {message}");
            events.push((true, "CalculateExpectedPodCountFailed", event));
            status.disruptions_allowed = 0;
            (false, "SyncFailed", message)
        }
        Ok(ExpectedPods { expected, desired, has_unmanaged }) => {
            if has_unmanaged {
                events.push((true, "UnmanagedPods", unmanaged_message(budget)));
            }
            status.expected_pods = expected;
            status.desired_healthy = desired;
            status.disruptions_allowed =
                if expected > 0 { healthy.saturating_sub(desired).max(0) } else { 0 };
            let allowed = status.disruptions_allowed > 0;
            (allowed, if allowed { "SufficientPods" } else { "InsufficientPods" }, String::new())
        }
    };
    let condition = condition(&conditions, DISRUPTION_ALLOWED, allowed, reason, message, generation, now);
    let others = conditions.into_iter().filter(|known| known.type_ != DISRUPTION_ALLOWED);
    status.conditions = Some(others.chain([condition]).collect());
    DisruptionPlan { status, again, events }
}

fn unmanaged_message(budget: &PodDisruptionBudget) -> String {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
    let labels = selector.match_labels.unwrap_or_default().into_iter();
    let labels: String = labels.map(|(name, value)| format!("{name}: {value},")).collect();
    let expressions = selector.match_expressions.unwrap_or_default().into_iter().map(|one| {
        let values = one.values.unwrap_or_default().join(" ");
        format!("LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},", one.key, one.operator)
    });
    let expressions: String = expressions.collect();
    // The selector as Go prints it.
    let selector = format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    );
    format!(
        "Pods selected by this PodDisruptionBudget (selector: {selector}) were found to be unmanaged. As a result, \
         the status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account \
         for these pods please set \".spec.minAvailable\" field of the PDB to an integer value."
    )
}

/// The granted evictions whose pods still exist, and when the next one expires.
fn disrupted(
    old: &PodDisruptionBudgetStatus,
    pods: &[Arc<Pod>],
    now: Timestamp,
) -> (BTreeMap<String, mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time>, Option<Duration>) {
    let mut kept = BTreeMap::new();
    let mut again = None;
    for (name, since) in old.disrupted_pods.iter().flatten() {
        let live =
            pods.iter().any(|pod| pod.name_any() == *name && pod.metadata.deletion_timestamp.is_none());
        let left = DELETION_TIMEOUT - now.duration_since(since.0);
        let Some(left) = Duration::try_from(left).ok().filter(|left| live && !left.is_zero()) else {
            continue;
        };
        kept.insert(name.clone(), since.clone());
        again = again.into_iter().chain([left]).min();
    }
    (kept, again)
}

fn expected(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    scaled: impl Fn(&Pod) -> Scaled,
) -> Result<ExpectedPods, String> {
    let spec = budget.spec.clone().unwrap_or_default();
    if let Some(IntOrString::Int(number)) = spec.min_available {
        let count = pods.iter().filter(|pod| !is_finished(pod)).count();
        let expected = i32::try_from(count).unwrap_or(i32::MAX);
        return Ok(ExpectedPods { expected, desired: number, has_unmanaged: false });
    }
    let (mut scales, mut has_unmanaged) = (BTreeMap::new(), false);
    for pod in pods {
        match scaled(pod) {
            Scaled::By { uid, replicas } => drop(scales.insert(uid, replicas)),
            Scaled::Unscalable(resource) => {
                return Err(format!("{resource} does not implement the scale subresource"));
            }
            Scaled::Unmanaged => has_unmanaged = true,
            Scaled::Nothing => return Err(format!("found no controllers for pod {:?}", pod.name_any())),
        }
    }
    let expected = scales.values().copied().fold(0, i32::saturating_add);
    let desired = match (&spec.min_available, &spec.max_unavailable) {
        (Some(min), _) => resolve(Some(min), expected, true),
        (None, Some(max)) => expected.saturating_sub(resolve(Some(max), expected, true)).max(0),
        (None, None) => 0,
    };
    Ok(ExpectedPods { expected, desired, has_unmanaged })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
        serde_json::from_value(json!({"metadata": {"name": "b"}, "spec": spec, "status": status})).unwrap()
    }

    fn pods(ready: usize, unready: usize) -> Vec<Arc<Pod>> {
        let pod = |number: usize| {
            let ready = if number < ready { "True" } else { "False" };
            let object = json!({"metadata": {"name": format!("p{number}")},
                "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}});
            Arc::new(serde_json::from_value(object).unwrap())
        };
        (0..ready + unready).map(pod).collect()
    }

    fn numbers(spec: Value, pods: &[Arc<Pod>]) -> (i32, i32, i32) {
        let scaled = |_: &Pod| Scaled::By { uid: "web".into(), replicas: 10 };
        let status = plan(&budget(spec, Value::Null), pods, scaled, at("2026-01-01T12:00:00Z")).status;
        (status.expected_pods, status.desired_healthy, status.disruptions_allowed)
    }

    #[test]
    fn numbers_and_percentages() {
        assert_eq!(numbers(json!({"minAvailable": 7}), &pods(9, 1)), (10, 7, 2));
        assert_eq!(numbers(json!({"minAvailable": "75%"}), &pods(9, 1)), (10, 8, 1));
        assert_eq!(numbers(json!({"maxUnavailable": 3}), &pods(9, 1)), (10, 7, 2));
        assert_eq!(numbers(json!({"maxUnavailable": "15%"}), &pods(9, 0)), (10, 8, 1));
        assert_eq!(numbers(json!({"minAvailable": 7}), &pods(3, 1)), (4, 7, 0));
    }

    #[test]
    fn pods_without_a_scale_allow_nothing() {
        let budget = budget(json!({"maxUnavailable": 1}), Value::Null);
        let status = plan(&budget, &pods(3, 0), |_| Scaled::Nothing, at("2026-01-01T12:00:00Z")).status;
        assert_eq!(
            (status.disruptions_allowed, status.conditions.unwrap()[0].reason.as_str()),
            (0, "SyncFailed")
        );
    }

    #[test]
    fn a_budget_without_pods_or_without_a_count_says_so() {
        let (now, budget) = (at("2026-01-01T12:00:00Z"), budget(json!({"maxUnavailable": 1}), Value::Null));
        let none = plan(&budget, &[], |_| Scaled::Nothing, now).events;
        assert_eq!(none, [(false, "NoPods", "No matching pods found".to_owned())]);
        let failed = plan(&budget, &pods(1, 0), |_| Scaled::Unscalable("jobs.batch".into()), now).events;
        let message = "Failed to calculate the number of expected pods: jobs.batch does not implement the scale subresource";
        assert_eq!(failed, [(true, "CalculateExpectedPodCountFailed", message.to_owned())]);
    }

    #[test]
    fn pods_without_a_controller_do_not_count() {
        let budget = budget(json!({"maxUnavailable": 1}), Value::Null);
        let now = at("2026-01-01T12:00:00Z");
        let numbers = |scaled: &dyn Fn(&Pod) -> Scaled| {
            let status = plan(&budget, &pods(3, 0), scaled, now).status;
            (status.expected_pods, status.disruptions_allowed, status.conditions.unwrap()[0].reason.clone())
        };
        let mixed = |pod: &Pod| match pod.name_any().as_str() {
            "p0" => Scaled::Unmanaged,
            _ => Scaled::By { uid: "web".into(), replicas: 2 },
        };
        assert_eq!(numbers(&mixed), (2, 2, "SufficientPods".to_owned()));
        let selector = json!({"matchLabels": {"app": "web"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["a", "b"]}]});
        let mut selected = budget.clone();
        selected.spec.as_mut().unwrap().selector = serde_json::from_value(selector).unwrap();
        let (is_warning, reason, message) = &plan(&selected, &pods(3, 0), mixed, now).events[0];
        assert_eq!((*is_warning, *reason), (true, "UnmanagedPods"));
        let selector = "(selector: &LabelSelector{MatchLabels:map[string]string{app: web,},\
            MatchExpressions:[]LabelSelectorRequirement{LabelSelectorRequirement{Key:tier,Operator:In,Values:[a b],},},})";
        assert!(message.contains(selector), "{message}");
        assert_eq!(numbers(&|_| Scaled::Unmanaged), (0, 0, "InsufficientPods".to_owned()));
    }

    #[test]
    fn granted_evictions_count_until_they_are_seen_or_time_out() {
        let noted = json!({"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0,
            "disruptedPods": {"p0": "2026-01-01T12:00:00Z", "gone": "2026-01-01T12:00:00Z"}});
        let budget = budget(json!({"minAvailable": 1}), noted);
        let soon = plan(&budget, &pods(3, 0), |_| Scaled::Nothing, at("2026-01-01T12:00:30Z"));
        assert_eq!((soon.status.disruptions_allowed, soon.again), (1, Some(Duration::from_secs(90))));
        let late = plan(&budget, &pods(3, 0), |_| Scaled::Nothing, at("2026-01-01T12:02:00Z"));
        assert_eq!((late.status.disruptions_allowed, late.status.disrupted_pods), (2, None));
    }
}
