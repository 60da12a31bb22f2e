//! The bridge of a FlexVolume driver to CSI: a node plugin, beside the kubelet of any cluster.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Args;
use mayfly_cli::failure::{ErrorCode, Failure};
use mayfly_flex_bridge::{BridgeConfig, csi_name};
use tokio_util::sync::CancellationToken;

use super::signals::StopSignals;
use crate::{config::LogFormat, logging};

#[derive(Args, Debug)]
pub(crate) struct FlexBridgeArgs {
    /// The driver's program, as …/VENDOR~DRIVER/DRIVER
    #[arg(long, value_name = "FILE")]
    driver: PathBuf,
    /// The name of the CSI driver [default: DRIVER.VENDOR]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The node's name, which the driver gets to attach volumes
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node: String,
    /// The kubelet's folder, in which the driver registers
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// The socket of CSI, as a path or unix:// URL; another program then registers the driver
    /// [default: plugins/NAME/csi.sock in the kubelet's folder, registered by the bridge]
    #[arg(long, value_name = "SOCKET")]
    endpoint: Option<String>,
    /// The timeout of a call of the driver, in seconds; waitforattach has 10 minutes
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
}

/// Serves until SIGINT or SIGTERM.
pub(crate) fn run(args: FlexBridgeArgs) -> anyhow::Result<ExitCode> {
    logging::start("info", LogFormat::Text)?;
    let config = args.config()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut signals, stop) = (StopSignals::listen()?, CancellationToken::new());
        tracing::info!(driver = config.name, socket = %config.endpoint.display(), "serving a FlexVolume driver");
        let ended = stop.clone();
        let signalled = async {
            signals.received().await;
            ended.cancel();
            anyhow::Ok(())
        };
        let served = async {
            mayfly_flex_bridge::serve(config, stop).await.context("cannot serve the driver")
        };
        tokio::try_join!(served, signalled)
    })?;
    Ok(ExitCode::SUCCESS)
}

impl FlexBridgeArgs {
    fn config(self) -> anyhow::Result<BridgeConfig> {
        let program = std::path::absolute(self.driver)?;
        let name = self.name.or_else(|| csi_name(&program)).ok_or_else(|| {
            Failure::error(
                ErrorCode::Usage,
                format!("no name follows from the path of the driver {}", program.display()),
                "give one: --name disk.example.com",
            )
        })?;
        let endpoint = self.endpoint.map(|text| PathBuf::from(text.strip_prefix("unix://").unwrap_or(&text)));
        let registers = endpoint.is_none();
        let own = || self.kubelet_dir.join("plugins").join(&name).join("csi.sock");
        Ok(BridgeConfig {
            endpoint: endpoint.unwrap_or_else(own),
            registry: registers.then(|| self.kubelet_dir.join("plugins_registry")),
            call_timeout: Duration::from_secs(self.timeout),
            program,
            node: self.node,
            name,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: FlexBridgeArgs,
    }

    fn config(more: &[&str]) -> BridgeConfig {
        let line = ["x", "--driver", "/exec/example.com~disk/disk", "--node", "n"];
        CommandLine::parse_from(line.iter().chain(more)).args.config().unwrap()
    }

    #[test]
    fn the_sockets_are_those_of_a_csi_driver() {
        let found = config(&["--kubelet-dir", "/k"]);
        assert_eq!(found.endpoint, PathBuf::from("/k/plugins/disk.example.com/csi.sock"));
        assert_eq!(found.registry, Some(PathBuf::from("/k/plugins_registry")));
        for endpoint in ["unix:///s/csi.sock", "/s/csi.sock"] {
            let found = config(&["--endpoint", endpoint, "--name", "other"]);
            assert_eq!((found.endpoint, found.registry), (PathBuf::from("/s/csi.sock"), None));
            assert_eq!(found.name, "other");
        }
    }
}
