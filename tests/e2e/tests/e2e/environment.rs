//! The environment of a function: its variables, and the outbound destinations that it may reach.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Result, ensure};
use base64::Engine as _;
use mayfly_e2e::{Up, guest_or_skip, skipped, test_name, wait};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

#[tokio::test(flavor = "multi_thread")]
async fn values_come_from_the_spec_config_maps_and_secrets() -> Result<()> {
    guest_or_skip!("env");
    let up = Up::start().await?;
    let secret = base64::engine::general_purpose::STANDARD.encode("s3cret");
    let meta = |name: &str| json!({"name": name, "namespace": "default"});
    up.cli().apply(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("settings"), "data": {"colour": "blue"}})).await?;
    up.cli()
        .apply(
            &json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta("keys"), "data": {"key": secret}}),
        )
        .await?;
    let component = up.upload("env").await?;
    let env = json!({"env": [
        {"name": "PLAIN", "value": "yes"},
        {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
        {"name": "BOTH", "value": "$(PLAIN) and $(COLOUR)"},
    ]});
    up.apply_function("env", &component, env).await?;
    let seen = wait::until("the function has its values", || async {
        let answer = up.http().get("/fn/default/env/").await?;
        Ok(if answer.status == 200 { Some(answer.json()?) } else { None })
    })
    .await?;
    assert_eq!(
        (&seen["PLAIN"], &seen["COLOUR"], &seen["KEY"]),
        (&json!("yes"), &json!("blue"), &json!("s3cret"))
    );
    assert_eq!(seen["BOTH"], "yes and blue");
    // The server's own environment is not visible to the function.
    ensure!(seen["PATH"].is_null() && seen["HOME"].is_null(), "{seen}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_config_map_reaches_new_calls() -> Result<()> {
    guest_or_skip!("env");
    let up = Up::start().await?;
    let settings = |colour: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": "default"}, "data": {"colour": colour}});
    up.cli().apply(&settings("blue")).await?;
    let component = up.upload("env").await?;
    let reference = json!({"configMapKeyRef": {"name": "settings", "key": "colour"}});
    up.apply_function("env", &component, json!({"env": [{"name": "COLOUR", "valueFrom": reference}]}))
        .await?;
    for colour in ["blue", "green"] {
        up.cli().apply(&settings(colour)).await?;
        wait::until(&format!("the function sees {colour}"), || async {
            let answer = up.http().get("/fn/default/env/").await?;
            Ok((answer.status == 200 && answer.json()?["COLOUR"] == colour).then_some(()))
        })
        .await?;
    }
    Ok(())
}

/// A running replica keeps its values, like a pod, and no older revision becomes active again.
#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_goes_takes_nothing_from_who_has_it() -> Result<()> {
    guest_or_skip!("env");
    let up = Up::start().await?;
    let component = up.upload("env").await?;
    up.apply_function("env", &component, json!({"env": [{"name": "KEY", "value": "old"}]})).await?;
    let sees = async |key: &str| {
        wait::until(&format!("the function sees {key}"), || async {
            let answer = up.http().get("/fn/default/env/").await?;
            Ok((answer.status == 200 && answer.json()?["KEY"] == key).then_some(()))
        })
        .await
    };
    sees("old").await?;
    let meta = json!({"name": "keys", "namespace": "default"});
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"key": "new"}});
    up.cli().apply(&secret).await?;
    let from = json!({"secretKeyRef": {"name": "keys", "key": "key"}});
    up.apply_function("env", &component, json!({"env": [{"name": "KEY", "valueFrom": from}]})).await?;
    sees("new").await?;

    up.cli().ok(&["delete", "secret", "keys"]).await?;
    up.wait_until_function("env", "says what is missing", |function| {
        let conditions = function["status"]["conditions"].as_array();
        conditions.into_iter().flatten().any(|condition| condition["reason"] == "EnvironmentMissing")
    })
    .await?;
    for _ in 0..20 {
        let answer = up.http().get("/fn/default/env/").await?;
        ensure!(answer.status == 200 && answer.json()?["KEY"] == "new", "{answer:?}");
    }
    let function = up.cli().get("function", "env").await?;
    assert_eq!(function["status"]["latestReadyRevision"], "env-00002");
    Ok(())
}

