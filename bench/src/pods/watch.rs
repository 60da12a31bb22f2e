//! The changes of pods, as kubectl's watch shows them.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::server::ServerProcess;
use serde_json::{Value, json};

/// The timeout of a round.
const ROUND_TIMEOUT: Duration = Duration::from_secs(300);
/// The maximum number of changes that wait to be read: those of a round.
const CHANGES_MAX: usize = 1 << 14;
/// The fields of a line: see [`PodChange`].
const FORMAT: &str = "jsonpath={.type} {.object.metadata.name} {.object.spec.nodeName} {.object.status.phase} \
                      {.object.metadata.deletionTimestamp}{\"\\n\"}";

/// A `kubectl get --watch` whose lines get a timestamp on arrival.
pub(crate) struct PodWatch {
    kubectl: Child,
    lines: mpsc::Receiver<(Instant, String)>,
}

impl PodWatch {
    pub(crate) fn start(server: &ServerProcess) -> Result<Self> {
        let mut kubectl = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(server.kubeconfig())
            .args(["get", "pods", "--watch", "--output-watch-events", "-o", FORMAT])
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        let output = BufReader::new(kubectl.stdout.take().context("kubectl has no output")?);
        let (sender, lines) = mpsc::sync_channel(CHANGES_MAX);
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
    pub(crate) fn round(&mut self, server: &ServerProcess, pods: &[Value]) -> Result<Vec<f64>> {
        let names: Vec<&str> = pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        let file = server.folder().join("pods.json");
        fs::write(&file, list.to_string()).context("cannot write a manifest")?;
        server.kubectl(&["create", "-f", &file.to_string_lossy()])?;
        self.until_all(server, &names, |change| change.is_bound(), |change| change.phase == "Running")
    }

    /// Waits until all these pods have ended successfully; returns the times from bound to the end, in milliseconds.
    pub(crate) fn succeeded(&mut self, server: &ServerProcess, names: &[&str]) -> Result<Vec<f64>> {
        self.until_all(server, names, |change| change.is_bound(), |change| change.phase == "Succeeded")
    }

    /// Deletes these pods in one request each; returns the times from the mark of the deletion to the removal, in
    /// milliseconds.
    pub(crate) fn deletion(&mut self, server: &ServerProcess, names: &[&str]) -> Result<Vec<f64>> {
        server.kubectl(&[&["delete", "pods", "--wait=false"], names].concat())?;
        self.until_all(server, names, |change| change.is_marked(), |change| change.event == "DELETED")
    }

    /// The times between two changes of each pod, in milliseconds.
    fn until_all(
        &mut self,
        server: &ServerProcess,
        names: &[&str],
        begins: impl Fn(&PodChange) -> bool,
        ends: impl Fn(&PodChange) -> bool,
    ) -> Result<Vec<f64>> {
        let mut begun: HashMap<String, Instant> = HashMap::new();
        let mut took = HashMap::new();
        let deadline = Instant::now() + ROUND_TIMEOUT;
        while took.len() < names.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((at, line)) = self.lines.recv_timeout(left) else {
                bail!(
                    "{} of {} pods are done after {ROUND_TIMEOUT:?}: {}",
                    took.len(),
                    names.len(),
                    server.log_tail()
                )
            };
            let Some(change) = PodChange::parse(&line) else { continue };
            if !names.contains(&change.name) || !begins(&change) {
                continue;
            }
            let since = *begun.entry(change.name.to_owned()).or_insert(at);
            if ends(&change) {
                took.entry(change.name.to_owned()).or_insert(at.duration_since(since).as_secs_f64() * 1e3);
            }
        }
        Ok(took.into_values().collect())
    }
}

/// A line of the watch.
struct PodChange<'l> {
    event: &'l str,
    name: &'l str,
    node: &'l str,
    phase: &'l str,
    deletion: &'l str,
}

impl<'l> PodChange<'l> {
    fn parse(line: &'l str) -> Option<Self> {
        let fields: Vec<&str> = line.split(' ').collect();
        let [event, name, node, phase, deletion] = fields[..] else { return None };
        Some(Self { event, name, node, phase, deletion })
    }

    fn is_bound(&self) -> bool {
        !self.node.is_empty()
    }

    fn is_marked(&self) -> bool {
        !self.deletion.is_empty()
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        // kubectl may have ended with the server.
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}
