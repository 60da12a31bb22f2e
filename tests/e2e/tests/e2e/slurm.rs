//! Pods as batch jobs of a Slurm cluster of one node.

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, skipped, test_name, wait::until};
use mayfly_slurm_cluster::SlurmCluster;
use serde_json::{Value, json};

use crate::{
    kubectl::Kubectl,
    workflows::{create, ended, start},
};

/// The parameters of a server with this cluster.
fn with_cluster(cluster: &SlurmCluster) -> Start {
    let configuration = cluster.configuration();
    let shared = cluster.shared();
    Start::default()
        .with(&["--slurm", "--slurm-dir", &shared.to_string_lossy()])
        .environment("SLURM_CONF", &configuration.to_string_lossy())
}

/// A cluster; `None`, after a line with the reason, if there is none.
fn cluster_or_skip(test: &str) -> Option<SlurmCluster> {
    SlurmCluster::start().map_err(|reason| skipped(test, &reason)).ok()
}

fn has_kubectl(test: &str) -> bool {
    let found = std::process::Command::new("kubectl").args(["version", "--client"]).output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        skipped(test, "no kubectl on the PATH");
    }
    found
}

/// A pod that runs a shell script.
fn pod(name: &str, script: &str, annotations: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations},
        "spec": {"runtimeClassName": "slurm", "restartPolicy": "Never", "containers": [{
            "name": "main", "image": "none", "command": ["bash", "-c", script],
            "resources": {"limits": {"memory": "64Mi"}}}]}})
}

/// A state of a pod's container.
async fn state(kubectl: &Kubectl, pod: &str, which: &str) -> Result<Option<Value>> {
    let text = kubectl.ok(&["get", "pod", pod, "-o", "json"]).await?;
    let pod: Value = serde_json::from_str(&text)?;
    let state = &pod["status"]["containerStatuses"][0]["state"][which];
    Ok((!state.is_null()).then(|| state.clone()))
}

