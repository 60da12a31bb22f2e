//! Rules of rollouts while nothing fails: never more pods than the surge allows, never fewer available ones than the
//! strategy allows.
//!
//! They are checked from a change of the template of a complete Deployment in a calm cluster until it is complete
//! again, or until anything else happens.

use std::{collections::BTreeMap, time::Duration};

use serde_json::Value;

use crate::{
    model::{Model, Step, controller, is_active, is_ready, number, text, uid},
    oracle::Hints,
};

#[derive(Clone, Copy, Debug)]
struct Rollout {
    began: Duration,
    pods_max: i64,
    available_min: i64,
}

#[derive(Default)]
pub(super) struct RolloutRules {
    /// By uid of the Deployment.
    watched: BTreeMap<String, Rollout>,
}

impl RolloutRules {
    pub(super) fn before(&mut self, model: &Model, hints: &Hints, step: &Step) {
        self.watched.retain(|_, rollout| !hints.is_faulty && hints.disturbed_at <= rollout.began);
        if step.resource() != "deployments.apps" {
            return;
        }
        let Some((old, new)) = step.changed() else {
            self.watched.remove(uid(step.latest()));
            return;
        };
        if old["spec"] == new["spec"] && !crate::model::is_terminating(new) {
            return;
        }
        self.watched.remove(uid(new));
        if hints.is_calm(step.at) && is_template_only(old, new) && is_complete(model, old) {
            self.watched.extend(limits(new, step.at).map(|limits| (uid(new).to_owned(), limits)));
        }
    }

    pub(super) fn after(&mut self, model: &Model, step: &Step, violated: &mut Vec<String>) {
        if self.watched.is_empty() {
            return;
        }
        let owner = match step.resource() {
            "pods" => {
                let set = controller(step.latest()).and_then(|set| model.by_uid(text(set, "/uid")));
                set.and_then(|(_, set)| controller(set))
            }
            "replicasets.apps" => controller(step.latest()),
            "deployments.apps" => {
                let deployment = step.latest();
                if self.watched.contains_key(uid(deployment)) && is_complete(model, deployment) {
                    self.watched.remove(uid(deployment));
                }
                None
            }
            _ => None,
        };
        let Some(owner) = owner.map(|owner| text(owner, "/uid")) else { return };
        let Some(rollout) = self.watched.get(owner) else { return };
        let sets: Vec<&Value> = model.controlled("replicasets.apps", owner).map(|(_, set)| set).collect();
        let pods = || sets.iter().flat_map(|set| model.controlled("pods", uid(set))).map(|(_, pod)| pod);
        let count = |all: usize| i64::try_from(all).unwrap_or(i64::MAX);
        let desired: i64 = sets.iter().map(|set| number(set, "/spec/replicas", 1)).sum();
        let active = count(pods().filter(|pod| is_active(pod)).count());
        let available = count(pods().filter(|pod| is_ready(pod)).count());
        if desired > rollout.pods_max || active > rollout.pods_max {
            violated.push(format!(
                "the rollout has {active} pods and wants {desired}, more than {}",
                rollout.pods_max
            ));
        }
        if available < rollout.available_min {
            violated.push(format!(
                "the rollout has {available} available pods, fewer than {}",
                rollout.available_min
            ));
        }
    }
}

fn is_template_only(old: &Value, new: &Value) -> bool {
    let without = |deployment: &Value| {
        let mut spec = deployment["spec"].clone();
        if let Some(spec) = spec.as_object_mut() {
            spec.remove("template");
        }
        spec
    };
    without(old) == without(new) && !crate::model::is_terminating(new)
}

/// Whether the status says that the rollout is over, and the pods agree.
pub(super) fn is_complete(model: &Model, deployment: &Value) -> bool {
    let replicas = number(deployment, "/spec/replicas", 1);
    let counts = ["replicas", "updatedReplicas", "availableReplicas"];
    let observed = number(deployment, "/status/observedGeneration", 0);
    let sets = model.controlled("replicasets.apps", uid(deployment));
    let pods = sets.flat_map(|(_, set)| model.controlled("pods", uid(set)));
    let active: Vec<&Value> = pods.map(|(_, pod)| pod).filter(|pod| is_active(pod)).collect();
    observed == number(deployment, "/metadata/generation", 0)
        && counts.iter().all(|field| number(deployment, &format!("/status/{field}"), 0) == replicas)
        && i64::try_from(active.len()) == Ok(replicas)
        && active.iter().all(|pod| is_ready(pod))
}

/// The limits of a rolling update; none for other strategies.
fn limits(deployment: &Value, began: Duration) -> Option<Rollout> {
    if text(deployment, "/spec/strategy/type") != "RollingUpdate" {
        return None;
    }
    let replicas = number(deployment, "/spec/replicas", 1);
    let part = |name: &str, rounds_up: bool| {
        let value = deployment.pointer(&format!("/spec/strategy/rollingUpdate/{name}"))?;
        let Some(percent) = value.as_str() else { return value.as_i64() };
        let percent: i64 = percent.strip_suffix('%')?.parse().ok()?;
        Some((replicas * percent + if rounds_up { 99 } else { 0 }) / 100)
    };
    let (surge, mut unavailable) = (part("maxSurge", true)?, part("maxUnavailable", false)?);
    if surge == 0 && unavailable == 0 {
        unavailable = 1;
    }
    Some(Rollout { began, pods_max: replicas + surge, available_min: (replicas - unavailable).max(0) })
}
