//! Everyday use of kubectl: exports, repeated applies, watches, mistakes.

use anyhow::{Result, ensure};
use mayfly_e2e::{function, guest_or_skip, ready_replicas, wait};
use serde_json::json;

use crate::kubectl::kubectl_or_skip;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_exported_can_be_applied_and_changes_nothing() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    for name in ["one", "two"] {
        kubectl.ok(&["create", "configmap", name, "--from-literal=a=b"]).await?;
    }
    // A `v1` List.
    let exported = kubectl.ok(&["get", "configmaps", "one", "two", "-o", "json"]).await?;
    let mut exported: serde_json::Value = serde_json::from_str(&exported)?;
    ensure!(exported["kind"] == "List", "{exported}");
    for item in exported["items"].as_array_mut().into_iter().flatten() {
        // Removes server-set fields, so that the file is a desired state.
        item["metadata"] = json!({"name": item["metadata"]["name"], "namespace": "default"});
    }
    let file = kubectl.file("exported.json", &exported)?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    let again = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(again.matches("unchanged").count() == 2, "{again}");
    // Spelled differently from the defaults.
    let digest = format!("sha256:{}", "0".repeat(64));
    let spelled = json!({"limits": {"timeout": "60s", "memory": "65536Ki"}, "scaling": {"idleAfter": "90s"}});
    let file = kubectl.file("function.json", &function("spelled", &digest, spelled))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    let again = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(again.contains("unchanged"), "{again}");
    let managers = kubectl.ok(&["get", "function", "spelled", "--show-managed-fields", "-o", "yaml"]).await?;
    ensure!(!managers.contains("manager: unknown"), "{managers}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kind_says_what_it_is() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    for (kind, words) in [("function", "answers HTTP requests"), ("workflow", "Amazon States Language")] {
        let explained = kubectl.ok(&["explain", kind]).await?;
        let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(explained.contains(words), "{explained}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_worded_as_kubernetes_words_them() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let digest = format!("sha256:{}", "0".repeat(64));
    let range = kubectl.file("range.json", &function("f", &digest, json!({"scaling": {"max": -9}})))?;
    let field = json!({"env": [{"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]});
    let field = kubectl.file("field.json", &function("f", &digest, field))?;
    for (arguments, words) in [
        (
            vec!["delete", "namespace", "default"],
            "namespaces \"default\" is forbidden: this namespace may not be deleted",
        ),
        (
            vec!["get", "pods", "--as", "bob"],
            "pods is forbidden: User \"bob\" cannot list resource \"pods\" in API group \"\" in the namespace \"default\"",
        ),
        (vec!["apply", "-f", &range], "spec.scaling.max: invalid value: integer `-9`"),
        (vec!["apply", "-f", &field], "spec.env[0].valueFrom.fieldRef: Forbidden"),
    ] {
        let refused = kubectl.run(&arguments).await?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(words), "{arguments:?}: {refused:?}");
    }
    kubectl.ok(&["get", "namespace", "default"]).await?;
    Ok(())
}

/// Ages in a watch are computed when a line is written.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_during_a_watch_has_an_age() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    kubectl.ok(&["create", "configmap", "before"]).await?;
    let mut watch = kubectl.command(&["get", "configmaps", "--watch"]);
    let mut watch = watch.stdout(std::process::Stdio::piped()).spawn()?;
    let stdout = watch.stdout.take().ok_or_else(|| anyhow::anyhow!("no stdout"))?;
    let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(stdout));
    let mut line_of = async |name: &str| -> Result<String> {
        loop {
            let line = tokio::time::timeout(wait::PATIENCE, lines.next_line()).await??;
            let line = line.ok_or_else(|| anyhow::anyhow!("the watch ended"))?;
            if line.starts_with(name) {
                return Ok(line);
            }
        }
    };
    line_of("before").await?;
    // Creation times are whole seconds: this one must be later than the start of the watch.
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    kubectl.ok(&["create", "configmap", "late"]).await?;
    let line = line_of("late").await?;
    ensure!(!line.contains("invalid"), "{line}");
    watch.kill().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_made_again_takes_its_orphans_back() -> Result<()> {
    guest_or_skip!("hello");
    let kubectl = kubectl_or_skip!();
    let component = kubectl.up.upload("hello").await?;
    let file = kubectl.file("function.json", &function("again", &component, json!({})))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "function/again", "--timeout=60s"]).await?;
    kubectl.ok(&["delete", "function", "again", "--cascade=orphan"]).await?;
    kubectl.ok(&["get", "revision", "again-00001"]).await?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "function/again", "--timeout=60s"]).await?;
    let revisions = kubectl.ok(&["get", "revisions", "-o", "name"]).await?;
    assert_eq!(revisions.trim(), "revision.mayfly.dev/again-00001");
    let owner = "jsonpath={.metadata.ownerReferences[0].name}";
    assert_eq!(kubectl.ok(&["get", "revision", "again-00001", "-o", owner]).await?, "again");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_secret_is_in_the_way_of_ready() -> Result<()> {
    guest_or_skip!("env");
    let kubectl = kubectl_or_skip!();
    let component = kubectl.up.upload("env").await?;
    let env = json!({"scaling": {"min": 1}, "env": [
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}]});
    let file = kubectl.file("secretive.json", &function("secretive", &component, env))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    let condition = "jsonpath={.status.conditions[0].reason} {.status.conditions[0].message}";
    let told = async || kubectl.ok(&["get", "function", "secretive", "-o", condition]).await;
    let expect = async |text: &str| {
        wait::until(&format!("the function says {text:?}"), || async {
            let told = told().await?;
            Ok(told.contains(text).then_some(()))
        })
        .await
    };
    expect("EnvironmentMissing secret default/keys not found (env KEY)").await?;
    kubectl.ok(&["create", "secret", "generic", "keys", "--from-literal=key=value"]).await?;
    expect("Ready ").await?;
    kubectl.up.wait_until_function("secretive", "runs", |f| ready_replicas(f) == 1).await?;
    kubectl.ok(&["delete", "secret", "keys"]).await?;
    expect("EnvironmentMissing").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_definition_hardly_means_is_a_warning() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let states = json!({
        "Choose": {"Type": "Choice", "Choices": [{"Variable": "$.x", "IsPresent": true, "Next": "End"}]},
        "End": {"Type": "Succeed"},
    });
    let definition = json!({"StartAt": "Choose", "States": states});
    let workflow = json!({"apiVersion": "mayfly.dev/v1", "kind": "Workflow", "metadata": {"name": "choosy"},
        "spec": {"definition": definition}});
    let applied = kubectl.run(&["apply", "-f", &kubectl.file("workflow.json", &workflow)?]).await?;
    ensure!(applied.code == Some(0) && applied.stderr.contains("Warning: spec.definition"), "{applied:?}");
    let file = kubectl.file("choosy-2.json", &definition)?;
    let deployed = kubectl.up.cli().run(&["workflow", "deploy", &file]).await?;
    ensure!(deployed.code == Some(0) && deployed.stderr.contains("warning: "), "{deployed:?}");
    Ok(())
}
