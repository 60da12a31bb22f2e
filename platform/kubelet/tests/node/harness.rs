//! One node, its API server and a client, in this process.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::StreamExt as _;
use http_body_util::BodyExt as _;
use kube::{
    Api, Client,
    api::{ListParams, PostParams},
};
use mayfly_api::{
    ObjectKey, Revision,
    k8s::api::{
        core::v1::{Event, Pod},
        node::v1::RuntimeClass,
    },
};
use mayfly_apiserver::{ApiServer, ApiServerDeps, Config as ApiConfig, NodeConnector, User};
use mayfly_artifacts::Artifacts;
use mayfly_informer::Informers;
use mayfly_kubelet::{Config, CsiConfig, JobFiles, Kubelet, ServedEndpoints};
use mayfly_runtime::{NodeDevices, NodeGpus, logs::LogLayout, simulated::SimulatedRuntime};
use mayfly_store::Store;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// The timeout of any wait, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Connects the API server to the node.
fn connector(node: Arc<OnceLock<axum::Router>>) -> NodeConnector {
    Arc::new(move |_, request| {
        let node = node.get().cloned();
        Box::pin(async move {
            let node = node.ok_or("no node")?;
            Ok(node.oneshot(request).await.unwrap_or_else(|never| match never {}))
        })
    })
}

pub(crate) struct KubeletHarness {
    pub(crate) informers: Informers,
    pub(crate) client: Client,
    pub(crate) runtime: Arc<SimulatedRuntime>,
    pub(crate) logs: LogLayout,
    pub(crate) router: axum::Router,
    pub(crate) stop: CancellationToken,
    pub(crate) api: ApiServer,
    /// The node's HTTP API, once it runs.
    node: Arc<OnceLock<axum::Router>>,
    _folder: tempfile::TempDir,
}

impl KubeletHarness {
    pub(crate) async fn start() -> Self {
        let cluster = Self::stopped().await;
        cluster.run();
        cluster
    }

    pub(crate) fn run(&self) {
        self.run_with(self.runtime.clone());
    }

    pub(crate) fn run_with(&self, runtime: Arc<dyn mayfly_runtime::Runtime>) {
        self.run_config(Config::of_this_machine("n1", self.logs.clone(), "v0"), runtime);
    }

