//! Gateways of several nodes, connected in memory.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header::ETAG};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use mayfly_gateway::{GatewayRole, Refusal, RefusalCode, ResponseBody};
use mayfly_runtime::{Body, HostedFunction as _};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinHandle,
    time::Instant,
};

use crate::support::{
    FakeApi, PODS, SERVICES, SLICES, TestGateway, config, eventually,
    host::{ScriptedHost, text},
    network::{LinkState, MemoryNetwork},
};

const REVISION: &str = "hello-00001";

/// A ready replica of the revision.
fn pod(name: &str, node: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "uid": format!("uid-{name}"), "labels": {"mayfly.dev/revision": REVISION}},
        "spec": {"nodeName": node, "containers": []},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}})
}

/// One node: a host that answers with the node's name and the request; `/hold` waits for a permit, `/echo` returns
/// the body.
struct Node {
    world: Arc<TestGateway>,
    host: Arc<ScriptedHost>,
    held: Arc<Semaphore>,
}

fn seen(name: &str, request: &Request<Body>) -> String {
    let mut headers: Vec<_> = request.headers().iter().map(|(n, v)| format!("{n}: {v:?}")).collect();
    headers.sort();
    format!("{name} {} {} {}", request.method(), request.uri(), headers.join(", "))
}

impl Node {
    async fn new(api: &FakeApi, name: &'static str, role: GatewayRole, network: &MemoryNetwork) -> Self {
        let held = Arc::new(Semaphore::new(0));
        let permits = held.clone();
        let host = ScriptedHost::new(move |_, request| {
            let permits = permits.clone();
            async move {
                let path = request.uri().path().to_owned();
                match path.as_str() {
                    "/hold" => permits.acquire().await.unwrap().forget(),
                    "/echo" => return Ok(Response::new(request.into_body())),
                    "/broken" => {
                        let frames = [Ok(Frame::data(Bytes::from("part"))), Err("the node ended".into())];
                        return Ok(Response::new(StreamBody::new(stream::iter(frames)).boxed_unsync()));
                    }
                    _ => {}
                }
                Ok(Response::new(text(seen(name, &request))))
            }
        });
        let world =
            TestGateway::with_role(api.clone(), config(), Arc::default(), Some(host.clone()), role).await;
        network.attach(name, world.handle.node_requests());
        Self { world: Arc::new(world), host, held }
    }

    async fn leader(api: &FakeApi, network: &MemoryNetwork) -> Self {
        Self::new(api, "one", GatewayRole::Leader { node: "one".into(), nodes: network.nodes() }, network)
            .await
    }

    async fn follower(api: &FakeApi, name: &'static str, network: &MemoryNetwork) -> Self {
        let role = GatewayRole::Follower { node: name.into(), leader: network.leader("one") };
        Self::new(api, name, role, network).await
    }

    fn running(&self) -> usize {
        self.host.running.load(Ordering::SeqCst)
    }

    async fn call(&self, method: Method, path: &str, body: Body) -> Result<Response<ResponseBody>, Refusal> {
        let request = Request::builder().method(method).uri(path).body(body).unwrap();
        self.world.handle.call("ns", "hello", request).await
    }

    /// The name of the node that answers.
    async fn get(&self, path: &str) -> String {
        let response = self.call(Method::GET, path, text("")).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8_lossy(&body).split(' ').next().unwrap().to_owned()
    }

    /// Sends a request that is held on `on`, and waits until it runs there.
    async fn hold(&self, on: &Self) -> JoinHandle<String> {
        let running = on.running();
        let world = self.world.clone();
        let holding = tokio::spawn(async move {
            let request = Request::get("/hold").body(text("")).unwrap();
            let response = world.handle.call("ns", "hello", request).await.unwrap();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            String::from_utf8_lossy(&body).split(' ').next().unwrap().to_owned()
        });
        eventually(|| async { on.running() > running }).await;
        holding
    }
}

/// One request at a time for each replica; one replica on the follower.
fn small(timeout: &str) -> FakeApi {
    let api = FakeApi::default();
    api.function(
        "hello",
        json!({"limits": {"concurrency": 1, "timeout": timeout}, "scaling": {"max": 4, "target": 1}}),
    );
    api.put(PODS, pod("away", "two"));
    api
}

