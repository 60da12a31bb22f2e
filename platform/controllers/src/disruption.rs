//! PodDisruptionBudget status: how many of the selected pods may be evicted now.
//!
//! ```text
//!   healthy pods − (minAvailable, or desired replicas of the pods' controllers − maxUnavailable) = disruptionsAllowed
//! ```
//!
//! The API server's `eviction` lowers `disruptionsAllowed` and records the pod in `disruptedPods`; the record is
//! removed here once the pod is being deleted, or after two minutes. (Behaviour: upstream `pkg/controller/disruption`.)

mod plan;

use std::sync::Arc;

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{Deployment, ReplicaSet, StatefulSet},
            core::v1::{Pod, ReplicationController},
            policy::v1::PodDisruptionBudget,
        },
        jiff::Timestamp,
    },
    selector::Selector,
};
use mayfly_informer::{
    Informer, Informers,
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
            let controller = controller.clone();
            async move { controller.reconcile(key).await }
        })
        .await;
    }

    async fn reconcile(&self, key: ObjectKey) -> kube::Result<Outcome> {
        let Some(budget) = self.budgets.get(&key) else { return Ok(Outcome::Done) };
        let mut pods = Vec::new();
        if let Some(selector) = selector(&budget) {
            pods = self.pods.list_namespace(&key.namespace);
            pods.retain(|pod| selector.matches(pod.labels()));
        }
        let plan = plan(&budget, &pods, |pod| self.scaled(pod), Timestamp::now());
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

    /// The object that scales a pod's siblings, and its desired number of pods.
    fn scaled(&self, pod: &Pod) -> Scaled {
        let Some(owner) = controller_of(pod) else { return Scaled::Nothing };
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
            "ReplicationController" => self
                .replication
                .get(&key)
                .map(|set| (owner.uid.clone(), set.spec.as_ref().and_then(|spec| spec.replicas))),
            kind => return Scaled::Unscalable(kind.to_owned()),
        };
        replicas
            .map_or(Scaled::Nothing, |(uid, replicas)| Scaled::By { uid, replicas: replicas.unwrap_or(1) })
    }
}
