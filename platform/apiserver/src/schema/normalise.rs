//! Normalises a decoded body to its kind: removes unknown fields and nulls, and checks types.

use std::fmt;

use mayfly_api::validation::FieldError;
use serde_json::{Map, Number, Value};

use super::{
    Node, NodeId, Schemas,
    go_types::{GoStep, field_and_type},
    quantity::{self, Precision},
    schemas,
};
use crate::registry::Kind;

/// The maximum number of values of a wrong type that are reported for one object.
const INVALID_MAX: usize = 64;

/// The deepest nesting that is processed; the decoder's own limit is lower.
const DEPTH_MAX: usize = 256;

/// The findings about an object.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Paths of fields that the kind does not have.
    pub(crate) unknown: Vec<String>,
    /// Paths of fields that must be there and are not.
    pub(crate) missing: Vec<String>,
    /// The first value of a wrong type, with upstream's message.
    pub(crate) wrong: Option<String>,
    /// The values of a wrong type in a custom object, outside of its metadata. Upstream decodes such objects without
    /// their schema and validates them afterwards, so that these are errors of a validation.
    pub(crate) invalid: Vec<FieldError>,
}

/// Removes unknown fields and nulls from an object of `kind`, and reports them.
pub(crate) fn normalise(kind: &Kind, object: &mut Map<String, Value>) -> Findings {
    if let Some(definition) = kind.definition {
        return definition.prune(kind, object);
    }
    let schemas = schemas();
    let (path, findings) = (Vec::new(), Findings::default());
    let mut walk = Walk { schemas, kind, rewrites_quantities: !kind.custom, path, findings };
    let mut value = Value::Object(std::mem::take(object));
    walk.value(schemas.root(kind), &mut value);
    if let Value::Object(map) = value {
        *object = map;
    }
    walk.findings
}

/// Like [`normalise`], for the metadata of a custom object, whose shape is `root`.
pub(crate) fn normalise_metadata(kind: &Kind, root: NodeId, object: &mut Map<String, Value>) -> Findings {
    let schemas = schemas();
    let path = vec![Step::Field("metadata".into())];
    let findings = Findings::default();
    let mut walk = Walk { schemas, kind, rewrites_quantities: false, path, findings };
    if let (Some(field), Some(metadata)) = (schemas.field(root, "metadata"), object.get_mut("metadata")) {
        walk.value(field.node, metadata);
    }
    walk.findings
}

enum Step {
    Field(String),
    Index(usize),
}

struct Walk<'a> {
    schemas: &'a Schemas,
    kind: &'a Kind,
    /// Go's types rewrite quantities; custom objects keep them as they were sent, so that a second apply changes
    /// nothing.
    rewrites_quantities: bool,
    path: Vec<Step>,
    findings: Findings,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => f.write_str(name),
            Self::Index(at) => write!(f, "[{at}]"),
        }
    }
}

