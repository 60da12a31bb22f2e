//! Services of the type LoadBalancer with the pool of `mayfly up`, and NetworkPolicies that are not enforced.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, skipped, test_name, wait::until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// An address of the range of pods without root: endpoints may have no other loopback address.
const BACKEND: &str = "127.94.0.3:0";
const PORT: u16 = 8081;

/// A server that writes a line to each connection.
async fn backend() -> Result<SocketAddr> {
    let listener = TcpListener::bind(BACKEND).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"from the backend\n").await;
        }
    });
    Ok(address)
}

/// Two addresses that no other process of these tests uses: `127.114.x.y/30`.
fn pool() -> (String, [String; 2]) {
    let [_, _, high, low] = (std::process::id() << 2).to_be_bytes();
    let first = u32::from(Ipv4Addr::new(127, 114, high, low));
    let address = |offset| Ipv4Addr::from(first + offset).to_string();
    (format!("{}/30", address(0)), [address(1), address(2)])
}

async fn balancer(up: &Up, name: &str) -> Result<()> {
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"type": "LoadBalancer", "ports": [{"name": "tcp", "port": PORT}]}});
    let made = up.api()?.post("/api/v1/namespaces/default/services", &service).await?;
    ensure!(made.status == 201, "{made:?}");
    Ok(())
}

async fn address_of(up: &Up, name: &str) -> Result<Option<String>> {
    let service = up.api()?.get(&format!("/api/v1/namespaces/default/services/{name}")).await?.body;
    Ok(service["status"]["loadBalancer"]["ingress"][0]["ip"].as_str().map(str::to_owned))
}

async fn has_event(up: &Up, reason: &str, name: &str) -> Result<Option<()>> {
    let events: Value = up.api()?.get("/api/v1/namespaces/default/events").await?.body;
    let mut events = events["items"].as_array().into_iter().flatten();
    let found = events.any(|event| event["reason"] == reason && event["involvedObject"]["name"] == name);
    Ok(found.then_some(()))
}

#[tokio::test(flavor = "multi_thread")]
async fn load_balancers_get_addresses_of_the_pool() -> Result<()> {
    let (cidr, [first, second]) = pool();
    let up = Start::default().with(&["--network", "loopback", "--load-balancer-pool", &cidr]).ready().await?;
    let endpoint = backend().await?;
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "one", "labels": {"kubernetes.io/service-name": "one"}},
        "ports": [{"name": "tcp", "port": endpoint.port(), "protocol": "TCP"}],
        "endpoints": [{"addresses": [endpoint.ip().to_string()], "conditions": {"ready": true}}]});
    let made = up.api()?.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice).await?;
    ensure!(made.status == 201, "{made:?}");

    balancer(&up, "one").await?;
    let given = until("an address of the pool", || address_of(&up, "one")).await?;
    ensure!(given == first, "{given}");
    let text = until("the address answers", || async {
        let Ok(mut stream) = TcpStream::connect(format!("{given}:{PORT}")).await else { return Ok(None) };
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(Some(text))
    })
    .await?;
    ensure!(text == "from the backend\n", "{text:?}");

    balancer(&up, "two").await?;
    ensure!(until("the other address", || address_of(&up, "two")).await? == second);
    // The pool is exhausted: the third Service waits until an address is released.
    balancer(&up, "three").await?;
    until("an event that the pool is used", || has_event(&up, "AllocationFailed", "three")).await?;
    ensure!(address_of(&up, "three").await?.is_none());
    let deleted = up.api()?.delete("/api/v1/namespaces/default/services/two").await?;
    ensure!(deleted.status == 200, "{deleted:?}");
    ensure!(until("the address is used again", || address_of(&up, "three")).await? == second);
    Ok(())
}

/// The status and body of a node's health check for load balancers; `None` while nothing listens.
async fn health_check(address: &str) -> Result<Option<(u16, Value)>> {
    let Ok(mut stream) = TcpStream::connect(address).await else { return Ok(None) };
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let (head, body) = text.split_once("\r\n\r\n").context("no head")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok(Some((status, serde_json::from_str(body)?)))
}

async fn node_name(up: &Up) -> Result<String> {
    until("the node is registered", || async {
        let nodes = up.api()?.get("/api/v1/nodes").await?.body;
        Ok(nodes["items"][0]["metadata"]["name"].as_str().map(str::to_owned))
    })
    .await
}

/// The answers of a node with a ready endpoint, without one, and after the Service is gone.
async fn health_checks(up: &Up, node_address: &str) -> Result<()> {
    let api = up.api()?;
    let node = node_name(up).await?;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "local"},
        "spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"name": "tcp", "port": PORT}]}});
    let made = api.post("/api/v1/namespaces/default/services", &service).await?;
    let port = made.body["spec"]["healthCheckNodePort"].as_u64().with_context(|| format!("{made:?}"))?;
    let address = format!("{node_address}:{port}");
    let answer = |endpoints: u32| {
        let body = json!({"service": {"namespace": "default", "name": "local"},
            "localEndpoints": endpoints, "serviceProxyHealthy": true});
        (if endpoints > 0 { 200 } else { 503 }, body)
    };
    let answers = |expected: (u16, Value)| {
        let address = &address;
        until("the health check answers", move || {
            let expected = expected.clone();
            async move { Ok((health_check(address).await? == Some(expected)).then_some(())) }
        })
    };
    answers(answer(0)).await?;
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "local", "labels": {"kubernetes.io/service-name": "local"}},
        "ports": [{"name": "tcp", "port": 80, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["127.94.0.4"], "nodeName": node}, {"addresses": ["127.94.0.5"], "nodeName": "other"}]});
    let made = api.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice).await?;
    ensure!(made.status == 201, "{made:?}");
    answers(answer(1)).await?;
    api.delete("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/local").await?;
    answers(answer(0)).await?;
    api.delete("/api/v1/namespaces/default/services/local").await?;
    until("the port is closed", || async { Ok(health_check(&address).await?.is_none().then_some(())) }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn load_balancers_find_nodes_with_endpoints_by_health_checks_in_userspace() -> Result<()> {
    let up = Start::default().with(&["--network", "loopback"]).ready().await?;
    let address = up.address("http").ip().to_string();
    health_checks(&up, &address).await
}

#[tokio::test(flavor = "multi_thread")]
async fn load_balancers_find_nodes_with_endpoints_by_health_checks_in_nftables() -> Result<()> {
    let has_nft = std::process::Command::new("nft").args(["list", "tables"]).output();
    if !has_nft.is_ok_and(|output| output.status.success()) {
        skipped(test_name!(), "no right to use nft");
        return Ok(());
    }
    let up = Start::default().with(&["--network", "bridge"]).ready().await?;
    health_checks(&up, "127.0.0.1").await?;
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_is_not_enforced_says_so() -> Result<()> {
    let up = Start::default().with(&["--network", "loopback"]).ready().await?;
    let node = node_name(&up).await?;
    // It cannot start here, but is a pod of containers, whose packets this node would not see.
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "contained"},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none:local"}]}});
    // Refused until the namespace has its service account.
    until("the pod is admitted", || async {
        let made = up.api()?.post("/api/v1/namespaces/default/pods", &pod).await?;
        ensure!(made.status == 201, "{made:?}");
        Ok(Some(()))
    })
    .await?;
    let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "closed"}, "spec": {"podSelector": {}}});
    let path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies";
    let made = up.api()?.post(path, &policy).await?;
    ensure!(made.status == 201, "{made:?}");
    until("the event", || has_event(&up, "NotEnforced", "closed")).await.context("of the policy")
}
