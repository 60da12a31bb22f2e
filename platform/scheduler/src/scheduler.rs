//! The loop: changes in, decisions, bindings out. One task owns cache and queue; bindings run beside it.

use std::sync::Arc;

use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Binding, Node, ObjectReference, Pod},
        apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
        jiff::Timestamp,
    },
};
use mayfly_informer::{Change, EventRecorder, Informer, Informers};
use serde_json::json;
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    cache::{Cache, Snapshot},
    plan::{FitError, Placement, plan},
    queue::Queue,
    request::{PodRequest, is_finished, is_waiting},
};

/// What an operator may set.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bindings on their way to the API at the same time.
    pub bindings_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { bindings_max: 64 }
    }
}

/// Decisions in a row before the loop looks at what changed meanwhile.
const DECISIONS_IN_A_ROW_MAX: usize = 256;
/// Outcomes of bindings that wait for the loop; more wait in their tasks.
const OUTCOMES_MAX: usize = 1024;

/// Places pods on nodes. Created, then run.
pub struct Scheduler {
    client: Client,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    cache: Cache,
    snapshot: Snapshot,
    queue: Queue,
    turn: u64,
    binding: Arc<Semaphore>,
    outcomes: mpsc::Sender<Outcome>,
    outcomes_in: Option<mpsc::Receiver<Outcome>>,
}

/// How a binding ended.
struct Outcome {
    pod: PodRequest,
    result: Result<(), kube::Error>,
}

