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
    go_values::go_pointer,
    print,
    quota_rules::{validate_limits, validate_quota},
    rules,
};
use crate::object::map_at;

pub(super) fn kinds() -> Vec<Kind> {
    vec![limit_range(), resource_quota(), disruption_budget()]
}

/// Copies to `into` the members that only `from` has.
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
        validate: validate_quota,
        ..Kind::built_in::<ResourceQuota>("resourcequota")
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
                let shown = format!(
                    "policy.PodDisruptionBudgetSpec{{MinAvailable:{}, Selector:{}, MaxUnavailable:{}, \
                     UnhealthyPodEvictionPolicy:{}}}",
                    go_pointer("intstr.IntOrString", &spec["minAvailable"]),
                    go_pointer("v1.LabelSelector", &spec["selector"]),
                    go_pointer("intstr.IntOrString", &spec["maxUnavailable"]),
                    go_pointer("policy.UnhealthyPodEvictionPolicyType", &spec["unhealthyPodEvictionPolicy"]),
                );
                errors.push(FieldError::invalid("spec", shown, detail));
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
        // Not checked, as upstream.
        valid_name: |_| Ok(()),
        unconditional_update: false,
        ..Kind::built_in::<PodDisruptionBudget>("poddisruptionbudget")
    }
}
