//! The scheduler's task: processes changes, decides, and runs bindings beside it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Binding, Node, ObjectReference, PersistentVolumeClaim, Pod, PodCondition},
        apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
        jiff::Timestamp,
    },
    volume_claims::{ANNOTATION_SELECTED_NODE, claims_of},
};
use mayfly_informer::{EventRecorder, Informer, Informers};
use serde_json::{Value, json};
use tokio::{
    task::{self, JoinError, JoinSet},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    budgets::PolicyObjects,
    cache::Effect,
    evict::Eviction,
    plan::{Decision, FitError},
    preemption::Preemption,
    queue::Popped,
    request::{PodRequest, wants_node},
    state::SchedulerState,
    storage::Storage,
    volumes::VolumeNeeds,
};

/// The configuration of the scheduler.
#[derive(Clone, Debug)]
pub struct Config {
    /// The maximum number of concurrent bindings.
    pub bindings_max: usize,
    /// Pods planned before changes are processed again.
    pub batch_max: usize,
    /// The maximum number of concurrent failure reports and preemptions; beyond it, both wait for the pod's next
    /// attempt.
    pub reports_max: usize,
    /// The longest wait of a stop for bindings in progress.
    pub drain_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { bindings_max: 512, batch_max: 256, reports_max: 64, drain_timeout: Duration::from_secs(5) }
    }
}

/// Places pods, one at a time, on the best of all nodes.
pub struct Scheduler {
    config: Config,
    client: Client,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    storage: Storage,
    policies: PolicyObjects,
    /// Pods that wait for a node and have claims: reconsidered when any claim, volume or class changes.
    with_claims: BTreeSet<ObjectKey>,
    state: SchedulerState,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler").finish_non_exhaustive()
    }
}

/// Bindings in progress.
#[derive(Default)]
struct Bindings {
    tasks: JoinSet<kube::Result<()>>,
    under_way: HashMap<task::Id, (Popped, String)>,
}

/// The result of a binding.
struct Bound {
    popped: Popped,
    node: String,
    result: Result<(), String>,
}

impl Bindings {
    fn len(&self) -> usize {
        self.tasks.len()
    }

    fn spawn<F>(&mut self, popped: Popped, node: String, binding: F)
    where
        F: Future<Output = kube::Result<()>> + Send + 'static,
    {
        let task = self.tasks.spawn(binding);
        self.under_way.insert(task.id(), (popped, node));
    }

    /// The next binding that ends; `None` if none runs. A panic is a failure like any other: its pod is retried.
    async fn next(&mut self) -> Option<Bound> {
        let joined = self.tasks.join_next_with_id().await?;
        self.bound(joined)
    }

    /// A binding that has ended already.
    fn ended(&mut self) -> Option<Bound> {
        let joined = self.tasks.try_join_next_with_id()?;
        self.bound(joined)
    }

    fn bound(&mut self, joined: Result<(task::Id, kube::Result<()>), JoinError>) -> Option<Bound> {
        let (id, result) = match joined {
            Ok((id, result)) => (id, result.map_err(|error| error.to_string())),
            Err(error) => (error.id(), Err(error.to_string())),
        };
        let (popped, node) = self.under_way.remove(&id)?;
        Some(Bound { popped, node, result })
    }
}

