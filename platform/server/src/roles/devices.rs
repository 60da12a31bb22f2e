//! The devices of this node: the manager with which plugins register, and the plugin for this machine's or simulated
//! GPUs.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use anyhow::Context as _;
use mayfly_api::gpu_placement::{ANNOTATION_GPUS, parse_matrix};
use mayfly_cli::data_dir::DataDir;
use mayfly_devices::{DeviceConfig, DeviceManager};
use mayfly_gpu_nvidia_plugin::{
    DriverFiles, GpuMeter, GpuSource, InspectionConfig, Libraries, NvidiaPlugin, PluginConfig, SimulatedHost,
    health::QUARANTINE, labels, plugin::NodeAnnotations, verify::MemoryTolerance,
};
use mayfly_runtime::NodeDevices;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{GpuMode, NodeConfig};

pub(super) struct Devices {
    manager: Arc<DeviceManager>,
    plugin: Option<NvidiaPlugin>,
}

impl Devices {
    /// The device manager; `None` if the default plugin folder cannot be used: the path of a data directory may be too
    /// long for a socket.
    pub(super) fn create(config: &NodeConfig, data_dir: &DataDir) -> anyhow::Result<Option<Self>> {
        let folder = config.device_plugins_dir.clone();
        let folder = folder.unwrap_or_else(|| data_dir.path().join("device-plugins"));
        let is_needed = config.device_plugins_dir.is_some() || !config.fake_gpus.is_empty();
        let manager = match DeviceManager::create(DeviceConfig::new(&folder)) {
            Ok(manager) => manager,
            Err(error) if !is_needed => {
                let folder = folder.display();
                tracing::warn!(%folder, %error, "device plugins cannot register; choose another --device-plugins-dir");
                return Ok(None);
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "cannot listen for device plugins in {}; choose another --device-plugins-dir",
                        folder.display()
                    )
                });
            }
        };
        let plugin = gpus(config, &data_dir.path().join("gpus"), &manager)?;
        Ok(Some(Self { manager, plugin }))
    }

    pub(super) fn of_node(&self) -> Arc<dyn NodeDevices> {
        self.manager.clone()
    }

    /// The labels of a node with these devices; `None` removes a label.
    pub(super) fn labels(devices: Option<&Self>) -> BTreeMap<String, Option<String>> {
        labels::of_node(devices.and_then(|devices| devices.plugin.as_ref()).map(NvidiaPlugin::source))
    }

    /// The prefixes of labels that the node loses unless they are among [`Self::labels`].
    pub(super) fn label_prefixes() -> Vec<String> {
        vec![labels::MIG_PREFIX.to_owned()]
    }

    /// The annotations of a node with these devices; `None` removes one.
    pub(super) fn annotations(devices: Option<&Self>) -> watch::Receiver<NodeAnnotations> {
        match devices.and_then(|devices| devices.plugin.as_ref()) {
            Some(plugin) => plugin.annotations(),
            None => watch::channel([(ANNOTATION_GPUS.to_owned(), None)].into()).1,
        }
    }

    /// Reads the usage of the node's GPUs and by their users; `None` without GPUs.
    pub(super) fn gpu_meter(&self) -> Option<GpuMeter> {
        self.plugin.as_ref().map(NvidiaPlugin::meter)
    }

    pub(super) async fn run(self, stop: CancellationToken) {
        let plugin = async {
            if let Some(plugin) = self.plugin {
                plugin.run(stop.clone()).await;
            }
        };
        tokio::join!(self.manager.run(stop.clone()), plugin);
    }
}

/// The plugin for simulated GPUs, or for those of this machine; `None` without any.
fn gpus(config: &NodeConfig, folder: &Path, manager: &DeviceManager) -> anyhow::Result<Option<NvidiaPlugin>> {
    let libraries = match &config.gpu_libraries_dir {
        Some(folder) => folder.clone(),
        None => {
            let program = std::env::current_exe().context("cannot find this program's file")?;
            program.parent().unwrap_or(Path::new("/")).to_owned()
        }
    };
    let (source, driver) = if !config.fake_gpus.is_empty() {
        let host = SimulatedHost::create(folder, &libraries, &config.fake_gpus).context("--fake-gpus")?;
        (host.source(config.mig_strategy).context("--fake-gpus")?, host.driver())
    } else if config.gpus == GpuMode::Auto {
        match GpuSource::open(None, Path::new("/"), config.mig_strategy) {
            Ok(source) => (source, DriverFiles::of_this_machine()),
            Err(reason) => {
                tracing::info!(%reason, "no GPUs are offered");
                return Ok(None);
            }
        }
    } else {
        return Ok(None);
    };
    let source = match &config.gpu_topology {
        None => source,
        Some(path) => {
            with_links(source, path).with_context(|| format!("--gpu-topology {}", path.display()))?
        }
    };
    let limits = folder.join("limits");
    std::fs::create_dir_all(&limits).with_context(|| format!("cannot make {}", limits.display()))?;
    let found = source.gpus();
    let models: BTreeSet<&str> = found.iter().map(|gpu| gpu.name.as_str()).collect();
    tracing::info!(
        count = found.len(),
        ?models,
        simulated = driver.sim.is_some(),
        driver_libraries = driver.libraries.len(),
        "GPUs are offered"
    );
    let sockets = manager.folder().to_owned();
    let libraries = Libraries { folder: libraries, driver };
    let tolerance = MemoryTolerance { context_bytes: config.gpu_context_bytes, ..MemoryTolerance::default() };
    let inspection = InspectionConfig { tolerance, ..InspectionConfig::default() };
    let config = PluginConfig { source, libraries, limits, sockets, quarantine: QUARANTINE, inspection };
    let plugin = NvidiaPlugin::create(config, manager.allocations());
    plugin.map(Some).context("cannot bind the sockets of the GPU plugin")
}

/// The GPUs with the links in a file.
fn with_links(source: GpuSource, path: &Path) -> anyhow::Result<GpuSource> {
    let text = std::fs::read_to_string(path).context("cannot read it")?;
    Ok(source.with_links(&parse_matrix(&text)?)?)
}
