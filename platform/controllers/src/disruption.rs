//! PodDisruptionBudget status: how many of the selected pods may be evicted now.
//!
//! ```text
//!   healthy pods − (minAvailable, or desired replicas of the pods' controllers − maxUnavailable) = disruptionsAllowed
//! ```
//!
//! The API server's `eviction` lowers `disruptionsAllowed` and records the pod in `disruptedPods`; the record is
//! removed here once the pod is being deleted, or after two minutes. (Behaviour: upstream `pkg/controller/disruption`.)

mod plan;

use std::{collections::BTreeMap, sync::Arc};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
    core::{DynamicObject, GroupVersionKind},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{Deployment, ReplicaSet, StatefulSet},
            core::v1::{Pod, ReplicationController},
            policy::v1::PodDisruptionBudget,
        },
        apimachinery::pkg::apis::meta::v1::OwnerReference,
        jiff::Timestamp,
    },
    selector::Selector,
};
use mayfly_informer::{
    EventRecorder, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::metadata::{controller_of, is_gone};
use plan::{Scaled, plan};

/// Settings of the disruption controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of budgets that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 4 }
    }
}

/// Keeps the status of every PodDisruptionBudget.
pub(crate) struct DisruptionController {
    config: Config,
    client: Client,
    budgets: Informer<PodDisruptionBudget>,
    pods: Informer<Pod>,
    deployments: Informer<Deployment>,
    sets: Informer<ReplicaSet>,
    stateful_sets: Informer<StatefulSet>,
    replication: Informer<ReplicationController>,
}

/// The selector of a budget's pods. An absent selector selects no pod, an empty one all pods of the namespace.
fn selector(budget: &PodDisruptionBudget) -> Option<Selector> {
    Selector::from_object(budget.spec.as_ref()?.selector.as_ref()?).ok()
}

