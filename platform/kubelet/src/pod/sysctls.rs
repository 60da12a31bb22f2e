//! Kernel parameters of pods: their names, and those that a pod may set (upstream's `kubelet/sysctl`). Pure.

use mayfly_api::k8s::api::core::v1::{Pod, PodSpec};

/// The reason of a pod that may not set one of its parameters.
pub(crate) const REASON_FORBIDDEN: &str = "SysctlForbidden";

/// The namespace that contains a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SysctlNamespace {
    Ipc,
    Network,
}

/// The parameters that have no effect outside of their pod, and that every pod may set (upstream's
/// `SafeSysctlAllowlist`).
const SAFE: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

/// A name with dots as separators: `net/ipv4/ip_forward` is `net.ipv4.ip_forward`. The first separator decides, and the
/// other character stands for a dot or slash in a part of the name, such as that of an interface.
pub(crate) fn with_dots(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(first) if name[first..].starts_with('/') => {
            let swapped = |letter| match letter {
                '.' => '/',
                '/' => '.',
                letter => letter,
            };
            name.chars().map(swapped).collect()
        }
        _ => name.to_owned(),
    }
}

/// The namespace of a parameter with dots; `None`: it belongs to the whole machine.
fn namespace(name: &str) -> Option<SysctlNamespace> {
    let is_ipc = ["kernel.sem", "kernel.shm_rmid_forced"].contains(&name)
        || ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|prefix| name.starts_with(prefix));
    if is_ipc {
        return Some(SysctlNamespace::Ipc);
    }
    name.starts_with("net.").then_some(SysctlNamespace::Network)
}

/// The message for a pod that sets a parameter which it may not set. `unsafe_allowed`: names, and prefixes that end with
/// `*`, of parameters that pods of this node may set in addition to the safe ones.
pub(crate) fn forbidden(pod: &Pod, unsafe_allowed: &[String]) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let given = spec.security_context.as_ref()?.sysctls.as_ref()?;
    given.iter().find_map(|sysctl| refusal(spec, &with_dots(&sysctl.name), unsafe_allowed))
}

fn refusal(spec: &PodSpec, name: &str, unsafe_allowed: &[String]) -> Option<String> {
    let is_allowed = |pattern: &String| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(&with_dots(prefix)),
        None => with_dots(pattern) == name,
    };
    let found = namespace(name).filter(|_| SAFE.contains(&name) || unsafe_allowed.iter().any(is_allowed));
    let why = match found {
        None => format!("{name:?} not allowlisted"),
        Some(SysctlNamespace::Ipc) if spec.host_ipc == Some(true) => {
            format!("{name:?} not allowed with host ipc enabled")
        }
        Some(SysctlNamespace::Network) if spec.host_network == Some(true) => {
            format!("{name:?} not allowed with host net enabled")
        }
        Some(_) => return None,
    };
    Some(format!("forbidden sysctl: {why}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn slashes_become_dots() {
        for (name, expected) in [
            ("net/ipv4/ip_forward", "net.ipv4.ip_forward"),
            ("net.ipv4.ip_forward", "net.ipv4.ip_forward"),
            ("net/ipv4/conf/eth0.5/arp_filter", "net.ipv4.conf.eth0/5.arp_filter"),
            ("net.ipv4.conf.eth0/5.arp_filter", "net.ipv4.conf.eth0/5.arp_filter"),
            ("plain", "plain"),
            ("", ""),
        ] {
            assert_eq!(with_dots(name), expected);
        }
    }

    #[test]
    fn a_pod_sets_safe_parameters_and_those_that_its_node_allows() {
        let allowed = ["net/core/somaxconn".to_owned(), "kernel.msg*".to_owned()];
        for (name, host, why) in [
            ("kernel.shm_rmid_forced", json!({}), None),
            ("net/ipv4/tcp_syncookies", json!({}), None),
            ("net.core.somaxconn", json!({}), None),
            ("kernel.msgmax", json!({}), None),
            ("net/ipv4/ip_forward", json!({}), Some("\"net.ipv4.ip_forward\" not allowlisted")),
            ("vm.swappiness", json!({}), Some("\"vm.swappiness\" not allowlisted")),
            (
                "kernel.shm_rmid_forced",
                json!({"hostIPC": true}),
                Some("\"kernel.shm_rmid_forced\" not allowed with host ipc enabled"),
            ),
            (
                "net.ipv4.tcp_rmem",
                json!({"hostNetwork": true}),
                Some("\"net.ipv4.tcp_rmem\" not allowed with host net enabled"),
            ),
        ] {
            let sysctls: Value = json!([{"name": name, "value": "1"}]);
            let mut spec = json!({"containers": [], "securityContext": {"sysctls": sysctls}});
            spec.as_object_mut().unwrap().extend(host.as_object().unwrap().clone());
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
            let expected = why.map(|why| format!("forbidden sysctl: {why}"));
            assert_eq!(forbidden(&pod, &allowed), expected, "{name}");
        }
    }

    #[test]
    fn safe_parameters_have_a_namespace() {
        assert!(SAFE.iter().all(|name| namespace(name).is_some()));
    }
}
