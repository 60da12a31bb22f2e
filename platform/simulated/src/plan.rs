//! The next step of a simulated pod, from its object alone. Pure.
//!
//! ```text
//!  bound ── start ──▶ running ── ready ──▶ ready ── run ──▶ ended: Succeeded, Failed, or running again
//!    └─────────────────── deleted: after `stop`, the object goes ◀──────────────────────┘
//! ```

use std::time::Duration;

use mayfly_api::k8s::{
    api::core::v1::{
        ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
        ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodSpec, PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};

use crate::behavior::Behavior;

/// The next action on a pod, and its time.
#[derive(Clone, Debug, PartialEq)]
pub struct DueStep {
    pub at: Timestamp,
    pub step: PodStep,
}

#[derive(Clone, Debug, PartialEq)]
pub enum PodStep {
    WriteStatus(Box<PodStatus>),
    /// Remove the object of the deleted pod.
    Remove,
}

/// The next step; `None` when nothing happens to the pod any more. `address` is the pod's, where it has none yet.
pub fn next(pod: &Pod, host_address: &str, address: &str, now: Timestamp) -> Option<DueStep> {
    let spec = pod.spec.as_ref()?;
    let behavior = Behavior::of(pod);
    if let Some(deleted) = &pod.metadata.deletion_timestamp {
        let grace =
            Duration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0).unsigned_abs());
        // The API sets the deletion timestamp to the end of the grace period.
        let asked = deleted.0 - span(grace);
        return Some(DueStep { at: asked + span(behavior.stop.min(grace)), step: PodStep::Remove });
    }
    let old = pod.status.clone().unwrap_or_default();
    let life = Life { spec, behavior: &behavior, old: &old, host_address, address };
    let running = running_since(&old);
    match (old.phase.as_deref().unwrap_or("Pending"), running) {
        ("Succeeded" | "Failed", _) => None,
        ("Running", Some(since)) => life.after_running(since, now),
        _ => life.starting(pod, now),
    }
}

