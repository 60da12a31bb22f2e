//! Workflows and executions as objects: changes by kubectl appear in the Step Functions API, and vice versa.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Cli, Start, Up, wait::until};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use super::{
    kubectl::{Kubectl, kubectl_or_skip},
    workflows::{call, create, ended, start},
};

fn arn(name: &str) -> String {
    format!("arn:aws:states:us-east-1:000000000000:stateMachine:{name}")
}

fn workflow(name: &str, definition: Value) -> Value {
    json!({"apiVersion": "mayfly.dev/v1", "kind": "Workflow", "metadata": {"name": name}, "spec": {"definition": definition}})
}

/// `ResultPath: null` has a meaning, so the null must be kept.
fn two_steps(seconds: u32) -> Value {
    json!({"StartAt": "A", "States": {
        "A": {"Type": "Pass", "Result": 1, "ResultPath": null, "Next": "B"},
        "B": {"Type": "Wait", "Seconds": seconds, "End": true}}})
}

/// The definition of a state machine in the Step Functions API, once it is `expected`.
async fn until_defined(up: &Up, name: &str, expected: &Value) -> Result<()> {
    until(&format!("{name} does {expected}"), async || {
        let told = call(up, "DescribeStateMachine", json!({"stateMachineArn": arn(name)})).await?;
        let definition: Value = serde_json::from_str(told["definition"].as_str().unwrap_or_default())?;
        Ok((definition == *expected).then_some(()))
    })
    .await
}

/// The definition in the object, once it is `expected`.
async fn until_object(kubectl: &Kubectl, name: &str, expected: &Value) -> Result<()> {
    until(&format!("workflow {name} says {expected}"), async || {
        let object = kubectl.ok(&["get", "workflow", name, "-o", "json"]).await?;
        let object: Value = serde_json::from_str(&object)?;
        Ok((object["spec"]["definition"] == *expected).then_some(()))
    })
    .await
}

