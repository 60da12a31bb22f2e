//! Jobs. The rules are upstream's (`pkg/apis/batch/{v1/defaults,validation}`, `pkg/registry/batch/job/strategy.go`,
//! `printJob`); fields that the controller does not support are refused.

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use mayfly_api::{
    job_io::{ANNOTATION_INPUTS, InputsSource},
    job_queue::LABEL_QUEUE,
    validation::FieldError,
};
use serde_json::{Map, Value, json};

use super::{
    AGE, Column, Kind, NAME,
    apps::selector_text,
    defaulting::objects,
    immutable, job_rules, pod, print, rules, typed,
    workloads::{go_map, go_selector},
};
use crate::{
    meta,
    object::{Object, map_at},
    selection::JOB_SUCCESSFUL,
};

/// The label of the default selector of a job.
const CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";
const JOB_NAME: &str = "batch.kubernetes.io/job-name";
/// The default of `backoffLimit`.
const BACKOFF_LIMIT_DEFAULT: i32 = 6;
/// The maximum parallelism of an indexed job.
const INDEXED_PARALLELISM_MAX: i32 = 100_000;

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        categories: &["all"],
        generation: true,
        selectable: &[(JOB_SUCCESSFUL, "0")],
        columns: const {
            &[
                NAME,
                Column::text("Status", "Status of the job."),
                Column::text("Completions", "Succeeded pods, of the required completions."),
                Column::text("Duration", "Time from start to completion."),
                AGE,
                Column::text("Containers", "Names of each container in the template.").wide(),
                Column::text("Images", "Images referenced by each container in the template.").wide(),
                Column::text("Selector", "A label query over pods that should match the pod count.").wide(),
            ]
        },
        cells,
        defaults,
        on_create: |object| {
            object.0.insert("status".into(), json!({}));
            // The queue controller resumes the Job when the queue admits it.
            let queue = object.at(&["metadata", "labels", LABEL_QUEUE]).and_then(Value::as_str);
            if queue.is_some_and(|queue| !queue.is_empty()) {
                object.map_mut("spec").insert("suspend".into(), json!(true));
            }
        },
        validate,
        warn: super::pod_runtime::of_template,
        ..Kind::built_in::<Job>("job")
    }]
}

fn cells(object: &Object, now: Timestamp) -> Vec<Value> {
    let texts = |field: &str| {
        let containers = print::items(object, &["spec", "template", "spec", "containers"]);
        containers.filter_map(|c| c[field].as_str()).collect::<Vec<_>>().join(",")
    };
    vec![
        object.name().into(),
        status(object).into(),
        completions(object).into(),
        duration(object, now).into(),
        print::age(object, now),
        texts("name").into(),
        texts("image").into(),
        print::or_none(&selector_text(object.at(&["spec", "selector"]))),
    ]
}

fn status(object: &Object) -> &'static str {
    let holds = |name: &str| print::condition(object, name).is_some_and(|(status, _)| status == "True");
    match () {
        () if holds("Complete") => "Complete",
        () if holds("Failed") => "Failed",
        () if object.is_terminating() => "Terminating",
        () if holds("Suspended") => "Suspended",
        () if holds("FailureTarget") => "FailureTarget",
        () if holds("SuccessCriteriaMet") => "SuccessCriteriaMet",
        () => "Running",
    }
}

fn completions(object: &Object) -> String {
    let succeeded = print::number(object, &["status", "succeeded"]);
    let number = |field: &str| object.at(&["spec", field]).and_then(Value::as_i64);
    match (number("completions"), number("parallelism")) {
        (Some(wanted), _) => format!("{succeeded}/{wanted}"),
        (None, Some(parallel)) if parallel > 1 => format!("{succeeded}/1 of {parallel}"),
        (None, _) => format!("{succeeded}/1"),
    }
}

fn duration(object: &Object, now: Timestamp) -> String {
    let at = |field: &str| object.str_at(&["status", field]).parse::<Timestamp>().ok();
    let Some(started) = at("startTime") else { return String::new() };
    let ended = at("completionTime").unwrap_or(now);
    print::human_duration(ended.duration_since(started).as_secs())
}

