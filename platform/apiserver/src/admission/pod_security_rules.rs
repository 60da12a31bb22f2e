//! The rules of the pod security levels, in the order and with the messages of upstream's
//! `k8s.io/pod-security-admission/policy`: the rules of `baseline` by name, then those of `restricted`, three of
//! which replace rules of `baseline`.

use std::collections::BTreeSet;

use serde_json::Value;

/// The levels, from the most permissive to the strictest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SecurityLevel {
    Privileged,
    Baseline,
    Restricted,
}

impl SecurityLevel {
    const ALL: [Self; 3] = [Self::Privileged, Self::Baseline, Self::Restricted];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Privileged => "privileged",
            Self::Baseline => "baseline",
            Self::Restricted => "restricted",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == text)
    }
}

/// A rule that a pod breaks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) reason: String,
    pub(super) detail: String,
}

const CAPABILITIES_BASELINE: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];
const CAPABILITIES_RESTRICTED: [&str; 1] = ["NET_BIND_SERVICE"];
const SELINUX_TYPES: [&str; 5] =
    ["", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"];
const SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];
const VOLUMES_RESTRICTED: [&str; 8] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
];
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// The violations of a level by a pod or a pod template.
pub(super) fn violations(level: SecurityLevel, metadata: &Value, spec: &Value) -> Vec<Violation> {
    let pod = PodView { metadata, spec };
    let baseline_only = level == SecurityLevel::Baseline;
    let baseline = [
        pod.app_armor(),
        baseline_only.then(|| pod.default_capabilities()).flatten(),
        pod.host_namespaces(),
        baseline_only.then(|| pod.host_path_volumes()).flatten(),
        pod.host_ports(),
        pod.privileged(),
        pod.proc_mount(),
        pod.selinux(),
        baseline_only.then(|| pod.forbidden_seccomp()).flatten(),
        pod.sysctls(),
        pod.windows_host_process(),
    ];
    match level {
        SecurityLevel::Privileged => Vec::new(),
        SecurityLevel::Baseline => baseline.into_iter().flatten().collect(),
        SecurityLevel::Restricted => {
            let restricted = [
                pod.privilege_escalation(),
                pod.restricted_capabilities(),
                pod.restricted_volumes(),
                pod.non_root(),
                pod.root_user(),
                pod.seccomp_required(),
            ];
            baseline.into_iter().chain(restricted).flatten().collect()
        }
    }
}

fn violation(reason: impl Into<String>, detail: impl Into<String>) -> Option<Violation> {
    Some(Violation { reason: reason.into(), detail: detail.into() })
}

fn plural(one: &'static str, many: &'static str, count: usize) -> &'static str {
    if count == 1 { one } else { many }
}

fn quoted<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    texts.into_iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ")
}

/// `container "a"`, `containers "a", "b"`.
fn containers_named(names: &[&str]) -> String {
    format!("{} {}", plural("container", "containers", names.len()), quoted(names.iter().copied()))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn name_of(item: &Value) -> &str {
    item["name"].as_str().unwrap_or("")
}

/// Whether the pod, and which of its containers, set a security context that breaks a rule.
struct Setters<'a> {
    pod: bool,
    containers: Vec<&'a str>,
}

impl Setters<'_> {
    fn is_empty(&self) -> bool {
        !self.pod && self.containers.is_empty()
    }

    /// `pod and container "a"`.
    fn shown(&self) -> String {
        let pod = self.pod.then(|| "pod".to_owned());
        let containers = (!self.containers.is_empty()).then(|| containers_named(&self.containers));
        pod.into_iter().chain(containers).collect::<Vec<_>>().join(" and ")
    }
}

struct PodView<'a> {
    metadata: &'a Value,
    spec: &'a Value,
}

impl<'a> PodView<'a> {
    fn containers(&self) -> impl Iterator<Item = &'a Value> + use<'a> {
        let spec = self.spec;
        ["initContainers", "containers", "ephemeralContainers"]
            .into_iter()
            .flat_map(|field| list(&spec[field]))
    }

