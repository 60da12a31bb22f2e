//! The schemas that are served, compared with upstream's own OpenAPI document.
//!
//! The document is test data and not part of the project: `MAYFLY_TESTDATA`, or `../shared/testdata` beside the
//! checkout, says where it is. Without it this test says so and checks nothing.

use std::{path::PathBuf, process::Command};

use serde_json::Value;

use crate::support::Fixture;

const RULES: [&str; 5] = [
    "x-kubernetes-patch-merge-key",
    "x-kubernetes-patch-strategy",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
];

fn upstream() -> Option<Value> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/testdata");
    let folder = std::env::var_os("MAYFLY_TESTDATA").map_or(beside, PathBuf::from);
    let output =
        Command::new("gzip").arg("-dc").arg(folder.join("kubernetes/openapi-v2.json.gz")).output().ok()?;
    let document = serde_json::from_slice(&output.stdout).ok();
    if document.is_none() {
        eprintln!("skipped: no kubernetes/openapi-v2.json.gz in {}", folder.display());
    }
    document
}

/// The essence of a property: a type, or the name of a definition.
fn essence(property: &Value) -> String {
    let reference = property["$ref"].as_str().or_else(|| property["allOf"][0]["$ref"].as_str());
    match reference {
        Some(reference) => reference.rsplit('/').next().unwrap().to_owned(),
        None => match property["type"].as_str() {
            Some("array") => format!("[{}]", essence(&property["items"])),
            Some("object") if property["additionalProperties"].is_object() => {
                format!("{{{}}}", essence(&property["additionalProperties"]))
            }
            other => other.unwrap_or("any").to_owned(),
        },
    }
}

#[tokio::test]
async fn schemas_are_those_of_upstream() {
    let Some(upstream) = upstream() else { return };
    let server = Fixture::new().await;
    let (mut definitions, mut properties) = (0, 0);
    for path in ["/openapi/v3/api/v1", "/openapi/v3/apis/apps/v1", "/openapi/v3/apis/coordination.k8s.io/v1"]
    {
        let (_, document) = server.get(path).await;
        for (name, ours) in document["components"]["schemas"].as_object().unwrap() {
            let theirs = &upstream["definitions"][name];
            if name.ends_with("List") || theirs.is_null() {
                assert!(name.ends_with("List"), "{name} is unknown to upstream");
                continue;
            }
            definitions += 1;
            for (field, ours) in ours["properties"].as_object().into_iter().flatten() {
                let theirs = &theirs["properties"][field];
                assert!(!theirs.is_null(), "{name}.{field} is unknown to upstream");
                properties += 1;
                for rule in RULES {
                    assert_eq!(ours.get(rule), theirs.get(rule), "{rule} of {name}.{field}");
                }
                assert_eq!(essence(ours), essence(theirs), "{name}.{field}");
                if !ours["description"].is_null()
                    && essence(ours) != "io.k8s.apimachinery.pkg.apis.meta.v1.Time"
                {
                    assert!(theirs["description"].is_string(), "{name}.{field} is described");
                }
            }
        }
    }
    assert!(definitions > 150 && properties > 800, "{definitions} definitions, {properties} properties");
}