impl Scheduler {
    /// Starts nothing yet; `informers` are the process's own.
    pub fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let (outcomes, outcomes_in) = mpsc::channel(OUTCOMES_MAX);
        Self {
            client,
            pods: informers.of(),
            nodes: informers.of(),
            cache: Cache::default(),
            snapshot: Snapshot::default(),
            queue: Queue::default(),
            turn: 0,
            binding: Arc::new(Semaphore::new(config.bindings_max)),
            outcomes,
            outcomes_in: Some(outcomes_in),
        }
    }

    /// Schedules until `stop`. Bindings under way are finished by their own tasks.
    pub async fn run(mut self, stop: CancellationToken) {
        let events = EventRecorder::start(self.client.clone(), "default-scheduler", None, stop.clone());
        let Some(mut outcomes) = self.outcomes_in.take() else { return };
        // Deletions carry the last state: the key alone would not say which uid is gone.
        let deleted = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let gone = deleted.clone();
        self.pods.handle(move |change| match change {
            Change::Deleted(pod) => gone.lock().extend(pod.metadata.uid.clone()),
            Change::Updated { old, new } if old.metadata.uid != new.metadata.uid => {
                gone.lock().extend(old.metadata.uid.clone());
            }
            _ => {}
        });
        let (mut pods, mut nodes) = (self.pods.subscribe(), self.nodes.subscribe());
        tokio::select! {
            () = stop.cancelled() => return,
            () = async { tokio::join!(self.pods.synced(), self.nodes.synced()); } => {}
        }
        loop {
            let more = self.queue.has_active() && self.binding.available_permits() > 0;
            let wake_at = if more { Some(Instant::now()) } else { self.queue.wake_at() };
            tokio::select! {
                () = stop.cancelled() => return,
                keys = pods.next() => {
                    let deleted = std::mem::take(&mut *deleted.lock());
                    self.pods_changed(keys, deleted);
                }
                keys = nodes.next() => self.nodes_changed(keys),
                Some(outcome) = outcomes.recv() => self.bound(outcome, &events),
                () = sleep_until(wake_at) => {}
            }
            for key in nodes.take() {
                self.nodes_changed([key]);
            }
            self.decide(&events);
        }
    }

    fn pods_changed(&mut self, keys: impl IntoIterator<Item = ObjectKey>, deleted: Vec<String>) {
        let now = Instant::now();
        let mut freed = false;
        for uid in deleted {
            freed |= self.cache.holds(&uid);
            self.cache.remove_pod(&uid);
            self.queue.remove(&uid);
        }
        for key in keys {
            let Some(pod) = self.pods.get(&key) else { continue };
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            if is_waiting(&pod) {
                // An assumed pod is on its way; its binding's outcome decides.
                if !self.cache.holds(uid) {
                    self.queue.add(PodRequest::of(&pod));
                }
            } else {
                self.queue.remove(uid);
                freed |= is_finished(&pod) && self.cache.holds(uid);
                self.cache.set_pod(&pod);
            }
        }
        if freed {
            self.queue.something_changed(now);
        }
    }

    fn nodes_changed(&mut self, keys: impl IntoIterator<Item = ObjectKey>) {
        for key in keys {
            match self.nodes.get(&key) {
                Some(node) => self.cache.set_node(&node),
                None => self.cache.remove_node(&key.name),
            }
        }
        self.queue.something_changed(Instant::now());
    }

    fn decide(&mut self, events: &EventRecorder) {
        let now = Instant::now();
        for _ in 0..DECISIONS_IN_A_ROW_MAX {
            if self.binding.available_permits() == 0 {
                return;
            }
            let Some(pod) = self.queue.pop(now) else { return };
            self.cache.update(&mut self.snapshot);
            self.turn += 1;
            match plan(&pod, &self.snapshot, self.turn) {
                Ok(placement) => self.assume_and_bind(pod, placement),
                Err(error) => {
                    self.queue.unschedulable(&pod.uid, now);
                    self.tell(&pod, &error, events);
                }
            }
        }
    }

    fn assume_and_bind(&mut self, pod: PodRequest, placement: Placement) {
        let Ok(permit) = self.binding.clone().try_acquire_owned() else {
            return self.queue.failed(&pod.uid, Instant::now());
        };
        self.cache.assume(pod.clone(), &placement.node);
        let (client, outcomes) = (self.client.clone(), self.outcomes.clone());
        tokio::spawn(async move {
            let result = bind(&client, &pod, &placement.node).await;
            // The loop has ended: the next start reads from the API what became of the pod.
            let _ = outcomes.send(Outcome { pod, result }).await;
            drop(permit);
        });
    }

    fn bound(&mut self, outcome: Outcome, events: &EventRecorder) {
        let Outcome { pod, result } = outcome;
        match result {
            Ok(()) => self.queue.remove(&pod.uid),
            Err(kube::Error::Api(status)) if status.is_not_found() => {
                self.cache.forget(&pod.uid);
                self.queue.remove(&pod.uid);
            }
            Err(error) => {
                tracing::warn!(pod = %pod.key, %error, "binding failed; will try again");
                self.cache.forget(&pod.uid);
                self.queue.failed(&pod.uid, Instant::now());
                if let Some(object) = self.pods.get(&pod.key) {
                    events.warning(&*object, "FailedScheduling", format!("binding rejected: {error}"));
                }
            }
        }
    }

    /// Says on the pod, and in an event, why it waits.
    fn tell(&self, pod: &PodRequest, error: &FitError, events: &EventRecorder) {
        let Some(object) = self.pods.get(&pod.key) else { return };
        let message = error.to_string();
        let told =
            object.status.iter().flat_map(|status| status.conditions.iter().flatten()).any(|condition| {
                condition.type_ == "PodScheduled" && condition.message.as_deref() == Some(message.as_str())
            });
        if told {
            return;
        }
        events.warning(&*object, "FailedScheduling", message.clone());
        // No room for one more write: the next refusal tells it.
        let Ok(permit) = self.binding.clone().try_acquire_owned() else { return };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let name = pod.key.name.clone();
        let patch = json!({"status": {"conditions": [{
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": Time(Timestamp::now()),
        }]}});
        tokio::spawn(async move {
            let patched = api.patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch)).await;
            if let Err(error) = patched {
                tracing::debug!(pod = name, %error, "could not write why the pod waits");
            }
            drop(permit);
        });
    }
}

async fn bind(client: &Client, pod: &PodRequest, node: &str) -> Result<(), kube::Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.key.namespace);
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(pod.key.name.clone()),
            namespace: Some(pod.key.namespace.clone()),
            // The API refuses the binding of a pod that was replaced meanwhile.
            uid: Some(pod.uid.clone()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };
    let _: serde_json::Value =
        api.create_subresource("binding", &pod.key.name, &PostParams::default(), &binding).await?;
    Ok(())
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
