//! LimitRanges, ResourceQuotas and PodDisruptionBudgets. The rules are upstream's (`pkg/apis/core`, `pkg/apis/policy`).

use k8s_openapi::api::{
    core::v1::{LimitRange, ResourceQuota},
    policy::v1::PodDisruptionBudget,
};
use mayfly_api::validation::FieldError;
use serde_json::{Map, Value, json};

use super::{
    AGE, Column, Kind, NAME, columns,
    defaulting::{map_in, objects},
    print, rules,
};
use crate::object::{Object, map_at};

pub(super) fn kinds() -> Vec<Kind> {
    vec![limit_range(), resource_quota(), disruption_budget()]
}

/// Adds to `into` what only `from` has.
fn inherit(item: &mut Map<String, Value>, into: &str, from: &str) {
    let Some(from) = map_in(item, &[from]).cloned() else { return };
    let into = map_at(item, into);
    for (name, amount) in from {
        into.entry(name).or_insert(amount);
    }
}

fn limit_range() -> Kind {
    Kind {
        short_names: &["limits"],
        status: false,
        columns: const { &[NAME, Column::date("Created At", "")] },
        cells: |object, _| vec![object.name().into(), object.meta_str("creationTimestamp").into()],
        on_create: |_| {},
        defaults: |object| {
            for item in objects(object.map_mut("spec"), "limits") {
                if item.get("type").and_then(Value::as_str) == Some("Container") {
                    inherit(item, "default", "max");
                    inherit(item, "defaultRequest", "default");
                    inherit(item, "defaultRequest", "min");
                }
            }
        },
        validate: validate_limits,
        create_on_update: true,
        ..Kind::built_in::<LimitRange>("limitrange")
    }
}

fn amount(value: &Value) -> Option<u64> {
    let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(value.as_str()?.into());
    mayfly_api::quantity::millis(&quantity).ok()
}

fn validate_limits(new: &Object, _: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut kinds = Vec::new();
    for (at, item) in rules::items(rules::get(new, &["spec", "limits"])) {
        let path = format!("spec.limits[{at}]");
        let kind = rules::text(item, "type");
        if kinds.contains(&kind) {
            errors.push(rules::duplicate(format!("{path}.type"), format!("{kind:?}")));
        }
        kinds.push(kind);
        if kind == "Pod" {
            for field in ["default", "defaultRequest"] {
                if item[field].as_object().is_some_and(|map| !map.is_empty()) {
                    let detail = "may not be specified when `type` is 'Pod'";
                    errors.push(FieldError::forbidden(format!("{path}.{field}"), detail));
                }
            }
        }
        let fields = ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"];
        let mut names: Vec<_> =
            fields.iter().flat_map(|field| rules::members(&item[*field])).map(|(n, _)| n).collect();
        names.sort();
        names.dedup();
        for name in names {
            order(item, name, &path, &mut errors);
        }
    }
    errors
}

/// min ≤ defaultRequest ≤ default ≤ max.
fn order(item: &Value, name: &str, path: &str, errors: &mut Vec<FieldError>) {
    let get = |field: &str| (amount(&item[field][name]), rules::text(&item[field], name));
    let (min, max, default, request) = (get("min"), get("max"), get("default"), get("defaultRequest"));
    let above = |low: (Option<u64>, &str), high: (Option<u64>, &str)| matches!((low.0, high.0), (Some(l), Some(h)) if l > h);
    for (wrong, field, shown, detail) in [
        (above(min, max), "min", min.1, format!("min value {} is greater than max value {}", min.1, max.1)),
        (
            above(min, request),
            "defaultRequest",
            request.1,
            format!("min value {} is greater than default request value {}", min.1, request.1),
        ),
        (
            above(request, max),
            "defaultRequest",
            request.1,
            format!("default request value {} is greater than max value {}", request.1, max.1),
        ),
        (
            above(request, default),
            "defaultRequest",
            request.1,
            format!("default request value {} is greater than default limit value {}", request.1, default.1),
        ),
        (
            above(min, default),
            "default",
            min.1,
            format!("min value {} is greater than default value {}", min.1, default.1),
        ),
        (
            above(default, max),
            "default",
            max.1,
            format!("default value {} is greater than max value {}", default.1, max.1),
        ),
    ] {
        if wrong {
            errors.push(FieldError::invalid(format!("{path}.{field}[{name}]"), format!("{shown:?}"), detail));
        }
    }
}

