//! Converts versions of a CustomResourceDefinition to rows of the registry.

use std::cmp::Reverse;

use hashbrown::HashMap;
use jiff::Timestamp;
use mayfly_api::{names, validation::FieldError};
use regex::Regex;
use serde_json::{Value, json};

use super::{
    columns::{JsonPath, PrinterColumn},
    prune,
    rules::ValidationRules,
    validate,
};
use crate::{
    object::Object,
    registry::{Column, Kind, Subresource, rules_items},
    schema::{Findings, NodeId, normalise_metadata, schemas},
};

/// A compiled version of a definition.
#[derive(Debug)]
pub(crate) struct CustomVersion {
    /// The name of the schema in OpenAPI documents: `dev.example.v1.Widget`.
    pub(crate) definition: String,
    /// The structural schema; an open object where the definition has none.
    pub(crate) schema: Value,
    root: NodeId,
    patterns: HashMap<String, Regex>,
    rules: Option<ValidationRules>,
    columns: Vec<PrinterColumn>,
    pub(crate) scale: Option<ScalePaths>,
    /// `group/version` of stored objects.
    stored: String,
    /// More than one version is defined, so a stored object may carry another apiVersion.
    converts: bool,
    api_version: String,
    /// The warning of every response, if the version is deprecated.
    pub(crate) deprecation: Option<String>,
}

/// The paths of the scale subresource.
#[derive(Clone, Debug)]
pub(crate) struct ScalePaths {
    pub(crate) spec_replicas: Vec<String>,
    pub(crate) status_replicas: Vec<String>,
    pub(crate) selector: Option<Vec<String>>,
}

impl CustomVersion {
    pub(crate) fn root(&self) -> NodeId {
        self.root
    }

    /// Removes unknown fields, and names them.
    pub(crate) fn prune(&self, kind: &Kind, object: &mut serde_json::Map<String, Value>) -> Findings {
        let mut findings = normalise_metadata(kind, self.root, object);
        prune::prune_object(&self.schema, object, &mut findings.unknown);
        findings
    }

    pub(crate) fn fill_defaults(&self, object: &mut Object) {
        prune::fill_object(&self.schema, &mut object.0);
    }

    /// Validates an object by its schema, and by its rules unless an error of the schema prevents that. `old`: the
    /// object before an update.
    pub(crate) fn validate(&self, object: &Object, old: Option<&Object>) -> Vec<FieldError> {
        let mut errors = validate::object_errors(&self.schema, &self.patterns, object);
        if let Some(rules) = &self.rules {
            match errors.iter().any(validate::hides_rules) {
                true => errors.push(ValidationRules::not_checked()),
                false => errors.extend(rules.errors(&self.schema, object, old)),
            }
        }
        errors
    }

    pub(crate) fn cells(&self, object: &Object, now: Timestamp) -> Vec<Value> {
        let name = std::iter::once(object.name().into());
        name.chain(self.columns.iter().map(|column| column.cell(object, now))).collect()
    }

    /// Whether stored objects may be of another version.
    pub(crate) fn converts(&self) -> bool {
        self.converts
    }

    /// Strategy `None`: versions differ in their apiVersion only.
    pub(crate) fn to_this_version(&self, object: &mut Object) {
        object.0.insert("apiVersion".into(), self.api_version.as_str().into());
    }

    pub(crate) fn to_storage(&self, object: &mut Object) {
        object.0.insert("apiVersion".into(), self.stored.as_str().into());
    }
}

/// Whether a condition of a definition is true.
pub(super) fn has_condition(definition: &Object, name: &str) -> bool {
    let conditions = definition.at(&["status", "conditions"]).and_then(Value::as_array);
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition["type"] == name && condition["status"] == "True")
}

/// The served versions; none if the definition's names are not accepted.
pub(super) fn served_versions(definition: &Object) -> impl Iterator<Item = &Value> {
    let established = has_condition(definition, "Established");
    let versions = definition.at(&["spec", "versions"]).and_then(Value::as_array);
    let versions = versions.into_iter().flatten();
    versions.filter(move |version| established && version["served"] == true)
}

/// Stable versions first, then beta, then alpha, each with the highest number first; other names last.
pub(super) fn priority(version: &str) -> (u8, Reverse<u64>, Reverse<u64>, String) {
    let other = || (3, Reverse(0), Reverse(0), version.to_owned());
    let Some(rest) = version.strip_prefix('v') else { return other() };
    let (major, stage, minor) = match (rest.split_once("alpha"), rest.split_once("beta")) {
        (Some((major, minor)), _) => (major, 2, minor),
        (None, Some((major, minor))) => (major, 1, minor),
        (None, None) => (rest, 0, "0"),
    };
    match (major.parse(), minor.parse()) {
        (Ok(major), Ok(minor)) => (stage, Reverse(major), Reverse(minor), String::new()),
        _ => other(),
    }
}

