//! Pods of an image: from bound to running, one at a time and fifty together, compared with `ctr run` of the same image
//! on the same containerd; their deletion; the duration of an exec; many running pods; the throughput of a container's
//! log. Needs root, containerd, kubectl, ctr and a static busybox.

mod watch;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command, image,
    server::{ServerProcess, cpu_seconds},
    table::{Table, median, mib, ms, percentile},
    workspace::Workspace,
};
use serde_json::{Map, Value, json};

pub(super) use self::watch::PodWatch;
use super::Options;

/// The number of pods that are created together.
const AT_ONCE: usize = 50;
const IMAGE: &str = "docker.io/library/busybox:bench";
/// The number of bytes of a line of the log, with its end.
const LINE_BYTES: usize = 100;
/// The pause before memory and processor time of many running pods are read.
const SETTLE: Duration = Duration::from_secs(5);

/// The parts that can be run alone.
pub(super) const PARTS: &[&str] = &["starts", "many", "log"];

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let scope = Cleanup::new()?;
    let server = ServerProcess::start(&scope, &options.mayfly(workspace), &["--containers", "on"])?;
    let archive = image::busybox(&scope.temporary_folder("image")?, IMAGE)?;
    server.cli(&["image", "import", &archive.to_string_lossy()])?;
    let mut watch = PodWatch::start(&server)?;
    // The first pod starts containerd and creates the bridge.
    watch.round(&server, &[sleeping("warm")])?;
    let mut bench = Bench { server: &server, watch, quick: options.quick };
    let mut figures = Map::new();
    if options.wants("starts") {
        figures.insert("starts".into(), bench.starts()?);
    }
    if options.wants("many") {
        figures.insert("many".into(), bench.many()?);
    }
    if options.wants("log") {
        figures.insert("log".into(), bench.log(&scope)?);
    }
    server.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait=true"])?;
    drop(bench);
    server.stop(&scope);
    Ok(Value::Object(figures))
}

struct Bench<'b> {
    server: &'b ServerProcess,
    watch: PodWatch,
    quick: bool,
}

