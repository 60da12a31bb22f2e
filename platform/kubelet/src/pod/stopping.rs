//! Stopping containers: preStop hooks, the order, the grace period.
//!
//! ```text
//!   hooks of all containers, ─▶ SIGTERM to all but the sidecars ─▶ ended ─▶ the last sidecar ─▶ … ─▶ the first
//!   withdrawal from Services
//!   └──────────────────────────────── the grace period, shared ─────────────────────────────────────────┘
//! ```

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures::future::join_all;
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Pod, PodSpec},
        jiff::Timestamp,
    },
};
use mayfly_runtime::{ContainerId, ContainerState, Runtime};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::{
    hooks::{Hook, LifecycleMoment, container_named},
    local::LocalPod,
    plan::{ContainerKill, grace, sidecars},
    worker::Worker,
};

/// The minimum time that a container has to end after its hook and the containers before it, within a grace period that
/// is not zero (upstream's `minimumGracePeriodInSeconds`).
const GRACE_MIN: Duration = Duration::from_secs(2);

/// Groups containers that are stopped together, in order: all but the sidecars, then each sidecar, the last one first.
/// Pure.
fn stop_groups(spec: Option<&PodSpec>, running: &[ContainerId]) -> Vec<Vec<ContainerId>> {
    let sidecars: Vec<&str> =
        spec.into_iter().flat_map(sidecars).map(|container| container.name.as_str()).collect();
    let others = running.iter().filter(|id| !sidecars.contains(&id.name.as_str())).cloned().collect();
    let of = |name: &str| running.iter().filter(|id| id.name == name).cloned().collect::<Vec<_>>();
    let groups = std::iter::once(others).chain(sidecars.iter().rev().map(|name| of(name)));
    groups.filter(|group| !group.is_empty()).collect()
}

impl Worker {
    /// Waits until the pod's grace period is shortened below `seconds`; returns the remaining period and its new
    /// length. (Lengths are compared, since the end is a wall-clock time, and the clock may be stepped between two
    /// deletions.)
    async fn hurried(&self, pod: &Pod, seconds: Option<i64>) -> (Duration, Option<i64>) {
        let key = ObjectKey::of(pod);
        let mut deletions = self.deletions.subscribe();
        loop {
            let known = self.pods.get(&key).filter(|known| known.metadata.uid == pod.metadata.uid);
            let Some(known) = known else { return (Duration::ZERO, None) };
            let now = known.metadata.deletion_grace_period_seconds;
            if now < seconds {
                return (grace(&known, Timestamp::now()), now);
            }
            // Cannot fail: the sender lives in `self`.
            let _ = deletions.changed().await;
        }
    }

    /// Stops the containers of a deleted pod within its grace period, or sooner if that is shortened.
    pub(super) async fn stop_gracefully(
        &self,
        pod: &Pod,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
        grace: Duration,
    ) {
        let mut grace = grace;
        let mut seconds = pod.metadata.deletion_grace_period_seconds;
        // A hook runs once, even if the grace period is shortened several times.
        let hooked = Mutex::default();
        loop {
            tokio::select! {
                biased;
                () = self.stop_in_order(pod, local, runtime, grace, &hooked) => return,
                // Nothing is shorter than no grace period. A kill that is under way must not be started again: the
                // wait for a pod that is gone from the API ends at once each time.
                hurried = self.hurried(pod, seconds), if !grace.is_zero() => (grace, seconds) = hurried,
            }
        }
    }

    /// Stops the running containers of a pod: the sidecars after the others.
    pub(super) async fn stop_all(
        &self,
        pod: &Pod,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
        grace: Duration,
    ) {
        self.stop_in_order(pod, local, runtime, grace, &Mutex::default()).await;
    }

    async fn stop_in_order(
        &self,
        pod: &Pod,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
        grace: Duration,
        hooked: &Mutex<HashSet<String>>,
    ) {
        let ends = Instant::now() + grace;
        let running = runtime.containers(&local.uid).into_iter();
        let running: Vec<ContainerId> = running
            .filter(|(_, state)| !matches!(state, ContainerState::Exited { .. }))
            .map(|(id, _)| id)
            .collect();
        let groups = stop_groups(pod.spec.as_ref(), &running);
        let Some((others, sidecars)) = groups.split_first() else { return };
        // Sidecars run their hooks while the others end, as in upstream.
        let hooks_of_sidecars = sidecars.iter().flatten().map(|id| {
            let hooked = hooked.lock().insert(id.name.clone());
            async move {
                if hooked {
                    self.pre_stop(pod, local, runtime, id, ends, grace).await;
                }
            }
        });
        let end_of_others = others.iter().map(|id| {
            let hooked = hooked.lock().insert(id.name.clone());
            async move {
                self.events.normal(pod, "Killing", format!("Stopping container {}", id.name));
                let hook = async {
                    if hooked {
                        self.pre_stop(pod, local, runtime, id, ends, grace).await;
                    }
                };
                tokio::join!(hook, self.withdrawn(pod, local, ends));
                stop(&**runtime, id, remaining(ends, grace)).await;
            }
        });
        tokio::join!(join_all(hooks_of_sidecars), join_all(end_of_others));
        for group in sidecars {
            for id in group {
                self.events.normal(pod, "Killing", format!("Stopping container {}", id.name));
            }
            join_all(group.iter().map(|id| stop(&**runtime, id, remaining(ends, grace)))).await;
        }
    }

