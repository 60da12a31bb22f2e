//! The settings of an operator, in order of precedence: a flag, `MAYFLY_*` in the environment, the config file, the
//! default. No other module reads settings from the environment, except for the credentials of requests to AWS services
//! ([`crate::aws_credentials`]).

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use ipnet::Ipv4Net;
use mayfly_api::validation::MEMORY_BYTES_MIN;
use mayfly_gpu_nvidia_plugin::MigStrategy;
use mayfly_gpu_proto::sim::{self, FakeGpu};
use mayfly_runtime_oci::availability::ContainersMode;
use mayfly_workflows_engine::engine::AwsEndpoints;
use serde::Deserialize;

use crate::{
    image_config::{ImageFile, ImageOptions, ImageSettings},
    slurm_config::{SlurmFile, SlurmOptions, SlurmSettings},
};

mod values;

pub(crate) use values::time_span;
use values::{bytes, endpoints, node_name, parse_address, retention, simulated_nodes};

/// Default addresses: all loopback.
const API_LISTEN: &str = "127.0.0.1:6443";
const HTTP_LISTEN: &str = "127.0.0.1:8080";
/// The example in error messages, since there is no default.
const HTTPS_LISTEN_EXAMPLE: &str = "127.0.0.1:8443";
const WORKFLOWS_LISTEN: &str = "127.0.0.1:8083";
const ADMIN_LISTEN: &str = "127.0.0.1:9090";

