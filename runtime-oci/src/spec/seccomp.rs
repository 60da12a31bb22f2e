//! Seccomp filters: the default profile, which is data, and the node's profiles.
//!
//! The default profile denies system calls that can escape a container, or that had many vulnerabilities, unless the
//! container has the capability that the call requires anyway. All other calls are allowed.

use serde_json::{Value, json};

/// The system calls that the default profile denies, with the capability that permits them.
const DEFAULT_DENIED: &str = include_str!("seccomp_default.json");
/// The kernel's code for "operation not permitted", and for "no such system call".
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
/// The flags of `clone` that make namespaces (`CLONE_NEWNS`, `NEWCGROUP`, `NEWUTS`, `NEWIPC`, `NEWUSER`, `NEWPID`,
/// `NEWNET`), of which each is denied.
const CLONE_NEW: [u64; 7] =
    [0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000];
/// The address family of sockets to hypervisors, which no network namespace isolates.
const AF_VSOCK: u64 = 40;

/// The default profile for a container with these capabilities (`CAP_…`).
pub(super) fn default_profile(capabilities: &[String]) -> Value {
    let has = |name: &str| capabilities.iter().any(|known| known == name);
    let table: Vec<Value> = serde_json::from_str(DEFAULT_DENIED).unwrap_or_default();
    let denied = table.into_iter().filter(|row| !row["capability"].as_str().is_some_and(has));
    let mut rules: Vec<Value> = denied
        .map(|row| json!({"names": row["names"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM}))
        .collect();
    let equal = |value: u64| json!([{"index": 0, "value": value, "op": "SCMP_CMP_EQ"}]);
    rules.push(
        json!({"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM, "args": equal(AF_VSOCK)}),
    );
    if !has("CAP_SYS_ADMIN") {
        for flag in CLONE_NEW {
            // The comparison masks all flags but this one.
            let masked = json!([{"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}]);
            rules.push(
                json!({"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM, "args": masked}),
            );
        }
        // The flags of clone3 are in memory, which a filter cannot read: programs fall back to clone.
        rules.push(json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    }
    json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": architectures(), "syscalls": rules})
}

/// The architectures whose system calls this machine's kernel supports.
fn architectures() -> &'static [&'static str] {
    match std::env::consts::ARCH {
        "x86_64" => &["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "aarch64" => &["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(capabilities: &[&str]) -> Vec<String> {
        let capabilities: Vec<String> = capabilities.iter().map(|name| (*name).to_owned()).collect();
        let profile = default_profile(&capabilities);
        let rules = profile["syscalls"].as_array().unwrap().clone();
        let whole = rules.into_iter().filter(|rule| rule["args"].is_null());
        whole.flat_map(|rule| serde_json::from_value::<Vec<String>>(rule["names"].clone()).unwrap()).collect()
    }

    #[test]
    fn a_capability_allows_its_calls() {
        let without = denied(&[]);
        for name in ["mount", "bpf", "kexec_load", "clone3", "keyctl", "settimeofday"] {
            assert!(without.iter().any(|known| known == name), "{name}");
        }
        for name in ["clone", "socket", "execve", "ptrace", "openat"] {
            assert!(!without.iter().any(|known| known == name), "{name}");
        }
        let with = denied(&["CAP_SYS_ADMIN", "CAP_BPF"]);
        assert!(with.iter().all(|name| name != "mount" && name != "bpf" && name != "clone3"));
        assert!(with.iter().any(|name| name == "keyctl"), "no capability allows it");
    }

    #[test]
    fn the_profile_is_one_of_the_runtime_specification() {
        let profile = default_profile(&[]);
        serde_json::from_value::<oci_spec::runtime::LinuxSeccomp>(profile).unwrap();
    }
}
