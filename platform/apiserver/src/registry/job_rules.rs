//! Validation of a Job's policies: of success, of failed pods, and of failures of its indexes. (Rules: upstream
//! `pkg/apis/batch/validation`.)

use k8s_openapi::api::batch::v1::{JobSpec, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyRule};
use mayfly_api::validation::{FieldError, FieldErrorKind};

use super::rules;
use crate::meta;

/// The maximum of `maxFailedIndexes`, and the number of completions above which [`PARALLELISM_PER_INDEX_MAX`] limits
/// it and the parallelism.
const FAILED_INDEXES_MAX: i32 = 100_000;
const PARALLELISM_PER_INDEX_MAX: i32 = 10_000;

/// The limits of failures for each index.
pub(super) fn per_index(spec: &JobSpec, errors: &mut Vec<FieldError>) {
    let (limit, most) = (spec.backoff_limit_per_index, spec.max_failed_indexes);
    let mut invalid = |field: &str, number: i32, detail: String| {
        errors.push(FieldError::invalid(format!("spec.{field}"), number, detail));
    };
    if spec.completion_mode.as_deref() != Some("Indexed") {
        for (field, number) in [("backoffLimitPerIndex", limit), ("maxFailedIndexes", most)] {
            if let Some(number) = number {
                invalid(field, number, "requires indexed completion mode".into());
            }
        }
        return;
    }
    let completions = spec.completions.unwrap_or(0);
    if let Some(most) = most {
        if most > completions {
            let detail = "must be less than or equal to completions";
            invalid("maxFailedIndexes", most, detail.into());
        }
        if most > FAILED_INDEXES_MAX {
            invalid("maxFailedIndexes", most, format!("must be less than or equal to {FAILED_INDEXES_MAX}"));
        }
        if limit.is_none() {
            let detail = "when maxFailedIndexes is specified";
            errors.push(FieldError::required("spec.backoffLimitPerIndex", detail));
            return;
        }
    }
    if limit.is_none() || completions <= FAILED_INDEXES_MAX {
        return;
    }
    let above =
        format!("when completions are above {FAILED_INDEXES_MAX} and used with backoff limit per index");
    match most {
        None => {
            let detail = format!("must be specified when completions is above {FAILED_INDEXES_MAX}");
            errors.push(FieldError::required("spec.maxFailedIndexes", detail));
        }
        Some(most) if most > PARALLELISM_PER_INDEX_MAX => {
            let detail = format!("must be less than or equal to {PARALLELISM_PER_INDEX_MAX} {above}");
            errors.push(FieldError::invalid("spec.maxFailedIndexes", most, detail));
        }
        Some(_) => {}
    }
    if let Some(parallel) = spec.parallelism.filter(|parallel| *parallel > PARALLELISM_PER_INDEX_MAX) {
        let detail = format!("must be less than or equal to {PARALLELISM_PER_INDEX_MAX} {above}");
        errors.push(FieldError::invalid("spec.parallelism", parallel, detail));
    }
}

pub(super) fn success_policy(spec: &JobSpec, errors: &mut Vec<FieldError>) {
    let Some(policy) = &spec.success_policy else { return };
    if spec.completion_mode.as_deref() != Some("Indexed") {
        let detail = "requires indexed completion mode";
        errors.push(FieldError::invalid("spec.successPolicy", "{}", detail));
    }
    if policy.rules.is_empty() {
        let detail = "at least one rules must be specified when the successPolicy is specified";
        errors.push(FieldError::required("spec.successPolicy.rules", detail));
    }
    for (at, rule) in policy.rules.iter().enumerate() {
        let path = format!("spec.successPolicy.rules[{at}]");
        if rule.succeeded_count.is_none() && rule.succeeded_indexes.is_none() {
            let detail = "at least one of succeededCount or succeededIndexes must be specified";
            errors.push(FieldError::required(path.clone(), detail));
        }
        let most = spec.completions.unwrap_or(i32::MAX);
        if let Some(count) = rule.succeeded_count.filter(|count| !(1..=most).contains(count)) {
            let detail = format!(
                "must be greater than 0 and less than or equal to {most} (the number of completions)"
            );
            errors.push(FieldError::invalid(format!("{path}.succeededCount"), count, detail));
        }
        let indexes = rule.succeeded_indexes.as_deref().unwrap_or_default();
        let is_range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            matches!((first.parse::<i32>(), last.parse::<i32>()), (Ok(a), Ok(b)) if 0 <= a && a <= b && b < most)
        };
        if !indexes.is_empty() && !indexes.split(',').all(is_range) {
            let detail = "must be indexes of this Job and ranges of them, such as 0,3-5";
            errors.push(FieldError::invalid(
                format!("{path}.succeededIndexes"),
                format!("{indexes:?}"),
                detail,
            ));
        }
    }
}

