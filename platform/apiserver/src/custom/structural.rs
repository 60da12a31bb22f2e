//! Validation of CustomResourceDefinitions: names, versions and structural schemas, with upstream's messages.

use mayfly_api::{names, validation::FieldError};
use serde_json::Value;

use super::{rows::is_json_path, rules, validate::default_errors};
use crate::{object::Object, registry::rules_items};

/// Deepest nesting of a schema.
const DEPTH_MAX: usize = 64;
const TYPES: [&str; 6] = ["object", "array", "string", "integer", "number", "boolean"];

/// Validates a definition.
pub(crate) fn definition_errors(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = new.at(&["spec"]).unwrap_or(&Value::Null);
    let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
    let (group, plural) = (text(&spec["group"]), text(&spec["names"]["plural"]));
    if !new.name().is_empty() && new.name() != format!("{plural}.{group}") {
        let detail = "must be spec.names.plural+\".\"+spec.group";
        errors.push(FieldError::invalid("metadata.name", format!("{:?}", new.name()), detail));
    }
    if group.is_empty() {
        errors.push(FieldError::required("spec.group", ""));
    } else if let Err(why) = names::dns_subdomain(&group) {
        errors.push(FieldError::invalid("spec.group", format!("{group:?}"), why));
    } else if !group.contains('.') {
        let detail = "should be a domain with at least one dot";
        errors.push(FieldError::invalid("spec.group", format!("{group:?}"), detail));
    }
    let scope = text(&spec["scope"]);
    if scope.is_empty() {
        errors.push(FieldError::required("spec.scope", ""));
    } else if !matches!(scope.as_str(), "Cluster" | "Namespaced") {
        errors.push(not_supported("spec.scope", &scope, "\"Cluster\", \"Namespaced\""));
    }
    if spec["preserveUnknownFields"] == true {
        let detail = "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in \
                      spec.versions[*].schema instead";
        errors.push(FieldError::invalid("spec.preserveUnknownFields", "true", detail));
    }
    let strategy = text(&spec["conversion"]["strategy"]);
    if !matches!(strategy.as_str(), "" | "None") {
        errors.push(not_supported("spec.conversion.strategy", &strategy, "\"None\""));
    }
    name_errors(&spec["names"], &mut errors);
    version_errors(spec, &mut errors);
    if rules_items(new.at(&["status", "storedVersions"]).unwrap_or(&Value::Null)).next().is_none() {
        let detail = "must have at least one stored version";
        errors.push(FieldError::invalid("status.storedVersions", "[]string(nil)", detail));
    }
    if let Some(old) = old {
        update_errors(new, old, &mut errors);
    }
    errors
}

fn not_supported(path: &str, value: &str, supported: &str) -> FieldError {
    use mayfly_api::validation::FieldErrorKind::NotSupported;
    let kind = NotSupported { value: format!("{value:?}") };
    FieldError { path: path.into(), kind, detail: format!("supported values: {supported}") }
}

fn name_errors(names: &Value, errors: &mut Vec<FieldError>) {
    for field in ["plural", "singular", "kind", "listKind"] {
        let (path, name) = (format!("spec.names.{field}"), names[field].as_str().unwrap_or(""));
        if name.is_empty() {
            errors.push(FieldError::required(path, ""));
        } else if let Err(why) = names::dns_label(&name.to_lowercase()) {
            errors.push(FieldError::invalid(path, format!("{name:?}"), why));
        }
    }
    for field in ["shortNames", "categories"] {
        for (at, name) in rules_items(&names[field]).enumerate() {
            if let Err(why) = names::dns_label(name.as_str().unwrap_or("")) {
                errors.push(FieldError::invalid(format!("spec.names.{field}[{at}]"), name, why));
            }
        }
    }
    if names["kind"] == names["listKind"] {
        let detail = "kind and listKind may not be the same";
        errors.push(FieldError::invalid("spec.names.listKind", &names["listKind"], detail));
    }
}

