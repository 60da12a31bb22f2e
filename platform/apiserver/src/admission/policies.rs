//! ValidatingAdmissionPolicies: rules in CEL that refuse writes, or warn of them. (Source: upstream
//! `apiserver/pkg/admission/plugin/policy/validating`.)
//!
//! A policy says which writes it concerns and what has to hold of them; a binding puts it into effect, perhaps for a
//! part of these writes and with an object of parameters. Policies see a write after all changes by webhooks, so that
//! they cannot be evaded.

use std::{collections::HashMap, sync::Arc};

use cel::{Context, Value as CelValue};
use mayfly_store::{ListOptions, Range};
use serde_json::Value;

use super::{
    AdmissionAttributes,
    matching::{AdmissionExpression, AdmissionValues, MatchConditions, MatchResources, MatchedWrite},
};
use crate::{
    object::Object,
    registry::{Kind, rules_items as items, rules_selects as selects},
    server::ServerState,
    status::ApiError,
    verbs::key,
};

/// A policy with its bindings.
#[derive(Debug)]
pub(super) struct AdmissionPolicy {
    name: String,
    ignores_failures: bool,
    constraints: MatchResources,
    conditions: MatchConditions,
    /// In definition order: a variable can refer to earlier ones.
    variables: Vec<(String, AdmissionExpression)>,
    validations: Vec<PolicyValidation>,
    /// The version and kind of the parameters.
    parameters: Option<(String, String)>,
    bindings: Vec<PolicyBinding>,
}

#[derive(Debug)]
struct PolicyValidation {
    expression: AdmissionExpression,
    message: String,
    message_expression: Option<AdmissionExpression>,
    reason: String,
}

#[derive(Debug)]
struct PolicyBinding {
    name: String,
    resources: MatchResources,
    reference: Value,
    denies: bool,
    warns: bool,
}

/// A validation that does not hold, or that cannot be evaluated.
struct PolicyFailure {
    message: String,
    /// Empty: upstream's default.
    reason: String,
}

impl PolicyFailure {
    fn of(message: impl Into<String>) -> Self {
        Self { message: message.into(), reason: String::new() }
    }
}

impl AdmissionPolicy {
    /// The policies that have bindings, in the order of their names.
    pub(super) fn all(mut policies: Vec<Object>, bindings: &[Object]) -> Vec<Self> {
        policies.sort_by(|left, right| left.name().cmp(right.name()));
        let mut all: Vec<_> = policies.iter().map(|policy| Self::parse(policy, bindings)).collect();
        all.retain(|policy| !policy.bindings.is_empty());
        all
    }

    fn parse(policy: &Object, bindings: &[Object]) -> Self {
        let spec = policy.at(&["spec"]).unwrap_or(&Value::Null);
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        let kind = &spec["paramKind"];
        let mut own: Vec<_> = bindings
            .iter()
            .filter(|binding| binding.str_at(&["spec", "policyName"]) == policy.name())
            .map(PolicyBinding::parse)
            .collect();
        own.sort_by(|left, right| left.name.cmp(&right.name));
        Self {
            name: policy.name().to_owned(),
            ignores_failures: spec["failurePolicy"] == "Ignore",
            constraints: MatchResources::of_policy(&spec["matchConstraints"]),
            conditions: MatchConditions::parse(&spec["matchConditions"]),
            variables: items(&spec["variables"])
                .map(|variable| {
                    let expression = variable["expression"].as_str().unwrap_or("");
                    (text(&variable["name"]), AdmissionExpression::parse(expression))
                })
                .collect(),
            validations: items(&spec["validations"]).map(PolicyValidation::parse).collect(),
            parameters: kind.is_object().then(|| (text(&kind["apiVersion"]), text(&kind["kind"]))),
            bindings: own,
        }
    }