    /// Runs a container's preStop hook, within the grace period.
    async fn pre_stop(
        &self,
        pod: &Pod,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
        id: &ContainerId,
        ends: Instant,
        grace: Duration,
    ) {
        let container = container_named(pod, &id.name);
        let hook = container
            .and_then(|container| Hook::of(LifecycleMoment::PreStop, &container, id.clone(), local, runtime));
        let Some(hook) = hook.filter(|_| !grace.is_zero()) else { return };
        let why = match timeout_at(ends, hook.run()).await {
            Ok(Ok(())) => return,
            Ok(Err(why)) => why,
            Err(_) => format!("it did not end within the grace period of {} s", grace.as_secs()),
        };
        self.events.warning(pod, "FailedPreStopHook", format!("PreStopHook failed: {why}"));
    }

    /// Stops a container that failed a probe or has another definition; its restart policy decides whether it is restarted.
    pub(super) async fn kill(
        &self,
        failure: &ContainerKill,
        pod: &Pod,
        local: &mut LocalPod,
        runtime: &Arc<dyn Runtime>,
    ) {
        let ContainerKill { container, message, grace, replaces } = failure;
        self.events.normal(pod, "Killing", message.clone());
        let attempt = local.container(&container.name).attempt;
        let id = ContainerId { pod: local.uid.clone(), name: container.name.clone(), attempt };
        let ends = Instant::now() + *grace;
        let work = async {
            self.pre_stop(pod, local, runtime, &id, ends, *grace).await;
            runtime.stop_container(&id, remaining(ends, *grace)).await
        };
        let stopped = self.unless_deleted(pod, work).await;
        let known = local.containers.entry(container.name.clone()).or_default();
        match stopped {
            None => {}
            Some(Ok(())) => (known.killed_by_probe, known.is_replaced) = (!replaces, *replaces),
            Some(Err(error)) => {
                tracing::warn!(container = %id, %error, "could not end a container that is to be restarted");
                // The container is probed again, and stopped when it fails again.
                known.probes = Default::default();
                self.probes.restart(&local.uid, &container.name);
            }
        }
    }
}

/// The remaining part of a grace period.
fn remaining(ends: Instant, grace: Duration) -> Duration {
    match grace.is_zero() {
        true => Duration::ZERO,
        false => ends.saturating_duration_since(Instant::now()).max(GRACE_MIN.min(grace)),
    }
}

async fn stop(runtime: &dyn Runtime, id: &ContainerId, grace: Duration) {
    if let Err(error) = runtime.stop_container(id, grace).await {
        tracing::warn!(container = %id, %error, "could not stop a container");
    }
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::PodUid;
    use serde_json::json;

    use super::*;

    #[test]
    fn sidecars_end_last_and_in_reverse_order() {
        let spec: PodSpec = serde_json::from_value(json!({
            "initContainers": [
                {"name": "one", "restartPolicy": "Always"}, {"name": "init"},
                {"name": "two", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}, {"name": "b"}]}))
        .unwrap();
        let names = |running: &[&str]| {
            let id = |name: &&str| ContainerId { pod: PodUid("u".into()), name: (*name).into(), attempt: 0 };
            let running: Vec<_> = running.iter().map(id).collect();
            let groups = stop_groups(Some(&spec), &running);
            let name =
                |group: Vec<ContainerId>| group.into_iter().map(|id| id.name).collect::<Vec<_>>().join(" ");
            groups.into_iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["one", "two", "a", "b", "debugger"]), ["a b debugger", "two", "one"]);
        assert_eq!(names(&["one", "two"]), ["two", "one"]);
        assert_eq!(names(&["b"]), ["b"]);
        assert!(names(&[]).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn every_container_has_a_moment_to_end_unless_it_is_killed() {
        let now = Instant::now();
        let seconds = Duration::from_secs;
        assert_eq!(remaining(now + seconds(30), seconds(30)), seconds(30));
        assert_eq!(remaining(now, seconds(30)), seconds(2), "the hook took it all");
        assert_eq!(remaining(now, seconds(1)), seconds(1));
        assert_eq!(remaining(now, Duration::ZERO), Duration::ZERO);
    }
}