/// Checks that no job waits or runs.
fn is_idle(cluster: &SlurmCluster) -> bool {
    cluster.run("squeue", &["--noheader"]).trim().is_empty()
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_runs_follows_and_deletes_batch_jobs() -> Result<()> {
    let Some(cluster) = cluster_or_skip(test_name!()) else { return Ok(()) };
    if !has_kubectl(test_name!()) {
        return Ok(());
    }
    let kubectl = Kubectl::of(with_cluster(&cluster).ready().await?)?;
    ensure!(kubectl.ok(&["get", "runtimeclass", "slurm", "-o", "name"]).await?.contains("slurm"));
    until("the node is ready", async || {
        let node = kubectl.ok(&["get", "node", "slurm", "--no-headers"]).await?;
        Ok(node.contains(" Ready ").then_some(()))
    })
    .await?;

    // A Job, with kubectl.
    let template = pod("", "echo from $SLURM_JOB_NAME", json!({}))["spec"].clone();
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "hello"},
        "spec": {"template": {"spec": template}}});
    kubectl.ok(&["apply", "-f", &kubectl.file("job.json", &job)?]).await?;
    kubectl.ok(&["wait", "--for=condition=complete", "job/hello", "--timeout=50s"]).await?;
    ensure!(kubectl.ok(&["logs", "job/hello"]).await?.starts_with("from mayfly-"));

    // A pod whose log is followed, and that is deleted while it runs.
    let endless = "trap 'echo asked to end; exit' TERM; echo up; while :; do sleep 0.1; done";
    kubectl.ok(&["apply", "-f", &kubectl.file("pod.json", &pod("endless", endless, json!({})))?]).await?;
    until("it runs", async || state(&kubectl, "endless", "running").await).await?;
    let mut logs = kubectl.start(&["logs", "-f", "endless"])?;
    logs.line("of the program", |line| line == "up").await?;
    let events = kubectl.ok(&["get", "events", "--field-selector=involvedObject.name=endless"]).await?;
    ensure!(events.contains("Started container main"), "{events}");
    kubectl.ok(&["delete", "pod", "endless", "--grace-period=20", "--wait=false"]).await?;
    logs.line("of the program's end", |line| line == "asked to end").await?;
    kubectl.ok(&["wait", "--for=delete", "pod/endless", "--timeout=50s"]).await?;
    ensure!(is_idle(&cluster), "the job goes with its pod");

    // Slurm's message about a rejected job is in the pod's status and in an event.
    let nowhere = pod("nowhere", "true", json!({"slurm.mayfly.dev/partition": "nowhere"}));
    kubectl.ok(&["apply", "-f", &kubectl.file("nowhere.json", &nowhere)?]).await?;
    let waiting = until("it is refused", async || {
        let waiting = state(&kubectl, "nowhere", "waiting").await?;
        Ok(waiting.filter(|waiting| waiting["reason"] == "CreateContainerError"))
    })
    .await?;
    let message = waiting["message"].as_str().context("no message")?;
    ensure!(message.contains("Invalid partition name specified"), "{waiting}");
    until("an event says so, too", async || {
        let events = kubectl.ok(&["get", "events", "--field-selector=involvedObject.name=nowhere"]).await?;
        Ok(events.contains("Invalid partition name specified").then_some(()))
    })
    .await?;
    kubectl.ok(&["delete", "pod", "nowhere", "--timeout=50s"]).await?;

    // A field without an effect is reported.
    let image = kubectl
        .run(&[
            "run",
            "named",
            "--image=busybox",
            "--overrides",
            r#"{"spec": {"runtimeClassName": "slurm"}}"#,
            "--restart=Never",
            "--",
            "true",
        ])
        .await?;
    ensure!(image.stderr.contains("no effect in a pod of runtimeClassName slurm"), "{image:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_a_workflow_runs_as_a_batch_job_with_its_files() -> Result<()> {
    let Some(cluster) = cluster_or_skip(test_name!()) else { return Ok(()) };
    let up = with_cluster(&cluster).ready().await?;
    let data = up.data().join("data.txt");
    std::fs::write(&data, "one\ntwo\n")?;
    let digest = up.cli().ok(&["artifact", "push", &data.to_string_lossy()]).await?;
    let script = "wc -l <$MAYFLY_IN/data >$MAYFLY_OUT/lines; mkdir -p $MAYFLY_OUT/artifacts; \
                  tac $MAYFLY_IN/data >$MAYFLY_OUT/artifacts/reversed; cat";
    let definition = json!({"StartAt": "Run", "States": {"Run": {
        "Type": "Task", "Resource": "arn:aws:states:::job:run.sync", "End": true,
        "Parameters": {"RuntimeClass": "slurm", "Command": ["bash", "-c", script], "Cpu": "1", "Memory": "64Mi",
            "Parameters": {"who": "Ada"}, "Artifacts": {"data": digest.trim()}}}}});
    let machine = create(&up, "batch", "STANDARD", definition).await?;
    let told = ended(&up, &start(&up, &machine, json!({})).await?).await?;
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    let output: Value = serde_json::from_str(told["output"].as_str().context("no output")?)?;
    ensure!(output["result"] == json!({"who": "Ada"}) && output["parameters"]["lines"] == 2, "{output}");
    let reversed = output["artifacts"]["reversed"]["digest"].as_str().with_context(|| format!("{output}"))?;
    ensure!(up.cli().ok(&["artifact", "get", reversed]).await? == "two\none\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_takes_its_batch_jobs_over() -> Result<()> {
    let Some(cluster) = cluster_or_skip(test_name!()) else { return Ok(()) };
    if !has_kubectl(test_name!()) {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = with_cluster(&cluster).in_folder(&data).ready().await?;
    let kubectl = Kubectl::of(up)?;
    let go_on = cluster.shared().join("go-on");
    let script = format!("echo one; while ! [ -e {} ]; do sleep 0.1; done; echo two", go_on.display());
    kubectl.ok(&["apply", "-f", &kubectl.file("pod.json", &pod("long", &script, json!({})))?]).await?;
    until("it runs", async || state(&kubectl, "long", "running").await).await?;
    kubectl.up.kill()?;
    let up: Up = with_cluster(&cluster).in_folder(&data).ready().await?;
    let kubectl = Kubectl::of(up)?;
    std::fs::write(&go_on, "")?;
    let terminated = until("it has ended", async || state(&kubectl, "long", "terminated").await).await?;
    ensure!(terminated["exitCode"] == 0 && terminated["reason"] == "Completed", "{terminated}");
    ensure!(kubectl.ok(&["logs", "long"]).await? == "one\ntwo\n");
    let names = cluster.job_names();
    ensure!(names.len() == 1, "{names:?}");
    kubectl.up.stop().await
}
