//! Pruning and defaulting by a structural schema.

use serde_json::{Map, Value};

/// The fields of every object beside its schema.
const OWN_FIELDS: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// The fields of `metadata`.
const METADATA_FIELDS: [&str; 15] = [
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

fn flag(schema: &Value, name: &str) -> bool {
    schema.get(name).is_some_and(|value| *value == true)
}

/// Removes the fields of an object that its schema does not have; their paths go to `unknown`.
pub(super) fn prune_object(schema: &Value, object: &mut Map<String, Value>, unknown: &mut Vec<String>) {
    fields(schema, object, "", true, unknown);
}

fn prune(schema: &Value, value: &mut Value, path: &str, unknown: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            fields(schema, map, path, flag(schema, "x-kubernetes-embedded-resource"), unknown);
        }
        Value::Array(items) => {
            let Some(schema) = schema.get("items") else { return };
            for (at, item) in items.iter_mut().enumerate() {
                prune(schema, item, &format!("{path}[{at}]"), unknown);
            }
        }
        _ => {}
    }
}

fn fields(
    schema: &Value,
    map: &mut Map<String, Value>,
    path: &str,
    is_resource: bool,
    unknown: &mut Vec<String>,
) {
    let keeps = flag(schema, "x-kubernetes-preserve-unknown-fields")
        || flag(schema, "additionalProperties")
        || (schema.get("type").is_none() && flag(schema, "x-kubernetes-int-or-string"));
    map.retain(|name, value| {
        if is_resource && OWN_FIELDS.contains(&name.as_str()) {
            // The metadata of the object itself is checked by its type.
            if name == "metadata" && !path.is_empty() {
                metadata(value, &format!("{path}.metadata"), unknown);
            }
            return true;
        }
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let property = schema.get("properties").and_then(|properties| properties.get(name));
        let additional = schema.get("additionalProperties").filter(|schema| schema.is_object());
        match property.or(additional) {
            Some(schema) => prune(schema, value, &path, unknown),
            None if keeps => {}
            None => {
                unknown.push(path);
                return false;
            }
        }
        true
    });
}

/// Removes the fields that metadata of embedded objects does not have.
fn metadata(value: &mut Value, path: &str, unknown: &mut Vec<String>) {
    let Value::Object(map) = value else { return };
    map.retain(|name, _| {
        let is_known = METADATA_FIELDS.contains(&name.as_str());
        if !is_known {
            unknown.push(format!("{path}.{name}"));
        }
        is_known
    });
}

/// Sets the defaults of absent fields.
pub(super) fn fill_object(schema: &Value, object: &mut Map<String, Value>) {
    let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    for (name, schema) in properties.filter(|(name, _)| !OWN_FIELDS.contains(&name.as_str())) {
        if let Some(default) = schema.get("default") {
            let keeps = object.get(name).is_some_and(|value| !value.is_null() || flag(schema, "nullable"));
            if !keeps {
                object.insert(name.clone(), default.clone());
            }
        }
        if let Some(value) = object.get_mut(name) {
            fill(schema, value);
        }
    }
    let Some(additional) = schema.get("additionalProperties").filter(|schema| schema.is_object()) else {
        return;
    };
    object.values_mut().for_each(|value| fill(additional, value));
}

fn fill(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => fill_object(schema, map),
        Value::Array(items) => {
            let Some(schema) = schema.get("items") else { return };
            items.iter_mut().for_each(|item| fill(schema, item));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_fields_go_unless_they_are_preserved() {
        let schema = json!({"type": "object", "properties": {
            "spec": {"type": "object", "properties": {
                "size": {"type": "integer"},
                "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                         "properties": {"closed": {"type": "object"}}},
                "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
                "map": {"type": "object", "additionalProperties": {"type": "object"}},
                "pod": {"type": "object", "x-kubernetes-embedded-resource": true}}}}});
        let mut object = json!({"apiVersion": "x/v1", "kind": "X", "metadata": {"name": "n"}, "other": 1,
            "spec": {"size": 1, "sise": 2, "open": {"any": 1, "closed": {"b": 1}}, "list": [{"a": "x", "b": 1}],
                     "map": {"k": {"v": 1}}, "pod": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "nome": 1}, "spec": {}}}});
        let mut unknown = Vec::new();
        prune_object(&schema, object.as_object_mut().unwrap(), &mut unknown);
        unknown.sort();
        assert_eq!(
            unknown,
            [
                "other",
                "spec.list[0].b",
                "spec.map.k.v",
                "spec.open.closed.b",
                "spec.pod.metadata.nome",
                "spec.pod.spec",
                "spec.sise"
            ]
        );
        assert_eq!(
            object["spec"],
            json!({"size": 1, "open": {"any": 1, "closed": {}}, "list": [{"a": "x"}], "map": {"k": {}},
                   "pod": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}})
        );
    }

    #[test]
    fn defaults_fill_absent_fields_and_nulls() {
        let schema = json!({"properties": {
            "spec": {"default": {}, "properties": {
                "replicas": {"default": 1}, "mode": {"default": "a", "nullable": true},
                "items": {"items": {"properties": {"port": {"default": 80}}}}}}}});
        let mut object = json!({"spec": {"replicas": null, "mode": null, "items": [{}, {"port": 1}]}});
        fill_object(&schema, object.as_object_mut().unwrap());
        assert_eq!(
            object,
            json!({"spec": {"replicas": 1, "mode": null, "items": [{"port": 80}, {"port": 1}]}})
        );
        let mut empty = json!({});
        fill_object(&schema, empty.as_object_mut().unwrap());
        assert_eq!(empty, json!({"spec": {"replicas": 1, "mode": "a"}}));
    }
}
