//! All checks together: follows every event of the store and collects what is violated.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mayfly_store::{Key, WriteEvent};
use serde_json::Value;

use crate::{
    invariants::{self, Invariants},
    model::{Model, Step},
};

/// The age that a controller's copy of the objects may have, and the time for which its requests may be under way. The
/// faults of a run stay below it: see `faults.rs`.
pub const STALENESS_MAX: Duration = Duration::from_secs(90);

/// Violations that are kept; a run ends at the first.
const VIOLATIONS_MAX: usize = 10;

/// The facts that the store's events do not show, told by the parts of the simulation that know them.
#[derive(Debug, Default)]
pub struct Hints {
    /// By uid of the owner: creations of pods whose answers were lost. Their controller may create as many again.
    pub lost_creations: BTreeMap<String, i64>,
    /// Pods that were bound although the scheduler got no answer. It may give their place away.
    pub lost_bindings: BTreeSet<Key>,
    /// Deletions that the garbage collector has under way.
    pub collecting: BTreeMap<Key, u32>,
    /// By uid: how often a user requested the deletion of the object. A second request may change the policy.
    pub deleted_by_user: BTreeMap<String, u32>,
    /// The last moment at which anything but the controllers changed the state of the cluster, or a fault happened.
    pub disturbed_at: Duration,
    pub is_faulty: bool,
}

impl Hints {
    /// Whether nothing but the controllers' own work happened for as long as copies may be stale.
    pub fn is_calm(&self, now: Duration) -> bool {
        !self.is_faulty && now.saturating_sub(self.disturbed_at) > STALENESS_MAX
    }
}

#[derive(Default)]
pub struct Oracle {
    pub model: Model,
    pub hints: Hints,
    invariants: Invariants,
    violations: Vec<String>,
}

impl std::fmt::Debug for Oracle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oracle").field("violations", &self.violations).finish_non_exhaustive()
    }
}

impl Oracle {
    /// Checks one event and follows it. Returns the step for the trace.
    pub fn observe(&mut self, at: Duration, event: &WriteEvent) -> Step {
        let step = Step::of(at, event, &self.model);
        self.check(&step);
        step
    }

    /// Checks one step and follows it.
    pub fn check(&mut self, step: &Step) {
        let mut violated = Vec::new();
        self.invariants.before(&self.model, &self.hints, step, &mut violated);
        self.model.apply(step);
        self.invariants.after(&self.model, step, &mut violated);
        for violation in violated {
            self.violate(format!("revision {} of {}: {violation}", step.revision, step.key));
        }
    }

    pub fn violate(&mut self, violation: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(violation);
        }
    }

    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// What has not converged, when nothing happens any more.
    pub fn unconverged(&self, is_user_finalizer: impl Fn(&str) -> bool) -> Vec<String> {
        invariants::unconverged(&self.model, is_user_finalizer)
    }

    /// The object with this key, now.
    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.model.get(key)
    }
}
