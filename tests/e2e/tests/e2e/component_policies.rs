//! NetworkPolicies for pods of components and for functions, without root: nine pods in three namespaces and a function
//! call each other under each policy, by cluster IPs, by the pods' own addresses, and from these addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Http, Start, Up, guest_or_skip, wait::until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpSocket,
};

const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const NAMES: [&str; 3] = ["a", "b", "c"];
const PORT: u16 = 8080;
/// The function, which is in the namespace x, too.
const FUNCTION: &str = "caller";

/// A source of connections: a pod by its namespace and name, or the function.
type Place = (&'static str, &'static str);

fn places() -> impl Iterator<Item = Place> {
    NAMESPACES.iter().flat_map(|namespace| NAMES.iter().map(move |name| (*namespace, *name)))
}

/// The destinations that each source lists in its egress rules.
fn egress() -> Vec<String> {
    let of = |(namespace, name)| [name_of(name, namespace, ""), name_of(name, namespace, "-pod")];
    places().flat_map(of).map(|host| format!("http://{host}:{PORT}")).collect()
}

/// The name of a pod's Service; with the suffix `-pod`, that of its headless one.
fn name_of(name: &str, namespace: &str, suffix: &str) -> String {
    format!("{name}{suffix}.{namespace}")
}

async fn create(up: &Up, path: &str, object: &Value) -> Result<()> {
    let made = up.api()?.post(path, object).await?;
    ensure!(made.status == 201, "{path}: {made:?}");
    Ok(())
}

/// The nine pods, each behind a Service and a headless one, and the function.
async fn cluster(up: &Up, component: &str) -> Result<()> {
    for namespace in NAMESPACES {
        let metadata = json!({"name": namespace, "labels": {"ns": namespace}});
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        create(up, "/api/v1/namespaces", &namespace).await?;
    }
    for (namespace, name) in places() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": {"pod": name},
                "annotations": {"mayfly.dev/egress": egress().join(",")}},
            "spec": {"runtimeClassName": "wasm", "containers": [{"name": "c",
                "image": format!("component.mayfly.dev/sha256@{component}"),
                "ports": [{"name": "main", "containerPort": PORT}]}]}});
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        // Refused until the namespace has its service account.
        until("the pod is admitted", || async { create(up, &path, &pod).await.map(Some) }).await?;
        for (suffix, ip) in [("", None), ("-pod", Some("None"))] {
            let metadata = json!({"name": format!("{name}{suffix}")});
            let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {
                "clusterIP": ip, "selector": {"pod": name}, "ports": [{"port": PORT}]}});
            create(up, &format!("/api/v1/namespaces/{namespace}/services"), &service).await?;
        }
    }
    let function = json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": FUNCTION},
        "spec": {"source": {"component": component}, "egress": egress()}});
    create(up, "/apis/mayfly.dev/v1/namespaces/x/functions", &function).await
}

/// The pods' addresses, when all of them have one.
async fn addresses(up: &Up) -> Result<BTreeMap<Place, Ipv4Addr>> {
    let mut addresses = BTreeMap::new();
    for (namespace, name) in places() {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        let address = until("the pod is ready", || async {
            let pod = up.api()?.get(&path).await?.body;
            let is_running = pod["status"]["phase"] == "Running";
            Ok(pod["status"]["podIP"].as_str().filter(|_| is_running).map(str::to_owned))
        });
        addresses.insert((namespace, name), address.await?.parse()?);
    }
    Ok(addresses)
}

struct Matrix {
    up: Up,
    pods: BTreeMap<Place, Ipv4Addr>,
}

impl Matrix {
    /// Whether a source can fetch from a URL, or is denied it.
    async fn fetches(&self, from: Place, url: &str) -> Result<bool> {
        let answer = match self.pods.get(&from) {
            Some(address) => {
                Http::new(SocketAddr::from((*address, PORT))).get(&format!("/?url={url}")).await?
            }
            None => self.up.http().get(&format!("/fn/{}/{}/?url={url}", from.0, from.1)).await?,
        };
        match answer.status.as_u16() {
            // The destination is such a component, too, and its own request has no target.
            400 if answer.text().contains("the target is missing") => Ok(true),
            502 if answer.text().contains("Denied") => Ok(false),
            _ => anyhow::bail!("{from:?} -> {url}: {answer:?}"),
        }
    }

