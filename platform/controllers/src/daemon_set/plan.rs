//! Decides which pods to create and delete on which nodes, and the numbers; pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::{
        apps::v1::{DaemonSet, DaemonSetStatus},
        core::v1::Pod,
    },
    apimachinery::pkg::util::intstr::IntOrString,
    jiff::{SignedDuration, Timestamp},
};

use super::pods::{Fit, node_of};
use crate::{
    history::LABEL_REVISION_HASH,
    pods::{is_finished, is_ready, ready_since},
    scaled_value::resolve,
};

/// The age at which a failed pod is replaced, so that a pod that fails at once does not load the node.
const FAILED_PAUSE: SignedDuration = SignedDuration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct DaemonSetPlan {
    /// Nodes that get a pod.
    pub(super) create: Vec<String>,
    pub(super) delete: Vec<Arc<Pod>>,
    pub(super) status: DaemonSetStatus,
    pub(super) again: Option<Duration>,
}

struct DaemonSetView<'a> {
    set: &'a DaemonSet,
    hash: &'a str,
    now: Timestamp,
}

impl DaemonSetView<'_> {
    fn until_available(&self, pod: &Pod) -> Option<Duration> {
        if !is_ready(pod) || is_finished(pod) {
            return None;
        }
        let seconds = self.set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0);
        let since = ready_since(pod).map(|since| self.now.duration_since(since));
        let passed = since.and_then(|passed| Duration::try_from(passed).ok()).unwrap_or_default();
        Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).saturating_sub(passed))
    }

    fn is_available(&self, pod: &Pod) -> bool {
        !is_terminating(pod) && self.until_available(pod).is_some_and(|left| left.is_zero())
    }

    fn is_new(&self, pod: &Pod) -> bool {
        pod.labels().get(LABEL_REVISION_HASH).map(String::as_str) == Some(self.hash)
    }

    /// maxUnavailable and maxSurge; none with `OnDelete`.
    fn rolling(&self, desired: i32) -> Option<(i32, i32)> {
        let strategy =
            self.set.spec.as_ref().and_then(|spec| spec.update_strategy.clone()).unwrap_or_default();
        if strategy.type_.as_deref() == Some("OnDelete") {
            return None;
        }
        let rolling = strategy.rolling_update.unwrap_or_default();
        let (one, zero) = (IntOrString::Int(1), IntOrString::Int(0));
        let unavailable = resolve(Some(rolling.max_unavailable.as_ref().unwrap_or(&one)), desired, true);
        let surge = resolve(Some(rolling.max_surge.as_ref().unwrap_or(&zero)), desired, true);
        Some((if surge == 0 { unavailable.max(1) } else { unavailable }, surge))
    }
}

fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()).is_some_and(|name| !name.is_empty())
}

pub(super) fn plan(
    set: &DaemonSet,
    hash: &str,
    fits: &BTreeMap<String, Fit>,
    pods: &[Arc<Pod>],
    now: Timestamp,
) -> DaemonSetPlan {
    let view = DaemonSetView { set, hash, now };
    let mut by_node: BTreeMap<String, Vec<Arc<Pod>>> = BTreeMap::new();
    for pod in pods {
        by_node.entry(node_of(pod).unwrap_or_default()).or_default().push(pod.clone());
    }
    for pods in by_node.values_mut() {
        pods.sort_by_key(|pod| {
            let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
            (!is_bound(pod), created, pod.name_any())
        });
    }
    let mut plan = DaemonSetPlan { status: status(&view, fits, &by_node), ..DaemonSetPlan::default() };
    plan.again = pods.iter().filter_map(|pod| view.until_available(pod)).filter(|left| !left.is_zero()).min();
    let none = Vec::new();
    for (node, fit) in fits {
        manage(&view, node, *fit, by_node.get(node).unwrap_or(&none), &mut plan);
    }
    let lost = by_node.iter().filter(|(node, _)| !fits.contains_key(*node));
    plan.delete.extend(lost.flat_map(|(_, pods)| pods).filter(|pod| !is_terminating(pod)).cloned());
    if plan.create.is_empty() && plan.delete.is_empty() {
        roll(&view, fits, &by_node, &mut plan);
    }
    plan
}

