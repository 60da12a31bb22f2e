//! The server's environment: clients that connect and send nothing, removed databases, Services reached by their
//! addresses.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use mayfly_e2e::{Start, Up, wait::until};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::workflows::{create, ended, start};

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_do_not_lock_a_port_or_delay_a_stop() -> Result<()> {
    let up = Up::start().await?;
    let mut silent = Vec::new();
    for _ in 0..300 {
        let mut stream = TcpStream::connect(up.address("admin")).await?;
        // An incomplete request head.
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nhost").await;
        silent.push(stream);
        ensure!(up.admin().get("/healthz").await?.status == 200);
    }
    let metrics = up.admin().get("/metrics").await?.text();
    let open = metrics.lines().find(|line| line.starts_with("mayfly_connections{port=\"admin\"}"));
    let open: u64 = open.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(u64::MAX);
    ensure!(open <= 64, "{open} connections are open on the admin port");
    ensure!(
        metrics.contains("mayfly_connections_closed_total{port=\"admin\",reason=\"replaced\"}"),
        "{metrics}"
    );
    let began = Instant::now();
    up.stop().await?;
    ensure!(began.elapsed() < Duration::from_secs(5), "stopping took {:?}", began.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_database_is_noticed_and_not_replaced_by_an_empty_one() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = Start::default().in_folder(&data).ready().await?;
    let api = up.api()?;
    let map = |name: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    ensure!(api.post(CONFIG_MAPS, &map("kept")).await?.status == 201);
    std::fs::remove_file(data.join("mayfly.db"))?;
    let refused = api.post(CONFIG_MAPS, &map("lost")).await?;
    ensure!(refused.status >= 500 && refused.message().contains("removed or replaced"), "{refused:?}");
    ensure!(up.admin().get("/healthz").await?.status == 503);
    up.stop().await?;
    let refused = Start::default().in_folder(&data).refused().await?;
    // Its write-ahead log or its mark remains without it.
    ensure!(
        refused.stderr.contains("mayfly.db") && refused.stderr.contains("nothing was changed"),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_files_of_workflows_are_noticed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = Start::default().in_folder(&data).ready().await?;
    let pass = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}});
    let machine = create(&up, "pass", "STANDARD", pass).await?;
    let execution = start(&up, &machine, json!({})).await?;
    ended(&up, &execution).await?;
    for file in ["catalog.db", "workflows.db"] {
        let path = data.join("workflows").join(file);
        let away = data.join("workflows").join(format!("{file}-away"));
        std::fs::rename(&path, &away)?;
        if file == "workflows.db" {
            ensure!(start(&up, &machine, json!({})).await.is_err(), "a start was acknowledged");
        }
        until("readiness says so", || async {
            let told = up.admin().get("/readyz").await?;
            Ok((told.status == 503 && told.text().contains("removed or replaced")).then_some(()))
        })
        .await?;
        std::fs::rename(&away, &path)?;
    }
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_in_the_data_directorys_place_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    std::fs::write(&data, "")?;
    let refused = Start::default().in_folder(&data).refused().await?;
    ensure!(refused.stderr.contains("is a file, not a directory"), "{refused:?}");
    Ok(())
}

/// The userspace proxy with user-defined EndpointSlices.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_is_reached_by_its_address() -> Result<()> {
    let up = Up::start().await?;
    let api = up.api()?;
    // An address of the range of pods without root: endpoints may have no other loopback address.
    let backend = TcpListener::bind("127.94.0.1:0").await?;
    let port = backend.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = backend.accept().await {
            let _ = stream.write_all(b"from the endpoint").await;
        }
    });
    // A loopback address derived from the process id, so that no other test process uses it.
    let id = std::process::id();
    let address = format!("127.120.{}.{}", id / 250 % 250, id % 250 + 1);
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"externalIPs": [address], "ports": [{"name": "http", "port": 8080}]},
    });
    let made = api.post("/api/v1/namespaces/default/services", &service).await?;
    ensure!(made.status == 201, "{made:?}");
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["127.94.0.1"], "conditions": {"ready": true}}],
    });
    let made = api.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice).await?;
    ensure!(made.status == 201, "{made:?}");
    let ask = || async {
        let mut answer = String::new();
        TcpStream::connect((address.as_str(), 8080)).await?.read_to_string(&mut answer).await?;
        anyhow::Ok((answer == "from the endpoint").then_some(()))
    };
    until("the Service answers", ask).await?;
    let shown = up.cli().ok(&["network", "show", "service", "web"]).await?;
    ensure!(shown.contains(&format!("{address}:8080/tcp")) && shown.contains("127.94.0.1:"), "{shown}");
    let gone = api.delete("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/web-1").await?;
    ensure!(gone.status == 200, "{gone:?}");
    until("the Service refuses", || async {
        let refused = TcpStream::connect((address.as_str(), 8080)).await;
        Ok(refused.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused).then_some(()))
    })
    .await?;
    up.stop().await
}
