//! Plans a Deployment from the object, its ReplicaSets and the time; pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::apps::v1::{Deployment, DeploymentStatus, ReplicaSet},
    jiff::Timestamp,
};

use super::{
    revisions::{
        ANNOTATION_DESIRED, ANNOTATION_MAX, ANNOTATION_REVISION, Sets, annotations, new_set, next_revision,
        surplus,
    },
    scaling::{
        Bounds, Resize, desired, is_recreate, new_size, number, proportional, replicas, shrink_old, total,
        was_scaled,
    },
    status,
};

/// The writes, in this order. At most one of the parts that change ReplicaSets' sizes is set.
#[derive(Debug, Default)]
pub(super) struct DeploymentPlan {
    /// Annotations and readiness time that the new ReplicaSet lacks.
    pub(super) annotate: Option<(Arc<ReplicaSet>, BTreeMap<String, String>)>,
    /// The revision number that the Deployment does not carry yet.
    pub(super) revision: Option<String>,
    pub(super) create: Option<ReplicaSet>,
    /// Sizes, and with them the annotations of [`resized`].
    pub(super) resize: Vec<Resize>,
    pub(super) delete: Vec<Arc<ReplicaSet>>,
    pub(super) status: DeploymentStatus,
    /// Examine the Deployment again after this time.
    pub(super) again: Option<Duration>,
}

/// `old_pods`: whether a pod of a ReplicaSet other than the new one still exists and has not finished.
pub(super) fn plan(
    deployment: &Deployment,
    sets: &Sets,
    old_pods: impl Fn(&[Arc<ReplicaSet>]) -> bool,
    now: Timestamp,
) -> DeploymentPlan {
    let bounds = Bounds::of(deployment);
    let mut plan = DeploymentPlan::default();
    if deployment.metadata.deletion_timestamp.is_some() {
        let old = deployment.status.clone().unwrap_or_default();
        plan.status = status::summary(deployment, old, sets, bounds, now);
        return plan;
    }
    let paused = deployment.spec.as_ref().is_some_and(|spec| spec.paused == Some(true));
    let old = status::with_pause(deployment, paused, now);
    let next = next_revision(sets);
    if let Some(new) = &sets.new {
        let wanted = annotations(deployment, new, next);
        let revision = wanted.as_ref().unwrap_or(new.annotations()).get(ANNOTATION_REVISION).cloned();
        plan.revision =
            revision.filter(|number| deployment.annotations().get(ANNOTATION_REVISION) != Some(number));
        let wanted = wanted.or_else(|| (!has_min_ready(deployment, new)).then(|| new.annotations().clone()));
        plan.annotate = wanted.map(|wanted| (new.clone(), wanted));
    }
    if paused || was_scaled(deployment, sets) {
        plan.resize = changed(deployment, bounds, proportional(deployment, sets, bounds));
        if paused {
            plan.delete = surplus(deployment, &sets.old);
        }
        plan.status = status::summary(deployment, old, sets, bounds, now);
        return plan;
    }
    if is_recreate(deployment) {
        recreate(deployment, sets, bounds, next, old_pods, &mut plan);
    } else {
        roll(deployment, sets, bounds, next, &mut plan);
    }
    plan.status = status::summary(deployment, old, sets, bounds, now);
    plan.again = status::note_progress(deployment, sets, plan.create.as_ref(), &mut plan.status, now);
    if status::is_complete(deployment, &plan.status) {
        plan.delete = surplus(deployment, &sets.old);
    }
    plan
}

/// Whether the ReplicaSet waits as long for its pods as the Deployment does. The time is no part of the template.
fn has_min_ready(deployment: &Deployment, set: &ReplicaSet) -> bool {
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.min_ready_seconds);
    let known = set.spec.as_ref().and_then(|spec| spec.min_ready_seconds);
    wanted.unwrap_or(0) == known.unwrap_or(0)
}

fn roll(deployment: &Deployment, sets: &Sets, bounds: Bounds, next: i64, plan: &mut DeploymentPlan) {
    let size = new_size(sets, sets.new.as_ref().map_or(0, |set| replicas(set)), false, bounds);
    let Some(new) = &sets.new else {
        plan.revision = differing(deployment, next);
        plan.create = Some(new_set(deployment, next, size, bounds.max()));
        return;
    };
    plan.resize = changed(deployment, bounds, vec![(new.clone(), size)]);
    if replicas(new) == size {
        plan.resize.extend(shrink_old(sets, bounds));
    }
}

fn recreate(
    deployment: &Deployment,
    sets: &Sets,
    bounds: Bounds,
    next: i64,
    old_pods: impl Fn(&[Arc<ReplicaSet>]) -> bool,
    plan: &mut DeploymentPlan,
) {
    if total(sets.old.iter()) > 0 {
        plan.resize = sets.old.iter().filter(|set| replicas(set) > 0).map(|set| (set.clone(), 0)).collect();
        return;
    }
    if old_pods(&sets.old) {
        return;
    }
    match &sets.new {
        None => {
            plan.revision = differing(deployment, next);
            plan.create = Some(new_set(deployment, next, bounds.replicas, bounds.max()));
        }
        Some(new) => plan.resize = changed(deployment, bounds, vec![(new.clone(), bounds.replicas)]),
    }
}

fn differing(deployment: &Deployment, next: i64) -> Option<String> {
    let next = next.to_string();
    (deployment.annotations().get(ANNOTATION_REVISION) != Some(&next)).then_some(next)
}

/// The ReplicaSets whose size or size annotations differ from the desired ones.
fn changed(deployment: &Deployment, bounds: Bounds, mut sizes: Vec<Resize>) -> Vec<Resize> {
    sizes.retain(|(set, size)| {
        replicas(set) != *size
            || (*size > 0
                && (number(set, ANNOTATION_DESIRED) != Some(desired(deployment))
                    || number(set, ANNOTATION_MAX) != Some(bounds.max())))
    });
    sizes
}
