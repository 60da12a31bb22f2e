//! Maps a pod's spec to the options of its sandbox and processes that only ordinary containers have. Pure, except that
//! the host's `resolv.conf` is read.

use std::{path::Path, time::Duration};

use mayfly_api::{
    k8s::api::core::v1::{Container, Pod, PodSpec},
    resources::Amounts,
};
use mayfly_runtime::{
    Mount, PortMapping, ProcessOptions, PullPolicy, SandboxHost, SeccompProfile, SecurityOptions,
};

use super::{
    devices,
    dns::{self, ClusterDnsServer},
    qos, sysctls,
};

/// The longest host name, in bytes (`HOST_NAME_MAX` of Linux without the terminator).
const HOSTNAME_BYTES_MAX: usize = 63;
/// The host's namespaces that the sandbox uses.
pub(crate) fn host(pod: &Pod, cluster_dns: Option<&ClusterDnsServer>) -> SandboxHost {
    let Some(spec) = &pod.spec else { return SandboxHost::default() };
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let hostname = spec.hostname.as_deref().filter(|text| !text.is_empty()).unwrap_or(name);
    let hostname = hostname.get(..HOSTNAME_BYTES_MAX).unwrap_or(hostname).trim_end_matches(['-', '.']);
    let subdomain = spec.subdomain.as_deref().filter(|text| !text.is_empty());
    let full_hostname = subdomain
        .zip(cluster_dns)
        .map(|(subdomain, cluster)| format!("{hostname}.{subdomain}.{namespace}.svc.{}", cluster.domain));
    let is_full = spec.set_hostname_as_fqdn == Some(true);
    let shown = full_hostname.as_deref().filter(|name| is_full && name.len() <= HOSTNAME_BYTES_MAX);
    let aliases = spec
        .host_aliases
        .iter()
        .flatten()
        .filter_map(|alias| Some((alias.ip.parse().ok()?, alias.hostnames.clone().unwrap_or_default())));
    // In the host's network, its own file is right.
    let behind_stub = || match spec.host_network {
        Some(true) => None,
        _ => dns::behind_stub(Path::new(dns::HOST_FILE), Path::new(dns::RESOLVED_FILE)),
    };
    let host_file =
        || behind_stub().unwrap_or_else(|| std::fs::read_to_string(dns::HOST_FILE).unwrap_or_default());
    let given = spec.security_context.as_ref().and_then(|security| security.sysctls.as_ref());
    SandboxHost {
        hostname: shown.unwrap_or(hostname).to_owned(),
        full_hostname,
        host_network: spec.host_network.unwrap_or(false),
        host_pid: spec.host_pid.unwrap_or(false),
        shares_processes: spec.share_process_namespace.unwrap_or(false),
        host_ipc: spec.host_ipc.unwrap_or(false),
        host_aliases: aliases.collect(),
        resolv_conf: dns::resolv_conf(spec, namespace, cluster_dns, host_file).or_else(behind_stub),
        host_ports: host_ports(spec),
        cgroup: qos::cgroup(pod),
        sysctls: given
            .into_iter()
            .flatten()
            .map(|one| (sysctls::with_dots(&one.name), one.value.clone()))
            .collect(),
    }
}

fn host_ports(spec: &PodSpec) -> Vec<PortMapping> {
    // In the host's network, every container port is a host port.
    if spec.host_network == Some(true) {
        return Vec::new();
    }
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    ports
        .filter_map(|port| {
            Some(PortMapping {
                host: u16::try_from(port.host_port?).ok().filter(|port| *port > 0)?,
                container: u16::try_from(port.container_port).ok()?,
                protocol: port.protocol.as_deref().unwrap_or("TCP").to_lowercase(),
                address: port.host_ip.as_ref().and_then(|address| address.parse().ok()),
            })
        })
        .collect()
}

