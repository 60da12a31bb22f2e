//! Changes of the definition of running containers: of all its fields, only the image of a container can be changed.
//! Pure.

use mayfly_api::k8s::api::core::v1::{Container, PodSpec};
use mayfly_distribution::parse_reference;

use super::{
    local::{ContainerPhase, LocalContainer, LocalPod},
    plan::{ContainerKill, grace_of, probed_containers},
};

/// A running container whose image is not that of the pod's spec any more. It is restarted whatever its restart policy,
/// as upstream.
pub(super) fn changed(spec: &PodSpec, local: &LocalPod) -> Option<ContainerKill> {
    let container = probed_containers(spec).find(|container| {
        let known = local.container(&container.name);
        matches!(known.now, ContainerPhase::Running { .. }) && !has_image_of(container, &known)
    })?;
    Some(ContainerKill {
        message: format!("Container {} definition changed, will be restarted", container.name),
        grace: grace_of(spec),
        container: container.clone(),
        replaces: true,
    })
}

/// The runtime's name of an image is complete: `busybox` is `docker.io/library/busybox:latest`.
fn has_image_of(container: &Container, known: &LocalContainer) -> bool {
    let Some(used) = &known.image else { return true };
    let named = container.image.as_deref().unwrap_or_default();
    used.reference == named || parse_reference(named).is_ok_and(|name| name.whole() == used.reference)
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::pod::local::UsedImage;

    #[test]
    fn a_running_container_with_another_image_is_replaced() {
        let pinned = format!("a/b@sha256:{}", "0".repeat(64));
        for (used, named, replaced) in [
            ("docker.io/library/busybox:latest", "busybox", None),
            ("docker.io/library/busybox:latest", "busybox:latest", None),
            (
                "docker.io/library/busybox:latest",
                "busybox:2",
                Some("Container main definition changed, will be restarted"),
            ),
            ("busybox", "busybox", None),
            ("Not A Name", "Not A Name", None),
            (&*format!("docker.io/{pinned}"), &*pinned, None),
        ] {
            let pod = json!({"spec": {"containers": [{"name": "main", "image": named}], "terminationGracePeriodSeconds": 7}});
            let pod = serde_json::from_value(pod).unwrap();
            let mut local = LocalPod::from_status(&pod, &[]);
            let spec = pod.spec.unwrap();
            let known = local.containers.entry("main".into()).or_default();
            known.image = Some(UsedImage { reference: used.into(), id: String::new() });
            assert_eq!(changed(&spec, &local), None, "it does not run yet");
            local.containers.get_mut("main").unwrap().started(Timestamp::UNIX_EPOCH);
            let kill = changed(&spec, &local);
            assert_eq!(kill.as_ref().map(|kill| &*kill.message), replaced, "{used} {named}");
            assert!(kill.is_none_or(|kill| kill.replaces && kill.grace.as_secs() == 7));
        }
    }
}
