//! ServiceAccounts, and roles with their bindings. The rules are upstream's (`pkg/apis/rbac/validation`,
//! `pkg/registry/rbac`); [`crate::rbac`] evaluates them.

use k8s_openapi::api::{
    core::v1::ServiceAccount,
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use mayfly_api::validation::FieldError;
use serde_json::{Value, json};

use super::{
    Kind, Subresource, columns,
    defaulting::{fill, map_in, objects, text},
    print, rules,
};
use crate::object::Object;

const RBAC_GROUP: &str = "rbac.authorization.k8s.io";

pub(super) fn kinds() -> Vec<Kind> {
    vec![service_account(), role_binding(), role(), cluster_role_binding(), cluster_role()]
}

fn service_account() -> Kind {
    Kind {
        short_names: &["sa"],
        subresources: &[Subresource::Token],
        status: false,
        columns: columns::SERVICE_ACCOUNT,
        cells: |object, now| {
            let secrets = print::items(object, &["secrets"]).count();
            vec![object.name().into(), secrets.into(), print::age(object, now)]
        },
        on_create: |_| {},
        ..Kind::built_in::<ServiceAccount>("serviceaccount")
    }
}

/// Names of roles may have colons (`system:node`): they need only be valid path segments.
pub(super) fn path_segment_name(name: &str) -> Result<(), String> {
    match name {
        "." | ".." => Err(format!("may not be '{name}'")),
        _ if name.contains('/') => Err("may not contain '/'".into()),
        _ if name.contains('%') => Err("may not contain '%'".into()),
        _ => Ok(()),
    }
}

fn role() -> Kind {
    Kind {
        status: false,
        columns: columns::ROLE,
        cells: role_cells,
        on_create: |_| {},
        validate: |new, _| {
            let mut errors = Vec::new();
            role_rules(new, true, &mut errors);
            errors
        },
        valid_name: path_segment_name,
        create_on_update: true,
        ..Kind::built_in::<Role>("role")
    }
}

fn cluster_role() -> Kind {
    Kind {
        status: false,
        namespaced: false,
        columns: columns::CLUSTER_ROLE,
        cells: role_cells,
        on_create: |_| {},
        validate: |new, _| {
            let mut errors = Vec::new();
            role_rules(new, false, &mut errors);
            let selectors = rules::get(new, &["aggregationRule", "clusterRoleSelectors"]);
            if new.0.contains_key("aggregationRule") {
                if selectors.as_array().is_none_or(Vec::is_empty) {
                    let detail = "at least one clusterRoleSelector required if aggregationRule is non-nil";
                    errors.push(FieldError::required("aggregationRule.clusterRoleSelectors", detail));
                }
                for (at, selector) in rules::items(selectors) {
                    let path = format!("aggregationRule.clusterRoleSelectors[{at}]");
                    rules::label_selector(selector, &path, &mut errors);
                }
            }
            errors
        },
        valid_name: path_segment_name,
        create_on_update: true,
        ..Kind::built_in::<ClusterRole>("clusterrole")
    }
}

fn role_cells(object: &Object, _: jiff::Timestamp) -> Vec<Value> {
    vec![object.name().into(), object.meta_str("creationTimestamp").into()]
}

fn role_rules(new: &Object, namespaced: bool, errors: &mut Vec<FieldError>) {
    for (at, rule) in rules::items(rules::get(new, &["rules"])) {
        let path = format!("rules[{at}]");
        let none = |field: &str| rule[field].as_array().is_none_or(Vec::is_empty);
        if none("verbs") {
            errors
                .push(FieldError::required(format!("{path}.verbs"), "verbs must contain at least one value"));
        }
        if !none("nonResourceURLs") {
            if namespaced {
                let detail = "namespaced rules cannot apply to non-resource URLs";
                errors.push(FieldError::invalid(
                    format!("{path}.nonResourceURLs"),
                    go_strings(&rule["nonResourceURLs"]),
                    detail,
                ));
            }
            if !none("apiGroups") || !none("resources") || !none("resourceNames") {
                let detail = "rules cannot apply to both regular resources and non-resource URLs";
                errors.push(FieldError::invalid(
                    format!("{path}.nonResourceURLs"),
                    go_strings(&rule["nonResourceURLs"]),
                    detail,
                ));
            }
            continue;
        }
        if none("apiGroups") {
            let detail = "resource rules must supply at least one api group";
            errors.push(FieldError::required(format!("{path}.apiGroups"), detail));
        }
        if none("resources") {
            let detail = "resource rules must supply at least one resource";
            errors.push(FieldError::required(format!("{path}.resources"), detail));
        }
    }
}

/// A list of texts as Go prints it in field errors.
fn go_strings(list: &Value) -> String {
    let texts: Vec<_> = rules::items(list).map(|(_, text)| text.to_string()).collect();
    format!("[]string{{{}}}", texts.join(", "))
}

fn binding_cells(object: &Object, now: jiff::Timestamp) -> Vec<Value> {
    let subjects = |kind: &str| -> Value {
        let found = print::items(object, &["subjects"]).filter(|subject| subject["kind"] == kind);
        let names = found.map(|subject| match (kind, rules::text(subject, "namespace")) {
            ("ServiceAccount", namespace) => format!("{namespace}/{}", rules::text(subject, "name")),
            _ => rules::text(subject, "name").to_owned(),
        });
        names.collect::<Vec<_>>().join(", ").into()
    };
    let role = rules::get(object, &["roleRef"]);
    vec![
        object.name().into(),
        format!("{}/{}", rules::text(role, "kind"), rules::text(role, "name")).into(),
        print::age(object, now),
        subjects("User"),
        subjects("Group"),
        subjects("ServiceAccount"),
    ]
}

fn binding_defaults(object: &mut Object) {
    if let Some(role) = map_in(&mut object.0, &["roleRef"])
        && text(role, "apiGroup").is_empty()
    {
        role.insert("apiGroup".into(), json!(RBAC_GROUP));
    }
    for subject in objects(&mut object.0, "subjects") {
        if matches!(text(subject, "kind"), "User" | "Group") {
            fill(subject, [("apiGroup", json!(RBAC_GROUP))]);
        }
    }
}

fn validate_binding(new: &Object, old: Option<&Object>, roles: &[&str]) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let role = rules::get(new, &["roleRef"]);
    if rules::text(role, "apiGroup") != RBAC_GROUP {
        errors.push(rules::not_supported("roleRef.apiGroup", rules::text(role, "apiGroup"), &[RBAC_GROUP]));
    }
    rules::one_of(rules::text(role, "kind"), roles, "roleRef.kind", &mut errors);
    let name = rules::text(role, "name");
    if name.is_empty() {
        errors.push(FieldError::required("roleRef.name", ""));
    } else if let Err(why) = path_segment_name(name) {
        errors.push(FieldError::invalid("roleRef.name", format!("{name:?}"), why));
    }
    for (at, subject) in rules::items(rules::get(new, &["subjects"])) {
        subject_errors(subject, &format!("subjects[{at}]"), roles.len() > 1, &mut errors);
    }
    if let Some(old) = old
        && old.at(&["roleRef"]) != new.at(&["roleRef"])
    {
        let shown = format!(
            "rbac.RoleRef{{APIGroup:{:?}, Kind:{:?}, Name:{:?}}}",
            rules::text(role, "apiGroup"),
            rules::text(role, "kind"),
            name
        );
        errors.push(FieldError::invalid("roleRef", shown, "cannot change roleRef"));
    }
    errors
}

