//! Several machines: `mayfly server`, and processes of `mayfly node` that join it, here on the loopback address.

use anyhow::{Context as _, Result, ensure};
use http::Method;
use mayfly_e2e::{Start, Up, full, guest_or_skip, ready_replicas, wait};
use serde_json::{Value, json};

const HELLO: &str = "Hello from Mayfly!\n";

/// Waits until a node is ready; returns its object.
async fn ready_node(server: &Up, name: &str) -> Result<Value> {
    let api = server.api()?;
    wait::until(&format!("node {name} is ready"), || async {
        let node = api.get(&format!("/api/v1/nodes/{name}")).await?.body;
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
        Ok(is_ready.then_some(node))
    })
    .await
}

/// Makes pods start on no node but `only`.
async fn cordon_others(server: &Up, only: &str) -> Result<()> {
    let api = server.api()?;
    let nodes = api.get("/api/v1/nodes").await?.body;
    for node in nodes["items"].as_array().into_iter().flatten() {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let patch = json!({"spec": {"unschedulable": name != only}});
        let path = format!("/api/v1/nodes/{name}");
        let answer =
            api.call(Method::PATCH, &path, "application/merge-patch+json", full(patch.to_string())).await?;
        ensure!(answer.status == 200, "{answer:?}");
    }
    Ok(())
}

/// The only pod of a function.
async fn pod_of(server: &Up, function: &str) -> Result<Value> {
    let path = format!("/api/v1/namespaces/default/pods?labelSelector=mayfly.dev/function%3D{function}");
    let mut pods = server.api()?.get(&path).await?.body;
    let pods = pods["items"].as_array_mut().context("no list")?;
    ensure!(pods.len() == 1, "{} pods", pods.len());
    Ok(pods.remove(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_runs_on_a_machine_that_joined() -> Result<()> {
    guest_or_skip!("hello");
    let server = Start::server().ready().await?;
    let node = Start::node(&server, "second").ready().await?;
    let object = ready_node(&server, "second").await?;
    let port = &object["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"];
    ensure!(port.as_u64().is_some_and(|port| port > 0), "{object}");

    // The component is on the server alone, and the replica must run on the second node.
    cordon_others(&server, "second").await?;
    server.deploy("hello", "hello", &["--min", "1"]).await?;
    server.wait_until_function("hello", "has a replica", |function| ready_replicas(function) == 1).await?;
    let pod = pod_of(&server, "hello").await?;
    assert_eq!(pod["spec"]["nodeName"], "second");
    for http in [server.http(), node.http()] {
        let answer = http.get("/fn/default/hello/").await?;
        assert_eq!((answer.status.as_u16(), answer.text()), (200, HELLO.to_owned()));
    }

    // Logs are read on the node, through its authenticated port.
    let name = pod["metadata"]["name"].as_str().context("no name")?;
    let log = server.api()?.get(&format!("/api/v1/namespaces/default/pods/{name}/log")).await?;
    assert_eq!(log.status, 200, "{log:?}");

    // Without the server, the node's replica answers.
    let data = server.kill()?;
    let answer = node.http().get("/fn/default/hello/").await?;
    assert_eq!((answer.status.as_u16(), answer.text()), (200, HELLO.to_owned()));
    node.stop().await?;
    drop(data);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_comes_back_without_its_token() -> Result<()> {
    let server = Start::server().ready().await?;
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("node");
    let node = Start::node(&server, "second").in_folder(&data).ready().await?;
    let joined = ready_node(&server, "second").await?;
    node.stop().await?;
    let node =
        Start::node(&server, "second").in_folder(&data).environment("MAYFLY_TOKEN", "").ready().await?;
    let again = ready_node(&server, "second").await?;
    assert_eq!(joined["metadata"]["uid"], again["metadata"]["uid"]);
    node.stop().await?;
    server.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_a_valid_token_is_refused() -> Result<()> {
    let server = Start::server().ready().await?;
    let token = std::fs::read_to_string(server.data().join("join-token"))?;
    let (id, rest) = token.trim().split_once('.').context("a token")?;
    let (_, hash) = rest.split_once('.').context("a token")?;
    let other_secret = format!("{id}.{}.{hash}", "0".repeat(16));
    let other_authority = format!("{id}.{}.{}", &rest[..16], "0".repeat(64));
    for (token, said) in [
        ("", "a token is needed"),
        ("nonsense", "--token"),
        (&other_secret, "token"),
        (&other_authority, "certificate"),
    ] {
        let refused = Start::node(&server, "second").environment("MAYFLY_TOKEN", token).refused().await?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(said), "{token}: {refused:?}");
    }
    let nodes = server.api()?.get("/api/v1/nodes").await?.body;
    assert_eq!(nodes["items"].as_array().map(Vec::len), Some(1));
    server.stop().await
}
