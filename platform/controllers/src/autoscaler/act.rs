//! Carries out the steps of [`super::plan`]: reads scales and metrics, writes scales and statuses.

use std::{collections::HashMap, sync::Arc};

use futures::future::join_all;
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::{Deployment, ReplicaSet, StatefulSet},
            autoscaling::{
                v1::Scale,
                v2::{
                    CrossVersionObjectReference, HorizontalPodAutoscaler, HorizontalPodAutoscalerStatus,
                    MetricSpec, MetricTarget, ResourceMetricSource,
                },
            },
            core::v1::{Pod, ReplicationController},
        },
        apimachinery::pkg::apis::meta::v1::Time,
        jiff::Timestamp,
    },
    selector::Selector,
};
use mayfly_informer::{
    EventRecorder, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    behavior::ScalingHistory,
    metrics::{ScaleTarget, evaluate},
    plan::{ABLE_TO_SCALE, AutoscalerPlan, GOT_SCALE, SCALING_ACTIVE, plan, set, status},
};
use crate::metadata::{api_message, is_gone, status_patch, with_explicit_nulls};

/// Scales the targets of all HorizontalPodAutoscalers.
pub(crate) struct AutoscalerController {
    config: Config,
    client: Client,
    autoscalers: Informer<HorizontalPodAutoscaler>,
    pods: Informer<Pod>,
    /// Histories by autoscaler, removed with it.
    histories: Mutex<HashMap<ObjectKey, ScalingHistory>>,
    /// The selectors of the targets' pods by autoscaler.
    selectors: Mutex<HashMap<ObjectKey, Selector>>,
}

/// The reason why a target's selector cannot be used: the event's reason, the condition's, and their messages.
struct SelectorFailure {
    event: &'static str,
    reason: &'static str,
    message: String,
    condition: String,
}

/// One evaluation of one autoscaler.
struct Evaluation<'a> {
    key: &'a ObjectKey,
    autoscaler: &'a HorizontalPodAutoscaler,
    /// The target's name, and the API of its kind.
    target: &'a str,
    api: Api<DynamicObject>,
    events: &'a EventRecorder,
    now: Timestamp,
}

