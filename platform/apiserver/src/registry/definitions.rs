//! CustomResourceDefinitions. The rules are upstream's (`apiextensions-apiserver/pkg/apis/apiextensions`);
//! [`crate::custom`] serves the defined kinds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};

use super::{Column, Kind, NAME, defaulting::fill};
use crate::{
    custom,
    object::{Object, map_at},
};

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["crd", "crds"],
        categories: &["api-extensions"],
        namespaced: false,
        generation: true,
        columns: const {
            &[
                NAME,
                Column::date(
                    "Created At",
                    "CreationTimestamp is a timestamp representing the server time when this object was created.",
                ),
            ]
        },
        cells: |object, _| vec![object.name().into(), object.meta_str("creationTimestamp").into()],
        defaults,
        validate: custom::definition_errors,
        ..Kind::built_in::<CustomResourceDefinition>("customresourcedefinition")
    }]
}

fn defaults(object: &mut Object) {
    let spec = object.map_mut("spec");
    let names = map_at(spec, "names");
    let kind = names.get("kind").and_then(Value::as_str).unwrap_or("").to_owned();
    if !kind.is_empty() {
        fill(names, [("singular", json!(kind.to_lowercase())), ("listKind", json!(format!("{kind}List")))]);
    }
    fill(map_at(spec, "conversion"), [("strategy", json!("None"))]);
}
