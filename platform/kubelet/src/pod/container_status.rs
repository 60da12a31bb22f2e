//! The statuses of a pod's containers in upstream's form. Pure.

use mayfly_api::k8s::{
    api::core::v1::{
        Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
        ContainerStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::{
    local::{ContainerPhase, Exit, LocalContainer, LocalPod, UsedImage},
    plan,
};

/// The statuses of containers. `waiting`: the reason of those that have not been started; `may_start`: whether init
/// containers are not in the way.
pub(super) fn statuses(
    containers: &[Container],
    local: &LocalPod,
    waiting: &str,
    may_start: bool,
) -> Vec<ContainerStatus> {
    containers
        .iter()
        .map(|container| {
            let mut known = local.container(&container.name);
            if let ContainerPhase::Waiting { reason, .. } = &mut known.now
                && reason == "ContainerCreating"
            {
                *reason = if may_start { waiting.into() } else { "PodInitializing".into() };
            }
            container_status(container, &local.uid.0, &known)
        })
        .collect()
}

/// Adds the health of the containers' devices. After a restart of the node, the known one stays until a device
/// reports: those of an ended pod never do.
pub(super) fn with_devices(
    mut statuses: Vec<ContainerStatus>,
    local: &LocalPod,
    old: Option<&[ContainerStatus]>,
) -> Vec<ContainerStatus> {
    for status in &mut statuses {
        let known = || old?.iter().find(|old| old.name == status.name)?.allocated_resources_status.clone();
        let devices = local.devices.get(&status.name).cloned().or_else(known);
        status.allocated_resources_status = devices;
    }
    statuses
}

fn container_status(container: &Container, uid: &str, known: &LocalContainer) -> ContainerStatus {
    let id = |attempt: u32| format!("mayfly://{uid}_{}_{attempt}", container.name);
    // While a container waits for its restart, its identity is that of the attempt before, as upstream.
    let shown = match known.now {
        ContainerPhase::Waiting { .. } => known.last.as_ref().and(known.attempt.checked_sub(1)),
        ContainerPhase::Running { .. } | ContainerPhase::Exited(_) => Some(known.attempt),
    };
    let named = container.image.clone().unwrap_or_default();
    let used = || known.image.clone().unwrap_or(UsedImage { reference: named.clone(), id: named.clone() });
    let UsedImage { reference, id: image_id } =
        shown.map_or_else(|| UsedImage { reference: named.clone(), id: String::new() }, |_| used());
    ContainerStatus {
        name: container.name.clone(),
        image: reference,
        image_id,
        container_id: shown.map(id),
        ready: plan::is_ready(container, known),
        started: Some(plan::is_started(container, known)),
        restart_count: i32::try_from(known.attempt).unwrap_or(i32::MAX),
        state: Some(match &known.now {
            ContainerPhase::Waiting { reason, message } => ContainerState {
                waiting: Some(ContainerStateWaiting {
                    reason: Some(reason.clone()),
                    message: Some(message.clone()).filter(|text| !text.is_empty()),
                }),
                ..ContainerState::default()
            },
            ContainerPhase::Running { started } => ContainerState {
                running: Some(ContainerStateRunning { started_at: Some(Time(*started)) }),
                ..ContainerState::default()
            },
            ContainerPhase::Exited(exit) => terminated(exit, Some(id(known.attempt))),
        }),
        last_state: known.last.as_ref().map(|exit| terminated(exit, known.attempt.checked_sub(1).map(id))),
        ..ContainerStatus::default()
    }
}

fn terminated(exit: &Exit, container_id: Option<String>) -> ContainerState {
    ContainerState {
        terminated: Some(ContainerStateTerminated {
            exit_code: exit.exit_code,
            reason: Some(exit.reason.clone()),
            message: Some(exit.message.clone()).filter(|text| !text.is_empty()),
            started_at: Some(Time(exit.started)),
            finished_at: Some(Time(exit.finished)),
            container_id,
            ..ContainerStateTerminated::default()
        }),
        ..ContainerState::default()
    }
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::{api::core::v1::Pod, jiff::Timestamp};
    use serde_json::json;

    use super::*;
    use crate::pod::local::Clocks;

    #[test]
    fn a_container_shows_its_image_and_its_attempt_while_it_waits_for_the_next_one() {
        let (spec, at) = (json!({"name": "main", "image": "busybox"}), Timestamp::UNIX_EPOCH);
        let spec: Container = serde_json::from_value(spec).unwrap();
        let mut known = LocalContainer::default();
        let shown = |known: &LocalContainer| {
            let status = container_status(&spec, "u", known);
            let of = |state: Option<ContainerState>| state?.terminated?.container_id;
            let ids =
                [status.container_id, of(status.state), of(status.last_state)].map(Option::unwrap_or_default);
            [[status.image, status.image_id].as_slice(), &ids].concat()
        };
        let image =
            |reference: &str, id: &str| Some(UsedImage { reference: reference.into(), id: id.into() });
        known.image = image("docker.io/library/busybox:latest", "docker.io/library/busybox@sha256:00");
        assert_eq!(shown(&known), ["busybox", "", "", "", ""], "not started yet");
        known.started(at);
        let (full, id) = ("docker.io/library/busybox:latest", "docker.io/library/busybox@sha256:00");
        assert_eq!(shown(&known), [full, id, "mayfly://u_main_0", "", ""]);
        let status = container_status(&spec, "u", &known);
        let (reason, message) = ("Error".into(), String::new());
        known.now = ContainerPhase::Exited(Exit { started: at, finished: at, exit_code: 1, reason, message });
        assert_eq!(shown(&known), [full, id, "mayfly://u_main_0", "mayfly://u_main_0", ""]);
        known.restart_later("main", Clocks::now());
        assert_eq!(shown(&known), [full, id, "mayfly://u_main_0", "", "mayfly://u_main_0"]);
        // A restarted node reads it from the status, also for a runtime without an image store.
        let pod = |status: &ContainerStatus| -> Pod {
            serde_json::from_value(json!({"status": {"containerStatuses": [status]}})).unwrap()
        };
        assert_eq!(LocalPod::from_status(&pod(&status), &[]).container("main").image, image(full, id));
        known = LocalContainer::default();
        known.started(at);
        assert_eq!(shown(&known), ["busybox", "busybox", "mayfly://u_main_0", "", ""]);
    }
}
