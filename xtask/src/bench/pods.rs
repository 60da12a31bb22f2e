//! Pods of an image: from bound to running, one at a time and fifty together, compared with `ctr run` of the same image
//! on the same containerd; the duration of an exec. Needs root, containerd, kubectl, ctr and a static busybox.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Options;
use crate::{
    cleanup::Cleanup,
    command, image,
    server::ServerProcess,
    table::{Table, median, ms, percentile},
    workspace::Workspace,
};

/// The number of pods that are created together.
const AT_ONCE: usize = 50;
/// The timeout of a round.
const ROUND_TIMEOUT: Duration = Duration::from_secs(120);
const IMAGE: &str = "docker.io/library/busybox:bench";

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let rounds = if options.quick { 10 } else { 50 };
    let scope = Cleanup::new()?;
    let server = ServerProcess::start(&scope, &options.mayfly(workspace), &["--containers", "on"])?;
    let archive = image::busybox(&scope.temporary_folder("image")?, IMAGE)?;
    server.cli(&["image", "import", &archive.to_string_lossy()])?;
    let mut watch = PodWatch::start(&server)?;
    let kubectl = |arguments: &[&str]| server.kubectl(arguments);
    // The first pod starts containerd and creates the bridge.
    watch.round(&server, &[sleeping("warm")])?;
    let mut alone = Vec::new();
    let (mut ctr_run, mut exec, mut ctr_exec) = (Vec::new(), Vec::new(), Vec::new());
    let socket = server.containers().join("containerd.sock");
    let ctr = |arguments: &[&str]| {
        let mut ctr = Command::new("ctr");
        command::output(ctr.arg("--address").arg(&socket).args(["--namespace", "mayfly"]).args(arguments))
    };
    for at in 0..rounds {
        alone.extend(watch.round(&server, &[sleeping(&format!("alone-{at}"))])?);
        let id = format!("bench-{at}");
        ctr_run.push(timed(|| ctr(&["run", "--detach", IMAGE, &id, "/bin/sleep", "1d"]))?);
        exec.push(timed(|| kubectl(&["exec", "warm", "--", "/bin/true"]))?);
        ctr_exec.push(timed(|| ctr(&["task", "exec", "--exec-id", "x", &id, "/bin/true"]))?);
        ctr(&["task", "rm", "--force", &id])?;
        ctr(&["container", "rm", &id])?;
    }
    let many: Vec<Value> = (0..AT_ONCE).map(|at| sleeping(&format!("together-{at}"))).collect();
    let begun = Instant::now();
    let mut together = watch.round(&server, &many)?;
    let all_ms = begun.elapsed().as_secs_f64() * 1e3;
    kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait=true"])?;
    drop(watch);
    server.stop(&scope);
    let mut table = Table::new(&["pods of an image", "p50", "p99"]);
    for (name, values) in [
        ("bound to running, one at a time, with network", &mut alone),
        ("ctr run, without network", &mut ctr_run),
        ("bound to running, 50 at once", &mut together),
        ("kubectl exec true, whole command", &mut exec),
        ("ctr task exec true, whole command", &mut ctr_exec),
    ] {
        table.row(&[name.into(), ms(median(values)), ms(percentile(values, 99.0))]);
    }
    println!("\n{}", table.text());
    println!("  50 pods from kubectl create to the last one running: {}", ms(all_ms));
    Ok(json!({"rounds": rounds, "aloneMs": alone, "ctrRunMs": ctr_run, "togetherMs": together,
        "togetherAllMs": all_ms, "execMs": exec, "ctrExecMs": ctr_exec}))
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// A `kubectl get --watch` whose lines get a timestamp on arrival.
pub(super) struct PodWatch {
    kubectl: Child,
    lines: mpsc::Receiver<(Instant, String)>,
}

impl PodWatch {
    pub(super) fn start(server: &ServerProcess) -> Result<Self> {
        let path = "jsonpath={.metadata.name} {.spec.nodeName} {.status.phase}{\"\\n\"}";
        let mut kubectl = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(server.kubeconfig())
            .args(["get", "pods", "--watch", "-o", path])
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        let output = BufReader::new(kubectl.stdout.take().context("kubectl has no output")?);
        // The bound covers the pods of one round, each of which changes a few times.
        let (sender, lines) = mpsc::sync_channel(64 * AT_ONCE);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send((Instant::now(), line)).is_err() {
                    return;
                }
            }
        });
        Ok(Self { kubectl, lines })
    }

    /// Creates pods in one request each and waits until all run; returns the times from bound to running, in
    /// milliseconds.
    pub(super) fn round(&mut self, server: &ServerProcess, pods: &[Value]) -> Result<Vec<f64>> {
        let names: Vec<&str> = pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        let file = server.folder().join("pods.json");
        fs::write(&file, list.to_string()).context("cannot write a manifest")?;
        server.kubectl(&["create", "-f", &file.to_string_lossy()])?;
        let mut bound: HashMap<String, Instant> = HashMap::new();
        let mut took = HashMap::new();
        let deadline = Instant::now() + ROUND_TIMEOUT;
        while took.len() < names.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((at, line)) = self.lines.recv_timeout(left) else {
                bail!(
                    "{} of {} pods run after {ROUND_TIMEOUT:?}: {}",
                    took.len(),
                    names.len(),
                    server.log_tail()
                )
            };
            let fields: Vec<&str> = line.split(' ').collect();
            let [name, node, phase] = fields[..] else { continue };
            if node.is_empty() || !names.contains(&name) {
                continue;
            }
            let since = *bound.entry(name.to_owned()).or_insert(at);
            if phase == "Running" {
                took.entry(name.to_owned()).or_insert(at.duration_since(since).as_secs_f64() * 1e3);
            }
        }
        Ok(took.into_values().collect())
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        // kubectl may have ended with the server.
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}

fn sleeping(name: &str) -> Value {
    pod(name, IMAGE, &["/bin/sleep", "1d"])
}

/// A pod with one container.
pub(super) fn pod(name: &str, image: &str, command: &[&str]) -> Value {
    let container =
        json!({"name": "c", "image": image, "imagePullPolicy": "IfNotPresent", "command": command});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}})
}
