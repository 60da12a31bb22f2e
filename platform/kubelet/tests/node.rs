//! A node with a simulated runtime against the real API server, in one process.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use http_body_util::BodyExt as _;
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::api::{
    coordination::v1::Lease,
    core::v1::{Event, Node, Pod},
};
use mayfly_apiserver::{ApiServer, Config as ApiConfig, Deps, User};
use mayfly_artifacts::Artifacts;
use mayfly_informer::Informers;
use mayfly_kubelet::{Config, Kubelet};
use mayfly_runtime::{
    ContainerId, PodUid, Runtime as _,
    logs::{LogLayout, LogWriter, Stream},
    simulated::SimulatedRuntime,
};
use mayfly_store::Store;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

struct Cluster {
    informers: Informers,
    client: Client,
    runtime: Arc<SimulatedRuntime>,
    logs: LogLayout,
    router: axum::Router,
    stop: CancellationToken,
    _folder: tempfile::TempDir,
    _api: ApiServer,
}

impl Cluster {
    async fn start() -> Self {
        let cluster = Self::stopped().await;
        cluster.run();
        cluster
    }

    fn run(&self) {
        self.run_with(self.runtime.clone());
    }

    fn run_with(&self, runtime: Arc<dyn mayfly_runtime::Runtime>) {
        let config = Config::of_this_machine("n1", self.logs.clone(), "v0");
        let kubelet = Kubelet::create(config, self.client.clone(), &self.informers, vec![runtime]);
        tokio::spawn(kubelet.run(self.stop.clone()));
    }

    /// With a node that does not run yet.
    async fn stopped() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let deps = Deps {
            store: Store::in_memory().unwrap(),
            artifacts: Artifacts::open(folder.path().join("artifacts")).unwrap(),
            clock: Arc::new(jiff::Timestamp::now),
            nodes: Arc::new(|_, _| Box::pin(async { Err("no node".into()) })),
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
        Self { informers, client, runtime, logs, router, stop, _folder: folder, _api: api }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn create(&self, name: &str, spec: Value, annotations: Value) -> Pod {
        let mut pod = json!({
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"nodeName": "n1", "runtimeClassName": "wasm", "terminationGracePeriodSeconds": 1,
                     "containers": [{"name": "main", "image": "x"}]}
        });
        for (key, value) in spec.as_object().unwrap() {
            pod["spec"][key] = value.clone();
        }
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap()
    }