impl Walk<'_> {
    fn path(&self, last: Option<&str>) -> String {
        let mut text = String::new();
        for step in &self.path {
            if matches!(step, Step::Field(_)) && !text.is_empty() {
                text.push('.');
            }
            text.push_str(&step.to_string());
        }
        if let Some(last) = last {
            if !text.is_empty() {
                text.push('.');
            }
            text.push_str(last);
        }
        text
    }

    fn wrong(&mut self, value: &Value, expected: &str) {
        let found = match value {
            Value::Null => "null",
            Value::Bool(_) => "bool",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        if self.is_validated() && self.path.len() <= DEPTH_MAX {
            return self.invalid_type(value, expected);
        }
        if self.findings.wrong.is_none() {
            let steps = self.path.iter().map(|step| match step {
                Step::Field(name) => GoStep::Name(name),
                Step::Index(_) => GoStep::Item,
            });
            let place = field_and_type(self.kind, steps).unwrap_or_else(|| {
                format!("Go struct field {}.{} of type {expected}", self.kind.kind, self.path(None))
            });
            self.findings.wrong = Some(format!("json: cannot unmarshal {found} into {place}"));
        }
    }

    /// Whether a wrong type at this path is an error of the validation: in custom objects, except in their metadata.
    fn is_validated(&self) -> bool {
        self.kind.custom && !matches!(self.path.first(), Some(Step::Field(name)) if name == "metadata")
    }

    /// Reports a value whose type is not the schema's, with the message of upstream's validation of custom objects.
    fn invalid_type(&mut self, value: &Value, expected: &str) {
        if self.findings.invalid.len() >= INVALID_MAX {
            return;
        }
        let error = FieldError::type_invalid(self.path(None), expected, schema_type(value));
        self.findings.invalid.push(error);
    }

    /// Checks a quantity, and rewrites it in its canonical form.
    fn quantity(&mut self, value: &mut Value, precision: Precision) {
        let is_text = value.is_string();
        let text = match &*value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            other if self.is_validated() => return self.invalid_type(&other.clone(), "integer,string"),
            // Go's type parses the text of any JSON value.
            other => other.to_string(),
        };
        match quantity::canonical(&text, precision) {
            Ok(canonical) if self.rewrites_quantities || !is_text => *value = Value::String(canonical),
            Ok(_) => {}
            Err(error) if self.is_validated() => {
                let error = FieldError::invalid(self.path(None), format!("{text:?}"), error.to_string());
                self.findings.invalid.push(error);
            }
            Err(error) => _ = self.findings.wrong.get_or_insert_with(|| error.to_string()),
        }
    }

    fn value(&mut self, id: NodeId, value: &mut Value) {
        if self.path.len() > DEPTH_MAX {
            return self.wrong(value, "a value that is nested less deep");
        }
        match (self.schemas.node(id), &mut *value) {
            (Node::Any, _)
            | (Node::String, Value::String(_))
            | (Node::Boolean, Value::Bool(_))
            | (Node::Number, Value::Number(_))
            | (Node::IntOrString, Value::String(_)) => {}
            (Node::Quantity, value) => self.quantity(value, Precision::Nano),
            (Node::Integer | Node::IntOrString, Value::Number(number)) => match integral(number) {
                Some(number) => *value = Value::Number(number),
                None => self.wrong(value, self.type_name(&Node::Integer)),
            },
            (Node::Map(values), Value::Object(map)) => self.map(*values, map),
            (Node::List(items), Value::Array(list)) => {
                for (at, item) in list.iter_mut().enumerate() {
                    self.path.push(Step::Index(at));
                    self.value(*items, item);
                    self.path.pop();
                }
            }
            (Node::Struct(_), Value::Object(map)) => self.fields(id, map),
            (node, value) => self.wrong(value, self.type_name(node)),
        }
    }

    /// The name of a node's type for a message: that of the schema in a validated part, else that of Go's type.
    fn type_name(&self, node: &Node) -> &'static str {
        if self.is_validated() { schema_type_of(node) } else { go_type_of(node) }
    }

    fn map(&mut self, values: NodeId, map: &mut Map<String, Value>) {
        for (key, value) in map.iter_mut() {
            if value.is_null() {
                // Go decodes a null in a map as the zero value.
                match self.schemas.node(values) {
                    Node::String => *value = Value::String(String::new()),
                    Node::Quantity => *value = Value::String("0".into()),
                    _ => {}
                }
                if value.is_null() {
                    continue;
                }
            }
            self.path.push(Step::Field(key.clone()));
            match self.schemas.node(values) {
                // A map of quantities is a list of resources, whose amounts upstream rounds up to thousandths
                // (`SetDefaults_ResourceList`).
                Node::Quantity => self.quantity(value, Precision::Milli),
                _ => self.value(values, value),
            }
            self.path.pop();
        }
        map.retain(|_, value| !value.is_null());
    }

    fn fields(&mut self, id: NodeId, map: &mut Map<String, Value>) {
        let Node::Struct(shape) = self.schemas.node(id) else { return };
        // Unknown fields are found in the order of the document, as by Go's decoder.
        map.retain(|key, value| {
            let Some(field) = shape.fields.get(key.as_str()) else {
                self.findings.unknown.push(self.path(Some(key)));
                return false;
            };
            if value.is_null() {
                return false;
            }
            self.path.push(Step::Field(key.clone()));
            self.value(field.node, value);
            self.path.pop();
            true
        });
        for required in shape.required.iter().filter(|key| !map.contains_key(&***key)) {
            self.findings.missing.push(self.path(Some(required)));
        }
    }
}

