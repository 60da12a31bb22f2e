//! The layering of the workspace ("floors"): dependencies only go down, and some crates may be used by one crate only.

use std::path::Path;

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::workspace::{self, Workspace};
use serde_json::Value;

pub(crate) const HELP: &str = "\
Reads `cargo metadata` and the first lines of every crate, and checks:
  - a crate depends only on crates of lower floors, and on one of its own floor only in tests;
    platform/vocabulary is for every crate
  - floor 0 has no tokio and no HTTP
  - wasmtime, containerd, netlink and nftables are each named in one room only; databases in store, sqlite,
    workflows/journal and workflows/engine (the catalog)
  - a crate is named after its folder and opens with a charter (`//!`)
  - the guest SDK and the examples depend on no crate of the platform

  cargo xtask floors";

/// The types that crates of floor 0 share: every other crate may depend on it, also on its own floor.
const VOCABULARY: &str = "platform/vocabulary";

/// The floor of each crate. Dependencies go down; only those of tests may go sideways.
const FLOORS: &[(&str, u8)] = &[
    (VOCABULARY, 0),
    ("platform/api", 0),
    ("workflows/language", 0),
    ("platform/sqlite", 0),
    ("gpu/proto", 0),
    ("platform/store", 1),
    ("platform/artifacts", 1),
    ("platform/distribution", 1),
    ("platform/sigv4", 1),
    ("platform/runtime", 1),
    ("platform/accept", 1),
    ("platform/csi", 1),
    ("platform/flexvolume", 1),
    ("platform/informer", 1),
    ("platform/join", 1),
    ("workflows/machine", 1),
    ("workflows/journal", 1),
    ("platform/apiserver", 2),
    ("platform/scheduler", 2),
    ("platform/controllers", 2),
    ("platform/kubelet", 2),
    ("platform/network", 2),
    ("platform/node-link", 2),
    ("platform/devices", 2),
    ("platform/gateway", 2),
    ("platform/registry", 2),
    ("platform/simulated", 2),
    ("runtime-wasm", 2),
    ("runtime-oci", 2),
    ("runtime-slurm", 2),
    ("gpu/shim", 2),
    ("gpu/fake-cuda", 2),
    ("gpu/fake-nvml", 2),
    ("workflows/engine", 2),
    ("gpu/nvidia-plugin", 3),
    ("workflows/api", 3),
    ("platform/cli", 3),
    ("platform/flex-bridge", 3),
    ("workflows/controller", 3),
    ("platform/server", 5),
    ("tests/recorded", 1),
    ("tests/runtime-conformance", 2),
    ("tests/slurm-cluster", 1),
    ("tests/csi-driver", 3),
    ("tests/e2e", 6),
    ("tests/sim", 6),
    ("xtask/harness", 5),
    ("bench", 6),
    ("xtask", 7),
];

/// Packages (with all that start with their name and a dash) and the crates that may depend on them.
const KEPT_TO: &[(&[&str], &[&str])] = &[
    (&["wasmtime"], &["runtime-wasm"]),
    (&["containerd"], &["runtime-oci"]),
    (
        &["rusqlite", "etcd", "postgres", "tokio-postgres", "sqlx", "redb", "sled"],
        &["platform/sqlite", "platform/store", "workflows/journal", "workflows/engine"],
    ),
    (&["rtnetlink", "netlink", "nftables"], &["platform/network"]),
];

/// Dependencies that are forbidden on floor 0: data types and rules need no runtime and no network.
const FLOOR0_FORBIDDEN: &[&str] =
    &["tokio", "hyper", "axum", "tower", "http", "reqwest", "async-std", "smol"];

/// The minimum number of lines of a charter: what belongs here, what does not, where to start reading.
const CHARTER_LINES_MIN: usize = 3;

/// The properties of a workspace member that the rules use.
#[derive(Debug, Default)]
struct Member {
    name: String,
    /// Folder, relative to the workspace's root.
    dir: String,
    dependencies: Vec<Dependency>,
    /// The first lines of `lib.rs`, or of `main.rs` if there is no library.
    opening: String,
}