impl AutoscalerController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self {
            config,
            client,
            autoscalers: informers.of(),
            pods: informers.of(),
            histories: Mutex::default(),
            selectors: Mutex::default(),
        }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.autoscalers.synced().await;
            self.pods.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events =
            EventRecorder::start(self.client.clone(), "horizontal-pod-autoscaler", None, stop.clone());
        let queue = WorkQueue::default();
        let (changed, every) = (queue.clone(), self.config.every);
        self.autoscalers.handle(move |change| {
            let key = ObjectKey::of(&**change.latest());
            match change {
                // As upstream, a new autoscaler acts after one interval, and a changed one at its next turn.
                mayfly_informer::Change::Added(_) => changed.add_after(key, every),
                mayfly_informer::Change::Updated { .. } => {}
                mayfly_informer::Change::Deleted(_) => changed.add(key),
            }
        });
        let workers_max = self.config.workers_max;
        let controller = Arc::new(self);
        reconcile::run("horizontalpodautoscaler", queue, workers_max, stop, move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        })
        .await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> kube::Result<Outcome> {
        let Some(autoscaler) = self.autoscalers.get(&key) else {
            self.histories.lock().remove(&key);
            self.selectors.lock().remove(&key);
            return Ok(Outcome::Done);
        };
        let now = Timestamp::now();
        let target = autoscaler.spec.as_ref().map(|spec| spec.scale_target_ref.clone()).unwrap_or_default();
        match self.scale_of(&key.namespace, &target).await {
            Ok((api, scale)) => {
                let (key, autoscaler, target) = (&key, &autoscaler, target.name.as_str());
                self.evaluate(Evaluation { key, autoscaler, target, api, events, now }, scale).await?;
            }
            Err(error) => {
                let error = api_message(&error);
                events.warning(&*autoscaler, "FailedGetScale", error.clone());
                let mut status = status(&autoscaler);
                let message =
                    format!("the HPA controller was unable to get the target's current scale: {error}");
                set(&mut status, ABLE_TO_SCALE, "False", "FailedGetScale", &message, now);
                self.write_status(&key, &autoscaler, &status).await?;
            }
        }
        Ok(Outcome::RequeueAfter(self.config.every))
    }

    async fn scale_of(
        &self,
        namespace: &str,
        target: &CrossVersionObjectReference,
    ) -> kube::Result<(Api<DynamicObject>, Scale)> {
        let resource = match target.kind.as_str() {
            "Deployment" => ApiResource::erase::<Deployment>(&()),
            "ReplicaSet" => ApiResource::erase::<ReplicaSet>(&()),
            "StatefulSet" => ApiResource::erase::<StatefulSet>(&()),
            "ReplicationController" => ApiResource::erase::<ReplicationController>(&()),
            kind => {
                let text = target.api_version.as_deref().unwrap_or("v1");
                let (group, version) = text.split_once('/').unwrap_or(("", text));
                let kind = GroupVersionKind::gvk(group, version, kind);
                kube::discovery::pinned_kind(&self.client, &kind).await?.0
            }
        };
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        let scale = api.get_scale(&target.name).await?;
        Ok((api, scale))
    }

    async fn evaluate(&self, evaluation: Evaluation<'_>, scale: Scale) -> kube::Result<()> {
        let Evaluation { key, autoscaler, now, .. } = evaluation;
        let current = scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(0);
        let shown = scale.status.as_ref().map_or(0, |status| status.replicas);
        let text = scale.status.as_ref().and_then(|status| status.selector.clone()).unwrap_or_default();
        let (selector, pods) = match self.selected_pods(key, &text) {
            Ok(selected) => selected,
            Err(SelectorFailure { event, reason, message, condition }) => {
                evaluation.events.warning(autoscaler, event, message.clone());
                evaluation.events.warning(autoscaler, "FailedComputeMetricsReplicas", message);
                let mut status = status(autoscaler);
                status.current_replicas = Some(shown);
                set(&mut status, ABLE_TO_SCALE, "True", "SucceededGetScale", GOT_SCALE, now);
                set(&mut status, SCALING_ACTIVE, "False", reason, &condition, now);
                return self.write_status(key, autoscaler, &status).await;
            }
        };
        self.selectors.lock().insert(key.clone(), selector);
        let context = ScaleTarget {
            namespace: &key.namespace,
            selector: &text,
            current,
            status_replicas: shown,
            pods: &pods,
        };
        let metrics = metrics(autoscaler);
        let evaluations =
            metrics.iter().map(|metric| evaluate(&self.client, metric, &context, &self.config, now));
        let evaluated = join_all(evaluations).await;
        let plan = {
            let mut histories = self.histories.lock();
            plan(autoscaler, (current, shown), evaluated, histories.entry(key.clone()).or_default(), now)
        };
        self.carry_out(evaluation, current, plan).await
    }

    /// The pods that the target's selector selects. They must belong to this autoscaler alone.
    fn selected_pods(
        &self,
        key: &ObjectKey,
        text: &str,
    ) -> Result<(Selector, Vec<Arc<Pod>>), SelectorFailure> {
        let failure = |event, message: String| {
            let condition = message.clone();
            SelectorFailure { event, reason: event, message, condition }
        };
        let selector = Selector::parse(text).map_err(|error| {
            let message =
                format!("couldn't convert selector into a corresponding internal selector object: {error}");
            failure("InvalidSelector", message)
        })?;
        if selector.is_empty() {
            return Err(SelectorFailure {
                event: "SelectorRequired",
                reason: "InvalidSelector",
                message: "selector is required".into(),
                condition: "the HPA target's scale is missing a selector".into(),
            });
        }
        let mut pods = self.pods.list_namespace(&key.namespace);
        pods.retain(|pod| selector.matches(pod.labels()));
        let selectors = self.selectors.lock();
        let others = selectors.iter().filter(|(other, selector)| {
            other.namespace == key.namespace
                && *other != key
                && pods.iter().any(|pod| selector.matches(pod.labels()))
        });
        let mut names: Vec<_> = others.map(|(other, _)| other.to_string()).collect();
        if names.is_empty() {
            return Ok((selector, pods));
        }
        names.push(key.to_string());
        names.sort();
        let names = names.join(" ");
        let message = format!("pods by selector {text} are controlled by multiple HPAs: [{names}]");
        Err(failure("AmbiguousSelector", message))
    }

    async fn carry_out(
        &self,
        evaluation: Evaluation<'_>,
        current: i32,
        mut plan: AutoscalerPlan,
    ) -> kube::Result<()> {
        let Evaluation { key, autoscaler, target, api, events, now } = evaluation;
        for failure in &plan.failures {
            events.warning(autoscaler, failure.reason, failure.message.clone());
        }
        if let Some(first) = plan.failures.first() {
            let message = format!(
                "invalid metrics ({} invalid out of {}), first error is: {}",
                plan.failures.len(),
                plan.metrics,
                first.summary
            );
            events.warning(autoscaler, "FailedComputeMetricsReplicas", message);
        }
        if plan.replicas != current {
            let patch = Patch::Merge(json!({"spec": {"replicas": plan.replicas}}));
            if let Err(error) = api.patch_scale(target, &PatchParams::default(), &patch).await {
                let message = format!(
                    "the HPA controller was unable to update the target scale: {}",
                    api_message(&error)
                );
                events.warning(autoscaler, "FailedRescale", message.clone());
                set(&mut plan.status, ABLE_TO_SCALE, "False", "FailedUpdateScale", &message, now);
                plan.status.desired_replicas = current;
                self.write_status(key, autoscaler, &plan.status).await?;
                return Err(error);
            }
            let message = format!("New size: {}; reason: {}", plan.replicas, plan.reason);
            events.normal(autoscaler, "SuccessfulRescale", message);
            let message =
                format!("the HPA controller was able to update the target scale to {}", plan.replicas);
            set(&mut plan.status, ABLE_TO_SCALE, "True", "SucceededRescale", &message, now);
            plan.status.last_scale_time = Some(Time(now));
            self.histories.lock().entry(key.clone()).or_default().scaled(current, plan.replicas, now);
        }
        self.write_status(key, autoscaler, &plan.status).await
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        autoscaler: &HorizontalPodAutoscaler,
        status: &HorizontalPodAutoscalerStatus,
    ) -> kube::Result<()> {
        if autoscaler.status.as_ref() == Some(status) {
            return Ok(());
        }
        let api: Api<HorizontalPodAutoscaler> = Api::namespaced(self.client.clone(), &key.namespace);
        let status = with_explicit_nulls(status, &["currentMetrics", "lastScaleTime"]);
        let patch = Patch::Merge(status_patch(autoscaler, status));
        let result = api.patch_status(&key.name, &PatchParams::default(), &patch).await;
        if !is_gone(&result) {
            result?;
        }
        Ok(())
    }
}

/// The metrics of an autoscaler; without any, 80 % of the requested CPU.
fn metrics(autoscaler: &HorizontalPodAutoscaler) -> Vec<MetricSpec> {
    let metrics = autoscaler.spec.as_ref().and_then(|spec| spec.metrics.clone()).unwrap_or_default();
    if !metrics.is_empty() {
        return metrics;
    }
    let target = MetricTarget {
        type_: "Utilization".into(),
        average_utilization: Some(80),
        ..MetricTarget::default()
    };
    let resource = Some(ResourceMetricSource { name: "cpu".into(), target });
    vec![MetricSpec { type_: "Resource".into(), resource, ..MetricSpec::default() }]
}