fn integral(number: &Number) -> Option<Number> {
    if number.is_i64() || number.is_u64() {
        return Some(number.clone());
    }
    let float = number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < 9e15)?;
    #[expect(clippy::cast_possible_truncation, reason = "integral and below 2^53, checked above")]
    Some(Number::from(float as i64))
}

/// The type of a value in the terms of OpenAPI.
pub(crate) fn schema_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn schema_type_of(node: &Node) -> &'static str {
    match node {
        Node::String => "string",
        Node::Integer => "integer",
        Node::Number => "number",
        Node::Boolean => "boolean",
        Node::IntOrString | Node::Quantity => "integer,string",
        Node::List(_) => "array",
        Node::Any | Node::Map(_) | Node::Struct(_) => "object",
    }
}

fn go_type_of(node: &Node) -> &'static str {
    match node {
        Node::Any => "interface {}",
        Node::String => "string",
        Node::Integer => "int64",
        Node::Number => "float64",
        Node::Boolean => "bool",
        Node::IntOrString => "intstr.IntOrString",
        Node::Quantity => "resource.Quantity",
        Node::Map(_) => "map[string]…",
        Node::List(_) => "[]…",
        Node::Struct(_) => "struct",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::registry::registry;

    fn check(group: &str, version: &str, plural: &str, value: Value) -> (Value, Findings) {
        let kind = registry().find(group, version, plural).unwrap();
        let mut map = value.as_object().unwrap().clone();
        let findings = normalise(kind, &mut map);
        (Value::Object(map), findings)
    }

    #[test]
    fn unknown_fields_are_named_by_path_and_removed() {
        let (value, findings) = check(
            "",
            "v1",
            "pods",
            json!({
                "metadata": {"name": "x", "labels": {"anything": "goes"}, "lables": {}},
                "spec": {"containers": [{"name": "a", "imagee": "x"}], "replics": 1, "nodeName": null}
            }),
        );
        assert_eq!(findings.unknown, ["metadata.lables", "spec.containers[0].imagee", "spec.replics"]);
        assert_eq!(
            value,
            json!({"metadata": {"name": "x", "labels": {"anything": "goes"}}, "spec": {"containers": [{"name": "a"}]}})
        );
        assert_eq!(findings.wrong, None);
    }

    #[test]
    fn our_kinds_have_their_metadata_and_required_fields() {
        let (_, findings) = check(
            "mayfly.dev",
            "v1",
            "functions",
            json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": "f"},
                   "spec": {"sorce": {}, "limits": {"memory": "64Mi", "momory": 1}, "isolation": "fresh"}}),
        );
        assert_eq!(findings.unknown, ["spec.sorce", "spec.limits.momory"]);
        assert_eq!(findings.missing, ["spec.source"]);
        assert_eq!(findings.wrong, None);
    }

    #[test]
    fn types_are_checked() {
        let wrong = |spec: Value| {
            check("apps", "v1", "replicasets", json!({"metadata": {"name": "x"}, "spec": spec})).1.wrong
        };
        assert_eq!(wrong(json!({"replicas": 3})), None);
        assert_eq!(wrong(json!({"replicas": 3.0})), None);
        let text =
            "json: cannot unmarshal string into Go struct field ReplicaSetSpec.spec.replicas of type int32";
        assert_eq!(wrong(json!({"replicas": "3"})).as_deref(), Some(text));
        assert!(wrong(json!({"selector": {"matchLabels": {"a": 1}}})).is_some());
        assert!(wrong(json!({"replicas": 1.5})).is_some());
    }

    #[test]
    fn quantities_become_strings() {
        let (value, findings) = check(
            "",
            "v1",
            "pods",
            json!({"spec": {"containers": [{"name": "a", "resources": {"limits": {"cpu": 2, "memory": "1Gi"}}}]}}),
        );
        assert_eq!(findings.wrong, None);
        let limits = &value["spec"]["containers"][0]["resources"]["limits"];
        assert_eq!(limits, &json!({"cpu": "2", "memory": "1Gi"}));
    }
}
