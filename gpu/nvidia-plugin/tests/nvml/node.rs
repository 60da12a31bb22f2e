//! A simulated host, and a node with the plugin and a device manager.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use mayfly_api::ObjectKey;
use mayfly_devices::{DeviceConfig, DeviceManager};
use mayfly_gpu_nvidia_plugin::{
    DriverFiles, GpuMeter, GpuSource, InspectionConfig, Libraries, MigStrategy, NvidiaPlugin, PluginConfig,
    RESOURCE_CORE, RESOURCE_MEMORY, SimulatedHost, verify::MemoryTolerance, verify_time::TimeTolerance,
};
use mayfly_gpu_proto::{
    FAKE_NVML_FILE, SHIM_FILE,
    sim::{SimFile, parse_gpus},
};
use mayfly_runtime::{ContainerRole, DeviceClaim, NodeDevices as _, PodDeviceClaims, PodUid};
use tokio_util::sync::CancellationToken;

/// The folder of libraries that cargo built: beside the test's executable, or its parent folder.
fn libraries() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let mut folders = executable.ancestors().skip(1).take(2);
    let found = folders.find(|folder| folder.join(FAKE_NVML_FILE).exists());
    found.unwrap_or_else(|| panic!("cargo did not build {FAKE_NVML_FILE}")).to_owned()
}

pub(crate) struct TestHost {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) host: SimulatedHost,
    pub(crate) source: GpuSource,
    pub(crate) sim: SimFile,
}

pub(crate) fn host(gpus: &str) -> TestHost {
    host_with(gpus, MigStrategy::Mixed)
}

pub(crate) fn host_with(gpus: &str, strategy: MigStrategy) -> TestHost {
    let folder = tempfile::tempdir().unwrap();
    let host = SimulatedHost::create(folder.path(), &libraries(), &parse_gpus(gpus).unwrap()).unwrap();
    let source = host.source(strategy).unwrap();
    let sim = SimFile::open(&host.state()).unwrap();
    TestHost { folder, host, source, sim }
}

/// The memory that each process may use beyond its limit.
pub(crate) const CONTEXT_BYTES: u64 = 1 << 20;

/// The period over which GPU time is averaged.
const TIME_WINDOW: Duration = Duration::from_millis(200);

/// The plugin with a device manager, as the node runs them.
pub(crate) struct GpuNode {
    pub(crate) manager: Arc<DeviceManager>,
    pub(crate) meter: GpuMeter,
    stop: CancellationToken,
    pub(crate) folder: tempfile::TempDir,
}

impl GpuNode {
    pub(crate) fn start(source: GpuSource, host: &SimulatedHost, quarantine: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Stands for the shim that containers would get; no container runs.
        std::fs::write(folder.path().join(SHIM_FILE), "").unwrap();
        let driver = DriverFiles { libraries: Vec::new(), ..host.driver() };
        let manager = DeviceManager::create(DeviceConfig::new(folder.path().join("p"))).unwrap();
        let config = PluginConfig {
            source,
            libraries: Libraries { folder: folder.path().to_owned(), driver },
            limits: folder.path().join("limits"),
            sockets: manager.folder().to_owned(),
            quarantine,
            inspection: InspectionConfig {
                tolerance: MemoryTolerance { context_bytes: CONTEXT_BYTES, readings: 3 },
                time: TimeTolerance { percent: 10, window: TIME_WINDOW },
                // Longer than the pauses of programs that submit work: the driver's figure for one reading is at most 100 %.
                every: Duration::from_millis(20),
                proc: folder.path().join("proc"),
            },
        };
        let plugin = NvidiaPlugin::create(config, manager.allocations()).unwrap();
        let (meter, stop) = (plugin.meter(), CancellationToken::new());
        tokio::spawn(manager.clone().run(stop.clone()));
        tokio::spawn(plugin.run(stop.clone()));
        Self { manager, meter, stop, folder }
    }

    /// Waits until the node has this capacity and this allocatable number of a resource.
    pub(crate) async fn offers(&self, resource: &str, capacity: u64, allocatable: u64) {
        let mut changes = self.manager.changes();
        let reached = async {
            loop {
                let counts = self.manager.counts();
                let of = |counts: &BTreeMap<String, u64>| counts.get(resource).copied();
                if (of(&counts.capacity), of(&counts.allocatable)) == (Some(capacity), Some(allocatable)) {
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(20), reached).await;
        in_time.unwrap_or_else(|_| {
            panic!("not {allocatable} of {capacity} {resource}: {:?}", self.manager.counts())
        });
    }

    /// Whether each GPU is healthy, and its faults.
    pub(crate) fn health(&self) -> Vec<(bool, u64)> {
        self.meter.read().iter().map(|one| (one.gpu.fault.is_none(), one.gpu.faults)).collect()
    }
}

impl Drop for GpuNode {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A pod whose container asks for a share of a GPU, and for 1 GiB of its memory.
pub(crate) fn pod(uid: &str, cores: u32) -> PodDeviceClaims {
    pod_with(uid, &[(RESOURCE_CORE, cores), (RESOURCE_MEMORY, 4)])
}

pub(crate) fn pod_with(uid: &str, resources: &[(&str, u32)]) -> PodDeviceClaims {
    let claim = DeviceClaim {
        container: "c".into(),
        role: ContainerRole::Main,
        resources: resources.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
    };
    PodDeviceClaims {
        uid: PodUid(uid.into()),
        pod: ObjectKey::new("default", uid),
        annotations: BTreeMap::new(),
        claims: vec![claim],
    }
}