#[derive(Debug, Default)]
struct Dependency {
    name: String,
    dev: bool,
    features: Vec<String>,
}

pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if let Some(argument) = arguments.first() {
        bail!("floors takes no argument, not {argument:?}");
    }
    let workspace = Workspace::locate()?;
    let members = members(&workspace.metadata, &workspace.root)?;
    let mut violations = violations(&members);
    for guests in ["sdk/rust", "examples"] {
        let manifest = workspace.root.join(guests).join("Cargo.toml");
        if manifest.exists() {
            let guests = self::members(&workspace::metadata(&manifest)?, &workspace.root)?;
            violations.extend(guest_violations(&guests));
        }
    }
    for violation in &violations {
        println!("floors: {violation}");
    }
    if !violations.is_empty() {
        bail!("{} breach(es) of the floors (see ARCHITECTURE.md)", violations.len());
    }
    println!("floors: {} crates, all arrows go down", members.len());
    Ok(())
}

fn members(metadata: &Value, root: &Path) -> Result<Vec<Member>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    packages.iter().map(|package| member(package, root)).collect()
}

fn member(package: &Value, root: &Path) -> Result<Member> {
    let manifest = Path::new(package["manifest_path"].as_str().context("a package without a path")?);
    let folder = manifest.parent().context("a manifest without a folder")?;
    let dir = folder.strip_prefix(root).unwrap_or(folder).to_string_lossy().into_owned();
    let texts = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|v| v.as_str()).map(str::to_owned).collect()
    };
    let dependencies =
        package["dependencies"].as_array().into_iter().flatten().map(|dependency| Dependency {
            name: dependency["name"].as_str().unwrap_or_default().to_owned(),
            dev: dependency["kind"] == "dev",
            features: texts(&dependency["features"]),
        });
    let opening = ["src/lib.rs", "src/main.rs"]
        .iter()
        .find_map(|file| std::fs::read_to_string(folder.join(file)).ok())
        .unwrap_or_default();
    Ok(Member {
        name: package["name"].as_str().unwrap_or_default().to_owned(),
        dir,
        dependencies: dependencies.collect(),
        opening,
    })
}

/// All violations, one sentence each.
fn violations(members: &[Member]) -> Vec<String> {
    let mut found = Vec::new();
    for member in members {
        let Some(floor) = floor(&member.dir) else {
            found.push(format!("{} is on no floor: name it in xtask/src/floors.rs", member.dir));
            continue;
        };
        let expected = expected_name(&member.dir);
        if member.name != expected {
            found.push(format!("{} is called {}, its folder says {expected}", member.dir, member.name));
        }
        if charter_lines(&member.opening) < CHARTER_LINES_MIN {
            found.push(format!(
                "{} opens without a charter: {CHARTER_LINES_MIN} lines of `//!` or more that say what belongs \
                 there, what does not, and where to start reading",
                member.dir
            ));
        }
        for dependency in &member.dependencies {
            arrow(members, member, floor, dependency, &mut found);
            known_elsewhere(member, dependency, &mut found);
            if floor == 0 && !dependency.dev {
                on_the_ground(member, dependency, &mut found);
            }
        }
    }
    found
}

fn arrow(members: &[Member], from: &Member, floor: u8, dependency: &Dependency, found: &mut Vec<String>) {
    let Some(to) = members.iter().find(|member| member.name == dependency.name) else { return };
    let Some(below) = self::floor(&to.dir) else { return };
    if below > floor {
        found.push(format!("{} (floor {floor}) looks up at {} (floor {below})", from.name, to.name));
    } else if below == floor && !dependency.dev && to.dir != VOCABULARY {
        found.push(format!(
            "{} and {} are both on floor {floor}: they meet through API objects or a contract on a lower floor",
            from.name, to.name
        ));
    }
}

fn known_elsewhere(member: &Member, dependency: &Dependency, found: &mut Vec<String>) {
    for (names, dirs) in KEPT_TO {
        let kept = names.iter().any(|name| is_or_extends(&dependency.name, name));
        if kept && !dirs.contains(&member.dir.as_str()) {
            found.push(format!("{} names {}: only {} may", member.name, dependency.name, dirs.join(" and ")));
        }
    }
}

