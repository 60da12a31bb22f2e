//! `mayfly explain`: shows the fields of a kind, from the server's OpenAPI documents.

use clap::Args;
use serde_json::Value;

use super::{
    discovery::DiscoveredKind,
    failure::{ErrorCode, Failure},
    output,
    server::with_query,
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly explain function.spec.scaling")]
pub(crate) struct ExplainArgs {
    /// KIND, or a field of it: KIND.spec.limits
    #[arg(value_name = "KIND[.FIELD]")]
    path: String,
    /// All fields below, names and types only
    #[arg(long)]
    recursive: bool,
}

/// The depth at which recursive schemas are cut off.
const DEPTH_MAX: usize = 12;

pub(crate) async fn run(args: ExplainArgs, session: &Session) -> anyhow::Result<()> {
    let discovery = session.discovery().await?;
    let mut words = args.path.split('.');
    let kind = discovery.find(words.next().unwrap_or(""))?;
    let fields: Vec<&str> = words.collect();
    if fields.iter().any(|field| field.is_empty()) {
        return Err(Failure::error(
            ErrorCode::Usage,
            format!("{:?} is not a path", args.path),
            "write KIND.field.field, such as function.spec",
        ));
    }
    let document = document(kind, session).await?;
    let schemas = Schemas(&document["components"]["schemas"]);
    let root = schemas.of_kind(kind).ok_or_else(|| {
        Failure::error(
            ErrorCode::NotFound,
            format!("the server has no description of the fields of {}", kind.kind),
            "its OpenAPI document has no schema for it",
        )
    })?;
    let found = schemas.walk(root, &fields, &kind.kind)?;
    output::out(text(kind, &fields, &schemas, &found, args.recursive))?;
    Ok(())
}

/// The OpenAPI document of a kind's group and version.
async fn document(kind: &DiscoveredKind, session: &Session) -> anyhow::Result<Value> {
    let server = session.server().await?;
    let index = server.get("/openapi/v3").await?;
    let path = match kind.group.as_str() {
        "" => format!("api/{}", kind.version),
        group => format!("apis/{group}/{}", kind.version),
    };
    let url = index["paths"][&path]["serverRelativeURL"].as_str();
    let url = url.map_or_else(|| with_query(&format!("/openapi/v3/{path}"), &[]), str::to_owned);
    Ok(server.get(&url).await?)
}

/// The schemas of a document.
struct Schemas<'a>(&'a Value);

/// A schema, and the description of the field that refers to it, which is more specific.
struct Found<'a> {
    schema: &'a Value,
    description: Option<&'a str>,
    /// The type of the field; for lists and maps, the item type.
    type_name: String,
}

