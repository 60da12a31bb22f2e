//! The device manager of a node: tracks the devices that plugins offer, and allocates them to containers.
//!
//! **Belongs here:** the kubelet's side of the device plugin API v1beta1 ([`manager`]: registration, `ListAndWatch`,
//! preferred allocation, `Allocate`, `PreStartContainer`); the allocations ([`state`], a plain struct without locks or
//! clocks), and which devices are near each other; the checkpoint in the kubelet's format ([`checkpoint`]); files of the
//! Container Device Interface ([`cdi`]); serving one gRPC service on a unix socket ([`serve`]), for plugins of this
//! process.
//!
//! **Does not belong here:** any kind of device, pods as objects, the OCI specification.
//!
//! Beyond upstream: a pod waits for an absent plugin instead of failing; each connection of a plugin has a generation,
//! so that the late end of an old connection does not affect the new one; a plugin gets the identity of the pod for
//! which it allocates ([`identity`]).
//!
//! Start reading at [`state`].

#![warn(missing_debug_implementations)]

pub mod cdi;
pub mod checkpoint;
pub mod identity;
pub mod manager;
mod response;
pub mod serve;
pub mod state;

// Used by the generated code.
use tonic_prost as _;

/// Messages and services of the device plugin API.
pub mod proto {
    #![expect(clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("v1beta1");
}

pub use manager::{DeviceConfig, DeviceManager};

/// The version of the API in registrations.
pub const API_VERSION: &str = "v1beta1";
/// The manager's socket in the folder of the plugins' sockets.
pub const KUBELET_SOCKET: &str = "kubelet.sock";
/// The health of a device that may be allocated.
pub const HEALTHY: &str = "Healthy";
pub const UNHEALTHY: &str = "Unhealthy";