fn on_the_ground(member: &Member, dependency: &Dependency, found: &mut Vec<String>) {
    if FLOOR0_FORBIDDEN.iter().any(|name| is_or_extends(&dependency.name, name)) {
        found.push(format!("{} lies on floor 0 and depends on {}", member.name, dependency.name));
    }
    if dependency.name == "kube" && dependency.features.iter().any(|f| f == "client" || f == "runtime") {
        found.push(format!("{} lies on floor 0 and takes kube's client", member.name));
    }
}

/// Guest code must not depend on the platform.
fn guest_violations(members: &[Member]) -> Vec<String> {
    let of_the_platform = |name: &str| FLOORS.iter().any(|(dir, _)| expected_name(dir) == name);
    let arrows = members.iter().flat_map(|member| member.dependencies.iter().map(move |d| (member, d)));
    arrows
        .filter(|(_, dependency)| of_the_platform(&dependency.name))
        .map(|(member, dependency)| {
            format!("{} is guest code and depends on {} of the platform", member.name, dependency.name)
        })
        .collect()
}

fn floor(dir: &str) -> Option<u8> {
    FLOORS.iter().find(|(known, _)| *known == dir).map(|(_, floor)| *floor)
}

/// `mayfly-` and the path joined with `-`; without `platform/` and `tests/`.
fn expected_name(dir: &str) -> String {
    match dir {
        "platform/server" => "mayfly".into(),
        "xtask" => "xtask".into(),
        _ => {
            let path = dir.strip_prefix("platform/").or_else(|| dir.strip_prefix("tests/")).unwrap_or(dir);
            format!("mayfly-{}", path.replace('/', "-"))
        }
    }
}

fn is_or_extends(name: &str, base: &str) -> bool {
    name.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_']))
}