impl<'a> Schemas<'a> {
    fn of_kind(&self, kind: &DiscoveredKind) -> Option<&'a Value> {
        let is_kind = |known: &Value| {
            known["group"].as_str().unwrap_or("") == kind.group
                && known["version"] == kind.version.as_str()
                && known["kind"] == kind.kind.as_str()
        };
        self.0.as_object()?.values().find(|schema| {
            schema["x-kubernetes-group-version-kind"].as_array().is_some_and(|all| all.iter().any(is_kind))
        })
    }

    /// Follows references, and the single-member `allOf` and nullable `anyOf` around a reference.
    fn resolve(&self, mut schema: &'a Value) -> &'a Value {
        for _ in 0..DEPTH_MAX {
            if let Some(reference) = schema["$ref"].as_str() {
                let name = reference.rsplit('/').next().unwrap_or("");
                schema = &self.0[name];
                continue;
            }
            let around = ["allOf", "anyOf", "oneOf"].iter().find_map(|key| {
                let inner = schema[*key].as_array()?;
                let mut real = inner.iter().filter(|inner| !is_null(inner));
                let only = real.next()?;
                (schema["properties"].is_null() && schema["type"].is_null() && real.next().is_none())
                    .then_some(only)
            });
            match around {
                Some(inner) => schema = inner,
                None => return schema,
            }
        }
        schema
    }

    /// The item schema of a list or map; the schema itself otherwise.
    fn inside(&self, schema: &'a Value) -> &'a Value {
        let schema = self.resolve(schema);
        for key in ["items", "additionalProperties"] {
            if schema[key].is_object() && schema["properties"].is_null() {
                return self.inside(&schema[key]);
            }
        }
        schema
    }

    fn walk(&self, root: &'a Value, fields: &[&str], kind: &str) -> anyhow::Result<Found<'a>> {
        let mut found = Found { schema: self.resolve(root), description: None, type_name: kind.to_owned() };
        let mut path = kind.to_owned();
        for field in fields {
            let properties = &self.inside(found.schema)["properties"];
            let Some(property) = properties.get(*field) else {
                let mut names: Vec<_> =
                    properties.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                let todo = match names.is_empty() {
                    true => format!("{path} has no fields"),
                    false => format!("{path} has: {}", names.join(", ")),
                };
                return Err(Failure::error(
                    ErrorCode::NotFound,
                    format!("{path} has no field {field:?}"),
                    todo,
                ));
            };
            found = Found {
                schema: property,
                description: property["description"].as_str(),
                type_name: self.type_name(property),
            };
            path.push_str(&format!(".{field}"));
        }
        Ok(found)
    }

    /// The type in kubectl's form: `string`, `[]Object`, `map[string]string`.
    fn type_name(&self, schema: &'a Value) -> String {
        let plain = schema;
        let schema = self.resolve(schema);
        if schema["items"].is_object() {
            return format!("[]{}", self.type_name(&schema["items"]));
        }
        if schema["additionalProperties"].is_object() && schema["properties"].is_null() {
            return format!("map[string]{}", self.type_name(&schema["additionalProperties"]));
        }
        if schema["x-kubernetes-int-or-string"] == true || schema["format"] == "int-or-string" {
            return "IntOrString".into();
        }
        let reference = plain["$ref"].as_str().or_else(|| plain["allOf"][0]["$ref"].as_str());
        if let Some(name) = reference.and_then(|reference| reference.rsplit(['/', '.']).next()) {
            return name.to_owned();
        }
        let of_type = match &schema["type"] {
            Value::String(name) => name.as_str(),
            Value::Array(names) => {
                names.iter().filter_map(Value::as_str).find(|name| *name != "null").unwrap_or("any")
            }
            _ if schema["properties"].is_object() => "object",
            _ => "any",
        };
        if of_type == "object" { "Object".into() } else { of_type.to_owned() }
    }
}

/// Whether a schema is the `null` of a nullable type.
fn is_null(schema: &Value) -> bool {
    schema["type"] == "null" || schema["enum"].as_array().is_some_and(|all| all.iter().all(Value::is_null))
}

fn text(
    kind: &DiscoveredKind,
    fields: &[&str],
    schemas: &Schemas<'_>,
    found: &Found<'_>,
    recursive: bool,
) -> String {
    let mut text = String::new();
    if !kind.group.is_empty() {
        text.push_str(&format!("GROUP:      {}\n", kind.group));
    }
    text.push_str(&format!("KIND:       {}\nVERSION:    {}\n", kind.kind, kind.version));
    if let Some(field) = fields.last() {
        text.push_str(&format!("\nFIELD: {field} <{}>\n", found.type_name));
    }
    let inside = schemas.inside(found.schema);
    let resolved = schemas.resolve(found.schema);
    text.push_str("\nDESCRIPTION:\n");
    // A field's description often repeats the beginning of its type's description.
    let all = [found.description, resolved["description"].as_str(), inside["description"].as_str()];
    let mut said: Vec<&str> = Vec::new();
    for (at, description) in all.iter().enumerate() {
        let Some(description) = *description else { continue };
        let later = all[at + 1..].iter().flatten();
        if !said.contains(&description) && !later.clone().any(|more| more.starts_with(description)) {
            said.push(description);
            text.push_str(&wrapped(description, 4));
        }
    }
    if said.is_empty() {
        text.push_str("    none\n");
    }
    text.push_str(&limits(resolved));
    if inside["properties"].is_object() {
        text.push_str("\nFIELDS:\n");
        properties(schemas, inside, 1, recursive, &mut text);
    }
    text
}

/// The permitted values of a field, if the schema lists them.
fn limits(schema: &Value) -> String {
    let values = schema["enum"].as_array().cloned().unwrap_or_default();
    // schemars represents documented choices as `oneOf` of constants.
    let constants = schema["oneOf"].as_array().into_iter().flatten().flat_map(|one| {
        let constant = (!one["const"].is_null()).then(|| one["const"].clone());
        constant.into_iter().chain(one["enum"].as_array().cloned().unwrap_or_default())
    });
    let all: Vec<_> =
        values.into_iter().chain(constants).filter_map(|v| v.as_str().map(str::to_owned)).collect();
    let mut text = String::new();
    if !all.is_empty() {
        text.push_str(&format!("\nONE OF: {}\n", all.join(", ")));
    }
    if !schema["default"].is_null() {
        text.push_str(&format!("\nDEFAULT: {}\n", schema["default"]));
    }
    text
}

fn properties(schemas: &Schemas<'_>, schema: &Value, depth: usize, recursive: bool, text: &mut String) {
    if depth > DEPTH_MAX {
        return;
    }
    let required: Vec<_> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let indent = "  ".repeat(depth);
        let need = if required.contains(&name.as_str()) { " -required-" } else { "" };
        let local = Schemas(schemas.0);
        text.push_str(&format!("{indent}{name} <{}>{need}\n", local.type_name(property)));
        if recursive {
            properties(schemas, local.inside(property), depth + 1, true, text);
            continue;
        }
        let resolved = local.resolve(property);
        let description = property["description"].as_str().or_else(|| resolved["description"].as_str());
        if let Some(description) = description {
            text.push_str(&wrapped(description, depth * 2 + 2));
        }
        text.push('\n');
    }
}

/// Wraps text at 80 columns.
fn wrapped(words: &str, indent: usize) -> String {
    let mut text = String::new();
    for paragraph in words.split("\n\n") {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            if !line.is_empty() && indent + line.len() + 1 + word.len() > 80 {
                text.push_str(&format!("{}{line}\n", " ".repeat(indent)));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        if !line.is_empty() {
            text.push_str(&format!("{}{line}\n", " ".repeat(indent)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::discovery, *};

    fn schemas() -> Value {
        json!({
            "dev.mayfly.v1.Function": {
                "description": "A function.", "type": "object", "required": ["spec"],
                "x-kubernetes-group-version-kind": [{"group": "mayfly.dev", "version": "v1", "kind": "Function"}],
                "properties": {"spec": {"allOf": [{"$ref": "#/components/schemas/Spec"}], "description": "The wish."}}
            },
            "Spec": {"type": "object", "properties": {
                "env": {"type": "array", "items": {"$ref": "#/components/schemas/core.EnvVar"}},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "isolation": {"description": "Shared or not.", "default": "fresh", "oneOf": [
                    {"const": "fresh", "type": "string"}, {"const": "reuse", "type": "string"}]}
            }},
            "core.EnvVar": {"description": "One variable.", "type": "object", "required": ["name"],
                "properties": {"name": {"type": "string", "description": "Its name."}, "value": {"type": "string"}}}
        })
    }

    fn explain(fields: &[&str], recursive: bool) -> anyhow::Result<String> {
        let (discovery, schemas) = (discovery::for_tests(), schemas());
        let kind = discovery.find("fn")?;
        let schemas = Schemas(&schemas);
        let found = schemas.walk(schemas.of_kind(kind).unwrap(), fields, &kind.kind)?;
        Ok(text(kind, fields, &schemas, &found, recursive))
    }

    #[test]
    fn a_kind() {
        let expected = "GROUP:      mayfly.dev\nKIND:       Function\nVERSION:    v1\n\nDESCRIPTION:\n    A function.\n\n\
                        FIELDS:\n  spec <Spec> -required-\n    The wish.\n\n";
        assert_eq!(explain(&[], false).unwrap(), expected);
    }

    #[test]
    fn a_field_through_references_and_lists() {
        let env = explain(&["spec", "env"], false).unwrap();
        assert!(env.contains("FIELD: env <[]EnvVar>\n"), "{env}");
        assert!(env.contains("  name <string> -required-\n    Its name.\n"), "{env}");
        let name = explain(&["spec", "env", "name"], false).unwrap();
        assert!(name.contains("FIELD: name <string>\n\nDESCRIPTION:\n    Its name.\n"), "{name}");
        let isolation = explain(&["spec", "isolation"], false).unwrap();
        assert!(isolation.contains("ONE OF: fresh, reuse\n\nDEFAULT: \"fresh\"\n"), "{isolation}");
    }

    #[test]
    fn all_fields_at_once() {
        let all = explain(&[], true).unwrap();
        assert!(
            all.contains("  spec <Spec> -required-\n    env <[]EnvVar>\n      name <string> -required-\n"),
            "{all}"
        );
        assert!(all.contains("    labels <map[string]string>\n"), "{all}");
    }

    #[test]
    fn a_field_that_is_not_there() {
        let error = explain(&["spec", "enV"], false).unwrap_err().to_string();
        assert!(error.contains("Function.spec has no field \"enV\""), "{error}");
        assert!(error.contains("has: env, isolation, labels"), "{error}");
    }
}
