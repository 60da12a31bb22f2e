//! CSI drivers from the view of the components that call them.
//!
//! **Belongs here:** the messages of CSI ([`proto`]) and of the plugin registration API ([`registration`]); calls with
//! a deadline and actionable errors ([`CsiDriver`]); the drivers that have registered on a node ([`CsiDrivers`]), added
//! by the kubelet and also used by the volume controllers; the names of paths and objects that both derive from a
//! volume ([`names`]).
//!
//! **Does not belong here:** when to make which calls (the kubelet and the controllers), Kubernetes objects.
//!
//! Start reading at [`CsiDriver`].

#![warn(missing_debug_implementations)]

mod capability;
mod driver;
pub mod names;

pub use capability::capability;
pub use driver::{ControllerAbilities, CsiDriver, CsiDrivers, CsiError, NodeAbilities, channel};

// Used by the generated code.
use prost as _;
use tonic_prost as _;

/// The messages and services of CSI.
pub mod proto {
    #![expect(clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("csi.v1");
}

/// The messages and services of the plugin registration API.
pub mod registration {
    #![expect(clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("pluginregistration");
}
