//! The interfaces that a wasm host provides to guests. A test of `runtime-wasm` compares this table with its linker.

/// The newest 0.2 version that the host provides; it serves older versions, while newer ones may need more.
pub const VERSION_2: &str = "0.2.12";
/// The newest 0.3 version that the host provides.
pub const VERSION_3: &str = "0.3.0";

/// The interfaces of 0.2 by package.
pub const INTERFACES_2: &[(&str, &[&str])] = &[
    (
        "wasi:cli",
        &[
            "environment",
            "exit",
            "stdin",
            "stdout",
            "stderr",
            "terminal-input",
            "terminal-output",
            "terminal-stdin",
            "terminal-stdout",
            "terminal-stderr",
        ],
    ),
    ("wasi:clocks", &["monotonic-clock", "wall-clock"]),
    ("wasi:filesystem", &["preopens", "types"]),
    ("wasi:http", &["outgoing-handler", "types"]),
    ("wasi:io", &["error", "poll", "streams"]),
    ("wasi:random", &["insecure", "insecure-seed", "random"]),
    (
        "wasi:sockets",
        &[
            "instance-network",
            "ip-name-lookup",
            "network",
            "tcp",
            "tcp-create-socket",
            "udp",
            "udp-create-socket",
        ],
    ),
];

/// The interfaces of 0.3 by package.
pub const INTERFACES_3: &[(&str, &[&str])] = &[
    (
        "wasi:cli",
        &[
            "environment",
            "exit",
            "stdin",
            "stdout",
            "stderr",
            "terminal-input",
            "terminal-output",
            "terminal-stdin",
            "terminal-stdout",
            "terminal-stderr",
            "types",
        ],
    ),
    ("wasi:clocks", &["monotonic-clock", "system-clock", "types"]),
    ("wasi:filesystem", &["preopens", "types"]),
    ("wasi:http", &["client", "types"]),
    ("wasi:random", &["insecure", "insecure-seed", "random"]),
    ("wasi:sockets", &["ip-name-lookup", "types"]),
];

/// Interfaces of drafts and of Spin, with their exact versions.
pub const DRAFTS: &[&str] = &[
    "wasi:config/store@0.2.0-rc.1",
    "wasi:config/store@0.2.0-draft-2024-09-27",
    "fermyon:spin/variables@2.0.0",
];

/// `None` if the host provides the import; otherwise a message with the import and a similar one that the host
/// provides.
pub fn missing(import: &str) -> Option<String> {
    if DRAFTS.contains(&import) {
        return None;
    }
    let (path, version) = import.split_once('@').unwrap_or((import, ""));
    let mut near = Vec::new();
    for (table, newest) in [(INTERFACES_2, VERSION_2), (INTERFACES_3, VERSION_3)] {
        if !contains(table, path) {
            continue;
        }
        if serves(newest, version) {
            return None;
        }
        near.push(newest);
    }
    near.extend(DRAFTS.iter().filter_map(|draft| draft.strip_prefix(path)?.strip_prefix('@')));
    Some(match near.as_slice() {
        [] => import.to_owned(),
        near => format!("{import} (this host has {path} in version {})", near.join(" and ")),
    })
}

fn contains(table: &[(&str, &[&str])], path: &str) -> bool {
    let Some((package, interface)) = path.split_once('/') else { return false };
    table.iter().any(|(name, interfaces)| *name == package && interfaces.contains(&interface))
}

/// Whether a host's version serves a requested one: the same first two numbers, no pre-release. Functions added in a
/// later patch version are only found missing when the component is linked.
fn serves(newest: &str, asked: &str) -> bool {
    newest.rsplit_once('.').is_some_and(|(line, _)| is_version(asked, line))
}

/// Whether a version such as `0.2.6` belongs to a version line such as `0.2`.
pub(super) fn is_version(version: &str, line: &str) -> bool {
    let patch = version.strip_prefix(line).and_then(|rest| rest.strip_prefix('.'));
    patch.is_some_and(|patch| !patch.is_empty() && patch.bytes().all(|b| b.is_ascii_digit()))
}
