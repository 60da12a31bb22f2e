//! Decides whether this node runs containers, and creates their host.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context as _, anyhow};
use mayfly_cli::data_dir::DataDir;
use mayfly_distribution::RegistryClient;
use mayfly_runtime_oci::{
    BridgeOptions, Config, OciRuntime,
    availability::{self, Availability},
    host::PodNetworkMode,
};

use tokio::sync::watch;

use crate::config::NodeConfig;

/// The host of containers, if this machine can run them; logs the choice and its reason.
pub(super) async fn create(
    config: &NodeConfig,
    dual_stack: bool,
    data_dir: &DataDir,
    registries: RegistryClient,
    service_rules: Option<watch::Receiver<bool>>,
    bridge: BridgeOptions,
    host_address: IpAddr,
) -> anyhow::Result<Option<Arc<OciRuntime>>> {
    let choice = availability::choose(config.containers).map_err(|reason| {
        anyhow!("--containers on: {reason}; install what is missing, or start with --containers auto or off")
    })?;
    let programs = match choice {
        Availability::Disabled(reason) => {
            tracing::info!(reason, "this node runs no containers");
            return Ok(None);
        }
        Availability::Enabled(programs) => programs,
    };
    tracing::info!(
        containerd = %programs.containerd.display(),
        "this node runs containers; containerd starts with the first pod that needs it"
    );
    let config = Config {
        root: data_dir.containers(),
        programs,
        program: std::env::current_exe().context("cannot find this program's file")?,
        network: PodNetworkMode::Bridge,
        service_rules,
        dual_stack,
        bridge,
        host_address,
        registries,
    };
    let runtime =
        OciRuntime::create(config).await.context("cannot take over the containers of an earlier run")?;
    Ok(Some(Arc::new(runtime)))
}

/// Whether this node will run containers.
pub(super) fn is_enabled(config: &NodeConfig) -> bool {
    matches!(availability::choose(config.containers), Ok(Availability::Enabled(_)))
}