impl Scheduler {
    /// Starts the informers it needs. Must be called inside a tokio runtime.
    pub fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = informers.of::<Pod>();
        let storage = Storage::create(informers, &pods);
        let policies = PolicyObjects::create(informers);
        let (nodes, state) = (informers.of(), SchedulerState::default());
        Self { config, client, pods, nodes, storage, policies, with_claims: BTreeSet::new(), state }
    }

    /// Runs until `stop`, then waits for bindings in progress.
    pub async fn run(mut self, stop: CancellationToken) {
        let events = EventRecorder::start(self.client.clone(), "default-scheduler", None, stop.clone());
        let synced = async {
            self.nodes.synced().await;
            self.pods.synced().await;
            self.storage.synced().await;
            self.policies.synced().await;
        };
        tokio::select! {
            () = synced => {}
            () = stop.cancelled() => return,
        }
        let (mut node_changes, mut pod_changes) = (self.nodes.subscribe(), self.pods.subscribe());
        let mut storage_changes = self.storage.subscribe();
        let mut namespace_changes = self.policies.subscribe_namespaces();
        let (mut bindings, mut reports) = (Bindings::default(), JoinSet::new());
        // Bound pods are counted before the first decision.
        self.update_namespaces(namespace_changes.take());
        self.take_nodes(node_changes.take());
        self.update_pods(pod_changes.take());
        loop {
            self.release_overdue(&mut reports, &events);
            self.schedule(&mut bindings, &mut reports, &events);
            let has_room = bindings.len() < self.config.bindings_max;
            let more = self.state.queue.has_active() && has_room;
            let wake = self.state.queue.next_wake().into_iter().chain(self.state.gangs.next_deadline()).min();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(bound) = bindings.next() => {
                    self.settle(bound, &events);
                    while let Some(bound) = bindings.ended() {
                        self.settle(bound, &events);
                    }
                }
                changed = node_changes.next() => self.take_nodes(changed),
                changed = pod_changes.next() => self.update_pods(changed),
                changed = namespace_changes.next() => self.update_namespaces(changed),
                () = storage_changes.next() => self.update_pods(self.with_claims.clone()),
                Some(_) = reports.join_next() => {}
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() && has_room && !more => {}
                () = std::future::ready(()), if more => tokio::task::yield_now().await,
            }
        }
        let drained = async { while bindings.next().await.is_some() {} };
        if tokio::time::timeout(self.config.drain_timeout, drained).await.is_err() {
            tracing::warn!("stopped with bindings in progress; their pods will be placed at the next start");
        }
    }

    fn take_nodes(&mut self, keys: BTreeSet<ObjectKey>) {
        let mut effect = Effect::None;
        for key in keys {
            let node = self.nodes.get(&key);
            effect = effect.max(self.state.cache.set_node(&key.name, node.as_deref()));
        }
        self.state.queue.apply(effect, Instant::now());
    }

    fn update_namespaces(&mut self, keys: BTreeSet<ObjectKey>) {
        let effect = self.policies.update_namespaces(keys, &mut self.state.cache);
        self.state.queue.apply(effect, Instant::now());
    }

    fn update_pods(&mut self, keys: BTreeSet<ObjectKey>) {
        let mut effect = Effect::None;
        for key in keys {
            let pod = self.pods.get(&key);
            let waits = pod.as_ref().filter(|pod| wants_node(pod) && !claims_of(pod).is_empty());
            let needs = waits.map(|pod| VolumeNeeds::of(pod, &self.storage)).unwrap_or_default();
            if waits.is_some() {
                self.with_claims.insert(key.clone());
            } else {
                self.with_claims.remove(&key);
            }
            effect = effect.max(self.state.update_pod(&key, pod.as_deref(), needs, Instant::now()));
        }
        self.state.queue.apply(effect, Instant::now());
    }

    /// Decides for a batch of pods.
    fn schedule(&mut self, bindings: &mut Bindings, reports: &mut JoinSet<()>, events: &EventRecorder) {
        for _ in 0..self.config.batch_max {
            if bindings.len() >= self.config.bindings_max {
                return;
            }
            let now = Instant::now();
            let Some(decided) = self.state.next(now) else { return };
            for (popped, decision) in decided {
                self.carry_out(popped, decision, bindings, reports, events);
            }
        }
    }

    fn carry_out(
        &mut self,
        popped: Popped,
        decision: Decision,
        bindings: &mut Bindings,
        reports: &mut JoinSet<()>,
        events: &EventRecorder,
    ) {
        let now = Instant::now();
        match decision {
            Decision::Place { node } if !popped.request.volumes.unbound.is_empty() => {
                if reports.len() < self.config.reports_max {
                    reports.spawn(select_node(self.client.clone(), popped.request.volumes.clone(), node));
                }
                self.state.queue.unschedulable(popped, now);
            }
            Decision::Place { node } => {
                self.state.queue.apply(Effect::MayAttract, now);
                let binding = bind(self.client.clone(), &popped.request, &node);
                bindings.spawn(popped, node, binding);
            }
            Decision::Unschedulable(error) if reports.len() >= self.config.reports_max => {
                tracing::debug!(pod = %popped.request.key, %error, "a report waits for the pod's next attempt");
                self.state.queue.failed(popped, now);
            }
            Decision::Unschedulable(error) => {
                let preemption = self.preempt(&popped.request, reports, events);
                self.report(&popped.request, &error, &preemption, reports, events);
                match preemption {
                    // Tried again soon even if a victim's deletion fails.
                    Preemption::Victims { .. } => self.state.queue.failed(popped, now),
                    _ => self.state.queue.unschedulable(popped, now),
                }
            }
        }
    }

    /// Searches victims for a pod that fits nowhere, and starts to delete them.
    fn preempt(
        &mut self,
        request: &PodRequest,
        reports: &mut JoinSet<()>,
        events: &EventRecorder,
    ) -> Preemption {
        let policies = &self.policies;
        let preemption = self.state.preempt(request, || policies.budgets());
        if let Preemption::Victims { node, victims } = &preemption {
            let eviction = Eviction::new(request, node.clone(), victims, &self.pods);
            eviction.announce(events);
            reports.spawn(eviction.carry_out(self.client.clone()));
        }
        preemption
    }

    /// Removes the pods of gangs that have held nodes for too long without being complete.
    fn release_overdue(&mut self, reports: &mut JoinSet<()>, events: &EventRecorder) {
        let SchedulerState { gangs, queue, .. } = &mut self.state;
        let overdue = gangs.overdue(Instant::now(), |gang| queue.waiting_of(gang) > 0);
        if overdue.is_empty() {
            return;
        }
        for (key, _) in &overdue {
            if let Some(pod) = self.pods.get(key) {
                events.warning(&*pod, "GangIncomplete", RELEASED.to_owned());
            }
        }
        reports.spawn(release(self.client.clone(), overdue));
    }

    fn settle(&mut self, bound: Bound, events: &EventRecorder) {
        let Bound { popped, node, result } = bound;
        let pod = self.pods.get(&popped.request.key);
        let pod = pod.filter(|pod| pod.metadata.uid.as_deref() == Some(&popped.request.uid));
        match result {
            Ok(()) => {
                if let Some(pod) = pod {
                    let message = format!("Successfully assigned {} to {node}", popped.request.key);
                    events.normal(&*pod, "Scheduled", message);
                }
            }
            Err(error) => {
                tracing::debug!(pod = %popped.request.key, %node, %error, "a binding failed");
                let (key, uid) = (&popped.request.key, &popped.request.uid);
                let effect = self.state.forget(key, uid, Instant::now());
                self.state.queue.apply(effect, Instant::now());
                if pod.is_some_and(|pod| wants_node(&pod)) {
                    self.state.queue.failed(popped, Instant::now());
                }
            }
        }
    }

    /// Reports why a pod has no node, in a condition and an event.
    fn report(
        &self,
        request: &PodRequest,
        error: &FitError,
        preemption: &Preemption,
        reports: &mut JoinSet<()>,
        events: &EventRecorder,
    ) {
        let Some(pod) = self.pods.get(&request.key) else { return };
        let message = match preemption.message(error.nodes) {
            Some(preemption) => format!("{error} {preemption}"),
            None => error.to_string(),
        };
        events.warning(&*pod, "FailedScheduling", message.clone());
        let Some(patch) = unschedulable(&pod, &message) else { return };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &request.key.namespace);
        let name = request.key.name.clone();
        reports.spawn(async move {
            let result = api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
            if let Err(error) = result {
                tracing::debug!(pod = name, %error, "cannot report that a pod has no node");
            }
        });
    }
}