fn defaults(object: &mut Object) {
    let (uid, name) = (object.uid().to_owned(), object.name().to_owned());
    let spec = object.map_mut("spec");
    if !spec.contains_key("completions") && !spec.contains_key("parallelism") {
        spec.insert("completions".into(), json!(1));
    }
    let policy = if spec.contains_key("podFailurePolicy") { "Failed" } else { "TerminatingOrFailed" };
    // Failures that are counted for each index do not fail the Job as a whole.
    let backoff_limit =
        if spec.contains_key("backoffLimitPerIndex") { i32::MAX } else { BACKOFF_LIMIT_DEFAULT };
    for (field, value) in [
        ("parallelism", json!(1)),
        ("backoffLimit", json!(backoff_limit)),
        ("completionMode", json!("NonIndexed")),
        ("suspend", json!(false)),
        ("podReplacementPolicy", json!(policy)),
    ] {
        spec.entry(field).or_insert(value);
    }
    let manual = spec.get("manualSelector") == Some(&json!(true));
    if !manual && !uid.is_empty() {
        map_at(map_at(spec, "selector"), "matchLabels").entry(CONTROLLER_UID).or_insert(json!(uid));
    }
    if let Some(policy) = spec.get_mut("podFailurePolicy").and_then(Value::as_object_mut) {
        for rule in objects(policy, "rules") {
            for condition in objects(rule, "onPodConditions") {
                condition.entry("status").or_insert(json!("True"));
            }
        }
    }
    let Some(template) = spec.get_mut("template").and_then(Value::as_object_mut) else { return };
    if !manual && !uid.is_empty() {
        let labels = map_at(map_at(template, "metadata"), "labels");
        for (label, value) in
            [(CONTROLLER_UID, &uid), ("controller-uid", &uid), (JOB_NAME, &name), ("job-name", &name)]
        {
            labels.insert(label.into(), json!(value));
        }
    }
    if let Some(spec) = template.get_mut("spec").and_then(Value::as_object_mut) {
        pod::pod_spec_defaults(spec);
    }
    let labels = template.get("metadata").and_then(|metadata| metadata.get("labels")).cloned();
    if let Some(labels) = labels {
        object.meta_mut().entry("labels").or_insert(labels);
    }
}

fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let Some(spec) = typed::<Job>(new).and_then(|job| job.spec) else {
        return vec![FieldError::required("spec", "")];
    };
    let numbers = [
        ("parallelism", spec.parallelism.map(i64::from)),
        ("completions", spec.completions.map(i64::from)),
        ("backoffLimit", spec.backoff_limit.map(i64::from)),
        ("activeDeadlineSeconds", spec.active_deadline_seconds),
        ("ttlSecondsAfterFinished", spec.ttl_seconds_after_finished.map(i64::from)),
        ("backoffLimitPerIndex", spec.backoff_limit_per_index.map(i64::from)),
        ("maxFailedIndexes", spec.max_failed_indexes.map(i64::from)),
    ];
    for (field, number) in numbers {
        if let Some(number) = number.filter(|number| *number < 0) {
            let detail = "must be greater than or equal to 0";
            errors.push(FieldError::invalid(format!("spec.{field}"), number, detail));
        }
    }
    let mut errors = generated_selector(new, &spec).into_iter().chain(errors).collect::<Vec<_>>();
    job_rules::per_index(&spec, &mut errors);
    modes(&spec, &mut errors);
    job_rules::failure_policy(&spec, &mut errors);
    job_rules::success_policy(&spec, &mut errors);
    template(new, &spec, &mut errors);
    selector(new, &spec, &mut errors);
    for field in ["selector", "completionMode", "podFailurePolicy", "successPolicy", "backoffLimitPerIndex"] {
        immutable(new, old, &["spec", field], &mut errors);
    }
    // Upstream lets a job that has not begun be changed while it is suspended: that is what queues do.
    let begun = old.is_some_and(|old| {
        old.at(&["spec", "suspend"]) != Some(&json!(true)) || !old.str_at(&["status", "startTime"]).is_empty()
    });
    if begun {
        immutable(new, old, &["spec", "template"], &mut errors);
    }
    let elastic = spec.completion_mode.as_deref() == Some("Indexed") && spec.completions == spec.parallelism;
    if !elastic {
        immutable(new, old, &["spec", "completions"], &mut errors);
    }
    errors
}

fn modes(spec: &JobSpec, errors: &mut Vec<FieldError>) {
    match spec.completion_mode.as_deref().unwrap_or("NonIndexed") {
        "NonIndexed" => {}
        "Indexed" => {
            if spec.completions.is_none() {
                let detail = "when completion mode is Indexed";
                errors.push(FieldError::required("spec.completions", detail));
            }
            if let Some(parallel) = spec.parallelism.filter(|number| *number > INDEXED_PARALLELISM_MAX) {
                let detail = format!(
                    "must be less than or equal to {INDEXED_PARALLELISM_MAX} when completion mode is Indexed"
                );
                errors.push(FieldError::invalid("spec.parallelism", parallel, detail));
            }
        }
        other => errors.push(rules::not_supported("spec.completionMode", other, &["NonIndexed", "Indexed"])),
    }
    let policy = spec.pod_replacement_policy.as_deref().unwrap_or("TerminatingOrFailed");
    let allowed: &[&str] =
        if spec.pod_failure_policy.is_some() { &["Failed"] } else { &["Failed", "TerminatingOrFailed"] };
    if !allowed.contains(&policy) {
        errors.push(rules::not_supported("spec.podReplacementPolicy", policy, allowed));
    }
}

