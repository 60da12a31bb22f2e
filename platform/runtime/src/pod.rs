//! The interface to a node's hosts: the kubelet decides what should run, and a [`Runtime`] runs it.
//!
//! Modelled on the container runtime interface (CRI): a sandbox per pod, and containers in it, each started once and
//! never restarted by the host: restarts are the kubelet's policy and get a new attempt number, so a new
//! [`ContainerId`].

use std::{collections::BTreeMap, fmt, net::IpAddr, path::PathBuf, time::Duration};

use async_trait::async_trait;
use mayfly_api::ObjectKey;
use tokio::sync::watch;

use crate::{
    devices::{ContainerHook, DeviceNode},
    images::{ImageStore, PullPolicy},
    streams::ContainerStreams,
};

/// A pod's UID, which distinguishes pods of the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodUid(pub String);

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One attempt to run one container of one pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId {
    pub pod: PodUid,
    pub name: String,
    /// 0 for the first start, incremented by each restart.
    pub attempt: u32,
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}_{}", self.pod, self.name, self.attempt)
    }
}

/// The configuration that the containers of a pod share.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxSpec {
    pub uid: PodUid,
    pub pod: ObjectKey,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// The address that the kubelet reserved for the pod, if this node assigns addresses.
    pub address: Option<IpAddr>,
    pub host: SandboxHost,
}

/// The namespaces that a pod shares with its host, its names and its name resolution. Runtimes without kernel
/// namespaces ignore it.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SandboxHost {
    pub hostname: String,
    /// The fully qualified host name, for a pod with a subdomain in a cluster with DNS.
    pub full_hostname: Option<String>,
    pub host_network: bool,
    pub host_pid: bool,
    /// Whether the containers share a process namespace.
    pub shares_processes: bool,
    pub host_ipc: bool,
    /// Lines of `/etc/hosts` in addition to the pod's own: addresses with their names.
    pub host_aliases: Vec<(IpAddr, Vec<String>)>,
    /// The pod's `/etc/resolv.conf`; `None`: the host's.
    pub resolv_conf: Option<String>,
    pub host_ports: Vec<PortMapping>,
    /// `net.…` kernel parameters of the pod's own namespaces.
    pub sysctls: BTreeMap<String, String>,
    pub cgroup: PodCgroup,
}

/// A pod's share of the node, and the common limits of its containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PodCgroup {
    pub class: QosClass,
    /// The weight relative to other pods of the class, in thousandths of a core.
    pub cpu_millis_request: u64,
    /// `None`: no limit.
    pub cpu_millis_max: Option<u64>,
    pub memory_bytes_max: Option<u64>,
}

/// Upstream's quality of service class of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum QosClass {
    /// Also used for pods of earlier versions, whose cgroups are in the place of those of guaranteed pods.
    #[default]
    Guaranteed,
    Burstable,
    BestEffort,
}

/// A host port that is forwarded to a port of the pod.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PortMapping {
    pub host: u16,
    pub container: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
    pub address: Option<IpAddr>,
}

/// The status of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxStatus {
    /// The addresses of the pod, the primary one first.
    pub addresses: Vec<IpAddr>,
}

/// A container's configuration, with all references resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerSpec {
    pub id: ContainerId,
    pub image: String,
    pub command: Vec<String>,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    /// `None`: the host's default.
    pub memory_bytes_max: Option<u64>,
    /// Thousandths of a core.
    pub cpu_millis_max: Option<u64>,
    /// The declared TCP ports of the container.
    pub ports: Vec<u16>,
    /// The file for stdout and stderr, in the format of [`crate::logs`].
    pub log_path: PathBuf,
    /// The inputs and outputs of a job; `None` for every other container.
    pub files: Option<ContainerFiles>,
    pub process: ProcessOptions,
}

