//! Carries out the steps of [`super::plan`]: creates and deletes pods, writes the status.

use std::{sync::Arc, time::Duration};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetSpec, ReplicaSetStatus},
            core::v1::{Pod, PodTemplateSpec, ReplicationController, ReplicationControllerCondition},
        },
        apimachinery::pkg::apis::meta::v1::LabelSelector,
        jiff::Timestamp,
    },
    selector::{InvalidSelector, Selector},
};
use mayfly_informer::{EventRecorder, Informers, reconcile::Outcome};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    plan::{self, Scale},
};
use crate::{
    metadata::{is_gone, status_patch},
    owned_pods::{Error, OwnedPods, PodOwner, new_pod},
};

/// Keeps the number of pods of every object of one kind.
pub(crate) struct ReplicaSetController<O> {
    config: Config,
    client: Client,
    owned: Arc<OwnedPods<O>>,
}

/// A kind that keeps a number of pods. It is planned as a ReplicaSet, whose fields have the same meaning.
pub(crate) trait Replicated: PodOwner {
    /// The controller's name in events.
    const COMPONENT: &'static str;

    fn as_replica_set(&self) -> ReplicaSet;
}

impl Replicated for ReplicaSet {
    const COMPONENT: &'static str = "replicaset-controller";

    fn as_replica_set(&self) -> ReplicaSet {
        self.clone()
    }
}

impl Replicated for ReplicationController {
    const COMPONENT: &'static str = "replication-controller";

    fn as_replica_set(&self) -> ReplicaSet {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().map(|status| ReplicaSetStatus {
            available_replicas: status.available_replicas,
            conditions: status.conditions.map(|all| all.into_iter().map(replica_condition).collect()),
            fully_labeled_replicas: status.fully_labeled_replicas,
            observed_generation: status.observed_generation,
            ready_replicas: status.ready_replicas,
            replicas: status.replicas,
            terminating_replicas: None,
        });
        ReplicaSet {
            metadata: self.metadata.clone(),
            spec: Some(ReplicaSetSpec {
                min_ready_seconds: spec.min_ready_seconds,
                replicas: spec.replicas,
                selector: LabelSelector { match_labels: spec.selector, match_expressions: None },
                template: spec.template,
            }),
            status,
        }
    }
}

fn replica_condition(condition: ReplicationControllerCondition) -> ReplicaSetCondition {
    ReplicaSetCondition {
        last_transition_time: condition.last_transition_time,
        message: condition.message,
        reason: condition.reason,
        status: condition.status,
        type_: condition.type_,
    }
}

impl PodOwner for ReplicationController {
    const FINALIZER: Option<&'static str> = None;

    fn selector(&self) -> Result<Selector, InvalidSelector> {
        let match_labels = self.spec.as_ref().and_then(|spec| spec.selector.clone());
        Selector::from_object(&LabelSelector { match_labels, match_expressions: None })
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default()
    }
}

impl PodOwner for ReplicaSet {
    const FINALIZER: Option<&'static str> = None;

    fn selector(&self) -> Result<Selector, InvalidSelector> {
        let selector = self.spec.as_ref().map(|spec| &spec.selector);
        Selector::from_object(selector.unwrap_or(&Default::default()))
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default()
    }
}

impl<O: Replicated> ReplicaSetController<O> {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self { config, owned: OwnedPods::create(client.clone(), informers), client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let events = EventRecorder::start(self.client.clone(), O::COMPONENT, None, stop.clone());
        let (owned, workers_max) = (self.owned.clone(), self.config.workers_max);
        let controller = Arc::new(self);
        let reconcile = move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        };
        owned.run(O::COMPONENT, workers_max, stop, reconcile).await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(owner) = self.owned.owners.get(&key) else {
            self.owned.forget(&key);
            return Ok(Outcome::Done);
        };
        if let Some(later) = self.owned.unsettled(&key) {
            return Ok(later);
        }
        let pods = self.owned.claimed(&owner).await?;
        let set = owner.as_replica_set();
        let result = match plan::scale(&set, &pods, self.config.burst_max) {
            Scale::Nothing => Ok(()),
            Scale::Create(count) => {
                self.owned.create_pods(&*owner, &vec![new_pod(&*owner); count], events).await
            }
            Scale::Delete(doomed) => self.owned.delete_pods(&*owner, &doomed, events).await,
        };
        let failure = result.as_ref().err().map(ToString::to_string);
        let again = self.write_status(&key, &set, &pods, failure.as_deref()).await?;
        result?;
        Ok(again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        set: &ReplicaSet,
        owned: &[Arc<Pod>],
        failure: Option<&str>,
    ) -> Result<Option<Duration>, Error> {
        let (status, again) = plan::status(set, owned, failure, Timestamp::now());
        if set.status.as_ref() != Some(&status) {
            let sets: Api<O> = Api::namespaced(self.client.clone(), &key.namespace);
            // Set explicitly, so that a merge patch removes the last condition.
            let mut value = json!(status);
            value["conditions"] = json!(status.conditions);
            let patch = Patch::Merge(status_patch(set, value));
            let result = sets.patch_status(&key.name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(again)
    }
}