async fn apply(kubectl: &Kubectl, name: &str, definition: &Value) -> Result<()> {
    let file = kubectl.file(&format!("{name}.json"), &workflow(name, definition.clone()))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", &format!("workflow/{name}"), "--timeout=60s"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workflow_that_is_applied_is_a_state_machine() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    apply(&kubectl, "order", &two_steps(0)).await?;
    until_defined(up, "order", &two_steps(0)).await?;
    let told = ended(up, &start(up, &arn("order"), json!({"a": 1})).await?).await?;
    ensure!(told["status"] == "SUCCEEDED" && told["output"] == r#"{"a":1}"#, "{told}");
    let listed = kubectl.ok(&["get", "workflows", "-o", "wide"]).await?;
    ensure!(
        listed.contains("STANDARD") && listed.contains("True") && listed.contains(&arn("order")),
        "{listed}"
    );

    // Changed by kubectl, including nulls.
    apply(&kubectl, "order", &two_steps(1)).await?;
    until_defined(up, "order", &two_steps(1)).await?;
    // Changed by the API: the object is updated, and the next apply is not merged with it.
    let other = json!({"StartAt": "C", "States": {"C": {"Type": "Pass", "OutputPath": null, "End": true}}});
    let parameters = json!({"stateMachineArn": arn("order"), "definition": other.to_string()});
    call(up, "UpdateStateMachine", parameters).await?;
    until_object(&kubectl, "order", &other).await?;
    apply(&kubectl, "order", &two_steps(2)).await?;
    until_defined(up, "order", &two_steps(2)).await?;
    // Deployed twice by the command.
    let file = kubectl.file("order.asl.json", &other)?;
    let deploy = ["workflow", "deploy", &file, "--name", "order"];
    ensure!(up.cli().ok(&deploy).await?.contains("updated"));
    ensure!(up.cli().ok(&deploy).await?.contains("unchanged"));
    until_object(&kubectl, "order", &other).await?;

    kubectl.ok(&["delete", "workflow", "order"]).await?;
    let missing = call(up, "DescribeStateMachine", json!({"stateMachineArn": arn("order")})).await;
    ensure!(missing.is_err_and(|error| error.to_string().contains("StateMachineDoesNotExist")));
    // Its executions still exist, and its name is free.
    ensure!(kubectl.ok(&["get", "executions"]).await?.contains("SUCCEEDED"));
    apply(&kubectl, "order", &two_steps(0)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_machine_is_a_workflow() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    kubectl.ok(&["create", "namespace", "shop"]).await?;
    for (name, namespace, object) in
        [("order", "default", "order"), ("shop.order", "shop", "order"), ("Order_2", "default", "order-2-")]
    {
        let machine = create(up, name, "STANDARD", two_steps(0)).await?;
        let found = until(&format!("{name} is an object"), async || {
            let listed = kubectl.ok(&["get", "workflows", "-n", namespace, "-o", "json"]).await?;
            let listed: Value = serde_json::from_str(&listed)?;
            let items = listed["items"].as_array().context("no items")?;
            Ok(items.iter().find(|item| item["status"]["stateMachineArn"] == machine.as_str()).cloned())
        })
        .await?;
        let called = found["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        ensure!(called.starts_with(object) && found["spec"]["definition"] == two_steps(0), "{found}");
        // A change of the object changes the state machine.
        let definition = json!({"StartAt": "A", "States": {"A": {"Type": "Succeed"}}});
        let patch = json!([{"op": "replace", "path": "/spec/definition", "value": definition}]).to_string();
        kubectl.ok(&["patch", "workflow", &called, "-n", namespace, "--type=json", "-p", &patch]).await?;
        until_defined(up, name, &definition).await?;
        call(up, "DeleteStateMachine", json!({"stateMachineArn": machine})).await?;
        until("the object goes with its state machine", async || {
            let left = kubectl.ok(&["get", "workflows", "-n", namespace, "-o", "name"]).await?;
            Ok((!left.contains(&called)).then_some(()))
        })
        .await?;
    }
    // Machines of a deleted namespace are deleted as well.
    create(up, "shop.last", "STANDARD", two_steps(0)).await?;
    until("it is an object", async || Ok(kubectl.ok(&["get", "wf", "last", "-n", "shop"]).await.ok()))
        .await?;
    kubectl.ok(&["delete", "namespace", "shop", "--timeout=60s"]).await?;
    let left = call(up, "ListStateMachines", json!({})).await?;
    ensure!(left["stateMachines"] == json!([]), "{left}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn executions_are_listed_described_and_watched() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    // Long enough to be still running when kubectl lists it.
    apply(&kubectl, "good", &two_steps(8)).await?;
    let fails =
        json!({"StartAt": "F", "States": {"F": {"Type": "Fail", "Error": "Oops", "Cause": "because"}}});
    apply(&kubectl, "bad", &fails).await?;
    let mut watching = kubectl.command(&[
        "get",
        "executions",
        "--watch-only",
        "-o",
        "jsonpath={.metadata.name} {.status.phase}{\"\\n\"}",
    ]);
    let mut watching = watching.stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(watching.stdout.take().context("no stdout")?).lines();
    let parameters = json!({"stateMachineArn": arn("good"), "name": "Run_1", "input": r#"{"a":1}"#});
    // Events before the watch begins are missed: start executions until one is seen.
    let mut first = None;
    for n in 0..100 {
        ended(up, &start(up, &arn("bad"), json!({"n": n})).await?).await?;
        let wait = std::time::Duration::from_millis(200);
        if let Ok(line) = tokio::time::timeout(wait, lines.next_line()).await {
            first = line?;
            break;
        }
    }
    ensure!(first.context("the watch tells nothing")?.ends_with(" RUNNING"));
    call(up, "StartExecution", parameters).await?;
    let running =
        ["get", "executions", "--field-selector", "spec.workflow=good,status.phase=RUNNING", "-o", "name"];
    assert_eq!(kubectl.ok(&running).await?.trim(), "execution.mayfly.dev/good.x---52un-5f1");
    let mut seen = Vec::new();
    while !seen.contains(&"good.x---52un-5f1 SUCCEEDED".to_owned()) {
        let line = tokio::time::timeout(mayfly_e2e::wait::PATIENCE, lines.next_line()).await??;
        seen.push(line.context("the watch ended")?);
    }
    ensure!(seen.contains(&"good.x---52un-5f1 RUNNING".to_owned()), "{seen:?}");
    watching.kill().await?;
    ensure!(kubectl.ok(&running).await?.trim().is_empty());
    // Pages of two, with a label selector.
    let paged = kubectl.ok(&["get", "executions", "--chunk-size=2", "-l", "mayfly.dev/workflow=bad"]).await?;
    ensure!(!paged.contains("good") && paged.contains("FAILED"), "{paged}");
    let described = kubectl.ok(&["describe", "execution", "good.x---52un-5f1"]).await?;
    for part in ["{\"a\":1}", "WaitStateEntered B", "ExecutionSucceeded", "SUCCEEDED"] {
        ensure!(described.contains(part), "{part} is not in\n{described}");
    }
    let table = up.cli().ok(&["get", "workflows,executions"]).await?;
    ensure!(table.contains("workflow/good") && table.contains("execution/good.x---52un-5f1"), "{table}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_with_every_reason() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let mut broken = workflow(
        "broken",
        json!({"StartAt": "Nowhere", "States": {
        "A": {"Type": "Pass", "Next": "B"}, "C": {"Type": "Task", "Resource": "nonsense", "Foo": 1, "End": true}}}),
    );
    broken["spec"]["triggers"] =
        json!([{"name": "t", "schedule": {"cron": "61 * * * *", "timeZone": "UTC"}}]);
    let file = kubectl.file("broken.json", &broken)?;
    let refused = kubectl.run(&["apply", "-f", &file]).await?;
    for part in ["/States/C/Resource", "'Foo'", "SCHEMA_VALIDATION_FAILED", "spec.triggers[0].schedule.cron"]
    {
        ensure!(refused.code != Some(0) && refused.stderr.contains(part), "{part}: {refused:?}");
    }
    for text in ["{", "[]", "{\"StartAt\": 1}"] {
        let file = kubectl.file("text.json", &workflow("text", text.into()))?;
        let refused = kubectl.run(&["apply", "-f", &file]).await?;
        ensure!(refused.code != Some(0) && refused.stderr.contains("spec.definition"), "{text}: {refused:?}");
    }
    // The type is immutable, and executions cannot be written.
    apply(&kubectl, "order", &two_steps(0)).await?;
    let refused = kubectl
        .run(&["patch", "wf", "order", "--type=merge", "-p", r#"{"spec":{"type":"EXPRESS"}}"#])
        .await?;
    ensure!(refused.stderr.contains("immutable"), "{refused:?}");
    let execution = json!({"apiVersion": "mayfly.dev/v1", "kind": "Execution", "metadata": {"name": "order.a"},
        "spec": {"workflow": "order", "name": "a", "executionArn": "a", "stateMachineArn": "b"}});
    let file = kubectl.file("execution.json", &execution)?;
    for arguments in [&["create", "-f", &file][..], &["delete", "execution", "order.a"]] {
        let refused = kubectl.run(arguments).await?;
        ensure!(refused.stderr.contains("mayfly workflow start"), "{arguments:?}: {refused:?}");
    }
    Ok(())
}

/// A damaged catalog may be moved away, as its error message says, without the loss of objects.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_catalog_is_made_again_from_the_objects() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let up = Start::default().in_folder(folder.path()).ready().await?;
    create(&up, "kept", "STANDARD", two_steps(0)).await?;
    let deleted = create(&up, "deleted", "STANDARD", two_steps(0)).await?;
    let agreed = |name: &'static str, cli: Cli| async move {
        until(&format!("{name} has an object"), async || {
            let finished = cli.run(&["get", "workflow", name, "--output", "json"]).await?;
            Ok(finished.stdout.contains("definitionDigest").then_some(()))
        })
        .await
    };
    agreed("kept", up.cli()).await?;
    agreed("deleted", up.cli()).await?;
    call(&up, "DeleteStateMachine", json!({"stateMachineArn": deleted})).await?;
    until("its object is gone", async || {
        Ok((up.cli().run(&["get", "workflow", "deleted"]).await?.code != Some(0)).then_some(()))
    })
    .await?;
    up.stop().await?;

    for file in std::fs::read_dir(folder.path().join("workflows"))? {
        let file = file?.path();
        if file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("catalog.db")) {
            std::fs::remove_file(file)?;
        }
    }
    let up = Start::default().in_folder(folder.path()).ready().await?;
    until("the machine is there again", async || {
        let told = call(&up, "DescribeStateMachine", json!({"stateMachineArn": arn("kept")})).await;
        Ok(told.is_ok().then_some(()))
    })
    .await?;
    until_defined(&up, "kept", &two_steps(0)).await?;
    let told = ended(&up, &start(&up, &arn("kept"), json!({"a": 1})).await?).await?;
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    ensure!(call(&up, "DescribeStateMachine", json!({"stateMachineArn": deleted})).await.is_err());
    up.stop().await
}
