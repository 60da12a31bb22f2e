//! The settings of one node: those that `mayfly up`, `mayfly server` and `mayfly node` share.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::Context as _;
use clap::Args;
use mayfly_api::validation::MEMORY_BYTES_MIN;
use mayfly_gpu_nvidia_plugin::MigStrategy;
use mayfly_gpu_proto::sim::{self, FakeGpu};
use mayfly_runtime_oci::availability::ContainersMode;
use serde::Deserialize;

use super::{
    ConfigFile,
    values::{address, bytes, node_name},
};
use crate::image_config::{ImageOptions, ImageSettings};

/// Default addresses: all loopback.
const HTTP_LISTEN: &str = "127.0.0.1:8080";
/// The example in error messages, since there is no default.
const HTTPS_LISTEN_EXAMPLE: &str = "127.0.0.1:8443";
const ADMIN_LISTEN: &str = "127.0.0.1:9090";
/// Mayfly's own crates (all have this prefix) at info, others at warn. The callers of the Kubernetes client report its
/// errors; it would log each attempt while the server is away.
const LOG_DEFAULT: &str = "warn,mayfly=info,kube_client=off";
const GPU_CONTEXT_MEMORY_DEFAULT: &str = "1Gi";

/// Flags of a node.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct NodeOptions {
    /// The address for functions (HTTP/1.1 and h2c) [default: 127.0.0.1:8080]
    #[arg(long, env = "MAYFLY_HTTP_LISTEN", value_name = "ADDR:PORT")]
    pub(super) http_listen: Option<String>,
    /// The address for functions and Ingresses over TLS, such as 0.0.0.0:8443 [default: none]
    #[arg(long, env = "MAYFLY_HTTPS_LISTEN", value_name = "ADDR:PORT")]
    pub(super) https_listen: Option<String>,
    /// The address of health checks and metrics [default: 127.0.0.1:9090]
    #[arg(long, env = "MAYFLY_ADMIN_LISTEN", value_name = "ADDR:PORT")]
    pub(super) admin_listen: Option<String>,
    /// A TOML file with the same names as these flags, and data-dir (api-listen = "…")
    #[arg(long, env = "MAYFLY_CONFIG", value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// The name of this node [default: the host's name]
    #[arg(long, env = "MAYFLY_NODE_NAME", value_name = "NAME")]
    pub(super) node_name: Option<String>,
    /// Trust the client information in requests for functions (X-Forwarded-For, -Proto, -Host): only behind a proxy
    /// that sets these
    #[arg(
        long,
        env = "MAYFLY_TRUST_FORWARDED",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    pub(super) trust_forwarded: Option<bool>,
    /// Memory for all instances of all functions, such as 4Gi [default: half of this machine's]
    #[arg(long, env = "MAYFLY_FUNCTION_MEMORY", value_name = "QUANTITY")]
    pub(super) function_memory: Option<String>,
    /// How Services are served: loopback needs no root and serves addresses of 127.64.0.0/10 from this process, bridge
    /// uses nftables, auto is loopback until pods have their own addresses [default: auto]
    #[arg(long, env = "MAYFLY_NETWORK", value_name = "MODE", value_enum)]
    pub(super) network: Option<NetworkMode>,
    /// Run pods of ordinary images: where this machine can (auto), always (on: refuse to start without), or off
    /// [default: auto]
    #[arg(long, env = "MAYFLY_CONTAINERS", value_name = "MODE")]
    pub(super) containers: Option<String>,
    #[command(flatten)]
    pub(super) images: ImageOptions,
    /// The number of concurrent function instances [default: one for 8Mi of this machine's memory, at most 2000]
    #[arg(long, env = "MAYFLY_INSTANCES", value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) instances: Option<u32>,
    /// The number of concurrent instances of one function [default: half of all instances]
    #[arg(long, env = "MAYFLY_FUNCTION_INSTANCES", value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) function_instances: Option<u32>,
    /// Offer the NVIDIA GPUs of this machine if its driver is installed (auto), or off [default: auto]
    #[arg(long, env = "MAYFLY_GPUS", value_name = "MODE")]
    pub(super) gpus: Option<GpuMode>,
    /// Simulates GPUs in place of this machine's, such as 4xH200 or 2xL4,1xH100:mig=1g.10gb*7: containers get a CUDA
    /// driver and NVML that behave like those of such GPUs
    #[arg(long, env = "MAYFLY_FAKE_GPUS", value_name = "COUNTxMODEL")]
    pub(super) fake_gpus: Option<String>,
    /// How the instances of GPUs in MIG mode are offered: as nvidia.com/mig-PROFILE (mixed), as nvidia.com/gpu if all of
    /// the node have one profile (single), or none [default: mixed]
    #[arg(long, env = "MAYFLY_MIG_STRATEGY", value_name = "STRATEGY")]
    pub(super) mig_strategy: Option<MigMode>,
    /// The links between the GPUs, as `nvidia-smi topo -m` prints them, for simulated GPUs or instead of those that the
    /// driver reports
    #[arg(long, env = "MAYFLY_GPU_TOPOLOGY", value_name = "FILE")]
    pub(super) gpu_topology: Option<PathBuf>,
    /// GPU memory that each process with a share of a GPU may use beyond its container's limit for its context; a pod
    /// that uses more is evicted [default: 1Gi]
    #[arg(long, env = "MAYFLY_GPU_CONTEXT_MEMORY", value_name = "QUANTITY")]
    pub(super) gpu_context_memory: Option<String>,
    /// Where device plugins register; those made for Kubernetes look in /var/lib/kubelet/device-plugins
    /// [default: device-plugins in the data directory]
    #[arg(long, env = "MAYFLY_DEVICE_PLUGINS_DIR", value_name = "DIR")]
    pub(super) device_plugins_dir: Option<PathBuf>,
    /// The folder of the libraries for containers with GPUs [default: beside this program]
    #[arg(long, env = "MAYFLY_GPU_LIBRARIES_DIR", value_name = "DIR")]
    pub(super) gpu_libraries_dir: Option<PathBuf>,
    /// The folder of FlexVolume drivers, each as VENDOR~DRIVER/DRIVER [default:
    /// /usr/libexec/kubernetes/kubelet-plugins/volume/exec]
    #[arg(long, env = "MAYFLY_VOLUME_PLUGIN_DIR", value_name = "DIR")]
    pub(super) volume_plugin_dir: Option<PathBuf>,
    /// Git protocols for jobs' inputs besides http and https: ssh (with the keys of this user), file (repositories on
    /// this machine)
    #[arg(long, env = "MAYFLY_GIT_PROTOCOLS", value_name = "PROTOCOL", value_delimiter = ',')]
    pub(super) git_protocols: Vec<String>,
    /// The folder in which CSI drivers register and are given paths; those made for Kubernetes expect /var/lib/kubelet
    /// [default: kubelet in the data directory]
    #[arg(long, env = "MAYFLY_KUBELET_DIR", value_name = "DIR")]
    pub(super) kubelet_dir: Option<PathBuf>,
    /// Kernel parameters that pods may set in addition to the safe ones; a name may end with *
    #[arg(long, env = "MAYFLY_ALLOWED_UNSAFE_SYSCTLS", value_name = "NAME", value_delimiter = ',')]
    pub(super) allowed_unsafe_sysctls: Vec<String>,
    /// The log filter, as in `info,mayfly_gateway=debug` [default: info for Mayfly, warn for everything else]
    #[arg(long, env = "MAYFLY_LOG", value_name = "FILTER")]
    pub(super) log: Option<String>,
    /// The format of log lines: text for people, json for machines [default: text on a terminal, else json]
    #[arg(long, env = "MAYFLY_LOG_FORMAT", value_name = "FORMAT", value_enum)]
    pub(super) log_format: Option<LogFormat>,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// The implementation of Services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NetworkMode {
    #[default]
    Auto,
    Loopback,
    Bridge,
}