/// Plans one node: creates a missing pod, deletes failed and surplus ones.
fn manage(view: &DaemonSetView<'_>, node: &str, fit: Fit, pods: &[Arc<Pod>], plan: &mut DaemonSetPlan) {
    if !fit.stay {
        plan.delete.extend(pods.iter().filter(|pod| !is_terminating(pod)).cloned());
        return;
    }
    let (failed, live): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| is_finished(pod));
    for pod in failed.into_iter().filter(|pod| !is_terminating(pod)) {
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let age = created.map_or(FAILED_PAUSE, |created| view.now.duration_since(created));
        match Duration::try_from(FAILED_PAUSE - age).ok().filter(|left| !left.is_zero()) {
            Some(left) => plan.again = plan.again.into_iter().chain([left]).min(),
            None => plan.delete.push(pod.clone()),
        }
    }
    if pods.is_empty() && fit.run {
        plan.create.push(node.to_owned());
    }
    // One of each revision may run together while an update surges; the oldest of each stays.
    for new in [true, false] {
        let same = live.iter().filter(|pod| view.is_new(pod) == new && !is_terminating(pod));
        plan.delete.extend(same.skip(1).map(|pod| (*pod).clone()));
    }
    let is_live = |new: bool| live.iter().find(|pod| view.is_new(pod) == new && !is_terminating(pod));
    // An old pod that is not ready serves nobody, and may hold what the new one waits for, such as a port of the host.
    if let (Some(new), Some(old)) = (is_live(true), is_live(false))
        && (view.is_available(new) || !is_ready(old))
    {
        plan.delete.push((*old).clone());
    }
}

/// Replaces pods of old revisions, as many at once as the strategy allows.
fn roll(
    view: &DaemonSetView<'_>,
    fits: &BTreeMap<String, Fit>,
    by_node: &BTreeMap<String, Vec<Arc<Pod>>>,
    plan: &mut DaemonSetPlan,
) {
    let Some((unavailable_max, surge_max)) = view.rolling(plan.status.desired_number_scheduled) else {
        return;
    };
    let (mut unavailable, mut surging) = (0, 0);
    let (mut broken, mut candidates) = (Vec::new(), Vec::new());
    for (node, _) in fits.iter().filter(|(_, fit)| fit.run) {
        let pods = by_node.get(node).map(Vec::as_slice).unwrap_or_default();
        let old = pods.iter().find(|pod| !view.is_new(pod));
        let new = pods.iter().find(|pod| view.is_new(pod));
        unavailable += i32::from(!pods.iter().any(|pod| view.is_available(pod)));
        match (old, new) {
            (Some(_), Some(_)) => surging += 1,
            (Some(old), None) if !is_terminating(old) && !view.is_available(old) => broken.push((node, old)),
            (Some(old), None) if !is_terminating(old) => candidates.push((node, old)),
            _ => {}
        }
    }
    if surge_max > 0 {
        let room = usize::try_from(surge_max - surging).unwrap_or(0);
        let nodes = broken.into_iter().chain(candidates).map(|(node, _)| node.clone());
        plan.create.extend(nodes.take(room));
        return;
    }
    let room = usize::try_from(unavailable_max - unavailable).unwrap_or(0);
    let chosen = broken.into_iter().chain(candidates.into_iter().take(room));
    plan.delete.extend(chosen.map(|(_, pod)| pod.clone()));
}

fn status(
    view: &DaemonSetView<'_>,
    fits: &BTreeMap<String, Fit>,
    by_node: &BTreeMap<String, Vec<Arc<Pod>>>,
) -> DaemonSetStatus {
    let old = view.set.status.clone().unwrap_or_default();
    let mut status = DaemonSetStatus {
        collision_count: old.collision_count,
        conditions: old.conditions,
        observed_generation: view.set.metadata.generation,
        ..DaemonSetStatus::default()
    };
    let (mut available, mut updated) = (0, 0);
    for (node, fit) in fits {
        let pods = by_node.get(node).map(Vec::as_slice).unwrap_or_default();
        if !fit.run {
            status.number_misscheduled += i32::from(!pods.is_empty());
            continue;
        }
        status.desired_number_scheduled += 1;
        status.current_number_scheduled += i32::from(!pods.is_empty());
        status.number_ready += i32::from(pods.iter().any(|pod| is_ready(pod) && !is_finished(pod)));
        available += i32::from(pods.iter().any(|pod| view.is_available(pod)));
        // As upstream, the oldest pod: a node on which the new one only starts beside it is not updated yet.
        updated += i32::from(pods.first().is_some_and(|pod| view.is_new(pod) && !is_terminating(pod)));
    }
    let some = |number: i32| Some(number).filter(|number| *number > 0);
    status.number_available = some(available);
    status.number_unavailable = some(status.desired_number_scheduled - available);
    status.updated_number_scheduled = some(updated);
    status
}