/// The configuration of a container's process. A runtime without kernel namespaces ignores options that it does not
/// support.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessOptions {
    pub pull: PullPolicy,
    pub working_dir: Option<String>,
    /// Volumes, sorted so that a mount comes before those below it.
    pub mounts: Vec<Mount>,
    /// Device files in addition to the default ones.
    pub devices: Vec<DeviceNode>,
    pub hooks: Vec<ContainerHook>,
    pub stdin: bool,
    /// Whether standard input is closed when the first attached client disconnects.
    pub stdin_once: bool,
    pub tty: bool,
    pub security: SecurityOptions,
    /// The request for CPU, in thousandths of a core: the weight relative to other containers.
    pub cpu_millis_request: u64,
    /// The request for memory, in bytes; 0: none.
    pub memory_bytes_request: u64,
    /// Counts of devices by resource name, such as `nvidia.com/gpu`.
    pub extended_resources: BTreeMap<String, u32>,
    /// The maximum duration of the pod.
    pub active_deadline: Option<Duration>,
    /// Upstream's score for the kernel's out-of-memory killer: -997 (guaranteed) to 1000 (best effort).
    pub oom_score_adj: i32,
    /// The file in the container whose content becomes the termination message.
    pub termination_message_path: String,
    /// Whether the end of the log becomes the message if that file is empty and the container failed.
    pub termination_message_from_log: bool,
    /// The signal that stops the process; `None`: the image's, otherwise SIGTERM.
    pub stop_signal: Option<String>,
    /// The container of the same pod whose process namespace is joined, for example by a debugger.
    pub target_container: Option<String>,
}

/// The identity and the rights of a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SecurityOptions {
    /// `None`: the image's.
    pub user: Option<i64>,
    pub group: Option<i64>,
    pub supplemental_groups: Vec<i64>,
    /// Whether the process is in no group for the sole reason that the image's `/etc/group` lists its user.
    pub ignores_image_groups: bool,
    /// Whether starting as user 0 is refused.
    pub run_as_non_root: bool,
    pub privileged: bool,
    pub read_only_root: bool,
    pub no_new_privileges: bool,
    /// Capabilities in addition to the default set, without `CAP_`; `ALL` for all.
    pub capabilities_add: Vec<String>,
    pub capabilities_drop: Vec<String>,
    pub seccomp: SeccompProfile,
    /// Whether `/proc` is not masked.
    pub unmasked_proc: bool,
}

/// The system call filter of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SeccompProfile {
    #[default]
    Unconfined,
    /// The runtime's default profile.
    RuntimeDefault,
    /// A file below the node's folder of profiles.
    Localhost(String),
}

/// The node's files that are given to a job's container (`mayfly_api::job_io`).
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerFiles {
    pub mounts: Vec<Mount>,
    /// The file that the process reads as stdin.
    pub stdin: PathBuf,
    /// The folder for captured outputs. Before the container's end is reported, its host writes the files `stdout` and
    /// `stderr` there: the last [`RESULT_BYTES_MAX`] bytes of each, and a file `<name>.truncated` beside one whose
    /// beginning is missing.
    ///
    /// [`RESULT_BYTES_MAX`]: mayfly_api::job_io::RESULT_BYTES_MAX
    pub capture: PathBuf,
}

/// A folder of the node that is mounted into a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mount {
    pub host: PathBuf,
    /// Its path in the container.
    pub guest: String,
    pub read_only: bool,
    pub propagation: MountPropagation,
}

/// The direction in which file systems mounted below a mount after the container's start are propagated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MountPropagation {
    /// No propagation in either direction.
    #[default]
    Private,
    HostToContainer,
    Bidirectional,
}

/// Reasons for ends that the program did not cause: its machine failed, or it was preempted. The pod then has
/// upstream's condition `DisruptionTarget`, which a Job's `podFailurePolicy` may ignore.
pub const REASON_NODE_FAIL: &str = "NodeFail";
pub const REASON_PREEMPTED: &str = "Preempted";

