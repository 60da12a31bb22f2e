//! Upstream's conformance scenarios of Services, EndpointSlices and Ingresses that need no containers; the list of all,
//! with the tests of the others, is docs/conformance-network.md. Uses the userspace proxy.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::{Context as _, Result, bail, ensure};
use http::Method;
use mayfly_e2e::{Start, Up, full, wait::until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
};

const SERVICES: &str = "/api/v1/namespaces/default/services";
const ENDPOINTS: &str = "/api/v1/namespaces/default/endpoints";
const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
const MERGE_PATCH: &str = "application/merge-patch+json";

/// A client of a server's API that checks the status of responses.
struct ConformanceCluster {
    up: Up,
}

impl ConformanceCluster {
    async fn start() -> Result<Self> {
        Ok(Self { up: Start::default().with(&["--network", "loopback"]).ready().await? })
    }

    async fn call(&self, method: Method, path: &str, body: &Value) -> Result<Value> {
        let kind = if method == Method::PATCH { MERGE_PATCH } else { "application/json" };
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.up.api()?.call(method.clone(), path, kind, full(body)).await?;
        ensure!((200..300).contains(&answer.status), "{method} {path}: {answer:?}");
        Ok(answer.body)
    }

    async fn create(&self, path: &str, object: Value) -> Result<Value> {
        self.call(Method::POST, path, &object).await
    }

    async fn patch(&self, path: &str, patch: Value) -> Result<Value> {
        self.call(Method::PATCH, path, &patch).await
    }

    async fn get(&self, path: &str) -> Result<Value> {
        self.call(Method::GET, path, &Value::Null).await
    }

    /// Reads the object, applies `change` and replaces it. A controller may write the object in
    /// between (the gateway does to an Ingress); the conflict is then answered by another try, as
    /// clients do.
    async fn replace(&self, path: &str, change: impl Fn(&mut Value)) -> Result<()> {
        loop {
            let mut object = self.get(path).await?;
            change(&mut object);
            let body = full(object.to_string());
            let answer = self.up.api()?.call(Method::PUT, path, "application/json", body).await?;
            match answer.status {
                200 => return Ok(()),
                409 => continue,
                _ => bail!("PUT {path}: {answer:?}"),
            }
        }
    }

    async fn delete(&self, path: &str) -> Result<Value> {
        self.call(Method::DELETE, path, &Value::Null).await
    }

    async fn names(&self, path: &str) -> Result<BTreeSet<String>> {
        let list = self.get(path).await?;
        let items = list["items"].as_array().context("no list")?;
        Ok(items.iter().filter_map(|item| item["metadata"]["name"].as_str().map(str::to_owned)).collect())
    }

    async fn is_absent(&self, path: &str) -> Result<Option<()>> {
        Ok((self.up.api()?.get(path).await?.status == 404).then_some(()))
    }
}

fn service(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": {"test": "yes"}}, "spec": spec})
}

/// A slice of a Service with endpoints at these addresses, one port each.
fn slice(service: &str, ports: Value, addresses: &[String]) -> Value {
    let endpoints: Vec<_> = addresses.iter().map(|address| json!({"addresses": [address]})).collect();
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
        "ports": ports, "endpoints": endpoints})
}

/// A server that answers each connection and each datagram with its address. `host` is an address of the range of pods
/// without root.
async fn backend(host: &str) -> Result<SocketAddr> {
    let listener = TcpListener::bind((host, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(address.to_string().as_bytes()).await;
        }
    });
    let socket = UdpSocket::bind(address).await?;
    tokio::spawn(async move {
        let mut datagram = [0; 16];
        while let Ok((_, client)) = socket.recv_from(&mut datagram).await {
            let _ = socket.send_to(format!("udp {address}").as_bytes(), client).await;
        }
    });
    Ok(address)
}

async fn ask(address: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    (!text.is_empty()).then_some(text)
}

async fn ask_udp(address: &str) -> Option<String> {
    let socket = UdpSocket::bind("127.0.0.1:0").await.ok()?;
    socket.connect(address).await.ok()?;
    socket.send(b"?").await.ok()?;
    let mut answer = [0; 64];
    let received =
        tokio::time::timeout(std::time::Duration::from_millis(500), socket.recv(&mut answer)).await;
    Some(String::from_utf8_lossy(&answer[..received.ok()?.ok()?]).into_owned())
}

/// The endpoints that answer many connections.
async fn answering(address: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for _ in 0..32 {
        found.extend(ask(address).await);
    }
    found
}

