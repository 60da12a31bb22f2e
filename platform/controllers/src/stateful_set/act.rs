//! Carries out the steps of [`super::plan`]: creates and deletes pods, claims and revisions.

use std::{collections::BTreeSet, sync::Arc};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{ControllerRevision, StatefulSet},
            core::v1::{PersistentVolumeClaim, Pod, PodTemplateSpec},
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
    claims::{is_doomed, owners},
    identity::{claim_names, is_claim_of, is_own, new_claims, new_pod, ordinal, pod_name},
    plan::{Revisions, StatefulSetPlan, ordinals, plan},
};
use crate::{
    history::{self, LABEL_REVISION_HASH, RevisionHistory, template},
    metadata::{api_message, is_gone, status_patch, uid, with_explicit_nulls},
    owned_pods::{Error, OwnedPods, PodOwner, PodVerb},
    ownership::Dependents,
};

/// Keeps the pods of every StatefulSet.
pub(crate) struct StatefulSetController {
    config: Config,
    client: Client,
    owned: Arc<OwnedPods<StatefulSet>>,
    revisions: Dependents<ControllerRevision>,
    claims: Informer<PersistentVolumeClaim>,
}

impl PodOwner for StatefulSet {
    const FINALIZER: Option<&'static str> = None;

    fn selector(&self) -> Result<Selector, InvalidSelector> {
        let selector = self.spec.as_ref().map(|spec| &spec.selector);
        Selector::from_object(selector.unwrap_or(&Default::default()))
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default()
    }

    fn event_message(&self, verb: PodVerb, pod: &str, error: Option<&str>) -> String {
        let verb = match verb {
            PodVerb::Create => "create",
            PodVerb::Delete => "delete",
        };
        let set = self.name_any();
        match error {
            None => format!("{verb} Pod {pod} in StatefulSet {set} successful"),
            Some(error) => format!("{verb} Pod {pod} in StatefulSet {set} failed error: {error}"),
        }
    }
}

