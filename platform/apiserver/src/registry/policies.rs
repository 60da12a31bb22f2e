//! ValidatingAdmissionPolicies and their bindings. The rules are upstream's (`pkg/apis/admissionregistration`);
//! [`crate::admission`] evaluates them.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Map, Value, json};

use super::{
    AGE, Column, Kind, NAME,
    apps::selector_text,
    defaulting::{fill, map_in, objects},
    print, rules, webhooks,
};
use crate::{
    admission::{CONDITION_VARIABLES, admission_environment},
    expressions::CelExpression,
    meta,
    object::{Object, map_at},
};

/// The variables of a policy's expressions. Those of messages have all but the last, conditions all but `variables`.
const VARIABLES: [&str; 7] =
    ["object", "oldObject", "request", "params", "namespaceObject", "variables", "authorizer"];
const CONDITION_VARIABLES_OF_POLICIES: [&str; 6] =
    ["object", "oldObject", "request", "params", "namespaceObject", "authorizer"];
/// Reasons that a validation may give (upstream's `supportedValidationPolicyReason`).
const REASONS: [&str; 4] = ["Forbidden", "Invalid", "RequestEntityTooLarge", "Unauthorized"];
const CONDITIONS_MAX: usize = 64;

pub(super) fn kinds() -> Vec<Kind> {
    vec![policy(), binding()]
}

fn base(kind: Kind) -> Kind {
    Kind {
        categories: &["api-extensions"],
        namespaced: false,
        generation: true,
        unconditional_update: false,
        ..kind
    }
}

fn policy() -> Kind {
    Kind {
        columns: const {
            &[
                NAME,
                Column::integer(
                    "Validations",
                    "Validations indicates the number of validation rules defined in this configuration",
                ),
                Column::text(
                    "ParamKind",
                    "ParamKind specifies the kind of resources used to parameterize this policy",
                ),
                AGE,
            ]
        },
        cells: |object, now| {
            let kind = rules::get(object, &["spec", "paramKind"]);
            let kind = match kind.is_object() {
                true => format!("{}/{}", rules::text(kind, "apiVersion"), rules::text(kind, "kind")),
                false => "<unset>".to_owned(),
            };
            let count = print::items(object, &["spec", "validations"]).count();
            vec![object.name().into(), count.into(), kind.into(), print::age(object, now)]
        },
        defaults: |object| {
            let spec = object.map_mut("spec");
            fill(spec, [("failurePolicy", json!("Fail"))]);
            if let Some(constraints) = map_in(spec, &["matchConstraints"]) {
                match_defaults(constraints);
            }
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({}));
        },
        validate: |new, _| validate_policy(new),
        ..base(Kind::built_in::<ValidatingAdmissionPolicy>("validatingadmissionpolicy"))
    }
}

fn binding() -> Kind {
    Kind {
        status: false,
        columns: const {
            &[
                NAME,
                Column::text(
                    "PolicyName",
                    "PolicyName indicates the policy definition which the policy binding binded to",
                ),
                Column::text(
                    "ParamRef",
                    "ParamRef indicates the param resource which sets the configration param",
                ),
                AGE,
            ]
        },
        cells: |object, now| {
            let reference = rules::get(object, &["spec", "paramRef"]);
            let (namespace, name) = (rules::text(reference, "namespace"), rules::text(reference, "name"));
            let shown = match () {
                () if !reference.is_object() => "<unset>".to_owned(),
                () if name.is_empty() => selector_text(Some(&reference["selector"])),
                () if namespace.is_empty() => name.to_owned(),
                () => format!("{namespace}/{name}"),
            };
            let policy = object.str_at(&["spec", "policyName"]);
            vec![object.name().into(), policy.into(), shown.into(), print::age(object, now)]
        },
        defaults: |object| {
            if let Some(resources) = map_in(object.map_mut("spec"), &["matchResources"]) {
                match_defaults(resources);
            }
        },
        on_create: |_| {},
        validate: |new, _| validate_binding(new),
        ..base(Kind::built_in::<ValidatingAdmissionPolicyBinding>("validatingadmissionpolicybinding"))
    }
}

fn match_defaults(resources: &mut Map<String, Value>) {
    fill(resources, [("matchPolicy", json!("Equivalent"))]);
    for selector in ["namespaceSelector", "objectSelector"] {
        map_at(resources, selector);
    }
    for list in ["resourceRules", "excludeResourceRules"] {
        for rule in objects(resources, list) {
            fill(rule, [("scope", json!("*"))]);
        }
    }
}