const POLICY_RULES_MAX: usize = 20;

pub(super) fn failure_policy(spec: &JobSpec, errors: &mut Vec<FieldError>) {
    let Some(policy) = &spec.pod_failure_policy else { return };
    if policy.rules.len() > POLICY_RULES_MAX {
        errors.push(too_many("spec.podFailurePolicy.rules", policy.rules.len(), POLICY_RULES_MAX));
        return;
    }
    for (at, rule) in policy.rules.iter().enumerate() {
        failure_rule(spec, rule, &format!("spec.podFailurePolicy.rules[{at}]"), errors);
    }
}

fn too_many(path: &str, count: usize, most: usize) -> FieldError {
    let kind = FieldErrorKind::TooMany { count: count as u64 };
    FieldError { path: path.into(), kind, detail: format!("must have at most {most} items") }
}

fn failure_rule(spec: &JobSpec, rule: &PodFailurePolicyRule, path: &str, errors: &mut Vec<FieldError>) {
    let actions = ["Count", "FailIndex", "FailJob", "Ignore"];
    let of_action = format!("{path}.action");
    match rule.action.as_str() {
        "" => errors.push(FieldError::required(of_action, valid_values(&actions))),
        "FailIndex" if spec.backoff_limit_per_index.is_none() => {
            let detail = "requires the backoffLimitPerIndex to be set";
            errors.push(FieldError::invalid(of_action, "\"FailIndex\"", detail));
        }
        action => rules::one_of(action, &actions, &of_action, errors),
    }
    let conditions = rule.on_pod_conditions.as_deref().unwrap_or_default();
    match (&rule.on_exit_codes, conditions.is_empty()) {
        (None, true) => {
            let detail = "specifying one of OnExitCodes and OnPodConditions is required";
            errors.push(FieldError::invalid(path, "", detail));
        }
        (Some(_), false) => {
            let detail = "specifying both OnExitCodes and OnPodConditions is not supported";
            errors.push(FieldError::invalid(path, "", detail));
        }
        _ => {}
    }
    if let Some(codes) = &rule.on_exit_codes {
        exit_codes(spec, codes, &format!("{path}.onExitCodes"), errors);
    }
    for (at, condition) in conditions.iter().enumerate() {
        let path = format!("{path}.onPodConditions[{at}]");
        if condition.type_.is_empty() {
            errors.push(FieldError::required(format!("{path}.type"), ""));
        } else if let Err(why) = meta::qualified_name(&condition.type_) {
            errors.push(FieldError::invalid(format!("{path}.type"), format!("{:?}", condition.type_), why));
        }
        let statuses = ["False", "True", "Unknown"];
        rules::one_of(&condition.status, &statuses, &format!("{path}.status"), errors);
    }
}

/// `valid values: ["A" "B"]`
fn valid_values(values: &[&str]) -> String {
    let shown: Vec<_> = values.iter().map(|value| format!("{value:?}")).collect();
    format!("valid values: [{}]", shown.join(" "))
}

fn exit_codes(
    spec: &JobSpec,
    codes: &PodFailurePolicyOnExitCodesRequirement,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let operators = ["In", "NotIn"];
    match codes.operator.as_str() {
        "" => errors.push(FieldError::required(format!("{path}.operator"), valid_values(&operators))),
        operator => rules::one_of(operator, &operators, &format!("{path}.operator"), errors),
    }
    if let Some(name) = &codes.container_name {
        let pod = spec.template.spec.as_ref();
        let containers = pod.map(|pod| pod.containers.iter().chain(pod.init_containers.iter().flatten()));
        if !containers.into_iter().flatten().any(|container| container.name == *name) {
            let detail = "must be one of the container or initContainer names in the pod template";
            errors.push(FieldError::invalid(format!("{path}.containerName"), format!("{name:?}"), detail));
        }
    }
    let values = &codes.values;
    let list = format!("{path}.values");
    if values.is_empty() {
        errors.push(FieldError::invalid(list.as_str(), "[]int32{}", "at least one value is required"));
    }
    for (at, value) in values.iter().enumerate() {
        let path = format!("{list}[{at}]");
        if *value == 0 && codes.operator == "In" {
            let detail = "must not be 0 for the In operator";
            errors.push(FieldError::invalid(path.as_str(), value, detail));
        }
        if values[..at].contains(value) {
            errors.push(rules::duplicate(path, value.to_string()));
        }
    }
    if !values.is_sorted() {
        let shown: Vec<_> = values.iter().map(i32::to_string).collect();
        let shown = format!("[]int32{{{}}}", shown.join(", "));
        errors.push(FieldError::invalid(list, shown, "must be ordered"));
    }
}
