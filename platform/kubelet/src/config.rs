//! The settings of a node.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    sync::Arc,
};

use mayfly_runtime::{NodeDevices, NodeGpus, logs::LogLayout};
use tokio::sync::watch;

use crate::{
    image_collection::ImageCollection,
    job::JobFiles,
    pod::{dns::ClusterDnsServer, withdrawal::ServedEndpoints},
    volumes::csi::CsiConfig,
};

/// The settings of a node.
#[derive(Clone, Debug)]
pub struct Config {
    pub node_name: String,
    /// The node's own address, under which other nodes reach it: its `InternalIP`, and the `hostIP` of its pods. The
    /// containerd host gives the same address to pods on the host's network.
    pub address: IpAddr,
    /// The port at `address` where the HTTP API ([`crate::Kubelet::router`]) is served to the API server. `None`: the API
    /// server is in the same process.
    pub agent_port: Option<u16>,
    /// Allocatable CPU for pods, in thousandths of a core.
    pub cpu_millis: u64,
    /// Allocatable memory for pods, in bytes.
    pub memory_bytes: u64,
    /// The largest number of pods. Wasm pods are cheap, so it is above upstream's 110.
    pub pods_max: u32,
    pub logs: LogLayout,
    /// Shown as the node's kubelet version.
    pub version: String,
    /// The number of pods that are reconciled at the same time.
    pub workers_max: usize,
    /// The folders of jobs' inputs and outputs; `None`: this node does not run jobs with inputs or outputs.
    pub jobs: Option<JobFiles>,
    /// The folder of image archives during their import.
    pub upload_folder: PathBuf,
    /// The folder of the pods' volumes; `None`: this node runs no pods with volumes.
    pub volumes: Option<PathBuf>,
    /// The folder of FlexVolume drivers.
    pub volume_plugins: PathBuf,
    /// CSI drivers; `None`: this node has none.
    pub csi: Option<CsiConfig>,
    /// The policy for removing unused images.
    pub image_collection: ImageCollection,
    /// The folder of the manifests of static pods; `None`: no static pods.
    pub static_pods: Option<PathBuf>,
    /// Labels of the node in addition to the standard ones; `None` removes a label.
    pub labels: BTreeMap<String, Option<String>>,
    /// The node's labels with one of these prefixes are removed unless they are among `labels`.
    pub label_prefixes: Vec<String>,
    /// Annotations of the node, which may change while it runs; `None` removes one.
    pub annotations: watch::Receiver<BTreeMap<String, Option<String>>>,
    /// Devices from plugins; `None`: pods that request devices wait.
    pub devices: Option<Arc<dyn NodeDevices>>,
    /// The usage of GPUs; `None`: this node has none.
    pub gpus: Option<Arc<dyn NodeGpus>>,
    /// The name server of pods with the DNS policy `ClusterFirst`; `None`: they use the host's.
    pub cluster_dns: Option<ClusterDnsServer>,
    /// The endpoints of the node's proxy; `None`: deleted pods end without waiting for it.
    pub served_endpoints: Option<Arc<dyn ServedEndpoints>>,
    /// The kernel parameters that pods may set in addition to the safe ones: names, and prefixes that end with `*`
    /// (upstream's `allowedUnsafeSysctls`).
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Whether pods use this machine's resources, so that they are evicted when its memory or disk is short. False on a
    /// node that represents machines of another system.
    pub evicts: bool,
}

impl Config {
    /// The folder into which installers of FlexVolume drivers put them (upstream's default).
    pub const VOLUME_PLUGINS_DEFAULT: &str = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec";
    pub const PODS_MAX_DEFAULT: u32 = 10_000;
    /// As many as pods: a pod that is being stopped occupies its worker for its grace period.
    pub const WORKERS_MAX_DEFAULT: usize = 10_000;

    /// The settings for this machine's cores and memory, with defaults for the rest.
    pub fn of_this_machine(
        node_name: impl Into<String>,
        logs: LogLayout,
        version: impl Into<String>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let system = rustix::system::sysinfo();
        let memory_bytes = system.totalram.saturating_mul(u64::from(system.mem_unit));
        Self {
            node_name: node_name.into(),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            agent_port: None,
            cpu_millis: cores * 1000,
            memory_bytes,
            pods_max: Self::PODS_MAX_DEFAULT,
            logs,
            version: version.into(),
            workers_max: Self::WORKERS_MAX_DEFAULT,
            jobs: None,
            upload_folder: std::env::temp_dir(),
            volumes: None,
            volume_plugins: Self::VOLUME_PLUGINS_DEFAULT.into(),
            csi: None,
            image_collection: ImageCollection::default(),
            static_pods: None,
            labels: BTreeMap::new(),
            label_prefixes: Vec::new(),
            annotations: watch::channel(BTreeMap::new()).1,
            devices: None,
            gpus: None,
            cluster_dns: None,
            served_endpoints: None,
            allowed_unsafe_sysctls: Vec::new(),
            evicts: true,
        }
    }
}
