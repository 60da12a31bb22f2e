//! PriorityClasses, RuntimeClasses and CertificateSigningRequests. The rules are upstream's
//! (`pkg/apis/{scheduling,node,certificates}`).

use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequest, node::v1::RuntimeClass, scheduling::v1::PriorityClass,
};
use mayfly_api::{names, validation::FieldError};
use serde_json::json;

use super::{AGE, Column, Kind, NAME, Subresource, columns, defaulting::fill, print, rules, signing_rules};
use crate::object::Object;

/// The highest priority of a class that is not a system class (upstream's `HighestUserDefinablePriority`).
const USER_PRIORITY_MAX: i64 = 1_000_000_000;
const SYSTEM_PREFIX: &str = "system-";
const SYSTEM_CLASSES: [(&str, i64); 2] =
    [("system-node-critical", 2_000_001_000), ("system-cluster-critical", 2_000_000_000)];

pub(super) fn kinds() -> Vec<Kind> {
    vec![priority_class(), runtime_class(), signing_request()]
}

fn priority_class() -> Kind {
    Kind {
        short_names: &["pc"],
        status: false,
        namespaced: false,
        generation: true,
        columns: columns::PRIORITY_CLASS,
        cells: |object, now| {
            let default = rules::get(object, &["globalDefault"]).as_bool().unwrap_or(false);
            vec![
                object.name().into(),
                print::number(object, &["value"]),
                default.into(),
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        defaults: |object| fill(&mut object.0, [("preemptionPolicy", json!("PreemptLowerPriority"))]),
        validate: |new, old| {
            let mut errors = Vec::new();
            let (value, name) = (print::number(new, &["value"]).as_i64().unwrap_or(0), new.name());
            if let Some(old) = old {
                if print::number(old, &["value"]).as_i64() != Some(value) {
                    errors.push(FieldError::forbidden("value", "may not be changed in an update."));
                }
                if new.at(&["preemptionPolicy"]) != old.at(&["preemptionPolicy"]) {
                    let shown = format!("{:?}", new.str_at(&["preemptionPolicy"]));
                    errors.push(FieldError::invalid("preemptionPolicy", shown, "field is immutable"));
                }
                return errors;
            }
            if name.starts_with(SYSTEM_PREFIX) {
                let is_default = rules::get(new, &["globalDefault"]) == &json!(true);
                if let Some(why) = no_system_class(name, value, is_default) {
                    let detail = format!(
                        "priority class names with '{SYSTEM_PREFIX}' prefix are reserved for system use only. error: {why}"
                    );
                    errors.push(FieldError::forbidden("metadata.name", detail));
                }
            } else if value > USER_PRIORITY_MAX {
                let detail =
                    format!("maximum allowed value of a user defined priority is {USER_PRIORITY_MAX}");
                errors.push(FieldError::forbidden("value", detail));
            }
            let policies = ["PreemptLowerPriority", "Never"];
            rules::one_of(new.str_at(&["preemptionPolicy"]), &policies, "preemptionPolicy", &mut errors);
            errors
        },
        ..Kind::built_in::<PriorityClass>("priorityclass")
    }
}

/// The reason why a class is not a system class (upstream's `IsKnownSystemPriorityClass`).
fn no_system_class(name: &str, value: i64, is_default: bool) -> Option<String> {
    match SYSTEM_CLASSES.iter().find(|(known, _)| *known == name) {
        None => Some(format!("{name} is not a known system priority class")),
        Some((_, known)) if *known != value => Some(format!("value of {name} PriorityClass must be {known}")),
        Some(_) if is_default => Some(format!("globalDefault of {name} PriorityClass must be false")),
        Some(_) => None,
    }
}

fn runtime_class() -> Kind {
    Kind {
        status: false,
        namespaced: false,
        columns: columns::RUNTIME_CLASS,
        cells: |object, now| {
            vec![object.name().into(), object.str_at(&["handler"]).into(), print::age(object, now)]
        },
        on_create: |_| {},
        validate: |new, old| {
            let mut errors = Vec::new();
            let handler = new.str_at(&["handler"]);
            if let Some(old) = old {
                if old.str_at(&["handler"]) != handler {
                    let shown = format!("{handler:?}");
                    errors.push(FieldError::invalid("handler", shown, "field is immutable"));
                }
                return errors;
            }
            if let Err(why) = names::dns_label(handler) {
                errors.push(FieldError::invalid("handler", format!("{handler:?}"), why));
            }
            for (name, amount) in rules::members(rules::get(new, &["overhead", "podFixed"])) {
                let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(
                    amount.as_str().unwrap_or("").into(),
                );
                if mayfly_api::quantity::millis(&quantity).is_err() {
                    let path = format!("overhead.limits[{name}]");
                    errors.push(FieldError::invalid(path, amount, "must be greater than or equal to 0"));
                }
            }
            let scheduling = rules::get(new, &["scheduling"]);
            rules::labels(&scheduling["nodeSelector"], "scheduling.nodeSelector", &mut errors);
            for (at, toleration) in rules::items(&scheduling["tolerations"]) {
                let path = format!("scheduling.tolerations.tolerations[{at}]");
                super::pod_rules::check_toleration(toleration, &path, &mut errors);
            }
            errors
        },
        create_on_update: true,
        unconditional_update: false,
        ..Kind::built_in::<RuntimeClass>("runtimeclass")
    }
}

fn signing_request() -> Kind {
    Kind {
        short_names: &["csr"],
        namespaced: false,
        subresources: &[Subresource::Approval],
        columns: const {
            &[
                NAME,
                AGE,
                Column::text("SignerName", "The signer that the request is for."),
                Column::text("Requestor", "The user that made the request."),
                Column::text(
                    "RequestedDuration",
                    "The requested duration of validity of the issued certificate.",
                ),
                Column::text("Condition", "The conditions of the request."),
            ]
        },
        cells: |object, now| {
            let duration = match rules::get(object, &["spec", "expirationSeconds"]).as_i64() {
                Some(seconds) => print::human_duration(seconds),
                None => "<none>".into(),
            };
            vec![
                object.name().into(),
                print::age(object, now),
                object.str_at(&["spec", "signerName"]).into(),
                object.str_at(&["spec", "username"]).into(),
                duration.into(),
                signing_condition(object).into(),
            ]
        },
        selectable: &[("spec.signerName", "")],
        on_create: |object| {
            object.0.insert("status".into(), json!({}));
        },
        on_update: |new, old| {
            let spec = old.0.get("spec").cloned().unwrap_or_else(|| json!({}));
            new.0.insert("spec".into(), spec);
        },
        validate: |new, _| signing_rules::validate(new),
        ..Kind::built_in::<CertificateSigningRequest>("certificatesigningrequest")
    }
}

fn signing_condition(object: &Object) -> String {
    let holds = |kind: &str| print::items(object, &["status", "conditions"]).any(|c| c["type"] == kind);
    let mut shown = String::from(match (holds("Denied"), holds("Approved")) {
        (true, _) => "Denied",
        (false, true) => "Approved",
        (false, false) => "Pending",
    });
    if holds("Failed") {
        shown.push_str(",Failed");
    }
    if !rules::get(object, &["status", "certificate"]).is_null() {
        shown.push_str(",Issued");
    }
    shown
}
