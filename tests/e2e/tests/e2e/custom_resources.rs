//! CustomResourceDefinitions with the real kubectl, and with `mayfly apply` in one file.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::kubectl::kubectl_or_skip;

/// A definition whose schema has a default and a field that is pruned, with one object of it.
fn cats() -> String {
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "cats.zoo.example"},
        "spec": {"group": "zoo.example", "scope": "Namespaced",
            "names": {"kind": "Cat", "plural": "cats", "shortNames": ["ct"]},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "additionalPrinterColumns": [{"name": "Lives", "type": "integer", "jsonPath": ".spec.lives"}],
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object",
                    "description": "What the cat is like.",
                    "properties": {"lives": {"type": "integer", "default": 9, "maximum": 9},
                                   "colour": {"type": "string"}}}}}}}]}});
    let cat = json!({"apiVersion": "zoo.example/v1", "kind": "Cat", "metadata": {"name": "tom"},
        "spec": {"colour": "grey"}});
    // The object comes first: mayfly apply puts definitions before it.
    format!("{cat}\n---\n{definition}\n")
}

#[tokio::test]
async fn a_definition_and_its_objects_are_applied_from_one_file() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("cats.yaml");
    std::fs::write(&file, cats())?;
    let file = file.to_string_lossy();
    let applied = kubectl.up.cli().ok(&["apply", "-f", &file]).await?;
    ensure!(
        applied.contains("customresourcedefinition.apiextensions.k8s.io/cats.zoo.example created"),
        "{applied}"
    );
    ensure!(applied.contains("cat.zoo.example/tom created"), "{applied}");

    let listed = kubectl.ok(&["get", "ct"]).await?;
    ensure!(listed.contains("LIVES") && listed.contains("tom    9"), "the default and the column: {listed}");
    let explained = kubectl.ok(&["explain", "cat.spec"]).await?;
    ensure!(explained.contains("What the cat is like.") && explained.contains("lives"), "{explained}");
    let patched =
        kubectl.ok(&["patch", "cat", "tom", "--type=merge", "-p", r#"{"spec":{"lives":8}}"#]).await?;
    ensure!(patched.contains("patched"), "{patched}");
    let refused =
        kubectl.run(&["patch", "cat", "tom", "--type=merge", "-p", r#"{"spec":{"lives":10}}"#]).await?;
    ensure!(
        refused.code == Some(1) && refused.stderr.contains("should be less than or equal to 9"),
        "{}",
        refused.stderr
    );
    kubectl.ok(&["delete", "crd", "cats.zoo.example"]).await?;
    let gone = kubectl.run(&["get", "--raw", "/apis/zoo.example/v1/namespaces/default/cats"]).await?;
    ensure!(gone.code == Some(1), "its objects are served no longer");
    Ok(())
}
