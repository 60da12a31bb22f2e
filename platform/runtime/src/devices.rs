//! Devices of a node that containers request by resource name, such as `nvidia.com/gpu`: the kubelet's interface to the
//! device manager, and the resulting changes to a container.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    path::Path,
    time::Duration,
};

use async_trait::async_trait;
use mayfly_api::ObjectKey;
use tokio::sync::watch;

use crate::pod::{Mount, PodUid};

/// A device file in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Its path in the container.
    pub path: String,
    pub block: bool,
    pub major: u32,
    pub minor: u32,
    /// The permitted access to the device: letters of `rwm`.
    pub access: String,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

/// A program of the host that the container runtime executes at a point in a container's lifecycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerHook {
    pub moment: HookMoment,
    pub path: String,
    /// Includes the program's name as the first element.
    pub args: Vec<String>,
    /// Lines of `NAME=value`.
    pub env: Vec<String>,
    pub timeout_s: Option<i64>,
}

/// The hook points of the OCI specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookMoment {
    Prestart,
    CreateRuntime,
    CreateContainer,
    StartContainer,
    Poststart,
    Poststop,
}

impl HookMoment {
    pub const ALL: [Self; 6] = [
        Self::Prestart,
        Self::CreateRuntime,
        Self::CreateContainer,
        Self::StartContainer,
        Self::Poststart,
        Self::Poststop,
    ];

    /// The name in the OCI specification, which the Container Device Interface uses, too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prestart => "prestart",
            Self::CreateRuntime => "createRuntime",
            Self::CreateContainer => "createContainer",
            Self::StartContainer => "startContainer",
            Self::Poststart => "poststart",
            Self::Poststop => "poststop",
        }
    }
}

/// The changes of one container's configuration for its devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerDevices {
    pub env: BTreeMap<String, String>,
    pub mounts: Vec<Mount>,
    pub nodes: Vec<DeviceNode>,
    pub hooks: Vec<ContainerHook>,
    pub annotations: BTreeMap<String, String>,
}

/// The role of a container in its pod: it decides whether later containers may reuse its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerRole {
    /// Ends before the next container starts.
    Init,
    /// An init container that keeps running.
    Sidecar,
    Main,
}

/// The devices that one container requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceClaim {
    pub container: String,
    pub role: ContainerRole,
    /// Counts by resource name.
    pub resources: BTreeMap<String, u32>,
}

/// The devices that a pod requests, in the order in which its containers start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDeviceClaims {
    pub uid: PodUid,
    pub pod: ObjectKey,
    pub annotations: BTreeMap<String, String>,
    pub claims: Vec<DeviceClaim>,
}

/// Devices that are allocated to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAllocation {
    pub pod: PodUid,
    pub container: String,
    pub resource: String,
    pub devices: Vec<String>,
}

/// The health of an allocated device, from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceHealth {
    Healthy,
    /// Its plugin is not connected, or does not list it.
    Unknown,
    Unhealthy,
}

impl DeviceHealth {
    /// The name in the status of a pod.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "Healthy",
            Self::Unknown => "Unknown",
            Self::Unhealthy => "Unhealthy",
        }
    }
}

/// A device that a container has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInUse {
    pub container: String,
    pub resource: String,
    /// Its id; for shares of a device, the id of the device.
    pub device: String,
    pub health: DeviceHealth,
}

/// The devices of the node by resource name. A removed resource is listed with 0, so that it is updated in the node's
/// object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    pub capacity: BTreeMap<String, u64>,
    /// The healthy devices.
    pub allocatable: BTreeMap<String, u64>,
}

/// The reason why a container does not get its devices.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// A plugin is unavailable or has not registered yet: the pod waits for it.
    #[error("{0}")]
    NotReady(String),
    /// The pod cannot run on this node.
    #[error("{0}")]
    Refused(String),
}

/// The devices of a node.
#[async_trait]
pub trait NodeDevices: fmt::Debug + Send + Sync + 'static {
    fn counts(&self) -> DeviceCounts;

    /// Changes whenever [`NodeDevices::counts`] or [`NodeDevices::in_use`] may have changed.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Allocates the devices of the pod if it has none yet, and returns those of its container. Idempotent: a pod keeps
    /// its devices.
    async fn prepare(&self, pod: &PodDeviceClaims, container: &str) -> Result<ContainerDevices, DeviceError>;

    /// The devices of the pod's containers, in the order of containers, resources and devices.
    fn in_use(&self, pod: &PodUid) -> Vec<DeviceInUse>;

    /// Connects to a plugin that another way than its registration has made known (upstream's plugin watcher).
    /// `versions`: those of the device plugin API that it supports.
    ///
    /// # Errors
    /// Its version or resource name is not supported, or it does not answer.
    async fn add_plugin(&self, resource: &str, socket: &Path, versions: &[String]) -> Result<(), String>;

    /// Disconnects a plugin whose socket was removed.
    fn remove_plugin(&self, resource: &str, socket: &Path);

    /// Releases the devices of a pod whose containers have all ended.
    fn release(&self, pod: &PodUid);

    /// Releases the devices of all pods that are not in `pods`.
    fn retain(&self, pods: &HashSet<String>);
}

/// The usage of a node's GPUs, as far as the kubelet acts on it.
pub trait NodeGpus: fmt::Debug + Send + Sync + 'static {
    /// The GPU time that the pod's containers have used on all their GPUs together; `None`: they have no GPU. Blocks.
    fn time_used(&self, pod: &PodUid) -> Option<Duration>;

    /// The pods that use more GPU memory than they may, with the messages of their evictions.
    fn violations(&self) -> watch::Receiver<BTreeMap<PodUid, String>>;

    /// The last warning about each pod that uses more GPU time than its share.
    fn warnings(&self) -> watch::Receiver<BTreeMap<PodUid, String>>;
}
