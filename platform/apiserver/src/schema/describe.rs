//! Reduces each field to one description: kubectl shows the description of a field and then that of its type, which
//! repeats it. Line breaks of the source are removed, so that the reader's terminal wraps the lines.

use serde_json::{Map, Value, json};

use super::compile::PREFIX;

/// Upstream's definitions, whose descriptions are not changed.
pub(super) const UPSTREAM: &str = "io.k8s.";

/// Joins the lines of paragraphs, which kubectl prints as they are; a list's items keep lines of their own.
pub(super) fn unwrap_lines(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(unwrap_lines),
        Value::Object(map) => {
            for (name, value) in map {
                match value {
                    Value::String(text) if name == "description" => *text = unwrapped(text),
                    value => unwrap_lines(value),
                }
            }
        }
        _ => {}
    }
}

fn unwrapped(text: &str) -> String {
    let mut lines = text.lines();
    let mut whole = lines.next().unwrap_or_default().to_owned();
    let mut after_blank = false;
    for line in lines {
        let is_item = line.trim_start().starts_with(['-', '*', '|']);
        whole.push(if line.is_empty() || after_blank || is_item { '\n' } else { ' ' });
        whole.push_str(line);
        after_blank = line.is_empty();
    }
    whole
}

/// Moves the descriptions of types (except those of `roots`, the kinds) to the fields that have none, or only the
/// beginning of the type's.
pub(super) fn once(definitions: &mut Map<String, Value>, roots: &[String]) {
    let mut of_types = Map::new();
    for (name, definition) in definitions.iter_mut() {
        if name.starts_with(UPSTREAM) || roots.contains(name) {
            continue;
        }
        if let Some(text) = definition.as_object_mut().and_then(|definition| definition.remove("description"))
        {
            of_types.insert(name.clone(), text);
        }
    }
    for definition in definitions.values_mut() {
        let properties = definition.get_mut("properties").and_then(Value::as_object_mut);
        for property in properties.into_iter().flat_map(|properties| properties.values_mut()) {
            let Some(of_type) = type_of(property).and_then(|name| of_types.get(name)) else { continue };
            describe(property, &of_type.clone());
        }
    }
}

fn describe(property: &mut Value, of_type: &Value) {
    let own = property.get("description").and_then(Value::as_str).unwrap_or_default();
    if !of_type.as_str().is_some_and(|text| text.starts_with(own)) {
        return;
    }
    // Keywords beside a bare reference are ignored (OpenAPI 3.0, "Reference Object").
    if property.get("$ref").is_some() {
        *property = json!({"allOf": [property.take()]});
    }
    property["description"] = of_type.clone();
}

/// The definition that a field's value, or each of its items, has.
fn type_of(schema: &Value) -> Option<&str> {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        return reference.strip_prefix(PREFIX);
    }
    let all = schema.get("allOf").and_then(Value::as_array).and_then(|all| all.first());
    let inner = all.or_else(|| schema.get("items")).or_else(|| schema.get("additionalProperties"));
    type_of(inner?)
}

#[cfg(test)]
mod tests {
    use crate::{registry::registry, schema::definitions};

    use super::*;

    #[test]
    fn lines_are_the_readers() {
        let mut schema =
            json!({"description": "One that\ngoes on.\n\nTwo:\n- a\n- b", "x": [{"description": "a\nb"}]});
        unwrap_lines(&mut schema);
        assert_eq!(
            schema,
            json!({"description": "One that goes on.\n\nTwo:\n- a\n- b", "x": [{"description": "a b"}]})
        );
    }

    #[test]
    fn a_field_of_ours_is_described_once() {
        let kinds: Vec<_> =
            registry().kinds().filter(|kind| kind.group == "mayfly.dev" && kind.version == "v1").collect();
        let (definitions, names) = definitions(&kinds);
        let mut fields = 0;
        for (name, definition) in definitions.iter().filter(|(name, _)| !name.starts_with(UPSTREAM)) {
            for (field, property) in definition["properties"].as_object().into_iter().flatten() {
                let Some(inner) = type_of(property).filter(|inner| !inner.starts_with(UPSTREAM)) else {
                    continue;
                };
                assert!(property["description"].is_string(), "{name}.{field} says nothing");
                assert!(
                    property.get("$ref").is_none(),
                    "{name}.{field}: nobody reads what stands beside $ref"
                );
                assert!(definitions[inner].get("description").is_none(), "{name}.{field} is described twice");
                fields += 1;
            }
        }
        assert!(fields > 10, "{fields}");
        assert!(names.iter().all(|name| definitions[name]["description"].is_string()));
        let scaling = definitions["FunctionSpec"]["properties"]["scaling"]["description"].as_str().unwrap();
        assert!(scaling.contains("Knative"), "the longer text stays: {scaling}");
    }
}
