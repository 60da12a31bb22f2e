//! Carries out the steps of [`super::plan`]: creates, resizes and deletes ReplicaSets, writes the status.

use std::sync::Arc;

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{Deployment, ReplicaSet},
            core::v1::Pod,
        },
        jiff::Timestamp,
    },
    selector::{InvalidSelector, Selector},
};
use mayfly_informer::{
    EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    plan::{DeploymentPlan, plan},
    revisions::{ANNOTATION_DESIRED, ANNOTATION_MAX, ANNOTATION_REVISION, Sets, has_template},
    scaling::{Bounds, Resize, desired, replicas},
    status::{self, CREATE_ERROR},
};
use crate::{
    metadata::{
        BY_CONTROLLER, api_message, by_controller, controller_of, is_gone, only, status_patch, uid,
        with_explicit_nulls,
    },
    owned_pods::Error,
    ownership::Dependents,
    pods::is_finished,
};

/// Rolls every Deployment out.
pub(crate) struct DeploymentController {
    config: Config,
    client: Client,
    deployments: Informer<Deployment>,
    sets: Dependents<ReplicaSet>,
    pods: Informer<Pod>,
    pods_by_controller: Index<Pod>,
}

/// The selector, unless it is invalid or empty: an empty one would select every ReplicaSet of the namespace.
fn selector(deployment: &Deployment) -> Result<Selector, InvalidSelector> {
    let selector = deployment.spec.as_ref().map(|spec| &spec.selector);
    Selector::from_object(selector.unwrap_or(&Default::default()))
}