fn validate_policy(new: &Object) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let policy = rules::text(spec, "failurePolicy");
    rules::one_of(policy, &["Fail", "Ignore"], "spec.failurePolicy", &mut errors);
    if spec["paramKind"].is_object() {
        parameter_kind(&spec["paramKind"], &mut errors);
    }
    match spec["matchConstraints"].is_object() {
        true => match_resources(&spec["matchConstraints"], "spec.matchConstraints", &mut errors),
        false => errors.push(FieldError::required("spec.matchConstraints", "")),
    }
    if spec["matchConstraints"].is_object()
        && rules::list_items(&spec["matchConstraints"]["resourceRules"]).next().is_none()
    {
        errors.push(FieldError::required("spec.matchConstraints.resourceRules", ""));
    }
    let variables = &CONDITION_VARIABLES_OF_POLICIES;
    conditions(&spec["matchConditions"], "spec.matchConditions", variables, &mut errors);
    let mut known = Vec::new();
    for (at, variable) in rules::items(&spec["variables"]) {
        let (path, name) = (format!("spec.variables[{at}]"), rules::text(variable, "name"));
        if name.is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), "name is not specified"));
        } else if !is_identifier(name) {
            let detail = "name is not a valid CEL identifier";
            errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), detail));
        }
        if known.contains(&name) {
            errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
        }
        known.push(name);
        expression(variable, "expression", &path, &VARIABLES, true, &mut errors);
    }
    let none = |field: &str| rules::list_items(&spec[field]).next().is_none();
    if none("validations") && none("auditAnnotations") {
        let detail = "validations or auditAnnotations must contain at least one item";
        errors.push(FieldError::required("spec.validations", detail));
        errors.push(FieldError::required("spec.auditAnnotations", detail));
    }
    for (at, validation) in rules::items(&spec["validations"]) {
        validation_errors(validation, &format!("spec.validations[{at}]"), &mut errors);
    }
    for (at, annotation) in rules::items(&spec["auditAnnotations"]) {
        let path = format!("spec.auditAnnotations[{at}]");
        meta::qualified_name_errors(rules::text(annotation, "key"), &format!("{path}.key"), &mut errors);
        expression(annotation, "valueExpression", &path, &VARIABLES, true, &mut errors);
    }
    errors
}

fn validation_errors(validation: &Value, path: &str, errors: &mut Vec<FieldError>) {
    expression(validation, "expression", path, &VARIABLES, true, errors);
    expression(validation, "messageExpression", path, &VARIABLES[..6], false, errors);
    let message = rules::text(validation, "message");
    if !message.is_empty() && message.trim().is_empty() {
        let detail = "message must be non-empty if specified";
        errors.push(FieldError::invalid(format!("{path}.message"), format!("{message:?}"), detail));
    } else if message.contains('\n') {
        let detail = "message must not contain line breaks";
        errors.push(FieldError::invalid(format!("{path}.message"), format!("{message:?}"), detail));
    }
    let reason = rules::text(validation, "reason");
    if !reason.is_empty() {
        rules::one_of(reason, &REASONS, &format!("{path}.reason"), errors);
    }
}

/// Checks that an expression compiles.
fn expression(
    owner: &Value,
    field: &str,
    path: &str,
    variables: &[&str],
    is_required: bool,
    errors: &mut Vec<FieldError>,
) {
    let (path, text) = (format!("{path}.{field}"), rules::text(owner, field));
    if text.trim().is_empty() {
        if is_required {
            errors.push(FieldError::required(path, format!("{field} is not specified")));
        }
        return;
    }
    if let Err(why) = CelExpression::compile_with(admission_environment(), text.trim(), variables) {
        let detail = format!("compilation failed: {why}");
        errors.push(FieldError::invalid(path, format!("{text:?}"), detail));
    }
}

