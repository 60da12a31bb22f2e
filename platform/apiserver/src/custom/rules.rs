//! Validation rules of custom objects: `x-kubernetes-validations` in CEL, with upstream's messages.
//!
//! A rule is compiled once per definition.
//! (Source: `apiextensions-apiserver/pkg/apiserver/schema/cel`.)

use std::sync::Arc;

use cel::{Context, Env, Value as CelValue, objects::OptionalValue};
use hashbrown::HashMap;
use mayfly_api::validation::{FieldError, FieldErrorKind};
use serde_json::Value;

use crate::{
    expressions::{CelExpression, converted, environment, longest_text, nodes, reason},
    object::Object,
    registry::rules_items,
};

const RULES: &str = "x-kubernetes-validations";
/// Steps of one rule's evaluation, as estimated before it: about a second.
const COST_MAX: u64 = 5_000_000;
/// Steps of all rules of one object.
const OBJECT_COST_MAX: u64 = 20_000_000;
/// The rules of one definition's version, compiled.
pub(super) struct ValidationRules {
    env: Arc<Env>,
    /// Compiled expressions by their text, including those of messages.
    expressions: HashMap<String, CelExpression>,
}

impl std::fmt::Debug for ValidationRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ValidationRules")
            .field("expressions", &self.expressions.keys())
            .finish_non_exhaustive()
    }
}

/// The errors of a schema's own rules (not of those below it).
pub(super) fn schema_errors(schema: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if rules_items(&schema[RULES]).next().is_none() {
        return;
    }
    let env = environment();
    for (at, rule) in rules_items(&schema[RULES]).enumerate() {
        let path = format!("{path}.{RULES}[{at}]");
        let text = rule["rule"].as_str().unwrap_or("").trim();
        if text.is_empty() {
            errors.push(FieldError::required(format!("{path}.rule"), "rule is not specified"));
            continue;
        }
        for field in ["rule", "messageExpression"] {
            let Some(text) = rule[field].as_str().filter(|text| !text.is_empty()) else { continue };
            if let Err(why) = CelExpression::compile(&env, text) {
                let detail = format!("compilation failed: {why}");
                errors.push(FieldError::invalid(format!("{path}.{field}"), format!("{text:?}"), detail));
            }
        }
    }
}

/// The state of the validation of one object.
struct Evaluation<'a> {
    rules: &'a ValidationRules,
    cost_left: u64,
    errors: Vec<FieldError>,
}

impl ValidationRules {
    /// The compiled rules of a schema; `None` if it has none.
    pub(super) fn of(schema: &Value) -> Option<Self> {
        let env = environment();
        let mut expressions = HashMap::new();
        collect(schema, &env, &mut expressions);
        (!expressions.is_empty()).then(|| Self { env: Arc::new(env), expressions })
    }

    /// The violations of an object. A value that an update does not change is not validated again.
    pub(super) fn errors(&self, schema: &Value, new: &Object, old: Option<&Object>) -> Vec<FieldError> {
        let mut evaluation = Evaluation { rules: self, cost_left: OBJECT_COST_MAX, errors: Vec::new() };
        let (new, old) = (visible(new), old.map(visible));
        evaluation.value(schema, &new, old.as_ref(), "");
        evaluation.errors
    }

    /// The error that stands for the rules when the object does not fit its schema.
    pub(super) fn not_checked() -> FieldError {
        let detail = "some validation rules were not checked because the object was invalid; correct the existing \
                      errors to complete validation";
        FieldError::invalid("<nil>", "\"null\"", detail)
    }
}

/// The parts of an object that rules at the root see.
fn visible(object: &Object) -> Value {
    let mut map = object.0.clone();
    if let Some(Value::Object(metadata)) = map.get_mut("metadata") {
        metadata.retain(|name, _| name == "name" || name == "generateName");
    }
    Value::Object(map)
}

/// Compiles the rules of a schema and all below it. One that does not compile is left out: definitions with such a rule
/// are refused.
fn collect(schema: &Value, env: &Env, expressions: &mut HashMap<String, CelExpression>) {
    match schema {
        Value::Object(map) => {
            for rule in rules_items(&schema[RULES]) {
                for text in ["rule", "messageExpression"].into_iter().filter_map(|field| rule[field].as_str())
                {
                    if !expressions.contains_key(text)
                        && let Ok(expression) = CelExpression::compile(env, text)
                    {
                        expressions.insert(text.to_owned(), expression);
                    }
                }
            }
            map.values().for_each(|value| collect(value, env, expressions));
        }
        Value::Array(items) => items.iter().for_each(|value| collect(value, env, expressions)),
        _ => {}
    }
}

