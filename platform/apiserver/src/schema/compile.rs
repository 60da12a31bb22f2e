//! Builds the arena of shapes from the kinds' schemas.

use std::{
    collections::HashMap,
    sync::{LazyLock, OnceLock},
};

use schemars::{SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value};

use super::{Field, ListType, Merge, Node, NodeId, Struct, describe};
use crate::registry::Kind;

/// Definition, then field, then the rules, as in upstream's OpenAPI document.
const MERGE_KEYS: &str = include_str!("merge_keys.json");
/// The rules of our own kinds.
const OWN_MERGE_KEYS: &str = r#"{
"FunctionSpec": {"env": {"list-type": "map", "list-map-keys": ["name"]}},
"FunctionStatus": {"conditions": {"list-type": "map", "list-map-keys": ["type"]}},
"RevisionSpec": {"env": {"list-type": "map", "list-map-keys": ["name"]}},
"RevisionStatus": {"conditions": {"list-type": "map", "list-map-keys": ["type"]}},
"WorkflowSpec": {"triggers": {"list-type": "map", "list-map-keys": ["name"]}},
"WorkflowStatus": {"conditions": {"list-type": "map", "list-map-keys": ["type"]}}
}"#;
/// Definitions that upstream's OpenAPI document marks with `x-kubernetes-map-type: atomic`.
const ATOMIC_DEFINITIONS: [&str; 20] = [
    "io.k8s.api.autoscaling.v1.CrossVersionObjectReference",
    "io.k8s.api.core.v1.ConfigMapKeySelector",
    "io.k8s.api.core.v1.EndpointAddress",
    "io.k8s.api.core.v1.EndpointPort",
    "io.k8s.api.core.v1.LocalObjectReference",
    "io.k8s.api.core.v1.NodeSelector",
    "io.k8s.api.core.v1.NodeSelectorTerm",
    "io.k8s.api.core.v1.ObjectFieldSelector",
    "io.k8s.api.core.v1.ObjectReference",
    "io.k8s.api.core.v1.ResourceFieldSelector",
    "io.k8s.api.core.v1.ScopeSelector",
    "io.k8s.api.core.v1.SecretKeySelector",
    "io.k8s.api.core.v1.SecretReference",
    "io.k8s.api.core.v1.TopologySelectorTerm",
    "io.k8s.api.core.v1.TypedLocalObjectReference",
    "io.k8s.api.discovery.v1.EndpointPort",
    "io.k8s.api.rbac.v1.RoleRef",
    "io.k8s.api.rbac.v1.Subject",
    "io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector",
    "io.k8s.apimachinery.pkg.apis.meta.v1.OwnerReference",
];
pub(super) const PREFIX: &str = "#/components/schemas/";
const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
const QUANTITY: &str = "io.k8s.apimachinery.pkg.api.resource.Quantity";

/// Rules by definition and field.
pub(crate) type MergeKeys = HashMap<String, HashMap<String, Map<String, Value>>>;

static RULES: LazyLock<MergeKeys> = LazyLock::new(|| {
    let mut keys: MergeKeys = serde_json::from_str(MERGE_KEYS).expect("the embedded file is JSON");
    keys.extend(serde_json::from_str::<MergeKeys>(OWN_MERGE_KEYS).expect("the constant is JSON"));
    keys
});

/// The schemas of some kinds and of all definitions that they refer to, by definition name, with their merge rules
/// (`x-kubernetes-…`); and the definition names of the kinds, in the same order.
pub(crate) fn definitions(kinds: &[&Kind]) -> (Map<String, Value>, Vec<String>) {
    let mut generator = SchemaSettings::openapi3().into_generator();
    generator.subschema_for::<k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta>();
    let mut customs = Map::new();
    let names: Vec<_> = kinds
        .iter()
        .map(|kind| match kind.definition {
            Some(custom) => {
                customs.insert(custom.definition.clone(), custom.schema.clone());
                custom.definition.clone()
            }
            None => reference(&(kind.schema)(&mut generator)),
        })
        .collect();
    let mut definitions = take(&mut generator);
    definitions.values_mut().for_each(without_null);
    let ours = definitions.iter_mut().filter(|(name, _)| !name.starts_with(describe::UPSTREAM));
    ours.for_each(|(_, definition)| describe::unwrap_lines(definition));
    describe::once(&mut definitions, &names);
    definitions.extend(customs);
    for name in &names {
        complete_root(&mut definitions, name);
    }
    for (name, definition) in &mut definitions {
        if ATOMIC_DEFINITIONS.contains(&name.as_str())
            && let Some(definition) = definition.as_object_mut()
        {
            definition.insert("x-kubernetes-map-type".into(), "atomic".into());
        }
        let Some(fields) = RULES.get(name) else { continue };
        let Some(properties) = definition.get_mut("properties") else { continue };
        for (field, rules) in fields {
            let Some(property) = properties.get_mut(field).and_then(Value::as_object_mut) else { continue };
            property
                .extend(rules.iter().map(|(rule, value)| (format!("x-kubernetes-{rule}"), value.clone())));
        }
    }
    (definitions, names)
}