impl DeploymentController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = informers.of::<Pod>();
        Self {
            config,
            deployments: informers.of(),
            sets: Dependents::create(client.clone(), informers),
            pods_by_controller: pods.index(BY_CONTROLLER, by_controller),
            pods,
            client,
        }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.deployments.synced().await;
            self.sets.objects.synced().await;
            self.pods.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "deployment-controller", None, stop.clone());
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.deployments.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        self.sets.wake_owners(&self.deployments, &queue, |deployment| {
            selector(deployment).ok().filter(|selector| !selector.is_empty())
        });
        self.wake_when_pods_go(&queue);
        let workers_max = self.config.workers_max;
        let controller = Arc::new(self);
        reconcile::run("deployment", queue, workers_max, stop, move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        })
        .await;
    }

    /// A Deployment that recreates waits until the last old pod is removed or has finished.
    fn wake_when_pods_go(&self, queue: &WorkQueue<ObjectKey>) {
        let (sets, queue) = (self.sets.objects.clone(), queue.clone());
        self.pods.handle(move |change| {
            let pod = change.latest();
            if !(matches!(change, mayfly_informer::Change::Deleted(_)) || is_finished(pod)) {
                return;
            }
            let namespace = pod.namespace().unwrap_or_default();
            let set = controller_of(&**pod).filter(|owner| owner.kind == "ReplicaSet");
            let set = set.and_then(|owner| sets.get(&ObjectKey::new(&namespace, &owner.name)));
            let deployment =
                set.as_deref().and_then(controller_of).filter(|owner| owner.kind == "Deployment");
            if let Some(deployment) = deployment {
                queue.add(ObjectKey::new(&namespace, &deployment.name));
            }
        });
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(deployment) = self.deployments.get(&key) else { return Ok(Outcome::Done) };
        let selector = selector(&deployment)?;
        if selector.is_empty() {
            events.warning(
                &*deployment,
                "SelectingAll",
                "This deployment is selecting all pods. A non-empty selector is required.",
            );
            return Ok(Outcome::Done);
        }
        let sets = Sets::of(&deployment, self.sets.claimed(&*deployment, &selector).await?);
        let old_pods = |old: &[Arc<ReplicaSet>]| {
            let mut pods = old.iter().flat_map(|set| self.pods_by_controller.get(uid(&**set)));
            pods.any(|pod| !is_finished(&pod))
        };
        let plan = plan(&deployment, &sets, old_pods, Timestamp::now());
        self.carry_out(&key, &deployment, plan, events).await
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        deployment: &Deployment,
        mut plan: DeploymentPlan,
        events: &EventRecorder,
    ) -> Result<Outcome, Error> {
        let api: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &key.namespace);
        if let Some((set, annotations)) = plan.annotate.take() {
            let min_ready = deployment.spec.as_ref().and_then(|spec| spec.min_ready_seconds);
            let metadata =
                json!({"resourceVersion": set.metadata.resource_version, "annotations": annotations});
            let patch = json!({"metadata": metadata, "spec": {"minReadySeconds": min_ready}});
            api.patch(&set.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
            // The resize below would conflict with this write, whose event starts another reconciliation.
            plan.resize.clear();
        }
        if let Some(set) = plan.create.take() {
            self.create_set(&api, deployment, &set, &mut plan, events).await?;
        }
        for resize in std::mem::take(&mut plan.resize) {
            resize_set(&api, deployment, resize, events).await?;
        }
        for set in &plan.delete {
            let result = api.delete(&set.name_any(), &only(uid(&**set))).await;
            if !is_gone(&result) {
                result?;
            }
        }
        self.write_status(key, deployment, &plan).await?;
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    async fn create_set(
        &self,
        api: &Api<ReplicaSet>,
        deployment: &Deployment,
        set: &ReplicaSet,
        plan: &mut DeploymentPlan,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        match api.create(&PostParams::default(), set).await {
            Ok(created) => {
                let message =
                    format!("Scaled up replica set {} from 0 to {}", created.name_any(), replicas(&created));
                events.normal(deployment, "ScalingReplicaSet", message);
            }
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let known = api.get(&set.name_any()).await?;
                let template = deployment.spec.as_ref().map(|spec| &spec.template);
                let own = controller_of(&known).is_some_and(|owner| owner.uid == uid(deployment));
                if !(own && template.is_some_and(|template| has_template(&known, template))) {
                    // Another template has the same hash: the next attempt has another hash.
                    let count = plan.status.collision_count.unwrap_or(0);
                    plan.status.collision_count = Some(count.saturating_add(1));
                }
            }
            Err(error) => {
                let (name, why) = (set.name_any(), api_message(&error));
                let message = format!("Failed to create new replica set {name:?}: {why}");
                // Informational: the error of the creation is the one that is returned.
                let _ = self.write_creation_failure(deployment, &message).await;
                events.warning(deployment, CREATE_ERROR, message);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Shows in the condition `Progressing` why the new ReplicaSet does not exist.
    async fn write_creation_failure(&self, deployment: &Deployment, message: &str) -> kube::Result<()> {
        let Some(conditions) = status::creation_failed(deployment, message, Timestamp::now()) else {
            return Ok(());
        };
        let namespace = deployment.namespace().unwrap_or_default();
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), &namespace);
        let patch = Patch::Merge(status_patch(deployment, json!({"conditions": conditions})));
        deployments.patch_status(&deployment.name_any(), &PatchParams::default(), &patch).await.map(|_| ())
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        deployment: &Deployment,
        plan: &DeploymentPlan,
    ) -> Result<(), Error> {
        if deployment.status.as_ref() == Some(&plan.status) && plan.revision.is_none() {
            return Ok(());
        }
        let optional = [
            "replicas",
            "updatedReplicas",
            "readyReplicas",
            "availableReplicas",
            "unavailableReplicas",
            "conditions",
        ];
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut patch = status_patch(deployment, with_explicit_nulls(&plan.status, &optional));
        // As upstream, the status carries the revision: one write for both.
        if let Some(revision) = &plan.revision {
            patch["metadata"]["annotations"] = json!({ANNOTATION_REVISION: revision});
        }
        let patch = Patch::Merge(patch);
        let result = deployments.patch_status(&key.name, &PatchParams::default(), &patch).await;
        if !is_gone(&result) {
            result?;
        }
        Ok(())
    }
}

/// Resizes a ReplicaSet, conditional on the version that was planned from.
async fn resize_set(
    api: &Api<ReplicaSet>,
    deployment: &Deployment,
    (set, size): Resize,
    events: &EventRecorder,
) -> Result<(), Error> {
    let annotations = json!({
        ANNOTATION_DESIRED: desired(deployment).to_string(),
        ANNOTATION_MAX: Bounds::of(deployment).max().to_string()});
    let patch = json!({
        "metadata": {"resourceVersion": set.metadata.resource_version, "annotations": annotations},
        "spec": {"replicas": size}});
    api.patch(&set.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    let (name, before) = (set.name_any(), replicas(&set));
    if before != size {
        let direction = if size > before { "up" } else { "down" };
        let message = format!("Scaled {direction} replica set {name} from {before} to {size}");
        events.normal(deployment, "ScalingReplicaSet", message);
    }
    Ok(())
}
