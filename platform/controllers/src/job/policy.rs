//! `spec.podFailurePolicy`: the consequence of a failed pod. Pure.

use mayfly_api::k8s::api::{
    batch::v1::{JobSpec, PodFailurePolicyRule},
    core::v1::Pod,
};

use super::pods::{ends, init_ends};

/// The effect of a failed pod on its Job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PodFailureVerdict {
    /// The failure counts towards `backoffLimit`.
    Count,
    /// The failure is not counted.
    Ignore,
    /// The pod's index has failed.
    FailIndex,
    /// The Job has failed, with this message.
    FailJob(String),
}

/// The first rule that matches decides.
pub(super) fn verdict(spec: &JobSpec, pod: &Pod) -> PodFailureVerdict {
    let rules = spec.pod_failure_policy.iter().flat_map(|policy| &policy.rules).enumerate();
    for (at, rule) in rules {
        let Some(why) = matched(rule, pod) else { continue };
        return match rule.action.as_str() {
            "Ignore" => PodFailureVerdict::Ignore,
            "FailIndex" if spec.backoff_limit_per_index.is_some() => PodFailureVerdict::FailIndex,
            "FailJob" => PodFailureVerdict::FailJob(format!("{why} matching FailJob rule at index {at}")),
            _ => PodFailureVerdict::Count,
        };
    }
    PodFailureVerdict::Count
}

/// The message about the match, if the rule matches.
fn matched(rule: &PodFailurePolicyRule, pod: &Pod) -> Option<String> {
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    let title = format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default());
    if let Some(codes) = &rule.on_exit_codes {
        let named = |container: &str| codes.container_name.as_ref().is_none_or(|name| name == container);
        let failed =
            ends(pod).chain(init_ends(pod)).filter(|(container, end)| named(container) && end.exit_code != 0);
        let mut matching =
            failed.filter(|(_, end)| codes.values.contains(&end.exit_code) == (codes.operator == "In"));
        let (container, end) = matching.next()?;
        let code = end.exit_code;
        return Some(format!("Container {container} for pod {title} failed with exit code {code}"));
    }
    let conditions = pod.status.as_ref()?.conditions.as_deref().unwrap_or_default();
    let patterns = rule.on_pod_conditions.as_deref().unwrap_or_default();
    let pattern = patterns.iter().find(|pattern| {
        conditions.iter().any(|known| known.type_ == pattern.type_ && known.status == pattern.status)
    })?;
    Some(format!("Pod {title} has condition {}", pattern.type_))
}
