//! The kubelet: the node's object, and a worker for each pod that is bound to it.

use std::{sync::Arc, time::Duration};

use axum::Router;
use futures::future::join_all;
use kube::Client;
use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};
use mayfly_csi::CsiDrivers;
use mayfly_informer::{
    Backoff, Change, EnvObjects, EventRecorder, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use mayfly_runtime::Runtime;
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{
    addresses::Addresses,
    config::Config,
    function_logs::FunctionLogs,
    http::{self, Logs},
    image_collection::ImageCollector,
    images::NodeImages,
    local_storage::MeasuredStorage,
    node::{self, NodeObject, changed},
    plugin_registry::PluginRegistry,
    pod::{
        evicting::{EVICTED, watch_gpus, watch_pressure, watch_storage},
        worker::Worker,
    },
    probe::ProbeTasks,
    runtimes::NodeRuntimes,
    static_pods::StaticPods,
    streams::PodStreams,
    usage::Meters,
    volume_statistics::MeasuredVolumes,
    volumes::{
        Volumes, claims::PodClaims, csi::CsiVolumes, flex::FlexDrivers, in_use::VolumesInUse,
        tokens::ServiceAccountTokens,
    },
};

/// The pause between checks of the runtimes' states.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The interval of measuring jobs' files on the disk.
const OUTPUTS_MEASURE_INTERVAL: Duration = Duration::from_secs(2);
/// The interval of comparing the files of volumes with their sources (upstream: a minute).
const REFRESH_EVERY: Duration = Duration::from_secs(10);
/// The interval of the search for leftovers of deleted pods.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Pauses between sweeps that could not remove everything.
const SWEEP_AGAIN: Backoff = Backoff { first: Duration::from_secs(1), most: SWEEP_EVERY };

/// One node's agent.
pub struct Kubelet {
    config: Config,
    node: NodeObject,
    worker: Arc<Worker>,
    queue: WorkQueue<ObjectKey>,
    logs: Logs,
    meters: Arc<Meters>,
    measured_volumes: Arc<MeasuredVolumes>,
    streams: PodStreams,
    images: NodeImages,
    image_collector: ImageCollector,
    shortages: watch::Sender<[bool; 3]>,
    static_pods: Option<StaticPods>,
    plugins: Option<PluginRegistry>,
    stop_events: CancellationToken,
}

impl std::fmt::Debug for Kubelet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kubelet").finish_non_exhaustive()
    }
}

