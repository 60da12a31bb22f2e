//! Services of the type LoadBalancer with the pool of `mayfly up`, and NetworkPolicies where nothing enforces them.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, wait::until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Of the addresses that pods have without root: an endpoint may have no other loopback address.
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
    // The pool is used: the third Service waits for an address that is free again.
    balancer(&up, "three").await?;
    until("an event that the pool is used", || has_event(&up, "AllocationFailed", "three")).await?;
    ensure!(address_of(&up, "three").await?.is_none());
    let deleted = up.api()?.delete("/api/v1/namespaces/default/services/two").await?;
    ensure!(deleted.status == 200, "{deleted:?}");
    ensure!(until("the address is used again", || address_of(&up, "three")).await? == second);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_is_not_enforced_says_so() -> Result<()> {
    let up = Start::default().with(&["--network", "loopback"]).ready().await?;
    let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "closed"}, "spec": {"podSelector": {}}});
    let path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies";
    let made = up.api()?.post(path, &policy).await?;
    ensure!(made.status == 201, "{made:?}");
    until("the event", || has_event(&up, "NotEnforced", "closed")).await.context("of the policy")
}
