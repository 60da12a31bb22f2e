//! The writes that a webhook or a policy concerns: rules, selectors, and conditions in CEL. (Source: upstream
//! `apiserver/pkg/admission/plugin/{webhook/predicates,policy/matching,cel}`.)

use std::sync::{Arc, LazyLock};

use cel::{Context, Env, Value as CelValue};
use serde_json::Value;

use super::{AdmissionAttributes, AdmissionOperation};
use crate::{
    expressions::{CelExpression, RequestResource, converted, environment, longest_text, nodes, reason},
    object::Object,
    registry::{Kind, rules_items as items},
    server::ServerState,
    verbs::WriteRequest,
};

/// The variables of conditions.
pub(crate) const CONDITION_VARIABLES: [&str; 4] = ["object", "oldObject", "request", "authorizer"];
/// Steps of one expression's evaluation, as estimated before it: about a second.
const COST_MAX: u64 = 5_000_000;

static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(environment()));

/// The environment of the expressions of admission.
pub(crate) fn admission_environment() -> &'static Arc<Env> {
    &ENVIRONMENT
}

/// A write that rules and selectors are matched against.
#[derive(Clone, Copy)]
pub(super) struct MatchedWrite<'a> {
    pub(super) kind: &'a Kind,
    pub(super) subresource: &'a str,
    pub(super) operation: AdmissionOperation,
    /// The labels of the object's namespace; `None` for a cluster-scoped object.
    pub(super) namespace: Option<&'a Value>,
    /// The new and the old object; one that is selected is enough.
    pub(super) objects: [Option<&'a Object>; 2],
}

/// Rules and selectors.
#[derive(Debug, Default)]
pub(super) struct MatchResources {
    rules: Vec<Value>,
    excluded: Vec<Value>,
    namespace_selector: Value,
    object_selector: Value,
}

impl MatchResources {
    /// The rules and selectors of a webhook.
    pub(super) fn of_webhook(webhook: &Value) -> Self {
        Self::parse(webhook, "rules")
    }

    /// The `matchConstraints` of a policy, or the `matchResources` of a binding.
    pub(super) fn of_policy(constraints: &Value) -> Self {
        let excluded = items(&constraints["excludeResourceRules"]).cloned().collect();
        Self { excluded, ..Self::parse(constraints, "resourceRules") }
    }

    fn parse(value: &Value, rules: &str) -> Self {
        Self {
            rules: items(&value[rules]).cloned().collect(),
            excluded: Vec::new(),
            namespace_selector: value["namespaceSelector"].clone(),
            object_selector: value["objectSelector"].clone(),
        }
    }

    /// Whether a write is selected, and one of the rules names it.
    pub(super) fn concerns(&self, write: &MatchedWrite<'_>) -> bool {
        self.rules.iter().any(|rule| rule_matches(rule, write)) && self.selects(write)
    }

    /// [`Self::concerns`] for a binding, whose empty rules match everything.
    pub(super) fn restricts_to(&self, write: &MatchedWrite<'_>) -> bool {
        (self.rules.is_empty() || self.rules.iter().any(|rule| rule_matches(rule, write)))
            && self.selects(write)
    }

    fn selects(&self, write: &MatchedWrite<'_>) -> bool {
        let labels = |object: &Object| object.at(&["metadata", "labels"]).cloned().unwrap_or(Value::Null);
        !self.excluded.iter().any(|rule| rule_matches(rule, write))
            && write.namespace.is_none_or(|labels| selects(&self.namespace_selector, labels))
            && write
                .objects
                .into_iter()
                .flatten()
                .any(|object| selects(&self.object_selector, &labels(object)))
    }
}

/// Whether a selector selects these labels; one that is absent or empty selects everything.
fn selects(selector: &Value, labels: &Value) -> bool {
    crate::registry::rules_is_empty_selector(selector) || crate::registry::rules_selects(selector, labels)
}

fn rule_matches(rule: &Value, write: &MatchedWrite<'_>) -> bool {
    let MatchedWrite { kind, subresource, operation, .. } = *write;
    let has = |field: &str, wanted: &str| {
        items(&rule[field]).filter_map(Value::as_str).any(|item| item == "*" || item == wanted)
    };
    let scope = match rule["scope"].as_str() {
        Some("Namespaced") => kind.namespaced,
        Some("Cluster") => !kind.namespaced,
        _ => true,
    };
    // `pods` is the resource alone, `pods/*` also its subresources.
    let resource = items(&rule["resources"]).filter_map(Value::as_str).any(|item| {
        let (plural, sub) = item.split_once('/').unwrap_or((item, ""));
        (plural == "*" || plural == kind.plural) && (sub == "*" || sub == subresource)
    });
    let mut names = items(&rule["resourceNames"]).filter_map(Value::as_str).peekable();
    let name = write.objects.into_iter().flatten().next().map_or("", Object::name);
    scope
        && resource
        && (names.peek().is_none() || names.any(|item| item == name))
        && has("operations", operation.name())
        && has("apiGroups", kind.group)
        && has("apiVersions", kind.version)
}

/// The values of an expression's variables.
pub(super) struct AdmissionValues {
    values: Vec<(&'static str, CelValue)>,
    size: u64,
    longest_text: u64,
}

impl AdmissionValues {
    /// The object, the old object and the request of a write, and the authorizer of its user.
    pub(super) fn of(
        server: &ServerState,
        attributes: &AdmissionAttributes<'_>,
        objects: [Option<&Object>; 2],
    ) -> Self {
        let request = attributes.request_value(objects);
        let WriteRequest { kind, namespace, user, .. } = attributes.request;
        let name = objects.into_iter().flatten().next().map_or("", Object::name);
        let resource = RequestResource {
            group: kind.group,
            resource: kind.plural,
            subresource: attributes.subresource,
            // The namespace of a request for a namespace is that one.
            namespace: match kind.plural {
                "namespaces" => name,
                _ => namespace,
            },
            name,
        };
        let [new, old] =
            objects.map(|object| object.map_or(Value::Null, |object| Value::Object(object.0.clone())));
        let mut values = Self { values: Vec::new(), size: 0, longest_text: 0 };
        for (name, value) in [("object", new), ("oldObject", old), ("request", request)] {
            values.add(name, &value);
        }
        values.values.extend(server.authorizer(user).variables(resource));
        values
    }

