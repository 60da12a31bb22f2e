//! A gateway with its environment: a fake API server, a host, and a client.

#![allow(unreachable_pub, reason = "a module of one binary of tests")]

pub mod host;
pub mod network;
pub mod queue;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures::{TryStreamExt as _, stream};
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::Client;
use mayfly_api::{Digest, ObjectKey};
use mayfly_gateway::{Config, Drained, Gateway, GatewayDeps, GatewayHandle, GatewayRole};
use mayfly_informer::{EnvObjects, Informers};
use mayfly_runtime::{
    FunctionHost,
    simulated::{SimulatedFunction, SimulatedFunctions},
};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use self::queue::RecordedQueue;

pub type Answer = UnsyncBoxBody<Bytes, std::io::Error>;

pub const PODS: &str = "/api/v1/pods";
pub const SERVICES: &str = "/api/v1/services";
pub const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const INGRESSES: &str = "/apis/networking.k8s.io/v1/ingresses";
const FUNCTIONS: &str = "/apis/mayfly.dev/v1/functions";
const REVISIONS: &str = "/apis/mayfly.dev/v1/revisions";
const SECRETS: &str = "/api/v1/secrets";
const CONFIG_MAPS: &str = "/api/v1/configmaps";

/// A fake API server: lists, watches, and patches of ReplicaSets.
#[derive(Clone, Default)]
pub struct FakeApi {
    state: Arc<Mutex<FakeState>>,
    /// `name=replicas` for each write, in order.
    writes: watch::Sender<Vec<String>>,
    down: watch::Sender<bool>,
}

