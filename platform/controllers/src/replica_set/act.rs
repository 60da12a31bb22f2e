//! Creates, deletes and reports, as [`super::plan`] says.

use std::{sync::Arc, time::Duration};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::ReplicaSet,
            core::v1::{Pod, PodTemplateSpec},
        },
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
    metadata::is_gone,
    owned_pods::{Error, OwnedPods, Owner, new_pod},
};

/// Keeps the number of every ReplicaSet's pods.
pub(crate) struct Controller {
    config: Config,
    client: Client,
    owned: Arc<OwnedPods<ReplicaSet>>,
}

impl Owner for ReplicaSet {
    const FINALIZER: Option<&'static str> = None;

    fn selector(&self) -> Result<Selector, InvalidSelector> {
        let selector = self.spec.as_ref().map(|spec| &spec.selector);
        Selector::from_object(selector.unwrap_or(&Default::default()))
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default()
    }
}

impl Controller {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self { config, owned: OwnedPods::create(client.clone(), informers), client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let events = EventRecorder::start(self.client.clone(), "replicaset-controller", None, stop.clone());
        let (owned, workers_max) = (self.owned.clone(), self.config.workers_max);
        let controller = Arc::new(self);
        let reconcile = move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        };
        owned.run("replicaset", workers_max, stop, reconcile).await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(set) = self.owned.owners.get(&key) else {
            self.owned.forget(&key);
            return Ok(Outcome::Done);
        };
        if let Some(later) = self.owned.unsettled(&key) {
            return Ok(later);
        }
        let pods = self.owned.claimed(&set).await?;
        let result = match plan::scale(&set, &pods, self.config.burst_max) {
            Scale::Nothing => Ok(()),
            Scale::Create(count) => self.owned.create_pods(&*set, &vec![new_pod(&*set); count], events).await,
            Scale::Delete(doomed) => self.owned.delete_pods(&*set, &doomed, events).await,
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
            let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &key.namespace);
            // Spelled out, so that the last condition can be taken away.
            let mut value = json!(status);
            value["conditions"] = json!(status.conditions);
            let patch = Patch::Merge(json!({"status": value}));
            let result = sets.patch_status(&key.name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(again)
    }
}