impl StatefulSetController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let owned = OwnedPods::create(client.clone(), informers);
        let revisions = Dependents::create(client.clone(), informers);
        Self { config, owned, revisions, claims: informers.of(), client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.revisions.objects.synced().await;
            self.claims.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "statefulset-controller", None, stop.clone());
        let queue = WorkQueue::default();
        self.wake_when_claims_go(&queue);
        let (owned, workers_max) = (self.owned.clone(), self.config.workers_max);
        let controller = Arc::new(self);
        let reconcile = move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        };
        owned.run_with("statefulset", queue, workers_max, stop, reconcile).await;
    }

    /// A pod that has not started gets its claims again, and a new pod waits until no claim belongs to an earlier one.
    fn wake_when_claims_go(&self, queue: &WorkQueue<ObjectKey>) {
        let (sets, queue) = (self.owned.owners.clone(), queue.clone());
        self.claims.handle(move |change| {
            let claim = change.latest();
            let is_relevant = match &change {
                Change::Deleted(_) => true,
                Change::Updated { old, new } => old.owner_references() != new.owner_references(),
                Change::Added(_) => false,
            };
            if !is_relevant {
                return;
            }
            for set in sets.list_namespace(&claim.namespace().unwrap_or_default()) {
                if is_claim_of(&set, &claim.name_any()) {
                    queue.add(ObjectKey::of(&*set));
                }
            }
        });
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(set) = self.owned.owners.get(&key) else {
            self.owned.forget(&key);
            return Ok(Outcome::Done);
        };
        if let Some(later) = self.owned.unsettled(&key) {
            return Ok(later);
        }
        let mut pods = self.owned.claimed(&set).await?;
        pods.retain(|pod| is_own(&set, pod) && ordinal(&set, pod).is_some());
        let selector = set.selector()?;
        let history = RevisionHistory::of(self.revisions.claimed(&*set, &selector).await?);
        let collisions = set.status.as_ref().and_then(|status| status.collision_count);
        let newest = history.newest(&*set, &set.template(), collisions, true);
        let Some(update) = history::ensure(&self.client, &key.namespace, newest).await? else {
            let status = json!({"collisionCount": collisions.unwrap_or(0).saturating_add(1)});
            let patch = Patch::Merge(status_patch(&*set, status));
            let sets: Api<StatefulSet> = Api::namespaced(self.client.clone(), &key.namespace);
            sets.patch_status(&key.name, &PatchParams::default(), &patch).await?;
            return Ok(Outcome::Done);
        };
        let known = set.status.as_ref().and_then(|status| status.current_revision.clone());
        let current = known.and_then(|name| history.find(&name).cloned()).unwrap_or_else(|| update.clone());
        let revisions = Revisions { current: current.name_any(), update: update.name_any() };
        let plan = plan(&set, &revisions, &pods, Timestamp::now());
        let mut used: BTreeSet<String> =
            pods.iter().filter_map(|pod| pod.labels().get(LABEL_REVISION_HASH).cloned()).collect();
        used.extend([revisions.current.clone(), revisions.update.clone()]);
        if set.metadata.deletion_timestamp.is_none() {
            self.keep_claims(&key, &set, &pods, events).await?;
        }
        let again = self.carry_out(&key, &set, plan, (&current, &update), events).await?;
        let limit = set.spec.as_ref().and_then(|spec| spec.revision_history_limit);
        history::delete(&self.client, &key.namespace, &history.surplus(limit, &used)).await?;
        Ok(again)
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        set: &Arc<StatefulSet>,
        plan: StatefulSetPlan,
        (current, update): (&ControllerRevision, &ControllerRevision),
        events: &EventRecorder,
    ) -> Result<Outcome, Error> {
        // Written even if a pod could not be created or deleted, so that clients see which generation is observed.
        let changed = self.change_pods(key, set, &plan, (current, update), events).await;
        if set.status.as_ref() != Some(&plan.status) {
            let sets: Api<StatefulSet> = Api::namespaced(self.client.clone(), &key.namespace);
            let patch = Patch::Merge(status_patch(&**set, with_explicit_nulls(&plan.status, &[])));
            let result = sets.patch_status(&key.name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        changed?;
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    async fn change_pods(
        &self,
        key: &ObjectKey,
        set: &Arc<StatefulSet>,
        plan: &StatefulSetPlan,
        (current, update): (&ControllerRevision, &ControllerRevision),
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let mut wanted = Vec::new();
        for (ordinal, updated) in plan.create.iter().copied() {
            let name = pod_name(set, ordinal);
            if self.claims_of(key, set, ordinal).any(|claim| is_doomed(&claim, &name)) {
                // Their deletion starts another reconciliation.
                continue;
            }
            self.create_claims(key, set, ordinal, events).await?;
            let revision = if updated { update } else { current };
            let template = template(revision).unwrap_or_else(|| set.template());
            wanted.push(new_pod(set, template, &revision.name_any(), ordinal));
        }
        if !wanted.is_empty() {
            self.owned.create_pods(&**set, &wanted, events).await?;
        }
        if !plan.delete.is_empty() {
            self.owned.delete_pods(&**set, &plan.delete, events).await?;
        }
        Ok(())
    }

    async fn create_claims(
        &self,
        key: &ObjectKey,
        set: &StatefulSet,
        ordinal: i32,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        let message = |claim: &PersistentVolumeClaim, result: &str| {
            let (claim, pod) = (claim.name_any(), pod_name(set, ordinal));
            format!("create Claim {claim} Pod {pod} in StatefulSet {} {result}", set.name_any())
        };
        for claim in new_claims(set, ordinal) {
            match claims.create(&PostParams::default(), &claim).await {
                Ok(_) => events.normal(set, "SuccessfulCreate", message(&claim, "success")),
                Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                Err(error) => {
                    let why = format!("failed error: {}", api_message(&error));
                    events.warning(set, "FailedCreate", message(&claim, &why));
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// The known claims of one pod.
    fn claims_of(
        &self,
        key: &ObjectKey,
        set: &StatefulSet,
        ordinal: i32,
    ) -> impl Iterator<Item = Arc<PersistentVolumeClaim>> {
        let names = claim_names(set, ordinal).into_iter();
        names.filter_map(move |name| self.claims.get(&ObjectKey::new(&key.namespace, &name)))
    }

    /// Gives the claims of the pods the owners that the retention policy asks for, and pods that have not started the
    /// claims that they lack.
    async fn keep_claims(
        &self,
        key: &ObjectKey,
        set: &StatefulSet,
        pods: &[Arc<Pod>],
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        let wanted = set.spec.as_ref().map(ordinals).unwrap_or_default();
        for pod in pods {
            let Some(ordinal) = ordinal(set, pod) else { continue };
            let is_surplus = !wanted.contains(&ordinal);
            let mut known = 0;
            for claim in self.claims_of(key, set, ordinal) {
                known += 1;
                let Some(owners) = owners(set, pod, is_surplus, &claim) else { continue };
                let metadata = json!({"uid": uid(&*claim),
                    "resourceVersion": claim.metadata.resource_version, "ownerReferences": owners});
                let patch = Patch::Merge(json!({"metadata": metadata}));
                let result = api.patch(&claim.name_any(), &PatchParams::default(), &patch).await;
                if !is_gone(&result) {
                    result?;
                }
            }
            let is_pending =
                pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Pending");
            let is_starting = is_pending && !is_surplus && pod.metadata.deletion_timestamp.is_none();
            if is_starting && known < claim_names(set, ordinal).len() {
                self.create_claims(key, set, ordinal, events).await?;
            }
        }
        Ok(())
    }
}
