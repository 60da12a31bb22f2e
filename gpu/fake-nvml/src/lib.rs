//! An NVML library for simulated GPUs, with the functions that `nvml-wrapper`, tools like `nvidia-smi` and device
//! plugins call.
//!
//! Loaded as `libnvidia-ml.so.1`; shares the state file of `gpu/fake-cuda` (`mayfly_gpu_proto::sim`), so memory and
//! processes are those of users of the fake driver, and Xids are injected by tests.
//!
//! Start at [`device`]; [`utilization`] reports how busy they are, [`accounting`] the work of processes that ended, [`mig`]
//! has the instances of GPUs in MIG mode, [`nvlink`] the links; [`events`] waits for Xids. Not here: CUDA (`gpu/fake-cuda`), limits (`gpu/shim`).
#![warn(missing_debug_implementations)]
#![expect(
    unsafe_code,
    reason = "a C interface is made of raw pointers; see the safety section of each module"
)]
#![expect(clippy::missing_safety_doc, reason = "the contract is that of NVML's function of this name")]

pub mod accounting;
pub mod device;
pub mod events;
pub mod mig;
pub mod nvlink;
pub mod state;
pub mod utilization;

/// `nvmlReturn_t`.
pub type NvmlReturn = i32;
pub const SUCCESS: NvmlReturn = 0;
pub const UNINITIALIZED: NvmlReturn = 1;
pub const INVALID_ARGUMENT: NvmlReturn = 2;
pub const NOT_SUPPORTED: NvmlReturn = 3;
pub const NOT_FOUND: NvmlReturn = 6;
pub const INSUFFICIENT_SIZE: NvmlReturn = 7;
pub const DRIVER_NOT_LOADED: NvmlReturn = 9;
pub const TIMEOUT: NvmlReturn = 10;
pub const GPU_IS_LOST: NvmlReturn = 15;

/// Unwraps a result, or returns its error code from the function.
#[macro_export]
macro_rules! check {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(code) => return code,
        }
    };
}

/// Writes to an out-parameter, or returns `NVML_ERROR_INVALID_ARGUMENT` if it is NULL.
#[macro_export]
macro_rules! out {
    ($pointer:expr, $value:expr) => {{
        let pointer = $pointer;
        if pointer.is_null() {
            return $crate::INVALID_ARGUMENT;
        }
        let value = $value;
        // SAFETY: not NULL, and the caller of the C interface gives a valid out-parameter.
        unsafe { pointer.write(value) }
    }};
}

/// Defines exported functions of NVML.
#[macro_export]
macro_rules! nvml_functions {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::NvmlReturn $body
        )*
    };
}
