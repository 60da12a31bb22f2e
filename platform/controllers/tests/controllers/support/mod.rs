//! A control plane in one process: store, API server, controllers, scheduler, and a node whose runtime is
//! simulated.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(unreachable_pub, reason = "a module of each test")]

use std::{fmt::Debug, sync::Arc, time::Duration};

use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
    core::NamespaceResourceScope,
};
use mayfly_api::{
    Digest, Function, ObjectKey, Revision,
    k8s::{
        api::{
            apps::v1::ReplicaSet,
            core::v1::{ConfigMap, Node, Pod},
        },
        jiff::Timestamp,
    },
};
use mayfly_apiserver::{ApiServer, ApiServerDeps, User};
use mayfly_artifacts::Artifacts;
use mayfly_controllers::{Config, Controllers};
use mayfly_informer::{
    Change, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use mayfly_kubelet::{JobFiles, Kubelet};
use mayfly_runtime::{logs::LogLayout, simulated::SimulatedRuntime};
use mayfly_scheduler::Scheduler;
use mayfly_store::Store;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The timeout of all waits.
const PATIENCE: Duration = Duration::from_secs(20);
pub const NS: &str = "default";
pub const NODE: &str = "here";
/// The smallest content that the fake inspector accepts as a component.
pub const COMPONENT: &[u8] = b"\0asm component";

pub struct ControllersHarness {
    pub client: Client,
    pub informers: Informers,
    pub server: ApiServer,
    pub runtime: Arc<SimulatedRuntime>,
    pub artifacts: Artifacts,
    pub config: Config,
    /// The node's storage of the inputs and outputs of jobs.
    pub jobs: Option<JobFiles>,
    pub folder: TempDir,
    pub stop: CancellationToken,
    _stop: DropGuard,
}

impl ControllersHarness {
    /// The API without controllers, scheduler and node.
    pub async fn quiet() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let deps = ApiServerDeps {
            store: Store::in_memory(),
            artifacts: artifacts.clone(),
            clock: Arc::new(Timestamp::now),
            nodes: Arc::new(|node, _| Box::pin(async move { Err(format!("no way to {node}").into()) })),
            inspector: Arc::new(|_| Ok(Value::Null)),
        };
        let mut metrics = prometheus_client::registry::Registry::default();
        let config = mayfly_apiserver::Config::new("token");
        let server = ApiServer::create(config, deps, &mut metrics).await.unwrap();
        let client = server.client(User::in_process("test"));
        let stop = CancellationToken::new();
        Self {
            informers: Informers::create(client.clone(), stop.clone()),
            client,
            server,
            runtime: Arc::new(SimulatedRuntime::new("wasm")),
            artifacts,
            config: Config::default(),
            jobs: None,
            folder,
            _stop: stop.clone().drop_guard(),
            stop,
        }
    }

    /// The complete control plane, with a node.
    pub async fn start() -> Self {
        let cluster = Self::quiet().await;
        cluster.run_controllers();
        cluster.run_node();
        cluster.run_compiler();
        cluster
    }

    /// Simulates the compiler, for every component in the store.
    pub fn run_compiler(&self) {
        let (revisions, client, artifacts) = (self.revisions(), self.client.clone(), self.artifacts.clone());
        let follow = async move {
            revisions.synced().await;
            let queue = WorkQueue::default();
            let wakes = queue.clone();
            revisions
                .handle(move |change: Change<'_, Revision>| wakes.add(ObjectKey::of(&**change.latest())));
            reconcile::run("compiler", queue, 1, CancellationToken::new(), move |key: ObjectKey| {
                let (revisions, artifacts) = (revisions.clone(), artifacts.clone());
                let api: Api<Revision> = Api::namespaced(client.clone(), &key.namespace);
                async move {
                    let Some(revision) = revisions.get(&key) else { return Ok(Outcome::Done) };
                    let Some(digest) = revision.spec.source.component else { return Ok(Outcome::Done) };
                    if artifacts.path(&digest).is_none() {
                        return Ok(Outcome::RequeueAfter(Duration::from_millis(20)));
                    }
                    let patch = Patch::Merge(json!({"status": {"component": {"state": "Compiled"}}}));
                    api.patch_status(&key.name, &PatchParams::default(), &patch).await.map(|_| Outcome::Done)
                }
            })
            .await;
        };
        let stop = self.stop.clone();
        tokio::spawn(async move { stop.run_until_cancelled(follow).await });
    }

    pub fn run_controllers(&self) {
        let controllers = Controllers::create(self.config.clone(), self.client.clone(), &self.informers);
        tokio::spawn(controllers.run(self.stop.clone()));
    }

    /// The scheduler, and a kubelet over the simulated runtime.
    pub fn run_node(&self) {
        let scheduler = Scheduler::create(Default::default(), self.client.clone(), &self.informers);
        tokio::spawn(scheduler.run(self.stop.clone()));
        let logs = LogLayout::new(self.folder.path().join("logs"));
        let mut config = mayfly_kubelet::Config::of_this_machine(NODE, logs, "v1.33.0");
        config.jobs = self.jobs.clone();
        let kubelet =
            Kubelet::create(config, self.client.clone(), &self.informers, vec![self.runtime.clone()]);
        tokio::spawn(kubelet.run(self.stop.clone()));
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), NS)
    }

    pub fn functions(&self) -> Informer<Function> {
        self.informers.of()
    }
    pub fn revisions(&self) -> Informer<Revision> {
        self.informers.of()
    }
    pub fn sets(&self) -> Informer<ReplicaSet> {
        self.informers.of()
    }
    pub fn pods(&self) -> Informer<Pod> {
        self.informers.of()
    }
    pub fn config_maps(&self) -> Informer<ConfigMap> {
        self.informers.of()
    }
    pub fn nodes(&self) -> Informer<Node> {
        self.informers.of()
    }

    pub async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + Debug + DeserializeOwned + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api::<K>().create(&PostParams::default(), &object).await.unwrap()
    }

    /// Uploads a component made of this text.
    pub async fn upload(&self, text: &str) -> Digest {
        let content = [COMPONENT, text.as_bytes()].concat();
        let digest = Digest::of(&content);
        let request = http::Request::put(format!("/artifacts/{digest}")).body(content).unwrap();
        self.client.request_text(request).await.unwrap();
        digest
    }

    pub async fn function(&self, name: &str, spec: Value) -> Function {
        self.create(serde_json::json!({"apiVersion": "mayfly.dev/v1", "kind": "Function",
            "metadata": {"name": name}, "spec": spec}))
            .await
    }

    /// Pods of a revision or a set that are neither finished nor going.
    pub fn pods_of(&self, prefix: &str) -> Vec<Arc<Pod>> {
        let mut pods = self.pods().list_namespace(NS);
        pods.retain(|pod| {
            pod.metadata.name.as_ref().is_some_and(|name| name.starts_with(prefix))
                && pod.metadata.deletion_timestamp.is_none()
        });
        pods
    }
}

pub fn key(name: &str) -> ObjectKey {
    ObjectKey::new(NS, name)
}

/// Waits until `what` holds, looking again whenever an object of this kind changes.
pub async fn until<K: Resource + 'static>(informer: &Informer<K>, why: &str, what: impl Fn() -> bool) {
    let mut changes = informer.subscribe();
    let waited = tokio::time::timeout(PATIENCE, async {
        while !what() {
            changes.next().await;
        }
    });
    assert!(waited.await.is_ok(), "it never happened: {why}");
}

/// Lets everything in progress settle, then checks that `what` still holds: for events that must not happen. This
/// needs time, since no event tells that nothing happens.
pub async fn stays(why: &str, what: impl Fn() -> bool) {
    for _ in 0..20 {
        assert!(what(), "it did not stay so: {why}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