/// `matchConditions`, also those of webhooks.
pub(super) fn conditions(list: &Value, path: &str, variables: &[&str], errors: &mut Vec<FieldError>) {
    let mut known = Vec::new();
    let count = rules::list_items(list).count();
    if count > CONDITIONS_MAX {
        let kind = mayfly_api::validation::FieldErrorKind::TooMany { count: count as u64 };
        let detail = format!("must have at most {CONDITIONS_MAX} items");
        errors.push(FieldError { path: path.into(), kind, detail });
    }
    for (at, condition) in rules::items(list) {
        let (path, name) = (format!("{path}[{at}]"), rules::text(condition, "name"));
        expression(condition, "expression", &path, variables, true, errors);
        if name.is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        } else {
            meta::qualified_name_errors(name, &format!("{path}.name"), errors);
        }
        if known.contains(&name) {
            errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
        }
        known.push(name);
    }
}

/// The conditions of a webhook.
pub(super) fn webhook_conditions(webhook: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let path = format!("{path}.matchConditions");
    conditions(&webhook["matchConditions"], &path, &CONDITION_VARIABLES, errors);
}

fn is_identifier(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn parameter_kind(kind: &Value, errors: &mut Vec<FieldError>) {
    let (version, name) = (rules::text(kind, "apiVersion"), rules::text(kind, "kind"));
    if version.is_empty() {
        errors.push(FieldError::required("spec.paramKind.apiVersion", ""));
    } else {
        let (group, version_name) = version.split_once('/').unwrap_or(("", version));
        if !group.is_empty()
            && let Err(why) = names::dns_subdomain(group)
        {
            errors.push(FieldError::invalid("spec.paramKind.apiVersion", format!("{group:?}"), why));
        }
        if let Err(why) = names::dns_1035_label(version_name) {
            errors.push(FieldError::invalid("spec.paramKind.apiVersion", format!("{version_name:?}"), why));
        }
    }
    if name.is_empty() {
        errors.push(FieldError::required("spec.paramKind.kind", ""));
    } else if let Err(why) = names::dns_1035_label(&name.to_lowercase()) {
        let detail = format!("may have mixed case, but should otherwise match: {why}");
        errors.push(FieldError::invalid("spec.paramKind.kind", format!("{name:?}"), detail));
    }
}

fn match_resources(resources: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let policy = rules::text(resources, "matchPolicy");
    rules::one_of(policy, &["Equivalent", "Exact"], &format!("{path}.matchPolicy"), errors);
    for selector in ["namespaceSelector", "objectSelector"] {
        rules::label_selector(&resources[selector], &format!("{path}.{selector}"), errors);
    }
    for list in ["resourceRules", "excludeResourceRules"] {
        for (at, rule) in rules::items(&resources[list]) {
            webhooks::validate_rule(rule, &format!("{path}.{list}[{at}]"), errors);
        }
    }
}

fn validate_binding(new: &Object) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let policy = rules::text(spec, "policyName");
    if policy.is_empty() {
        errors.push(FieldError::required("spec.policyName", ""));
    } else if let Err(why) = names::dns_subdomain(policy) {
        errors.push(FieldError::invalid("spec.policyName", format!("{policy:?}"), why));
    }
    if spec["paramRef"].is_object() {
        parameter_reference(&spec["paramRef"], &mut errors);
    }
    if spec["matchResources"].is_object() {
        match_resources(&spec["matchResources"], "spec.matchResources", &mut errors);
    }
    const ACTIONS: &str = "spec.validationActions";
    let actions: Vec<_> =
        rules::list_items(&spec["validationActions"]).map(|action| action.as_str().unwrap_or("")).collect();
    if actions.is_empty() {
        errors.push(FieldError::required(ACTIONS, "at least one validation action is required"));
    }
    for (at, action) in actions.iter().enumerate() {
        rules::one_of(action, &["Audit", "Deny", "Warn"], &format!("{ACTIONS}[{at}]"), &mut errors);
        if actions[..at].contains(action) {
            errors.push(rules::duplicate(format!("{ACTIONS}[{at}]"), format!("{action:?}")));
        }
    }
    if actions.contains(&"Deny") && actions.contains(&"Warn") {
        let detail = "must not contain both Deny and Warn (repeating the same validation failure information in the API \
                      response and headers serves no purpose)";
        errors.push(FieldError::invalid(ACTIONS, spec["validationActions"].to_string(), detail));
    }
    errors
}

