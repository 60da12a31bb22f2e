//! Rolling updates of a Deployment under load: no request fails, neither through its Service nor through an Ingress.
//! With real containers, on both proxies, with a preStop hook and without one. Needs root.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};

use crate::containers::{ContainerNode, containers_or_skip};

/// The number of clients, which connect without pause.
const CLIENTS: usize = 4;
/// The timeout of one request.
const PATIENCE: Duration = Duration::from_secs(10);
const HOST: &str = "rolling.test";

/// How the pods end.
#[derive(Clone, Copy)]
enum Ending {
    /// A hook keeps them serving for longer than any proxy needs; the server ignores the signal.
    PreStopHook,
    /// The server closes its port with the signal, and answers what it has accepted.
    Signal,
}

/// A Deployment of three pods that answer with a version, its Service, and an Ingress in front of it.
async fn web(node: &ContainerNode, port: u16, ending: Ending) -> Result<()> {
    let labels = json!({"app": "rolling"});
    let serve = match ending {
        Ending::PreStopHook => "exec busybox httpd -f -p 8000 -h /www",
        Ending::Signal => {
            "busybox httpd -f -p 8000 -h /www & server=$!; \
             trap 'kill $server; busybox sleep 1; exit 0' TERM; wait $server"
        }
    };
    let script = format!("mkdir /www; echo \"version $VERSION\" > /www/index.html; {serve}");
    let mut container = json!({"name": "c", "image": "busybox:local", "command": ["sh", "-c", script],
        "env": [{"name": "VERSION", "value": "1"}],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1}});
    if matches!(ending, Ending::PreStopHook) {
        container["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 2}}});
    }
    let backend = json!({"service": {"name": "rolling", "port": {"number": port}}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "rolling"}, "spec": {
            "replicas": 3, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 4}}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "rolling"}, "spec": {
            "selector": labels, "ports": [{"name": "http", "port": port, "targetPort": 8000}]}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "rolling"}, "spec": {
            "rules": [{"host": HOST, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}]}}]});
    let file = node.kubectl.file("rolling", &list)?;
    node.kubectl.ok(&["apply", "-f", &file]).await?;
    node.kubectl.ok(&["rollout", "status", "deployment/rolling", "--timeout=60s"]).await.map(|_| ())
}

/// Fetches the body of a response, which must have status 200.
async fn fetch(address: SocketAddr) -> Result<String> {
    let mut text = String::new();
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        stream.read_to_string(&mut text).await
    };
    timeout(PATIENCE, exchange).await.context("no answer in time")??;
    let (head, body) = text.split_once("\r\n\r\n").with_context(|| format!("no head: {text:?}"))?;
    let is_fine = head.starts_with("HTTP/1.1 200") || head.starts_with("HTTP/1.0 200");
    ensure!(is_fine, "{text:?}");
    Ok(body.to_owned())
}

/// Clients of an address, until they are stopped.
struct Load {
    answered: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Result<()>>>,
}

impl Load {
    fn start(address: SocketAddr) -> Self {
        let (answered, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let client = |_| {
            let (answered, stop) = (answered.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let body = fetch(address).await?;
                    ensure!(body.starts_with("version "), "{body:?}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let clients = (0..CLIENTS).map(client).collect();
        Self { answered, stop, clients }
    }

    /// Stops the clients; fails with the first failed request.
    async fn stop(self, of: &str) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            let answered = &self.answered;
            let ended = client.await?;
            ended.with_context(|| {
                format!("{of}: a request failed, after {}", answered.load(Ordering::Relaxed))
            })?;
        }
        Ok(self.answered.load(Ordering::Relaxed))
    }
}

/// Updates the Deployment under load at the cluster IP and at the Ingress.
async fn rolls_without_a_failure(node: &ContainerNode, port: u16, ending: Ending) -> Result<()> {
    web(node, port, ending).await?;
    let ip = node.kubectl.ok(&["get", "service", "rolling", "-o", "jsonpath={.spec.clusterIP}"]).await?;
    let service = SocketAddr::new(ip.trim().parse()?, port);
    let ingress = node.kubectl.up.address("http");
    let addresses = [("the Service", service), ("the Ingress", ingress)];
    for (of, address) in addresses {
        let what = format!("{of} answers");
        wait::until(&what, || async { Ok(fetch(address).await.ok()) }).await?;
    }
    let loads = addresses.map(|(of, address)| (of, Load::start(address)));
    node.kubectl.ok(&["set", "env", "deployment/rolling", "VERSION=2"]).await?;
    node.kubectl.ok(&["rollout", "status", "deployment/rolling", "--timeout=120s"]).await?;
    wait::until("the pods of the first version are gone", || async {
        let pods = node
            .kubectl
            .ok(&["get", "pods", "-o", "jsonpath={range .items[*]}{.metadata.name} {end}"])
            .await?;
        Ok((pods.split_whitespace().count() == 3).then_some(()))
    })
    .await?;
    for (of, load) in loads {
        let answered = load.stop(of).await?;
        ensure!(answered > 100, "{of}: only {answered} requests during the update");
    }
    for (_, address) in addresses {
        ensure!(fetch(address).await? == "version 2\n");
    }
    node.kubectl
        .ok(&["delete", "deployment/rolling", "service/rolling", "ingress/rolling", "--wait"])
        .await?;
    wait::until("the pods are gone", || async {
        let pods = node.kubectl.ok(&["get", "pods", "-o", "name"]).await?;
        Ok(pods.trim().is_empty().then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_update_fails_no_request_with_nftables() -> Result<()> {
    containers_or_skip!();
    if !["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"].iter().any(|file| Path::new(file).is_file()) {
        skipped(test_name!(), "no nft");
        return Ok(());
    }
    let node = ContainerNode::start().await?;
    for ending in [Ending::PreStopHook, Ending::Signal] {
        rolls_without_a_failure(&node, 80, ending).await?;
    }
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_update_fails_no_request_in_userspace() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start_with(&["--network", "loopback"]).await?;
    for ending in [Ending::PreStopHook, Ending::Signal] {
        rolls_without_a_failure(&node, 8080, ending).await?;
    }
    node.leaves_nothing().await
}
