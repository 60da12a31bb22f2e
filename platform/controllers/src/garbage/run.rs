//! Watches every kind, feeds the graph, works through the queue.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client,
    core::{DynamicObject, PartialObjectMeta},
    runtime::watcher::Event,
};
use mayfly_informer::{
    Backoff, EventRecorder, WatchConfig, follow,
    reconcile::{self, WorkQueue},
};
use parking_lot::{Mutex, RwLock};
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    graph::{CollectorWork, Graph},
    item::{AbsentOwners, CollectorContext, Live},
    kinds::{CollectedKind, Kinds},
};

/// Pauses after failures: of a watch, and of the check of an object.
const RETRY: Backoff = Backoff { first: Duration::from_millis(50), most: Duration::from_secs(30) };

/// Deletes objects whose owners are deleted.
pub(crate) struct GarbageCollector {
    config: Config,
    client: Client,
}

impl GarbageCollector {
    pub(crate) fn create(config: Config, client: Client) -> Self {
        Self { config, client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let events =
            EventRecorder::start(self.client.clone(), "garbage-collector-controller", None, stop.clone());
        let shared = Arc::new(CollectorContext {
            client: self.client.clone(),
            graph: Mutex::new(Graph::default()),
            kinds: RwLock::default(),
            absent: Mutex::new(AbsentOwners::new(self.config.absent_max)),
            queue: WorkQueue::new(RETRY),
            events,
            unlisted_max: self.config.unlisted_max,
        });
        let (synced, mut all_synced) = watch::channel(false);
        let monitors = monitor_all(shared.clone(), self.config.clone(), synced, stop.clone());
        let work = async {
            // In an incomplete graph an owner would seem to have no dependents.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = all_synced.wait_for(|synced| *synced) => {}
            }
            let (queue, stop) = (shared.queue.clone(), stop.clone());
            let workers_max = self.config.workers_max;
            reconcile::run("garbage", queue, workers_max, stop, move |work: CollectorWork| {
                let shared = shared.clone();
                async move {
                    match work {
                        CollectorWork::Delete(uid) => shared.delete_item(&uid).await,
                        CollectorWork::Orphan(uid) => shared.orphan_dependents(&uid).await,
                    }
                }
            })
            .await;
        };
        tokio::join!(monitors, work);
    }
}

/// The watch of one kind.
struct Monitor {
    kind: CollectedKind,
    /// Whether the kind was listed once. The sender is dropped when the watch has ended.
    listed: watch::Receiver<bool>,
    stop: CancellationToken,
}

impl Monitor {
    /// Ends the watch, then makes the nodes of its kind virtual: no event of the watch comes after that.
    async fn end(mut self, shared: &CollectorContext) {
        self.stop.cancel();
        while self.listed.changed().await.is_ok() {}
        let resource = &self.kind.resource;
        let work = shared.graph.lock().unobserve(&resource.api_version, &resource.kind);
        shared.enqueue(work);
    }
}

