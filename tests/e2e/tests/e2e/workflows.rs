//! Workflows over the Step Functions API: functions as tasks, errors, waits, a kill during executions.

use anyhow::{Context, Result, ensure};
use http::Method;
use mayfly_e2e::{Start, Up, full, guest_or_skip, wait::until};
use serde_json::{Value, json};

const ROLE: &str = "arn:aws:iam::123456789012:role/any";

/// Calls an operation like an SDK; an error response becomes an error that begins with its name.
pub(crate) async fn call(up: &Up, operation: &str, parameters: Value) -> Result<Value> {
    let workflows = up.workflows();
    let request = workflows
        .request(Method::POST, "/")
        .header("content-type", "application/x-amz-json-1.0")
        .header("x-amz-target", format!("AWSStepFunctions.{operation}"));
    let answer = workflows.call(request, full(parameters.to_string())).await?;
    let body = answer.json()?;
    let name = body["__type"].as_str().map(|name| name.rsplit('#').next().unwrap_or(name).to_owned());
    ensure!(answer.status == 200, "{}: {}", name.unwrap_or_default(), body["message"]);
    Ok(body)
}

pub(crate) async fn create(up: &Up, name: &str, kind: &str, definition: Value) -> Result<String> {
    let parameters =
        json!({"name": name, "type": kind, "roleArn": ROLE, "definition": definition.to_string()});
    let created = call(up, "CreateStateMachine", parameters).await?;
    Ok(created["stateMachineArn"].as_str().context("no ARN")?.to_owned())
}

pub(crate) async fn start(up: &Up, machine: &str, input: Value) -> Result<String> {
    let parameters = json!({"stateMachineArn": machine, "input": input.to_string()});
    let started = call(up, "StartExecution", parameters).await?;
    Ok(started["executionArn"].as_str().context("no ARN")?.to_owned())
}

/// Waits until the execution has ended; returns its description.
pub(crate) async fn ended(up: &Up, execution: &str) -> Result<Value> {
    until("the execution ends", async || {
        let told = call(up, "DescribeExecution", json!({"executionArn": execution})).await?;
        Ok((told["status"] != "RUNNING").then_some(told))
    })
    .await
}

async fn history(up: &Up, execution: &str) -> Result<Vec<String>> {
    let told = call(up, "GetExecutionHistory", json!({"executionArn": execution})).await?;
    let events = told["events"].as_array().context("no events")?;
    Ok(events.iter().filter_map(|event| event["type"].as_str().map(str::to_owned)).collect())
}