    /// The failures of a write, with one parameter object.
    fn failures(&self, values: &AdmissionValues) -> Vec<PolicyFailure> {
        let mut context = values.context();
        match self.conditions.hold(values, &context) {
            Ok(true) => {}
            Ok(false) => return Vec::new(),
            Err(why) => return self.failure_of_evaluation(why),
        }
        let broken = self.bind_variables(values, &mut context);
        let mut failures = Vec::new();
        for validation in &self.validations {
            match validation.expression.evaluate(values, &context) {
                Ok(CelValue::Bool(true)) => {}
                Ok(_) => failures.push(PolicyFailure {
                    message: validation.failure_message(values, &context),
                    reason: validation.reason.clone(),
                }),
                Err(why) => {
                    // The value that is missing may be that of a variable that could not be computed.
                    let missing =
                        broken.iter().find(|(name, _)| why.ends_with(&format!("no such key: {name}")));
                    let why = missing.map_or(why, |(name, error)| {
                        format!(
                            "expression '{}' resulted in error: composited variable {name:?} fails to evaluate: {error}",
                            validation.expression.text
                        )
                    });
                    failures.extend(self.failure_of_evaluation(why));
                }
            }
        }
        failures
    }

    fn failure_of_evaluation(&self, why: String) -> Vec<PolicyFailure> {
        if self.ignores_failures { Vec::new() } else { vec![PolicyFailure::of(why)] }
    }

    /// Binds `variables`. Returns those that could not be computed.
    fn bind_variables(
        &self,
        values: &AdmissionValues,
        context: &mut Context<'static, 'static>,
    ) -> Vec<(String, String)> {
        let (mut known, mut broken) = (HashMap::new(), Vec::new());
        if self.variables.is_empty() {
            return broken;
        }
        context.add_variable_from_value("variables", HashMap::<String, CelValue>::new());
        for (name, expression) in &self.variables {
            match expression.evaluate(values, context) {
                Ok(value) => {
                    known.insert(name.clone(), value);
                    context.add_variable_from_value("variables", known.clone());
                }
                Err(why) => broken.push((name.clone(), why)),
            }
        }
        broken
    }
}

impl PolicyValidation {
    fn parse(validation: &Value) -> Self {
        let text = |field: &str| validation[field].as_str().unwrap_or("").trim().to_owned();
        let message_expression = text("messageExpression");
        Self {
            expression: AdmissionExpression::parse(&text("expression")),
            message: text("message"),
            message_expression: (!message_expression.is_empty())
                .then(|| AdmissionExpression::parse(&message_expression)),
            reason: text("reason"),
        }
    }

    /// The message of a validation that does not hold.
    fn failure_message(&self, values: &AdmissionValues, context: &Context<'_, '_>) -> String {
        let message = self.message_expression.as_ref().map(|message| message.evaluate(values, context));
        if let Some(Ok(CelValue::String(message))) = message
            && !message.trim().is_empty()
            && !message.contains('\n')
        {
            return message.trim().to_owned();
        }
        match self.message.as_str() {
            "" => format!("failed expression: {}", self.expression.text),
            message => message.to_owned(),
        }
    }
}

impl PolicyBinding {
    fn parse(binding: &Object) -> Self {
        let spec = binding.at(&["spec"]).unwrap_or(&Value::Null);
        let acts = |wanted: &str| items(&spec["validationActions"]).any(|action| action == wanted);
        Self {
            name: binding.name().to_owned(),
            resources: MatchResources::of_policy(&spec["matchResources"]),
            reference: spec["paramRef"].clone(),
            denies: acts("Deny"),
            warns: acts("Warn"),
        }
    }
}

impl ServerState {
    /// Checks a write against the policies. Returns the warnings; the first refusal is the error.
    pub(crate) fn check_policies(
        &self,
        attributes: &AdmissionAttributes<'_>,
        new: Option<&Object>,
        old: Option<&Object>,
    ) -> Result<Vec<String>, ApiError> {
        let mut warnings = Vec::new();
        let registered = self.webhooks.policies(attributes.request.kind);
        if registered.is_empty() {
            return Ok(warnings);
        }
        let namespace = self.labels_of_namespace(attributes.request, new.or(old));
        let write = MatchedWrite {
            kind: attributes.request.kind,
            subresource: attributes.subresource,
            operation: attributes.operation,
            namespace: namespace.as_ref(),
            objects: [new, old],
        };
        for policy in registered.iter().filter(|policy| policy.constraints.concerns(&write)) {
            for binding in policy.bindings.iter().filter(|binding| binding.resources.restricts_to(&write)) {
                for failure in self.policy_failures(policy, binding, attributes, [new, old]) {
                    let (name, by, message) = (&policy.name, &binding.name, &failure.message);
                    if binding.warns {
                        warnings.push(format!(
                            "Validation failed for ValidatingAdmissionPolicy '{name}' with binding '{by}': {message}"
                        ));
                    }
                    if binding.denies {
                        let why = format!(
                            "ValidatingAdmissionPolicy '{name}' with binding '{by}' denied request: {message}"
                        );
                        let kind = attributes.request.kind;
                        let object = new.or(old).map_or("", Object::name);
                        return Err(ApiError::policy_denied(kind, object, &why, &failure.reason));
                    }
                }
            }
        }
        Ok(warnings)
    }

