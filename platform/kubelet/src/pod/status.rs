//! A pod's status in upstream's form, from its object and the local state. Pure.

use std::net::IpAddr;

use mayfly_api::k8s::{
    api::core::v1::{Container, HostIP, Pod, PodCondition, PodIP, PodSpec, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use mayfly_runtime::{REASON_NODE_FAIL, REASON_PREEMPTED};
use serde_json::{Value, json};

use super::{
    container_status::{statuses, with_devices},
    evicting::EVICTED,
    local::{ContainerPhase, LocalPod, REASON_LOST},
    plan::{
        self, Completion, completion, ephemeral_containers, has_initialised, init_failed, is_sidecar,
        needs_collecting, probed_containers,
    },
};

use crate::pressure::LOW_RESOURCE;

/// Upstream's condition of a pod that was ended by a cause outside of it.
const DISRUPTION_TARGET: &str = "DisruptionTarget";
/// The reason of that condition when the kubelet is the cause.
const ENDED_BY_KUBELET: &str = "TerminationByKubelet";
/// The conditions that only the kubelet writes, after the scheduler's binding.
const OWN_CONDITIONS: [&str; 5] =
    ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"];

/// The status to be written to the object. `host`: the node's own address.
pub(crate) fn status(pod: &Pod, local: &LocalPod, host: IpAddr, now: Timestamp) -> PodStatus {
    let old = pod.status.clone().unwrap_or_default();
    let Some(spec) = &pod.spec else { return old };
    let mut phase = phase(spec, local, &old);
    let over = matches!(phase, "Succeeded" | "Failed");
    if over && needs_collecting(pod, local) {
        // Clients that read a final phase assume that the outputs are complete.
        phase = "Running";
    }
    let inits = spec.init_containers.as_deref().unwrap_or_default();
    let is_done = |container: &Container| {
        let known = local.container(&container.name);
        match is_sidecar(container) {
            true => plan::is_started(container, &known),
            false => matches!(&known.now, ContainerPhase::Exited(exit) if exit.exit_code == 0),
        }
    };
    let incomplete: Vec<&str> = match has_initialised(spec, local) {
        true => Vec::new(),
        false => inits.iter().filter(|one| !is_done(one)).map(|one| one.name.as_str()).collect(),
    };
    let unready: Vec<&str> = probed_containers(spec)
        .filter(|container| !plan::is_ready(container, &local.container(&container.name)))
        .map(|container| container.name.as_str())
        .collect();
    let lost = local.containers.values().find_map(|container| match &container.now {
        ContainerPhase::Exited(exit) if exit.reason == REASON_LOST => {
            Some("The pod was lost when the node's agent started again")
        }
        ContainerPhase::Exited(exit)
            if [REASON_NODE_FAIL, REASON_PREEMPTED].contains(&exit.reason.as_str()) =>
        {
            Some(exit.message.as_str())
        }
        _ => None,
    });
    let address = local.address.filter(|_| local.sandbox || over).map(|address| address.to_string());
    let (reason, message) = match &local.ended {
        Some((reason, message)) => (Some((*reason).to_owned()), Some(message.clone())),
        None => (old.reason.clone(), old.message.clone()),
    };
    let disruption = match &local.ended {
        Some((EVICTED, message)) if message.starts_with(LOW_RESOURCE) => Some(message.as_str()),
        _ => lost,
    };
    let facts = Facts {
        phase,
        has_sandbox: local.sandbox,
        incomplete: &incomplete,
        unready: &unready,
        disruption,
        gates: missing_gates(spec, &old),
    };
    let ephemeral: Vec<Container> = ephemeral_containers(spec).collect();
    PodStatus {
        phase: Some(phase.into()),
        conditions: Some(conditions(&old, &facts, now)),
        container_statuses: Some(with_devices(
            statuses(&spec.containers, local, "ContainerCreating", incomplete.is_empty()),
            local,
            old.container_statuses.as_deref(),
        )),
        init_container_statuses: spec.init_containers.as_ref().map(|containers| {
            let mut statuses = statuses(containers, local, "PodInitializing", true);
            for (status, container) in statuses.iter_mut().zip(containers) {
                if !is_sidecar(container) {
                    // As upstream: an init container is ready once it has succeeded.
                    status.ready = is_done(container);
                }
            }
            with_devices(statuses, local, old.init_container_statuses.as_deref())
        }),
        ephemeral_container_statuses: (!ephemeral.is_empty())
            .then(|| statuses(&ephemeral, local, "ContainerCreating", true)),
        host_ip: Some(host.to_string()),
        host_ips: Some(vec![HostIP { ip: host.to_string() }]),
        pod_ips: address.clone().map(|ip| {
            let more = local.more_addresses.iter().map(|address| PodIP { ip: address.to_string() });
            std::iter::once(PodIP { ip }).chain(more).collect()
        }),
        pod_ip: address,
        start_time: old.start_time.clone().or(Some(Time(now))),
        qos_class: old.qos_class.clone(),
        reason,
        message,
        ..old
    }
}

/// The status as a strategic merge patch. Conditions that other components write are left out, so that a write never
/// replaces a newer one of theirs. Conditions are merged field by field, so absent fields are set to null.
pub(super) fn patch(status: &PodStatus) -> Value {
    let mut patch = json!(status);
    let is_own = |condition: &Value| match condition["type"].as_str() {
        Some(DISRUPTION_TARGET) => condition["reason"] == ENDED_BY_KUBELET,
        kind => kind.is_some_and(|kind| OWN_CONDITIONS.contains(&kind)),
    };
    if let Some(conditions) = patch["conditions"].as_array_mut() {
        conditions.retain(is_own);
        for condition in conditions.iter_mut().filter_map(Value::as_object_mut) {
            for field in ["reason", "message"] {
                condition.entry(field).or_insert(Value::Null);
            }
        }
    }
    // The address of an earlier sandbox does not stay.
    if let Some(addresses) = patch["podIPs"].as_array_mut() {
        addresses.push(json!({"$patch": "replace"}));
    }
    patch
}

fn phase(spec: &PodSpec, local: &LocalPod, old: &PodStatus) -> &'static str {
    match old.phase.as_deref() {
        Some("Succeeded") => return "Succeeded",
        Some("Failed") => return "Failed",
        _ => {}
    }
    if local.ended.is_some() || init_failed(spec, local) {
        return "Failed";
    }
    let completions: Vec<_> =
        spec.containers.iter().map(|container| completion(spec, local, container)).collect();
    if completions.iter().all(|completion| matches!(completion, Completion::Succeeded)) {
        return "Succeeded";
    }
    if completions.iter().all(|completion| !matches!(completion, Completion::Alive)) {
        return "Failed";
    }
    // As upstream: running once every container has been started at least once.
    let started = |container: &Container| {
        let local = local.container(&container.name);
        local.last.is_some() || !matches!(local.now, ContainerPhase::Waiting { .. })
    };
    if spec.containers.iter().all(started) { "Running" } else { "Pending" }
}

struct Facts<'a> {
    phase: &'static str,
    has_sandbox: bool,
    /// The init containers that are not done.
    incomplete: &'a [&'a str],
    unready: &'a [&'a str],
    /// The cause, if the pod was ended by something other than its program.
    disruption: Option<&'a str>,
    /// Why the pod is not ready although its containers are.
    gates: Vec<String>,
}

