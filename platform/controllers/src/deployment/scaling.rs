//! The number of pods of each ReplicaSet of a Deployment; pure.

use std::sync::Arc;

use kube::ResourceExt as _;
use mayfly_api::k8s::api::apps::v1::{Deployment, ReplicaSet};

use super::revisions::{ANNOTATION_DESIRED, ANNOTATION_MAX, Sets, created};
use crate::scaled_value::resolve;

/// A ReplicaSet and the number of pods it should have.
pub(super) type Resize = (Arc<ReplicaSet>, i32);

/// The permitted deviations from the number of replicas during a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) replicas: i32,
    pub(super) surge: i32,
    pub(super) unavailable: i32,
}

impl Bounds {
    pub(super) fn of(deployment: &Deployment) -> Self {
        let replicas = desired(deployment);
        if is_recreate(deployment) {
            return Self { replicas, surge: 0, unavailable: 0 };
        }
        let strategy =
            deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref()?.rolling_update.clone());
        let strategy = strategy.unwrap_or_default();
        let surge = resolve(strategy.max_surge.as_ref(), replicas, true);
        let mut unavailable = resolve(strategy.max_unavailable.as_ref(), replicas, false);
        if surge == 0 && unavailable == 0 {
            // Validation refuses two zeros, but percentages may round to them: nothing would ever move.
            unavailable = 1;
        }
        Self { replicas, surge, unavailable: unavailable.min(replicas) }
    }

    /// The most pods there may be.
    pub(super) fn max(self) -> i32 {
        self.replicas.saturating_add(self.surge)
    }
}

pub(super) fn is_recreate(deployment: &Deployment) -> bool {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    strategy.is_some_and(|strategy| strategy.type_.as_deref() == Some("Recreate"))
}

pub(super) fn desired(deployment: &Deployment) -> i32 {
    deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

pub(super) fn replicas(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

pub(super) fn available(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

pub(super) fn number(set: &ReplicaSet, annotation: &str) -> Option<i32> {
    set.annotations().get(annotation)?.parse().ok()
}

pub(super) fn total<'a>(sets: impl IntoIterator<Item = &'a Arc<ReplicaSet>>) -> i32 {
    sets.into_iter().map(|set| replicas(set)).fold(0, i32::saturating_add)
}

/// Whether the Deployment was scaled since its ReplicaSets were last resized.
pub(super) fn was_scaled(deployment: &Deployment, sets: &Sets) -> bool {
    let mut active = sets.all().filter(|set| replicas(set) > 0);
    active.any(|set| number(set, ANNOTATION_DESIRED).is_some_and(|known| known != desired(deployment)))
}

/// The size of the new ReplicaSet, given the sizes of the others.
pub(super) fn new_size(sets: &Sets, current: i32, recreate: bool, bounds: Bounds) -> i32 {
    if recreate || current > bounds.replicas {
        return bounds.replicas;
    }
    let room = bounds.max().saturating_sub(total(sets.old.iter()).saturating_add(current));
    current.saturating_add(room.max(0).min(bounds.replicas - current))
}

/// The old ReplicaSets that can give up pods now: first pods that are not available, then available ones as
/// far as enough stay.
pub(super) fn shrink_old(sets: &Sets, bounds: Bounds) -> Vec<Resize> {
    let min_available = bounds.replicas - bounds.unavailable;
    let new_unavailable = sets.new.as_ref().map_or(0, |set| replicas(set) - available(set));
    let mut budget = total(sets.all()) - min_available - new_unavailable;
    if total(sets.old.iter()) == 0 || budget <= 0 {
        return Vec::new();
    }
    let mut sizes: Vec<Resize> = sets.old.iter().map(|set| (set.clone(), replicas(set))).collect();
    for (set, size) in &mut sizes {
        let unhealthy = (*size - available(set)).clamp(0, budget.max(0));
        *size -= unhealthy;
        budget -= unhealthy;
    }
    let all_available = sets.all().map(|set| available(set)).fold(0, i32::saturating_add);
    let mut spare = (all_available - min_available).max(0);
    for (_, size) in &mut sizes {
        let removed = (*size).min(spare);
        *size -= removed;
        spare -= removed;
    }
    sizes.retain(|(set, size)| replicas(set) != *size);
    sizes
}

/// All ReplicaSets after the Deployment was scaled or while it is paused.
pub(super) fn proportional(deployment: &Deployment, sets: &Sets, bounds: Bounds) -> Vec<Resize> {
    let active: Vec<_> = sets.all().filter(|set| replicas(set) > 0).cloned().collect();
    let only = match &active[..] {
        [] => sets.new.clone().or_else(|| sets.old.last().cloned()),
        [one] => Some(one.clone()),
        _ => None,
    };
    if let Some(only) = only {
        return vec![(only, bounds.replicas)];
    }
    if active.is_empty() {
        return Vec::new();
    }
    if let Some(new) = &sets.new
        && is_saturated(new, bounds.replicas)
    {
        let old = sets.old.iter().filter(|set| replicas(set) > 0);
        return old.map(|set| (set.clone(), 0)).collect();
    }
    if is_recreate(deployment) {
        return Vec::new();
    }
    let allowed = if bounds.replicas > 0 { bounds.max() } else { 0 };
    let to_add = allowed - total(&active);
    let mut sorted = active;
    // The larger first; of equal ones the newer grows first and the older shrinks first.
    if to_add > 0 {
        sorted.sort_by_key(|set| std::cmp::Reverse((replicas(set), created(set))));
    } else {
        sorted.sort_by_key(|set| (std::cmp::Reverse(replicas(set)), created(set)));
    }
    let old_total = deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0);
    let mut added = 0;
    let mut sizes: Vec<Resize> = Vec::new();
    for set in sorted {
        let size = replicas(&set);
        let share = share(&set, bounds, old_total, to_add, added);
        added += share;
        sizes.push((set, size + share));
    }
    if let Some((_, size)) = sizes.first_mut() {
        *size = (*size + to_add - added).max(0);
    }
    sizes
}

fn is_saturated(new: &ReplicaSet, wanted: i32) -> bool {
    replicas(new) == wanted && number(new, ANNOTATION_DESIRED) == Some(wanted) && available(new) == wanted
}

/// The part of `to_add` that falls to one ReplicaSet.
fn share(set: &ReplicaSet, bounds: Bounds, old_total: i32, to_add: i32, added: i32) -> i32 {
    let (size, allowed) = (replicas(set), to_add - added);
    if size == 0 || to_add == 0 || allowed == 0 {
        return 0;
    }
    let fraction = if bounds.replicas == 0 {
        -size
    } else {
        let before = number(set, ANNOTATION_MAX).filter(|max| *max > 0).unwrap_or(old_total).max(1);
        // Rounded to the nearest.
        let (product, before) = (i64::from(size) * i64::from(bounds.max()), i64::from(before));
        i32::try_from((2 * product + before) / (2 * before)).unwrap_or(i32::MAX).saturating_sub(size)
    };
    if to_add > 0 { fraction.min(allowed) } else { fraction.max(allowed) }
}
