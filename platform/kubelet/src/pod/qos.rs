//! The quality of service of a pod: its class, the values of its cgroup, and the scores of its containers for the
//! kernel's out-of-memory killer. Pure; the rules are upstream's (`kubelet/cm/helpers_linux.go`,
//! `kubelet/qos/policy.go`).

use mayfly_api::{
    k8s::api::core::v1::{Container, Pod, PodSpec},
    resources::Amounts,
};
use mayfly_runtime::{PodCgroup, QosClass};

use super::plan::{is_sidecar, sidecars};

const OOM_SCORE_GUARANTEED: i32 = -997;
const OOM_SCORE_BEST_EFFORT: i32 = 1000;
/// The priority class of pods that the node cannot work without, and the lowest priority of a critical pod.
const NODE_CRITICAL: &str = "system-node-critical";
const CRITICAL_PRIORITY_MIN: i32 = 2_000_000_000;

/// The QoS class in the pod's status.
fn class(pod: &Pod) -> QosClass {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some("Guaranteed") => QosClass::Guaranteed,
        Some("Burstable") => QosClass::Burstable,
        _ => QosClass::BestEffort,
    }
}

/// The values of the pod's cgroup. A burstable pod has a limit if all its containers have one.
pub(crate) fn cgroup(pod: &Pod) -> PodCgroup {
    let class = class(pod);
    let Some(spec) = pod.spec.as_ref().filter(|_| class != QosClass::BestEffort) else {
        return PodCgroup { class, ..PodCgroup::default() };
    };
    let limits = Amounts::limits_of_pod(spec);
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let limit = |name: &str| {
        let is_limited = |container: &Container| Amounts::limits_of_container(container).get(name) > 0;
        containers.clone().all(is_limited).then(|| limits.get(name))
    };
    PodCgroup {
        class,
        cpu_millis_request: Amounts::of_pod(spec).get("cpu"),
        cpu_millis_max: limit("cpu"),
        memory_bytes_max: limit("memory"),
    }
}

/// The score of one container. `memory_bytes` is the node's memory.
pub(crate) fn oom_score(pod: &Pod, container: &Container, memory_bytes: u64) -> i32 {
    let Some(spec) = &pod.spec else { return OOM_SCORE_BEST_EFFORT };
    let is_critical = spec.priority_class_name.as_deref() == Some(NODE_CRITICAL)
        && spec.priority.is_some_and(|priority| priority >= CRITICAL_PRIORITY_MIN);
    match class(pod) {
        _ if is_critical => OOM_SCORE_GUARANTEED,
        QosClass::Guaranteed => OOM_SCORE_GUARANTEED,
        QosClass::BestEffort => OOM_SCORE_BEST_EFFORT,
        QosClass::Burstable => {
            let own = burstable_score(container, memory_bytes);
            let score = match is_sidecar_of(spec, container) {
                // A sidecar is not killed before the containers that it serves.
                true => {
                    let served = spec.containers.iter().map(|served| burstable_score(served, memory_bytes));
                    served.min().map_or(own, |served| own.min(served))
                }
                false => own,
            };
            // Between the scores of the other two classes.
            score.clamp(1000 + OOM_SCORE_GUARANTEED, OOM_SCORE_BEST_EFFORT - 1)
        }
    }
}

fn is_sidecar_of(spec: &PodSpec, container: &Container) -> bool {
    is_sidecar(container) && sidecars(spec).any(|sidecar| sidecar.name == container.name)
}

