//! What a function is given and what it is kept from: values, and the world outside.

use anyhow::{Result, ensure};
use base64::Engine as _;
use mayfly_e2e::{Up, guest_or_skip, wait};
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
    // What the server runs with is not the function's business.
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

/// As a pod keeps what it was started with; and no older revision comes back.
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

#[tokio::test(flavor = "multi_thread")]
async fn outbound_calls_are_denied_unless_listed() -> Result<()> {
    guest_or_skip!("proxy");
    let upstream = upstream().await?;
    let up = Up::start().await?;
    up.deploy("proxy", "proxy", &[]).await?;
    let path = format!("/fn/default/proxy/?url=http://{upstream}/");
    let denied = up.http().get(&path).await?;
    assert_eq!(denied.status, 502, "{denied:?}");
    up.deploy("proxy", "proxy", &["--egress", &format!("http://{upstream}")]).await?;
    wait::until("the listed destination is allowed", || async {
        let answer = up.http().get(&path).await?;
        Ok((answer.status == 200 && answer.text() == "from upstream").then_some(()))
    })
    .await?;
    // A name that leads to a private address is not the name's owner's to allow.
    let by_name = format!("http://localhost:{}", upstream.port());
    let denied = up.http().get(&format!("/fn/default/proxy/?url={by_name}/")).await?;
    assert_eq!(denied.status, 502, "{denied:?}");
    Ok(())
}

/// A server that answers every connection's first request with the same words.
async fn upstream() -> Result<std::net::SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = socket.read(&mut request).await;
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\nconnection: close\r\n\r\nfrom upstream";
            let _ = socket.write_all(answer).await;
        }
    });
    Ok(address)
}
