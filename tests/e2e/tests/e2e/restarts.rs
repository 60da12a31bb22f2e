//! Kills and restarts: no acknowledged write is lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Start, Up, guest_or_skip, wait};
use serde_json::json;

use crate::workflows;

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test(flavor = "multi_thread")]
async fn functions_answer_again_after_a_kill() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    ensure!(up.http().get("/fn/default/hello/").await?.status == 200);
    let data = up.data().to_path_buf();
    let folder = up.kill()?;
    let up = Start::default().in_folder(&data).ready().await?;
    let answer = up.http().get("/fn/default/hello/").await?;
    ensure!(answer.status == 200 && answer.text() == "Hello from Mayfly!\n", "{answer:?}");
    // The controllers resume.
    up.wait_until_function("hello", "has a replica again", |f| mayfly_e2e::ready_replicas(f) == 1).await?;
    up.stop().await?;
    drop(folder);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_write_is_lost_however_often_it_is_killed() -> Result<()> {
    const WRITERS: usize = 8;
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let mut acknowledged: Vec<String> = Vec::new();
    for round in 0..4 {
        let up = Start::default().in_folder(&data).ready().await?;
        let api = Arc::new(up.api()?);
        // All objects acknowledged before the last kill exist.
        let list = api.get(CONFIG_MAPS).await?;
        let items = list.body["items"].as_array().with_context(|| format!("{list:?}"))?;
        let names: std::collections::HashSet<&str> =
            items.iter().filter_map(|item| item["metadata"]["name"].as_str()).collect();
        for name in &acknowledged {
            ensure!(names.contains(name.as_str()), "round {round}: {name} was acknowledged and is lost");
        }
        let count = Arc::new(AtomicUsize::new(0));
        let writers: Vec<_> = (0..WRITERS)
            .map(|n| tokio::spawn(write_until_it_fails(api.clone(), round, n, count.clone())))
            .collect();
        mayfly_e2e::wait::until("enough was written", || {
            let enough = count.load(Ordering::Relaxed) >= 100 + 37 * round;
            async move { Ok(enough.then_some(())) }
        })
        .await?;
        up.kill()?;
        for writer in writers {
            acknowledged.extend(writer.await?);
        }
    }
    ensure!(acknowledged.len() > 400);
    Ok(())
}

/// Creates objects until the server is killed; returns the names of the acknowledged ones.
async fn write_until_it_fails(
    api: Arc<mayfly_e2e::Api>,
    round: usize,
    writer: usize,
    count: Arc<AtomicUsize>,
) -> Vec<String> {
    let mut acknowledged = Vec::new();
    for step in 0.. {
        let name = format!("written-{round}-{writer}-{step}");
        let object =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "b"}});
        match tokio::time::timeout(Duration::from_secs(30), api.post(CONFIG_MAPS, &object)).await {
            Ok(Ok(answer)) if answer.status == 201 => acknowledged.push(name),
            _ => break,
        }
        count.fetch_add(1, Ordering::Relaxed);
    }
    acknowledged
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_while_functions_are_deployed_and_called_heals_by_itself() -> Result<()> {
    let hello = guest_or_skip!("hello");
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = Start::default().in_folder(&data).ready().await?;
    let component = up.upload("hello").await?;
    // Created by the API without waiting, so that the kill interrupts the controllers.
    for n in 0..20 {
        let manifest = mayfly_e2e::function(&format!("hello-{n}"), &component, json!({}));
        let answer = up.api()?.post("/apis/mayfly.dev/v1/namespaces/default/functions", &manifest).await?;
        ensure!(answer.status == 201, "{answer:?}");
    }
    up.kill()?;
    let up = Start::default().in_folder(&data).ready().await?;
    for n in 0..20 {
        let name = format!("hello-{n}");
        up.wait_until_function(&name, "is ready", mayfly_e2e::is_ready).await?;
        let answer = up.http().get(&format!("/fn/default/{name}/")).await?;
        ensure!(answer.status == 200, "{name}: {answer:?}");
    }
    // The artifact equals the uploaded one bit by bit.
    let stored = up.api()?.get(&format!("/artifacts/{component}")).await?;
    ensure!(stored.status == 200 && mayfly_e2e::digest_of(&std::fs::read(hello)?) == component);
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_calls_in_flight() -> Result<()> {
    guest_or_skip!("sleep");
    let up = Up::start().await?;
    up.deploy("sleep", "sleep", &[]).await?;
    let running = async |count: u32| {
        let line = format!(
            r#"requests_running{{namespace="default",function="sleep",revision="sleep-00001"}} {count}"#
        );
        wait::until(&format!("{count} calls run"), || async {
            let metrics = up.admin().get("/metrics").await?.text();
            Ok(metrics.lines().any(|known| known.ends_with(&line)).then_some(()))
        })
        .await
    };
    up.http().get("/fn/default/sleep/?ms=1").await?;
    running(0).await?;
    let http = up.http();
    let call = tokio::spawn(async move { http.get("/fn/default/sleep/?ms=2000").await });
    running(1).await?;
    up.stop().await?;
    let answer = call.await??;
    ensure!(answer.status == 200 && answer.text() == "slept 2000 ms\n", "{answer:?}");
    Ok(())
}

/// Twenty executions, each with a running function call, survive a kill and a graceful stop.
#[tokio::test(flavor = "multi_thread")]
async fn executions_whose_functions_run_at_a_stop_all_succeed() -> Result<()> {
    const EXECUTIONS: usize = 20;
    guest_or_skip!("sleep");
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let mut up = Start::default().in_folder(&data).ready().await?;
    up.deploy("sleep", "sleep", &[]).await?;
    let call = json!({"StartAt": "Call", "States": {"Call": {
        "Type": "Task", "Resource": "arn:aws:states:::lambda:invoke",
        "Parameters": {"FunctionName": "sleep", "Payload": {}}, "End": true}}});
    let child = workflows::create(&up, "child", "STANDARD", call.clone()).await?;
    let parent = json!({"StartAt": "Child", "States": {"Child": {
        "Type": "Task", "Resource": "arn:aws:states:::states:startExecution.sync:2",
        "Parameters": {"StateMachineArn": child, "Input": {}}, "End": true}}});
    let parent = workflows::create(&up, "parent", "STANDARD", parent).await?;
    for is_kill in [true, false] {
        let mut executions = Vec::new();
        for n in 0..EXECUTIONS {
            let machine = if n % 2 == 0 { &child } else { &parent };
            executions.push(workflows::start(&up, machine, json!({})).await?);
        }
        match is_kill {
            true => drop(up.kill()?),
            false => up.stop().await?,
        }
        up = Start::default().in_folder(&data).ready().await?;
        for execution in &executions {
            let told = workflows::ended(&up, execution).await?;
            ensure!(told["status"] == "SUCCEEDED", "killed: {is_kill}: {told}");
        }
    }
    up.stop().await
}