/// Upstream's messages for the pod's readiness gates that are not true.
fn missing_gates(spec: &PodSpec, status: &PodStatus) -> Vec<String> {
    let known = status.conditions.as_deref().unwrap_or_default();
    let gates = spec.readiness_gates.iter().flatten().map(|gate| gate.condition_type.as_str());
    gates
        .filter_map(|gate| match known.iter().find(|condition| condition.type_ == gate) {
            None => Some(format!("corresponding condition of pod readiness gate {gate:?} does not exist.")),
            Some(condition) if condition.status != "True" => {
                let status = &condition.status;
                Some(format!("the status of pod readiness gate {gate:?} is not \"True\", but {status}"))
            }
            Some(_) => None,
        })
        .collect()
}

/// The condition that the pod was not ended by its program; a Job's `podFailurePolicy` reads it.
fn disrupted(known: &[PodCondition], message: &str, now: Timestamp) -> PodCondition {
    let old = known.iter().find(|condition| condition.type_ == DISRUPTION_TARGET);
    old.cloned().unwrap_or_else(|| PodCondition {
        type_: DISRUPTION_TARGET.into(),
        status: "True".into(),
        reason: Some(ENDED_BY_KUBELET.into()),
        message: Some(message.to_owned()),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    })
}

fn conditions(old: &PodStatus, facts: &Facts<'_>, now: Timestamp) -> Vec<PodCondition> {
    let ready = facts.unready.is_empty() && facts.phase == "Running";
    let unready = || format!("containers with unready status: [{}]", facts.unready.join(" "));
    let why = |good: bool| match (good, facts.phase) {
        (true, _) => (None, None),
        (false, "Succeeded") => (Some("PodCompleted".into()), None),
        (false, "Failed") => (Some("PodFailed".into()), None),
        (false, _) => (Some("ContainersNotReady".into()), Some(unready())),
    };
    let incomplete = || format!("containers with incomplete status: [{}]", facts.incomplete.join(" "));
    let (initialised, why_initialised) = match (facts.phase, facts.incomplete) {
        ("Succeeded", _) => (true, (Some("PodCompleted".into()), None)),
        (_, []) => (true, (None, None)),
        _ => (false, (Some("ContainersNotInitialized".into()), Some(incomplete()))),
    };
    let (gated, whether) = match facts.gates.is_empty() || !ready {
        true => (ready, why(ready)),
        false => (false, (Some("ReadinessGatesNotReady".into()), Some(facts.gates.join(", ")))),
    };
    let wanted = [
        ("PodReadyToStartContainers", facts.has_sandbox, (None, None)),
        ("Initialized", initialised, why_initialised),
        ("Ready", gated, whether),
        ("ContainersReady", ready, why(ready)),
        ("PodScheduled", true, (None, None)),
    ];
    let known = old.conditions.as_deref().unwrap_or_default();
    let mut conditions: Vec<PodCondition> = wanted
        .into_iter()
        .map(|(kind, holds, (reason, message))| {
            let status = if holds { "True" } else { "False" };
            let before = known.iter().find(|condition| condition.type_ == kind);
            let since = before.filter(|condition| condition.status == status);
            PodCondition {
                type_: kind.into(),
                status: status.into(),
                reason,
                message,
                last_transition_time: since
                    .and_then(|condition| condition.last_transition_time.clone())
                    .or(Some(Time(now))),
                ..PodCondition::default()
            }
        })
        .collect();
    if let Some(message) = facts.disruption.filter(|_| facts.phase == "Failed") {
        conditions.push(disrupted(known, message, now));
    }
    let foreign = known.iter().filter(|known| !conditions.iter().any(|own| own.type_ == known.type_));
    let foreign: Vec<_> = foreign.cloned().collect();
    conditions.extend(foreign);
    conditions
}

