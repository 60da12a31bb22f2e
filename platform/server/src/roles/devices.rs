//! The devices of this node: the manager that plugins register with, and the plugin for simulated GPUs.

use std::{path::Path, sync::Arc};

use anyhow::Context as _;
use mayfly_cli::data_dir::DataDir;
use mayfly_devices::{DeviceConfig, DeviceManager};
use mayfly_gpu_nvidia_plugin::{Gpu, GpuMeter, Libraries, NvidiaPlugin, PluginConfig};
use mayfly_gpu_proto::sim::{FakeGpu, SimFile};
use mayfly_runtime::NodeDevices;
use tokio_util::sync::CancellationToken;

use crate::config::UpConfig;

pub(super) struct Devices {
    manager: Arc<DeviceManager>,
    plugin: Option<NvidiaPlugin>,
}

impl Devices {
    /// The device manager; `None` if the default folder of plugins cannot be used: the path of a data directory may
    /// be too long for a socket.
    pub(super) fn create(config: &UpConfig, data_dir: &DataDir) -> anyhow::Result<Option<Self>> {
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
        let plugin = if config.fake_gpus.is_empty() {
            None
        } else {
            Some(fake_gpus(config, &data_dir.path().join("gpus"), &manager)?)
        };
        Ok(Some(Self { manager, plugin }))
    }

    pub(super) fn of_node(&self) -> Arc<dyn NodeDevices> {
        self.manager.clone()
    }

    /// Reads what the node's GPUs and their users use; `None` without GPUs.
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

/// The plugin for simulated GPUs. Its state outlives a restart: running containers keep using it.
fn fake_gpus(config: &UpConfig, folder: &Path, manager: &DeviceManager) -> anyhow::Result<NvidiaPlugin> {
    let gpus = &config.fake_gpus[..];
    let limits = folder.join("limits");
    std::fs::create_dir_all(&limits).with_context(|| format!("cannot make {}", limits.display()))?;
    let state = folder.join("sim");
    let is_same = |file: &SimFile| {
        file.device_count() == gpus.len()
            && gpus.iter().enumerate().all(|(at, gpu)| file.describe(at) == *gpu)
    };
    if !SimFile::open(&state).is_ok_and(|file| is_same(&file)) {
        SimFile::create(&state, gpus)?;
    }
    let libraries = match &config.gpu_libraries_dir {
        Some(folder) => folder.clone(),
        None => {
            let program = std::env::current_exe().context("cannot find this program's file")?;
            program.parent().unwrap_or(Path::new("/")).to_owned()
        }
    };
    let gpu = |gpu: &FakeGpu| Gpu {
        uuid: gpu.uuid.clone(),
        name: gpu.name.to_owned(),
        memory_bytes: gpu.memory_bytes,
        numa_node: Some(gpu.numa_node.into()),
        healthy: true,
    };
    let config = PluginConfig {
        gpus: gpus.iter().map(gpu).collect(),
        libraries: Libraries { folder: libraries, sim: Some(state) },
        limits,
        sockets: manager.folder().to_owned(),
    };
    NvidiaPlugin::create(config, manager.allocations()).context("cannot bind the sockets of the GPU plugin")
}
