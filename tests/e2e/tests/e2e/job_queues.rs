//! Queued jobs and gang scheduling on simulated GPUs, with kubectl.

use anyhow::{Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::{Value, json};

use crate::{
    containers::{ContainerNode, containers_or_skip},
    gpus,
};

/// A Job whose pods use a GPU each and run until they are deleted.
fn job(name: &str, pods: u32, queue: Option<&str>, gang: Option<&str>) -> Value {
    let labels = queue.map_or_else(|| json!({}), |queue| json!({"mayfly.dev/queue": queue}));
    let annotations = gang.map_or_else(|| json!({}), |gang| json!({"mayfly.dev/gang": gang}));
    json!({"apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {"parallelism": pods, "completions": pods, "template": {"spec": {"restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "busybox:local",
                "command": ["sleep", "1d"], "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}}})
}

async fn create(node: &ContainerNode, name: &str, object: &Value) -> Result<()> {
    node.kubectl.ok(&["create", "-f", &node.kubectl.file(name, object)?]).await.map(drop)
}

/// The number of pods of a Job in a phase.
async fn phase(node: &ContainerNode, job: &str, phase: &str) -> Result<usize> {
    let selector = format!("job-name={job}");
    let field = format!("status.phase={phase}");
    let listed = ["get", "pods", "-l", &selector, "--field-selector", &field, "-o", "name"];
    Ok(node.kubectl.ok(&listed).await?.lines().count())
}

async fn running(node: &ContainerNode, job: &str, count: usize) -> Result<()> {
    wait::until(&format!("{count} pods of {job} run"), || async {
        Ok((phase(node, job, "Running").await? == count).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_take_turns_and_gangs_are_placed_whole() -> Result<()> {
    containers_or_skip!();
    let node = gpus::node().await?;
    gpus::whole_gpus(&node, 4).await?;
    let queue = json!({"apiVersion": "mayfly.dev/v1", "kind": "JobQueue", "metadata": {"name": "gpus"},
        "spec": {"quota": {"nvidia.com/gpu": "3"}}});
    create(&node, "queue", &queue).await?;
    create(&node, "first", &job("first", 2, Some("gpus"), None)).await?;
    running(&node, "first", 2).await?;
    // Two GPUs do not fit into the rest of the quota; one would, and would delay the first job.
    create(&node, "second", &job("second", 2, Some("gpus"), None)).await?;
    create(&node, "third", &job("third", 1, Some("gpus"), None)).await?;
    let row = wait::until("the queue counts its jobs", || async {
        let row = node.kubectl.ok(&["get", "jobqueues", "--no-headers"]).await?;
        Ok(row.starts_with("gpus   2").then_some(row))
    })
    .await?;
    let cells: Vec<_> = row.split_whitespace().collect();
    ensure!(cells[..5] == ["gpus", "2", "1", "nvidia.com/gpu", "2/3"], "{row}");
    let why = node.kubectl.up.cli().ok(&["why", "job", "second"]).await?;
    let needs = "needs 2 of nvidia.com/gpu, and 1 of 3 in the queue's quota are free";
    ensure!(why.contains("number 1 of 2 that wait in queue gpus") && why.contains(needs), "{why}");
    let why = node.kubectl.up.cli().ok(&["why", "job", "third"]).await?;
    ensure!(why.contains("could delay job default/second"), "{why}");
    ensure!(phase(&node, "second", "Running").await? + phase(&node, "third", "Running").await? == 0);
    node.kubectl.ok(&["delete", "job", "first", "--timeout=50s"]).await?;
    running(&node, "second", 2).await?;
    running(&node, "third", 1).await?;

    // One GPU is free: no pod of a gang of two is scheduled until both fit.
    create(&node, "gang", &job("gang", 2, None, Some("all"))).await?;
    let why = wait::until("the gang waits for room", || async {
        let why = node.kubectl.up.cli().ok(&["why", "job", "gang"]).await?;
        Ok(why.contains("gang of 2 pods is placed together, and 1 of them fit").then_some(why))
    })
    .await?;
    ensure!(why.starts_with("job gang: Waiting: 2 of its 2 pods wait"), "{why}");
    let bound = ["get", "pods", "-l", "job-name=gang", "-o", "jsonpath={.items[*].spec.nodeName}"];
    ensure!(node.kubectl.ok(&bound).await?.is_empty(), "half of a gang has a node");
    node.kubectl.ok(&["delete", "job", "third", "--timeout=50s"]).await?;
    running(&node, "gang", 2).await?;
    node.kubectl.ok(&["delete", "jobs", "--all", "--timeout=50s"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn one_model_of_gpu_has_a_quota() -> Result<()> {
    containers_or_skip!();
    let node = gpus::node().await?;
    gpus::whole_gpus(&node, 4).await?;
    let label = "jsonpath={.items[0].metadata.labels.nvidia\\.com/gpu\\.product}";
    let model = node.kubectl.ok(&["get", "nodes", "-o", label]).await?;
    let flavor = |name: &str, model: &str, gpus: u32| json!({"name": name, "nodeLabels": {"nvidia.com/gpu.product": model}, "quota": {"nvidia.com/gpu": gpus}});
    let queue = json!({"apiVersion": "mayfly.dev/v1", "kind": "JobQueue", "metadata": {"name": "models"},
        "spec": {"quota": {"nvidia.com/gpu": 4}, "flavors": [flavor("here", &model, 1), flavor("old", "NVIDIA-K80", 4)]}});
    create(&node, "queue", &queue).await?;
    create(&node, "first", &job("first", 1, Some("models"), None)).await?;
    running(&node, "first", 1).await?;
    let selector = "jsonpath={.spec.template.spec.nodeSelector}";
    let selected = node.kubectl.ok(&["get", "job", "first", "-o", selector]).await?;
    let expected = json!({"nvidia.com/gpu.product": model}).to_string();
    ensure!(selected == expected, "{selected}");
    // The model's quota is used up, though the queue's is not.
    let mut second = job("second", 1, Some("models"), None);
    second["spec"]["template"]["spec"]["nodeSelector"] = json!({"nvidia.com/gpu.product": model});
    create(&node, "second", &second).await?;
    wait::until("the queue counts the model", || async {
        let row = node.kubectl.ok(&["get", "jobqueues", "models", "--no-headers"]).await?;
        let used = "nvidia.com/gpu 1/4, here: nvidia.com/gpu 1/1, old: nvidia.com/gpu 0/4";
        let cells: Vec<_> = row.split_whitespace().collect();
        Ok((row.contains(used) && cells[..3] == ["models", "1", "1"]).then_some(()))
    })
    .await?;
    let why = node.kubectl.up.cli().ok(&["why", "job", "second"]).await?;
    ensure!(
        why.contains("needs 1 of nvidia.com/gpu, and 0 of 1 in the quota of flavor here are free"),
        "{why}"
    );
    node.until_event("first", "QueueStarted: Queue models has room for the job in flavor here").await?;
    node.kubectl.ok(&["delete", "job", "first", "--timeout=50s"]).await?;
    running(&node, "second", 1).await?;
    node.kubectl.ok(&["delete", "jobs", "--all", "--timeout=50s"]).await?;
    node.leaves_nothing().await
}