impl Kubelet {
    /// Must be called inside a Tokio runtime. Has no effects until [`Self::run`].
    pub fn create(
        config: Config,
        client: Client,
        informers: &Informers,
        runtimes: Vec<Arc<dyn Runtime>>,
    ) -> Self {
        let stop_events = CancellationToken::new();
        let storage = Arc::<MeasuredStorage>::default();
        let measured_volumes = Arc::<MeasuredVolumes>::default();
        let shortages = watch::Sender::new([false; 3]);
        let meters = Meters::new(
            config.node_name.clone(),
            informers.of(),
            runtimes.clone(),
            storage.clone(),
            measured_volumes.clone(),
            config.logs.root().to_owned(),
        );
        let images = NodeImages::new(runtimes.clone(), config.upload_folder.clone());
        let image_collector = ImageCollector::new(
            config.node_name.clone(),
            config.image_collection.clone(),
            config.upload_folder.clone(),
            runtimes.clone(),
            informers.of(),
            shortages.subscribe(),
        );
        let runtimes = NodeRuntimes::new(runtimes, informers.of());
        let streams = PodStreams::new(config.node_name.clone(), informers.of(), runtimes.clone());
        let classes: Vec<_> = runtimes.names().map(str::to_owned).collect();
        let pods = informers.of::<Pod>();
        let events = EventRecorder::start(
            client.clone(),
            "kubelet",
            Some(config.node_name.clone()),
            stop_events.clone(),
        );
        let queue = WorkQueue::default();
        let volumes_in_use = Arc::<VolumesInUse>::default();
        let worker = Arc::new(Worker {
            node: config.node_name.clone(),
            host_address: config.address,
            allocatable: node::allocatable(&config).into(),
            tokens: ServiceAccountTokens::new(client.clone()),
            probes: ProbeTasks::new(events.clone(), queue.clone()),
            events,
            pods: pods.clone(),
            sources: EnvObjects::create(informers),
            services: informers.of(),
            runtimes,
            logs: config.logs.clone(),
            jobs: config.jobs.clone(),
            volumes: config.volumes.clone().map(|folder| {
                let drivers = FlexDrivers::new(config.volume_plugins.clone(), config.node_name.clone());
                let csi = config.csi.clone();
                let csi = csi.map(|csi| {
                    let (node, client) = (config.node_name.clone(), client.clone());
                    CsiVolumes::create(csi, node, client, volumes_in_use.clone(), &folder)
                });
                Volumes::new(folder, drivers, csi)
            }),
            claims: PodClaims::new(informers),
            devices: config.devices.clone(),
            gpus: config.gpus.clone(),
            cluster_dns: config.cluster_dns.clone(),
            served_endpoints: config.served_endpoints.clone(),
            allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
            storage: storage.clone(),
            local: Default::default(),
            addresses: Addresses::from_random_block().into(),
            client: client.clone(),
            deletions: watch::Sender::new(0),
            leftovers: Notify::new(),
        });
        let static_pods = config.static_pods.clone().map(|folder| StaticPods {
            folder,
            node: config.node_name.clone(),
            client: client.clone(),
            pods: pods.clone(),
            nodes: informers.of(),
        });
        let plugins = config.csi.clone().map(|csi| PluginRegistry {
            folder: csi.folder.join(mayfly_csi::names::REGISTRY),
            node: config.node_name.clone(),
            client: client.clone(),
            drivers: csi.drivers,
            devices: config.devices.clone(),
        });
        let node = NodeObject::new(
            client,
            informers.of(),
            &config,
            &classes,
            image_collector.shown(),
            shortages.subscribe(),
            volumes_in_use,
        );
        let functions = FunctionLogs::create(config.logs.clone(), informers.of());
        let logs = Logs { node: config.node_name.clone(), pods, layout: config.logs.clone(), functions };
        let meters = Arc::new(meters);
        Self {
            config,
            node,
            worker,
            queue,
            logs,
            meters,
            measured_volumes,
            streams,
            images,
            image_collector,
            shortages,
            static_pods,
            plugins,
            stop_events,
        }
    }

    /// The HTTP API by which the API server reads logs and usage.
    pub fn router(&self) -> Router {
        http::router(self.logs.clone(), self.meters.clone(), self.streams.clone(), self.images.clone())
    }

    /// Queues a pod of this node when it changes, and interrupts waits of a pod that is being deleted.
    fn wake_on_pods(&self) {
        let (queue, worker) = (self.queue.clone(), self.worker.clone());
        self.worker.pods.handle(move |change: Change<'_, Pod>| {
            if change.states().any(|pod| worker.is_bound_here(pod)) {
                let going = matches!(change, Change::Deleted(_))
                    || change.latest().metadata.deletion_timestamp.is_some();
                if going {
                    worker.deletions.send_modify(|count| *count += 1);
                }
                queue.add(ObjectKey::of(&**change.latest()));
            }
        });
    }

    /// Runs the node until `stop`. Containers are left running; the owner of the runtimes ends them.
    pub async fn run(self, stop: CancellationToken) {
        self.wake_on_pods();
        let _end_events = self.stop_events.drop_guard();
        wake_on_sources(&self.worker, &self.queue);
        let worker = self.worker.clone();
        let ready = async {
            worker.pods.synced().await;
            worker.runtimes.synced().await;
        };
        let (queue, workers_max) = (self.queue.clone(), self.config.workers_max);
        let reconcile = |key| {
            let (worker, stop) = (worker.clone(), stop.clone());
            async move {
                tokio::select! {
                    // Interrupted steps are repeated after a restart: runtimes recognise the ids.
                    () = stop.cancelled() => Ok(Outcome::Done),
                    outcome = worker.reconcile(key) => outcome,
                }
            }
        };
        let pods = async {
            tokio::select! {
                () = ready => {}
                () = stop.cancelled() => return,
            }
            let hosts = worker.runtimes.all();
            let changes = hosts.map(|host| wake_on_changes(host.clone(), &worker, &queue, &stop));
            tokio::join!(
                reconcile::run("kubelet", queue.clone(), workers_max, stop.clone(), reconcile),
                sweep(&worker, self.config.csi.as_ref().map(|csi| csi.drivers.clone()), &stop),
                wake_on_devices(&worker, &queue, &stop),
                watch_outputs(&worker, &queue, &stop),
                refresh_volumes(&worker, &stop),
                worker.measure_volumes(&self.measured_volumes, &stop),
                watch_storage(&worker, &queue, &stop),
                watch_gpus(&worker, &queue, &stop),
                async {
                    if self.config.evicts {
                        watch_pressure(&worker, &queue, &self.shortages, &stop).await;
                    }
                },
                join_all(changes),
            );
        };
        let static_pods = async {
            if let Some(static_pods) = &self.static_pods {
                static_pods.run(&stop).await;
            }
        };
        let plugins = async {
            if let Some(plugins) = &self.plugins {
                plugins.run(&stop).await;
            }
        };
        let (functions, meters, images) = (&self.logs.functions, &self.meters, &self.image_collector);
        let (node, images) = (self.node.run(stop.clone()), images.run(&stop));
        tokio::join!(pods, static_pods, plugins, node, meters.run(&stop), functions.run(&stop), images);
    }
}