#[cfg(test)]
mod tests {
    use mayfly_api::job_io;
    use mayfly_runtime::{ContainerId, ContainerState};

    use super::*;

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 7));

    #[test]
    fn conditions_of_other_components_are_not_written() {
        let condition =
            |kind: &str, reason: Option<&str>| json!({"type": kind, "status": "True", "reason": reason});
        let status = |conditions: Vec<Value>| -> PodStatus {
            serde_json::from_value(json!({"conditions": conditions, "podIPs": [{"ip": "10.0.0.2"}]})).unwrap()
        };
        let own = [condition("Ready", None), condition(DISRUPTION_TARGET, Some(ENDED_BY_KUBELET))];
        let patched = patch(&status(own.to_vec()));
        assert_eq!(patched["conditions"].as_array().unwrap().len(), 2);
        assert_eq!(patched["conditions"][0].get("reason"), Some(&Value::Null), "an old reason is removed");
        assert_eq!(patched["podIPs"], json!([{"ip": "10.0.0.2"}, {"$patch": "replace"}]));
        let foreign = [
            condition("example.com/gate", None),
            condition(DISRUPTION_TARGET, Some("PreemptionByScheduler")),
        ];
        assert_eq!(patch(&status(foreign.to_vec()))["conditions"], json!([]));
    }

    /// A condition as `status reason message`.
    fn shown(status: &PodStatus, kind: &str) -> String {
        let found = status.conditions.iter().flatten().find(|condition| condition.type_ == kind).unwrap();
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        format!("{} {} {}", found.status, text(&found.reason), text(&found.message)).trim_end().to_owned()
    }

    #[test]
    fn conditions_have_upstreams_reasons() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"},
            "spec": {"restartPolicy": "Never", "initContainers": [{"name": "first"}, {"name": "second"}],
                "containers": [{"name": "main"}]}}))
        .unwrap();
        let at = Timestamp::UNIX_EPOCH;
        let running = ContainerState::Running { started: at };
        let ended = |exit_code| {
            let (reason, message) = (String::new(), String::new());
            ContainerState::Exited { started: at, finished: at, exit_code, reason, message }
        };
        let of = |sandbox: bool, states: &[(&str, ContainerState)]| {
            let mut local = LocalPod::from_status(&pod, &[]);
            local.sandbox = sandbox;
            let id = |name: &str| ContainerId { pod: local.uid.clone(), name: name.into(), attempt: 0 };
            let states: Vec<_> = states.iter().map(|(name, state)| (id(name), state.clone())).collect();
            local.observe(&states);
            status(&pod, &local, HOST, at)
        };
        let inits = |status: &PodStatus| -> Vec<bool> {
            status.init_container_statuses.iter().flatten().map(|one| one.ready).collect()
        };
        let unready = "False ContainersNotReady containers with unready status: [main]";

        let new = of(false, &[]);
        assert_eq!(shown(&new, "PodReadyToStartContainers"), "False");
        let made = of(true, &[("first", running.clone())]);
        assert_eq!(shown(&made, "PodReadyToStartContainers"), "True", "while images are pulled, too");
        assert_eq!(
            shown(&made, "Initialized"),
            "False ContainersNotInitialized containers with incomplete status: [first second]"
        );
        assert_eq!(shown(&made, "Ready"), unready);
        assert_eq!(inits(&made), [false, false], "an init container that runs is not ready");

        let half = of(true, &[("first", ended(0)), ("second", running.clone())]);
        assert_eq!(
            shown(&half, "Initialized"),
            "False ContainersNotInitialized containers with incomplete status: [second]"
        );
        assert_eq!(inits(&half), [true, false]);

        let done = [("first", ended(0)), ("second", ended(0))];
        let runs = of(true, &[&done[..], &[("main", running)]].concat());
        assert_eq!(shown(&runs, "Initialized"), "True");
        assert_eq!(shown(&runs, "Ready"), "True");
        assert_eq!(inits(&runs), [true, true]);

        let succeeded = of(false, &[&done[..], &[("main", ended(0))]].concat());
        assert_eq!(shown(&succeeded, "Initialized"), "True PodCompleted");
        assert_eq!(shown(&succeeded, "ContainersReady"), "False PodCompleted");
        assert_eq!(shown(&succeeded, "PodReadyToStartContainers"), "False");
        let failed = of(false, &[&done[..], &[("main", ended(1))]].concat());
        assert_eq!(shown(&failed, "Initialized"), "True");
        assert_eq!(shown(&failed, "Ready"), "False PodFailed");
    }

    #[test]
    fn an_end_that_the_program_did_not_cause_is_a_disruption() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"},
            "spec": {"restartPolicy": "Never", "containers": [{"name": "main"}]}}))
        .unwrap();
        let at = Timestamp::UNIX_EPOCH;
        for (reason, disrupted) in [(REASON_NODE_FAIL, true), (REASON_PREEMPTED, true), ("Error", false)] {
            let mut local = LocalPod::from_status(&pod, &[]);
            let id = ContainerId { pod: local.uid.clone(), name: "main".into(), attempt: 0 };
            let (reason, message) = (reason.to_owned(), "Slurm job 7".to_owned());
            let exit = ContainerState::Exited { started: at, finished: at, exit_code: 137, reason, message };
            local.observe(&[(id, exit)]);
            let status = status(&pod, &local, HOST, at);
            assert_eq!(status.phase.as_deref(), Some("Failed"));
            let conditions = status.conditions.unwrap();
            let found = conditions.iter().find(|condition| condition.type_ == DISRUPTION_TARGET);
            assert_eq!(found.is_some(), disrupted);
            if let Some(found) = found {
                assert_eq!(found.message.as_deref(), Some("Slurm job 7"));
            }
        }
    }

    #[test]
    fn a_restarted_node_fails_a_pod_whose_artifact_did_not_reach_its_target() {
        let at = Timestamp::UNIX_EPOCH;
        for (unsent, phase) in [(None, "Succeeded"), (Some("the server answers 404 Not Found"), "Failed")] {
            let document = format!("sha256:{}", "0".repeat(64));
            let mut outputs = json!({"document": document, "artifacts": []});
            if let Some(unsent) = unsent {
                outputs["unsent"] = unsent.into();
            }
            let annotations =
                json!({job_io::ANNOTATION_INPUTS: "{}", job_io::ANNOTATION_OUTPUTS: outputs.to_string()});
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "p", "uid": "u", "annotations": annotations},
                "spec": {"restartPolicy": "Never", "containers": [{"name": "main"}]}}))
            .unwrap();
            let mut local = LocalPod::from_status(&pod, &[]);
            let id = ContainerId { pod: local.uid.clone(), name: "main".into(), attempt: 0 };
            let (reason, message) = ("Completed".to_owned(), String::new());
            let exit = ContainerState::Exited { started: at, finished: at, exit_code: 0, reason, message };
            local.observe(&[(id, exit)]);
            let status = status(&pod, &local, HOST, at);
            assert_eq!(status.phase.as_deref(), Some(phase));
            assert_eq!(status.message.as_deref(), unsent);
        }
    }
}
