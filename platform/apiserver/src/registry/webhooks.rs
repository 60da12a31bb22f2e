//! Configurations of admission webhooks. The rules are upstream's (`pkg/apis/admissionregistration`).

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Value, json};

use super::{
    Kind, columns,
    defaulting::{fill, map_in, objects},
    policies, print, rules,
};
use crate::object::Object;

/// Upstream's bounds of a webhook's `timeoutSeconds`.
const TIMEOUT_SECONDS: std::ops::RangeInclusive<i64> = 1..=30;

pub(super) fn kinds() -> Vec<Kind> {
    vec![
        Kind {
            defaults: |object| fill_defaults(object, true),
            validate: |new, _| validate(new, true),
            ..base(Kind::built_in::<MutatingWebhookConfiguration>("mutatingwebhookconfiguration"))
        },
        Kind {
            defaults: |object| fill_defaults(object, false),
            validate: |new, _| validate(new, false),
            ..base(Kind::built_in::<ValidatingWebhookConfiguration>("validatingwebhookconfiguration"))
        },
    ]
}

fn base(kind: Kind) -> Kind {
    Kind {
        categories: &["api-extensions"],
        status: false,
        namespaced: false,
        generation: true,
        unconditional_update: false,
        columns: columns::WEBHOOK_CONFIGURATION,
        cells: |object, now| {
            let count = print::items(object, &["webhooks"]).count();
            vec![object.name().into(), count.into(), print::age(object, now)]
        },
        on_create: |_| {},
        ..kind
    }
}

fn fill_defaults(object: &mut Object, mutating: bool) {
    for webhook in objects(&mut object.0, "webhooks") {
        fill(
            webhook,
            [
                ("failurePolicy", json!("Fail")),
                ("matchPolicy", json!("Equivalent")),
                ("namespaceSelector", json!({})),
                ("objectSelector", json!({})),
                ("timeoutSeconds", json!(10)),
            ],
        );
        if mutating {
            fill(webhook, [("reinvocationPolicy", json!("Never"))]);
        }
        if let Some(service) = map_in(webhook, &["clientConfig", "service"]) {
            fill(service, [("port", json!(443))]);
        }
        for rule in objects(webhook, "rules") {
            fill(rule, [("scope", json!("*"))]);
        }
    }
}

fn validate(new: &Object, mutating: bool) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (at, webhook) in rules::items(rules::get(new, &["webhooks"])) {
        let path = format!("webhooks[{at}]");
        let name = rules::text(webhook, "name");
        qualified_name(name, &format!("{path}.name"), &mut errors);
        if !name.is_empty() && !seen.insert(name) {
            errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
        }
        for (at, rule) in rules::items(&webhook["rules"]) {
            validate_rule(rule, &format!("{path}.rules[{at}]"), &mut errors);
        }
        let one_of = |field: &str, allowed: &[&str], errors: &mut Vec<FieldError>| {
            rules::one_of(rules::text(webhook, field), allowed, &format!("{path}.{field}"), errors);
        };
        one_of("failurePolicy", &["Fail", "Ignore"], &mut errors);
        one_of("matchPolicy", &["Equivalent", "Exact"], &mut errors);
        match webhook["sideEffects"].as_str() {
            None => errors.push(FieldError::required(
                format!("{path}.sideEffects"),
                "must specify one of None, NoneOnDryRun",
            )),
            Some(_) => one_of("sideEffects", &["None", "NoneOnDryRun"], &mut errors),
        }
        if mutating {
            one_of("reinvocationPolicy", &["IfNeeded", "Never"], &mut errors);
        }
        let seconds = webhook["timeoutSeconds"].as_i64().unwrap_or(0);
        if !TIMEOUT_SECONDS.contains(&seconds) {
            let detail = "the timeout value must be between 1 and 30 seconds";
            errors.push(FieldError::invalid(format!("{path}.timeoutSeconds"), seconds, detail));
        }
        for selector in ["namespaceSelector", "objectSelector"] {
            rules::label_selector(&webhook[selector], &format!("{path}.{selector}"), &mut errors);
        }
        client_config(&webhook["clientConfig"], &format!("{path}.clientConfig"), &mut errors);
        review_versions(&webhook["admissionReviewVersions"], &path, &mut errors);
        policies::webhook_conditions(webhook, &path, &mut errors);
    }
    errors
}