async fn two_nodes(timeout: &str) -> (MemoryNetwork, Node, Node) {
    let (api, network) = (small(timeout), MemoryNetwork::default());
    let leader = Node::leader(&api, &network).await;
    let follower = Node::follower(&api, "two", &network).await;
    (network, leader, follower)
}

/// Two nodes; the leader's own place is taken, and it knows of the replica on the other one.
async fn full_leader(timeout: &str) -> (MemoryNetwork, Node, Node, JoinHandle<String>) {
    let (network, leader, follower) = two_nodes(timeout).await;
    let held = leader.hold(&leader).await;
    eventually(|| async { leader.get("/").await == "two" }).await;
    (network, leader, follower, held)
}

#[tokio::test(start_paused = true)]
async fn what_has_no_room_here_goes_to_a_node_with_room() {
    let (network, leader, follower) = two_nodes("10m").await;
    assert_eq!(leader.get("/").await, "one", "this node is free");
    assert!(network.calls().is_empty());
    let first = leader.hold(&leader).await;
    eventually(|| async { leader.get("/a?b").await == "two" }).await;
    assert_eq!(network.calls().last().unwrap(), "two GET /functions/ns/hello-00001/a?b");
    let second = leader.hold(&follower).await;
    assert_eq!(leader.get("/").await, "one", "all places are taken: this node protects itself");
    leader.held.add_permits(1);
    assert_eq!(first.await.unwrap(), "one");
    follower.held.add_permits(1);
    assert_eq!(second.await.unwrap(), "two");
    assert_eq!(leader.get("/").await, "one");
    let counted = "mayfly_gateway_node_calls_total{to=\"node\",outcome=\"answered\"}";
    assert!(leader.world.metrics().contains(counted), "{}", leader.world.metrics());
}

#[tokio::test]
async fn a_function_cannot_tell_where_it_runs() {
    let (_network, leader, _follower) = two_nodes("1m").await;
    let headers = [
        ("host", "shop.example:99"),
        ("x-request-id", "id-1"),
        ("x-forwarded-for", "forged"),
        ("te", "trailers"),
        ("mayfly-node-host", "forged"),
    ];
    let ask = || leader.world.request("/fn/ns/hello/a%20b/?c=d", &headers);
    let (local, local_body) = ask().await;
    let _held = leader.hold(&leader).await;
    eventually(|| async { leader.get("/").await == "two" }).await;
    let (remote, remote_body) = ask().await;
    // A client's own header of the internal name is the only difference.
    let local_body = local_body.replace("mayfly-node-host: \"forged\", ", "");
    assert!(local_body.starts_with("one GET /a%20b/?c=d"), "{local_body}");
    assert_eq!(remote_body.replacen("two", "one", 1), local_body);
    for expected in ["x-forwarded-for: \"127.0.0.1\"", "x-forwarded-host: \"shop.example:99\"", "te: "] {
        assert!(local_body.contains(expected), "{expected}: {local_body}");
    }
    assert_eq!(remote.status, local.status);
    let names = |parts: &http::response::Parts| {
        parts.headers.keys().map(|name| name.as_str().to_owned()).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(names(&remote), names(&local));
    assert_eq!(remote.headers.get_all("server-timing").iter().count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_cannot_be_reached_is_replaced() {
    let (network, leader, _follower, _held) = full_leader("10m").await;
    network.set("two", LinkState::Refused);
    let calls = network.calls().len();
    let response = leader.call(Method::POST, "/echo", text("a body")).await.unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "a body", "nothing of it was sent before");
    assert_eq!(network.calls().len(), calls + 1);
    assert_eq!(leader.get("/").await, "one");
    assert_eq!(network.calls().len(), calls + 1, "the node is avoided");
    network.set("two", LinkState::Up);
    eventually(|| async { leader.get("/").await == "two" }).await;
}

#[tokio::test(start_paused = true)]
async fn what_may_have_run_is_repeated_only_if_idempotent() {
    let (network, leader, _follower, _held) = full_leader("10m").await;
    network.set("two", LinkState::Breaks);
    let refusal = leader.call(Method::POST, "/", text("a body")).await.err().unwrap();
    assert_eq!(refusal.code, RefusalCode::NoAnswer);
    network.set("two", LinkState::Up);
    eventually(|| async { leader.get("/").await == "two" }).await;
    network.set("two", LinkState::Breaks);
    assert_eq!(leader.get("/").await, "one");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_breaks_off_breaks_off_and_frees_its_place() {
    let (_network, leader, follower, _held) = full_leader("10m").await;
    let response = leader.call(Method::GET, "/broken", text("")).await.unwrap();
    let mut body = response.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "part");
    assert!(body.frame().await.unwrap().is_err());
    drop(body);
    assert_eq!(leader.get("/").await, "two");
    // A client that leaves cancels the guest on the other node.
    let holding = leader.hold(&follower).await;
    holding.abort();
    eventually(|| async { follower.running() == 0 }).await;
    assert_eq!(leader.get("/").await, "two");
}

#[tokio::test(start_paused = true)]
async fn bodies_and_trailers_stream_both_ways() {
    let (_network, leader, _follower, _held) = full_leader("10m").await;
    let (sender, receiver) = mpsc::channel(1);
    let frames = stream::unfold(receiver, |mut receiver| async {
        Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
    });
    let body = StreamBody::new(frames.boxed()).map_err(|never| match never {}).boxed_unsync();
    let mut answer = leader.call(Method::POST, "/echo", body).await.unwrap().into_body();
    for part in ["first", "second"] {
        sender.send(Frame::data(Bytes::from(part))).await.unwrap();
        assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), part);
    }
    let trailers = HeaderMap::from_iter([(ETAG, http::HeaderValue::from_static("x"))]);
    sender.send(Frame::trailers(trailers.clone())).await.unwrap();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_trailers().unwrap(), trailers);
}

