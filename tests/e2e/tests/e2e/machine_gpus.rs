//! GPUs of the machine, found by the driver's library: here the simulated library, at the name and path at which the
//! dynamic linker searches the driver's.

use std::{os::unix::fs::symlink, path::Path, sync::atomic::Ordering::Relaxed};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, wait};
use mayfly_gpu_proto::{
    FAKE_NVML_FILE, NVML_SONAME,
    sim::{STATE_ENV, SimFile, parse_gpus},
};
use serde_json::{Value, json};

use crate::gpus;

/// A server on a machine with the driver of these GPUs.
async fn start(folder: &Path, arguments: &[&str]) -> Result<Up> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let start = Start::default().in_folder(&folder.join("d")).with(arguments);
    let start = start.environment("LD_LIBRARY_PATH", &text(&folder.join("driver")));
    start.environment(STATE_ENV, &text(&folder.join("state"))).ready().await
}

async fn node(up: &Up) -> Result<Value> {
    let nodes = up.api()?.get("/api/v1/nodes").await?.body;
    nodes["items"].get(0).cloned().context("no node")
}

/// Capacity and allocatable count of whole GPUs; `None` if the node does not list them.
fn counts(node: &Value) -> Option<(String, String)> {
    let count = |part: &str| Some(node["status"][part]["nvidia.com/gpu"].as_str()?.to_owned());
    Some((count("capacity")?, count("allocatable")?))
}

async fn offers(up: &Up, capacity: &str, allocatable: &str) -> Result<Value> {
    let what = format!("{allocatable} of {capacity} GPUs are allocatable");
    let reached = wait::until(&what, || async {
        let node = node(up).await?;
        let wanted = Some((capacity.to_owned(), allocatable.to_owned()));
        Ok((counts(&node) == wanted).then_some(node))
    });
    reached.await.with_context(|| up.log())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_machines_gpus_are_offered_unless_they_are_broken_or_off() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::create_dir(folder.path().join("driver"))?;
    let library = gpus::libraries()?.join(FAKE_NVML_FILE);
    symlink(library, folder.path().join("driver").join(NVML_SONAME))?;
    let sim = SimFile::create(&folder.path().join("state"), &parse_gpus("2xL4")?)?;

    let up = start(folder.path(), &[]).await?;
    let node_now = offers(&up, "2", "2").await?;
    let labels = &node_now["metadata"]["labels"];
    let wanted = [
        ("nvidia.com/gpu.product", "NVIDIA-L4"),
        ("nvidia.com/gpu.count", "2"),
        ("nvidia.com/gpu.memory", "23034"),
        ("nvidia.com/gpu.compute.major", "8"),
        ("nvidia.com/cuda.driver.major", "570"),
    ];
    for (name, value) in wanted {
        ensure!(labels[name] == value, "{name}: {labels}");
    }
    // Each resource is connected by itself.
    wait::until("both GPUs are offered in shares", || async {
        let node = node(&up).await?;
        Ok((node["status"]["capacity"]["mayfly.dev/vcuda-core"] == "200").then_some(()))
    })
    .await?;
    ensure!(up.log().contains("GPUs are offered"), "{}", up.log());

    // A GPU that is lost from the bus is not allocatable, which the metrics show.
    sim.device(1).lost.store(1, Relaxed);
    offers(&up, "2", "1").await?;
    let metrics = up.admin().get("/metrics").await?.text();
    let of = |name: &str| -> Vec<&str> {
        let lines = metrics.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit(' ').next()).collect()
    };
    ensure!(of("mayfly_gpu_healthy{") == ["1.0", "0.0"], "{metrics}");
    ensure!(of("mayfly_gpu_faults_total{") == ["0", "1"], "{metrics}");
    up.stop().await?;

    // Without GPUs the node has no GPU labels.
    let up = start(folder.path(), &["--gpus", "off"]).await?;
    let without = wait::until("the node has no labels of GPUs", || async {
        let node = node(&up).await?;
        let labels = node["metadata"]["labels"].as_object().context("labels")?;
        Ok(labels.keys().all(|name| !name.starts_with("nvidia.com/")).then_some(node.clone()))
    });
    let without = without.await?;
    ensure!(without["metadata"]["labels"]["kubernetes.io/os"] == json!("linux"), "{without}");
    up.stop().await
}