/// Checks that a request of the function is denied, with the error in its response and in its log.
async fn denied(up: &Up, url: &str, why: &str) -> Result<()> {
    let answer = up.http().get(&format!("/fn/default/proxy/?url={url}")).await?;
    let error = answer.json()?;
    ensure!(answer.status == 502 && error["errorType"] == "Denied", "{url}: {answer:?}");
    let message = error["errorMessage"].as_str().unwrap_or_default();
    ensure!(message.contains("list it under spec.egress"), "{url}: {answer:?}");
    wait::until(&format!("the log tells that {url} was denied: {why}"), || async {
        let log = up.cli().ok(&["logs", "proxy"]).await?;
        Ok(log.contains(&format!("request to {url} denied: {why}")).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn outbound_calls_are_denied_unless_listed() -> Result<()> {
    guest_or_skip!("proxy");
    let upstream = Upstream::start().await?;
    let up = Up::start().await?;
    up.deploy("proxy", "proxy", &[]).await?;
    let url = format!("http://{}/", upstream.address);
    denied(&up, &url, "not listed in spec.egress").await?;
    assert_eq!(upstream.connections(), 0);
    up.deploy("proxy", "proxy", &["--egress", &format!("http://{}", upstream.address)]).await?;
    wait::until("the listed destination is allowed", || async {
        let answer = up.http().get(&format!("/fn/default/proxy/?url={url}")).await?;
        Ok((answer.status == 200 && answer.text() == "from upstream").then_some(()))
    })
    .await?;
    let allowed = upstream.connections();
    // A listed address does not permit names that resolve to it.
    let by_name = format!("http://localhost:{}/", upstream.address.port());
    denied(&up, &by_name, "not listed in spec.egress").await?;
    assert_eq!(upstream.connections(), allowed);
    Ok(())
}

/// A listed name does not permit private addresses.
#[tokio::test(flavor = "multi_thread")]
async fn a_listed_name_does_not_lead_to_private_addresses() -> Result<()> {
    guest_or_skip!("proxy");
    let upstream = Upstream::start().await?;
    let port = upstream.address.port();
    // This machine's own name, which resolves to one of its addresses. `localhost` is treated like an address.
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_ascii_lowercase();
    let is_listable = |letter: u8| letter.is_ascii_alphanumeric() || b"-.".contains(&letter);
    let found = tokio::net::lookup_host((name.as_str(), port)).await;
    let addresses: Vec<_> = found.into_iter().flatten().map(|address| address.ip()).collect();
    let leads_inside = !addresses.is_empty() && addresses.iter().all(is_private);
    if name == "localhost" || !name.bytes().all(is_listable) || !leads_inside {
        let reason = format!("no name that leads to private addresses: {name:?} leads to {addresses:?}");
        skipped(test_name!(), &reason);
        return Ok(());
    }
    let up = Up::start().await?;
    up.deploy("proxy", "proxy", &["--egress", &format!("http://{name}:{port}")]).await?;
    let why = "it has no public address; private addresses must be listed explicitly";
    denied(&up, &format!("http://{name}:{port}/"), why).await?;
    assert_eq!(upstream.connections(), 0);
    Ok(())
}

fn is_private(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_private() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local() || v6.is_unicast_link_local(),
    }
}

/// A server that answers the first request of every connection with the same text.
struct Upstream {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Upstream {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let connections = Arc::new(AtomicUsize::new(0));
        let connecting = connections.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                connecting.fetch_add(1, Ordering::SeqCst);
                let mut request = [0; 4096];
                let _ = socket.read(&mut request).await;
                let answer =
                    b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\nconnection: close\r\n\r\nfrom upstream";
                let _ = socket.write_all(answer).await;
            }
        });
        Ok(Self { address, connections })
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}