    fn policy_failures(
        &self,
        policy: &AdmissionPolicy,
        binding: &PolicyBinding,
        attributes: &AdmissionAttributes<'_>,
        objects: [Option<&Object>; 2],
    ) -> Vec<PolicyFailure> {
        let parameters = match self.parameters(policy, binding, &attributes.request.namespace) {
            Ok(parameters) => parameters,
            Err(_) if policy.ignores_failures => return Vec::new(),
            Err(why) => return vec![PolicyFailure::of(why)],
        };
        let mut failures = Vec::new();
        for parameter in parameters {
            let mut values = AdmissionValues::of(self, attributes, objects);
            values.add("params", &parameter);
            let namespace = match attributes.request.kind.namespaced {
                true => self.object("", "namespaces", "", &attributes.request.namespace),
                false => None,
            };
            values.add("namespaceObject", &namespace.map_or(Value::Null, |object| Value::Object(object.0)));
            failures.extend(policy.failures(&values));
        }
        failures
    }

    /// The parameter objects that a binding selects, each of which is evaluated; null if there is no kind of
    /// parameters.
    fn parameters(
        &self,
        policy: &AdmissionPolicy,
        binding: &PolicyBinding,
        namespace: &str,
    ) -> Result<Vec<Value>, String> {
        let reference = &binding.reference;
        let Some((version, kind_name)) = policy.parameters.as_ref().filter(|_| reference.is_object()) else {
            return Ok(vec![Value::Null]);
        };
        let served = self.custom.served();
        let kind = served
            .kinds()
            .find(|kind| kind.api_version() == *version && kind.kind == kind_name.as_str())
            .ok_or_else(|| {
                format!("failed to configure policy: failed to find resource referenced by paramKind: '{version}, Kind={kind_name}'")
            })?;
        let of_reference = reference["namespace"].as_str().unwrap_or("");
        let namespace = match (kind.namespaced, of_reference) {
            (false, _) => "",
            (true, "") => namespace,
            (true, named) => named,
        };
        if kind.namespaced && namespace.is_empty() {
            return Err(
                "failed to configure binding: cannot use namespaced paramRef in policy binding that matches \
                        cluster-scoped resources"
                    .into(),
            );
        }
        let found = self.referenced(kind, namespace, reference);
        match (found.is_empty(), reference["parameterNotFoundAction"].as_str()) {
            (false, _) => Ok(found),
            (true, Some("Allow")) => Ok(Vec::new()),
            (true, _) => Err("failed to configure binding: no params found for policy binding with `Deny` \
                              parameterNotFoundAction"
                .into()),
        }
    }

    fn referenced(&self, kind: &'static Kind, namespace: &str, reference: &Value) -> Vec<Value> {
        let decoded = |entry: &mayfly_store::Entry| kind.decode(entry).ok();
        if let Some(name) = reference["name"].as_str().filter(|name| !name.is_empty()) {
            let entry = self.store.get(&key(kind, namespace, name));
            let object = entry.and_then(|entry| decoded(&entry));
            return object.map(|object| Value::Object(object.0)).into_iter().collect();
        }
        let resource = key(kind, namespace, "").resource;
        let range = match namespace {
            "" => Range::resource(resource),
            namespace => Range::namespace(resource, namespace),
        };
        let entries = self.store.list(&range, &ListOptions::default()).map(|list| list.entries);
        let objects = entries.unwrap_or_default();
        let objects = objects.iter().filter_map(|entry| decoded(entry));
        let selector = &reference["selector"];
        let is_selected = |object: &Object| {
            let labels = object.at(&["metadata", "labels"]).cloned().unwrap_or(Value::Null);
            crate::registry::rules_is_empty_selector(selector) || selects(selector, &labels)
        };
        objects.filter(is_selected).map(|object| Value::Object(object.0)).collect()
    }
}

/// A snapshot of the policies.
pub(super) type RegisteredPolicies = Arc<Vec<AdmissionPolicy>>;