/// The process options of one container. `memory_bytes` is the node's memory.
pub(crate) fn process(
    pod: &Pod,
    container: &Container,
    mounts: Vec<Mount>,
    memory_bytes: u64,
) -> ProcessOptions {
    let policy = container.termination_message_policy.as_deref();
    let path = container.termination_message_path.as_deref();
    let amounts = Amounts::of_container(container);
    ProcessOptions {
        pull: pull_policy(container),
        working_dir: container.working_dir.clone(),
        mounts,
        devices: Vec::new(),
        hooks: Vec::new(),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        security: security(pod, container),
        cpu_millis_request: amounts.get("cpu"),
        memory_bytes_request: amounts.get("memory"),
        extended_resources: devices::requested(container),
        active_deadline: pod
            .spec
            .as_ref()
            .and_then(|spec| spec.active_deadline_seconds)
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map(Duration::from_secs),
        oom_score_adj: qos::oom_score(pod, container, memory_bytes),
        termination_message_path: path.unwrap_or("/dev/termination-log").to_owned(),
        termination_message_from_log: policy == Some("FallbackToLogsOnError"),
        stop_signal: container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.clone()),
        target_container: target_container(pod, &container.name),
    }
}

/// Upstream's default: always for the tag `latest` or no tag, since such an image may change.
pub(crate) fn pull_policy(container: &Container) -> PullPolicy {
    match container.image_pull_policy.as_deref() {
        Some("Always") => PullPolicy::Always,
        Some("Never") => PullPolicy::Never,
        Some("IfNotPresent") => PullPolicy::IfNotPresent,
        _ => {
            let image = container.image.as_deref().unwrap_or_default();
            let last = image.rsplit('/').next().unwrap_or_default();
            let is_fixed = last.contains('@') || last.split_once(':').is_some_and(|(_, tag)| tag != "latest");
            if is_fixed { PullPolicy::IfNotPresent } else { PullPolicy::Always }
        }
    }
}

/// The container's security context, with the pod's values as defaults.
fn security(pod: &Pod, container: &Container) -> SecurityOptions {
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.security_context.clone()).unwrap_or_default();
    let own = container.security_context.clone().unwrap_or_default();
    let capabilities = own.capabilities.unwrap_or_default();
    let seccomp = own.seccomp_profile.or(of_pod.seccomp_profile);
    let mut groups = of_pod.supplemental_groups.unwrap_or_default();
    groups.extend(of_pod.fs_group);
    SecurityOptions {
        user: own.run_as_user.or(of_pod.run_as_user),
        group: own.run_as_group.or(of_pod.run_as_group),
        supplemental_groups: groups,
        ignores_image_groups: of_pod.supplemental_groups_policy.as_deref() == Some("Strict"),
        run_as_non_root: own.run_as_non_root.or(of_pod.run_as_non_root).unwrap_or(false),
        privileged: own.privileged.unwrap_or(false),
        read_only_root: own.read_only_root_filesystem.unwrap_or(false),
        no_new_privileges: own.allow_privilege_escalation == Some(false),
        capabilities_add: capabilities.add.unwrap_or_default(),
        capabilities_drop: capabilities.drop.unwrap_or_default(),
        seccomp: seccomp.map(seccomp_profile).unwrap_or_default(),
        unmasked_proc: own.proc_mount.as_deref() == Some("Unmasked"),
    }
}

fn seccomp_profile(profile: mayfly_api::k8s::api::core::v1::SeccompProfile) -> SeccompProfile {
    match profile.type_.as_str() {
        "RuntimeDefault" => SeccompProfile::RuntimeDefault,
        "Localhost" => SeccompProfile::Localhost(profile.localhost_profile.unwrap_or_default()),
        _ => SeccompProfile::Unconfined,
    }
}

