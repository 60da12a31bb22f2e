//! FlexVolume drivers: programs of the node that mount volumes.
//!
//! **Belongs here:** the call protocol with its timeouts and errors ([`FlexDriver`], [`FlexError`]), the paths of
//! drivers ([`program_of`]), the options of calls ([`CallOptions`]), the kernel's mount table ([`mounts`]). A step of
//! [`FlexDriver`] has succeeded when its effect is visible there, not when the driver says so.
//!
//! **Does not belong here:** when to call a driver, and journals (the kubelet); CSI (`platform/flex-bridge`).
//!
//! Start reading at [`FlexDriver`]. (Behaviour: upstream `pkg/volume/flexvolume`.)

#![warn(missing_debug_implementations)]

mod call;
mod driver;
pub mod mounts;
mod options;

pub use call::{DriverCapabilities, FlexError};
pub use driver::{CALL_TIMEOUT, FlexDriver, program_of};
pub use options::CallOptions;