/// Flags of `mayfly up`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct UpArgs {
    /// The address of the Kubernetes API (HTTPS) [default: 127.0.0.1:6443]
    #[arg(long, env = "MAYFLY_API_LISTEN", value_name = "ADDR:PORT")]
    api_listen: Option<String>,
    /// The address for functions (HTTP/1.1 and h2c) [default: 127.0.0.1:8080]
    #[arg(long, env = "MAYFLY_HTTP_LISTEN", value_name = "ADDR:PORT")]
    http_listen: Option<String>,
    /// The address for functions and Ingresses over TLS, such as 0.0.0.0:8443 [default: none]
    #[arg(long, env = "MAYFLY_HTTPS_LISTEN", value_name = "ADDR:PORT")]
    https_listen: Option<String>,
    /// The address of the Step Functions API [default: 127.0.0.1:8083]
    #[arg(long, env = "MAYFLY_WORKFLOWS_LISTEN", value_name = "ADDR:PORT")]
    workflows_listen: Option<String>,
    /// The address of health checks and metrics [default: 127.0.0.1:9090]
    #[arg(long, env = "MAYFLY_ADMIN_LISTEN", value_name = "ADDR:PORT")]
    admin_listen: Option<String>,
    /// A TOML file with the same names as these flags, and data-dir (api-listen = "…")
    #[arg(long, env = "MAYFLY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The name of this node [default: the host's name]
    #[arg(long, env = "MAYFLY_NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// How long ended executions of workflows are kept, such as 90d or 36h [default: 90d]
    #[arg(long, env = "MAYFLY_WORKFLOW_RETENTION", value_name = "TIME")]
    workflow_retention: Option<String>,
    /// Fail an execution whose history reaches this many events; AWS does so at 25000 [default: no limit]
    #[arg(long, env = "MAYFLY_WORKFLOW_HISTORY_EVENTS", value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    workflow_history_events: Option<u64>,
    /// Sends the tasks of an AWS service to this URL, such as sqs=http://127.0.0.1:9324; may be given several
    /// times. lambda=URL is called for functions that are not deployed here; s3=URL replaces the local buckets
    #[arg(long, env = "MAYFLY_TASK_ENDPOINT", value_name = "SERVICE=URL", value_delimiter = ',')]
    task_endpoint: Vec<String>,
    /// Signs requests to these endpoints [default: AWS_ACCESS_KEY_ID and the like, or ~/.aws/credentials]
    #[arg(long, env = "MAYFLY_TASK_ACCESS_KEY_ID", value_name = "ID")]
    task_access_key_id: Option<String>,
    /// The secret key: better in the environment or the config file, since process lists show flags
    #[arg(long, env = "MAYFLY_TASK_SECRET_ACCESS_KEY", value_name = "KEY", hide_env_values = true)]
    task_secret_access_key: Option<String>,
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
    trust_forwarded: Option<bool>,
    /// The largest component that may be uploaded, such as 64Mi [default: 64Mi]
    #[arg(long, env = "MAYFLY_ARTIFACT_LIMIT", value_name = "QUANTITY")]
    artifact_limit: Option<String>,
    /// Memory for all instances of all functions, such as 4Gi [default: half of this machine's]
    #[arg(long, env = "MAYFLY_FUNCTION_MEMORY", value_name = "QUANTITY")]
    function_memory: Option<String>,
    /// How Services are served: loopback needs no root and serves addresses of 127.64.0.0/10 from this process, bridge
    /// uses nftables, auto is loopback until pods have their own addresses [default: auto]
    #[arg(long, env = "MAYFLY_NETWORK", value_name = "MODE", value_enum)]
    network: Option<NetworkMode>,
    /// Give Services and pods of containers IPv6 addresses in addition to IPv4; needs root, nft and a kernel with IPv6
    #[arg(long, env = "MAYFLY_DUAL_STACK")]
    dual_stack: bool,
    /// Addresses for Services of the type LoadBalancer, such as 192.0.2.0/24 [default: none are allocated]
    #[arg(long, env = "MAYFLY_LOAD_BALANCER_POOL", value_name = "CIDR")]
    load_balancer_pool: Option<String>,
    /// Run pods of ordinary images: where this machine can (auto), always (on: refuse to start without), or off
    /// [default: auto]
    #[arg(long, env = "MAYFLY_CONTAINERS", value_name = "MODE")]
    containers: Option<String>,
    #[command(flatten)]
    images: ImageOptions,
    #[command(flatten)]
    slurm: SlurmOptions,
    /// The number of concurrent function instances [default: one for 8Mi of this machine's memory, at most 2000]
    #[arg(long, env = "MAYFLY_INSTANCES", value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    instances: Option<u32>,
    /// The number of concurrent instances of one function [default: half of all instances]
    #[arg(long, env = "MAYFLY_FUNCTION_INSTANCES", value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    function_instances: Option<u32>,
    /// Offer the NVIDIA GPUs of this machine if its driver is installed (auto), or off [default: auto]
    #[arg(long, env = "MAYFLY_GPUS", value_name = "MODE")]
    gpus: Option<GpuMode>,
    /// Simulates GPUs in place of this machine's, such as 4xH200 or 2xL4,1xH100:mig=1g.10gb*7: containers get a CUDA
    /// driver and NVML that behave like those of such GPUs
    #[arg(long, env = "MAYFLY_FAKE_GPUS", value_name = "COUNTxMODEL")]
    fake_gpus: Option<String>,
    /// How the instances of GPUs in MIG mode are offered: as nvidia.com/mig-PROFILE (mixed), as nvidia.com/gpu if all of
    /// the node have one profile (single), or none [default: mixed]
    #[arg(long, env = "MAYFLY_MIG_STRATEGY", value_name = "STRATEGY")]
    mig_strategy: Option<MigMode>,
    /// The links between the GPUs, as `nvidia-smi topo -m` prints them, for simulated GPUs or instead of those that the
    /// driver reports
    #[arg(long, env = "MAYFLY_GPU_TOPOLOGY", value_name = "FILE")]
    gpu_topology: Option<PathBuf>,
    /// GPU memory that each process with a share of a GPU may use beyond its container's limit for its context; a pod
    /// that uses more is evicted [default: 1Gi]
    #[arg(long, env = "MAYFLY_GPU_CONTEXT_MEMORY", value_name = "QUANTITY")]
    gpu_context_memory: Option<String>,
    /// Simulates nodes, such as 100 or 100:32:256Gi:110 (cores, memory and pods of each): pods of images that land on
    /// them run nothing and live as their annotations say. Containers are off then, unless --containers is given
    #[arg(long, env = "MAYFLY_SIMULATED_NODES", value_name = "COUNT[:CPU[:MEMORY[:PODS]]]")]
    simulated_nodes: Option<String>,
    /// Where device plugins register; those made for Kubernetes look in /var/lib/kubelet/device-plugins
    /// [default: device-plugins in the data directory]
    #[arg(long, env = "MAYFLY_DEVICE_PLUGINS_DIR", value_name = "DIR")]
    device_plugins_dir: Option<PathBuf>,
    /// The folder of the libraries for containers with GPUs [default: beside this program]
    #[arg(long, env = "MAYFLY_GPU_LIBRARIES_DIR", value_name = "DIR")]
    gpu_libraries_dir: Option<PathBuf>,
    /// The folder of FlexVolume drivers, each as VENDOR~DRIVER/DRIVER [default:
    /// /usr/libexec/kubernetes/kubelet-plugins/volume/exec]
    #[arg(long, env = "MAYFLY_VOLUME_PLUGIN_DIR", value_name = "DIR")]
    volume_plugin_dir: Option<PathBuf>,
    /// Git protocols for jobs' inputs besides http and https: ssh (with the keys of this user), file (repositories on
    /// this machine)
    #[arg(long, env = "MAYFLY_GIT_PROTOCOLS", value_name = "PROTOCOL", value_delimiter = ',')]
    git_protocols: Vec<String>,
    /// The folder in which CSI drivers register and are given paths; those made for Kubernetes expect /var/lib/kubelet
    /// [default: kubelet in the data directory]
    #[arg(long, env = "MAYFLY_KUBELET_DIR", value_name = "DIR")]
    kubelet_dir: Option<PathBuf>,
    /// Kernel parameters that pods may set in addition to the safe ones; a name may end with *
    #[arg(long, env = "MAYFLY_ALLOWED_UNSAFE_SYSCTLS", value_name = "NAME", value_delimiter = ',')]
    allowed_unsafe_sysctls: Vec<String>,
    /// The policy of the API's audit log, a Policy of audit.k8s.io/v1 [default: no audit log]
    #[arg(long, env = "MAYFLY_AUDIT_POLICY_FILE", value_name = "FILE")]
    audit_policy_file: Option<PathBuf>,
    /// The file of the audit log [default: audit.log in the data directory]
    #[arg(long, env = "MAYFLY_AUDIT_LOG_PATH", value_name = "FILE")]
    audit_log_path: Option<PathBuf>,
    /// The log filter, as in `info,mayfly_gateway=debug` [default: info for Mayfly, warn for everything else]
    #[arg(long, env = "MAYFLY_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// The format of log lines: text for people, json for machines [default: text on a terminal, else json]
    #[arg(long, env = "MAYFLY_LOG_FORMAT", value_name = "FORMAT", value_enum)]
    log_format: Option<LogFormat>,
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

