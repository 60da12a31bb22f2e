//! The device plugin for NVIDIA GPUs: whole GPUs, and shares of them.
//!
//! **Belongs here:** the resources `nvidia.com/gpu` (a whole GPU), `mayfly.dev/vcuda-core` (a hundredth of a GPU's
//! time) and `mayfly.dev/vcuda-memory` (256 MiB of its memory), and `nvidia.com/mig-<profile>` (an instance of a GPU in MIG
//! mode, [`mig`]); the GPUs reported by NVML ([`source`]), including those
//! of a simulated host ([`simulated`]); the choice of a container's GPU, and the GPUs that the node publishes for the
//! scheduler ([`placement`], pure); the driver's files on this machine ([`driver`]); the limits file and the plugin's
//! answer for a container ([`grant`]); lending idle GPU time to containers with an elastic limit; the usage of GPUs and
//! by containers ([`usage`]); the verification of limits by the driver's figures ([`verify`], [`verify_time`], pure, fed by
//! [`inspector`]); the node's labels ([`labels`]); the health of GPUs ([`health`], pure, fed by `watcher`). It registers
//! over its sockets like any plugin ([`plugin`]). It gets the allocated devices from the device manager and keeps nothing
//! over a restart.
//!
//! **Does not belong here:** the enforcement of limits (the shim), the kubelet's side of the device plugin API.
//!
//! A GPU is either whole or shared: while a container has shares of it, the GPU is not offered as a whole, and vice
//! versa. The node's allocatable devices reflect that.

#![warn(missing_debug_implementations)]

mod accounting;
pub mod driver;
pub mod grant;
pub mod health;
pub mod inspector;
mod instance_calls;
pub mod labels;
mod lending;
pub mod mig;
mod node_gpus;
mod offer;
mod owners;
pub mod placement;
pub mod plugin;
pub mod simulated;
pub mod source;
mod topology;
pub mod usage;
pub mod verify;
pub mod verify_time;
pub mod violations;
mod watcher;

pub use driver::DriverFiles;
pub use grant::Libraries;
pub use inspector::InspectionConfig;
pub use mayfly_api::gpu_placement::{
    CORES_PER_GPU, MEMORY_UNIT_BYTES, RESOURCE_CORE, RESOURCE_GPU, RESOURCE_MEMORY,
};
pub use mig::{MigInstance, MigStrategy};
pub use placement::Gpu;
pub use plugin::{NvidiaPlugin, PluginConfig};
pub use simulated::SimulatedHost;
pub use source::{GpuSource, SourceError};
pub use usage::GpuMeter;
