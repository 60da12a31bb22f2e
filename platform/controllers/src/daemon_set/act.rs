//! Carries out the steps of [`super::plan`]: creates and deletes pods and revisions, writes the status.

use std::{collections::BTreeSet, sync::Arc};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{ControllerRevision, DaemonSet},
            core::v1::{Node, Pod, PodTemplateSpec},
        },
        jiff::Timestamp,
    },
    selector::{InvalidSelector, Selector},
};
use mayfly_informer::{
    Change, EventRecorder, Informer, Informers,
    reconcile::{Outcome, WorkQueue},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    plan::{DaemonSetPlan, plan},
    pods::{fits, new_pod},
};
use crate::{
    history::{self, LABEL_REVISION_HASH, RevisionHistory, revision_label},
    metadata::{is_gone, status_patch, with_explicit_nulls},
    owned_pods::{Error, OwnedPods, PodOwner},
    ownership::Dependents,
};

/// Keeps a pod of every DaemonSet on every node that it fits.
pub(crate) struct DaemonSetController {
    config: Config,
    client: Client,
    owned: Arc<OwnedPods<DaemonSet>>,
    nodes: Informer<Node>,
    revisions: Dependents<ControllerRevision>,
}

impl PodOwner for DaemonSet {
    const FINALIZER: Option<&'static str> = None;

    fn selector(&self) -> Result<Selector, InvalidSelector> {
        let selector = self.spec.as_ref().map(|spec| &spec.selector);
        Selector::from_object(selector.unwrap_or(&Default::default()))
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default()
    }
}

/// Whether a node changed in a field that decides which pods fit. Its status, which changes all the time, does not
/// count.
fn fit_changed(change: &Change<'_, Node>) -> bool {
    match change {
        Change::Updated { old, new } => {
            old.metadata.labels != new.metadata.labels
                || old.spec.as_ref().map(|spec| (&spec.taints, spec.unschedulable))
                    != new.spec.as_ref().map(|spec| (&spec.taints, spec.unschedulable))
        }
        Change::Added(_) | Change::Deleted(_) => true,
    }
}

/// The event about a pod that is deleted because it has ended: whether it is a warning, its reason and message.
pub(super) fn ended_event(pod: &Pod) -> Option<(bool, &'static str, String)> {
    let place = || {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        format!("{}/{} on node {node}", pod.namespace().unwrap_or_default(), pod.name_any())
    };
    match pod.status.as_ref()?.phase.as_deref()? {
        "Failed" => {
            let message = format!("Found failed daemon pod {}, will try to kill it", place());
            Some((true, "FailedDaemonPod", message))
        }
        "Succeeded" => {
            let message = format!("Found succeeded daemon pod {}, will try to delete it", place());
            Some((false, "SucceededDaemonPod", message))
        }
        _ => None,
    }
}

impl DaemonSetController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let owned = OwnedPods::create(client.clone(), informers);
        let revisions = Dependents::create(client.clone(), informers);
        Self { config, owned, nodes: informers.of(), revisions, client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.revisions.objects.synced().await;
            self.nodes.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "daemonset-controller", None, stop.clone());
        let queue = WorkQueue::default();
        let (changed, sets) = (queue.clone(), self.owned.owners.clone());
        self.nodes.handle(move |change| {
            if fit_changed(&change) {
                sets.keys().into_iter().for_each(|key| changed.add(key));
            }
        });
        let (owned, workers_max) = (self.owned.clone(), self.config.workers_max);
        let controller = Arc::new(self);
        let reconcile = move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        };
        owned.run_with("daemonset", queue, workers_max, stop, reconcile).await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(set) = self.owned.owners.get(&key) else {
            self.owned.forget(&key);
            return Ok(Outcome::Done);
        };
        // As upstream: its revisions may be deleted before its pods, so that its status cannot be computed any more.
        if set.metadata.deletion_timestamp.is_some() {
            return Ok(Outcome::Done);
        }
        if let Some(later) = self.owned.unsettled(&key) {
            return Ok(later);
        }
        let selector = set.selector()?;
        if selector.is_empty() {
            events.warning(
                &*set,
                "SelectingAll",
                "This daemon set is selecting all pods. A non-empty selector is required.",
            );
            return Ok(Outcome::Done);
        }
        let pods = self.owned.claimed(&set).await?;
        let history = RevisionHistory::of(self.revisions.claimed(&*set, &selector).await?);
        let collisions = set.status.as_ref().and_then(|status| status.collision_count);
        let newest = history.newest(&*set, &set.template(), collisions, false);
        let Some(revision) = history::ensure(&self.client, &key.namespace, newest).await? else {
            let status = json!({"collisionCount": collisions.unwrap_or(0).saturating_add(1)});
            let patch = Patch::Merge(status_patch(&*set, status));
            let sets: Api<DaemonSet> = Api::namespaced(self.client.clone(), &key.namespace);
            sets.patch_status(&key.name, &PatchParams::default(), &patch).await?;
            return Ok(Outcome::Done);
        };
        let nodes = self.nodes.list();
        let fits = fits(&set, nodes.iter().map(|node| &**node));
        let hash = revision_label(&revision);
        let plan = plan(&set, &hash, &fits, &pods, Timestamp::now());
        let mut used: BTreeSet<String> =
            pods.iter().filter_map(|pod| pod.labels().get(LABEL_REVISION_HASH).cloned()).collect();
        used.insert(hash.clone());
        let again = self.carry_out(&key, &set, plan, &hash, events).await?;
        let limit = set.spec.as_ref().and_then(|spec| spec.revision_history_limit);
        history::delete(&self.client, &key.namespace, &history.surplus(limit, &used)).await?;
        Ok(again)
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        set: &DaemonSet,
        plan: DaemonSetPlan,
        hash: &str,
        events: &EventRecorder,
    ) -> Result<Outcome, Error> {
        if set.status.as_ref() != Some(&plan.status) {
            let optional = ["numberAvailable", "numberUnavailable", "updatedNumberScheduled"];
            let sets: Api<DaemonSet> = Api::namespaced(self.client.clone(), &key.namespace);
            let patch = Patch::Merge(status_patch(set, with_explicit_nulls(&plan.status, &optional)));
            let result = sets.patch_status(&key.name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        let nodes = plan.create.iter().take(self.config.burst_max);
        let wanted: Vec<_> = nodes.map(|node| new_pod(set, node, hash)).collect();
        if !wanted.is_empty() {
            self.owned.create_pods(set, &wanted, events).await?;
        }
        let doomed: Vec<_> = plan.delete.into_iter().take(self.config.burst_max).collect();
        for (is_warning, reason, message) in doomed.iter().filter_map(|pod| ended_event(pod)) {
            match is_warning {
                true => events.warning(set, reason, message),
                false => events.normal(set, reason, message),
            }
        }
        if !doomed.is_empty() {
            self.owned.delete_pods(set, &doomed, events).await?;
        }
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }
}
