//! The examples of workflows, applied with kubectl and run to the documented end.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use http::Method;
use mayfly_e2e::{full, guest_or_skip, skipped, test_name, wait::until};
use serde_json::{Value, json};

use super::{
    kubectl::{Kubectl, kubectl_or_skip},
    languages::{deploy_or_skip, deployed},
    workflows::{call, ended, start},
};

/// Applies an example and waits until it is ready; returns its state machine's ARN.
async fn apply(kubectl: &Kubectl, example: &str) -> Result<String> {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(example).join("workflow.yaml");
    kubectl.ok(&["apply", "-f", &file.to_string_lossy()]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", &format!("workflow/{example}"), "--timeout=60s"]).await?;
    Ok(format!("arn:aws:states:us-east-1:000000000000:stateMachine:{example}"))
}

/// The tasks of an execution that were entered, in order.
async fn tasks(kubectl: &Kubectl, execution: &str) -> Result<Vec<String>> {
    let told = call(&kubectl.up, "GetExecutionHistory", json!({"executionArn": execution})).await?;
    let events = told["events"].as_array().context("no events")?;
    let entered = events.iter().filter(|event| event["type"] == "TaskStateEntered");
    Ok(entered
        .filter_map(|event| event["stateEnteredEventDetails"]["name"].as_str().map(str::to_owned))
        .collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_taken_back_where_it_fails() -> Result<()> {
    guest_or_skip!("order");
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    up.deploy("order", "order", &[]).await?;
    // A copy, because a build writes next to the script.
    let folder = tempfile::tempdir()?;
    for (name, script) in [("order-price", "handler.py"), ("order-receipt", "handler.js")] {
        let project = folder.path().join(name);
        std::fs::create_dir(&project)?;
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
        std::fs::copy(example.join(script), project.join(script))?;
        deploy_or_skip!(up, project, &[]);
    }
    let machine = apply(&kubectl, "order").await?;
    let order = |card: &str, address: &str, quantity: u32| json!({"id": "o-1", "item": "mug", "quantity": quantity, "card": card, "address": address});
    let mut yacht = order("4242", "Elm St 1", 1);
    yacht["item"] = json!("yacht");
    for (input, status, error, steps) in [
        (
            order("4242", "Elm St 1", 2),
            "SUCCEEDED",
            None,
            &["Price", "Reserve", "Charge", "Ship", "Receipt"][..],
        ),
        (yacht, "FAILED", Some("UnknownItem"), &["Price"]),
        (order("4242", "Elm St 1", 99), "FAILED", Some("OutOfStock"), &["Price", "Reserve"]),
        (
            order("declined", "Elm St 1", 2),
            "FAILED",
            Some("CardDeclined"),
            &["Price", "Reserve", "Charge", "Release"],
        ),
        (
            order("4242", "", 2),
            "FAILED",
            Some("NoAddress"),
            &["Price", "Reserve", "Charge", "Ship", "Refund", "Release"],
        ),
    ] {
        let execution = start(up, &machine, input).await?;
        let told = ended(up, &execution).await?;
        ensure!(told["status"] == status && told["error"].as_str() == error, "{told}");
        assert_eq!(tasks(&kubectl, &execution).await?, steps);
        if status == "SUCCEEDED" {
            let output: Value = serde_json::from_str(told["output"].as_str().context("no output")?)?;
            ensure!(output["receipt"]["text"] == "Order o-1: 2 × mug, € 15.90, sent to Elm St 1", "{output}");
        }
    }
    // The event starts an execution.
    let event = json!({"specversion": "1.0", "id": "1", "source": "shop", "type": "OrderPlaced",
        "data": order("4242", "Elm St 1", 1)});
    let http = up.workflows();
    let request =
        http.request(Method::POST, "/events").header("content-type", "application/cloudevents+json");
    until("the trigger is known", async || {
        let status =
            kubectl.ok(&["get", "workflow", "order", "-o", "jsonpath={.status.triggers[0].name}"]).await?;
        Ok((status == "placed").then_some(()))
    })
    .await?;
    assert_eq!(http.call(request, full(event.to_string())).await?.status, 202);
    let all = kubectl.ok(&["get", "executions", "-o", "name"]).await?;
    ensure!(all.contains("order.placed-"), "{all}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn words_are_counted_over_the_files_of_a_folder() -> Result<()> {
    guest_or_skip!("wordcount");
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    up.deploy("wordcount", "wordcount", &[]).await?;
    let machine = apply(&kubectl, "count-words").await?;
    let folder = up.data().join("workflows/buckets/library/poems");
    std::fs::create_dir_all(&folder)?;
    for (file, rows) in [("a.csv", "x,one two three\ny,four\n"), ("b.csv", "z,five six\n")] {
        std::fs::write(folder.join(file), format!("title,text\n{rows}"))?;
    }
    std::fs::write(folder.join("../other.csv"), "title,text\nq,not counted\n")?;
    let execution = start(up, &machine, json!({"bucket": "library", "prefix": "poems/"})).await?;
    let told = ended(up, &execution).await?;
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    let output: Value = serde_json::from_str(told["output"].as_str().context("no output")?)?;
    assert_eq!(output, json!({"files": 2, "rows": 3, "words": 6}));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_approves_and_rejects() -> Result<()> {
    guest_or_skip!("approval");
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    up.deploy("approval", "approval", &[]).await?;
    let machine = apply(&kubectl, "approval").await?;
    let told = ended(up, &start(up, &machine, json!({"what": "pencils", "euros": 9})).await?).await?;
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    for (what, approve) in [("machine", true), ("yacht", false)] {
        let execution = start(up, &machine, json!({"what": what, "euros": 900})).await?;
        let token = until("the person is asked", async || {
            let said = up.cli().ok(&["logs", "approval"]).await?;
            let asked = said.split_once(&format!("May we? {what}")).map(|(_, rest)| rest);
            let token = asked.and_then(|rest| rest.split_once("--task-token ")?.1.split_whitespace().next());
            Ok(token.map(str::to_owned))
        })
        .await?;
        call(up, "SendTaskHeartbeat", json!({"taskToken": token})).await?;
        match approve {
            true => {
                call(up, "SendTaskSuccess", json!({"taskToken": token, "output": r#"{"by": "me"}"#})).await?
            }
            false => {
                let no = json!({"taskToken": token, "error": "Rejected", "cause": "too dear"});
                call(up, "SendTaskFailure", no).await?
            }
        };
        let told = ended(up, &execution).await?;
        match approve {
            true => {
                ensure!(told["output"].as_str().is_some_and(|output| output.contains("approved")), "{told}")
            }
            false => ensure!(told["error"] == "Rejected" && told["cause"] == "too dear", "{told}"),
        }
    }
    Ok(())
}