/// The format passes through real connections, whatever the version of the client's request.
#[tokio::test(start_paused = true)]
async fn requests_pass_through_http_connections() {
    for h2 in [false, true] {
        let (api, network) = (small("10m"), MemoryNetwork::default());
        let nodes = network.nodes_over_http(h2);
        let leader =
            Node::new(&api, "one", GatewayRole::Leader { node: "one".into(), nodes }, &network).await;
        let _follower = Node::follower(&api, "two", &network).await;
        let _held = leader.hold(&leader).await;
        eventually(|| async { leader.get("/").await == "two" }).await;
        let request = Request::get("/a?b").header("host", "shop.example").version(Version::HTTP_2);
        let request = request.body(text("")).unwrap();
        let response = leader.world.handle.call("ns", "hello", request).await.unwrap();
        assert!(response.headers().contains_key("server-timing"));
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body = String::from_utf8_lossy(&body);
        assert!(body.starts_with("two GET /a?b") && body.contains("host: \"shop.example\""), "{h2} {body}");
        let body = || {
            let trailers = HeaderMap::from_iter([(ETAG, http::HeaderValue::from_static("x"))]);
            let frames = [Frame::data(Bytes::from("first")), Frame::trailers(trailers)];
            let frames = stream::iter(frames.map(Ok::<_, Infallible>));
            StreamBody::new(frames).map_err(|never| match never {}).boxed_unsync()
        };
        let answer = leader.call(Method::POST, "/echo", body()).await.unwrap();
        let answer = answer.into_body().collect().await.unwrap();
        // HTTP/1.1 passes only trailers that were announced.
        assert_eq!(answer.trailers().is_some_and(|trailers| trailers.contains_key(ETAG)), h2);
        assert_eq!(answer.to_bytes(), "first");
        let broken = leader.call(Method::GET, "/broken", text("")).await.unwrap();
        assert!(broken.into_body().collect().await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn the_deadline_goes_with_the_request() {
    let (network, leader, follower, _held) = full_leader("10s").await;
    let started = Instant::now();
    let refusal = leader.call(Method::GET, "/hold", text("")).await.err().unwrap();
    assert_eq!(refusal.code, RefusalCode::TimedOut);
    assert_eq!(started.elapsed().as_secs(), 10);
    assert_eq!(network.deadlines_ms().last(), Some(&10_000));
    eventually(|| async { follower.running() == 0 }).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_is_sent_to_a_node_once() {
    let (api, network) = (small("10m"), MemoryNetwork::default());
    let leader = Node::leader(&api, &network).await;
    // The node does not know its replica (yet).
    let other = FakeApi::default();
    other.function("hello", json!({}));
    let follower = Node::follower(&other, "two", &network).await;
    let _held = leader.hold(&leader).await;
    let from_leader = || network.calls().iter().filter(|call| call.starts_with("two")).count();
    eventually(|| async {
        assert_eq!(leader.get("/").await, "one");
        from_leader() > 0
    })
    .await;
    assert!(!network.calls().iter().any(|call| call.starts_with("one")), "{:?}", network.calls());
    // The node gets to know it in time.
    let (answer, ()) = tokio::join!(leader.get("/"), async {
        other.put(PODS, pod("away", "two"));
    });
    assert_eq!(answer, "two");
    // A leader does not send such a request on, either.
    let calls = network.calls().len();
    let request = Request::get("/functions/ns/hello-00001/")
        .header("mayfly-node-revision", "uid-hello-00001")
        .header("mayfly-node-from", "three")
        .header("mayfly-node-deadline-ms", "1000");
    api.put(PODS, pod("near", "one"));
    let requests = leader.world.handle.node_requests();
    let response = requests.serve(request.body(text("")).unwrap()).await;
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.starts_with(b"one "), "{body:?}");
    assert_eq!(network.calls().len(), calls);
    drop(follower);
}

#[tokio::test(start_paused = true)]
async fn a_follower_serves_what_it_has_room_for() {
    let (api, network) = (small("10m"), MemoryNetwork::default());
    api.delete_pod("away");
    let leader = Node::leader(&api, &network).await;
    let follower = Node::follower(&api, "two", &network).await;
    assert_eq!(follower.get("/x").await, "one");
    assert_eq!(network.calls(), ["one GET /requests/ns/hello-00001/x"]);
    api.put(PODS, pod("away", "two"));
    eventually(|| async { follower.get("/").await == "two" }).await;
    let calls = network.calls().len();
    let held = follower.hold(&follower).await;
    assert_eq!(network.calls().len(), calls);
    assert_eq!(follower.get("/").await, "one", "its replica is busy");
    // The leader is full, too: it does not send the request back.
    let _held = leader.hold(&leader).await;
    assert_eq!(follower.get("/").await, "one");
    follower.held.add_permits(1);
    assert_eq!(held.await.unwrap(), "two");
    // The replica is free again, and the leader's own place is still taken.
    eventually(|| async { leader.get("/").await == "two" }).await;
}

#[tokio::test(start_paused = true)]
async fn followers_answer_without_the_leader() {
    let (network, _leader, follower) = two_nodes("10m").await;
    eventually(|| async { follower.get("/").await == "two" }).await;
    network.set("one", LinkState::Refused);
    let _held = follower.hold(&follower).await;
    assert_eq!(follower.get("/").await, "two", "more than it has room for, since there is no other place");
    let response = follower.call(Method::POST, "/echo", text("a body")).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a body");
    follower.world.api.delete_pod("away");
    let unreachable = || async {
        let refused = follower.call(Method::GET, "/", text("")).await.err();
        refused.is_some_and(|refusal| refusal.code == RefusalCode::ServerUnreachable)
    };
    eventually(unreachable).await;
    network.set("one", LinkState::Up);
    assert_eq!(follower.get("/").await, "one");
}

#[tokio::test(start_paused = true)]
async fn requests_of_followers_keep_their_replicas() {
    let api = FakeApi::default();
    let spec = json!({"limits": {"concurrency": 1, "timeout": "10m"}, "scaling": {"idleAfter": "10s"}});
    api.function("hello", spec.clone());
    api.put(PODS, pod("away", "two"));
    let network = MemoryNetwork::default();
    let leader = Node::leader(&api, &network).await;
    let follower = Node::follower(&api, "two", &network).await;
    eventually(|| async { follower.get("/").await == "two" }).await;
    let _held = follower.hold(&follower).await;
    api.revision_with("hello", 1, spec.clone(), json!({"readyReplicas": 1}));
    api.written("hello-00001=1").await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let zero = "hello-00001=0".to_owned();
    assert!(!api.writes().contains(&zero), "{:?}", api.writes());
    let ended = Instant::now();
    follower.held.add_permits(1);
    api.written(&zero).await;
    let idle = ended.elapsed();
    assert!((Duration::from_secs(9)..Duration::from_secs(14)).contains(&idle), "{idle:?}");
    assert!(network.calls().iter().all(|call| call.starts_with("one")), "only before it knew its replica");
    drop(leader);
}

#[tokio::test(start_paused = true)]
async fn requests_that_the_leader_sent_are_not_in_the_report() {
    let (_network, leader, follower, _held) = full_leader("10m").await;
    let reported = || async {
        let request = Request::get("/load").body(text("")).unwrap();
        let response = follower.world.handle.node_requests().serve(request).await;
        let report = response.into_body().collect().await.unwrap().to_bytes();
        let report: Value = serde_json::from_slice(&report).unwrap();
        report["revisions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|load| load["requests"].as_u64().unwrap())
            .sum::<u64>()
    };
    let sent = leader.hold(&follower).await;
    assert_eq!(reported().await, 0u64);
    sent.abort();
    eventually(|| async { follower.running() == 0 }).await;
    let _own = follower.hold(&follower).await;
    assert_eq!(reported().await, 1);
}

#[tokio::test(start_paused = true)]
async fn followers_write_nothing_and_unload_with_their_last_pod() {
    let (api, network) = (small("10m"), MemoryNetwork::default());
    let role = GatewayRole::Follower { node: "two".into(), leader: network.leader("one") };
    let follower = TestGateway::with_role(api.clone(), config(), Arc::default(), None, role).await;
    let ask = || async {
        let request = Request::get("/").body(text("")).unwrap();
        follower.handle.call("ns", "hello", request).await.is_ok()
    };
    eventually(ask).await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(api.writes().is_empty(), "{:?}", api.writes());
    assert!(follower.revision(REVISION).is_loaded());
    api.delete_pod("away");
    eventually(|| async { !follower.revision(REVISION).is_loaded() }).await;
}

#[tokio::test(start_paused = true)]
async fn invocations_of_followers_are_queued_by_the_leader() {
    let (_network, leader, follower) = two_nodes("10m").await;
    let request = Request::post("/c?d").header("mayfly-invocation", "async").body(text("{}")).unwrap();
    let answer = follower.world.handle.call("ns", "hello", request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED);
    assert_eq!(answer.headers()["mayfly-invocation-id"], "i1");
    assert_eq!(leader.world.queue.queued(), ["ns/hello /c?d None {}"]);
}

#[tokio::test]
async fn followers_serve_services_on_the_leaders_port() {
    let (api, network) = (small("1m"), MemoryNetwork::default());
    let follower = Node::follower(&api, "two", &network).await;
    eventually(|| async { follower.call(Method::GET, "/", text("")).await.is_ok() }).await;
    let free = tokio::net::TcpListener::bind("127.95.255.254:0").await.unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    api.put(
        SERVICES,
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "uid": "u"},
        "spec": {"selector": {"mayfly.dev/function": "hello"}, "ports": [{"port": 80}]}}),
    );
    api.put(
        SLICES,
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "web-function", "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"port": address.port()}], "endpoints": [{"addresses": ["127.95.255.254"]}]}),
    );
    let ask = || async {
        let request =
            Request::get(format!("http://{address}/x")).header("host", "web").body(Default::default());
        let Ok(response) = follower.world.http.request(request.unwrap()).await else { return false };
        let body = response.into_body().collect().await.unwrap().to_bytes();
        body.starts_with(b"two GET /x")
    };
    eventually(ask).await;
}