/// Queues the pods whose containers changed their state in this runtime.
async fn wake_on_changes(
    runtime: Arc<dyn Runtime>,
    worker: &Worker,
    queue: &WorkQueue<ObjectKey>,
    stop: &CancellationToken,
) {
    let mut changes = runtime.changes();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
        for (key, pod) in &*worker.local.lock() {
            if pod.is_news(&runtime.containers(&pod.uid)) {
                queue.add(key.clone());
            }
        }
        // Changes come in bursts, and each check lists all pods.
        sleep(POLL_INTERVAL).await;
    }
}

/// Queues the pods whose devices changed their health.
async fn wake_on_devices(worker: &Worker, queue: &WorkQueue<ObjectKey>, stop: &CancellationToken) {
    let mut changes = worker.devices.as_ref().map(|devices| devices.changes());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = changed(&mut changes) => {}
        }
        for (key, pod) in &*worker.local.lock() {
            if worker.devices_of(pod).is_some() {
                queue.add(key.clone());
            }
        }
    }
}

/// Queues pods whose environment could not be made when a source in their namespace changes.
fn wake_on_sources(worker: &Arc<Worker>, queue: &WorkQueue<ObjectKey>) {
    let (waked, queue) = (worker.clone(), queue.clone());
    worker.sources.listen(move |object| {
        for (key, pod) in &mut *waked.local.lock() {
            if key.namespace == object.key().namespace && pod.retry_sources() {
                queue.add(key.clone());
            }
        }
    });
}

/// Keeps the files of volumes up to date.
async fn refresh_volumes(worker: &Worker, stop: &CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(REFRESH_EVERY) => {}
        }
        let pods: Vec<ObjectKey> = {
            let local = worker.local.lock();
            local.iter().filter(|(_, pod)| pod.sandbox).map(|(key, _)| key.clone()).collect()
        };
        for key in pods {
            if let Some(pod) = worker.pods.get(&key) {
                // Claims and tokens are not known while the API does not answer.
                if stop.run_until_cancelled(worker.refresh_volumes(&pod)).await.is_none() {
                    return;
                }
            }
        }
    }
}

/// Evicts jobs whose outputs exceed their maximum size.
async fn watch_outputs(worker: &Worker, queue: &WorkQueue<ObjectKey>, stop: &CancellationToken) {
    let Some(jobs) = &worker.jobs else { return };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(OUTPUTS_MEASURE_INTERVAL) => {}
        }
        let large = jobs.too_large().await;
        for (key, pod) in &mut *worker.local.lock() {
            if pod.sandbox && large.contains(&pod.uid.0) {
                let max = jobs.out_bytes_max;
                let message = format!("The pod left more than {max} bytes in its outputs' folder");
                pod.ended.get_or_insert((EVICTED, message));
                queue.add(key.clone());
            }
        }
    }
}

/// Removes leftovers of pods that are not in the API any more: they were deleted while no kubelet ran, or their removal
/// failed. Failed removals are retried after a pause, or when a CSI driver registers: a driver that registers late has
/// to unmount its volumes.
async fn sweep(worker: &Worker, csi: Option<Arc<CsiDrivers>>, stop: &CancellationToken) {
    let mut driver_changes = csi.map(|drivers| drivers.changes());
    let mut failures = 0;
    loop {
        let pause = match worker.remove_orphans().await {
            true => {
                failures = 0;
                SWEEP_EVERY
            }
            false => {
                failures += 1;
                SWEEP_AGAIN.full(failures)
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
            () = worker.leftovers.notified() => {}
            () = changed(&mut driver_changes) => {}
        }
    }
}
