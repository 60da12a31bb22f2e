//! Linux capabilities of a container's process.

use mayfly_runtime::SecurityOptions;

/// The kernel's lowest `oom_score_adj`.
const OOM_SCORE_LOWEST: i32 = -1000;
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
/// All capabilities of Linux, by their numbers (`linux/capability.h`).
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

/// The capabilities in this process's bounding set, as a bit set by number; all if the kernel does not report it.
pub(crate) fn bounding_set() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(u64::MAX)
}

/// The lowest `oom_score_adj` that this process may set. Without the capability to lower it, that is the process's own
/// value: a container with a lower one would fail to start.
pub(crate) fn oom_score_min(bounding_set: u64) -> i32 {
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").ok();
    lowest_score(bounding_set, own.and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}

fn lowest_score(bounding_set: u64, own: i32) -> i32 {
    let may_lower = ALL_CAPABILITIES.iter().position(|name| *name == "SYS_RESOURCE");
    match may_lower.is_some_and(|number| bounding_set >> number & 1 == 1) {
        true => OOM_SCORE_LOWEST,
        false => own,
    }
}

/// The names of a process's capabilities. `ALL` means those of `bounding_set`: a host may have fewer than the kernel,
/// and a process with one more fails to start.
pub(super) fn capabilities(security: &SecurityOptions, bounding_set: u64) -> Vec<String> {
    let given = ALL_CAPABILITIES.iter().enumerate().filter(|(number, _)| bounding_set >> number & 1 == 1);
    let given: Vec<&str> = given.map(|(_, name)| *name).collect();
    let is_all = |list: &[String]| list.iter().any(|name| name.eq_ignore_ascii_case("ALL"));
    let prefixed = |name: &str| format!("CAP_{}", name.to_ascii_uppercase().trim_start_matches("CAP_"));
    let (add, drop) = (&security.capabilities_add, &security.capabilities_drop);
    if security.privileged {
        return given.iter().map(|name| prefixed(name)).collect();
    }
    let base: &[&str] = match (is_all(add), is_all(drop)) {
        (true, _) => &given,
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
    fn a_score_is_lowered_only_where_that_is_allowed() {
        assert_eq!(lowest_score(u64::MAX, -5), -1000);
        assert_eq!(lowest_score(!(1 << 24), -5), -5);
    }

    #[test]
    fn capabilities_are_added_and_dropped() {
        let of = |add: &[&str], drop: &[&str], bounding_set: u64| {
            let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let security = SecurityOptions {
                capabilities_add: list(add),
                capabilities_drop: list(drop),
                ..SecurityOptions::default()
            };
            capabilities(&security, bounding_set)
        };
        assert_eq!(of(&[], &[], u64::MAX).len(), CAPABILITIES.len());
        assert_eq!(of(&["NET_ADMIN"], &["ALL"], u64::MAX), ["CAP_NET_ADMIN"]);
        assert!(!of(&[], &["KILL"], u64::MAX).contains(&"CAP_KILL".to_owned()));
        assert_eq!(of(&["ALL"], &[], u64::MAX).len(), ALL_CAPABILITIES.len());
        // A bounding set without SYS_RESOURCE (24) and SYS_TIME (25).
        let few = of(&["ALL"], &[], !(0b11 << 24));
        assert_eq!(few.len(), ALL_CAPABILITIES.len() - 2);
        assert!(!few.contains(&"CAP_SYS_TIME".to_owned()));
    }
}
