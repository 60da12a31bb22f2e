//! `/openapi/v2` in JSON (Swagger 2.0): one document of all groups, made from those of version 3. Terraform's provider
//! and older clients read it. The protobuf form, which only old kubectl versions read, has no content.

use serde_json::{Map, Value, json};

const REFERENCE_V3: &str = "#/components/schemas/";
const REFERENCE_V2: &str = "#/definitions/";
/// Schema fields that Swagger 2.0 does not have; upstream leaves them out, too.
const V3_ONLY: [&str; 4] = ["oneOf", "anyOf", "not", "nullable"];

/// The document of version 2 from those of version 3.
pub(super) fn document(version_3: impl IntoIterator<Item = Value>) -> Value {
    let (mut definitions, mut paths) = (Map::new(), Map::new());
    for mut document in version_3 {
        if let Value::Object(schemas) = document["components"]["schemas"].take() {
            definitions.extend(schemas.into_iter().map(|(name, schema)| (name, schema_of(schema))));
        }
        if let Value::Object(items) = document["paths"].take() {
            paths.extend(items.into_iter().map(|(path, item)| (path, path_item(item))));
        }
    }
    json!({
        "swagger": "2.0",
        "info": {"title": "Mayfly", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "definitions": definitions,
        "securityDefinitions": {"BearerToken": {"type": "apiKey", "name": "authorization", "in": "header"}},
        "security": [{"BearerToken": []}],
    })
}

/// Converts a schema and its subschemas.
fn schema_of(schema: Value) -> Value {
    match schema {
        Value::Array(items) => items.into_iter().map(schema_of).collect(),
        Value::Object(map) => Value::Object(schema_map(map)),
        other => other,
    }
}

fn schema_map(mut map: Map<String, Value>) -> Map<String, Value> {
    V3_ONLY.iter().for_each(|field| _ = map.remove(*field));
    // Version 3 wraps a reference with a description in `allOf`; version 2 has both side by side.
    if let Some(Value::Array(all)) = map.remove("allOf")
        && let [Value::Object(only)] = all.as_slice()
    {
        for (field, value) in only {
            map.entry(field.clone()).or_insert_with(|| value.clone());
        }
    }
    if let Some(name) =
        map.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix(REFERENCE_V3))
    {
        let reference = format!("{REFERENCE_V2}{name}");
        map.insert("$ref".into(), reference.into());
    }
    let below = |(field, value): (String, Value)| match field.as_str() {
        // The keys are names of fields, not keywords.
        "properties" => match value {
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, schema)| (name, schema_of(schema)));
                (field, Value::Object(fields.collect()))
            }
            other => (field, other),
        },
        "items" | "additionalProperties" => (field, schema_of(value)),
        _ => (field, value),
    };
    map.into_iter().map(below).collect()
}

fn path_item(item: Value) -> Value {
    let Value::Object(item) = item else { return item };
    let parts = item.into_iter().map(|(field, value)| match value {
        Value::Array(parameters) if field == "parameters" => {
            (field, parameters.into_iter().map(parameter).collect())
        }
        Value::Object(operation) => (field, operation_of(operation)),
        other => (field, other),
    });
    Value::Object(parts.collect())
}

fn operation_of(mut operation: Map<String, Value>) -> Value {
    let mut parameters: Vec<Value> = match operation.remove("parameters") {
        Some(Value::Array(parameters)) => parameters.into_iter().map(parameter).collect(),
        _ => Vec::new(),
    };
    if let Some(mut body) = operation.remove("requestBody") {
        let content = body["content"].take();
        let types: Vec<&String> = content.as_object().into_iter().flat_map(Map::keys).collect();
        operation.insert("consumes".into(), types.iter().map(|text| text.as_str()).collect());
        let schema = content.as_object().and_then(|content| content.values().next());
        let schema = schema_of(schema.map(|content| content["schema"].clone()).unwrap_or_default());
        parameters.push(json!({"name": "body", "in": "body", "required": true, "schema": schema}));
    }
    operation.insert("parameters".into(), parameters.into());
    operation.insert("produces".into(), json!(["application/json", "application/yaml"]));
    let responses = operation.remove("responses");
    let responses = responses.iter().filter_map(Value::as_object).flatten().map(|(code, response)| {
        let schema = schema_of(response["content"]["application/json"]["schema"].clone());
        (code.clone(), json!({"description": response["description"], "schema": schema}))
    });
    let responses: Map<String, Value> = responses.collect();
    operation.insert("responses".into(), responses.into());
    Value::Object(operation)
}

/// Converts a parameter: version 2 has the type in the parameter itself, not in a schema.
fn parameter(parameter: Value) -> Value {
    let Value::Object(mut parameter) = parameter else { return parameter };
    if let Some(Value::Object(schema)) = parameter.remove("schema") {
        parameter.extend(schema);
    }
    Value::Object(parameter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{custom::ServedKinds, openapi};

    #[test]
    fn references_and_bodies_are_those_of_version_2() {
        let schema =
            json!({"description": "d", "allOf": [{"$ref": "#/components/schemas/a.B"}], "nullable": true});
        assert_eq!(schema_of(schema), json!({"description": "d", "$ref": "#/definitions/a.B"}));
        let nested =
            json!({"properties": {"not": {"type": "array", "items": {"$ref": "#/components/schemas/C"}}}});
        let wanted = json!({"properties": {"not": {"type": "array", "items": {"$ref": "#/definitions/C"}}}});
        assert_eq!(schema_of(nested), wanted, "a field may be called as a keyword");
    }

    #[test]
    fn every_reference_of_the_document_has_its_definition() {
        fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
            match value {
                Value::Object(map) => {
                    found.extend(map.get("$ref").and_then(Value::as_str));
                    map.values().for_each(|value| references(value, found));
                }
                Value::Array(items) => items.iter().for_each(|item| references(item, found)),
                _ => {}
            }
        }
        let document = document(openapi::documents(&ServedKinds::default()));
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 1000, "{}", found.len());
        for reference in found {
            let name = reference.strip_prefix(REFERENCE_V2).unwrap_or_else(|| panic!("{reference}"));
            assert!(document["definitions"].get(name).is_some(), "{name}");
        }
        let post = &document["paths"]["/api/v1/namespaces/{namespace}/pods"]["post"];
        let body = post["parameters"].as_array().unwrap().iter().find(|one| one["in"] == "body").unwrap();
        assert_eq!(body["schema"]["$ref"], "#/definitions/io.k8s.api.core.v1.Pod");
        assert!(post.get("requestBody").is_none());
    }
}