/// Which GPUs of the machine are offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum GpuMode {
    #[default]
    Auto,
    Off,
}

/// The instances of GPUs in MIG mode that are offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MigMode {
    None,
    Single,
    #[default]
    Mixed,
}

impl From<MigMode> for MigStrategy {
    fn from(mode: MigMode) -> Self {
        match mode {
            MigMode::None => Self::None,
            MigMode::Single => Self::Single,
            MigMode::Mixed => Self::Mixed,
        }
    }
}

/// The parsed settings of a node.
#[derive(Clone, Debug)]
pub(crate) struct NodeConfig {
    pub(crate) http_listen: SocketAddr,
    /// `None`: no TLS listener.
    pub(crate) https_listen: Option<SocketAddr>,
    pub(crate) admin_listen: SocketAddr,
    pub(crate) name: String,
    /// Whether the forwarding headers of a proxy in front are trusted.
    pub(crate) trust_forwarded: bool,
    /// `None`: half of the machine's memory.
    pub(crate) function_memory_bytes: Option<u64>,
    pub(crate) network: NetworkMode,
    pub(crate) containers: ContainersMode,
    pub(crate) images: ImageSettings,
    /// `None`: depends on the machine's memory.
    pub(crate) instances_max: Option<u32>,
    /// `None`: half of all instances.
    pub(crate) function_instances_max: Option<u32>,
    pub(crate) gpus: GpuMode,
    /// Simulated GPUs; may be empty.
    pub(crate) fake_gpus: Vec<FakeGpu>,
    pub(crate) mig_strategy: MigStrategy,
    /// `None`: the links that the driver reports.
    pub(crate) gpu_topology: Option<PathBuf>,
    pub(crate) gpu_context_bytes: u64,
    pub(crate) device_plugins_dir: Option<PathBuf>,
    pub(crate) gpu_libraries_dir: Option<PathBuf>,
    pub(crate) volume_plugin_dir: Option<PathBuf>,
    /// Protocols of Git besides http and https.
    pub(crate) git_protocols: Vec<String>,
    pub(crate) kubelet_dir: Option<PathBuf>,
    pub(crate) allowed_unsafe_sysctls: Vec<String>,
    pub(crate) log: String,
    pub(crate) log_format: LogFormat,
}