    /// Runs the node with these labels, and as owner of those that start with `own.`; `None` removes a label.
    pub(crate) fn run_labelled(&self, labels: BTreeMap<String, Option<String>>) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        let label_prefixes = vec!["own.".to_owned()];
        self.run_config(Config { labels, label_prefixes, ..config }, self.runtime.clone());
    }

    /// Runs the node with folders for jobs' inputs and outputs.
    pub(crate) fn run_jobs(&self, jobs: JobFiles) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        self.run_config(Config { jobs: Some(jobs), ..config }, self.runtime.clone());
    }

    /// Runs the node with these devices.
    pub(crate) fn run_devices(&self, devices: Arc<dyn NodeDevices>) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        self.run_config(Config { devices: Some(devices), ..config }, self.runtime.clone());
    }

    /// Runs the node with these GPUs, and with folders for jobs' inputs and outputs.
    pub(crate) fn run_gpus(&self, gpus: Arc<dyn NodeGpus>, jobs: Option<JobFiles>) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        self.run_config(Config { gpus: Some(gpus), jobs, ..config }, self.runtime.clone());
    }

    /// Runs the node with these devices, and with plugins that register in the folder.
    pub(crate) fn run_plugins(&self, devices: Arc<dyn NodeDevices>, folder: &Path) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        let csi = Some(CsiConfig { folder: folder.to_owned(), drivers: Arc::default() });
        self.run_config(Config { devices: Some(devices), csi, ..config }, self.runtime.clone());
    }

    /// Runs the node with a folder for volumes.
    pub(crate) fn run_volumes(&self, folder: &Path) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        self.run_config(Config { volumes: Some(folder.to_owned()), ..config }, self.runtime.clone());
    }

    /// With a proxy that uses the pods as endpoints.
    pub(crate) fn run_serving(&self, endpoints: Arc<dyn ServedEndpoints>) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        self.run_config(Config { served_endpoints: Some(endpoints), ..config }, self.runtime.clone());
    }

    fn run_config(&self, config: Config, runtime: Arc<dyn mayfly_runtime::Runtime>) {
        let kubelet = Kubelet::create(config, self.client.clone(), &self.informers, vec![runtime]);
        // The API server reaches the first node only.
        let _ = self.node.set(kubelet.router());
        tokio::spawn(kubelet.run(self.stop.clone()));
    }

    /// A cluster whose node does not run yet.
    pub(crate) async fn stopped() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let node = Arc::<OnceLock<axum::Router>>::default();
        let deps = ApiServerDeps {
            store: Store::in_memory(),
            artifacts: Artifacts::open(folder.path().join("artifacts")).unwrap(),
            clock: Arc::new(jiff::Timestamp::now),
            nodes: connector(node.clone()),
            inspector: Arc::new(|_| Ok(Value::Null)),
        };
        let api = ApiServer::create(ApiConfig::new("token"), deps, &mut Default::default()).await.unwrap();
        let client = api.client(User::in_process("test"));
        let stop = CancellationToken::new();
        let informers = Informers::create(client.clone(), stop.clone());
        let runtime = Arc::new(SimulatedRuntime::new("wasm"));
        let logs = LogLayout::new(folder.path().join("logs"));
        let config = Config::of_this_machine("n1", logs.clone(), "v0");
        let kubelet = Kubelet::create(config, client.clone(), &informers, vec![runtime.clone()]);
        let router = kubelet.router();
        Self { informers, client, runtime, logs, router, stop, api, node, _folder: folder }
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) async fn create(&self, name: &str, spec: Value, annotations: Value) -> Pod {
        let mut pod = json!({
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"nodeName": "n1", "runtimeClassName": "wasm", "terminationGracePeriodSeconds": 1,
                     "containers": [{"name": "main", "image": "x"}]}
        });
        for (key, value) in spec.as_object().unwrap() {
            pod["spec"][key] = value.clone();
        }
        self.runtime_class(pod["spec"]["runtimeClassName"].as_str().unwrap()).await;
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap()
    }

    /// Creates a RuntimeClass; pods that refer to a missing one are not admitted.
    async fn runtime_class(&self, name: &str) {
        let classes: Api<RuntimeClass> = Api::all(self.client.clone());
        if classes.get_opt(name).await.unwrap().is_none() {
            let class = json!({"metadata": {"name": name}, "handler": name});
            let class = serde_json::from_value(class).unwrap();
            classes.create(&PostParams::default(), &class).await.unwrap();
        }
    }

    /// Waits until the pod satisfies the condition, and returns it.
    pub(crate) async fn until(&self, name: &str, what: &str, holds: impl Fn(&Pod) -> bool) -> Pod {
        let waiting = async {
            loop {
                let pod = self.pods().get(name).await.unwrap();
                if holds(&pod) {
                    return pod;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        match tokio::time::timeout(PATIENCE, waiting).await {
            Ok(pod) => pod,
            Err(_) => panic!("{name} is not {what}: {:#?}", self.pods().get(name).await.unwrap().status),
        }
    }

    /// Waits until the pod's object is gone.
    pub(crate) async fn gone(&self, name: &str) {
        let (what, pods) = (format!("{name} is gone"), self.pods());
        self.eventually(&what, async || pods.get_opt(name).await.unwrap().is_none()).await;
    }

    /// Waits for an event about a pod.
    pub(crate) async fn event(&self, pod: &str, reason: &str) -> Event {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let is_it = |event: &Event| {
            event.involved_object.name.as_deref() == Some(pod) && event.reason.as_deref() == Some(reason)
        };
        self.find(&format!("there is an event {reason} about {pod}"), async || {
            events.list(&ListParams::default()).await.unwrap().items.into_iter().find(is_it)
        })
        .await
    }

    /// Waits until `find` returns a value.
    pub(crate) async fn find<T>(&self, what: &str, find: impl AsyncFn() -> Option<T>) -> T {
        let waiting = async {
            loop {
                if let Some(found) = find().await {
                    return found;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("not so: {what}"))
    }

    pub(crate) async fn eventually(&self, what: &str, holds: impl AsyncFn() -> bool) {
        self.find(what, async || holds().await.then_some(())).await;
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, String::from_utf8(body.to_vec()).unwrap())
    }
}

impl KubeletHarness {
    /// A replica of revision f-00001, once it is ready.
    pub(crate) async fn replica(&self, name: &str) {
        let labels = json!({"mayfly.dev/function": "f", "mayfly.dev/revision": "f-00001"});
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": "n1", "runtimeClassName": "wasm", "terminationGracePeriodSeconds": 1,
                     "containers": [{"name": "main", "image": "x"}]}
        }))
        .unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap();
        self.until(name, "ready", |pod| is_true(pod, "Ready")).await;
    }

    pub(crate) fn revisions(&self) -> Api<Revision> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// A revision of function f, once the node knows it.
    pub(crate) async fn revision(&self, name: &str) {
        let revision = json!({"metadata": {"name": name}, "spec": {"function": "f", "source": {}}});
        let revision: Revision = serde_json::from_value(revision).unwrap();
        self.revisions().create(&PostParams::default(), &revision).await.unwrap();
        let known = self.informers.of::<Revision>();
        self.eventually("the revision is known", async || {
            known.get(&ObjectKey::new("default", name)).is_some()
        })
        .await;
    }

    /// Follows a function's log.
    pub(crate) async fn follow_function(&self, function: &str) -> FollowedLog {
        let path = format!("/functionLogs/default/{function}?follow=true");
        let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        FollowedLog(answer.into_body().into_data_stream())
    }

    /// Follows a pod's log, once the node knows the pod to run.
    pub(crate) async fn follow(&self, pod: &str) -> FollowedLog {
        let path = format!("/containerLogs/default/{pod}/main?follow=true");
        self.find(&format!("pod {pod} has a log"), async || {
            let request = http::Request::get(&path).body(axum::body::Body::empty()).unwrap();
            let answer = self.router.clone().oneshot(request).await.unwrap();
            (answer.status() == 200).then(|| FollowedLog(answer.into_body().into_data_stream()))
        })
        .await
    }
}

/// A followed log.
pub(crate) struct FollowedLog(axum::body::BodyDataStream);

impl FollowedLog {
    /// The next line; `None` when the log has ended.
    pub(crate) async fn line(&mut self) -> Option<String> {
        self.within(Duration::from_secs(10)).await.expect("a line, or the end")
    }

    /// The next line, or the end, if it comes within this time.
    pub(crate) async fn within(&mut self, limit: Duration) -> Option<Option<String>> {
        let line = tokio::time::timeout(limit, self.0.next()).await.ok()?;
        Some(line.map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap()))
    }

    pub(crate) async fn nothing_for(&mut self, time: Duration) {
        assert_eq!(self.within(time).await, None);
    }
}

impl Drop for KubeletHarness {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("")
}

pub(crate) fn state(pod: &Pod) -> Value {
    let statuses =
        pod.status.as_ref().and_then(|status| status.container_statuses.clone()).unwrap_or_default();
    serde_json::to_value(statuses).unwrap()
}

pub(crate) fn is_true(pod: &Pod, kind: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == kind && condition.status == "True")
}