    /// Waits until the pod is as asked, and gives it.
    async fn until(&self, name: &str, what: &str, holds: impl Fn(&Pod) -> bool) -> Pod {
        let waiting = async {
            loop {
                let pod = self.pods().get(name).await.unwrap();
                if holds(&pod) {
                    return pod;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        match tokio::time::timeout(Duration::from_secs(20), waiting).await {
            Ok(pod) => pod,
            Err(_) => panic!("{name} is not {what}: {:#?}", self.pods().get(name).await.unwrap().status),
        }
    }

    /// Waits for what the node says about a pod.
    async fn event(&self, pod: &str, reason: &str) -> Event {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let waiting = async {
            loop {
                let all = events.list(&ListParams::default()).await.unwrap();
                let about = |event: &Event| event.involved_object.name.as_deref() == Some(pod);
                let mut found = all.items.into_iter().filter(about);
                if let Some(event) = found.find(|event| event.reason.as_deref() == Some(reason)) {
                    return event;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), waiting)
            .await
            .unwrap_or_else(|_| panic!("no event {reason} about {pod}"))
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, String::from_utf8(body.to_vec()).unwrap())
    }
}

impl Cluster {
    /// A replica of revision f-00001, once it is ready.
    async fn replica(&self, name: &str) {
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

    /// Follows a pod's log, once the node knows the pod to run.
    async fn follow(&self, pod: &str) -> FollowedLog {
        for _ in 0..2_000 {
            let path = format!("/containerLogs/default/{pod}/main?follow=true");
            let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
            let answer = self.router.clone().oneshot(request).await.unwrap();
            if answer.status() == 200 {
                return FollowedLog(answer.into_body().into_data_stream());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("pod {pod} has no log");
    }
}

/// A log that is still written.
struct FollowedLog(axum::body::BodyDataStream);

impl FollowedLog {
    /// The next line; none when the log has ended.
    async fn line(&mut self) -> Option<String> {
        self.within(Duration::from_secs(10)).await.expect("a line, or the end")
    }

    /// The same, if it comes within this time.
    async fn within(&mut self, limit: Duration) -> Option<Option<String>> {
        let line = tokio::time::timeout(limit, self.0.next()).await.ok()?;
        Some(line.map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap()))
    }

    async fn nothing_for(&mut self, time: Duration) {
        assert_eq!(self.within(time).await, None);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("")
}

fn state(pod: &Pod) -> Value {
    let statuses =
        pod.status.as_ref().and_then(|status| status.container_statuses.clone()).unwrap_or_default();
    serde_json::to_value(statuses).unwrap()
}

fn is_true(pod: &Pod, kind: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == kind && condition.status == "True")
}

#[tokio::test]
async fn a_node_registers_and_renews_its_lease() {
    let cluster = Cluster::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kube-node-lease");
    let lease = async {
        loop {
            if let Some(lease) = leases.get_opt("n1").await.unwrap() {
                return lease;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let lease = tokio::time::timeout(Duration::from_secs(10), lease).await.unwrap();
    assert_eq!(lease.spec.unwrap().holder_identity.as_deref(), Some("n1"));
    let node = nodes.get("n1").await.unwrap();
    assert_eq!(node.metadata.labels.unwrap()["runtime.mayfly.dev/wasm"], "true");
    let status = node.status.unwrap();
    assert!(status.conditions.unwrap().iter().any(|c| c.type_ == "Ready" && c.status == "True"));
    assert_eq!(status.allocatable.unwrap()["pods"].0, "10000");
}

#[tokio::test]
async fn a_pod_runs_is_ready_and_goes_when_deleted() {
    let cluster = Cluster::start().await;
    cluster.create("web", json!({}), json!({})).await;
    let pod = cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    assert_eq!(phase(&pod), "Running");
    let status = pod.status.clone().unwrap();
    assert!(status.pod_ip.unwrap().starts_with("127.64."));
    assert_eq!(status.host_ip.as_deref(), Some("127.0.0.1"));
    let uid = PodUid(pod.metadata.uid.clone().unwrap());
    assert_eq!(cluster.runtime.sandboxes(), [uid]);
    cluster.pods().delete("web", &DeleteParams::default()).await.unwrap();
    let gone = async {
        while cluster.pods().get_opt("web").await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.unwrap();
    assert!(cluster.runtime.sandboxes().is_empty());
}

#[tokio::test]
async fn jobs_end_and_crashes_come_back_with_a_pause() {
    let cluster = Cluster::start().await;
    let exits = |code: &str| json!({"simulated.mayfly.dev/exit-code": code});
    cluster.create("done", json!({"restartPolicy": "Never"}), exits("0")).await;
    cluster.create("failed", json!({"restartPolicy": "Never"}), exits("3")).await;
    cluster.create("crash", json!({}), exits("1")).await;
    let done = cluster.until("done", "over", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(state(&done)[0]["state"]["terminated"]["reason"], "Completed");
    let failed = cluster.until("failed", "over", |pod| phase(pod) == "Failed").await;
    assert_eq!(state(&failed)[0]["state"]["terminated"]["exitCode"], 3);
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    let crash = cluster.until("crash", "backing off", waiting).await;
    assert_eq!(phase(&crash), "Running");
    assert_eq!(state(&crash)[0]["restartCount"], 2, "the first restart is at once");
    assert_eq!(state(&crash)[0]["lastState"]["terminated"]["exitCode"], 1);
    let title = format!("crash_default({})", crash.metadata.uid.clone().unwrap());
    assert_eq!(
        state(&crash)[0]["state"]["waiting"]["message"],
        format!("back-off 10s restarting failed container=main pod={title}")
    );
    let backing_off = cluster.event("crash", "BackOff").await;
    assert_eq!(backing_off.type_.as_deref(), Some("Warning"));
    assert_eq!(
        backing_off.message.as_deref(),
        Some(format!("Back-off restarting failed container main in pod {title}").as_str())
    );
    assert_eq!(backing_off.count, Some(1), "the first restart has no pause");
    let uid = PodUid(done.metadata.uid.unwrap());
    assert!(!cluster.runtime.sandboxes().contains(&uid), "what is over holds nothing");
}

#[tokio::test]
async fn init_containers_run_first_and_one_after_the_other() {
    let cluster = Cluster::start().await;
    let init = json!({"initContainers": [{"name": "one", "image": "x"}, {"name": "two", "image": "x"}]});
    let pod = cluster.create("init", init, json!({})).await;
    let uid = PodUid(pod.metadata.uid.clone().unwrap());
    for name in ["one", "two"] {
        let running = |pod: &Pod| {
            let statuses = pod.status.clone().unwrap_or_default().init_container_statuses.unwrap_or_default();
            statuses.iter().any(|s| s.name == name && s.state.clone().unwrap_or_default().running.is_some())
        };
        let pod = cluster.until("init", name, running).await;
        assert_eq!(state(&pod)[0]["state"]["waiting"]["reason"], "PodInitializing");
        cluster.runtime.exit(&ContainerId { pod: uid.clone(), name: name.into(), attempt: 0 }, 0);
    }
    cluster.until("init", "ready", |pod| is_true(pod, "Ready") && is_true(pod, "Initialized")).await;
}

#[tokio::test]
async fn what_is_missing_is_named_and_waited_for() {
    let cluster = Cluster::start().await;
    let env =
        json!([{"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "mode"}}}]);
    cluster
        .create("needy", json!({"containers": [{"name": "main", "image": "x", "env": env}]}), json!({}))
        .await;
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CreateContainerConfigError";
    let pod = cluster.until("needy", "waiting", waiting).await;
    let message = state(&pod)[0]["state"]["waiting"]["message"].clone();
    assert_eq!(message, "configmap default/settings not found (env MODE)");
    let maps: Api<mayfly_api::k8s::api::core::v1::ConfigMap> =
        Api::namespaced(cluster.client.clone(), "default");
    let map =
        serde_json::from_value(json!({"metadata": {"name": "settings"}, "data": {"mode": "fast"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    cluster.until("needy", "ready", |pod| is_true(pod, "Ready")).await;

    cluster.create("foreign", json!({"runtimeClassName": "gvisor"}), json!({})).await;
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["message"].is_string();
    let pod = cluster.until("foreign", "waiting", waiting).await;
    assert!(
        state(&pod)[0]["state"]["waiting"]["message"].as_str().unwrap().contains("no runtime for \"gvisor\"")
    );
}

#[tokio::test]
async fn a_deadline_ends_a_pod() {
    let cluster = Cluster::start().await;
    cluster.create("late", json!({"activeDeadlineSeconds": 1}), json!({})).await;
    let pod = cluster.until("late", "over", |pod| phase(pod) == "Failed").await;
    assert_eq!(pod.status.unwrap().reason.as_deref(), Some("DeadlineExceeded"));
}

#[tokio::test]
async fn logs_of_containers_and_functions() {
    let cluster = Cluster::start().await;
    let pod = cluster.create("talk", json!({}), json!({})).await;
    let pod_uid = PodUid(pod.metadata.uid.clone().unwrap());
    cluster.until("talk", "ready", |pod| is_true(pod, "Ready")).await;
    let writer = LogWriter::start().unwrap();
    let id = ContainerId { pod: pod_uid, name: "main".into(), attempt: 0 };
    writer.sink(cluster.logs.container(&id), Stream::Stdout).write(b"one\ntwo\nthree\n");
    for (revision, line) in [("f-00001", "old\n"), ("f-00002", "new\n")] {
        writer.sink(cluster.logs.revision("default", "f", revision), Stream::Stdout).write(line.as_bytes());
    }
    writer.flush();
    // The informer may be a moment behind the API.
    let path = "/containerLogs/default/talk/main?tailLines=2";
    let read = async {
        loop {
            let answer = cluster.get(path).await;
            if answer.0 == 200 {
                return answer.1;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert_eq!(tokio::time::timeout(Duration::from_secs(10), read).await.unwrap(), "two\nthree\n");
    assert_eq!(cluster.get("/functionLogs/default/f").await, (200, "old\nnew\n".into()));
    assert_eq!(cluster.get("/functionLogs/default/f?revision=f-00002").await, (200, "new\n".into()));
    assert_eq!(cluster.get("/functionLogs/default/f?tailLines=1").await, (200, "new\n".into()));
    assert_eq!(cluster.get("/functionLogs/default/none").await, (200, String::new()));
    assert_eq!(cluster.get("/containerLogs/default/none/main").await.0, 404);
    let (code, text) = cluster.get("/containerLogs/default/talk/main?previous=true").await;
    assert_eq!(
        (code, text.as_str()),
        (400, "previous terminated container \"main\" in pod \"talk\" not found")
    );
}

/// Replicas share a revision's instances, so a line is nobody's own; yet who reads all logs reads it once.
#[tokio::test]
async fn a_line_of_a_revision_is_in_one_replicas_log() {
    let cluster = Cluster::start().await;
    for name in ["f-a", "f-b"] {
        cluster.replica(name).await;
    }
    let writer = LogWriter::start().unwrap();
    writer.sink(cluster.logs.revision("default", "f", "f-00001"), Stream::Stdout).write(b"hello\n");
    writer.flush();
    let log = async |pod: &str, wanted: &str| {
        let path = format!("/containerLogs/default/{pod}/main");
        let read = async {
            // The informer may be a moment behind the API.
            while cluster.get(&path).await != (200, wanted.to_owned()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(10), read).await.is_err() {
            panic!("{pod}: {:?}", cluster.get(&path).await);
        }
    };
    log("f-a", "hello\n").await;
    log("f-b", "(replicas of revision f-00001 share its instances: see the log of pod f-a)\n").await;
    // When the one that told goes, another one tells.
    cluster.pods().delete("f-a", &DeleteParams::default()).await.unwrap();
    log("f-b", "hello\n").await;
}

#[tokio::test]
async fn a_replica_that_does_not_tell_is_followed_until_it_does_or_goes() {
    let cluster = Cluster::start().await;
    for name in ["f-a", "f-b"] {
        cluster.replica(name).await;
    }
    let writer = LogWriter::start().unwrap();
    let write = |line: &str| {
        writer.sink(cluster.logs.revision("default", "f", "f-00001"), Stream::Stdout).write(line.as_bytes());
        writer.flush();
    };
    write("one\n");
    let mut told = cluster.follow("f-a").await;
    let mut listens = cluster.follow("f-b").await;
    assert_eq!(told.line().await.unwrap(), "one\n");
    let elsewhere = "(replicas of revision f-00001 share its instances: see the log of pod f-a)\n";
    assert_eq!(listens.line().await.unwrap(), elsewhere);
    write("two\n");
    assert_eq!(told.line().await.unwrap(), "two\n");
    listens.nothing_for(Duration::from_millis(600)).await;
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.pods().delete("f-a", &now).await.unwrap();
    assert_eq!(told.line().await, None, "its pod has gone");
    // Who listened tells what comes from now on; when it noticed that, is its own affair.
    let mut number = 0;
    let first = loop {
        write(&format!("{number}\n"));
        number += 1;
        if let Some(line) = listens.within(Duration::from_millis(100)).await {
            break line.unwrap();
        }
        assert!(number < 100, "nobody tells");
    };
    assert!(first.trim().parse::<u32>().unwrap() < number, "{first}");
    cluster.pods().delete("f-b", &now).await.unwrap();
    while listens.line().await.is_some() {}
}

#[tokio::test]
async fn a_followed_log_ends_with_its_container() {
    let cluster = Cluster::start().await;
    let pod = cluster.create("once", json!({"restartPolicy": "Never"}), json!({})).await;
    cluster.until("once", "ready", |pod| is_true(pod, "Ready")).await;
    let id = ContainerId { pod: PodUid(pod.metadata.uid.clone().unwrap()), name: "main".into(), attempt: 0 };
    let writer = LogWriter::start().unwrap();
    let write = |line: &str| {
        writer.sink(cluster.logs.container(&id), Stream::Stdout).write(line.as_bytes());
        writer.flush();
    };
    write("one\n");
    let mut log = cluster.follow("once").await;
    assert_eq!(log.line().await.unwrap(), "one\n");
    log.nothing_for(Duration::from_millis(600)).await;
    write("last\n");
    cluster.runtime.exit(&id, 0);
    assert_eq!(log.line().await.unwrap(), "last\n");
    assert_eq!(log.line().await, None);
    cluster.until("once", "done", |pod| phase(pod) == "Succeeded").await;
    let mut again = cluster.follow("once").await;
    assert_eq!(again.line().await.unwrap(), "one\n");
    assert_eq!(again.line().await.unwrap(), "last\n");
    assert_eq!(again.line().await, None);
}

#[tokio::test]
async fn a_replaced_pod_is_another_pod() {
    let cluster = Cluster::start().await;
    let first = cluster.create("web", json!({}), json!({})).await;
    cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.pods().delete("web", &now).await.unwrap();
    let second = cluster.create("web", json!({}), json!({})).await;
    assert_ne!(first.metadata.uid, second.metadata.uid);
    cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    assert_eq!(cluster.runtime.sandboxes(), [PodUid(second.metadata.uid.unwrap())]);
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    cluster.pods().patch("web", &PatchParams::default(), &patch).await.unwrap();
    cluster.until("web", "still ready", |pod| is_true(pod, "Ready")).await;
}

#[tokio::test]
async fn a_node_takes_back_what_others_say_of_it() {
    let cluster = Cluster::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let ready = |node: &Node| {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.into_iter().flatten().any(|known| known.type_ == "Ready" && known.status == "True")
    };
    let until_ready = async || {
        tokio::time::timeout(Duration::from_secs(15), async {
            while !nodes.get_opt("n1").await.unwrap().is_some_and(|node| ready(&node)) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("the node is ready");
    };
    until_ready().await;
    let silent = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(silent)).await.unwrap();
    until_ready().await;
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    until_ready().await;
}

#[tokio::test]
async fn a_missing_source_is_seen_as_soon_as_it_is_there() {
    let cluster = Cluster::start().await;
    let env = json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "a"}}}]);
    cluster
        .create("waits", json!({"containers": [{"name": "main", "image": "x", "env": env}]}), json!({}))
        .await;
    let waits = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CreateContainerConfigError";
    cluster.until("waits", "waiting for its source", waits).await;
    // Long enough that the next try by time alone is some way off.
    tokio::time::sleep(Duration::from_millis(3500)).await;
    let maps: Api<mayfly_api::k8s::api::core::v1::ConfigMap> =
        Api::namespaced(cluster.client.clone(), "default");
    let map = serde_json::from_value(json!({"metadata": {"name": "settings"}, "data": {"a": "1"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    let started = std::time::Instant::now();
    cluster.until("waits", "running", |pod| phase(pod) == "Running").await;
    assert!(started.elapsed() < Duration::from_secs(3), "it waited {:?} more", started.elapsed());
}

#[tokio::test]
async fn sandboxes_without_a_pod_are_removed() {
    let cluster = Cluster::stopped().await;
    let stranger = mayfly_runtime::SandboxSpec {
        uid: PodUid("stranger".into()),
        pod: mayfly_api::ObjectKey::new("default", "stranger"),
        labels: Default::default(),
        annotations: Default::default(),
        address: None,
    };
    cluster.runtime.create_sandbox(stranger).await.unwrap();
    cluster.run();
    let mut changes = cluster.runtime.changes();
    let gone = async {
        while !cluster.runtime.sandboxes().is_empty() {
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.expect("it is removed");
}

/// A host whose starts and stops never end by themselves.
struct Stuck(SimulatedRuntime);

#[async_trait::async_trait]
impl mayfly_runtime::Runtime for Stuck {
    fn class(&self) -> &str {
        "stuck"
    }
    async fn create_sandbox(
        &self,
        sandbox: mayfly_runtime::SandboxSpec,
    ) -> Result<(), mayfly_runtime::RuntimeError> {
        self.0.create_sandbox(sandbox).await
    }
    async fn start_container(
        &self,
        spec: mayfly_runtime::ContainerSpec,
    ) -> Result<(), mayfly_runtime::RuntimeError> {
        if spec.image == "never-starts" {
            std::future::pending::<()>().await;
        }
        self.0.start_container(spec).await
    }
    async fn stop_container(
        &self,
        id: &ContainerId,
        grace: Duration,
    ) -> Result<(), mayfly_runtime::RuntimeError> {
        tokio::time::sleep(grace).await;
        self.0.stop_container(id, grace).await
    }
    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), mayfly_runtime::RuntimeError> {
        self.0.remove_sandbox(uid).await
    }
    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, mayfly_runtime::ContainerState)> {
        self.0.containers(uid)
    }
    fn sandboxes(&self) -> Vec<PodUid> {
        self.0.sandboxes()
    }
    fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.changes()
    }
}

#[tokio::test]
async fn deletion_does_not_wait_for_a_start_and_can_be_hurried() {
    let cluster = Cluster::stopped().await;
    cluster.run_with(Arc::new(Stuck(SimulatedRuntime::new("stuck"))));
    let spec = |image: &str| {
        json!({"runtimeClassName": "stuck", "terminationGracePeriodSeconds": 3600,
        "containers": [{"name": "main", "image": image}]})
    };
    let gone = async |name: &str| {
        let gone = async {
            while cluster.pods().get_opt(name).await.unwrap().is_some() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), gone).await.expect("it is gone");
    };
    cluster.create("starting", spec("never-starts"), json!({})).await;
    let creating = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "ContainerCreating";
    cluster.until("starting", "being created", creating).await;
    cluster.pods().delete("starting", &DeleteParams::default()).await.unwrap();
    gone("starting").await;

    cluster.create("stopping", spec("x"), json!({})).await;
    cluster.until("stopping", "running", |pod| phase(pod) == "Running").await;
    cluster.pods().delete("stopping", &DeleteParams::default()).await.unwrap();
    let pod = cluster.pods().get("stopping").await.unwrap();
    assert_eq!(pod.metadata.deletion_grace_period_seconds, Some(3600));
    cluster.pods().delete("stopping", &DeleteParams::default().grace_period(1)).await.unwrap();
    gone("stopping").await;
}
