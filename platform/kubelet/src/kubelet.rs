//! The kubelet: the node's object, and a worker for each pod that is bound to it.

use std::{collections::HashMap, sync::Arc};

use axum::Router;
use kube::Client;
use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};
use mayfly_informer::{
    Change, EventRecorder, Informers,
    reconcile::{self, WorkQueue},
};
use mayfly_runtime::{Runtime, logs::LogLayout};
use tokio_util::sync::CancellationToken;

use crate::{
    addresses::Addresses,
    http::{self, Logs},
    node::NodeObject,
    pod::{container::Sources, worker::Worker},
};

/// What a node is told.
#[derive(Clone, Debug)]
pub struct Config {
    pub node_name: String,
    /// Thousandths of a core that pods may ask for.
    pub cpu_millis: u64,
    /// Memory that pods may ask for, in bytes.
    pub memory_bytes: u64,
    /// Pods at the same time. Wasm pods are cheap: this is no 110.
    pub pods_max: u32,
    pub logs: LogLayout,
    /// Shown as the node's kubelet version.
    pub version: String,
    /// Pods worked on at the same time.
    pub workers_max: usize,
}

impl Config {
    pub const PODS_MAX_DEFAULT: u32 = 10_000;
    pub const WORKERS_MAX_DEFAULT: usize = 256;

    /// This machine's cores and memory, and the defaults.
    pub fn of_this_machine(
        node_name: impl Into<String>,
        logs: LogLayout,
        version: impl Into<String>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let system = rustix::system::sysinfo();
        let memory_bytes = u64::from(system.totalram).saturating_mul(u64::from(system.mem_unit));
        Self {
            node_name: node_name.into(),
            cpu_millis: cores * 1000,
            memory_bytes,
            pods_max: Self::PODS_MAX_DEFAULT,
            logs,
            version: version.into(),
            workers_max: Self::WORKERS_MAX_DEFAULT,
        }
    }
}

/// One node's agent: created, then started.
pub struct Kubelet {
    config: Config,
    node: NodeObject,
    worker: Arc<Worker>,
    queue: WorkQueue<ObjectKey>,
    logs: Logs,
    stop_events: CancellationToken,
}

impl Kubelet {
    /// Must be called inside a tokio runtime. Acts on nothing yet.
    pub fn create(
        config: Config,
        client: Client,
        informers: &Informers,
        runtimes: Vec<Arc<dyn Runtime>>,
    ) -> Self {
        let stop_events = CancellationToken::new();
        let runtimes: HashMap<_, _> =
            runtimes.into_iter().map(|runtime| (runtime.class().to_owned(), runtime)).collect();
        let classes: Vec<_> = runtimes.keys().cloned().collect();
        let pods = informers.of::<Pod>();
        let worker = Arc::new(Worker {
            node: config.node_name.clone(),
            events: EventRecorder::start(
                client.clone(),
                "kubelet",
                Some(config.node_name.clone()),
                stop_events.clone(),
            ),
            pods: pods.clone(),
            sources: Sources { config_maps: informers.of(), secrets: informers.of() },
            runtimes,
            logs: config.logs.clone(),
            local: Default::default(),
            addresses: Addresses::default().into(),
            client: client.clone(),
        });
        let node = NodeObject::new(client, &config, &classes);
        let logs = Logs { node: config.node_name.clone(), pods, layout: config.logs.clone() };
        Self { config, node, worker, queue: WorkQueue::default(), logs, stop_events }
    }

    /// The HTTP API by which the API server reads logs.
    pub fn router(&self) -> Router {
        http::router(self.logs.clone())
    }

    /// Runs the node until `stop`. What runs is left running: its host ends it.
    pub async fn run(self, stop: CancellationToken) {
        let _end_events = self.stop_events.drop_guard();
        let (queue, node_name) = (self.queue.clone(), self.config.node_name.clone());
        self.worker.pods.handle(move |change: Change<'_, Pod>| {
            let here = |pod: &Arc<Pod>| {
                pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node_name.as_str())
            };
            if change.states().any(here) {
                queue.add(ObjectKey::of(&**change.latest()));
            }
        });
        for runtime in self.worker.runtimes.values() {
            tokio::spawn(wake_on_changes(
                runtime.clone(),
                self.worker.clone(),
                self.queue.clone(),
                stop.clone(),
            ));
        }
        let worker = self.worker.clone();
        let ready = async {
            worker.pods.synced().await;
            worker.sources.config_maps.synced().await;
            worker.sources.secrets.synced().await;
        };
        let pods = async {
            tokio::select! {
                () = ready => {}
                () = stop.cancelled() => return,
            }
            let reconcile = |key| {
                let worker = self.worker.clone();
                async move { worker.reconcile(key).await }
            };
            reconcile::run("kubelet", self.queue.clone(), self.config.workers_max, stop.clone(), reconcile)
                .await;
        };
        tokio::join!(pods, self.node.run(stop.clone()));
    }
}

/// A container's state changed: look at the pods that have something of this host's.
async fn wake_on_changes(
    runtime: Arc<dyn Runtime>,
    worker: Arc<Worker>,
    queue: WorkQueue<ObjectKey>,
    stop: CancellationToken,
) {
    let mut changes = runtime.changes();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
        // Only pods whose state here differs from the host's.
        let local: Vec<_> = worker.local.lock().iter().map(|(key, pod)| (key.clone(), pod.clone())).collect();
        for (key, mut pod) in local {
            let before = pod.clone();
            pod.observe(&runtime.containers(&pod.uid));
            if pod != before {
                queue.add(key);
            }
        }
    }
}