/// A definition with a separate state for each greeting.
fn greet_everyone(wait_seconds: u32) -> Value {
    json!({"StartAt": "Sleep", "States": {
        "Sleep": {"Type": "Wait", "Seconds": wait_seconds, "Next": "Everyone"},
        "Everyone": {"Type": "Map", "ItemsPath": "$.names", "End": true, "ItemProcessor": {
            "StartAt": "Greet", "States": {"Greet": {
                "Type": "Task", "Resource": "arn:aws:states:::lambda:invoke",
                "Parameters": {"FunctionName": "greet", "Payload": {"name.$": "$"}},
                "OutputPath": "$.Payload.message", "End": true}}}}}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workflow_calls_functions_and_tells_its_history() -> Result<()> {
    guest_or_skip!("greet");
    let up = Up::start().await?;
    up.deploy("greet", "greet", &[]).await?;
    let machine = create(&up, "everyone", "STANDARD", greet_everyone(0)).await?;
    let execution = start(&up, &machine, json!({"names": ["Ada", "Grace"]})).await?;
    let told = ended(&up, &execution).await?;
    ensure!(
        told["status"] == "SUCCEEDED" && told["output"] == r#"["Hello, Ada!","Hello, Grace!"]"#,
        "{told}"
    );
    let events = history(&up, &execution).await?;
    ensure!(events.first().is_some_and(|event| event == "ExecutionStarted"), "{events:?}");
    ensure!(events.last().is_some_and(|event| event == "ExecutionSucceeded"), "{events:?}");
    let called = events.iter().filter(|event| *event == "TaskSucceeded").count();
    ensure!(called == 2, "{events:?}");
    // The same synchronously, without a journal.
    let express = create(&up, "express", "EXPRESS", greet_everyone(0)).await?;
    let input = json!({"names": ["Edsger"]}).to_string();
    let told = call(&up, "StartSyncExecution", json!({"stateMachineArn": express, "input": input})).await?;
    ensure!(told["status"] == "SUCCEEDED" && told["output"] == r#"["Hello, Edsger!"]"#, "{told}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_functions_error_is_caught_by_its_name() -> Result<()> {
    guest_or_skip!("greet");
    guest_or_skip!("panic");
    let up = Up::start().await?;
    up.deploy("greet", "greet", &[]).await?;
    up.deploy("panic", "panic", &[]).await?;
    for (function, error) in [
        // Errors reported by the function, by its trap, and by a missing function.
        ("greet", "InvalidBody"),
        ("panic", "Runtime.ExitError"),
        ("nobody", "Lambda.ResourceNotFoundException"),
    ] {
        let definition = json!({"StartAt": "Call", "States": {
            "Call": {"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke",
                "Parameters": {"FunctionName": function, "Payload": {"nobody": 1}},
                "Catch": [{"ErrorEquals": [error], "ResultPath": "$.error", "Next": "Caught"}], "End": true},
            "Caught": {"Type": "Pass", "OutputPath": "$.error.Error", "End": true}}});
        let machine = create(&up, function, "STANDARD", definition).await?;
        let told = ended(&up, &start(&up, &machine, json!({})).await?).await?;
        ensure!(
            told["status"] == "SUCCEEDED" && told["output"].as_str() == Some(&format!("\"{error}\"")),
            "{function}: {told}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_goes_on_with_its_executions() -> Result<()> {
    guest_or_skip!("greet");
    let up = Up::start().await?;
    up.deploy("greet", "greet", &[]).await?;
    let machine = create(&up, "later", "STANDARD", greet_everyone(2)).await?;
    let mut executions = Vec::new();
    for n in 0..20 {
        executions.push(start(&up, &machine, json!({"names": [format!("{n}")]})).await?);
    }
    let data = up.data().to_path_buf();
    let folder = up.kill()?;
    let up = Start::default().in_folder(&data).ready().await?;
    for (n, execution) in executions.iter().enumerate() {
        let told = ended(&up, execution).await?;
        let expected = format!(r#"["Hello, {n}!"]"#);
        ensure!(told["status"] == "SUCCEEDED" && told["output"] == expected, "{told}");
        let events = history(&up, execution).await?;
        ensure!(events.iter().filter(|event| *event == "TaskSucceeded").count() == 1, "{events:?}");
    }
    up.stop().await?;
    drop(folder);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_definition_is_refused_with_every_reason() -> Result<()> {
    let up = Up::start().await?;
    let definition = json!({"StartAt": "Nowhere", "States": {"A": {"Type": "Pass", "Next": "B"}}});
    let error = create(&up, "wrong", "STANDARD", definition).await.err().context("it was accepted")?;
    let told = error.to_string();
    ensure!(told.starts_with("InvalidDefinition"), "{told}");
    ensure!(told.contains("Nowhere") && told.contains("/States/A/Next"), "{told}");
    Ok(())
}

/// Runs SQL on the journal's file with the program `sqlite3`; `None` without the program.
fn sql(up_data: &std::path::Path, statement: &str) -> Option<()> {
    let script =
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], 30); db.execute(sys.argv[2]); db.commit()";
    let file = up_data.join("workflows/workflows.db");
    let mut python = std::process::Command::new("python3");
    let status = python.args(["-c", script]).arg(file).arg(statement).status();
    status.is_ok_and(|status| status.success()).then_some(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_that_fails_is_told_and_a_new_start_goes_on() -> Result<()> {
    let up = Up::start().await?;
    let definition = json!({"StartAt": "A", "States": {
        "A": {"Type": "Wait", "Seconds": 1, "Next": "B"}, "B": {"Type": "Pass", "Result": 1, "End": true}}});
    let machine = create(&up, "waits", "STANDARD", definition).await?;
    let fault = "CREATE TRIGGER fault BEFORE INSERT ON records BEGIN SELECT RAISE(ABORT, 'injected'); END";
    if sql(up.data(), fault).is_none() {
        mayfly_e2e::skipped(mayfly_e2e::test_name!(), "no python3 with sqlite3");
        return Ok(());
    }
    // An execution that begins with a wait has no records yet, so the end of the wait is the failing write.
    let execution = start(&up, &machine, json!({})).await?;
    let admin = up.admin();
    let told = until("the server says that it is not healthy", async || {
        let answer = admin.call(admin.request(Method::GET, "/healthz"), full("")).await?;
        Ok((answer.status == 503).then_some(answer.text()))
    })
    .await?;
    ensure!(told.contains("restart Mayfly") && told.contains("injected"), "{told}");
    let refused = start(&up, &machine, json!({})).await;
    ensure!(refused.is_err(), "a start was acknowledged that is not kept");
    let data = up.data().to_path_buf();
    let folder = up.kill()?;
    sql(&data, "DROP TRIGGER fault").context("the trigger stays")?;
    let up = Start::default().in_folder(&data).ready().await?;
    let told = ended(&up, &execution).await?;
    ensure!(told["status"] == "SUCCEEDED" && told["output"] == "1", "{told}");
    let admin = up.admin();
    let answer = admin.call(admin.request(Method::GET, "/healthz"), full("")).await?;
    ensure!(answer.status == 200, "{}", answer.status);
    up.stop().await?;
    drop(folder);
    Ok(())
}
