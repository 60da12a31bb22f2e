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

/// Keeps a monitor for every kind that discovery names.
async fn monitor_all(
    shared: Arc<CollectorContext>,
    config: Config,
    synced: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    let mut monitors: HashMap<(String, String), watch::Receiver<bool>> = HashMap::new();
    let mut failures = 0;
    loop {
        let pause = match Kinds::discover(shared.client.clone()).await {
            Ok(kinds) => {
                failures = 0;
                for kind in kinds.collected() {
                    let key = (kind.resource.group.clone(), kind.resource.kind.clone());
                    monitors.entry(key).or_insert_with(|| {
                        let (listed, is_listed) = watch::channel(false);
                        tasks.spawn(monitor(shared.clone(), kind.clone(), listed, stop.clone()));
                        is_listed
                    });
                }
                *shared.kinds.write() = Arc::new(kinds);
                for listed in monitors.values_mut() {
                    tokio::select! {
                        () = stop.cancelled() => break,
                        _ = listed.wait_for(|listed| *listed) => {}
                    }
                }
                synced.send_replace(true);
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
    while tasks.join_next().await.is_some() {}
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
