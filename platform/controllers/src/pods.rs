//! The pod garbage collector, and helpers that read a pod's status.
//!
//! Removed are: finished pods past a limit, the oldest first; pods bound to a node that does not exist; pods that are
//! being deleted and were never bound. (Behaviour: upstream `pkg/controller/podgc`.)

mod collector;

use std::time::Duration;

use mayfly_api::k8s::{
    api::core::v1::{Pod, PodCondition},
    jiff::Timestamp,
};

pub(crate) use collector::PodCollector;

/// The settings of the pod collector.
#[derive(Clone, Debug)]
pub struct Config {
    /// The interval of its rounds.
    pub every: Duration,
    /// Finished pods that are kept.
    pub finished_max: usize,
    /// The time for which a pod may be bound to a node that does not exist: the node may be registering.
    pub orphaned_after: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { every: Duration::from_secs(20), finished_max: 1000, orphaned_after: Duration::from_secs(40) }
    }
}

pub(crate) fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether a pod has neither finished nor been marked for deletion.
pub(crate) fn is_active(pod: &Pod) -> bool {
    !is_finished(pod) && pod.metadata.deletion_timestamp.is_none()
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    ready_condition(pod).is_some_and(|condition| condition.status == "True")
}

pub(crate) fn ready_since(pod: &Pod) -> Option<Timestamp> {
    Some(ready_condition(pod)?.last_transition_time.as_ref()?.0)
}

fn ready_condition(pod: &Pod) -> Option<&PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "Ready")
}