fn text(object: &Value, field: &str) -> String {
    object["spec"][field].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn services_change_their_type() -> Result<()> {
    let cluster = ConformanceCluster::start().await?;
    let at = format!("{SERVICES}/web");
    let external = json!({"type": "ExternalName", "externalName": "a.example"});
    let ports = json!([{"name": "http", "port": 8080, "protocol": "TCP"}]);
    for kind in ["ClusterIP", "NodePort"] {
        let made = cluster.create(SERVICES, service("web", external.clone())).await?;
        ensure!(made["spec"].get("clusterIP").is_none(), "{made}");
        let changed =
            cluster.patch(&at, json!({"spec": {"type": kind, "externalName": null, "ports": ports}})).await?;
        ensure!(text(&changed, "clusterIP").starts_with("127."), "{changed}");
        let has_port = changed["spec"]["ports"][0]["nodePort"].as_u64().is_some_and(|port| port >= 30_000);
        ensure!(has_port == (kind == "NodePort"), "{changed}");
        // The reverse change.
        let patch = json!({"spec": {"type": "ExternalName", "externalName": "b.example", "clusterIP": null,
            "clusterIPs": null, "ports": null}});
        let changed = cluster.patch(&at, patch).await?;
        ensure!(
            text(&changed, "clusterIP").is_empty() && text(&changed, "externalName") == "b.example",
            "{changed}"
        );
        cluster.delete(&at).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn services_live_and_are_found_and_deleted_together() -> Result<()> {
    let cluster = ConformanceCluster::start().await?;
    let all = cluster.get("/api/v1/services").await?;
    let found = all["items"].as_array().into_iter().flatten();
    let mut master = found.filter(|service| service["metadata"]["name"] == "kubernetes");
    let master = master.next().context("no Service kubernetes")?;
    ensure!(
        master["metadata"]["namespace"] == "default" && master["spec"]["ports"][0]["port"] == 443,
        "{master}"
    );

    // The status: patch, replace, read.
    cluster
        .create(SERVICES, service("web", json!({"type": "LoadBalancer", "ports": [{"port": 8080}]})))
        .await?;
    let status = format!("{SERVICES}/web/status");
    let ingress = json!({"metadata": {"annotations": {"patched": "true"}},
        "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}});
    let patched = cluster.patch(&status, ingress).await?;
    ensure!(patched["status"]["loadBalancer"]["ingress"][0]["ip"] == "203.0.113.1", "{patched}");
    ensure!(patched["metadata"]["annotations"]["patched"] == "true", "{patched}");
    let condition = json!({"status": {"conditions": [{"type": "StatusUpdate", "status": "True", "reason": "E2E",
        "message": "Set from the test", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    cluster.patch(&status, condition).await?;
    let read = cluster.get(&status).await?;
    ensure!(read["status"]["conditions"][0]["type"] == "StatusUpdate", "{read}");

    // Deletes a collection by label.
    for name in ["one", "two", "three"] {
        cluster.create(SERVICES, service(name, json!({"ports": [{"port": 8080}]}))).await?;
    }
    ensure!(cluster.names(&format!("{SERVICES}?labelSelector=test=yes")).await?.len() == 4);
    cluster.delete(&format!("{SERVICES}?labelSelector=test=yes")).await?;
    until("the Services are gone", || async {
        Ok((cluster.names(SERVICES).await? == BTreeSet::from(["kubernetes".to_owned()])).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_have_a_life_and_are_mirrored() -> Result<()> {
    let cluster = ConformanceCluster::start().await?;
    cluster.create(SERVICES, service("web", json!({"ports": [{"name": "http", "port": 8080}]}))).await?;
    let subsets =
        |ip: &str, port: u16| json!([{"addresses": [{"ip": ip}], "ports": [{"name": "http", "port": port}]}]);
    let object = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "web", "labels": {"test": "yes"}},
        "subsets": subsets("10.1.2.3", 80)});
    cluster.create(ENDPOINTS, object).await?;
    let mirrored = |ip: &'static str, port: u16| {
        let cluster = &cluster;
        async move {
            let list = cluster.get(&format!("{SLICES}?labelSelector=kubernetes.io/service-name=web")).await?;
            let items = list["items"].as_array().context("no list")?;
            let is_mirror = |slice: &Value| {
                slice["endpoints"][0]["addresses"][0] == ip
                    && slice["ports"][0]["port"] == port
                    && slice["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"]
                        == "endpointslicemirroring-controller.k8s.io"
            };
            Ok((items.len() == 1 && is_mirror(&items[0])).then_some(()))
        }
    };
    until("the Endpoints are mirrored", || mirrored("10.1.2.3", 80)).await?;
    cluster.patch(&format!("{ENDPOINTS}/web"), json!({"subsets": subsets("10.2.3.4", 9090)})).await?;
    until("the change is mirrored", || mirrored("10.2.3.4", 9090)).await?;
    ensure!(cluster.names("/api/v1/endpoints?labelSelector=test=yes").await?.contains("web"));
    cluster.delete(&format!("{ENDPOINTS}?labelSelector=test=yes")).await?;
    until("the mirror is gone", || async {
        let slices = cluster.names(&format!("{SLICES}?labelSelector=kubernetes.io/service-name=web")).await?;
        Ok(slices.is_empty().then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_follow_the_selected_pods() -> Result<()> {
    let cluster = ConformanceCluster::start().await?;
    let pod = |name: &str, port: u16| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "web"}}, "spec": {
            "nodeName": "elsewhere", "containers": [
                {"name": "c", "image": "none", "ports": [{"name": "http", "containerPort": port}]}]}})
    };
    let pods = "/api/v1/namespaces/default/pods";
    cluster.create(pods, pod("one", 3000)).await?;
    cluster.create(pods, pod("two", 3001)).await?;
    let spec = json!({"selector": {"app": "web"}, "publishNotReadyAddresses": true,
        "ports": [{"name": "http", "port": 80, "targetPort": "http"}]});
    cluster.create(SERVICES, service("web", spec)).await?;
    for (name, ip) in [("one", "10.1.0.1"), ("two", "10.1.0.2")] {
        let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}});
        cluster.patch(&format!("{pods}/{name}/status"), status).await?;
    }
    // A named port with two numbers has a slice and a subset of the Endpoints for each.
    until("slices and Endpoints", || async {
        let list = cluster.get(&format!("{SLICES}?labelSelector=kubernetes.io/service-name=web")).await?;
        let all = list["items"].as_array().into_iter().flatten();
        let found: BTreeSet<_> = all
            .filter_map(|slice| {
                let address = slice["endpoints"][0]["addresses"][0].as_str()?.to_owned();
                Some((address, slice["ports"][0]["port"].as_u64()?))
            })
            .collect();
        let expected = [("10.1.0.1".to_owned(), 3000), ("10.1.0.2".to_owned(), 3001)];
        let endpoints = cluster.up.api()?.get(&format!("{ENDPOINTS}/web")).await?.body;
        let subsets = endpoints["subsets"].as_array().map_or(0, Vec::len);
        Ok((found == BTreeSet::from(expected) && subsets == 2).then_some(()))
    })
    .await?;
    cluster.delete(&format!("{SERVICES}/web")).await?;
    let endpoints = format!("{ENDPOINTS}/web");
    until("the Endpoints are gone", || cluster.is_absent(&endpoints)).await?;
    until("the slices are gone", || async {
        let slices = cluster.names(&format!("{SLICES}?labelSelector=kubernetes.io/service-name=web")).await?;
        Ok(slices.is_empty().then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_protocols_and_affinity_are_served() -> Result<()> {
    let cluster = ConformanceCluster::start().await?;
    let (one, two) = (backend("127.94.1.1").await?, backend("127.94.1.2").await?);
    // Two ports, each with its own endpoint, and the same number for both protocols.
    let spec = json!({"type": "NodePort", "ports": [
        {"name": "first", "port": 8080, "protocol": "TCP"}, {"name": "second", "port": 8081, "protocol": "TCP"},
        {"name": "dns", "port": 8080, "protocol": "UDP"}]});
    let made = cluster.create(SERVICES, service("web", spec)).await?;
    let ip = text(&made, "clusterIP");
    for (name, port, protocol, endpoint) in
        [("first", "first", "TCP", one), ("second", "second", "TCP", two), ("dns", "dns", "UDP", one)]
    {
        let ports = json!([{"name": port, "port": endpoint.port(), "protocol": protocol}]);
        let mut slice = slice("web", ports, &[endpoint.ip().to_string()]);
        slice["metadata"]["name"] = name.into();
        cluster.create(SLICES, slice).await?;
    }
    let node = cluster.up.address("http").ip();
    let node_port = made["spec"]["ports"][0]["nodePort"].as_u64().context("no node port")?;
    for (address, expected) in
        [(format!("{ip}:8080"), one), (format!("{ip}:8081"), two), (format!("{node}:{node_port}"), one)]
    {
        let answer = until(&format!("{address} answers"), || async { Ok(ask(&address).await) }).await?;
        ensure!(answer == expected.to_string(), "{address}: {answer}");
    }
    let udp = format!("{ip}:8080");
    let answer = until("UDP answers", || async { Ok(ask_udp(&udp).await) }).await?;
    ensure!(answer == format!("udp {one}"), "{answer}");

    // Session affinity, switched on and off, at the cluster IP and the node port.
    let made = cluster.create(
        SERVICES,
        service(
            "sticky",
            json!({"type": "NodePort", "sessionAffinity": "ClientIP",
        "ports": [{"name": "tcp", "port": 8082}]}),
        ),
    );
    let made = made.await?;
    let (third, fourth) = (backend("127.94.1.3").await?, TcpListener::bind("127.94.1.4:0").await?);
    drop(fourth);
    let fourth = {
        // The endpoints of one slice share a port.
        let listener = TcpListener::bind(("127.94.1.4", third.port())).await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(address.to_string().as_bytes()).await;
            }
        });
        address
    };
    let addresses = [third, fourth].map(|endpoint| endpoint.ip().to_string());
    let ports = json!([{"name": "tcp", "port": third.port(), "protocol": "TCP"}]);
    cluster.create(SLICES, slice("sticky", ports, &addresses)).await?;
    let node_port = made["spec"]["ports"][0]["nodePort"].as_u64().context("no node port")?;
    let both = [format!("{}:8082", text(&made, "clusterIP")), format!("{node}:{node_port}")];
    for address in &both {
        until("the address answers", || async { Ok(ask(address).await) }).await?;
    }
    for (affinity, endpoints) in [("ClientIP", 1), ("None", 2), ("ClientIP", 1)] {
        cluster.patch(&format!("{SERVICES}/sticky"), json!({"spec": {"sessionAffinity": affinity}})).await?;
        for address in &both {
            until(&format!("{affinity} at {address}"), || async {
                Ok((answering(address).await.len() == endpoints).then_some(()))
            })
            .await?;
        }
    }
    Ok(())
}

/// Creation, reading, listing, watching from a version, patching, replacing and deletion of a kind.
async fn api_operations(
    cluster: &ConformanceCluster,
    path: &str,
    object: Value,
    is_status: bool,
) -> Result<()> {
    let name = object["metadata"]["name"].as_str().context("no name")?.to_owned();
    let made = cluster.create(path, object).await?;
    ensure!(!made["metadata"]["uid"].is_null());
    let at = format!("{path}/{name}");
    ensure!(cluster.names(path).await?.contains(&name));
    cluster.replace(&at, |object| object["metadata"]["annotations"]["replaced"] = "yes".into()).await?;
    let patched = cluster.patch(&at, json!({"metadata": {"annotations": {"patched": "yes"}}})).await?;
    let annotations = &patched["metadata"]["annotations"];
    ensure!(annotations["patched"] == "yes" && annotations["replaced"] == "yes", "{patched}");
    if is_status {
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": "169.1.1.1"}]}}});
        let patched = cluster.patch(&format!("{at}/status"), status).await?;
        ensure!(patched["status"]["loadBalancer"]["ingress"][0]["ip"] == "169.1.1.1", "{patched}");
    }
    let version = made["metadata"]["resourceVersion"].as_str().context("no version")?;
    let watched = cluster
        .up
        .api()?
        .get(&format!("{path}?watch=true&resourceVersion={version}&timeoutSeconds=1"))
        .await?;
    ensure!(watched.text.contains("MODIFIED"), "{watched:?}");
    cluster.delete(&at).await?;
    ensure!(cluster.is_absent(&at).await?.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_apis_of_slices_ingresses_and_their_classes_work() -> Result<()> {
    let cluster = ConformanceCluster::start().await?;
    api_operations(&cluster, SLICES, slice("free", json!([]), &["10.9.9.9".into()]), false).await?;
    let backend = json!({"service": {"name": "web", "port": {"number": 80}}});
    let ingress = json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "web"},
        "spec": {"defaultBackend": backend}});
    let path = "/apis/networking.k8s.io/v1/namespaces/default/ingresses";
    api_operations(&cluster, path, ingress, true).await?;
    let class = json!({"apiVersion": "networking.k8s.io/v1", "kind": "IngressClass", "metadata": {"name": "test"},
        "spec": {"controller": "example.com/controller"}});
    api_operations(&cluster, "/apis/networking.k8s.io/v1/ingressclasses", class, false).await
}