#[derive(Default)]
struct FakeState {
    revision: u64,
    kinds: BTreeMap<&'static str, Kind>,
    replica_sets: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Kind {
    objects: BTreeMap<String, Value>,
    /// All events with their resource versions: a watch gets those after its own version.
    events: Vec<(u64, Value)>,
    watches: Vec<mpsc::Sender<Value>>,
}

impl Kind {
    fn tell(&mut self, revision: u64, event: Value) {
        self.watches.retain(|watch| watch.try_send(event.clone()).is_ok());
        self.events.push((revision, event));
    }
}

impl FakeApi {
    pub fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let api = api.clone();
            async move { api.answer(request).await }
        });
        Client::new(service, "default")
    }

    pub fn put(&self, path: &'static str, mut object: Value) {
        let mut state = self.state.lock().unwrap();
        state.revision += 1;
        let revision = state.revision;
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        object["metadata"]["namespace"] = json!("ns");
        object["metadata"]["resourceVersion"] = json!(revision.to_string());
        let kind = state.kinds.entry(path).or_default();
        let event = if kind.objects.contains_key(&name) { "MODIFIED" } else { "ADDED" };
        kind.objects.insert(name, object.clone());
        kind.tell(revision, json!({"type": event, "object": object}));
    }

    pub fn delete(&self, path: &'static str, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.revision += 1;
        let revision = state.revision;
        let kind = state.kinds.entry(path).or_default();
        let mut object = kind.objects.remove(name).expect("only what exists is deleted");
        object["metadata"]["resourceVersion"] = json!(revision.to_string());
        kind.tell(revision, json!({"type": "DELETED", "object": object}));
    }

    /// Creates a function, its first revision `<name>-00001`, and the revision's ReplicaSet.
    pub fn function(&self, name: &str, spec: Value) {
        self.revision(name, 1, spec.clone());
        self.traffic(name, spec);
    }

    /// Creates only the function.
    pub fn traffic(&self, name: &str, mut spec: Value) {
        spec["source"] = json!({"component": Digest::of(name.as_bytes())});
        self.put(
            FUNCTIONS,
            json!({"apiVersion": "mayfly.dev/v1", "kind": "Function",
            "metadata": {"name": name, "uid": format!("uid-{name}")}, "spec": spec}),
        );
    }

    pub fn revision(&self, function: &str, number: u32, spec: Value) -> String {
        let name = format!("{function}-{number:05}");
        self.state.lock().unwrap().replica_sets.insert(name.clone(), 0);
        self.revision_with(function, number, spec, json!({}));
        name
    }

    pub fn revision_with(&self, function: &str, number: u32, mut spec: Value, status: Value) {
        let name = format!("{function}-{number:05}");
        let fields = spec.as_object_mut().unwrap();
        fields.remove("traffic");
        fields.remove("sticky");
        spec["function"] = json!(function);
        if spec["source"].is_null() {
            spec["source"] = json!({"component": Digest::of(name.as_bytes())});
        }
        self.put(
            REVISIONS,
            json!({"apiVersion": "mayfly.dev/v1", "kind": "Revision",
            "metadata": {"name": name, "uid": format!("uid-{name}"),
                "creationTimestamp": format!("2026-01-01T00:{:02}:00Z", number % 60)},
            "spec": spec, "status": status}),
        );
    }

    pub fn replica_set(&self, name: &str) {
        self.state.lock().unwrap().replica_sets.insert(name.into(), 0);
    }

    pub fn function_status(&self, name: &str, status: Value) {
        let mut function = self.state.lock().unwrap().kinds[FUNCTIONS].objects[name].clone();
        function["status"] = status;
        self.put(FUNCTIONS, function);
    }

    pub fn secret(&self, name: &str, key: &str, base64: &str) {
        self.put(
            SECRETS,
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
            "data": {key: base64}}),
        );
    }

    pub fn delete_revision(&self, name: &str) {
        self.delete(REVISIONS, name);
    }

    pub fn delete_pod(&self, name: &str) {
        self.delete(PODS, name);
    }

    pub fn delete_function(&self, name: &str) {
        self.delete(FUNCTIONS, name);
    }

    /// While down, every request fails and every watch is closed.
    pub fn set_down(&self, down: bool) {
        self.down.send_replace(down);
        self.state.lock().unwrap().kinds.values_mut().for_each(|kind| kind.watches.clear());
    }

    pub fn writes(&self) -> Vec<String> {
        self.writes.borrow().clone()
    }

    /// Waits for a write such as `hello-00001=1`.
    pub async fn written(&self, write: &str) {
        let mut writes = self.writes.subscribe();
        let seen = writes.wait_for(|writes| writes.iter().any(|seen| seen == write));
        tokio::time::timeout(Duration::from_secs(600), seen)
            .await
            .unwrap_or_else(|_| panic!("{write} was not written: {:?}", self.writes()))
            .unwrap();
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Result<Response<Answer>, std::io::Error> {
        if *self.down.borrow() {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        if parts.method == Method::PATCH {
            let body = body.collect().await.unwrap().to_bytes();
            let patch: Value = serde_json::from_slice(&body).unwrap();
            return Ok(self.patch(&path, &patch));
        }
        let mut state = self.state.lock().unwrap();
        let revision = state.revision;
        let kinds = [PODS, FUNCTIONS, REVISIONS, SECRETS, CONFIG_MAPS, SERVICES, SLICES, INGRESSES];
        let path = kinds.into_iter().find(|known| *known == path);
        let kind = state.kinds.entry(path.expect("a kind that gateways list")).or_default();
        let query = parts.uri.query().unwrap_or_default();
        if !query.contains("watch=true") {
            let items: Vec<_> = kind.objects.values().cloned().collect();
            let list = json!({"kind": "List", "apiVersion": "v1",
                "metadata": {"resourceVersion": revision.to_string()}, "items": items});
            return Ok(Response::new(full(&list)));
        }
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion=")?.parse().ok());
        let from: u64 = from.expect("a watch says what it has seen");
        let (sender, events) = mpsc::channel(20_000);
        for (_, event) in kind.events.iter().filter(|(revision, _)| *revision > from) {
            sender.try_send(event.clone()).expect("there is room for all that a test does");
        }
        kind.watches.push(sender);
        let lines = stream::unfold(events, |mut events| async {
            let line = Bytes::from(format!("{}\n", events.recv().await?));
            Some((Ok::<_, std::io::Error>(line), events))
        });
        Ok(Response::new(StreamBody::new(lines.map_ok(Frame::data)).boxed_unsync()))
    }

    fn patch(&self, path: &str, patch: &Value) -> Response<Answer> {
        let name =
            path.strip_prefix("/apis/apps/v1/namespaces/ns/replicasets/").expect("nothing else is written");
        let replicas = patch["spec"]["replicas"].as_u64().unwrap();
        let mut state = self.state.lock().unwrap();
        let Some(known) = state.replica_sets.get_mut(name) else {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "message": "not found", "reason": "NotFound", "code": 404});
            let mut response = Response::new(full(&status));
            *response.status_mut() = StatusCode::NOT_FOUND;
            return response;
        };
        *known = replicas;
        self.writes.send_modify(|writes| writes.push(format!("{name}={replicas}")));
        Response::new(full(&json!({"kind": "ReplicaSet", "apiVersion": "apps/v1",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"replicas": replicas, "selector": {}}})))
    }
}

fn full(value: &Value) -> Answer {
    Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed_unsync()
}