fn version_errors(spec: &Value, errors: &mut Vec<FieldError>) {
    let versions: Vec<_> = rules_items(&spec["versions"]).collect();
    if versions.iter().filter(|version| version["storage"] == true).count() != 1 {
        let detail = "must have exactly one version marked as storage version";
        errors.push(FieldError::invalid("spec.versions", go_versions(&versions), detail));
    }
    let (one_schema, one_table) =
        (is_common(&versions, "schema"), is_common(&versions, "additionalPrinterColumns"));
    for (at, version) in versions.iter().enumerate() {
        let path = format!("spec.versions[{at}]");
        let name = version["name"].as_str().unwrap_or("");
        if let Err(why) = names::dns_label(name) {
            errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), why));
        }
        if versions[..at].iter().any(|other| other["name"] == version["name"]) {
            let detail = "must contain unique version names";
            errors.push(FieldError::invalid("spec.versions", format!("{name:?}"), detail));
        }
        // Upstream's internal form has the fields that all versions share at the top level.
        let of_columns = if one_table { "spec".to_owned() } else { path.clone() };
        let columns = rules_items(&version["additionalPrinterColumns"]).filter(|_| at == 0 || !one_table);
        for (column, value) in columns.enumerate() {
            let path = format!("{of_columns}.additionalPrinterColumns[{column}]");
            if !is_json_path(value["jsonPath"].as_str().unwrap_or("")) {
                let detail = "is not a path of fields, indexes, * and filters by equality";
                errors.push(FieldError::invalid(format!("{path}.jsonPath"), &value["jsonPath"], detail));
            }
            let kind = value["type"].as_str().unwrap_or("");
            if !matches!(kind, "integer" | "number" | "string" | "boolean" | "date") {
                let supported = "\"boolean\", \"date\", \"integer\", \"number\", \"string\"";
                errors.push(not_supported(&format!("{path}.type"), kind, supported));
            }
        }
        let is_shared = one_schema && version["schema"].is_object();
        if is_shared && at > 0 {
            continue;
        }
        let path = match is_shared {
            true => "spec.validation.openAPIV3Schema".to_owned(),
            false => format!("{path}.schema.openAPIV3Schema"),
        };
        let schema = &version["schema"]["openAPIV3Schema"];
        if !schema.is_object() {
            errors.push(FieldError::required(path, "schemas are required"));
            continue;
        }
        if schema["type"] != "object" {
            errors.push(FieldError::invalid(
                format!("{path}.type"),
                &schema["type"],
                "must be object at the root",
            ));
        }
        schema_errors(schema, &path, 0, errors);
    }
}

/// Whether all versions have the same value in a field.
fn is_common(versions: &[&Value], field: &str) -> bool {
    versions.iter().all(|version| version[field] == versions[0][field])
}

/// The versions as Go prints the structs, without the fields that all share.
fn go_versions(versions: &[&Value]) -> String {
    let own = |field: &str, kind: &str, version: &Value| {
        let is_shown = !version[field].is_null() && !is_common(versions, field);
        format!("(*apiextensions.{kind})({})", if is_shown { "0xc000000000" } else { "nil" })
    };
    let shown: Vec<_> = versions
        .iter()
        .map(|version| {
            format!(
                "apiextensions.CustomResourceDefinitionVersion{{Name:{:?}, Served:{}, Storage:{}, Deprecated:{}, \
                 DeprecationWarning:(*string)({}), Schema:{}, Subresources:{}, \
                 AdditionalPrinterColumns:[]apiextensions.CustomResourceColumnDefinition(nil)}}",
                version["name"].as_str().unwrap_or(""),
                version["served"] == true,
                version["storage"] == true,
                version["deprecated"] == true,
                if version["deprecationWarning"].is_null() { "nil" } else { "0xc000000000" },
                own("schema", "CustomResourceValidation", version),
                own("subresources", "CustomResourceSubresources", version),
            )
        })
        .collect();
    format!("[]apiextensions.CustomResourceDefinitionVersion{{{}}}", shown.join(", "))
}

