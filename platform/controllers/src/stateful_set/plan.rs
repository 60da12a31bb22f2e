//! Decides which pods to create and delete, and the numbers, from the object, its revisions, pods and the time; pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::{
        apps::v1::{StatefulSet, StatefulSetSpec, StatefulSetStatus},
        core::v1::Pod,
    },
    jiff::Timestamp,
};

use super::identity::ordinal;
use crate::{
    history::LABEL_REVISION_HASH,
    pods::{is_finished, is_ready, ready_since},
};

/// Names of the revisions of the pods that need no update, and of those that are up to date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Revisions {
    pub(super) current: String,
    pub(super) update: String,
}

#[derive(Debug, Default)]
pub(super) struct StatefulSetPlan {
    /// Ordinals to create, and whether with the template of the update revision.
    pub(super) create: Vec<(i32, bool)>,
    pub(super) delete: Vec<Arc<Pod>>,
    pub(super) status: StatefulSetStatus,
    pub(super) again: Option<Duration>,
}

struct StatefulSetView<'a> {
    spec: &'a StatefulSetSpec,
    revisions: &'a Revisions,
    now: Timestamp,
}

/// The ordinals of the pods that the set should have.
pub(super) fn ordinals(spec: &StatefulSetSpec) -> std::ops::Range<i32> {
    let start = spec.ordinals.as_ref().and_then(|ordinals| ordinals.start).unwrap_or(0);
    start..start.saturating_add(spec.replicas.unwrap_or(1))
}

impl StatefulSetView<'_> {
    fn start(&self) -> i32 {
        ordinals(self.spec).start
    }

    fn wanted(&self) -> i32 {
        self.spec.replicas.unwrap_or(1)
    }

    fn is_ordered(&self) -> bool {
        self.spec.pod_management_policy.as_deref() != Some("Parallel")
    }

    fn is_on_delete(&self) -> bool {
        let strategy = self.spec.update_strategy.as_ref();
        strategy.is_some_and(|strategy| strategy.type_.as_deref() == Some("OnDelete"))
    }

    /// Ordinals below this one keep the current revision.
    fn partition(&self) -> i32 {
        let strategy =
            self.spec.update_strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
        let partition = strategy.and_then(|rolling| rolling.partition).unwrap_or(0);
        self.start().saturating_add(partition)
    }

    /// The time until a ready pod counts as available; zero once it does, none while it is not ready.
    fn until_available(&self, pod: &Pod) -> Option<Duration> {
        if !is_ready(pod) || is_finished(pod) {
            return None;
        }
        let min_ready = u64::try_from(self.spec.min_ready_seconds.unwrap_or(0)).unwrap_or(0);
        let since = ready_since(pod).map(|since| self.now.duration_since(since));
        let passed = since.and_then(|passed| Duration::try_from(passed).ok()).unwrap_or_default();
        Some(Duration::from_secs(min_ready).saturating_sub(passed))
    }

    fn is_healthy(&self, pod: &Pod) -> bool {
        !is_terminating(pod) && self.until_available(pod).is_some_and(|left| left.is_zero())
    }
}

fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn has_revision(pod: &Pod, revision: &str) -> bool {
    pod.labels().get(LABEL_REVISION_HASH).map(String::as_str) == Some(revision)
}

pub(super) fn plan(
    set: &StatefulSet,
    revisions: &Revisions,
    pods: &[Arc<Pod>],
    now: Timestamp,
) -> StatefulSetPlan {
    let empty = StatefulSetSpec::default();
    let view = StatefulSetView { spec: set.spec.as_ref().unwrap_or(&empty), revisions, now };
    let by_ordinal: BTreeMap<i32, Arc<Pod>> =
        pods.iter().filter_map(|pod| Some((ordinal(set, pod)?, pod.clone()))).collect();
    let mut plan = StatefulSetPlan { status: status(set, &view, pods), ..StatefulSetPlan::default() };
    plan.again = pods.iter().filter_map(|pod| view.until_available(pod)).filter(|left| !left.is_zero()).min();
    if set.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let wanted = ordinals(view.spec);
    let waits = replenish(&view, wanted.clone(), &by_ordinal, &mut plan);
    let waits = waits || condemn(&view, &wanted, &by_ordinal, &mut plan);
    if !waits && !view.is_on_delete() {
        update(&view, wanted, &by_ordinal, &mut plan);
    }
    plan
}