    fn names(&self, bad: impl Fn(&Value) -> bool) -> Vec<&'a str> {
        self.containers().filter(|container| bad(container)).map(name_of).collect()
    }

    /// The pod and containers whose security context is `bad`.
    fn setters(&self, bad: impl Fn(&Value) -> bool) -> Setters<'a> {
        Setters {
            pod: bad(&self.spec["securityContext"]),
            containers: self.names(|container| bad(&container["securityContext"])),
        }
    }

    /// The security contexts of the pod and its containers.
    fn contexts(&self) -> impl Iterator<Item = &'a Value> + use<'a> {
        let containers = self.containers().map(|container| &container["securityContext"]);
        std::iter::once(&self.spec["securityContext"]).chain(containers)
    }

    fn is_windows(&self) -> bool {
        self.spec["os"]["name"] == "windows"
    }

    fn app_armor(&self) -> Option<Violation> {
        let profile = |context: &'a Value| context["appArmorProfile"]["type"].as_str();
        let allowed = |kind: &str| matches!(kind, "RuntimeDefault" | "Localhost");
        let setters = self.setters(|context| {
            context["appArmorProfile"]["type"].as_str().is_some_and(|kind| !allowed(kind))
        });
        let mut values: BTreeSet<String> = self
            .contexts()
            .filter_map(profile)
            .filter(|kind| !allowed(kind))
            .map(|kind| format!("{kind:?}"))
            .collect();
        let mut sources = Vec::new();
        if !setters.is_empty() {
            sources.push(setters.shown());
        }
        let annotations = self.metadata["annotations"].as_object().into_iter().flatten();
        let bad: BTreeSet<String> = annotations
            .filter(|(name, _)| name.starts_with(APPARMOR_ANNOTATION))
            .filter_map(|(name, value)| Some((name, value.as_str()?)))
            .filter(|(_, value)| {
                !(value.is_empty() || *value == "runtime/default" || value.starts_with("localhost/"))
            })
            .map(|(name, value)| format!("{name}={value:?}"))
            .collect();
        if !bad.is_empty() {
            sources.push(plural("annotation", "annotations", bad.len()).to_owned());
            values.extend(bad);
        }
        if values.is_empty() {
            return None;
        }
        let reason = plural("forbidden AppArmor profile", "forbidden AppArmor profiles", values.len());
        let values: Vec<_> = values.into_iter().collect();
        violation(
            reason,
            format!("{} must not set AppArmor profile type to {}", sources.join(" and "), values.join(", ")),
        )
    }

    fn default_capabilities(&self) -> Option<Violation> {
        let (names, added) = self.added_capabilities(&CAPABILITIES_BASELINE)?;
        let detail = format!(
            "{} must not include {added} in securityContext.capabilities.add",
            containers_named(&names)
        );
        violation("non-default capabilities", detail)
    }

    /// The containers that add other capabilities than these, and which.
    fn added_capabilities(&self, allowed: &[&str]) -> Option<(Vec<&'a str>, String)> {
        let added = |container: &'a Value| {
            list(&container["securityContext"]["capabilities"]["add"])
                .filter_map(Value::as_str)
                .filter(|name| !allowed.contains(name))
        };
        let all: BTreeSet<&str> = self.containers().flat_map(added).collect();
        let names =
            self.containers().filter(|container| added(container).next().is_some()).map(name_of).collect();
        (!all.is_empty()).then(|| (names, quoted(all)))
    }

    fn host_namespaces(&self) -> Option<Violation> {
        let fields =
            ["hostNetwork", "hostPID", "hostIPC"].into_iter().filter(|field| self.spec[*field] == true);
        let shown: Vec<_> = fields.map(|field| format!("{field}=true")).collect();
        if shown.is_empty() { None } else { violation("host namespaces", shown.join(", ")) }
    }

    fn host_path_volumes(&self) -> Option<Violation> {
        let volumes = list(&self.spec["volumes"]).filter(|volume| volume["hostPath"].is_object());
        let names: Vec<_> = volumes.map(name_of).collect();
        if names.is_empty() {
            return None;
        }
        let what = plural("volume", "volumes", names.len());
        violation("hostPath volumes", format!("{what} {}", quoted(names)))
    }

    fn host_ports(&self) -> Option<Violation> {
        let ports = |container: &'a Value| {
            list(&container["ports"]).filter_map(|port| port["hostPort"].as_u64()).filter(|port| *port != 0)
        };
        let all: BTreeSet<String> = self.containers().flat_map(ports).map(|port| port.to_string()).collect();
        let names: Vec<_> =
            self.containers().filter(|container| ports(container).next().is_some()).map(name_of).collect();
        if all.is_empty() {
            return None;
        }
        let reason = plural("hostPort", "hostPorts", all.len());
        let uses = plural("uses", "use", names.len());
        let ports = all.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        violation(reason, format!("{} {uses} {reason} {ports}", containers_named(&names)))
    }

    fn privileged(&self) -> Option<Violation> {
        let names = self.names(|container| container["securityContext"]["privileged"] == true);
        if names.is_empty() {
            return None;
        }
        violation(
            "privileged",
            format!("{} must not set securityContext.privileged=true", containers_named(&names)),
        )
    }

    fn proc_mount(&self) -> Option<Violation> {
        let mount = |container: &'a Value| {
            container["securityContext"]["procMount"].as_str().filter(|kind| !matches!(*kind, "" | "Default"))
        };
        let kinds: BTreeSet<&str> = self.containers().filter_map(mount).collect();
        let names: Vec<_> =
            self.containers().filter(|container| mount(container).is_some()).map(name_of).collect();
        if names.is_empty() {
            return None;
        }
        let detail = format!(
            "{} must not set securityContext.procMount to {}",
            containers_named(&names),
            quoted(kinds)
        );
        violation("procMount", detail)
    }

    fn selinux(&self) -> Option<Violation> {
        let text = |context: &'a Value, field: &str| context["seLinuxOptions"][field].as_str().unwrap_or("");
        let is_bad = |context: &Value| {
            let text = |field: &str| context["seLinuxOptions"][field].as_str().unwrap_or("");
            !SELINUX_TYPES.contains(&text("type")) || !text("user").is_empty() || !text("role").is_empty()
        };
        let setters = self.setters(is_bad);
        if setters.is_empty() {
            return None;
        }
        let types: BTreeSet<&str> = self
            .contexts()
            .map(|context| text(context, "type"))
            .filter(|kind| !SELINUX_TYPES.contains(kind))
            .collect();
        let mut bad = Vec::new();
        if !types.is_empty() {
            bad.push(format!("{} {}", plural("type", "types", types.len()), quoted(types)));
        }
        for field in ["user", "role"] {
            if self.contexts().any(|context| !text(context, field).is_empty()) {
                bad.push(format!("{field} may not be set"));
            }
        }
        let detail =
            format!("{} set forbidden securityContext.seLinuxOptions: {}", setters.shown(), bad.join("; "));
        violation("seLinuxOptions", detail)
    }

    /// The seccomp profiles that are set and not allowed.
    fn forbidden_seccomp(&self) -> Option<Violation> {
        let forbidden = |kind: &str| !matches!(kind, "RuntimeDefault" | "Localhost");
        let profile = |context: &'a Value| context["seccompProfile"]["type"].as_str();
        let setters =
            self.setters(|context| context["seccompProfile"]["type"].as_str().is_some_and(forbidden));
        if setters.is_empty() {
            return None;
        }
        let kinds: BTreeSet<&str> =
            self.contexts().filter_map(profile).filter(|kind| forbidden(kind)).collect();
        let detail = format!(
            "{} must not set securityContext.seccompProfile.type to {}",
            setters.shown(),
            quoted(kinds)
        );
        violation("seccompProfile", detail)
    }

    fn sysctls(&self) -> Option<Violation> {
        let names = list(&self.spec["securityContext"]["sysctls"]).map(name_of);
        let forbidden: Vec<_> = names.filter(|name| !SYSCTLS.contains(name)).collect();
        if forbidden.is_empty() { None } else { violation("forbidden sysctls", forbidden.join(", ")) }
    }

    fn windows_host_process(&self) -> Option<Violation> {
        let setters = self.setters(|context| context["windowsOptions"]["hostProcess"] == true);
        if setters.is_empty() {
            return None;
        }
        let detail =
            format!("{} must not set securityContext.windowsOptions.hostProcess=true", setters.shown());
        violation("hostProcess", detail)
    }

    fn privilege_escalation(&self) -> Option<Violation> {
        let names = self.names(|container| container["securityContext"]["allowPrivilegeEscalation"] != false);
        if names.is_empty() || self.is_windows() {
            return None;
        }
        let detail =
            format!("{} must set securityContext.allowPrivilegeEscalation=false", containers_named(&names));
        violation("allowPrivilegeEscalation != false", detail)
    }

    fn restricted_capabilities(&self) -> Option<Violation> {
        if self.is_windows() {
            return None;
        }
        let drops_all = |container: &Value| {
            list(&container["securityContext"]["capabilities"]["drop"]).any(|name| name == "ALL")
        };
        let keeping = self.names(|container| !drops_all(container));
        let mut details = Vec::new();
        if !keeping.is_empty() {
            let containers = containers_named(&keeping);
            details.push(format!("{containers} must set securityContext.capabilities.drop=[\"ALL\"]"));
        }
        if let Some((names, added)) = self.added_capabilities(&CAPABILITIES_RESTRICTED) {
            let containers = containers_named(&names);
            details
                .push(format!("{containers} must not include {added} in securityContext.capabilities.add"));
        }
        if details.is_empty() { None } else { violation("unrestricted capabilities", details.join("; ")) }
    }

    fn restricted_volumes(&self) -> Option<Violation> {
        let source = |volume: &'a Value| {
            let fields = volume.as_object().into_iter().flatten();
            let mut sources = fields.filter(|(field, value)| *field != "name" && !value.is_null());
            sources.next().map_or("unknown", |(field, _)| field.as_str())
        };
        let bad =
            || list(&self.spec["volumes"]).filter(|volume| !VOLUMES_RESTRICTED.contains(&source(volume)));
        let names: Vec<_> = bad().map(name_of).collect();
        let kinds: BTreeSet<&str> = bad().map(source).collect();
        if names.is_empty() {
            return None;
        }
        let (what, uses) = (plural("volume", "volumes", names.len()), plural("uses", "use", names.len()));
        let of = plural("restricted volume type", "restricted volume types", kinds.len());
        violation(
            "restricted volume types",
            format!("{what} {} {uses} {of} {}", quoted(names), quoted(kinds)),
        )
    }

    fn non_root(&self) -> Option<Violation> {
        let reason = "runAsNonRoot != true";
        let setters = self.setters(|context| context["runAsNonRoot"] == false);
        if !setters.is_empty() {
            return violation(
                reason,
                format!("{} must not set securityContext.runAsNonRoot=false", setters.shown()),
            );
        }
        let silent = self.names(|container| container["securityContext"]["runAsNonRoot"].is_null());
        if silent.is_empty() || self.spec["securityContext"]["runAsNonRoot"] == true {
            return None;
        }
        let detail =
            format!("pod or {} must set securityContext.runAsNonRoot=true", containers_named(&silent));
        violation(reason, detail)
    }

    fn root_user(&self) -> Option<Violation> {
        let setters = self.setters(|context| context["runAsUser"] == 0);
        if setters.is_empty() {
            return None;
        }
        violation("runAsUser=0", format!("{} must not set runAsUser=0", setters.shown()))
    }

    fn seccomp_required(&self) -> Option<Violation> {
        if self.is_windows() {
            return None;
        }
        if let Some(forbidden) = self.forbidden_seccomp() {
            return Some(forbidden);
        }
        let silent = self.names(|container| container["securityContext"]["seccompProfile"]["type"].is_null());
        if silent.is_empty() || self.spec["securityContext"]["seccompProfile"]["type"].is_string() {
            return None;
        }
        let containers = containers_named(&silent);
        let wanted = "securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"";
        violation("seccompProfile", format!("pod or {containers} must set {wanted}"))
    }
}

#[cfg(test)]
mod tests;