fn charter_lines(source: &str) -> usize {
    source.lines().take_while(|line| line.starts_with("//!")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHARTER: &str = "//! What belongs here.\n//! What does not.\n//! Where to start.\n";

    /// A test member; dependencies are names, with the prefix `dev:` for those of tests.
    fn member(dir: &str, dependencies: &[&str]) -> Member {
        let dependency = |text: &&str| Dependency {
            name: text.trim_start_matches("dev:").to_owned(),
            dev: text.starts_with("dev:"),
            features: Vec::new(),
        };
        Member {
            name: expected_name(dir),
            dir: dir.into(),
            dependencies: dependencies.iter().map(dependency).collect(),
            opening: CHARTER.into(),
        }
    }

    fn house(extra: Member) -> Vec<Member> {
        let mut members = vec![
            member("platform/api", &["serde", "kube"]),
            member("platform/store", &["tokio", "rusqlite"]),
            member("platform/runtime", &["mayfly-api"]),
            member("platform/gateway", &["mayfly-api", "mayfly-runtime"]),
            member("runtime-wasm", &["mayfly-runtime", "wasmtime", "wasmtime-wasi"]),
            member("platform/server", &["mayfly-gateway", "mayfly-runtime-wasm", "mayfly-store"]),
            member("xtask", &["anyhow"]),
        ];
        members.retain(|member| member.dir != extra.dir);
        members.push(extra);
        members
    }

    /// The problems that are found when this member is added to a valid workspace.
    #[track_caller]
    fn check(extra: Member, expect: &[&str]) {
        let found = violations(&house(extra));
        assert_eq!(found.len(), expect.len(), "{found:#?}");
        for (found, expect) in found.iter().zip(expect) {
            assert!(found.contains(expect), "{found:?} does not say {expect:?}");
        }
    }

    #[test]
    fn a_valid_workspace_has_no_violations() {
        check(member("tests/e2e", &["mayfly", "tokio"]), &[]);
    }

    #[test]
    fn a_dependency_on_a_higher_floor_is_found() {
        check(
            member("platform/store", &["mayfly-gateway"]),
            &["mayfly-store (floor 1) looks up at mayfly-gateway"],
        );
        check(member("platform/api", &["mayfly-store"]), &["mayfly-api (floor 0) looks up"]);
        check(
            member("platform/gateway", &["dev:mayfly"]),
            &["mayfly-gateway (floor 2) looks up at mayfly (floor 5)"],
        );
    }

    #[test]
    fn two_crates_of_one_floor_know_each_other_only_in_tests() {
        check(member("platform/kubelet", &["mayfly-runtime-wasm"]), &["both on floor 2"]);
        check(member("platform/kubelet", &["dev:mayfly-runtime-wasm"]), &[]);
        check(member("platform/artifacts", &["mayfly-store"]), &["both on floor 1"]);
    }

    #[test]
    fn the_crates_of_floor_0_share_the_vocabulary_alone() {
        let with_vocabulary = |extra| {
            let mut members = house(extra);
            members.retain(|member| member.dir != VOCABULARY);
            members.push(member(VOCABULARY, &["serde"]));
            violations(&members)
        };
        assert_eq!(with_vocabulary(member("platform/api", &["mayfly-vocabulary"])), Vec::<String>::new());
        assert_eq!(
            with_vocabulary(member("workflows/language", &["mayfly-vocabulary"])),
            Vec::<String>::new()
        );
        check(member("workflows/language", &["mayfly-api"]), &["both on floor 0"]);
        check(member(VOCABULARY, &["mayfly-api"]), &["both on floor 0"]);
    }

    #[test]
    fn restricted_dependencies_are_allowed_only_in_their_crates() {
        check(member("platform/gateway", &["wasmtime-wasi-http"]), &["only runtime-wasm may"]);
        check(
            member("platform/gateway", &["rusqlite"]),
            &["only platform/sqlite and platform/store and workflows/journal and workflows/engine may"],
        );
        check(member("platform/gateway", &["dev:etcd-client"]), &["names etcd-client"]);
        check(member("platform/gateway", &["containerd-client"]), &["only runtime-oci may"]);
        check(member("platform/gateway", &["nftables", "rtnetlink"]), &["names nftables", "names rtnetlink"]);
        check(member("platform/gateway", &["wasmtimer"]), &[]);
    }

    #[test]
    fn floor_0_has_no_async_runtime_or_network_dependency() {
        check(member("platform/api", &["tokio-util"]), &["floor 0 and depends on tokio-util"]);
        check(member("platform/api", &["http"]), &["depends on http"]);
        check(member("platform/api", &["dev:tokio"]), &[]);
        let mut with_client = member("platform/api", &["kube"]);
        with_client.dependencies[0].features = vec!["client".into()];
        check(with_client, &["takes kube's client"]);
    }

    #[test]
    fn names_charters_and_new_folders_are_checked() {
        let mut renamed = member("platform/network", &[]);
        renamed.name = "mayfly-net".into();
        check(renamed, &["platform/network is called mayfly-net, its folder says mayfly-network"]);
        let mut silent = member("platform/network", &[]);
        silent.opening = "//! One line.\nuse std::fmt;\n".into();
        check(silent, &["opens without a charter"]);
        check(member("platform/common", &[]), &["platform/common is on no floor"]);
    }

    #[test]
    fn guests_are_isolated_from_the_workspace() {
        let guests = [member("sdk/rust", &["serde"]), member("examples/hello", &["mayfly-sdk"])];
        assert_eq!(guest_violations(&guests), Vec::<String>::new());
        let found = guest_violations(&[member("sdk/rust", &["mayfly-api"])]);
        assert_eq!(found, ["mayfly-sdk-rust is guest code and depends on mayfly-api of the platform"]);
    }

    #[test]
    fn metadata_is_read_as_cargo_prints_it() {
        let metadata = serde_json::json!({"packages": [{
            "name": "mayfly-api",
            "manifest_path": "/house/platform/api/Cargo.toml",
            "dependencies": [
                {"name": "kube", "kind": null, "features": ["client"]},
                {"name": "tokio", "kind": "dev", "features": []},
            ],
        }]});
        let members = members(&metadata, Path::new("/house")).unwrap();
        assert_eq!(members[0].dir, "platform/api");
        assert_eq!(members[0].dependencies[0].features, ["client"]);
        assert!(!members[0].dependencies[0].dev && members[0].dependencies[1].dev);
    }
}