/// A running gateway.
pub struct TestGateway {
    pub api: FakeApi,
    pub simulated: Arc<SimulatedFunctions>,
    pub handle: GatewayHandle,
    /// Made before the gateway got its queue of asynchronous invocations.
    pub handle_without_queue: GatewayHandle,
    pub queue: Arc<RecordedQueue>,
    pub address: SocketAddr,
    pub stop: CancellationToken,
    pub registry: Registry,
    pub running: JoinHandle<Drained>,
    pub http: HttpClient<HttpConnector, Full<Bytes>>,
    informers_stop: CancellationToken,
}

pub fn config() -> Config {
    Config { listen: "127.0.0.1:0".parse().unwrap(), ..Config::default() }
}

impl TestGateway {
    /// A world whose functions answer with their revision, method and URI after `delay`.
    pub async fn new(api: FakeApi, delay: Duration) -> Self {
        Self::with(api, config(), Arc::new(SimulatedFunctions::new(delay)), None).await
    }

    pub async fn with(
        api: FakeApi,
        config: Config,
        simulated: Arc<SimulatedFunctions>,
        host: Option<Arc<dyn FunctionHost>>,
    ) -> Self {
        Self::with_role(api, config, simulated, host, GatewayRole::Single).await
    }

    /// A gateway of a cluster.
    pub async fn with_role(
        api: FakeApi,
        config: Config,
        simulated: Arc<SimulatedFunctions>,
        host: Option<Arc<dyn FunctionHost>>,
        role: GatewayRole,
    ) -> Self {
        let is_follower = matches!(role, GatewayRole::Follower { .. });
        let (stop, informers_stop) = (CancellationToken::new(), CancellationToken::new());
        let informers = Informers::create(api.client(), informers_stop.clone());
        let mut registry = Registry::default();
        let deps = GatewayDeps {
            functions: informers.of(),
            revisions: informers.of(),
            role,
            pods: informers.of(),
            services: informers.of(),
            slices: informers.of(),
            ingresses: informers.of(),
            https: None,
            env: EnvObjects::create(&informers),
            host: host.unwrap_or_else(|| simulated.clone()),
            client: api.client(),
            requests: tokio::runtime::Handle::current(),
            stop: stop.clone(),
        };
        let gateway = Gateway::create(config, deps, &mut registry).unwrap();
        let (handle_without_queue, queue) = (gateway.handle(), Arc::<RecordedQueue>::default());
        let gateway = if is_follower { gateway } else { gateway.with_invocations(queue.clone()) };
        let (handle, address) = (gateway.handle(), gateway.address());
        let running = tokio::spawn(gateway.run());
        handle.ready().await;
        let http = HttpClient::builder(TokioExecutor::new()).build_http();
        Self {
            api,
            simulated,
            handle,
            handle_without_queue,
            queue,
            address,
            stop,
            registry,
            running,
            http,
            informers_stop,
        }
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        let (parts, body) = self.request(path, &[]).await;
        (parts.status, body)
    }

    pub async fn request(&self, path: &str, headers: &[(&str, &str)]) -> (http::response::Parts, String) {
        let mut request = Request::builder().uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.http.request(request.body(Full::default()).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (parts, String::from_utf8(body.to_vec()).unwrap())
    }

    pub fn revision(&self, name: &str) -> Arc<SimulatedFunction> {
        self.simulated.function(&ObjectKey::new("ns", name)).expect("it is prepared")
    }

    /// Repeats the request until the response satisfies the condition.
    pub async fn until(&self, path: &str, wished: impl Fn(StatusCode, &str) -> bool) {
        eventually(|| async {
            let (status, body) = self.get(path).await;
            wished(status, &body)
        })
        .await;
    }

    pub fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }

    pub async fn shut_down(self) -> Drained {
        self.stop.cancel();
        let drained = self.running.await.unwrap();
        self.informers_stop.cancel();
        drained
    }
}

/// Polls until the condition holds, for as long as a slow machine may need. On a timeout, reports the caller's line.
#[track_caller]
pub fn eventually<F: Future<Output = bool>>(wished: impl Fn() -> F) -> impl Future<Output = ()> {
    let asked = std::panic::Location::caller();
    async move {
        let looks = async {
            while !wished().await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let seen = tokio::time::timeout(Duration::from_secs(60), looks).await;
        assert!(seen.is_ok(), "what {asked} waits for did not come");
    }
}

/// Sends bytes over a new connection, and reads until the server closes it.
pub async fn raw(address: SocketAddr, request: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // Data received before a reset counts.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}