impl Evaluation<'_> {
    fn value(&mut self, schema: &Value, new: &Value, old: Option<&Value>, path: &str) {
        if new.is_null() || old == Some(new) {
            return;
        }
        for rule in rules_items(&schema[RULES]) {
            self.rule(rule, schema, new, old, path);
        }
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        match new {
            Value::Object(map) => {
                for (name, value) in map {
                    let (inner, path) = match schema["properties"].get(name) {
                        Some(inner) => (inner, below(name)),
                        None => (&schema["additionalProperties"], format!("{path}[{name}]")),
                    };
                    self.value(inner, value, old.and_then(|old| old.get(name)), &path);
                }
            }
            Value::Array(items) => {
                for (at, value) in items.iter().enumerate() {
                    let old = old.and_then(|old| same_item(schema, value, old));
                    self.value(&schema["items"], value, old, &format!("{path}[{at}]"));
                }
            }
            _ => {}
        }
    }

    fn rule(&mut self, rule: &Value, schema: &Value, new: &Value, old: Option<&Value>, path: &str) {
        let Some(expression) = rule["rule"].as_str().and_then(|text| self.rules.expressions.get(text)) else {
            return;
        };
        let (is_optional, reads_old) = (rule["optionalOldSelf"] == true, expression.reads("oldSelf"));
        if reads_old && old.is_none() && !is_optional {
            return;
        }
        let size = nodes(new) + old.map_or(0, nodes);
        let cost = expression.cost(size, longest_text(new).max(old.map_or(0, longest_text)));
        if cost > COST_MAX || cost > self.cost_left {
            let detail = "validation failed due to running out of cost budget, no further validation rules will be run";
            self.cost_left = 0;
            return self.errors.push(FieldError::invalid(path, type_of(schema), detail));
        }
        self.cost_left -= cost;
        let mut context = Context::with_env(self.rules.env.clone());
        context.add_variable_from_value("self", converted(schema, new));
        if reads_old {
            let old = old.map(|old| converted(schema, old));
            let value = match (is_optional, old) {
                (true, Some(old)) => CelValue::Opaque(Arc::new(OptionalValue::of(old))),
                (true, None) => CelValue::Opaque(Arc::new(OptionalValue::none())),
                (false, old) => old.unwrap_or(CelValue::Null),
            };
            context.add_variable_from_value("oldSelf", value);
        }
        let text = rule["rule"].as_str().unwrap_or("").trim();
        let detail = match expression.evaluate(&context) {
            Ok(CelValue::Bool(true)) => return,
            Ok(CelValue::Bool(false)) => self.message(rule, text, &context),
            Ok(other) => format!("the rule {text:?} yields {:?} instead of a boolean", other.type_of()),
            Err(error) => {
                let named = rule["message"].as_str().filter(|message| !message.is_empty()).unwrap_or(text);
                format!("{} evaluating rule: {named}", reason(&error))
            }
        };
        let path = format!("{path}{}", rule["fieldPath"].as_str().unwrap_or(""));
        let value = type_of(schema);
        let kind = match rule["reason"].as_str() {
            Some("FieldValueForbidden") => FieldErrorKind::Forbidden,
            Some("FieldValueRequired") => FieldErrorKind::Required,
            Some("FieldValueDuplicate") => FieldErrorKind::Duplicate { value },
            _ => FieldErrorKind::Invalid { value },
        };
        self.errors.push(FieldError { path, kind, detail });
    }

    fn message(&self, rule: &Value, text: &str, context: &Context<'_, '_>) -> String {
        let said = rule["messageExpression"].as_str().and_then(|text| self.rules.expressions.get(text));
        if let Some(Ok(CelValue::String(said))) = said.map(|said| said.evaluate(context)) {
            return said.to_string();
        }
        match rule["message"].as_str().filter(|message| !message.is_empty()) {
            Some(message) => message.to_owned(),
            None => format!("failed rule: {text}"),
        }
    }
}

/// The old item that an item of a list with keys replaces; `None` for items of other lists.
fn same_item<'a>(schema: &Value, item: &Value, old: &'a Value) -> Option<&'a Value> {
    if schema["x-kubernetes-list-type"] != "map" {
        return None;
    }
    let keys: Vec<&str> =
        rules_items(&schema["x-kubernetes-list-map-keys"]).filter_map(Value::as_str).collect();
    old.as_array()?.iter().find(|other| keys.iter().all(|key| other.get(*key) == item.get(*key)))
}