/// Without `manualSelector` the selector is the generated one.
fn generated_selector(new: &Object, spec: &JobSpec) -> Option<FieldError> {
    let selector = new.at(&["spec", "selector"])?;
    let generated = json!({"matchLabels": {CONTROLLER_UID: new.uid()}});
    if spec.manual_selector == Some(true) || *selector == generated {
        return None;
    }
    Some(FieldError::invalid("spec.selector", go_selector(selector), "`selector` not auto-generated"))
}

fn selector(new: &Object, spec: &JobSpec, errors: &mut Vec<FieldError>) {
    if spec.selector.is_none() {
        return errors.push(FieldError::required("spec.selector", ""));
    }
    let selector = rules::get(new, &["spec", "selector"]);
    let before = errors.len();
    rules::label_selector(selector, "spec.selector", errors);
    let labels = rules::get(new, &["spec", "template", "metadata", "labels"]);
    if errors.len() == before && !rules::is_empty_selector(selector) && !rules::selects(selector, labels) {
        let detail = "`selector` does not match template `labels`";
        errors.push(FieldError::invalid("spec.template.metadata.labels", go_map(labels), detail));
    }
}

fn template(new: &Object, spec: &JobSpec, errors: &mut Vec<FieldError>) {
    let none = Map::new();
    let template = new.at(&["spec", "template", "spec"]).and_then(Value::as_object).unwrap_or(&none);
    meta::map_errors(new, &["spec", "template", "metadata"], "spec.template", errors);
    pod::pod_spec_errors(template, "spec.template.spec", errors);
    match template.get("restartPolicy").and_then(Value::as_str).unwrap_or("Always") {
        "Never" | "OnFailure" => {}
        "Always" => {
            let detail = "valid values: \"OnFailure\", \"Never\"";
            errors.push(FieldError::required("spec.template.spec.restartPolicy", detail));
        }
        other => {
            let path = "spec.template.spec.restartPolicy";
            errors.push(rules::not_supported(path, other, &["Never", "OnFailure"]));
        }
    }
    let policy = template.get("restartPolicy").and_then(Value::as_str).unwrap_or("");
    if spec.pod_failure_policy.is_some() && policy != "Never" {
        let detail = "only \"Never\" is supported when podFailurePolicy is specified";
        errors.push(FieldError::invalid("spec.template.spec.restartPolicy", format!("{policy:?}"), detail));
    }
    if spec.backoff_limit_per_index.is_some() && policy != "Never" {
        let detail = "only \"Never\" is supported when backoffLimitPerIndex is specified";
        errors.push(FieldError::invalid("spec.template.spec.restartPolicy", format!("{policy:?}"), detail));
    }
    let metadata = spec.template.metadata.as_ref();
    let inputs = metadata.and_then(|metadata| metadata.annotations.as_ref()?.get(ANNOTATION_INPUTS));
    if let Some(Err(why)) = inputs.map(|text| InputsSource::parse(text)) {
        let path = format!("spec.template.metadata.annotations[{ANNOTATION_INPUTS}]");
        errors.push(FieldError::invalid(path, inputs.map_or("", String::as_str), why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(change: Value) -> Object {
        let mut job = json!({"metadata": {"name": "j", "uid": "u"}, "spec": {"template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}}});
        json_patch::merge(&mut job, &change);
        let mut object = Object(job.as_object().unwrap().clone());
        defaults(&mut object);
        object
    }

    #[test]
    fn what_is_left_out_is_filled_in() {
        let mut object = job(json!({}));
        let before = object.clone();
        defaults(&mut object);
        assert_eq!(object, before, "the second time changes nothing");
        assert_eq!(object.at(&["spec", "completions"]), Some(&json!(1)));
        assert_eq!(object.at(&["spec", "template", "metadata", "labels", "job-name"]), Some(&json!("j")));
        assert_eq!(object.labels()["controller-uid"], "u");
        assert_eq!(validate(&object, None), []);
        let queue = job(json!({"spec": {"parallelism": 3}}));
        assert_eq!(queue.at(&["spec", "completions"]), None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (change, path) in [
            (json!({"spec": {"completions": -1}}), "spec.completions"),
            (json!({"spec": {"backoffLimitPerIndex": 1}}), "spec.backoffLimitPerIndex"),
            (
                json!({"spec": {"backoffLimitPerIndex": -1, "completionMode": "Indexed", "completions": 1}}),
                "spec.backoffLimitPerIndex",
            ),
            (
                json!({"spec": {"maxFailedIndexes": 1, "completionMode": "Indexed", "completions": 1}}),
                "spec.backoffLimitPerIndex",
            ),
            (
                json!({"spec": {"maxFailedIndexes": 3, "backoffLimitPerIndex": 1, "completionMode": "Indexed",
                    "completions": 2}}),
                "spec.maxFailedIndexes",
            ),
            (
                json!({"spec": {"backoffLimitPerIndex": 1, "completionMode": "Indexed", "completions": 1,
                    "template": {"spec": {"restartPolicy": "OnFailure"}}}}),
                "spec.template.spec.restartPolicy",
            ),
            (
                json!({"spec": {"completionMode": "Indexed", "completions": 1, "successPolicy": {"rules": []}}}),
                "spec.successPolicy.rules",
            ),
            (json!({"spec": {"successPolicy": {"rules": [{"succeededCount": 1}]}}}), "spec.successPolicy"),
            (json!({"spec": {"parallelism": 1, "completionMode": "Indexed"}}), "spec.completions"),
            (json!({"spec": {"completionMode": "Other"}}), "spec.completionMode"),
            (
                json!({"spec": {"template": {"spec": {"restartPolicy": null}}}}),
                "spec.template.spec.restartPolicy",
            ),
            (json!({"spec": {"template": {"spec": {"containers": []}}}}), "spec.template.spec.containers"),
            (
                json!({"spec": {"podFailurePolicy": {"rules": [
                    {"action": "FailIndex", "onPodConditions": [{"type": "X"}]}]}}}),
                "spec.podFailurePolicy.rules[0].action",
            ),
            (
                json!({"spec": {"podFailurePolicy": {"rules": [{"action": "Count", "onPodConditions": []}]}}}),
                "spec.podFailurePolicy.rules[0]",
            ),
            (
                json!({"spec": {"podFailurePolicy": {"rules": [
                    {"action": "Count", "onExitCodes": {"operator": "In", "values": [2, 1]}}]}}}),
                "spec.podFailurePolicy.rules[0].onExitCodes.values",
            ),
            (
                json!({"spec": {"podFailurePolicy": {"rules": [
                    {"action": "Count", "onExitCodes": {"operator": "In", "values": [1], "containerName": "other"}}]}}}),
                "spec.podFailurePolicy.rules[0].onExitCodes.containerName",
            ),
            (
                json!({"spec": {"template": {"metadata": {"annotations": {ANNOTATION_INPUTS: "{"}}}}}),
                "spec.template.metadata.annotations[mayfly.dev/inputs]",
            ),
        ] {
            let errors = validate(&job(change.clone()), None);
            assert_eq!(
                errors.iter().map(|error| error.path.as_str()).collect::<Vec<_>>(),
                [path],
                "{change}"
            );
        }
    }

    #[test]
    fn a_selector_of_ones_own_needs_manual_selector() {
        let own = job(json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}}));
        let errors = validate(&own, None);
        let selector = "v1.LabelSelector{MatchLabels:map[string]string{\"a\":\"b\", \
                        \"batch.kubernetes.io/controller-uid\":\"u\"}, \
                        MatchExpressions:[]v1.LabelSelectorRequirement(nil)}";
        assert_eq!(errors[0].message(), format!("Invalid value: {selector}: `selector` not auto-generated"));
        assert_eq!((errors.len(), errors[1].path.as_str()), (2, "spec.template.metadata.labels"));
    }

    #[test]
    fn a_template_stands_still_once_the_job_has_begun() {
        let old = job(json!({}));
        let new = job(json!({"spec": {"template": {"spec": {"containers": [{"name": "d", "image": "x"}]}}}}));
        assert_eq!(validate(&new, Some(&old))[0].path, "spec.template");
        let suspended = job(json!({"spec": {"suspend": true}}));
        assert_eq!(validate(&new, Some(&suspended)), []);
        let more = job(json!({"spec": {"completions": 1, "parallelism": 2}}));
        assert_eq!(validate(&more, Some(&old)), []);
    }

    #[test]
    fn lines_as_upstream_prints_them() {
        let now = "2026-01-01T00:10:00Z".parse().unwrap();
        let line = |change: Value| {
            let cells = cells(&job(change), now);
            cells[1..4].iter().map(|cell| cell.as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(line(json!({})), ["Running", "0/1", ""]);
        let complete = json!({"spec": {"completions": 3}, "status": {"succeeded": 3,
            "startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:09Z",
            "conditions": [{"type": "Complete", "status": "True"}]}});
        assert_eq!(line(complete), ["Complete", "3/3", "9s"]);
        let failed = json!({"spec": {"parallelism": 2}, "status": {"startTime": "2026-01-01T00:09:00Z",
            "conditions": [{"type": "Failed", "status": "True"}]}});
        assert_eq!(line(failed), ["Failed", "0/1 of 2", "60s"]);
    }
}