impl NodeOptions {
    /// Resolves flags, environment and the node's settings of a config file, which are taken out of it.
    ///
    /// # Errors
    /// A value that cannot be understood; the message names the flag.
    pub(super) fn resolve(
        self,
        file: &mut ConfigFile,
        containers_default: ContainersMode,
    ) -> anyhow::Result<NodeConfig> {
        let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
        let format_default = if is_terminal { LogFormat::Text } else { LogFormat::Json };
        Ok(NodeConfig {
            http_listen: address(self.http_listen, file.http_listen.take(), HTTP_LISTEN, "http-listen")?,
            https_listen: match self.https_listen.or(file.https_listen.take()) {
                Some(text) => Some(address(Some(text), None, HTTPS_LISTEN_EXAMPLE, "https-listen")?),
                None => None,
            },
            admin_listen: address(self.admin_listen, file.admin_listen.take(), ADMIN_LISTEN, "admin-listen")?,
            name: node_name(self.node_name.or(file.node_name.take()))?,
            trust_forwarded: self.trust_forwarded.or(file.trust_forwarded).unwrap_or(false),
            function_memory_bytes: self
                .function_memory
                .or(file.function_memory.take())
                .map(|text| {
                    let why = "not even one page of 64Ki has room; write a size such as 4Gi";
                    bytes("function-memory", &text, (MEMORY_BYTES_MIN, why))
                })
                .transpose()?,
            network: self.network.or(file.network).unwrap_or_default(),
            containers: self
                .containers
                .or(file.containers.take())
                .map(|text| text.parse().map_err(|why: String| anyhow::anyhow!("--containers: {why}")))
                .transpose()?
                .unwrap_or(containers_default),
            images: self.images.resolve(std::mem::take(&mut file.images))?,
            instances_max: self.instances.or(file.instances),
            function_instances_max: self.function_instances.or(file.function_instances),
            gpus: self.gpus.or(file.gpus).unwrap_or_default(),
            fake_gpus: self
                .fake_gpus
                .or(file.fake_gpus.take())
                .map(|spec| sim::parse_gpus(&spec).context("--fake-gpus"))
                .transpose()?
                .unwrap_or_default(),
            mig_strategy: self.mig_strategy.or(file.mig_strategy).unwrap_or_default().into(),
            gpu_topology: self.gpu_topology.or(file.gpu_topology.take()),
            gpu_context_bytes: bytes(
                "gpu-context-memory",
                &self
                    .gpu_context_memory
                    .or(file.gpu_context_memory.take())
                    .unwrap_or_else(|| GPU_CONTEXT_MEMORY_DEFAULT.into()),
                (1 << 20, "every context needs more; write a size such as 1Gi"),
            )?,
            device_plugins_dir: self.device_plugins_dir.or(file.device_plugins_dir.take()),
            gpu_libraries_dir: self.gpu_libraries_dir.or(file.gpu_libraries_dir.take()),
            volume_plugin_dir: self.volume_plugin_dir.or(file.volume_plugin_dir.take()),
            git_protocols: match self.git_protocols.is_empty() {
                true => file.git_protocols.take().unwrap_or_default(),
                false => self.git_protocols,
            },
            kubelet_dir: self.kubelet_dir.or(file.kubelet_dir.take()),
            allowed_unsafe_sysctls: match self.allowed_unsafe_sysctls.is_empty() {
                true => file.allowed_unsafe_sysctls.take().unwrap_or_default(),
                false => self.allowed_unsafe_sysctls,
            },
            log: self.log.or(file.log.take()).unwrap_or_else(|| LOG_DEFAULT.into()),
            log_format: self.log_format.or(file.log_format).unwrap_or(format_default),
        })
    }
}

impl NodeConfig {
    /// A warning about a permitted but unlikely setting, logged at the start.
    pub(crate) fn warning(&self) -> Option<String> {
        let system = rustix::system::sysinfo();
        let machine_bytes = system.totalram.saturating_mul(u64::from(system.mem_unit));
        let asked_bytes = self.function_memory_bytes.filter(|bytes| *bytes > machine_bytes)?;
        Some(format!(
            "--function-memory allows {} MiB, more than the {} MiB that this machine has: the system may end Mayfly \
             when functions use them",
            asked_bytes >> 20,
            machine_bytes >> 20
        ))
    }
}