fn resource_quota() -> Kind {
    Kind {
        short_names: &["quota"],
        columns: columns::RESOURCE_QUOTA,
        cells: |object, now| {
            let used = rules::get(object, &["status", "used"]);
            let mut hard: Vec<_> = rules::members(rules::get(object, &["status", "hard"])).collect();
            hard.sort_by_key(|(name, _)| name.as_str());
            let shown = |limits: bool| -> Value {
                let of = hard.iter().filter(|(name, _)| name.starts_with("limits") == limits);
                let texts = of.map(|(name, hard)| {
                    let used = used.get(name.as_str()).and_then(Value::as_str).unwrap_or("0");
                    format!("{name}: {used}/{}", hard.as_str().unwrap_or(""))
                });
                texts.collect::<Vec<_>>().join(", ").into()
            };
            vec![object.name().into(), print::age(object, now), shown(false), shown(true)]
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({}));
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            for (name, value) in rules::members(rules::get(new, &["spec", "hard"])) {
                let path = format!("spec.hard[{name}]");
                if let Err(why) = crate::meta::qualified_name(name) {
                    errors.push(FieldError::invalid(&path, format!("{name:?}"), why));
                }
                if amount(value).is_none() {
                    errors.push(FieldError::invalid(&path, value, "must be greater than or equal to 0"));
                }
            }
            let scopes = [
                "BestEffort",
                "CrossNamespacePodAffinity",
                "NotBestEffort",
                "NotTerminating",
                "PriorityClass",
                "Terminating",
            ];
            for (_, scope) in rules::items(rules::get(new, &["spec", "scopes"])) {
                let text = scope.as_str().unwrap_or("");
                if !scopes.contains(&text) {
                    errors.push(FieldError::invalid(
                        "spec.scopes",
                        go_list(rules::get(new, &["spec", "scopes"])),
                        "unsupported scope",
                    ));
                }
            }
            if old.is_some_and(|old| old.at(&["spec", "scopes"]) != new.at(&["spec", "scopes"])) {
                let shown = go_list(rules::get(new, &["spec", "scopes"]));
                errors.push(FieldError::invalid("spec.scopes", shown, "field is immutable"));
            }
            errors
        },
        ..Kind::built_in::<ResourceQuota>("resourcequota")
    }
}

fn go_list(list: &Value) -> String {
    let texts: Vec<_> = rules::items(list).map(|(_, text)| text.to_string()).collect();
    match texts.is_empty() {
        true => "[]core.ResourceQuotaScope(nil)".into(),
        false => format!("[]core.ResourceQuotaScope{{{}}}", texts.join(", ")),
    }
}

fn disruption_budget() -> Kind {
    Kind {
        short_names: &["pdb"],
        generation: true,
        columns: const {
            &[
                NAME,
                Column::text("Min Available", "The minimum number of pods that must be available."),
                Column::text("Max Unavailable", "The maximum number of pods that may be unavailable."),
                Column::integer(
                    "Allowed Disruptions",
                    "Calculated number of pods that may be disrupted at this time.",
                ),
                AGE,
            ]
        },
        cells: |object, now| {
            let or_not = |field: &str| match rules::get(object, &["spec", field]) {
                Value::Null => Value::from("N/A"),
                Value::String(text) => text.as_str().into(),
                number => number.to_string().into(),
            };
            vec![
                object.name().into(),
                or_not("minAvailable"),
                or_not("maxUnavailable"),
                print::number(object, &["status", "disruptionsAllowed"]),
                print::age(object, now),
            ]
        },
        on_create: |object| {
            let status =
                json!({"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0});
            object.0.insert("status".into(), status);
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            let spec = rules::get(new, &["spec"]);
            if !spec["minAvailable"].is_null() && !spec["maxUnavailable"].is_null() {
                let detail = "minAvailable and maxUnavailable cannot be both set";
                errors.push(FieldError::invalid("spec", "{}", detail));
            }
            for field in ["minAvailable", "maxUnavailable"] {
                let path = format!("spec.{field}");
                rules::int_or_percent(&spec[field], &path, &mut errors);
                rules::not_more_than_all(&spec[field], &path, &mut errors);
            }
            rules::label_selector(&spec["selector"], "spec.selector", &mut errors);
            let policy = rules::text(spec, "unhealthyPodEvictionPolicy");
            if !matches!(policy, "" | "IfHealthyBudget" | "AlwaysAllow") {
                let all = ["AlwaysAllow", "IfHealthyBudget"];
                errors.push(rules::not_supported("spec.unhealthyPodEvictionPolicy", policy, &all));
            }
            errors
        },
        // As upstream, which forgot to check it.
        valid_name: |_| Ok(()),
        unconditional_update: false,
        ..Kind::built_in::<PodDisruptionBudget>("poddisruptionbudget")
    }
}