    pub(super) fn add(&mut self, name: &'static str, value: &Value) {
        self.size += nodes(value);
        self.longest_text = self.longest_text.max(longest_text(value));
        self.values.push((name, converted(&Value::Null, value)));
    }

    pub(super) fn context(&self) -> Context<'static, 'static> {
        let mut context = Context::with_env(Arc::clone(&ENVIRONMENT));
        for (name, value) in &self.values {
            context.add_variable_from_value(*name, value.clone());
        }
        context
    }
}

/// An expression with its text, for messages.
pub(super) struct AdmissionExpression {
    pub(super) text: String,
    compiled: Result<CelExpression, String>,
}

impl std::fmt::Debug for AdmissionExpression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl AdmissionExpression {
    pub(super) fn parse(text: &str) -> Self {
        let text = text.trim().to_owned();
        let compiled = CelExpression::compile(&ENVIRONMENT, &text);
        Self { text, compiled }
    }

    /// The value, or the reason why there is none, in upstream's words.
    pub(super) fn evaluate(
        &self,
        values: &AdmissionValues,
        context: &Context<'_, '_>,
    ) -> Result<CelValue, String> {
        let failed = |why: String| format!("expression '{}' resulted in error: {why}", self.text);
        let expression = match &self.compiled {
            Ok(expression) => expression,
            Err(why) => return Err(failed(format!("compilation failed: {why}"))),
        };
        if expression.cost(values.size, values.longest_text) > COST_MAX {
            return Err(failed("operation cancelled: actual cost limit exceeded".into()));
        }
        expression.evaluate(context).map_err(|error| failed(reason(&error)))
    }
}

/// `matchConditions`: all of them have to hold.
#[derive(Debug, Default)]
pub(super) struct MatchConditions(Vec<AdmissionExpression>);

impl MatchConditions {
    pub(super) fn parse(list: &Value) -> Self {
        let texts = items(list).map(|condition| condition["expression"].as_str().unwrap_or(""));
        Self(texts.map(AdmissionExpression::parse).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all conditions hold. A condition that is false takes precedence over one that cannot be evaluated.
    pub(super) fn hold(&self, values: &AdmissionValues, context: &Context<'_, '_>) -> Result<bool, String> {
        let mut failure = None;
        for condition in &self.0 {
            match condition.evaluate(values, context) {
                Ok(CelValue::Bool(true)) => {}
                Ok(_) => return Ok(false),
                Err(why) => _ = failure.get_or_insert(why),
            }
        }
        failure.map_or(Ok(true), Err)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_match_by_operation_group_version_resource_and_scope() {
        let pods = crate::registry::registry().find("", "v1", "pods").unwrap();
        let matches = |operations: &[&str], groups: &[&str], resources: &[&str], subresource: &str| {
            let rule = json!({"operations": operations, "apiGroups": groups, "apiVersions": ["v1"],
                "resources": resources, "scope": "Namespaced"});
            let operation = AdmissionOperation::Create;
            let write =
                MatchedWrite { kind: pods, subresource, operation, namespace: None, objects: [None, None] };
            rule_matches(&rule, &write)
        };
        for (operations, groups, resources, subresource, expected) in [
            (&["CREATE"][..], &[""][..], &["pods"][..], "", true),
            (&["*"], &["*"], &["*"], "", true),
            (&["*"], &["*"], &["*"], "status", false),
            (&["*"], &["*"], &["*/*"], "", true),
            (&["*"], &["*"], &["*/*"], "eviction", true),
            (&["*"], &["*"], &["*/eviction"], "eviction", true),
            (&["CREATE"], &[""], &["pods/binding"], "binding", true),
            (&["CREATE"], &[""], &["pods/binding"], "eviction", false),
            (&["CREATE"], &[""], &["pods"], "eviction", false),
            (&["CREATE"], &[""], &["pods/status"], "", false),
            (&["UPDATE"], &[""], &["pods"], "", false),
            (&["CREATE"], &["apps"], &["pods"], "", false),
            (&["CREATE"], &[""], &["deployments"], "", false),
        ] {
            let found = matches(operations, groups, resources, subresource);
            assert_eq!(found, expected, "{operations:?} {groups:?} {resources:?} for {subresource:?}");
        }
    }

    #[test]
    fn a_condition_that_does_not_hold_is_stronger_than_one_that_fails() {
        let mut values = AdmissionValues { values: Vec::new(), size: 0, longest_text: 0 };
        values.add("object", &json!({"a": 1}));
        let context = values.context();
        let hold = |texts: &[&str]| {
            let list: Vec<_> = texts.iter().map(|text| json!({"name": "n", "expression": text})).collect();
            MatchConditions::parse(&json!(list)).hold(&values, &context)
        };
        assert_eq!(hold(&[]), Ok(true));
        assert_eq!(hold(&["object.a == 1", "has(object.a)"]), Ok(true));
        assert_eq!(hold(&["object.b == 1", "object.a == 2"]), Ok(false));
        let why = "expression 'object.b == 1' resulted in error: no such key: b";
        assert_eq!(hold(&["object.b == 1"]), Err(why.into()));
    }
}
