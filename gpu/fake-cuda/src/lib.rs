//! A CUDA driver library for simulated GPUs: devices, contexts, all kinds of allocation, streams, events, graphs.
//!
//! Loaded as `libcuda.so.1` by test programs and in containers of a node with simulated GPUs. All processes that load
//! it share one state file (`mayfly_gpu_proto::sim`, at the path in [`STATE_ENV`]). Kernels compute nothing: a kernel
//! takes the GPU time at the end of its name (`work_500us`, `work_2ms`, `work_80ns`), by default 10 µs. Device memory
//! is backed by lazily allocated host memory, so copies work.
//!
//! Start at [`state`]; [`memory`] allocates, [`stream`] executes, [`driver`] has devices, contexts and
//! `cuGetProcAddress`. Not here: limits (`gpu/shim`).
#![warn(missing_debug_implementations)]
#![expect(
    unsafe_code,
    reason = "a C interface is made of raw pointers; see the safety section of each module"
)]
#![expect(
    clippy::missing_safety_doc,
    reason = "the contract is that of the CUDA driver's function of this name"
)]

pub mod driver;
pub mod memory;
pub mod pool;
pub mod state;
pub mod stream;
pub mod vmm;

pub use mayfly_gpu_proto::sim::STATE_ENV;

/// `CUresult`.
pub type CudaResult = i32;
pub const SUCCESS: CudaResult = 0;
pub const INVALID_VALUE: CudaResult = 1;
pub const OUT_OF_MEMORY: CudaResult = 2;
pub const NOT_INITIALIZED: CudaResult = 3;
pub const NO_DEVICE: CudaResult = 100;
pub const INVALID_DEVICE: CudaResult = 101;
pub const INVALID_CONTEXT: CudaResult = 201;
pub const INVALID_HANDLE: CudaResult = 400;
pub const NOT_FOUND: CudaResult = 500;
pub const NOT_READY: CudaResult = 600;
pub const STREAM_CAPTURE_UNSUPPORTED: CudaResult = 900;
pub const STREAM_CAPTURE_INVALIDATED: CudaResult = 901;
pub const UNKNOWN: CudaResult = 999;

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

/// Writes to an out-parameter, or returns `CUDA_ERROR_INVALID_VALUE` if it is NULL.
#[macro_export]
macro_rules! out {
    ($pointer:expr, $value:expr) => {{
        let pointer = $pointer;
        if pointer.is_null() {
            return $crate::INVALID_VALUE;
        }
        let value = $value;
        // SAFETY: not NULL, and the caller of the C interface gives a valid out-parameter.
        unsafe { pointer.write(value) }
    }};
}

/// Defines exported functions of the driver; each checks for injected faults first.
#[macro_export]
macro_rules! driver_functions {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::CudaResult {
                static CALLS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
                if let Some(code) = $crate::state::fault(stringify!($name), &CALLS) {
                    return code;
                }
                $body
            }
        )*
        /// The functions of this module by name.
        pub(crate) const FUNCTIONS: &[(&str, $crate::state::FunctionAddress)] =
            &[$((stringify!($name), $crate::state::FunctionAddress($name as *const ()))),*];
    };
}