/// The config file: the same names as the flags.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct ConfigFile {
    data_dir: Option<PathBuf>,
    api_listen: Option<String>,
    http_listen: Option<String>,
    https_listen: Option<String>,
    workflows_listen: Option<String>,
    admin_listen: Option<String>,
    node_name: Option<String>,
    workflow_retention: Option<String>,
    workflow_history_events: Option<u64>,
    task_endpoint: BTreeMap<String, String>,
    task_access_key_id: Option<String>,
    task_secret_access_key: Option<String>,
    trust_forwarded: Option<bool>,
    artifact_limit: Option<String>,
    function_memory: Option<String>,
    network: Option<NetworkMode>,
    dual_stack: Option<bool>,
    load_balancer_pool: Option<String>,
    containers: Option<String>,
    images: ImageFile,
    slurm: SlurmFile,
    instances: Option<u32>,
    function_instances: Option<u32>,
    gpus: Option<GpuMode>,
    fake_gpus: Option<String>,
    mig_strategy: Option<MigMode>,
    gpu_topology: Option<PathBuf>,
    gpu_context_memory: Option<String>,
    simulated_nodes: Option<String>,
    device_plugins_dir: Option<PathBuf>,
    gpu_libraries_dir: Option<PathBuf>,
    volume_plugin_dir: Option<PathBuf>,
    git_protocols: Option<Vec<String>>,
    kubelet_dir: Option<PathBuf>,
    allowed_unsafe_sysctls: Option<Vec<String>>,
    audit_policy_file: Option<PathBuf>,
    audit_log_path: Option<PathBuf>,
    log: Option<String>,
    log_format: Option<LogFormat>,
}

