//! Linux capabilities of a container's process: pure.

use mayfly_runtime::SecurityOptions;

/// The default capabilities of a container's process.
const CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];
/// All capabilities of Linux (`linux/capability.h`).
const ALL_CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

pub(super) fn capabilities(security: &SecurityOptions) -> Vec<String> {
    let is_all = |list: &[String]| list.iter().any(|name| name.eq_ignore_ascii_case("ALL"));
    let prefixed = |name: &str| format!("CAP_{}", name.to_ascii_uppercase().trim_start_matches("CAP_"));
    let (add, drop) = (&security.capabilities_add, &security.capabilities_drop);
    if security.privileged {
        return ALL_CAPABILITIES.iter().map(|name| prefixed(name)).collect();
    }
    let base: &[&str] = match (is_all(add), is_all(drop)) {
        (true, _) => &ALL_CAPABILITIES,
        (false, true) => &[],
        (false, false) => &CAPABILITIES,
    };
    let mut all: Vec<String> = base.iter().map(|name| prefixed(name)).collect();
    let dropped: Vec<String> = drop.iter().map(|name| prefixed(name)).collect();
    all.retain(|name| !dropped.contains(name));
    for name in add.iter().filter(|name| !name.eq_ignore_ascii_case("ALL")) {
        if !all.contains(&prefixed(name)) {
            all.push(prefixed(name));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_added_and_dropped() {
        let of = |add: &[&str], drop: &[&str]| {
            let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let security = SecurityOptions {
                capabilities_add: list(add),
                capabilities_drop: list(drop),
                ..SecurityOptions::default()
            };
            capabilities(&security)
        };
        assert_eq!(of(&[], &[]).len(), CAPABILITIES.len());
        assert_eq!(of(&["NET_ADMIN"], &["ALL"]), ["CAP_NET_ADMIN"]);
        assert!(!of(&[], &["KILL"]).contains(&"CAP_KILL".to_owned()));
        assert_eq!(of(&["ALL"], &[]).len(), ALL_CAPABILITIES.len());
    }
}
