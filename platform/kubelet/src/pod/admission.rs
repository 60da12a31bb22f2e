//! What this node does not accept: a pod that asks for something which the node would silently leave out, or that may
//! not have it. Pure.

use mayfly_api::k8s::api::core::v1::{AppArmorProfile, Pod};

use super::sysctls;

/// Upstream's reason of a pod with an AppArmor profile on a node without AppArmor.
const REASON_APP_ARMOR: &str = "AppArmor";

/// The reason and message of a pod that ends before anything of it is made. `unsafe_sysctls`: see
/// [`sysctls::forbidden`].
pub(super) fn refusal(pod: &Pod, unsafe_sysctls: &[String]) -> Option<(&'static str, String)> {
    if needs_app_armor(pod) {
        let message = "Cannot enforce AppArmor: this node does not support AppArmor profiles";
        return Some((REASON_APP_ARMOR, message.into()));
    }
    sysctls::forbidden(pod, unsafe_sysctls).map(|message| (sysctls::REASON_FORBIDDEN, message))
}

/// Whether the pod or one of its containers has a profile other than `Unconfined` (upstream's `isRequired`).
fn needs_app_armor(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let is_confined = |profile: &AppArmorProfile| profile.type_ != "Unconfined";
    let of_pod = spec.security_context.as_ref().and_then(|security| security.app_armor_profile.as_ref());
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let of_containers =
        containers.filter_map(|container| container.security_context.as_ref()?.app_armor_profile.as_ref());
    of_pod.into_iter().chain(of_containers).any(is_confined)
}

/// The message for a pod whose sandbox cannot be made as its spec says. `has_kernel_namespaces`: whether its runtime
/// runs containers of the kernel.
pub(super) fn sandbox_refusal(pod: &Pod, has_kernel_namespaces: bool) -> Option<String> {
    let wants_own_users = pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false);
    (wants_own_users && has_kernel_namespaces)
        .then(|| "can't set `spec.hostUsers: false`, runtime does not support user namespaces".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    #[test]
    fn a_profile_that_is_not_applied_is_refused() {
        let profile = |kind: &str| json!({"appArmorProfile": {"type": kind}});
        for (spec, reason) in [
            (json!({"containers": [{"name": "c"}]}), None),
            (json!({"containers": [{"name": "c"}], "securityContext": profile("Unconfined")}), None),
            (
                json!({"containers": [{"name": "c"}], "securityContext": profile("RuntimeDefault")}),
                Some("AppArmor"),
            ),
            (
                json!({"containers": [{"name": "c", "securityContext": profile("Localhost")}]}),
                Some("AppArmor"),
            ),
            (
                json!({"containers": [], "initContainers": [{"name": "c", "securityContext": profile("Localhost")}]}),
                Some("AppArmor"),
            ),
            (
                json!({"containers": [], "securityContext": {"sysctls": [{"name": "vm.swappiness", "value": "1"}]}}),
                Some("SysctlForbidden"),
            ),
        ] {
            assert_eq!(refusal(&pod(spec.clone()), &[]).map(|(reason, _)| reason), reason, "{spec}");
        }
    }

    #[test]
    fn user_namespaces_are_not_left_out_silently() {
        for (host_users, has_kernel_namespaces, refused) in [
            (json!(false), true, true),
            (json!(false), false, false),
            (json!(true), true, false),
            (json!(null), true, false),
        ] {
            let pod = pod(json!({"containers": [], "hostUsers": host_users}));
            assert_eq!(sandbox_refusal(&pod, has_kernel_namespaces).is_some(), refused, "{host_users}");
        }
    }
}