/// The watches of all collected kinds.
struct Monitors {
    shared: Arc<CollectorContext>,
    /// By group and kind.
    running: HashMap<(String, String), Monitor>,
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Monitors {
    /// Ends the monitors of kinds that are not served any more, or not in the same form, and starts those of new kinds.
    async fn update(&mut self, kinds: &Kinds) {
        let collected = kinds.collected();
        let is_served = |monitor: &Monitor| collected.iter().any(|kind| kind.is_watched_as(&monitor.kind));
        let ended = self.running.iter().filter(|(_, monitor)| !is_served(monitor));
        let ended: Vec<_> = ended.map(|(key, _)| key.clone()).collect();
        for key in ended {
            if let Some(monitor) = self.running.remove(&key) {
                monitor.end(&self.shared).await;
            }
        }
        for kind in collected {
            let key = (kind.resource.group.clone(), kind.resource.kind.clone());
            if !self.running.contains_key(&key) {
                let monitor = self.start(kind);
                self.running.insert(key, monitor);
            }
        }
        // Only the tasks of ended monitors have ended.
        while self.tasks.try_join_next().is_some() {}
    }

    fn start(&mut self, kind: &CollectedKind) -> Monitor {
        let (sender, listed) = watch::channel(false);
        let stop = self.stop.child_token();
        self.tasks.spawn(monitor(self.shared.clone(), kind.clone(), sender, stop.clone()));
        Monitor { kind: kind.clone(), listed, stop }
    }

    /// Waits until every kind was listed once.
    async fn all_listed(&mut self) {
        for monitor in self.running.values_mut() {
            let _ = monitor.listed.wait_for(|listed| *listed).await;
        }
    }

    /// The names of the kinds that were not listed yet.
    fn unlisted(&self) -> Vec<&str> {
        let unlisted = self.running.values().filter(|monitor| !*monitor.listed.borrow());
        unlisted.map(|monitor| monitor.kind.resource.plural.as_str()).collect()
    }
}

/// Keeps a monitor for every kind that discovery names.
async fn monitor_all(
    shared: Arc<CollectorContext>,
    config: Config,
    synced: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let mut monitors = Monitors {
        shared: shared.clone(),
        running: HashMap::new(),
        tasks: JoinSet::new(),
        stop: stop.clone(),
    };
    let mut failures = 0;
    loop {
        let pause = match Kinds::discover(shared.client.clone()).await {
            Ok(kinds) => {
                failures = 0;
                monitors.update(&kinds).await;
                *shared.kinds.write() = Arc::new(kinds);
                let is_synced = *synced.borrow();
                if !is_synced {
                    let listed = tokio::time::timeout(config.first_lists_max, monitors.all_listed());
                    let Some(listed) = stop.run_until_cancelled(listed).await else { break };
                    if listed.is_err() {
                        let kinds = monitors.unlisted();
                        tracing::warn!(?kinds, "collecting objects although some kinds cannot be listed");
                    }
                    synced.send_replace(true);
                }
                config.rediscover_every
            }
            Err(error) => {
                failures += 1;
                tracing::debug!(%error, failures, "cannot discover the kinds of the API; will retry");
                RETRY.pause(failures)
            }
        };
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
    }
    while monitors.tasks.join_next().await.is_some() {}
}

/// Follows the metadata of one kind.
async fn monitor(
    shared: Arc<CollectorContext>,
    kind: CollectedKind,
    listed: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let api: Api<PartialObjectMeta<DynamicObject>> = Api::all_with(shared.client.clone(), &kind.resource);
    let mut seen = HashSet::new();
    follow(api, WatchConfig::default(), stop, |event| match event {
        Event::Init => seen.clear(),
        Event::InitApply(object) => {
            seen.extend(object.metadata.uid.clone());
            observe(&shared, &kind, &object);
        }
        Event::InitDone => {
            forget_unseen(&shared, &kind, &seen);
            listed.send_replace(true);
        }
        Event::Apply(object) => observe(&shared, &kind, &object),
        Event::Delete(object) => {
            let work = shared.graph.lock().remove(&kind.identity(&object), true);
            shared.enqueue(work);
        }
    })
    .await;
}

fn observe(shared: &CollectorContext, kind: &CollectedKind, object: &Live) {
    let work = shared.graph.lock().observe(kind.identity(object), &object.metadata);
    shared.enqueue(work);
}

/// Removes the nodes of objects that a complete list lacks.
fn forget_unseen(shared: &CollectorContext, kind: &CollectedKind, seen: &HashSet<String>) {
    let mut graph = shared.graph.lock();
    let known = graph.of_kind(&kind.resource.api_version, &kind.resource.kind);
    let gone: Vec<_> = known.filter(|identity| !seen.contains(&identity.uid)).cloned().collect();
    let work: Vec<_> = gone.iter().flat_map(|identity| graph.remove(identity, true)).collect();
    drop(graph);
    shared.enqueue(work);
}