/// The parsed settings of `mayfly up`.
#[derive(Clone, Debug)]
pub(crate) struct UpConfig {
    /// The value of the config file; a flag and the environment have precedence.
    pub(crate) data_dir: Option<PathBuf>,
    pub(crate) api_listen: SocketAddr,
    pub(crate) http_listen: SocketAddr,
    /// `None`: no TLS listener.
    pub(crate) https_listen: Option<SocketAddr>,
    pub(crate) workflows_listen: SocketAddr,
    pub(crate) admin_listen: SocketAddr,
    pub(crate) node_name: String,
    /// The time for which ended executions are kept.
    pub(crate) workflow_retention: Duration,
    /// The largest number of events of one execution; `None`: no limit.
    pub(crate) workflow_history_events: Option<u64>,
    pub(crate) task_endpoints: AwsEndpoints,
    /// Whether the forwarding headers of a proxy in front are trusted.
    pub(crate) trust_forwarded: bool,
    pub(crate) artifact_bytes_max: u64,
    /// `None`: half of the machine's memory.
    pub(crate) function_memory_bytes: Option<u64>,
    pub(crate) network: NetworkMode,
    /// Whether Services and pods of containers also have IPv6 addresses.
    pub(crate) dual_stack: bool,
    /// `None`: load balancers get no addresses.
    pub(crate) load_balancer_pool: Option<Ipv4Net>,
    pub(crate) containers: ContainersMode,
    pub(crate) images: ImageSettings,
    /// `None`: no Slurm cluster is used.
    pub(crate) slurm: Option<SlurmSettings>,
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
    /// `None`: this machine is the only node.
    pub(crate) simulated_nodes: Option<mayfly_simulated::Config>,
    pub(crate) device_plugins_dir: Option<PathBuf>,
    pub(crate) gpu_libraries_dir: Option<PathBuf>,
    pub(crate) volume_plugin_dir: Option<PathBuf>,
    /// Protocols of Git besides http and https.
    pub(crate) git_protocols: Vec<String>,
    pub(crate) kubelet_dir: Option<PathBuf>,
    pub(crate) allowed_unsafe_sysctls: Vec<String>,
    /// The policy of the audit log; `None`: no audit log.
    pub(crate) audit_policy_file: Option<PathBuf>,
    pub(crate) audit_log_path: Option<PathBuf>,
    pub(crate) log: String,
    pub(crate) log_format: LogFormat,
}

/// Mayfly's own crates (all have this prefix) at info, others at warn.
const LOG_DEFAULT: &str = "warn,mayfly=info";
/// The retention period of AWS.
const RETENTION_DEFAULT: &str = "90d";
const ARTIFACT_LIMIT_DEFAULT: &str = "64Mi";
const GPU_CONTEXT_MEMORY_DEFAULT: &str = "1Gi";

