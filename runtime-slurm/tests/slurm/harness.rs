//! A runtime on a cluster, and test containers.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use mayfly_api::ObjectKey;
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, ProcessOptions, Runtime as _, RuntimeError,
    SandboxHost, SandboxSpec,
};
use mayfly_runtime_slurm::{SlurmConfig, SlurmRuntime, commands::SlurmClient, script::SubmitDefaults};
use mayfly_slurm_cluster::SlurmCluster;
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const POLL_EVERY: Duration = Duration::from_millis(300);

/// A cluster; `None`, after a line with the reason, if there is none.
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
pub(crate) fn cluster_or_skip(test: &str) -> Option<SlurmCluster> {
    match SlurmCluster::start() {
        Ok(cluster) => Some(cluster),
        Err(reason) => {
            println!("SKIPPED {test}: {reason}");
            None
        }
    }
}

/// The runtime under test, with the directory of its logs.
pub(crate) struct Harness {
    pub(crate) runtime: SlurmRuntime,
    logs: PathBuf,
}

impl Harness {
    pub(crate) async fn new(cluster: &SlurmCluster) -> Self {
        let path = std::env::var("PATH").unwrap_or_default();
        let configuration = cluster.configuration().to_string_lossy().into_owned();
        let environment = vec![("PATH".into(), path), ("SLURM_CONF".into(), configuration)];
        Self::create(&cluster.shared(), SlurmClient { folder: None, environment }).await
    }

    /// A runtime on a machine without Slurm's commands.
    pub(crate) async fn without_commands(shared: &Path) -> Self {
        let client = SlurmClient { folder: Some(shared.join("nowhere")), environment: Vec::new() };
        Self::create(shared, client).await
    }

    async fn create(shared: &Path, client: SlurmClient) -> Self {
        let config = SlurmConfig {
            shared: shared.to_owned(),
            client,
            defaults: SubmitDefaults::default(),
            poll_every: POLL_EVERY,
        };
        let runtime = SlurmRuntime::create(config).await.unwrap();
        Self { runtime, logs: shared.join("logs") }
    }

    /// A container that runs a shell script.
    pub(crate) fn container(&self, uid: &str, script: &str) -> ContainerSpec {
        let id = ContainerId { pod: PodUid(uid.into()), name: "main".into(), attempt: 0 };
        ContainerSpec {
            log_path: self.logs.join(id.to_string()),
            id,
            image: "none".into(),
            command: ["bash", "-c", script].map(String::from).to_vec(),
            args: Vec::new(),
            env: Vec::new(),
            memory_bytes_max: Some(100 << 20),
            cpu_millis_max: None,
            ports: Vec::new(),
            files: None,
            process: ProcessOptions::default(),
        }
    }

    /// The sandbox of a pod.
    pub(crate) fn sandbox_spec(uid: &str, annotations: &[(&str, &str)]) -> SandboxSpec {
        let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        SandboxSpec {
            uid: PodUid(uid.into()),
            pod: ObjectKey::new("default", uid),
            labels: Default::default(),
            annotations: annotations.collect(),
            address: None,
            host: SandboxHost::default(),
        }
    }

    pub(crate) async fn sandbox(&self, uid: &str, annotations: &[(&str, &str)]) {
        let made = self.runtime.create_sandbox(Self::sandbox_spec(uid, annotations)).await.unwrap();
        assert!(made.addresses.is_empty());
    }

    /// Starts a container in its own sandbox.
    pub(crate) async fn start(&self, container: &ContainerSpec) -> Result<(), RuntimeError> {
        self.sandbox(&container.id.pod.0, &[]).await;
        self.runtime.start_container(container.clone()).await
    }

    pub(crate) fn state(&self, id: &ContainerId) -> Option<ContainerState> {
        let all = self.runtime.containers(&id.pod);
        all.into_iter().find(|(known, _)| known == id).map(|(_, state)| state)
    }
}

/// Waits for a container's end; returns its exit code, reason and message.
pub(crate) async fn exit_of(runtime: &SlurmRuntime, id: &ContainerId) -> (i32, String, String) {
    let mut changes = runtime.changes();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let known = runtime.containers(&id.pod);
        let state = known.into_iter().find(|(known, _)| known == id).map(|(_, state)| state);
        if let Some(ContainerState::Exited { started, finished, exit_code, reason, message }) = state {
            assert!(started <= finished, "{started} {finished}");
            return (exit_code, reason, message);
        }
        let changed = tokio::time::timeout_at(deadline, changes.changed()).await;
        assert!(changed.is_ok(), "container {id} has not ended: {state:?}");
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        sleep(LOOK_EVERY).await;
    }
}

/// The lines of a log without timestamps, sorted by stream and text; empty if the file is missing.
pub(crate) fn lines(log: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let mut lines: Vec<String> =
        text.lines().filter_map(|line| Some(line.split_once(' ')?.1.to_owned())).collect();
    lines.sort();
    lines
}