fn bind(
    client: Client,
    request: &PodRequest,
    node: &str,
) -> impl Future<Output = kube::Result<()>> + Send + use<> {
    let key = request.key.clone();
    let api: Api<Pod> = Api::namespaced(client, &key.namespace);
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(key.name.clone()),
            namespace: Some(key.namespace.clone()),
            uid: Some(request.uid.clone()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };
    async move {
        let params = PostParams::default();
        let answer = api.create_subresource::<_, Value>("binding", &key.name, &params, &binding);
        answer.await.map(|_| ())
    }
}

/// The event and condition of a pod that is removed with its incomplete gang.
const RELEASED: &str = "other pods of its gang have had no node for too long; the gang gives its nodes back";

/// Removes pods, one after the other; a failure is retried at the gang's next timeout.
async fn release(client: Client, pods: Vec<(ObjectKey, String)>) {
    for (key, uid) in pods {
        let api: Api<Pod> = Api::namespaced(client.clone(), &key.namespace);
        let disruption = PodCondition {
            type_: "DisruptionTarget".into(),
            status: "True".into(),
            reason: Some("GangIncomplete".into()),
            message: Some(RELEASED.into()),
            last_transition_time: Some(Time(Timestamp::now())),
            ..PodCondition::default()
        };
        let patch = json!({"metadata": {"uid": uid}, "status": {"conditions": [disruption]}});
        let marked = api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await;
        let only = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(uid), resource_version: None }),
            ..DeleteParams::default()
        };
        let deleted = api.delete(&key.name, &only).await;
        if let Some(error) = marked.err().or(deleted.err()) {
            tracing::debug!(pod = %key, %error, "cannot remove a pod of an incomplete gang");
        }
    }
}

