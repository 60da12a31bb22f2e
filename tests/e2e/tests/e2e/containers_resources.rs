//! The resources of containers: cgroups and OOM scores of the QoS classes, local storage and its limits.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::{Value, json};

use crate::{
    containers::{ContainerNode, containers_or_skip},
    containers_lifecycle::{extend, pod},
};

/// The cgroup of a pod of this QoS class for a controller, for both cgroup versions.
fn group(controller: &str, class: &str, uid: &str) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchy =
        if root.join("cgroup.controllers").exists() { root.into() } else { root.join(controller) };
    hierarchy.join("mayfly").join(class).join(uid)
}

/// The content of the first of these files that exists in a cgroup.
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
            // Without the capability to lower scores, the server's own score is used.
            "Guaranteed" => -997..=0,
            "BestEffort" => 1000..=1000,
            _ => 2..=999,
        };
        ensure!(scores.contains(&score), "{name}: {score}");
        groups.extend([cpu, ram]);
    }
    // The weight of the class is the sum of its pods; other servers of this machine may have pods in it.
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

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_class_adds_its_overhead_and_its_constraints() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let name = node.kubectl.ok(&["get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"]).await?;
    node.kubectl.ok(&["label", "node", &name, "pool=heavy"]).await?;
    node.kubectl.ok(&["taint", "node", &name, "pool=heavy:NoSchedule"]).await?;
    let toleration = json!({"key": "pool", "operator": "Equal", "value": "heavy", "effect": "NoSchedule"});
    let class = |name: &str, handler: &str| {
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler,
            "overhead": {"podFixed": {"cpu": "120m", "memory": "8Mi"}},
            "scheduling": {"nodeSelector": {"pool": "heavy"}, "tolerations": [toleration]}})
    };
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"requests.cpu": "400m", "requests.memory": "1Gi", "limits.cpu": "4", "limits.memory": "1Gi"}}});
    for (name, object) in
        [("heavy", class("heavy", "runc")), ("foreign", class("foreign", "gvisor")), ("q", quota)]
    {
        node.kubectl.ok(&["create", "-f", &node.kubectl.file(name, &object)?]).await?;
    }
    let resources = json!({"resources": {"requests": {"cpu": "50m", "memory": "16Mi"},
        "limits": {"cpu": "100m", "memory": "32Mi"}}});
    let of_class = |name: &str, more: Value| {
        let mut spec = json!({"runtimeClassName": "heavy"});
        extend(&mut spec, more);
        pod(name, "exec sleep 1d", resources.clone(), spec)
    };
    // should schedule a Pod requesting a RuntimeClass and initialize its Overhead
    node.create(&of_class("heavy", json!({}))).await?;
    node.ready("heavy").await?;
    ensure!(node.exec("heavy", "echo runs").await? == "runs\n");
    let constraints =
        node.field("heavy", "{.spec.overhead.cpu} {.spec.overhead.memory} {.spec.nodeSelector.pool}").await?;
    ensure!(constraints == "120m 8Mi heavy", "{constraints}");
    // The overhead counts for the cgroup's limits, the node's requests and the quota's usage.
    let uid = node.field("heavy", "{.metadata.uid}").await?;
    let memory = value(&group("memory", "burstable", &uid), ["memory.limit_in_bytes", "memory.max"]);
    ensure!(memory == (40 * MIB).to_string(), "{memory}");
    let described = node.kubectl.ok(&["describe", "node", &name]).await?;
    let line =
        described.lines().find(|line| line.trim_start().starts_with("default") && line.contains("heavy"));
    let line = line.with_context(|| described.clone())?;
    ensure!(["170m", "220m", "24Mi", "40Mi"].iter().all(|amount| line.contains(amount)), "{line}");
    let used = ["get", "quota", "q", "-o", "jsonpath={.status.used['requests\\.cpu','limits\\.memory']}"];
    wait::until("the quota counts the overhead", || async {
        Ok((node.kubectl.ok(&used).await? == "170m 40Mi").then_some(()))
    })
    .await?;
    // A class whose handler the node lacks; without the overhead it would fit into the quota next to a third pod.
    node.create(&of_class("unhandled", json!({"runtimeClassName": "foreign"}))).await?;
    node.until_event("unhandled", "no runtime for \"gvisor\" is configured").await?;
    for (name, more, why) in [
        (
            "third",
            json!({}),
            "exceeded quota: q, requested: requests.cpu=170m, used: requests.cpu=340m, limited: requests.cpu=400m",
        ),
        ("unknown", json!({"runtimeClassName": "none"}), "pod rejected: RuntimeClass \"none\" not found"),
        (
            "other",
            json!({"overhead": {"cpu": "1"}}),
            "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead",
        ),
        (
            "without",
            json!({"runtimeClassName": null, "overhead": {"cpu": "1"}}),
            "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead",
        ),
        (
            "elsewhere",
            json!({"nodeSelector": {"pool": "light"}}),
            "conflict: runtimeClass.scheduling.nodeSelector[pool] = heavy; pod.spec.nodeSelector[pool] = light",
        ),
    ] {
        let file = node.kubectl.file(name, &of_class(name, more))?;
        let refused = node.kubectl.run(&["create", "-f", &file]).await?;
        ensure!(refused.code != Some(0) && refused.stderr.contains(why), "{refused:?}, expected {why}");
    }
    // A pod without the class does not tolerate the taint.
    node.create(&pod("plain", "exec sleep 1d", json!({"resources": {"requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"cpu": "1m", "memory": "1Mi"}}}), json!({}))).await?;
    node.until_event("plain", "untolerated taint").await?;
    node.delete_all().await
}

const MIB: u64 = 1 << 20;

/// Writes a file of zeroes.
fn fill(file: &str, mib: u64) -> String {
    format!("busybox dd if=/dev/zero of={file} bs=1M count={mib} 2> /dev/null")
}

fn limit(amount: &str) -> Value {
    json!({"resources": {"limits": {"ephemeral-storage": amount}}})
}

impl ContainerNode {
    /// Waits until a pod was evicted, and returns the message.
    async fn until_evicted(&self, name: &str) -> Result<String> {
        let end = "{.status.phase} {.status.reason}: {.status.message}";
        let end = self.until_field(name, end, |end| end.starts_with("Failed Evicted: ")).await?;
        let message = end.trim_start_matches("Failed Evicted: ").to_owned();
        self.until_event(name, &format!("Evicted: {}", message.trim())).await?;
        Ok(message)
    }

    /// The node's usage summary of a pod.
    pub(crate) async fn summary(&self, name: &str) -> Result<Value> {
        let node = self.kubectl.ok(&["get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"]).await?;
        let path = format!("/api/v1/nodes/{node}/proxy/stats/summary");
        let summary: Value = serde_json::from_str(&self.kubectl.ok(&["get", "--raw", &path]).await?)?;
        let capacity = summary["node"]["fs"]["capacityBytes"].as_u64();
        ensure!(capacity.is_some_and(|bytes| bytes > 0), "{summary}");
        let pods = summary["pods"].as_array().context("no pods")?;
        let pod = pods.iter().find(|pod| pod["podRef"]["name"] == name);
        Ok(pod.cloned().unwrap_or_default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_over_their_limits_of_local_storage_are_evicted() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let writes = |mib: u64| format!("{}; exec sleep 1d", fill("/file", mib));
    node.create(&pod("layer", &writes(12), limit("8Mi"), json!({}))).await?;
    let container = |name: &str, script: String| {
        let mut container = json!({"name": name, "image": "busybox:local", "command": ["sh", "-c", script]});
        container["resources"] = limit("8Mi")["resources"].clone();
        container
    };
    let two = json!([container("a", "exec sleep 1d".into()), container("b", writes(12))]);
    node.create(&pod("two", "", json!({}), json!({"containers": two}))).await?;
    let volumes = json!({"volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "8Mi"}}]});
    let mounts = json!({"volumeMounts": [{"name": "scratch", "mountPath": "/s"}]});
    let into_volume = |mib| format!("{}; exec sleep 1d", fill("/s/file", mib));
    node.create(&pod("volume", &into_volume(12), mounts.clone(), volumes.clone())).await?;
    let mut both = limit("40Mi");
    crate::containers_lifecycle::extend(&mut both, mounts);
    node.create(&pod("kept", &into_volume(6), both, volumes)).await?;
    for (name, expected) in [
        ("layer", "Pod ephemeral local storage usage exceeds the total limit of containers 8Mi. "),
        ("two", "Container b exceeded its local ephemeral storage limit \"8Mi\". "),
        ("volume", "Usage of EmptyDir volume \"scratch\" exceeds the limit \"8Mi\". "),
    ] {
        let message = node.until_evicted(name).await?;
        ensure!(message.trim() == expected.trim(), "{name}: {message:?}");
    }
    node.ready("kept").await?;
    node.never_restarted("kept").await?;
    let summary = wait::until("the use is measured", || async {
        let pod = node.summary("kept").await?;
        Ok(pod["ephemeral-storage"]["usedBytes"].as_u64().is_some_and(|used| used >= 6 * MIB).then_some(pod))
    })
    .await?;
    ensure!(summary["ephemeral-storage"]["usedBytes"].as_u64() < Some(8 * MIB), "{summary}");
    ensure!(
        summary["volume"][0]["name"] == "scratch" && summary["containers"][0]["rootfs"].is_object(),
        "{summary}"
    );
    let path = "jsonpath={.items[0].status['capacity','allocatable'].ephemeral-storage}";
    let amounts = node.kubectl.ok(&["get", "nodes", "-o", path]).await?;
    ensure!(amounts.split(' ').filter(|amount| !amount.is_empty()).count() == 2, "{amounts:?}");
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_ends_the_pod_that_filled_it() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start_on_disk(800).await?;
    let requests = json!({"resources": {"requests": {"ephemeral-storage": "20Mi"}}});
    let modest = format!("{}; exec sleep 1d", fill("/file", 5));
    node.create(&pod("modest", &modest, requests, json!({}))).await?;
    let volumes = json!({"volumes": [{"name": "scratch", "emptyDir": {}}]});
    let mounts = json!({"volumeMounts": [{"name": "scratch", "mountPath": "/s"}]});
    node.create(&pod("greedy", "exec sleep 1d", mounts, volumes)).await?;
    node.ready("modest").await?;
    node.ready("greedy").await?;
    let free = || -> Result<(u64, u64)> {
        let disk = rustix::fs::statvfs(node.folder.path().join("d"))?;
        Ok((disk.f_bavail * disk.f_frsize / MIB, disk.f_blocks * disk.f_frsize / MIB))
    };
    let (available, total) = free()?;
    ensure!(available > total / 5, "{available} MiB of {total} MiB are free");
    node.exec("greedy", &fill("/s/file", available - total / 20)).await?;
    let pressure = "{.items[0].status.conditions[?(@.type=='DiskPressure')].status}";
    wait::until("the node says that its disk is full", || async {
        let status = node.kubectl.ok(&["get", "nodes", "-o", &format!("jsonpath={pressure}")]).await?;
        Ok((status == "True").then_some(()))
    })
    .await?;
    let message = node.until_evicted("greedy").await?;
    ensure!(
        message.starts_with("The node was low on resource: ephemeral-storage. Threshold quantity: "),
        "{message}"
    );
    wait::until("the room is there again", || async { Ok((free()?.0 > total / 10).then_some(())) }).await?;
    node.never_restarted("modest").await?;
    ensure!(node.field("modest", "{.status.phase}").await? == "Running");
    node.delete_all().await
}