fn subject_errors(subject: &Value, path: &str, namespaced: bool, errors: &mut Vec<FieldError>) {
    let (name, group) = (rules::text(subject, "name"), rules::text(subject, "apiGroup"));
    if name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    }
    match rules::text(subject, "kind") {
        "ServiceAccount" => {
            if !name.is_empty()
                && let Err(why) = mayfly_api::names::dns_subdomain(name)
            {
                errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), why));
            }
            if !group.is_empty() {
                errors.push(rules::not_supported(format!("{path}.apiGroup"), group, &[""]));
            }
            if !namespaced && rules::text(subject, "namespace").is_empty() {
                errors.push(FieldError::required(format!("{path}.namespace"), ""));
            }
        }
        "User" | "Group" => {
            if group != RBAC_GROUP {
                errors.push(rules::not_supported(format!("{path}.apiGroup"), group, &[RBAC_GROUP]));
            }
        }
        other => {
            let kinds = ["ServiceAccount", "User", "Group"];
            errors.push(rules::not_supported(format!("{path}.kind"), other, &kinds));
        }
    }
}

fn role_binding() -> Kind {
    Kind {
        status: false,
        columns: columns::ROLE_BINDING,
        cells: binding_cells,
        on_create: |_| {},
        defaults: binding_defaults,
        validate: |new, old| validate_binding(new, old, &["Role", "ClusterRole"]),
        valid_name: path_segment_name,
        create_on_update: true,
        ..Kind::built_in::<RoleBinding>("rolebinding")
    }
}

fn cluster_role_binding() -> Kind {
    Kind {
        status: false,
        namespaced: false,
        columns: columns::CLUSTER_ROLE_BINDING,
        cells: binding_cells,
        on_create: |_| {},
        defaults: binding_defaults,
        validate: |new, old| validate_binding(new, old, &["ClusterRole"]),
        valid_name: path_segment_name,
        create_on_update: true,
        ..Kind::built_in::<ClusterRoleBinding>("clusterrolebinding")
    }
}