impl DisruptionController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self {
            config,
            client,
            budgets: informers.of(),
            pods: informers.of(),
            deployments: informers.of(),
            sets: informers.of(),
            stateful_sets: informers.of(),
            replication: informers.of(),
        }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.budgets.synced().await;
            self.pods.synced().await;
            self.deployments.synced().await;
            self.sets.synced().await;
            self.stateful_sets.synced().await;
            self.replication.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "controllermanager", None, stop.clone());
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.budgets.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let (changed, budgets) = (queue.clone(), self.budgets.clone());
        self.pods.handle(move |change| {
            for pod in change.states() {
                for budget in budgets.list_namespace(&pod.namespace().unwrap_or_default()) {
                    if selector(&budget).is_some_and(|selector| selector.matches(pod.labels())) {
                        changed.add(ObjectKey::of(&*budget));
                    }
                }
            }
        });
        let workers_max = self.config.workers_max;
        let controller = Arc::new(self);
        reconcile::run("disruption", queue, workers_max, stop, move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        })
        .await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> kube::Result<Outcome> {
        let Some(budget) = self.budgets.get(&key) else { return Ok(Outcome::Done) };
        let mut pods = Vec::new();
        if let Some(selector) = selector(&budget) {
            pods = self.pods.list_namespace(&key.namespace);
            pods.retain(|pod| selector.matches(pod.labels()));
        }
        let others = self.other_scales(&key.namespace, &pods).await?;
        let plan = plan(&budget, &pods, |pod| self.scaled(pod, &others), Timestamp::now());
        for (is_warning, reason, message) in &plan.events {
            match is_warning {
                true => events.warning(&*budget, reason, message),
                false => events.normal(&*budget, reason, message),
            }
        }
        if budget.status.as_ref() != Some(&plan.status) {
            let mut status = json!(plan.status);
            // Explicit nulls, so that the merge patch removes the pods that are no longer recorded.
            let noted =
                budget.status.as_ref().and_then(|status| status.disrupted_pods.clone()).unwrap_or_default();
            let mut disrupted: serde_json::Map<_, _> =
                noted.into_keys().map(|name| (name, Value::Null)).collect();
            for (name, time) in plan.status.disrupted_pods.iter().flatten() {
                disrupted.insert(name.clone(), json!(time));
            }
            status["disruptedPods"] = Value::Object(disrupted);
            // Conditional on the version that was planned from: an eviction may have been granted meanwhile.
            let metadata = json!({"resourceVersion": budget.metadata.resource_version});
            let patch = Patch::Merge(json!({"metadata": metadata, "status": status}));
            let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), &key.namespace);
            let result = budgets.patch_status(&key.name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    /// The object that scales a pod's siblings, and its desired number of pods. `others`: those of kinds without an
    /// informer here, by uid.
    fn scaled(&self, pod: &Pod, others: &BTreeMap<String, Scaled>) -> Scaled {
        let Some(owner) = controller_of(pod) else { return Scaled::Unmanaged };
        if let Some(known) = others.get(&owner.uid) {
            return known.clone();
        }
        let namespace = pod.namespace().unwrap_or_default();
        let key = ObjectKey::new(&namespace, &owner.name);
        let replicas = match owner.kind.as_str() {
            "ReplicaSet" => self.sets.get(&key).map(|set| {
                let deployment = controller_of(&*set).filter(|owner| owner.kind == "Deployment");
                let known = deployment
                    .and_then(|owner| self.deployments.get(&ObjectKey::new(&namespace, &owner.name)));
                match (deployment, known) {
                    (Some(owner), Some(known)) => {
                        (owner.uid.clone(), known.spec.as_ref().and_then(|spec| spec.replicas))
                    }
                    _ => (owner.uid.clone(), set.spec.as_ref().and_then(|spec| spec.replicas)),
                }
            }),
            "StatefulSet" => self
                .stateful_sets
                .get(&key)
                .map(|set| (owner.uid.clone(), set.spec.as_ref().and_then(|spec| spec.replicas))),
            _ => self
                .replication
                .get(&key)
                .map(|set| (owner.uid.clone(), set.spec.as_ref().and_then(|spec| spec.replicas))),
        };
        replicas
            .map_or(Scaled::Nothing, |(uid, replicas)| Scaled::By { uid, replicas: replicas.unwrap_or(1) })
    }

    /// The controllers of the pods that are of other kinds, by uid: their number of pods is that of their subresource
    /// `scale`.
    async fn other_scales(
        &self,
        namespace: &str,
        pods: &[Arc<Pod>],
    ) -> kube::Result<BTreeMap<String, Scaled>> {
        let mut scales = BTreeMap::new();
        for owner in pods.iter().filter_map(|pod| controller_of(&**pod)).filter(|owner| !is_known(owner)) {
            if !scales.contains_key(&owner.uid) {
                scales.insert(owner.uid.clone(), self.scale_of(namespace, owner).await?);
            }
        }
        Ok(scales)
    }

    /// The number of pods of a controller, from its subresource `scale`.
    async fn scale_of(&self, namespace: &str, owner: &OwnerReference) -> kube::Result<Scaled> {
        let (group, version) = owner.api_version.split_once('/').unwrap_or(("", owner.api_version.as_str()));
        let kind = GroupVersionKind::gvk(group, version, &owner.kind);
        let (resource, capabilities) = match kube::discovery::pinned_kind(&self.client, &kind).await {
            Ok(found) => found,
            Err(kube::Error::Discovery(_)) => return Ok(Scaled::Nothing),
            Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(Scaled::Nothing),
            Err(error) => return Err(error),
        };
        if !capabilities.subresources.iter().any(|(subresource, _)| subresource.plural == "scale") {
            let of_group = if group.is_empty() { String::new() } else { format!(".{group}") };
            return Ok(Scaled::Unscalable(format!("{}{of_group}", resource.plural)));
        }
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        let scale = api.get_scale(&owner.name).await;
        if is_gone(&scale) {
            return Ok(Scaled::Nothing);
        }
        let scale = scale?;
        let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
        Ok(match scale.metadata.uid.as_deref() == Some(&owner.uid) {
            true => Scaled::By { uid: owner.uid.clone(), replicas },
            false => Scaled::Nothing,
        })
    }
}

/// Whether a controller is of a kind that has an informer here.
fn is_known(owner: &OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
    matches!(
        (group, owner.kind.as_str()),
        ("apps", "ReplicaSet" | "StatefulSet") | ("", "ReplicationController")
    )
}