/// Sets the chosen node on the claims that wait for it. Their change, once they are bound, requeues the pod.
async fn select_node(client: Client, volumes: Arc<VolumeNeeds>, node: String) {
    for claim in volumes.unbound.iter().filter(|claim| claim.selected_node.is_none()) {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &claim.key.namespace);
        let annotations = json!({ANNOTATION_SELECTED_NODE: node});
        let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        if let Err(error) = api.patch(&claim.key.name, &PatchParams::default(), &patch).await {
            tracing::debug!(claim = %claim.key, %error, "cannot set the node of a claim; will retry");
        }
    }
}

/// A patch with the reason why the pod has no node; `None` if its conditions have it already. Conditional on the
/// observed version: the API refuses it for a pod that was bound meanwhile.
fn unschedulable(pod: &Pod, message: &str) -> Option<Value> {
    let conditions = with_unschedulable(pod, message)?;
    let seen = json!({"uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version});
    Some(json!({"metadata": seen, "status": {"conditions": conditions}}))
}

/// The pod's conditions with the reason why it has no node; `None` if they have it already.
fn with_unschedulable(pod: &Pod, message: &str) -> Option<Vec<PodCondition>> {
    let mut conditions = pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    let known = conditions.iter().find(|condition| condition.type_ == "PodScheduled");
    if known.is_some_and(|known| known.status == "False" && known.message.as_deref() == Some(message)) {
        return None;
    }
    let since =
        known.filter(|known| known.status == "False").and_then(|known| known.last_transition_time.clone());
    conditions.retain(|condition| condition.type_ != "PodScheduled");
    conditions.push(PodCondition {
        type_: "PodScheduled".into(),
        status: "False".into(),
        reason: Some("Unschedulable".into()),
        message: Some(message.into()),
        last_transition_time: Some(since.unwrap_or_else(|| Time(Timestamp::now()))),
        ..PodCondition::default()
    });
    Some(conditions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Queue;

    fn pod() -> Pod {
        let condition = json!({"type": "Other", "status": "True"});
        let pod = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
            "spec": {"containers": []}, "status": {"conditions": [condition]}});
        serde_json::from_value(pod).unwrap()
    }

    #[tokio::test]
    async fn a_binding_that_panics_gives_its_pod_back() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.set(&ObjectKey::new("ns", "a"), Some(PodRequest::of(&pod())));
        let mut bindings = Bindings::default();
        bindings.spawn(queue.pop(now).unwrap(), "n1".into(), async { panic!("on purpose") });
        let bound = bindings.next().await.unwrap();
        assert!(bound.result.is_err() && bound.node == "n1");
        queue.failed(bound.popped, now);
        assert_eq!(queue.len(), 1, "it is tried again");
        assert!(bindings.next().await.is_none() && bindings.under_way.is_empty());
    }

    #[test]
    fn a_report_is_of_the_pod_as_it_was_seen() {
        let patch = unschedulable(&pod(), "no room").unwrap();
        assert_eq!(patch["metadata"], json!({"uid": "u", "resourceVersion": "7"}));
        let conditions = patch["status"]["conditions"].as_array().unwrap();
        assert_eq!((&conditions[0]["type"], &conditions[1]["message"]), (&json!("Other"), &json!("no room")));
    }
}