/// The larger the share of the node's memory that a container requests, the smaller its score.
fn burstable_score(container: &Container, memory_bytes: u64) -> i32 {
    let requested = Amounts::of_container(container).get("memory");
    let share = requested.saturating_mul(1000) / memory_bytes.max(1);
    1000 - i32::try_from(share).unwrap_or(1000)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(class: &str, spec: Value) -> Pod {
        serde_json::from_value(
            json!({"metadata": {"name": "p"}, "spec": spec, "status": {"qosClass": class}}),
        )
        .unwrap()
    }

    fn container(name: &str, requests: Value, limits: Value) -> Value {
        json!({"name": name, "resources": {"requests": requests, "limits": limits}})
    }

    #[test]
    fn a_pods_cgroup_follows_its_class() {
        let full = json!({"cpu": "500m", "memory": "64Mi"});
        let guaranteed = pod(
            "Guaranteed",
            json!({"containers": [
            container("a", full.clone(), full.clone()), container("b", full.clone(), full.clone())]}),
        );
        assert_eq!(
            cgroup(&guaranteed),
            PodCgroup {
                class: QosClass::Guaranteed,
                cpu_millis_request: 1000,
                cpu_millis_max: Some(1000),
                memory_bytes_max: Some(128 << 20),
            }
        );
        let best_effort = pod("BestEffort", json!({"containers": [{"name": "a"}]}));
        let expected = PodCgroup { class: QosClass::BestEffort, ..PodCgroup::default() };
        assert_eq!(cgroup(&best_effort), expected);
    }

    #[test]
    fn a_burstable_pod_is_limited_where_all_its_containers_are() {
        let requests = json!({"cpu": "100m"});
        let limited = container("a", requests.clone(), json!({"cpu": "1", "memory": "32Mi"}));
        let half = container("b", requests.clone(), json!({"memory": "32Mi"}));
        let init = container("i", requests, json!({"cpu": "2", "memory": "256Mi"}));
        let values = |spec: Value| {
            let cgroup = cgroup(&pod("Burstable", spec));
            (cgroup.cpu_millis_request, cgroup.cpu_millis_max, cgroup.memory_bytes_max)
        };
        assert_eq!(
            values(json!({"containers": [limited, half]})),
            (200, None, Some(64 << 20)),
            "one container may use any processor time"
        );
        assert_eq!(
            values(json!({"containers": [limited], "initContainers": [init]})),
            (100, Some(2000), Some(256 << 20)),
            "the init container may use more than the containers"
        );
        assert_eq!(
            values(json!({"containers": [limited], "overhead": {"cpu": "50m", "memory": "1Mi"}})),
            (150, Some(1050), Some(33 << 20))
        );
    }

    #[test]
    fn scores_follow_the_class_and_the_request() {
        let score = |class: &str, memory: &str| {
            let pod =
                pod(class, json!({"containers": [container("a", json!({"memory": memory}), json!({}))]}));
            oom_score(&pod, &pod.spec.as_ref().unwrap().containers[0], 1000)
        };
        for (class, memory, expected) in [
            ("Guaranteed", "1", -997),
            ("BestEffort", "0", 1000),
            ("Burstable", "250", 750),
            ("Burstable", "0", 999),
            ("Burstable", "1000", 3),
        ] {
            assert_eq!(score(class, memory), expected, "{class} {memory}");
        }
    }

    #[test]
    fn critical_pods_and_sidecars_are_killed_late() {
        let asks = |name: &str, memory: &str| container(name, json!({"memory": memory}), json!({}));
        let mut sidecar = asks("s", "100");
        sidecar["restartPolicy"] = json!("Always");
        let mut spec = json!({"containers": [asks("a", "400"), asks("b", "300")],
            "initContainers": [sidecar, asks("i", "100")]});
        let burstable = pod("Burstable", spec.clone());
        let inits = burstable.spec.as_ref().unwrap().init_containers.as_ref().unwrap();
        assert_eq!(oom_score(&burstable, &inits[0], 1000), 600, "that of the container it serves");
        assert_eq!(oom_score(&burstable, &inits[1], 1000), 900);
        spec["priorityClassName"] = json!(NODE_CRITICAL);
        spec["priority"] = json!(CRITICAL_PRIORITY_MIN + 1000);
        let critical = pod("Burstable", spec);
        assert_eq!(oom_score(&critical, &inits[1], 1000), -997);
    }
}