impl Bench<'_> {
    /// Starts, deletions and execs.
    fn starts(&mut self) -> Result<Value> {
        let server = self.server;
        let rounds = if self.quick { 10 } else { 50 };
        let (mut alone, mut deletion) = (Vec::new(), Vec::new());
        let (mut ctr_run, mut exec, mut ctr_exec) = (Vec::new(), Vec::new(), Vec::new());
        let socket = server.containers().join("containerd.sock");
        let ctr = |arguments: &[&str]| {
            let mut ctr = Command::new("ctr");
            command::output(ctr.arg("--address").arg(&socket).args(["--namespace", "mayfly"]).args(arguments))
        };
        for at in 0..rounds {
            let name = format!("alone-{at}");
            alone.extend(self.watch.round(server, &[sleeping(&name)])?);
            let id = format!("bench-{at}");
            ctr_run.push(timed(|| ctr(&["run", "--detach", IMAGE, &id, "/bin/sleep", "1d"]))?);
            exec.push(timed(|| server.kubectl(&["exec", "warm", "--", "/bin/true"]))?);
            ctr_exec.push(timed(|| ctr(&["task", "exec", "--exec-id", "x", &id, "/bin/true"]))?);
            ctr(&["task", "rm", "--force", &id])?;
            ctr(&["container", "rm", &id])?;
            deletion.extend(self.watch.deletion(server, &[&name])?);
        }
        let names: Vec<String> = (0..AT_ONCE).map(|at| format!("together-{at}")).collect();
        let pods: Vec<Value> = names.iter().map(|name| sleeping(name)).collect();
        let begun = Instant::now();
        let mut together = self.watch.round(server, &pods)?;
        let all_ms = begun.elapsed().as_secs_f64() * 1e3;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut together_deletion = self.watch.deletion(server, &names)?;
        let mut table = Table::new(&["pods of an image", "p50", "p99"]);
        for (name, values) in [
            ("bound to running, one at a time, with network", &mut alone),
            ("ctr run, without network", &mut ctr_run),
            ("bound to running, 50 at once", &mut together),
            ("marked as deleted to removed, one at a time", &mut deletion),
            ("marked as deleted to removed, 50 at once", &mut together_deletion),
            ("kubectl exec true, whole command", &mut exec),
            ("ctr task exec true, whole command", &mut ctr_exec),
        ] {
            table.row(&[name.into(), ms(median(values)), ms(percentile(values, 99.0))]);
        }
        println!("\n{}", table.text());
        println!("  50 pods from kubectl create to the last one running: {}", ms(all_ms));
        Ok(json!({"rounds": rounds, "aloneMs": alone, "ctrRunMs": ctr_run, "togetherMs": together,
            "togetherAllMs": all_ms, "deletionMs": deletion, "togetherDeletionMs": together_deletion,
            "execMs": exec, "ctrExecMs": ctr_exec}))
    }

    /// The server's memory and processor time while many pods run and nothing changes.
    fn many(&mut self) -> Result<Value> {
        let server = self.server;
        let (count, seconds) = if self.quick { (20, 5) } else { (200, 30) };
        let none = server.resident_bytes()?;
        let names: Vec<String> = (0..count).map(|at| format!("many-{at}")).collect();
        let pods: Vec<Value> = names.iter().map(|name| sleeping(name)).collect();
        self.watch.round(server, &pods)?;
        std::thread::sleep(SETTLE);
        let used = cpu_seconds(server.id())?;
        std::thread::sleep(Duration::from_secs(seconds));
        let share = (cpu_seconds(server.id())? - used) / seconds as f64;
        let resident = server.resident_bytes()?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.watch.deletion(server, &names)?;
        println!(
            "\n  {count} running pods: {:.1} % of a core, resident {} ({} before)",
            share * 100.0,
            mib(resident as f64),
            mib(none as f64),
        );
        Ok(json!({"pods": count, "cores": share, "residentBytes": resident, "residentBytesBefore": none}))
    }

    /// The throughput of a container's log, beside the same program that writes into a file.
    fn log(&mut self, scope: &Cleanup) -> Result<Value> {
        let lines = if self.quick { 500_000 } else { 5_000_000 };
        let program = format!("yes {} | head -n {lines}", "x".repeat(LINE_BYTES - 1));
        let name = "log";
        let mut pod = pod(name, IMAGE, &["/bin/sh", "-c", &program]);
        pod["spec"]["restartPolicy"] = "Never".into();
        self.server.apply(&json!({"apiVersion": "v1", "kind": "List", "items": [pod]}).to_string())?;
        let took = self.watch.succeeded(self.server, &[name])?;
        let logged_ms = *took.first().context("the pod has not ended")?;
        let file = scope.temporary_folder("log")?.join("log");
        let mut shell = Command::new("busybox");
        shell.args(["sh", "-c", &format!("{program} > {}", file.display())]);
        let file_ms = timed(|| command::output(&mut shell))?;
        let mut read = Command::new("kubectl");
        read.arg("--kubeconfig").arg(self.server.kubeconfig()).args(["logs", name]);
        let begun = Instant::now();
        let read_bytes = read.output().context("cannot start kubectl")?.stdout.len();
        let read_ms = begun.elapsed().as_secs_f64() * 1e3;
        let mib_per_s = |bytes: usize, took: f64| bytes as f64 / f64::from(1 << 20) / (took / 1e3);
        let bytes = lines * LINE_BYTES;
        println!(
            "\n  a log of {lines} lines of {LINE_BYTES} bytes: {:.0} MiB/s with the pod's start, {:.0} MiB/s into a \
             file; kubectl logs reads {} in {}",
            mib_per_s(bytes, logged_ms),
            mib_per_s(bytes, file_ms),
            mib(read_bytes as f64),
            ms(read_ms),
        );
        Ok(json!({"lines": lines, "lineBytes": LINE_BYTES, "loggedMs": logged_ms, "fileMs": file_ms,
            "readBytes": read_bytes, "readMs": read_ms}))
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// A pod that ends at once with SIGTERM.
fn sleeping(name: &str) -> Value {
    pod(name, IMAGE, &["/bin/sh", "-c", "trap exit TERM; sleep 86400 & wait"])
}

/// A pod with one container.
pub(super) fn pod(name: &str, image: &str, command: &[&str]) -> Value {
    let container =
        json!({"name": "c", "image": image, "imagePullPolicy": "IfNotPresent", "command": command});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 10, "containers": [container]}})
}