/// A value's type as errors show it.
fn type_of(schema: &Value) -> String {
    format!("{:?}", schema["type"].as_str().unwrap_or("object"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        let Value::Object(map) = value else { panic!("an object") };
        Object(map)
    }

    #[track_caller]
    fn check(spec: &Value, new: Value, old: Option<Value>, expected: &[&str]) {
        let schema = json!({"type": "object", "properties": {"spec": spec}});
        let rules = ValidationRules::of(&schema).expect("there are rules");
        let old = old.map(|old| object(json!({"spec": old})));
        let errors = rules.errors(&schema, &object(json!({"spec": new})), old.as_ref());
        let shown: Vec<_> =
            errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect();
        assert_eq!(shown, expected);
    }

    fn with_rules(mut schema: Value, rules: Value) -> Value {
        schema[RULES] = rules;
        schema
    }

    #[test]
    fn rules_say_what_is_wrong() {
        let spec = json!({"type": "object", "properties": {
            "size": {"type": "integer"}, "color": {"type": "string"}, "share": {"type": "number"}}});
        let rules = json!([
            {"rule": "self.size < 8 || self.color == 'blue'", "message": "big ones are blue"},
            {"rule": "!has(self.share) || self.share <= 1.0", "fieldPath": ".share", "reason": "FieldValueForbidden"},
            {"rule": "self.color.startsWith('b')", "messageExpression": "'no ' + self.color"},
        ]);
        let spec = with_rules(spec, rules);
        check(&spec, json!({"size": 9, "color": "blue", "share": 1}), None, &[]);
        check(
            &spec,
            json!({"size": 9, "color": "red", "share": 2}),
            None,
            &[
                "spec: Invalid value: \"object\": big ones are blue",
                "spec.share: Forbidden: failed rule: !has(self.share) || self.share <= 1.0",
                "spec: Invalid value: \"object\": no red",
            ],
        );
        let missing = json!({"color": "black"});
        check(
            &spec,
            missing,
            None,
            &["spec: Invalid value: \"object\": no such key: size evaluating rule: big ones are blue"],
        );
    }

    #[test]
    fn transition_rules_are_about_updates_and_items_with_keys() {
        let fixed =
            with_rules(json!({"type": "string"}), json!([{"rule": "self == oldSelf", "message": "fixed"}]));
        let ports = json!({"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
            "items": {"type": "object", "properties": {"name": {"type": "string"}, "kind": fixed}}});
        let spec = json!({"type": "object", "properties": {"mode": fixed, "ports": ports}});
        let old = json!({"mode": "a", "ports": [{"name": "x", "kind": "k"}, {"name": "y", "kind": "l"}]});
        check(&spec, json!({"mode": "b"}), None, &[]);
        check(
            &spec,
            json!({"mode": "b", "ports": [{"name": "y", "kind": "m"}, {"name": "z", "kind": "k"}]}),
            Some(old),
            &[
                "spec.mode: Invalid value: \"string\": fixed",
                "spec.ports[0].kind: Invalid value: \"string\": fixed",
            ],
        );
    }

    #[test]
    fn unchanged_values_are_not_judged_again() {
        let spec = json!({"type": "object", "properties": {
            "a": with_rules(json!({"type": "integer"}), json!([{"rule": "self > 0"}])), "b": {"type": "integer"}}});
        check(&spec, json!({"a": -1, "b": 2}), Some(json!({"a": -1, "b": 1})), &[]);
        check(
            &spec,
            json!({"a": -2, "b": 2}),
            Some(json!({"a": -1, "b": 1})),
            &["spec.a: Invalid value: \"integer\": failed rule: self > 0"],
        );
    }

    #[test]
    fn the_cost_is_bounded_before_the_evaluation() {
        let list = json!({"type": "array", "items": {"type": "integer"}});
        let rules = json!([{"rule": "self.all(a, self.all(b, self.all(c, a + b + c >= 0)))"}]);
        let spec = with_rules(list, rules);
        let numbers: Vec<_> = (0..1000).collect();
        check(
            &spec,
            json!(numbers),
            None,
            &[
                "spec: Invalid value: \"array\": validation failed due to running out of cost budget, no further \
               validation rules will be run",
            ],
        );
        check(&spec, json!([1, 2, 3]), None, &[]);
        let texts = json!({"type": "array", "items": {"type": "string"}});
        let texts = with_rules(texts, json!([{"rule": "self.all(t, t.matches('^x*$'))"}]));
        let mut long = vec![json!("x"); 1000];
        check(&texts, json!(long), None, &[]);
        long.push(json!("x".repeat(1 << 20)));
        check(
            &texts,
            json!(long),
            None,
            &[
                "spec: Invalid value: \"array\": validation failed due to running out of cost budget, no further \
               validation rules will be run",
            ],
        );
    }

    #[test]
    fn a_definition_with_a_wrong_rule_is_refused() {
        let mut errors = Vec::new();
        let rules =
            json!([{"rule": "self.a +"}, {"rule": ""}, {"rule": "nothing(self.a)"}, {"rule": "self.a == 1"}]);
        schema_errors(&with_rules(json!({"type": "object"}), rules), "s", &mut errors);
        let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "s.x-kubernetes-validations[0].rule",
                "s.x-kubernetes-validations[1].rule",
                "s.x-kubernetes-validations[2].rule"
            ]
        );
        assert!(errors[2].detail.contains("undeclared reference to \"nothing\""), "{}", errors[2].detail);
    }
}
