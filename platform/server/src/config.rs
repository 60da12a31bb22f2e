//! The settings of an operator, in order of precedence: a flag, `MAYFLY_*` in the environment, the config file, the
//! default. No other module reads settings from the environment, except for the credentials of requests to AWS services
//! ([`crate::aws_credentials`]).

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use ipnet::Ipv4Net;
use mayfly_runtime_oci::availability::ContainersMode;
use mayfly_workflows_engine::engine::AwsEndpoints;
use serde::Deserialize;

use crate::{
    image_config::ImageFile,
    slurm_config::{SlurmFile, SlurmOptions, SlurmSettings},
};

mod machine;
mod node;
mod values;

pub(crate) use machine::{JoinArgs, JoinSettings, MachineConfig, ServerArgs};
pub(crate) use node::{GpuMode, LogFormat, NetworkMode, NodeConfig};
use node::{MigMode, NodeOptions};
pub(crate) use values::time_span;
use values::{address, bytes, endpoints, retention, simulated_nodes};

/// Default addresses: all loopback.
const API_LISTEN: &str = "127.0.0.1:6443";
const WORKFLOWS_LISTEN: &str = "127.0.0.1:8083";

/// Flags of `mayfly up`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct UpArgs {
    /// The address of the Kubernetes API (HTTPS) [default: 127.0.0.1:6443, of mayfly server 0.0.0.0:6443]
    #[arg(long, env = "MAYFLY_API_LISTEN", value_name = "ADDR:PORT")]
    api_listen: Option<String>,
    /// The address of the Step Functions API [default: 127.0.0.1:8083]
    #[arg(long, env = "MAYFLY_WORKFLOWS_LISTEN", value_name = "ADDR:PORT")]
    workflows_listen: Option<String>,
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
    /// The largest component that may be uploaded, such as 64Mi [default: 64Mi]
    #[arg(long, env = "MAYFLY_ARTIFACT_LIMIT", value_name = "QUANTITY")]
    artifact_limit: Option<String>,
    /// Give Services and pods of containers IPv6 addresses in addition to IPv4; needs root, nft and a kernel with IPv6
    #[arg(long, env = "MAYFLY_DUAL_STACK")]
    dual_stack: bool,
    /// Addresses for Services of the type LoadBalancer, such as 192.0.2.0/24 [default: none are allocated]
    #[arg(long, env = "MAYFLY_LOAD_BALANCER_POOL", value_name = "CIDR")]
    load_balancer_pool: Option<String>,
    #[command(flatten)]
    slurm: SlurmOptions,
    /// Simulates nodes, such as 100 or 100:32:256Gi:110 (cores, memory and pods of each): pods of images that land on
    /// them run nothing and live as their annotations say. Containers are off then, unless --containers is given
    #[arg(long, env = "MAYFLY_SIMULATED_NODES", value_name = "COUNT[:CPU[:MEMORY[:PODS]]]")]
    simulated_nodes: Option<String>,
    /// The policy of the API's audit log, a Policy of audit.k8s.io/v1 [default: no audit log]
    #[arg(long, env = "MAYFLY_AUDIT_POLICY_FILE", value_name = "FILE")]
    audit_policy_file: Option<PathBuf>,
    /// The file of the audit log [default: audit.log in the data directory]
    #[arg(long, env = "MAYFLY_AUDIT_LOG_PATH", value_name = "FILE")]
    audit_log_path: Option<PathBuf>,
    #[command(flatten)]
    node: NodeOptions,
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
    node_ip: Option<IpAddr>,
    agent_listen: Option<String>,
    server: Option<String>,
    token: Option<String>,
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
    pub(crate) workflows_listen: SocketAddr,
    /// The time for which ended executions are kept.
    pub(crate) workflow_retention: Duration,
    /// The largest number of events of one execution; `None`: no limit.
    pub(crate) workflow_history_events: Option<u64>,
    pub(crate) task_endpoints: AwsEndpoints,
    pub(crate) artifact_bytes_max: u64,
    /// Whether Services and pods of containers also have IPv6 addresses.
    pub(crate) dual_stack: bool,
    /// `None`: load balancers get no addresses.
    pub(crate) load_balancer_pool: Option<Ipv4Net>,
    /// `None`: no Slurm cluster is used.
    pub(crate) slurm: Option<SlurmSettings>,
    /// `None`: this machine is the only node.
    pub(crate) simulated_nodes: Option<mayfly_simulated::Config>,
    /// The policy of the audit log; `None`: no audit log.
    pub(crate) audit_policy_file: Option<PathBuf>,
    pub(crate) audit_log_path: Option<PathBuf>,
    pub(crate) node: NodeConfig,
    /// How other machines of the cluster reach this one; `None`: no machine can join.
    pub(crate) machine: Option<MachineConfig>,
}

/// The retention period of AWS.
const RETENTION_DEFAULT: &str = "90d";
const ARTIFACT_LIMIT_DEFAULT: &str = "64Mi";

impl UpArgs {
    /// Resolves flags, environment and config file.
    pub(crate) fn resolve(self) -> anyhow::Result<UpConfig> {
        let file = self.read_file()?;
        self.resolve_with(file, API_LISTEN)
    }

    /// The config file that the flags name; an empty one without.
    fn read_file(&self) -> anyhow::Result<ConfigFile> {
        ConfigFile::read_if(self.node.config.as_deref())
    }

    /// Resolves flags, environment and a config file with a default address of the API.
    fn resolve_with(self, mut file: ConfigFile, api_listen: &str) -> anyhow::Result<UpConfig> {
        let environment: &dyn Fn(&str) -> Option<String> =
            &|name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let simulated_nodes = self.simulated_nodes.or(file.simulated_nodes.take());
        let simulated_nodes = simulated_nodes.map(|text| self::simulated_nodes(&text)).transpose()?;
        let containers_default = match simulated_nodes {
            Some(_) => ContainersMode::Off,
            None => ContainersMode::default(),
        };
        let node = self.node.resolve(&mut file, containers_default)?;
        Ok(UpConfig {
            data_dir: file.data_dir,
            api_listen: address(self.api_listen, file.api_listen, api_listen, "api-listen")?,
            workflows_listen: address(
                self.workflows_listen,
                file.workflows_listen,
                WORKFLOWS_LISTEN,
                "workflows-listen",
            )?,
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
            artifact_bytes_max: bytes(
                "artifact-limit",
                &self.artifact_limit.or(file.artifact_limit).unwrap_or_else(|| ARTIFACT_LIMIT_DEFAULT.into()),
                (1, "nothing could be uploaded; write a size such as 64Mi"),
            )?,
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
            slurm: self.slurm.resolve(file.slurm, environment)?,
            simulated_nodes,
            audit_policy_file: self.audit_policy_file.or(file.audit_policy_file),
            audit_log_path: self.audit_log_path.or(file.audit_log_path),
            node,
            machine: None,
        })
    }
}

impl ConfigFile {
    /// The given file; an empty one without.
    fn read_if(path: Option<&Path>) -> anyhow::Result<Self> {
        path.map_or_else(|| Ok(Self::default()), Self::read)
    }

    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read config file {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("cannot understand config file {}", path.display()))
    }
}

#[cfg(test)]
mod tests;