/// The rules of structural schemas (upstream's `schema.ValidateStructural`).
fn schema_errors(schema: &Value, path: &str, depth: usize, errors: &mut Vec<FieldError>) {
    if depth > DEPTH_MAX {
        errors
            .push(FieldError::forbidden(path, format!("schemas may not be nested deeper than {DEPTH_MAX}")));
        return;
    }
    let flag = |name: &str| schema[name] == true;
    let kind = schema["type"].as_str().unwrap_or("");
    let open = flag("x-kubernetes-int-or-string") || flag("x-kubernetes-preserve-unknown-fields");
    if kind.is_empty() && !open {
        errors.push(FieldError::required(
            format!("{path}.type"),
            "must not be empty for specified object fields",
        ));
    } else if !kind.is_empty() && !TYPES.contains(&kind) {
        let supported = TYPES.map(|name| format!("{name:?}")).join(", ");
        errors.push(not_supported(&format!("{path}.type"), kind, &supported));
    }
    for field in ["$ref", "definitions", "dependencies", "patternProperties", "id"] {
        if !schema[field].is_null() {
            errors
                .push(FieldError::forbidden(format!("{path}.{field}"), format!("{field} is not supported")));
        }
    }
    if flag("uniqueItems") {
        let detail = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic";
        errors.push(FieldError::forbidden(format!("{path}.uniqueItems"), detail));
    }
    if schema["additionalProperties"] == false {
        let detail = "must not be used: unknown fields are pruned";
        errors.push(FieldError::forbidden(format!("{path}.additionalProperties"), detail));
    }
    if schema["properties"].as_object().is_some_and(|map| !map.is_empty())
        && !schema["additionalProperties"].is_null()
    {
        let detail = "additionalProperties and properties are mutual exclusive";
        errors.push(FieldError::forbidden(format!("{path}.additionalProperties"), detail));
    }
    rules::schema_errors(schema, path, errors);
    if !schema["default"].is_null() {
        errors.extend(default_errors(schema, &format!("{path}.default")));
    }
    if let Some(pattern) = schema["pattern"].as_str()
        && let Err(error) = regex::Regex::new(pattern)
    {
        let detail = format!("must be a valid regular expression, but isn't: {error}");
        errors.push(FieldError::invalid(format!("{path}.pattern"), format!("{pattern:?}"), detail));
    }
    if schema["x-kubernetes-list-type"] == "map"
        && rules_items(&schema["x-kubernetes-list-map-keys"]).next().is_none()
    {
        let detail = "must not be empty if x-kubernetes-list-type is map";
        errors.push(FieldError::required(format!("{path}.x-kubernetes-list-map-keys"), detail));
    }
    if kind == "array" && !schema["items"].is_object() {
        errors.push(FieldError::required(format!("{path}.items"), "must be specified"));
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        // The root's metadata may restrict names only, and needs no type.
        if depth == 0 && name == "metadata" {
            continue;
        }
        schema_errors(property, &format!("{path}.properties[{name}]"), depth + 1, errors);
    }
    for field in ["items", "additionalProperties"] {
        if schema[field].is_object() {
            schema_errors(&schema[field], &format!("{path}.{field}"), depth + 1, errors);
        }
    }
}

fn update_errors(new: &Object, old: &Object, errors: &mut Vec<FieldError>) {
    for path in
        [&["spec", "group"][..], &["spec", "scope"], &["spec", "names", "plural"], &["spec", "names", "kind"]]
    {
        if new.at(path) != old.at(path) {
            let shown = new.at(path).map_or_else(|| "null".to_owned(), Value::to_string);
            errors.push(FieldError::invalid(path.join("."), shown, "field is immutable"));
        }
    }
    let versions = new.at(&["spec", "versions"]).unwrap_or(&Value::Null);
    let stored = old.at(&["status", "storedVersions"]).unwrap_or(&Value::Null);
    for (at, stored) in rules_items(stored).enumerate() {
        if !rules_items(versions).any(|version| version["name"] == *stored) {
            let detail = format!(
                "missing from spec.versions; {} was previously a storage version, and must remain in spec.versions \
                 until a storage migration ensures no data remains persisted in {0} and removes {0} from \
                 status.storedVersions",
                stored.as_str().unwrap_or("")
            );
            errors.push(FieldError::invalid(format!("status.storedVersions[{at}]"), stored, detail));
        }
    }
}