/// Creates missing pods. Returns whether the set waits for a pod before anything else happens.
fn replenish(
    view: &StatefulSetView<'_>,
    wanted: std::ops::Range<i32>,
    pods: &BTreeMap<i32, Arc<Pod>>,
    plan: &mut StatefulSetPlan,
) -> bool {
    for ordinal in wanted {
        match pods.get(&ordinal) {
            None => {
                let is_current = !view.is_on_delete() && ordinal < view.partition();
                plan.create.push((ordinal, !is_current));
                if view.is_ordered() {
                    return true;
                }
            }
            // A pod that has finished is replaced under the same name.
            Some(pod) if is_finished(pod) && !is_terminating(pod) => {
                plan.delete.push(pod.clone());
                if view.is_ordered() {
                    return true;
                }
            }
            Some(pod) if view.is_ordered() && !view.is_healthy(pod) => {
                let broken = !is_terminating(pod) && !is_ready(pod) && !view.is_on_delete();
                // A pod of an older revision that never becomes ready would block its own repair for ever.
                if broken && ordinal >= view.partition() && !has_revision(pod, &view.revisions.update) {
                    plan.delete.push(pod.clone());
                }
                return true;
            }
            Some(_) => {}
        }
    }
    false
}

/// Deletes the pods past the wanted ones, the highest first.
fn condemn(
    view: &StatefulSetView<'_>,
    wanted: &std::ops::Range<i32>,
    pods: &BTreeMap<i32, Arc<Pod>>,
    plan: &mut StatefulSetPlan,
) -> bool {
    for (_, pod) in pods.iter().rev().filter(|(ordinal, _)| !wanted.contains(*ordinal)) {
        if !is_terminating(pod) {
            plan.delete.push(pod.clone());
        }
        if view.is_ordered() {
            return true;
        }
    }
    false
}

/// Deletes one pod of an old revision, the highest first, once all above it are healthy.
fn update(
    view: &StatefulSetView<'_>,
    wanted: std::ops::Range<i32>,
    pods: &BTreeMap<i32, Arc<Pod>>,
    plan: &mut StatefulSetPlan,
) {
    for ordinal in wanted.rev().take_while(|ordinal| *ordinal >= view.partition()) {
        let Some(pod) = pods.get(&ordinal) else { return };
        if !has_revision(pod, &view.revisions.update) && !is_terminating(pod) {
            if !plan.delete.iter().any(|known| known.name_any() == pod.name_any()) {
                plan.delete.push(pod.clone());
            }
            return;
        }
        if !view.is_healthy(pod) {
            return;
        }
    }
}

fn status(set: &StatefulSet, view: &StatefulSetView<'_>, pods: &[Arc<Pod>]) -> StatefulSetStatus {
    let count = |test: &dyn Fn(&Pod) -> bool| {
        i32::try_from(pods.iter().filter(|pod| test(pod)).count()).unwrap_or(i32::MAX)
    };
    let old = set.status.clone().unwrap_or_default();
    let Revisions { current, update } = view.revisions;
    let live = |pod: &Pod, revision: &str| !is_terminating(pod) && has_revision(pod, revision);
    let mut status = StatefulSetStatus {
        observed_generation: set.metadata.generation,
        replicas: count(&|_| true),
        ready_replicas: Some(count(&|pod| is_ready(pod) && !is_finished(pod))),
        available_replicas: Some(count(&|pod| view.is_healthy(pod))),
        current_replicas: Some(count(&|pod| live(pod, current))),
        updated_replicas: Some(count(&|pod| live(pod, update))),
        current_revision: Some(current.clone()),
        update_revision: Some(update.clone()),
        collision_count: old.collision_count.or(Some(0)),
        conditions: old.conditions,
    };
    let all = Some(view.wanted());
    if !view.is_on_delete()
        && status.replicas == view.wanted()
        && status.updated_replicas == all
        && status.ready_replicas == all
    {
        // The update is complete: its revision is the current one.
        status.current_revision = Some(update.clone());
        status.current_replicas = status.updated_replicas;
    }
    status
}