/// The status of a container.
#[derive(Clone, Debug, PartialEq)]
pub enum ContainerState {
    /// Accepted, and started later by the host itself: for example in a batch system's queue.
    Waiting {
        /// The reason shown by `kubectl get pods`.
        reason: String,
        message: String,
    },
    Running {
        started: jiff::Timestamp,
    },
    Exited {
        started: jiff::Timestamp,
        finished: jiff::Timestamp,
        /// As in a shell: 128 + signal for a killed process.
        exit_code: i32,
        /// `Completed`, `Error`, `OOMKilled`, `DeadlineExceeded`, …
        reason: String,
        /// A message for users, such as the trap.
        message: String,
    },
}

/// The current usage of a running container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub memory_bytes: u64,
    /// CPU time since the start; `None` if the host does not measure it.
    pub cpu: Option<Duration>,
}

/// The disk space that files use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

impl std::ops::Add for DiskUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (bytes, inodes) =
            (self.bytes.saturating_add(other.bytes), self.inodes.saturating_add(other.inodes));
        Self { bytes, inodes }
    }
}

impl std::iter::Sum for DiskUsage {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), std::ops::Add::add)
    }
}

/// The reason why a host could not do what the kubelet requested.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum RuntimeError {
    /// The image or component does not exist here, or cannot be fetched now. The kubelet retries with a growing pause (`ErrImagePull`).
    #[error("{0}")]
    ImageMissing(String),
    /// The name of an image or component is invalid (`InvalidImageName`).
    #[error("{0}")]
    ImageName(String),
    /// The image or component can never run here (`CreateContainerError`).
    #[error("{0}")]
    Invalid(String),
    /// The container would not meet its own requirements, such as `runAsNonRoot` (`CreateContainerConfigError`).
    #[error("{0}")]
    ConfigRefused(String),
    /// The container was made, but its process cannot be started, for example because its program does not exist. The
    /// attempt has ended (`StartError`).
    #[error("{0}")]
    StartFailed(String),
    /// There is no room at the moment (`OutOfmemory`).
    #[error("{0}")]
    NoRoom(String),
    #[error("pod {0} has no sandbox here")]
    NoSandbox(PodUid),
    #[error("{0}")]
    Internal(String),
}

/// A host that runs pods. Implemented by the wasm host, by containerd's, by Slurm's, and by
/// [`crate::simulated`].
///
/// All calls are idempotent by their ids, so that a restarted kubelet can simply repeat them.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// The `runtimeClassName` that it serves; empty for pods without one.
    fn class(&self) -> &str;

    /// Whether this runtime assigns addresses to its pods; otherwise the kubelet reserves one for each.
    fn assigns_addresses(&self) -> bool {
        false
    }

    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError>;

    /// Returns when the container runs (for a function: when its component is loaded and can answer), or when a host
    /// with a queue has accepted it ([`ContainerState::Waiting`]).
    async fn start_container(&self, container: ContainerSpec) -> Result<(), RuntimeError>;

    /// Requests the container to stop, and kills it after `grace`. Returns when it has ended.
    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError>;

    /// Kills what still runs in the sandbox and removes it.
    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError>;

    /// The containers of a pod that this host knows, including ended ones, by id.
    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)>;

    /// The pods that have a sandbox on this host, for a restarted kubelet.
    fn sandboxes(&self) -> Vec<PodUid>;

    /// The usage of all running containers, of all pods.
    fn usage(&self) -> Vec<(ContainerId, Usage)>;

    /// The disk space used by the files that running containers of all pods wrote outside of volumes. Walks the files,
    /// so it is slow.
    async fn layer_usage(&self) -> Vec<(ContainerId, DiskUsage)> {
        Vec::new()
    }

    /// Changes whenever the state of a container does. The value itself has no meaning.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Exec, attach and port-forward, if this runtime supports them.
    fn streams(&self) -> Option<&dyn ContainerStreams> {
        None
    }

    /// The images of the node, if this runtime has an image store.
    fn images(&self) -> Option<&dyn ImageStore> {
        None
    }
}