/// The target container of an ephemeral one.
fn target_container(pod: &Pod, name: &str) -> Option<String> {
    let ephemeral = pod.spec.as_ref()?.ephemeral_containers.as_ref()?;
    let own = ephemeral.iter().find(|container| container.name == name)?;
    own.target_container_name.clone().filter(|target| !target.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Pod {
        let metadata = json!({"name": "web-0", "uid": "u"});
        serde_json::from_value(
            json!({"metadata": metadata, "spec": spec, "status": {"qosClass": "Burstable"}}),
        )
        .unwrap()
    }

    fn first(pod: &Pod) -> ProcessOptions {
        process(pod, &pod.spec.as_ref().unwrap().containers[0], Vec::new(), 1000 << 20)
    }

    #[test]
    fn an_image_without_a_fixed_tag_is_pulled_always() {
        for (image, policy) in [
            ("busybox", PullPolicy::Always),
            ("busybox:latest", PullPolicy::Always),
            ("busybox:local", PullPolicy::IfNotPresent),
            ("localhost:5000/busybox", PullPolicy::Always),
            ("a/b@sha256:00", PullPolicy::IfNotPresent),
        ] {
            let pod = pod(json!({"containers": [{"name": "c", "image": image}]}));
            assert_eq!(first(&pod).pull, policy, "{image}");
        }
    }

    #[test]
    fn the_containers_security_context_is_stronger_than_the_pods() {
        let pod = pod(json!({
            "securityContext": {"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4]},
            "containers": [{"name": "c", "securityContext": {"runAsUser": 5, "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": true}}]}));
        let security = first(&pod).security;
        assert_eq!((security.user, security.group), (Some(5), Some(2)));
        assert_eq!(security.supplemental_groups, [4, 3]);
        assert!(security.no_new_privileges && security.read_only_root && !security.privileged);
        assert_eq!(security.capabilities_drop, ["ALL"]);
    }

    #[test]
    fn a_pod_may_ignore_the_groups_of_its_images() {
        for (policy, ignores) in [(json!(null), false), (json!("Merge"), false), (json!("Strict"), true)] {
            let security = json!({"supplementalGroupsPolicy": policy});
            let pod = pod(json!({"securityContext": security, "containers": [{"name": "c"}]}));
            assert_eq!(first(&pod).security.ignores_image_groups, ignores, "{policy}");
        }
    }

    #[test]
    fn the_system_call_filter_is_the_containers_else_the_pods() {
        let pod = pod(json!({
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "a"},
                {"name": "b", "securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p.json"}}},
                {"name": "c", "securityContext": {"seccompProfile": {"type": "Unconfined"}}}]}));
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let profiles: Vec<_> = containers.map(|container| security(&pod, container).seccomp).collect();
        let expected = [
            SeccompProfile::RuntimeDefault,
            SeccompProfile::Localhost("p.json".into()),
            SeccompProfile::Unconfined,
        ];
        assert_eq!(profiles, expected);
    }

    #[test]
    fn a_pods_host_options() {
        let pod = pod(json!({
            "hostname": "db", "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
            "dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.2"], "searches": ["x.y"],
                "options": [{"name": "ndots", "value": "5"}]},
            "containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 8080}, {"containerPort": 81}]}]}));
        let host = host(&pod, None);
        assert_eq!((host.hostname.as_str(), host.full_hostname), ("db", None));
        assert_eq!(host.resolv_conf.as_deref(), Some("nameserver 10.0.0.2\nsearch x.y\noptions ndots:5\n"));
        assert_eq!(host.host_ports.len(), 1);
        assert_eq!((host.host_ports[0].host, host.host_ports[0].protocol.as_str()), (8080, "tcp"));
    }

    #[test]
    fn a_pod_with_a_subdomain_has_a_full_host_name() {
        let cluster = ClusterDnsServer { address: [10, 96, 0, 10].into(), domain: "cluster.local".into() };
        let mut pod = pod(json!({"hostname": "db-0", "subdomain": "db", "containers": []}));
        pod.metadata.namespace = Some("shop".into());
        let full = "db-0.db.shop.svc.cluster.local";
        let named = host(&pod, Some(&cluster));
        assert_eq!((named.hostname.as_str(), named.full_hostname.as_deref()), ("db-0", Some(full)));
        pod.spec.as_mut().unwrap().set_hostname_as_fqdn = Some(true);
        assert_eq!(host(&pod, Some(&cluster)).hostname, full);
        assert_eq!(host(&pod, None).hostname, "db-0");
    }
}
