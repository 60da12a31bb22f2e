//! The share of the node that containers get: cgroups and scores of the classes, local storage and its limits.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use mayfly_e2e::{skipped, test_name};
use serde_json::json;

use crate::{
    containers::{ContainerNode, containers_or_skip},
    containers_lifecycle::pod,
};

/// The cgroup of a pod of this class for a controller, in either version of cgroups.
fn group(controller: &str, class: &str, uid: &str) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchy =
        if root.join("cgroup.controllers").exists() { root.into() } else { root.join(controller) };
    hierarchy.join("mayfly").join(class).join(uid)
}

/// The content of the first of these files that a group has.
fn value(group: &Path, files: [&str; 2]) -> String {
    let read = |file| std::fs::read_to_string(group.join(file)).ok();
    files.into_iter().find_map(read).unwrap_or_default().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_have_the_cgroup_and_the_scores_of_their_class() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let full = json!({"cpu": "500m", "memory": "32Mi"});
    let cases = [
        (
            "guaranteed",
            "Guaranteed",
            "",
            json!({"requests": full, "limits": full}),
            ["512", "20"],
            "33554432",
        ),
        ("burstable", "Burstable", "burstable", json!({"requests": {"cpu": "250m"}}), ["256", "10"], ""),
        ("besteffort", "BestEffort", "besteffort", json!({}), ["2", "1"], ""),
    ];
    let mut groups = Vec::new();
    for (name, class, folder, resources, weights, memory) in cases {
        node.create(&pod(name, "exec sleep 1d", json!({"resources": resources}), json!({}))).await?;
        node.ready(name).await?;
        ensure!(node.field(name, "{.status.qosClass}").await? == class, "{name}");
        let uid = node.field(name, "{.metadata.uid}").await?;
        let (cpu, ram) = (group("cpu", folder, &uid), group("memory", folder, &uid));
        let weight = value(&cpu, ["cpu.shares", "cpu.weight"]);
        ensure!(weights.contains(&weight.as_str()), "{name}: weight {weight:?} in {}", cpu.display());
        let limit = value(&ram, ["memory.limit_in_bytes", "memory.max"]);
        ensure!((limit == memory) != memory.is_empty(), "{name}: limit {limit:?} in {}", ram.display());
        ensure!(std::fs::read_dir(&cpu)?.flatten().any(|entry| entry.path().is_dir()), "no container in it");
        let score: i32 = node.exec(name, "cat /proc/1/oom_score_adj").await?.trim().parse()?;
        let scores = match class {
            "Guaranteed" => -997..=-997,
            "BestEffort" => 1000..=1000,
            _ => 2..=999,
        };
        ensure!(scores.contains(&score), "{name}: {score}");
        groups.extend([cpu, ram]);
    }
    // The class weighs as its pods do; other servers of this machine may have pods in it.
    let class: u64 = value(&group("cpu", "burstable", ""), ["cpu.shares", "cpu.weight"]).parse()?;
    ensure!(class >= 10, "{class}");
    // The same after another start of the server.
    let node = node.restart().await?;
    node.ready("burstable").await?;
    node.exec("burstable", "true").await?;
    node.kubectl.ok(&["delete", "pod", "--all", "--grace-period=1"]).await?;
    node.leaves_nothing().await?;
    let left: Vec<_> = groups.iter().filter(|group| group.exists()).collect();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}
