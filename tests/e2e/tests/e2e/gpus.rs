//! Simulated GPUs: a node's resources, enforced shares, jobs that build and run a source file. Needs root, containers
//! and a C compiler.
//!
//! Cargo builds the libraries for these tests as the dev-dependencies `mayfly_gpu_shim`, `mayfly_gpu_fake_cuda` and
//! `mayfly_gpu_fake_nvml`.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::containers::{ContainerNode, containers_or_skip};

/// Folders of the host with the C library and the compiler; containers see them at the same paths.
const HOST_FOLDERS: [&str; 3] = ["/usr", "/lib", "/lib64"];
const LIBRARIES: [&str; 3] =
    ["libmayfly_gpu_shim.so", "libmayfly_gpu_fake_cuda.so", "libmayfly_gpu_fake_nvml.so"];

macro_rules! compiler_or_skip {
    () => {
        if !Path::new("/usr/bin/gcc").exists() {
            skipped(test_name!(), "no gcc");
            return Ok(());
        }
    };
}

/// A node with four simulated GPUs of 141 GB.
pub(crate) async fn node() -> Result<ContainerNode> {
    let libraries = libraries()?;
    let libraries = libraries.to_string_lossy();
    ContainerNode::start_with(&["--fake-gpus", "4xH200", "--gpu-libraries-dir", &libraries]).await
}

/// The folder of the libraries that cargo built: next to this program, or one folder up.
pub(crate) fn libraries() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let mut folders = program.ancestors().skip(1).take(2);
    let found = folders.find(|folder| LIBRARIES.iter().all(|name| folder.join(name).is_file()));
    Ok(found.context("cargo did not build the GPU libraries")?.to_owned())
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/gpu_share.c")
}

/// A pod whose container has the host's compiler.
fn pod_spec(command: &str, limits: &Value) -> Value {
    let folders: Vec<_> = HOST_FOLDERS.into_iter().filter(|folder| Path::new(folder).is_dir()).collect();
    let volume = |at: usize| format!("host{at}");
    let volumes: Vec<_> = folders
        .iter()
        .enumerate()
        .map(|(at, path)| json!({"name": volume(at), "hostPath": {"path": path}}))
        .collect();
    let mounts: Vec<_> = folders
        .iter()
        .enumerate()
        .map(|(at, path)| json!({"name": volume(at), "mountPath": path, "readOnly": true}))
        .collect();
    json!({"restartPolicy": "Never", "volumes": volumes, "containers": [{"name": "c", "image": "busybox:local",
        "env": [{"name": "PATH", "value": "/usr/bin:/bin"}], "command": ["/bin/sh", "-c", command],
        "volumeMounts": mounts, "resources": {"limits": limits}}]})
}