fn leak(text: &Value) -> &'static str {
    Box::leak(text.as_str().unwrap_or("").to_owned().into_boxed_str())
}

fn leak_list(list: &Value) -> &'static [&'static str] {
    Box::leak(rules_items(list).map(leak).collect())
}

/// `.spec.replicas` to its segments.
fn dotted(path: &Value) -> Option<Vec<String>> {
    let path = path.as_str()?.trim_start_matches('.');
    (!path.is_empty()).then(|| path.split('.').map(str::to_owned).collect())
}

/// The row of one version. It is leaked: see [`super::CustomKinds`].
pub(super) fn row(definition: &Object, version: &Value) -> &'static Kind {
    let spec = definition.at(&["spec"]).unwrap_or(&Value::Null);
    let names = &spec["names"];
    let status = version["subresources"]["status"].is_object();
    let custom = custom_version(spec, version);
    let has_scale = custom.scale.is_some();
    let columns: Vec<Column> =
        std::iter::once(crate::registry::NAME).chain(custom.columns.iter().map(table_column)).collect();
    let selectable: Vec<(&str, &str)> = rules_items(&version["selectableFields"])
        .filter_map(|field| dotted(&field["jsonPath"]))
        .map(|path| (&*Box::leak(path.join(".").into_boxed_str()), ""))
        .collect();
    let group = leak(&spec["group"]);
    let custom: &'static CustomVersion = Box::leak(Box::new(custom));
    Box::leak(Box::new(Kind {
        group,
        version: leak(&version["name"]),
        kind: leak(&names["kind"]),
        plural: leak(&names["plural"]),
        singular: leak(&names["singular"]),
        short_names: leak_list(&names["shortNames"]),
        categories: leak_list(&names["categories"]),
        namespaced: spec["scope"] == "Namespaced",
        status,
        subresources: if has_scale { &[Subresource::Scale] } else { &[] },
        columns: Box::leak(columns.into_boxed_slice()),
        selectable: Box::leak(selectable.into_boxed_slice()),
        on_create: match status {
            true => |object| _ = object.0.remove("status"),
            false => |_| {},
        },
        valid_name: names::dns_subdomain,
        definition: Some(custom),
        ..Kind::of_definition()
    }))
}

fn table_column(column: &PrinterColumn) -> Column {
    let leak = |text: &str| &*Box::leak(text.to_owned().into_boxed_str());
    Column {
        name: leak(&column.name),
        kind: leak(&column.kind),
        format: leak(&column.format),
        description: leak(&column.description),
        priority: column.priority,
    }
}

fn custom_version(spec: &Value, version: &Value) -> CustomVersion {
    let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
    let (group, name, kind) = (text(&spec["group"]), text(&version["name"]), text(&spec["names"]["kind"]));
    let reversed: Vec<&str> = group.split('.').rev().collect();
    let definition = format!("{}.{name}.{kind}", reversed.join("."));
    let schema = match &version["schema"]["openAPIV3Schema"] {
        Value::Null => json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}),
        schema => schema.clone(),
    };
    let mut patterns = HashMap::new();
    validate::collect_patterns(&schema, &mut patterns);
    let versions: Vec<_> = rules_items(&spec["versions"]).collect();
    let storage = versions.iter().find(|version| version["storage"] == true);
    let columns = match &version["additionalPrinterColumns"] {
        Value::Array(columns) if !columns.is_empty() => {
            columns.iter().filter_map(PrinterColumn::parse).collect()
        }
        _ => vec![PrinterColumn::age()],
    };
    let scale = &version["subresources"]["scale"];
    let scale = dotted(&scale["specReplicasPath"]).zip(dotted(&scale["statusReplicasPath"])).map(
        |(spec_replicas, status_replicas)| ScalePaths {
            spec_replicas,
            status_replicas,
            selector: dotted(&scale["labelSelectorPath"]),
        },
    );
    let deprecation = (version["deprecated"] == true).then(|| {
        let of_author = version["deprecationWarning"].as_str();
        of_author.map_or_else(|| format!("{group}/{name} {kind} is deprecated"), str::to_owned)
    });
    CustomVersion {
        deprecation,
        root: schemas().custom_root(&definition, &schema),
        stored: format!("{group}/{}", storage.map_or("", |version| version["name"].as_str().unwrap_or(""))),
        api_version: format!("{group}/{name}"),
        converts: versions.len() > 1,
        definition,
        rules: ValidationRules::of(&schema),
        schema,
        patterns,
        columns,
        scale,
    }
}

/// Parses the path of a column, for the validation of definitions.
pub(super) fn is_json_path(text: &str) -> bool {
    JsonPath::parse(text).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_stability_and_number() {
        let mut versions = ["v1alpha1", "foo", "v2", "v1beta2", "v10", "v1beta1", "v1"];
        versions.sort_by_key(|version| priority(version));
        assert_eq!(versions, ["v10", "v2", "v1", "v1beta2", "v1beta1", "v1alpha1", "foo"]);
    }
}
