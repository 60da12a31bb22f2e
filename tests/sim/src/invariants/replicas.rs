//! Rules of the number of pods: never more than an owner wants, at the moment of a pod's creation.

use std::{collections::BTreeMap, time::Duration};

use mayfly_store::Key;
use serde_json::Value;

use crate::{
    model::{Model, Step, controller, is_active, is_ready, list, number, text, uid},
    oracle::{Hints, STALENESS_MAX},
};

/// The desired numbers of owners over time, and when pods were last ready.
#[derive(Default)]
pub(super) struct ReplicaRules {
    /// By uid of the owner: since when it wanted so many, the newest last.
    wanted: BTreeMap<String, Vec<(Duration, i64)>>,
    ready_until: BTreeMap<Key, Duration>,
}

/// The owners with a number, and where it is.
fn wanted(resource: &str, object: &Value) -> Option<i64> {
    match resource {
        "replicasets.apps" | "statefulsets.apps" | "replicationcontrollers" => {
            Some(number(object, "/spec/replicas", 1))
        }
        "jobs.batch" if object.pointer("/spec/suspend").is_some_and(|suspend| suspend == true) => Some(0),
        "jobs.batch" => Some(number(object, "/spec/parallelism", 1)),
        _ => None,
    }
}

impl ReplicaRules {
    pub(super) fn check(&mut self, model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
        if let Some(new) = &step.new
            && let Some(wanted) = wanted(step.resource(), new)
        {
            self.remember(uid(new), step.at, wanted);
        }
        if step.resource() != "pods" {
            return;
        }
        if step.old.as_deref().is_some_and(is_ready) {
            self.ready_until.insert(step.key.clone(), step.at);
        }
        if let Some(pod) = step.created()
            && let Some(owner) = controller(pod)
        {
            let allowed = hints.lost_creations.get(text(owner, "/uid")).copied().unwrap_or(0);
            self.created(model, step, pod, owner, allowed, violated);
        }
    }

    fn remember(&mut self, uid: &str, at: Duration, wanted: i64) {
        let history = self.wanted.entry(uid.into()).or_default();
        if history.last().is_some_and(|(_, last)| *last == wanted) {
            return;
        }
        history.push((at, wanted));
        // What was wanted until a long time ago is known to be over.
        while history.len() > 1 && at.saturating_sub(history[1].0) > STALENESS_MAX {
            history.remove(0);
        }
    }

    /// The largest number that a controller may still believe to be wanted.
    fn wanted_max(&self, uid: &str, now: Duration) -> Option<i64> {
        let history = self.wanted.get(uid)?;
        let current = history.iter().enumerate().filter(|(at, _)| {
            history.get(at + 1).is_none_or(|(until, _)| now.saturating_sub(*until) <= STALENESS_MAX)
        });
        current.map(|(_, (_, wanted))| *wanted).max()
    }

    fn created(
        &self,
        model: &Model,
        step: &Step,
        pod: &Value,
        owner: &Value,
        allowed: i64,
        violated: &mut Vec<String>,
    ) {
        let (kind, owner) = (text(owner, "/kind"), text(owner, "/uid"));
        let active: Vec<&Value> =
            model.controlled("pods", owner).map(|(_, pod)| pod).filter(|pod| is_active(pod)).collect();
        let count = i64::try_from(active.len()).unwrap_or(i64::MAX) + 1;
        if let Some(most) = self.wanted_max(owner, step.at)
            && kind != "StatefulSet"
            && count > most + allowed
        {
            violated.push(format!("the {kind} has {count} pods and wants {most} ({allowed} answers lost)"));
        }
        let twins = |key: fn(&Value) -> &str| active.iter().filter(|other| key(other) == key(pod)).count();
        let twins = match kind {
            "DaemonSet" => twins(node_of),
            "Job" if !index_of(pod).is_empty() => twins(index_of),
            _ => 0,
        };
        if i64::try_from(twins).unwrap_or(i64::MAX) > allowed {
            violated.push(format!("the {kind} has {twins} other pods for the same node or index"));
        }
        if kind == "StatefulSet" {
            self.ordered(model, step, owner, violated);
        }
    }

    /// A pod of a StatefulSet has an ordinal that is wanted. (Of a set that is scaled down, a lost pod comes back before
    /// the last ones go.) A pod of an ordered StatefulSet begins once all pods before it were ready.
    fn ordered(&self, model: &Model, step: &Step, owner: &str, violated: &mut Vec<String>) {
        let Some((set, object)) = model.by_uid(owner) else { return };
        let ordinal = step.key.name.rsplit_once('-').and_then(|(_, ordinal)| ordinal.parse().ok());
        let (ordinal, most) = (ordinal.unwrap_or(0), self.wanted_max(owner, step.at).unwrap_or(0));
        if ordinal >= most {
            violated.push(format!("the StatefulSet gets ordinal {ordinal} and wants {most}"));
        }
        if text(object, "/spec/podManagementPolicy") == "Parallel" {
            return;
        }
        for before in 0..ordinal {
            let key = Key::new("pods", &*set.namespace, format!("{}-{before}", set.name));
            let was_ready = self.ready_until.get(&key);
            let is_recent = was_ready.is_some_and(|until| step.at.saturating_sub(*until) <= STALENESS_MAX);
            if !model.get(&key).is_some_and(is_ready) && !is_recent {
                violated.push(format!("{} is not ready", key.name));
            }
        }
    }
}

/// The node that a pod of a DaemonSet is for, also before it is bound.
fn node_of(pod: &Value) -> &str {
    let terms =
        "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let fields = list(pod, terms).first().map_or(&[][..], |term| list(term, "/matchFields"));
    fields.first().map_or(text(pod, "/spec/nodeName"), |field| text(field, "/values/0"))
}

pub(super) fn index_of(pod: &Value) -> &str {
    text(pod, "/metadata/annotations/batch.kubernetes.io~1job-completion-index")
}