/// Removes the null alternative of an optional struct's schema, so that its fields can be checked and explained. (A
/// null counts as absent everywhere.)
fn without_null(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(without_null),
        Value::Object(map) => {
            let alternatives = map.get("anyOf").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let is_null = |schema: &Value| {
                schema.get("$ref").is_none() && (schema["nullable"] == true || schema["type"] == "null")
            };
            if let [some, none] = alternatives
                && some.get("$ref").is_some()
                && is_null(none)
            {
                let some = some.clone();
                map.remove("anyOf");
                map.insert("allOf".into(), Value::Array(vec![some]));
            }
            map.values_mut().for_each(without_null);
        }
        _ => {}
    }
}

fn take(generator: &mut SchemaGenerator) -> Map<String, Value> {
    generator.take_definitions(true)
}

fn reference(schema: &schemars::Schema) -> String {
    let reference = schema.get("$ref").and_then(Value::as_str).unwrap_or_default();
    reference.strip_prefix(PREFIX).unwrap_or(reference).to_owned()
}

/// Derived kinds leave metadata, apiVersion and kind open: fill them in.
fn complete_root(definitions: &mut Map<String, Value>, name: &str) {
    let Some(properties) = definitions.get_mut(name).and_then(|d| d.get_mut("properties")) else { return };
    let Some(properties) = properties.as_object_mut() else { return };
    for (field, description) in [
        ("apiVersion", "APIVersion defines the versioned schema of this representation of an object."),
        ("kind", "Kind is a string value representing the REST resource this object represents."),
    ] {
        properties
            .entry(field)
            .or_insert_with(|| serde_json::json!({"type": "string", "description": description}));
    }
    let metadata = properties.entry("metadata").or_insert(Value::Null);
    if metadata.get("allOf").is_none() && metadata.get("$ref").is_none() {
        *metadata = serde_json::json!({
            "description": "Standard object's metadata.",
            "allOf": [{"$ref": format!("{PREFIX}{OBJECT_META}")}]
        });
    }
}

/// Compiles the shape of a kind. `known`: the definitions compiled for other kinds.
pub(super) fn compile(kind: &Kind, known: &mut hashbrown::HashMap<Box<str>, NodeId>) -> NodeId {
    let (definitions, names) = definitions(&[kind]);
    Compiler { definitions: &definitions, known, custom: false }.definition(&names[0])
}

/// Compiles a structural schema. It is not cached by name, since a definition can change.
pub(super) fn compile_custom(
    name: &str,
    schema: &Value,
    known: &mut hashbrown::HashMap<Box<str>, NodeId>,
) -> NodeId {
    let (mut definitions, _) = definitions(&[]);
    let mut schema = schema.clone();
    if let Some(schema) = schema.as_object_mut() {
        schema.entry("properties").or_insert_with(|| Value::Object(Map::new()));
    }
    definitions.insert(name.to_owned(), schema);
    complete_root(&mut definitions, name);
    // The metadata is shared with all kinds; the rest is read by the rules of structural schemas.
    Compiler { definitions: &definitions, known, custom: false }.definition(OBJECT_META);
    let shape = Compiler { definitions: &definitions, known, custom: true }.shape(&definitions[name], "");
    node(Some(shape))
}

struct Compiler<'a> {
    definitions: &'a Map<String, Value>,
    known: &'a mut hashbrown::HashMap<Box<str>, NodeId>,
    /// Whether the schema is a structural one, which has types beside alternatives and merge rules in the properties.
    custom: bool,
}

/// A new node, set at once or later. Nodes without content are shared.
fn node(value: Option<Node>) -> NodeId {
    static SCALARS: [OnceLock<Node>; 7] = [const { OnceLock::new() }; 7];
    let shared = match &value {
        Some(Node::Any) => Some(0),
        Some(Node::String) => Some(1),
        Some(Node::Integer) => Some(2),
        Some(Node::Number) => Some(3),
        Some(Node::Boolean) => Some(4),
        Some(Node::IntOrString) => Some(5),
        Some(Node::Quantity) => Some(6),
        _ => None,
    };
    if let Some(at) = shared {
        let _ = value.map(|value| SCALARS[at].set(value));
        return NodeId(&SCALARS[at]);
    }
    NodeId(Box::leak(Box::new(value.map_or_else(OnceLock::new, OnceLock::from))))
}