impl UpArgs {
    /// Resolves flags, environment and config file.
    pub(crate) fn resolve(self) -> anyhow::Result<UpConfig> {
        let file = match &self.config {
            Some(path) => ConfigFile::read(path)?,
            None => ConfigFile::default(),
        };
        let address = |flag: Option<String>, file: Option<String>, default: &str, name: &str| {
            let text = flag.or(file).unwrap_or_else(|| default.to_owned());
            parse_address(&text).with_context(|| {
                let variable = name.replace('-', "_").to_uppercase();
                format!(
                    "--{name} {text} (or MAYFLY_{variable}, or {name} in the config file): expected an address and \
                     a port, such as {default}"
                )
            })
        };
        let environment: &dyn Fn(&str) -> Option<String> =
            &|name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let simulated_nodes = self.simulated_nodes.or(file.simulated_nodes);
        let simulated_nodes = simulated_nodes.map(|text| self::simulated_nodes(&text)).transpose()?;
        let containers_default = match simulated_nodes {
            Some(_) => ContainersMode::Off,
            None => ContainersMode::default(),
        };
        let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
        let format_default = if is_terminal { LogFormat::Text } else { LogFormat::Json };
        Ok(UpConfig {
            data_dir: file.data_dir,
            api_listen: address(self.api_listen, file.api_listen, API_LISTEN, "api-listen")?,
            http_listen: address(self.http_listen, file.http_listen, HTTP_LISTEN, "http-listen")?,
            https_listen: match self.https_listen.or(file.https_listen) {
                Some(text) => Some(address(Some(text), None, HTTPS_LISTEN_EXAMPLE, "https-listen")?),
                None => None,
            },
            workflows_listen: address(
                self.workflows_listen,
                file.workflows_listen,
                WORKFLOWS_LISTEN,
                "workflows-listen",
            )?,
            admin_listen: address(self.admin_listen, file.admin_listen, ADMIN_LISTEN, "admin-listen")?,
            node_name: node_name(self.node_name.or(file.node_name))?,
            workflow_history_events: self.workflow_history_events.or(file.workflow_history_events),
            workflow_retention: retention(
                &self
                    .workflow_retention
                    .or(file.workflow_retention)
                    .unwrap_or_else(|| RETENTION_DEFAULT.into()),
            )?,
            task_endpoints: endpoints(
                file.task_endpoint,
                &self.task_endpoint,
                self.task_access_key_id.or(file.task_access_key_id),
                self.task_secret_access_key.or(file.task_secret_access_key),
                environment,
            )?,
            trust_forwarded: self.trust_forwarded.or(file.trust_forwarded).unwrap_or(false),
            artifact_bytes_max: bytes(
                "artifact-limit",
                &self.artifact_limit.or(file.artifact_limit).unwrap_or_else(|| ARTIFACT_LIMIT_DEFAULT.into()),
                (1, "nothing could be uploaded; write a size such as 64Mi"),
            )?,
            function_memory_bytes: self
                .function_memory
                .or(file.function_memory)
                .map(|text| {
                    let why = "not even one page of 64Ki has room; write a size such as 4Gi";
                    bytes("function-memory", &text, (MEMORY_BYTES_MIN, why))
                })
                .transpose()?,
            network: self.network.or(file.network).unwrap_or_default(),
            dual_stack: self.dual_stack || file.dual_stack.unwrap_or_default(),
            load_balancer_pool: self
                .load_balancer_pool
                .or(file.load_balancer_pool)
                .map(|text| {
                    let unclear = || {
                        format!("--load-balancer-pool {text}: expected IPv4 addresses, such as 192.0.2.0/24")
                    };
                    text.parse::<Ipv4Net>().map(|pool| pool.trunc()).with_context(unclear)
                })
                .transpose()?,
            containers: self
                .containers
                .or(file.containers)
                .map(|text| text.parse().map_err(|why: String| anyhow::anyhow!("--containers: {why}")))
                .transpose()?
                .unwrap_or(containers_default),
            images: self.images.resolve(file.images)?,
            slurm: self.slurm.resolve(file.slurm, environment)?,
            instances_max: self.instances.or(file.instances),
            function_instances_max: self.function_instances.or(file.function_instances),
            gpus: self.gpus.or(file.gpus).unwrap_or_default(),
            fake_gpus: self
                .fake_gpus
                .or(file.fake_gpus)
                .map(|spec| sim::parse_gpus(&spec).context("--fake-gpus"))
                .transpose()?
                .unwrap_or_default(),
            mig_strategy: self.mig_strategy.or(file.mig_strategy).unwrap_or_default().into(),
            gpu_topology: self.gpu_topology.or(file.gpu_topology),
            gpu_context_bytes: bytes(
                "gpu-context-memory",
                &self
                    .gpu_context_memory
                    .or(file.gpu_context_memory)
                    .unwrap_or_else(|| GPU_CONTEXT_MEMORY_DEFAULT.into()),
                (1 << 20, "every context needs more; write a size such as 1Gi"),
            )?,
            simulated_nodes,
            device_plugins_dir: self.device_plugins_dir.or(file.device_plugins_dir),
            gpu_libraries_dir: self.gpu_libraries_dir.or(file.gpu_libraries_dir),
            volume_plugin_dir: self.volume_plugin_dir.or(file.volume_plugin_dir),
            git_protocols: match self.git_protocols.is_empty() {
                true => file.git_protocols.unwrap_or_default(),
                false => self.git_protocols,
            },
            kubelet_dir: self.kubelet_dir.or(file.kubelet_dir),
            allowed_unsafe_sysctls: match self.allowed_unsafe_sysctls.is_empty() {
                true => file.allowed_unsafe_sysctls.unwrap_or_default(),
                false => self.allowed_unsafe_sysctls,
            },
            audit_policy_file: self.audit_policy_file.or(file.audit_policy_file),
            audit_log_path: self.audit_log_path.or(file.audit_log_path),
            log: self.log.or(file.log).unwrap_or_else(|| LOG_DEFAULT.into()),
            log_format: self.log_format.or(file.log_format).unwrap_or(format_default),
        })
    }
}

impl UpConfig {
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

impl ConfigFile {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read config file {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("cannot understand config file {}", path.display()))
    }
}

#[cfg(test)]
mod tests;
