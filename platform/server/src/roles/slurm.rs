//! The node that represents a Slurm cluster: a second kubelet in this process, whose containers are batch jobs.
//!
//! Pods with `runtimeClassName: slurm` are bound to it, because no other node has that runtime. It offers more of every
//! resource than a cluster has, so that only Slurm decides which jobs wait.

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use mayfly_artifacts::Artifacts;
use mayfly_cli::data_dir::DataDir;
use mayfly_informer::Informers;
use mayfly_kubelet::{JobFiles, Kubelet};
use mayfly_runtime::{Runtime, logs::LogLayout};
use mayfly_runtime_slurm::{SlurmConfig, SlurmDevices, SlurmRuntime};

use super::nodes::LocalNodes;
use crate::slurm_config::SlurmSettings;

/// The name of the node.
pub(super) const NODE: &str = "slurm";
/// A million cores and an exbibyte: more than any cluster has.
const CPU_MILLIS: u64 = 1_000_000_000;
const MEMORY_BYTES: u64 = 1 << 60;

/// The components of this process that the node uses.
pub(super) struct SlurmDeps<'a> {
    pub(super) data_dir: &'a DataDir,
    pub(super) artifacts: Artifacts,
    pub(super) client: kube::Client,
    pub(super) informers: &'a Informers,
    pub(super) nodes: &'a LocalNodes,
    /// Shown as the node's kubelet version.
    pub(super) version: &'static str,
}

/// The node's kubelet; it takes over the jobs of an earlier process.
pub(super) async fn create(settings: &SlurmSettings, deps: SlurmDeps<'_>) -> anyhow::Result<Kubelet> {
    let local: PathBuf = deps.data_dir.path().join("slurm");
    let shared = settings.shared(&local)?;
    let runtime = SlurmRuntime::create(SlurmConfig {
        shared: shared.clone(),
        client: settings.client.clone(),
        defaults: settings.defaults.clone(),
        poll_every: SlurmConfig::POLL_EVERY_DEFAULT,
    })
    .await
    .with_context(|| {
        format!("cannot use {} for the files of Slurm's jobs; choose another --slurm-dir", shared.display())
    })?;
    // Separate folders: each kubelet removes files in its folders that belong to no pod of its node.
    let logs = LogLayout::new(local.join("logs"));
    let mut config = mayfly_kubelet::Config::of_this_machine(NODE, logs, deps.version);
    config.cpu_millis = CPU_MILLIS;
    config.memory_bytes = MEMORY_BYTES;
    config.jobs = Some(JobFiles::new(deps.artifacts, shared.join("jobs")));
    config.upload_folder = local.join("uploads");
    config.devices = Some(Arc::new(SlurmDevices::default()));
    config.evicts = false;
    let runtimes = vec![Arc::new(runtime) as Arc<dyn Runtime>];
    let kubelet = Kubelet::create(config, deps.client, deps.informers, runtimes);
    deps.nodes.attach(NODE, kubelet.router());
    tracing::info!(shared = %shared.display(), "pods with runtimeClassName slurm run as batch jobs of Slurm");
    Ok(kubelet)
}