impl<'a> Compiler<'a> {
    fn definition(&mut self, name: &'a str) -> NodeId {
        if let Some(id) = self.known.get(name) {
            return *id;
        }
        // Registered before its fields are compiled: types may be recursive.
        let id = node(None);
        self.known.insert(name.into(), id);
        let definitions = self.definitions;
        let shape = match definitions.get(name) {
            _ if name == QUANTITY => Node::Quantity,
            Some(schema) => self.shape(schema, name),
            None => Node::Any,
        };
        let _ = id.0.set(shape);
        id
    }

    fn schema(&mut self, schema: &'a Value) -> NodeId {
        let target = |schema: &'a Value| schema.get("$ref").and_then(Value::as_str);
        let all_of = || schema.get("allOf").and_then(Value::as_array).filter(|all| all.len() == 1);
        let reference = target(schema).or_else(|| target(all_of()?.first()?));
        if let Some(reference) = reference {
            return self.definition(reference.strip_prefix(PREFIX).unwrap_or(reference));
        }
        let shape = self.shape(schema, "");
        node(Some(shape))
    }

    fn shape(&mut self, schema: &'a Value, name: &str) -> Node {
        if schema.get("x-kubernetes-int-or-string").is_some() {
            return Node::IntOrString;
        }
        if let Some(alternatives) = schema.get("oneOf").or_else(|| schema.get("anyOf"))
            && !self.custom
        {
            return one_type(alternatives);
        }
        let kind = schema.get("type").and_then(Value::as_str);
        match kind {
            Some("string") => Node::String,
            Some("integer") => Node::Integer,
            Some("number") => Node::Number,
            Some("boolean") => Node::Boolean,
            Some("array") => {
                let items = schema.get("items").map(|items| self.schema(items));
                Node::List(items.unwrap_or_else(|| node(Some(Node::Any))))
            }
            Some("object") if schema.get("properties").is_some() => self.fields(schema, name),
            Some("object") => match schema.get("additionalProperties").filter(|v| v.is_object()) {
                Some(values) => Node::Map(self.schema(values)),
                None => Node::Any,
            },
            _ => Node::Any,
        }
    }

    fn fields(&mut self, schema: &'a Value, name: &str) -> Node {
        let rules = RULES.get(name);
        let mut fields = hashbrown::HashMap::new();
        for (field, property) in schema["properties"].as_object().into_iter().flatten() {
            let merge = match self.custom {
                true => merge_rule(&rules_in(property)),
                false => rules.and_then(|rules| rules.get(field)).map(merge_rule).unwrap_or_default(),
            };
            fields.insert(field.as_str().into(), Field { node: self.schema(property), merge });
        }
        let required = schema.get("required").and_then(Value::as_array);
        let required = required.into_iter().flatten().filter_map(Value::as_str).map(Into::into).collect();
        Node::Struct(Struct { fields, required, atomic: ATOMIC_DEFINITIONS.contains(&name) })
    }
}

/// The one type of an enum's variants; any value if they differ.
fn one_type(alternatives: &Value) -> Node {
    let types: Vec<_> = alternatives
        .as_array()
        .into_iter()
        .flatten()
        .map(|a| a.get("type").and_then(Value::as_str))
        .collect();
    match types.first() {
        Some(Some("string")) if types.iter().all(|t| *t == types[0]) => Node::String,
        _ => Node::Any,
    }
}

/// The merge rules within a property.
fn rules_in(property: &Value) -> Map<String, Value> {
    let entries = property.as_object().into_iter().flatten();
    entries
        .filter_map(|(name, value)| Some((name.strip_prefix("x-kubernetes-")?.to_owned(), value.clone())))
        .collect()
}

fn merge_rule(rules: &Map<String, Value>) -> Merge {
    let text = |rule: &str| rules.get(rule).and_then(Value::as_str).unwrap_or("");
    let strategies: Vec<&str> = text("patch-strategy").split(',').collect();
    let keys = rules.get("list-map-keys").and_then(Value::as_array).into_iter().flatten();
    Merge {
        patch_merge: strategies.contains(&"merge"),
        patch_replace: strategies.contains(&"replace"),
        merge_key: Some(text("patch-merge-key")).filter(|key| !key.is_empty()).map(Into::into),
        list: match text("list-type") {
            "map" => ListType::Map(keys.filter_map(Value::as_str).map(Into::into).collect()),
            "set" => ListType::Set,
            _ => ListType::Atomic,
        },
        atomic_map: text("map-type") == "atomic",
    }
}