fn parameter_reference(reference: &Value, errors: &mut Vec<FieldError>) {
    let name = rules::text(reference, "name");
    match (name.is_empty(), reference["selector"].is_null()) {
        (true, true) => {
            errors.push(FieldError::required("spec.paramRef", "one of name or selector must be specified"));
        }
        (false, false) => {
            let detail = "name and selector are mutually exclusive";
            errors.push(FieldError::forbidden("spec.paramRef.name", detail));
        }
        (false, true) => {
            if let Err(why) = names::dns_subdomain(name) {
                errors.push(FieldError::invalid("spec.paramRef.name", format!("{name:?}"), why));
            }
        }
        (true, false) => {
            rules::label_selector(&reference["selector"], "spec.paramRef.selector", errors);
        }
    }
    const ACTION: &str = "spec.paramRef.parameterNotFoundAction";
    match rules::text(reference, "parameterNotFoundAction") {
        "" => errors.push(FieldError::required(ACTION, "")),
        action => rules::one_of(action, &["Allow", "Deny"], ACTION, errors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(errors: Vec<FieldError>) -> Vec<String> {
        errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    fn changed(good: &Value, change: Value) -> Object {
        let mut spec = good.clone();
        json_patch::merge(&mut spec, &change);
        let object = json!({"metadata": {"name": "p"}, "spec": spec});
        Object(object.as_object().unwrap().clone())
    }

    #[test]
    fn policies_are_refused_for_what_cannot_work() {
        let rule = json!({"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE"],
            "resources": ["deployments"]});
        let good = json!({"matchConstraints": {"resourceRules": [rule]},
            "variables": [{"name": "most", "expression": "5"}],
            "validations": [{"expression": "object.spec.replicas <= variables.most"}]});
        let errors = |change: Value| {
            let mut object = changed(&good, change);
            (policy().defaults)(&mut object);
            told(validate_policy(&object))
        };
        assert_eq!(errors(json!({})), Vec::<String>::new());
        for (change, expected) in [
            (json!({"matchConstraints": null}), "spec.matchConstraints: Required value"),
            (
                json!({"validations": [{"expression": ""}]}),
                "spec.validations[0].expression: Required value: expression is not specified",
            ),
            (
                json!({"validations": [{"expression": "self.x"}]}),
                "spec.validations[0].expression: Invalid value: \"self.x\": compilation failed: undeclared reference to \
                 'self' (in container '')",
            ),
            (
                json!({"validations": [{"expression": "true", "reason": "Odd"}]}),
                "spec.validations[0].reason: Unsupported value: \"Odd\": supported values: \"Forbidden\", \"Invalid\", \
                 \"RequestEntityTooLarge\", \"Unauthorized\"",
            ),
            (
                json!({"variables": [{"name": "1st", "expression": "1"}]}),
                "spec.variables[0].name: Invalid value: \"1st\": name is not a valid CEL identifier",
            ),
            (
                json!({"failurePolicy": "Maybe"}),
                "spec.failurePolicy: Unsupported value: \"Maybe\": supported values: \"Fail\", \"Ignore\"",
            ),
            (json!({"paramKind": {"apiVersion": "v1"}}), "spec.paramKind.kind: Required value"),
            (
                json!({"matchConditions": [{"name": "n", "expression": "variables.most > 1"}]}),
                "spec.matchConditions[0].expression: Invalid value: \"variables.most > 1\": compilation failed: \
                 undeclared reference to 'variables' (in container '')",
            ),
        ] {
            assert_eq!(errors(change), [expected]);
        }
    }

    #[test]
    fn bindings_name_a_policy_and_actions() {
        let good = json!({"policyName": "p", "validationActions": ["Deny"]});
        let errors = |change: Value| told(validate_binding(&changed(&good, change)));
        assert_eq!(errors(json!({})), Vec::<String>::new());
        for (change, expected) in [
            (json!({"policyName": null}), "spec.policyName: Required value"),
            (
                json!({"validationActions": []}),
                "spec.validationActions: Required value: at least one validation action is required",
            ),
            (
                json!({"validationActions": ["Audit", "Audit"]}),
                "spec.validationActions[1]: Duplicate value: \"Audit\"",
            ),
            (json!({"paramRef": {"name": "x"}}), "spec.paramRef.parameterNotFoundAction: Required value"),
            (
                json!({"paramRef": {"parameterNotFoundAction": "Deny"}}),
                "spec.paramRef: Required value: one of name or selector must be specified",
            ),
        ] {
            assert_eq!(errors(change), [expected]);
        }
        assert!(errors(json!({"validationActions": ["Deny", "Warn"]}))[0].contains("must not contain both"));
    }
}