fn half_a_gpu() -> Value {
    json!({"mayfly.dev/vcuda-core": 50, "mayfly.dev/vcuda-memory": 32})
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_gpu_is_offered_allocated_and_enforced() -> Result<()> {
    containers_or_skip!();
    compiler_or_skip!();
    let node = node().await?;
    let described = wait::until("the node offers its GPUs", || async {
        let described = node.kubectl.ok(&["describe", "node"]).await?;
        let wanted =
            [("nvidia.com/gpu:", "4"), ("mayfly.dev/vcuda-core:", "400"), ("mayfly.dev/vcuda-memory:", "")];
        let has = |(name, count): &(&str, &str)| {
            let lines = described.lines().filter(|line| line.trim_start().starts_with(name));
            lines.filter(|line| line.trim_end().ends_with(count)).count() >= 2
        };
        Ok(wanted.iter().all(has).then_some(described))
    })
    .await?;
    ensure!(described.contains("Allocated resources"), "{described}");
    // Two halves share one GPU; the program is limited to its 8 GiB, and ends only on a signal.
    upload_source(&node).await?;
    for name in ["a", "b"] {
        create_program(&node, name, "/tmp/share && exec sleep 1d").await?;
    }
    let mut devices = Vec::new();
    for name in ["a", "b"] {
        let told = wait::until(&format!("{name} has run"), || async {
            let log = node.kubectl.ok(&["logs", name]).await?;
            Ok(serde_json::from_str::<Value>(log.trim()).ok())
        })
        .await;
        let told = match told {
            Ok(told) => told,
            Err(error) => {
                let described = node.kubectl.ok(&["describe", "pod", name]).await?;
                let log = node.kubectl.run(&["logs", name]).await?;
                return Err(error.context(format!("{described}\n{log:?}")));
            }
        };
        ensure!(told == json!({"devices": 1, "totalGiB": 8, "allocatedGiB": 8, "refusal": 2}), "{told}");
        devices.push(node.exec(name, "echo $NVIDIA_VISIBLE_DEVICES").await?);
    }
    ensure!(devices[0] == devices[1] && devices[0].starts_with("GPU-"), "{devices:?}");
    both_halves_are_shown(&node, &devices[0]).await?;
    // The shared GPU is not available as a whole until its pods are removed.
    whole_gpus(&node, 3).await?;
    node.kubectl.ok(&["delete", "pod", "a", "b", "--grace-period=0", "--force"]).await?;
    whole_gpus(&node, 4).await?;
    node.leaves_nothing().await
}

async fn upload_source(node: &ContainerNode) -> Result<()> {
    let file = format!("--from-file={}", source().display());
    node.kubectl.ok(&["create", "configmap", "source", &file]).await.map(drop)
}

/// Creates a pod with half a GPU that builds the source as `/tmp/share` and runs a command.
async fn create_program(node: &ContainerNode, name: &str, command: &str) -> Result<()> {
    let build = "mkdir -p /tmp; gcc -o /tmp/share /source/gpu_share.c -ldl";
    let mut spec = pod_spec(&format!("{build} && {command}"), &half_a_gpu());
    let source = json!({"name": "source", "configMap": {"name": "source"}});
    spec["volumes"].as_array_mut().context("volumes")?.push(source);
    let mounts = spec["containers"][0]["volumeMounts"].as_array_mut().context("mounts")?;
    mounts.push(json!({"name": "source", "mountPath": "/source"}));
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    node.kubectl.ok(&["create", "-f", &node.kubectl.file(name, &pod)?]).await.map(drop)
}

/// A program that runs without the limiting library gets more memory than its limit, and its pod is evicted. One that
/// uses all of its limit is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_program_without_the_limiting_library_is_evicted() -> Result<()> {
    containers_or_skip!();
    compiler_or_skip!();
    let node = node().await?;
    upload_source(&node).await?;
    create_program(&node, "honest", "exec /tmp/share 1000").await?;
    let allocated = |name: &'static str, pieces: u32| {
        let kubectl = &node.kubectl;
        wait::until("its program has allocated memory", move || async move {
            let log = kubectl.ok(&["logs", name]).await?;
            let told = serde_json::from_str::<Value>(log.trim()).ok();
            Ok(told.filter(|told| told["allocatedGiB"] == pieces))
        })
    };
    allocated("honest", 8).await?;
    create_program(&node, "cheat", "exec env -u LD_PRELOAD /tmp/share 12").await?;
    let pod = wait::until("the pod is evicted", || async {
        let pod: Value =
            serde_json::from_str(&node.kubectl.ok(&["get", "pod", "cheat", "-o", "json"]).await?)?;
        Ok((pod["status"]["phase"] == "Failed").then_some(pod))
    })
    .await?;
    let message = pod["status"]["message"].as_str().unwrap_or_default();
    ensure!(pod["status"]["reason"] == "Evicted", "{}", pod["status"]);
    ensure!(message.contains("Container c exceeded its GPU memory limit \"8192Mi\""), "{message}");
    ensure!(message.contains("uses 12288Mi of GPU-"), "{message}");
    let events =
        node.kubectl.ok(&["get", "events", "--field-selector", "reason=Evicted", "-o", "name"]).await?;
    ensure!(!events.trim().is_empty(), "no event");
    let phase = node.kubectl.ok(&["get", "pod", "honest", "-o", "jsonpath={.status.phase}"]).await?;
    ensure!(phase == "Running", "{phase}");
    node.kubectl.ok(&["delete", "pod", "honest", "cheat", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

/// With the pairs 0–3 and 1–2, a container with two GPUs does not get 1 and 3, which are free as well.
#[tokio::test(flavor = "multi_thread")]
async fn several_gpus_are_those_with_the_fastest_link() -> Result<()> {
    containers_or_skip!();
    let folder = tempfile::tempdir()?;
    let (matrix, libraries) = (folder.path().join("topology"), libraries()?);
    let links = "GPU0 GPU1 GPU2 GPU3\nGPU0 X SYS SYS NV4\nGPU1 SYS X NV4 SYS\nGPU2 SYS NV4 X SYS\nGPU3 NV4 SYS SYS X\n";
    std::fs::write(&matrix, links)?;
    let node = ContainerNode::start_with(&[
        "--fake-gpus",
        "4xL4",
        "--gpu-topology",
        &matrix.to_string_lossy(),
        "--gpu-libraries-dir",
        &libraries.to_string_lossy(),
    ])
    .await?;
    whole_gpus(&node, 4).await?;
    for (name, count, expected) in [("one", 1, &["0"][..]), ("two", 2, &["1", "2"]), ("last", 1, &["3"])] {
        let spec = pod_spec("exec sleep 1d", &json!({"nvidia.com/gpu": count}));
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        node.kubectl.ok(&["create", "-f", &node.kubectl.file(name, &pod)?]).await?;
        node.kubectl.ok(&["wait", "--for=condition=ready", &format!("pod/{name}"), "--timeout=50s"]).await?;
        let told = node.exec(name, "echo $NVIDIA_VISIBLE_DEVICES").await?;
        // The last digit of a simulated GPU's UUID is its index.
        let mut got: Vec<_> = told.trim().split(',').map(|uuid| &uuid[uuid.len() - 1..]).collect();
        got.sort_unstable();
        ensure!(got == expected, "{name}: {told}");
    }
    node.kubectl.ok(&["delete", "pod", "one", "two", "last", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

/// Pods get instances of a GPU in MIG mode, in which CUDA shows only the own one.
#[tokio::test(flavor = "multi_thread")]
async fn mig_instances_are_devices_of_their_own() -> Result<()> {
    containers_or_skip!();
    compiler_or_skip!();
    let libraries = libraries()?;
    let gpus = [
        "--fake-gpus",
        "1xL4,1xH100:mig=3g.40gb+1g.10gb*2",
        "--gpu-libraries-dir",
        &libraries.to_string_lossy(),
    ];
    let node = ContainerNode::start_with(&gpus).await?;
    whole_gpus(&node, 1).await?;
    let labels = node.kubectl.ok(&["get", "node", "-o", "jsonpath={.items[0].metadata.labels}"]).await?;
    let labels: Value = serde_json::from_str(&labels)?;
    let of = |name: &str| labels[format!("nvidia.com/{name}")].as_str();
    ensure!((of("mig.strategy"), of("mig-1g.10gb.count")) == (Some("mixed"), Some("2")), "{labels}");
    // Prints the number of CUDA's devices, and the memory of the first one in GiB.
    let program = r#"
        #include <stdio.h>
        #include <dlfcn.h>
        int main() {
            void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
            int count = 0; size_t bytes = 0;
            ((int (*)(unsigned))dlsym(cuda, "cuInit"))(0);
            ((int (*)(int *))dlsym(cuda, "cuDeviceGetCount"))(&count);
            ((int (*)(size_t *, int))dlsym(cuda, "cuDeviceTotalMem_v2"))(&bytes, 0);
            printf("%d %zu\n", count, bytes >> 30);
        }"#;
    let command = format!(
        "mkdir -p /tmp && cat > /tmp/a.c <<'END'\n{program}\nEND\ngcc -o /tmp/a /tmp/a.c -ldl && /tmp/a && exec sleep 1d"
    );
    for (name, resource, memory_gib) in [("large", "mig-3g.40gb", 39), ("small", "mig-1g.10gb", 9)] {
        let spec = pod_spec(&command, &json!({format!("nvidia.com/{resource}"): 1}));
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        node.kubectl.ok(&["create", "-f", &node.kubectl.file(name, &pod)?]).await?;
        let told = wait::until(&format!("{name} has run"), || async {
            let log = node.kubectl.ok(&["logs", name]).await?;
            Ok(log.contains('\n').then_some(log))
        })
        .await?;
        ensure!(told.trim() == format!("1 {memory_gib}"), "{name}: {told}");
        let visible = node.exec(name, "echo $CUDA_VISIBLE_DEVICES").await?;
        ensure!(visible.starts_with("MIG-"), "{visible}");
    }
    let shown = node.kubectl.up.cli().ok(&["top", "gpus", "--interval", "100ms"]).await?;
    ensure!(
        shown.contains("1:0") && shown.contains("default/large") && shown.contains("MIG 1g.10gb"),
        "{shown}"
    );
    node.kubectl.ok(&["delete", "pod", "large", "small", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

/// `mayfly top gpus` and the metrics show the allocations of both containers.
async fn both_halves_are_shown(node: &ContainerNode, uuid: &str) -> Result<()> {
    let told = node.kubectl.up.cli().ok(&["top", "gpus", "-o", "json", "--interval", "100ms"]).await?;
    let gpus: Vec<Value> = serde_json::from_str(&told)?;
    let shared = gpus.iter().find(|gpu| gpu["uuid"] == uuid.trim()).with_context(|| told.clone())?;
    ensure!(gpus.len() == 4 && shared["coreAllocatedPercent"] == 100.0, "{told}");
    let containers = shared["containers"].as_array().context("containers")?;
    let shown: Vec<_> = containers
        .iter()
        .map(|one| (one["pod"].as_str(), one["corePercent"].as_f64(), one["memoryLimitBytes"].as_f64()))
        .collect();
    let half = |pod| (Some(pod), Some(50.0), Some(8.0 * f64::from(1 << 30)));
    ensure!(shown == [half("a"), half("b")], "{told}");
    let table = node.kubectl.up.cli().ok(&["top", "gpus", "--interval", "100ms"]).await?;
    ensure!(table.contains("default/a") && table.contains("NVIDIA H200"), "{table}");
    Ok(())
}

pub(crate) async fn whole_gpus(node: &ContainerNode, count: usize) -> Result<()> {
    wait::until(&format!("{count} whole GPUs are allocatable"), || async {
        let path = r"jsonpath={.items[0].status.allocatable.nvidia\.com/gpu}";
        let told = node.kubectl.ok(&["get", "node", "-o", path]).await?;
        Ok((told == count.to_string()).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_job_builds_a_source_file_and_its_results_outlive_its_pod() -> Result<()> {
    containers_or_skip!();
    compiler_or_skip!();
    let node = node().await?;
    let pushed = node.kubectl.up.cli().ok(&["artifact", "push", &source().to_string_lossy()]).await?;
    let digest =
        pushed.split_whitespace().find(|word| word.starts_with("sha256:")).context(pushed.clone())?;
    let inputs = json!({"artifacts": {"job.c": {"digest": digest}}}).to_string();
    let command = "mkdir -p /tmp /mayfly/out/artifacts && gcc -o /tmp/job /mayfly/in/job.c -ldl && \
                   /tmp/job > /mayfly/out/share && cp /tmp/job /mayfly/out/artifacts/program && echo done";
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": {"backoffLimit": 0,
        "template": {"metadata": {"annotations": {"mayfly.dev/inputs": inputs}},
            "spec": pod_spec(command, &half_a_gpu())}}});
    node.kubectl.ok(&["create", "-f", &node.kubectl.file("job", &job)?]).await?;
    let waited = node.kubectl.run(&["wait", "--for=condition=complete", "job/job", "--timeout=50s"]).await?;
    if waited.code != Some(0) {
        let described = node.kubectl.ok(&["describe", "pods,jobs"]).await?;
        let log = node.kubectl.run(&["logs", "job/job"]).await?;
        anyhow::bail!("{waited:?}\n{described}\n{log:?}");
    }
    node.kubectl.ok(&["delete", "pod", "-l", "job-name=job", "--timeout=50s"]).await?;
    let told: Value = serde_json::from_str(&node.kubectl.ok(&["get", "job", "job", "-o", "json"]).await?)?;
    let outcomes = told["metadata"]["annotations"]["mayfly.dev/outcomes"].as_str().context("no outcomes")?;
    let outcomes: Value = serde_json::from_str(outcomes)?;
    let document = outcomes[0]["outputs"]["document"].as_str().with_context(|| outcomes.to_string())?;
    let outputs = node.kubectl.up.cli().ok(&["artifact", "get", document]).await?;
    let outputs: Value = serde_json::from_str(&outputs)?;
    let share = json!({"devices": 1, "totalGiB": 8, "allocatedGiB": 8, "refusal": 2});
    ensure!(outputs["parameters"]["share"] == share && outputs["result"] == "done", "{outputs}");
    ensure!(outputs["gpuMs"].is_u64(), "{outputs}");
    let program = outputs["artifacts"]["program"]["digest"].as_str().with_context(|| outputs.to_string())?;
    let file = node.folder.path().join("program");
    node.kubectl.up.cli().ok(&["artifact", "get", program, "--out", &file.to_string_lossy()]).await?;
    ensure!(std::fs::read(&file)?.starts_with(b"\x7fELF"));
    node.kubectl.ok(&["delete", "job", "job", "--timeout=50s"]).await?;
    a_person_runs_a_script(&node).await?;
    a_person_interrupts_a_script(&node).await?;
    node.leaves_nothing().await
}

/// `mayfly gpu run` shows the log, downloads the results, and exits with the program's exit code.
async fn a_person_runs_a_script(node: &ContainerNode) -> Result<()> {
    let (script, results) = (node.folder.path().join("share.sh"), node.folder.path().join("results"));
    std::fs::write(&script, "echo runs on $NVIDIA_VISIBLE_DEVICES\ncp share.sh $MAYFLY_OUT/copy\nexit 3\n")?;
    let (source, out) = (script.to_string_lossy(), results.to_string_lossy());
    let share = ["--gpus", "0.5", "--gpu-memory", "8Gi", "--image", "busybox:local"];
    let arguments = [&["gpu", "run", &source, "--out", &out], &share[..]].concat();
    let ran = node.kubectl.up.cli().run(&arguments).await?;
    ensure!(ran.code == Some(3) && ran.stdout.starts_with("runs on GPU-"), "{ran:?}");
    ensure!(ran.stderr.contains(" s of GPU time in "), "{ran:?}");
    ensure!(std::fs::read(results.join("copy"))? == std::fs::read(&script)?, "{ran:?}");
    let refused = node.kubectl.up.cli().fails(&["gpu", "run", &source, "--gpus", "0.5"]).await?;
    ensure!(refused.contains("--gpu-memory 8Gi"), "{refused}");
    node.kubectl.ok(&["delete", "jobs", "--all", "--timeout=50s"]).await?;
    an_interrupt_deletes_the_job(node).await
}

/// Ctrl-C while the program runs deletes the Job and its pods.
async fn an_interrupt_deletes_the_job(node: &ContainerNode) -> Result<()> {
    let script = node.folder.path().join("long.sh");
    std::fs::write(&script, "echo started\nexec sleep 1d\n")?;
    let arguments = [
        "gpu",
        "run",
        &script.to_string_lossy(),
        "--share",
        "25",
        "--gpu-memory",
        "1Gi",
        "--image",
        "busybox:local",
    ];
    let mut command = node.kubectl.up.cli().command(&arguments)?;
    let mut child = command.stdout(std::process::Stdio::piped()).spawn()?;
    let mut log = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let first = tokio::time::timeout(std::time::Duration::from_secs(60), log.next_line()).await??;
    ensure!(first.as_deref() == Some("started"), "{first:?}");
    let id = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
    rustix::process::kill_process(id.context("it has ended")?, rustix::process::Signal::INT)?;
    let ended = tokio::time::timeout(std::time::Duration::from_secs(30), child.wait()).await??;
    ensure!(ended.code() == Some(130), "{ended:?}");
    wait::until("the job and its pod are gone", || async {
        Ok(node.kubectl.ok(&["get", "jobs,pods", "-o", "name"]).await?.is_empty().then_some(()))
    })
    .await
}

/// `mayfly gpu run` joins a queue with a share of a GPU, and deletes its Job when it is interrupted.
async fn a_person_interrupts_a_script(node: &ContainerNode) -> Result<()> {
    let queue = json!({"apiVersion": "mayfly.dev/v1", "kind": "JobQueue", "metadata": {"name": "gpus"},
        "spec": {"quota": {"mayfly.dev/vcuda-core": "40"}}});
    node.kubectl.ok(&["create", "-f", &node.kubectl.file("queue", &queue)?]).await?;
    let script = node.folder.path().join("wait.sh");
    std::fs::write(&script, "trap 'exit 0' TERM\necho started\nsleep 1d &\nwait\n")?;
    let source = script.to_string_lossy();
    let share = ["--share", "30", "--gpu-memory", "8Gi", "--queue", "gpus", "--image", "busybox:local"];
    let mut command = node.kubectl.up.cli().command(&[&["gpu", "run", &source], &share[..]].concat())?;
    let mut running = command.stdout(Stdio::piped()).spawn()?;
    let log = running.stdout.take().context("stdout")?;
    let mut lines = BufReader::new(log).lines();
    let line = tokio::time::timeout(Duration::from_secs(60), lines.next_line()).await??;
    ensure!(line.as_deref() == Some("started"), "{line:?}");
    let jobs: Value = serde_json::from_str(&node.kubectl.ok(&["get", "jobs", "-o", "json"]).await?)?;
    let job = &jobs["items"][0];
    ensure!(job["metadata"]["labels"]["mayfly.dev/queue"] == "gpus", "{job}");
    let limits = &job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"];
    ensure!(limits["mayfly.dev/vcuda-core"] == "30" && limits["mayfly.dev/vcuda-memory"] == "32", "{limits}");
    let id = running.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)).context("no process")?;
    kill_process(id, Signal::INT)?;
    let status = tokio::time::timeout(Duration::from_secs(60), running.wait()).await??;
    ensure!(!status.success(), "{status}");
    wait::until("the Job and its pod are gone", || async {
        let left = node.kubectl.ok(&["get", "jobs,pods", "-o", "name"]).await?;
        Ok(left.trim().is_empty().then_some(()))
    })
    .await?;
    node.kubectl.ok(&["delete", "jobqueue", "gpus"]).await.map(drop)
}