/// A fully qualified name of at least three segments (upstream's `IsFullyQualifiedName`).
fn qualified_name(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(path, ""));
    } else if let Err(why) = names::dns_subdomain(name) {
        errors.push(FieldError::invalid(path, format!("{name:?}"), why));
    } else if name.split('.').count() < 3 {
        let detail = "should be a domain with at least three segments separated by dots";
        errors.push(FieldError::invalid(path, format!("{name:?}"), detail));
    }
}

pub(super) fn validate_rule(rule: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for field in ["apiGroups", "apiVersions", "resources", "operations"] {
        let (path, list) = (format!("{path}.{field}"), &rule[field]);
        let texts: Vec<&str> = rules::items(list).filter_map(|(_, item)| item.as_str()).collect();
        if texts.is_empty() {
            errors.push(FieldError::required(path, ""));
        } else if texts.len() > 1 && texts.contains(&"*") && field != "resources" {
            let shown = list.to_string();
            errors.push(FieldError::invalid(path, shown, "if '*' is present, must not specify other values"));
        } else {
            for (at, text) in texts.iter().enumerate() {
                let path = format!("{path}[{at}]");
                match field {
                    "operations" => {
                        let known = ["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
                        rules::one_of(text, &known, &path, errors);
                    }
                    // The core group is the empty text.
                    "apiGroups" => {}
                    _ if text.is_empty() => errors.push(FieldError::required(path, "")),
                    _ => {}
                }
            }
        }
    }
    let scope = rules::text(rule, "scope");
    rules::one_of(scope, &["*", "Cluster", "Namespaced"], &format!("{path}.scope"), errors);
}

fn client_config(config: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let (url, service) = (&config["url"], &config["service"]);
    match (url.as_str(), service.is_null()) {
        (None, true) | (Some(_), false) => {
            errors.push(FieldError::required(path, "exactly one of url or service is required"));
        }
        (Some(text), true) => webhook_url(text, &format!("{path}.url"), errors),
        (None, false) => {
            for field in ["name", "namespace"] {
                if rules::text(service, field).is_empty() {
                    let detail = format!("service {field} is required");
                    errors.push(FieldError::required(format!("{path}.service.{field}"), detail));
                }
            }
            rules::port(&service["port"], &format!("{path}.service.port"), errors);
            if service["path"].as_str().is_some_and(|path| !path.starts_with('/')) {
                let shown = service["path"].to_string();
                let detail = "must start with a '/'";
                errors.push(FieldError::invalid(format!("{path}.service.path"), shown, detail));
            }
        }
    }
}

fn webhook_url(text: &str, path: &str, errors: &mut Vec<FieldError>) {
    const FORM: &str = "; desired format: https://host[/path]";
    let mut invalid = |value: &str, why: &str| {
        errors.push(FieldError::invalid(path, format!("{value:?}"), format!("{why}{FORM}")));
    };
    let Ok(url) = url::Url::parse(text) else {
        return errors.push(FieldError::required(path, format!("url must be a valid URL{FORM}")));
    };
    if url.scheme() != "https" {
        invalid(url.scheme(), "'https' is the only allowed URL scheme");
    }
    if url.host_str().is_none_or(str::is_empty) {
        invalid(url.host_str().unwrap_or(""), "host must be specified");
    }
    if !url.username().is_empty() || url.password().is_some() {
        invalid(url.username(), "user information is not permitted in the URL");
    }
    if let Some(fragment) = url.fragment() {
        invalid(fragment, "fragments are not permitted in the URL");
    }
    if let Some(query) = url.query() {
        invalid(query, "query parameters are not permitted in the URL");
    }
}

fn review_versions(versions: &Value, path: &str, errors: &mut Vec<FieldError>) {
    const DETAIL: &str = "must specify one of v1, v1beta1";
    let path = format!("{path}.admissionReviewVersions");
    let texts: Vec<&str> = rules::items(versions).filter_map(|(_, item)| item.as_str()).collect();
    if texts.is_empty() {
        errors.push(FieldError::required(path, DETAIL));
    } else if !texts.contains(&"v1") {
        // This server sends reviews of v1 only.
        let detail = "must include at least one of v1";
        errors.push(FieldError::invalid(path, versions.to_string(), detail));
    }
}