    /// Whether a connection of a program that has a pod's address is served.
    async fn is_served(&self, from: Ipv4Addr, to: Ipv4Addr) -> Result<bool> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        let mut stream = socket.connect((to, PORT).into()).await?;
        let mut text = String::new();
        let request = b"GET / HTTP/1.1\r\nhost: pod\r\nconnection: close\r\n\r\n";
        // A connection that is not admitted may be closed before or after the request.
        let sent = stream.write_all(request).await;
        let read = stream.read_to_string(&mut text).await;
        Ok(sent.is_ok() && read.is_ok() && text.starts_with("HTTP/1.1 400"))
    }

    /// The connections that are possible, of each kind.
    async fn round(&self) -> Result<BTreeSet<String>> {
        let mut possible = BTreeSet::new();
        for to in places() {
            for from in places().chain([("x", FUNCTION)]) {
                for (kind, suffix) in [("service", ""), ("pod", "-pod")] {
                    let host = name_of(to.1, to.0, suffix);
                    if self.fetches(from, &format!("http://{host}:{PORT}/")).await? {
                        possible.insert(line(kind, from, to));
                    }
                }
                if let Some(address) = self.pods.get(&from)
                    && self.is_served(*address, self.pods[&to]).await?
                {
                    possible.insert(line("address", from, to));
                }
            }
        }
        Ok(possible)
    }

    /// Creates policies of the namespace x; the possible connections become those that `is_allowed` names.
    async fn check(&self, what: &str, specs: &[Value], is_allowed: fn(Place, Place) -> bool) -> Result<()> {
        let path = "/apis/networking.k8s.io/v1/namespaces/x/networkpolicies";
        for (number, spec) in specs.iter().enumerate() {
            let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
                "metadata": {"name": format!("p{number}")}, "spec": spec});
            create(&self.up, path, &policy).await?;
        }
        let mut expected = BTreeSet::new();
        for to in places() {
            for from in places().chain([("x", FUNCTION)]).filter(|from| *from == to || is_allowed(*from, to))
            {
                let kinds = ["service", "pod", "address"].into_iter();
                let kinds = kinds.filter(|kind| *kind != "address" || from.1 != FUNCTION);
                expected.extend(kinds.map(|kind| line(kind, from, to)));
            }
        }
        until(what, || async {
            let possible = self.round().await?;
            let (more, less) = (possible.difference(&expected), expected.difference(&possible));
            let (more, less): (Vec<_>, Vec<_>) = (more.collect(), less.collect());
            ensure!(more.is_empty() && less.is_empty(), "not forbidden: {more:?}; not allowed: {less:?}");
            Ok(Some(()))
        })
        .await?;
        for number in 0..specs.len() {
            let deleted = self.up.api()?.delete(&format!("{path}/p{number}")).await?;
            ensure!(deleted.status == 200, "{deleted:?}");
        }
        Ok(())
    }
}

fn line(kind: &str, from: Place, to: Place) -> String {
    format!("{kind}: {}/{} -> {}/{}", from.0, from.1, to.0, to.1)
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_limit_pods_of_components_and_functions() -> Result<()> {
    guest_or_skip!("proxy");
    let up = Start::default().with(&["--network", "loopback"]).ready().await?;
    cluster(&up, &up.upload("proxy").await?).await?;
    let pods = addresses(&up).await.context("the pods")?;
    let matrix = Matrix { pods, up };
    let (a, b) = (json!({"matchLabels": {"pod": "a"}}), json!({"matchLabels": {"pod": "b"}}));
    let y = json!({"matchLabels": {"ns": "y"}});
    let caller = json!({"matchLabels": {"mayfly.dev/function": FUNCTION}});
    let all = json!({});

    matrix.check("without a policy everything is reached", &[], |_, _| true).await?;
    let both = ["Ingress", "Egress"];
    matrix.check("nothing of x is reached", &[json!({"podSelector": all})], |_, to| to.0 != "x").await?;
    matrix
        .check("x reaches nothing", &[json!({"podSelector": all, "policyTypes": ["Egress"]})], |from, _| {
            from.0 != "x"
        })
        .await?;
    matrix
        .check("x is closed", &[json!({"podSelector": all, "policyTypes": both})], |from, to| {
            from.0 != "x" && to.0 != "x"
        })
        .await?;
    matrix
        .check(
            "a is reached from b, the function and y",
            &[json!({"podSelector": a, "ingress": [
                {"from": [{"podSelector": b}, {"podSelector": caller}, {"namespaceSelector": y}], "ports": [{"port": "main"}]}]})],
            |from, to| to != ("x", "a") || from == ("x", "b") || from == ("x", FUNCTION) || from.0 == "y",
        )
        .await?;
    matrix
        .check(
            "the function reaches y alone, and x another port alone",
            &[
                json!({"podSelector": caller, "policyTypes": ["Egress"],
                    "egress": [{"to": [{"namespaceSelector": y}], "ports": [{"port": PORT}]}]}),
                json!({"podSelector": b, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": 1, "endPort": 8079}]}]}),
            ],
            |from, to| from != ("x", "b") && (from != ("x", FUNCTION) || to.0 == "y"),
        )
        .await?;
    // Blocks: a function has no address, so that a block of pods' addresses does not contain it.
    let except = format!("{}/32", matrix.pods[&("x", "b")]);
    matrix
        .check(
            "a is reached from a block",
            &[json!({"podSelector": a,
                "ingress": [{"from": [{"ipBlock": {"cidr": "127.64.0.0/11", "except": [except]}}]}]})],
            |from, to| to != ("x", "a") || (from != ("x", "b") && from != ("x", FUNCTION)),
        )
        .await
}
