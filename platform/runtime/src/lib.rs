//! The contract between a node and its hosts of functions and containers.
//!
//! **Belongs here:** [`Runtime`], the kubelet's interface to any host (wasm, OCI, simulated); [`FunctionHost`], the
//! gateway's interface to a host that answers requests in the same process; the types of these interfaces; the format
//! of log files that all hosts write and the kubelet reads; body wrappers for HTTP servers ([`wire`]); the exports and
//! imports of a component, read without compiling it ([`component`]).
//!
//! **Does not belong here:** any host, any policy (when to scale, what to restart), the API.
//!
//! Start reading at [`function`] for the request path and at [`pod`] for the node.

#![warn(missing_debug_implementations)]

pub mod component;
pub mod devices;
pub mod function;
pub mod images;
pub mod logs;
pub mod network;
pub mod pod;
pub mod simulated;
pub mod streams;
pub mod wire;

pub use devices::{
    ContainerDevices, ContainerHook, ContainerRole, DeviceAllocation, DeviceClaim, DeviceCounts, DeviceError,
    DeviceHealth, DeviceInUse, DeviceNode, HookMoment, NodeDevices, NodeGpus, PodDeviceClaims,
};
pub use function::{Answer, Body, BodyError, CallError, FunctionHost, HostedFunction, HostedSpec, Timings};
pub use images::{ImageRecord, ImageStore, PullPolicy, PullSecret};
pub use network::{
    ClusterHost, ClusterHosts, ConnectionPolicy, LoopbackNetwork, NetworkAttachment, NetworkError,
    OutboundRoute, PodIdentity, PodNetwork,
};
pub use pod::{
    ContainerFiles, ContainerId, ContainerSpec, ContainerState, DiskUsage, Mount, MountPropagation,
    PodCgroup, PodUid, PortMapping, ProcessOptions, QosClass, REASON_NODE_FAIL, REASON_PREEMPTED, Runtime,
    RuntimeError, SandboxHost, SandboxSpec, SandboxStatus, SeccompProfile, SecurityOptions, Usage,
};
pub use streams::{ContainerStreams, ProcessSession, StreamOptions, TerminalSize};