fn span(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

fn running_since(status: &PodStatus) -> Option<Timestamp> {
    let containers = status.container_statuses.iter().flatten();
    let started = containers
        .filter_map(|container| Some(container.state.as_ref()?.running.as_ref()?.started_at.as_ref()?.0));
    started.max()
}

fn is_ready(status: &PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

struct Life<'a> {
    spec: &'a PodSpec,
    behavior: &'a Behavior,
    old: &'a PodStatus,
    host_address: &'a str,
    address: &'a str,
}

impl Life<'_> {
    fn starting(&self, pod: &Pod, now: Timestamp) -> Option<DueStep> {
        let scheduled = self.old.conditions.iter().flatten().find(|known| known.type_ == "PodScheduled");
        let bound =
            scheduled.and_then(|condition| condition.last_transition_time.as_ref()).map(|time| time.0);
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let at = bound.or(created).unwrap_or(now) + span(self.behavior.start);
        if let Some(error) = &self.behavior.start_error {
            let is_known = self.old.container_statuses.iter().flatten().any(|container| {
                let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
                waiting.is_some_and(|waiting| waiting.message.as_ref() == Some(error))
            });
            let waiting = ContainerState {
                waiting: Some(ContainerStateWaiting {
                    reason: Some("CreateContainerError".into()),
                    message: Some(error.clone()),
                }),
                ..ContainerState::default()
            };
            let status = self.status("Pending", false, &waiting, now);
            return (!is_known).then(|| DueStep { at, step: PodStep::WriteStatus(Box::new(status)) });
        }
        let ready = self.behavior.ready.is_zero();
        Some(DueStep { at, step: self.run(ready, now.max(at)) })
    }

    fn run(&self, ready: bool, since: Timestamp) -> PodStep {
        let running = ContainerState {
            running: Some(ContainerStateRunning { started_at: Some(Time(since)) }),
            ..ContainerState::default()
        };
        PodStep::WriteStatus(Box::new(self.status("Running", ready, &running, since)))
    }

    fn after_running(&self, since: Timestamp, now: Timestamp) -> Option<DueStep> {
        let ends = self.behavior.run.map(|run| since + span(run));
        let ready_at = since + span(self.behavior.ready);
        if !is_ready(self.old) && ends.is_none_or(|ends| ready_at < ends) {
            let running = self.old.container_statuses.iter().flatten().find_map(|one| one.state.clone());
            let status = self.status("Running", true, &running.unwrap_or_default(), now.max(ready_at));
            return Some(DueStep { at: ready_at, step: PodStep::WriteStatus(Box::new(status)) });
        }
        let at = ends?;
        let code = self.behavior.exit_code;
        let again = match self.spec.restart_policy.as_deref() {
            Some("Never") => false,
            Some("OnFailure") => code != 0,
            _ => true,
        };
        let ended = ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: code,
                reason: Some(if code == 0 { "Completed" } else { "Error" }.into()),
                started_at: Some(Time(since)),
                finished_at: Some(Time(now.max(at))),
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        };
        let mut status = match again {
            true => {
                let running = ContainerState {
                    running: Some(ContainerStateRunning { started_at: Some(Time(now.max(at))) }),
                    ..ContainerState::default()
                };
                self.status("Running", self.behavior.ready.is_zero(), &running, now.max(at))
            }
            false => {
                let phase = if code == 0 { "Succeeded" } else { "Failed" };
                self.status(phase, false, &ended, now.max(at))
            }
        };
        if again {
            for container in status.container_statuses.iter_mut().flatten() {
                container.restart_count += 1;
                container.last_state = Some(ended.clone());
            }
        }
        Some(DueStep { at, step: PodStep::WriteStatus(Box::new(status)) })
    }

    fn status(&self, phase: &str, ready: bool, state: &ContainerState, now: Timestamp) -> PodStatus {
        let address = self.old.pod_ip.clone().unwrap_or_else(|| self.address.to_owned());
        let is_over = matches!(phase, "Succeeded" | "Failed");
        let running = phase == "Running";
        let statuses = self.spec.containers.iter().map(|container| {
            let known =
                self.old.container_statuses.iter().flatten().find(|known| known.name == container.name);
            ContainerStatus {
                name: container.name.clone(),
                image: container.image.clone().unwrap_or_default(),
                image_id: format!("simulated://{}", container.image.as_deref().unwrap_or_default()),
                container_id: Some(format!("simulated://{}", container.name)),
                ready,
                started: Some(running),
                restart_count: known.map_or(0, |known| known.restart_count),
                last_state: known.and_then(|known| known.last_state.clone()),
                state: Some(state.clone()),
                ..ContainerStatus::default()
            }
        });
        PodStatus {
            phase: Some(phase.into()),
            conditions: Some(self.conditions(running || is_over, running && ready, now)),
            container_statuses: Some(statuses.collect()),
            host_ip: Some(self.host_address.to_owned()),
            host_ips: Some(vec![HostIP { ip: self.host_address.to_owned() }]),
            pod_ips: Some(vec![PodIP { ip: address.clone() }]),
            pod_ip: Some(address),
            start_time: self.old.start_time.clone().or(Some(Time(now))),
            qos_class: self.old.qos_class.clone(),
            ..PodStatus::default()
        }
    }

    fn conditions(&self, initialised: bool, ready: bool, now: Timestamp) -> Vec<PodCondition> {
        let wanted = [
            ("PodReadyToStartContainers", true),
            ("Initialized", initialised),
            ("Ready", ready),
            ("ContainersReady", ready),
            ("PodScheduled", true),
        ];
        let known = self.old.conditions.as_deref().unwrap_or_default();
        let mut conditions: Vec<_> = wanted
            .into_iter()
            .map(|(kind, holds)| {
                let status = if holds { "True" } else { "False" };
                let before = known.iter().find(|known| known.type_ == kind && known.status == status);
                before.cloned().unwrap_or_else(|| PodCondition {
                    type_: kind.into(),
                    status: status.into(),
                    last_transition_time: Some(Time(now)),
                    ..PodCondition::default()
                })
            })
            .collect();
        let foreign = known.iter().filter(|known| !wanted.iter().any(|(kind, _)| *kind == known.type_));
        conditions.extend(foreign.cloned());
        conditions
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    fn pod(annotations: Value, policy: &str) -> Pod {
        let scheduled =
            json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": at(0).to_string()});
        serde_json::from_value(json!({
            "metadata": {"name": "a", "annotations": annotations},
            "spec": {"restartPolicy": policy, "containers": [{"name": "c", "image": "i"}]},
            "status": {"phase": "Pending", "conditions": [scheduled]},
        }))
        .unwrap()
    }

    /// Carries out steps, each when it is due, and returns a line for each.
    fn live(mut pod: Pod, steps: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let mut now = at(0);
        for _ in 0..steps {
            let Some(due) = next(&pod, "10.0.0.1", "10.1.0.1", now) else { break };
            now = now.max(due.at);
            let PodStep::WriteStatus(_) = &due.step else {
                lines.push(format!("{}: gone", now.as_second() - at(0).as_second()));
                break;
            };
            let Some(DueStep { step: PodStep::WriteStatus(status), .. }) =
                next(&pod, "10.0.0.1", "10.1.0.1", now)
            else {
                break;
            };
            let container = &status.container_statuses.as_ref().unwrap()[0];
            lines.push(format!(
                "{}: {} ready={} restarts={}",
                now.as_second() - at(0).as_second(),
                status.phase.as_deref().unwrap(),
                container.ready,
                container.restart_count
            ));
            pod.status = Some(*status);
        }
        lines
    }

    #[test]
    fn a_pod_starts_becomes_ready_and_stays() {
        let seconds =
            json!({"simulated.mayfly.dev/start-seconds": "2", "simulated.mayfly.dev/ready-seconds": "3"});
        assert_eq!(
            live(pod(seconds, "Always"), 5),
            ["2: Running ready=false restarts=0", "5: Running ready=true restarts=0"]
        );
        assert_eq!(live(pod(json!({}), "Always"), 5), ["0: Running ready=true restarts=0"]);
    }

    #[test]
    fn a_pod_that_ends_is_over_or_runs_again_by_its_policy() {
        let run = |code: &str| json!({"simulated.mayfly.dev/run-seconds": "4", "simulated.mayfly.dev/exit-code": code});
        assert_eq!(live(pod(run("0"), "Never"), 5)[1], "4: Succeeded ready=false restarts=0");
        assert_eq!(live(pod(run("3"), "Never"), 5)[1], "4: Failed ready=false restarts=0");
        assert_eq!(live(pod(run("0"), "OnFailure"), 5)[1], "4: Succeeded ready=false restarts=0");
        let again = live(pod(run("3"), "OnFailure"), 3);
        assert_eq!(again[1..], ["4: Running ready=true restarts=1", "8: Running ready=true restarts=2"]);
    }

    #[test]
    fn a_pod_that_cannot_start_says_so_once() {
        let error = json!({"simulated.mayfly.dev/start-error": "no such image"});
        let pod = pod(error, "Always");
        let Some(DueStep { step: PodStep::WriteStatus(status), .. }) = next(&pod, "h", "p", at(0)) else {
            panic!("a status is written");
        };
        let state = status.container_statuses.as_ref().unwrap()[0].state.clone().unwrap();
        assert_eq!(state.waiting.unwrap().message.as_deref(), Some("no such image"));
        let told = Pod { status: Some(*status), ..pod };
        assert_eq!(next(&told, "h", "p", at(1)), None);
    }

    #[test]
    fn a_deleted_pod_goes_after_its_time_or_the_grace_period() {
        let deleted = |stop: &str, grace: i64| {
            let mut pod = pod(json!({"simulated.mayfly.dev/stop-seconds": stop}), "Always");
            pod.metadata.deletion_timestamp = Some(Time(at(grace)));
            pod.metadata.deletion_grace_period_seconds = Some(grace);
            live(pod, 1)
        };
        assert_eq!(deleted("5", 30), ["5: gone"]);
        assert_eq!(deleted("50", 30), ["30: gone"]);
        assert_eq!(deleted("0", 30), ["0: gone"]);
    }
}
