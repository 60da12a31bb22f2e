//! Enforces a container's limits of GPU memory and GPU time in its programs.
//!
//! Preloaded into every program of a container that shares GPUs. It intercepts the functions of libcuda and
//! libnvidia-ml that allocate, launch, or report the size of memory; every other call goes directly to the driver. All
//! ways to look functions up are covered: linked (the exported names), `dlsym`, and `cuGetProcAddress` ([`lookup`]).
//! [`account`] books memory in the limits file (`mayfly_gpu_proto`), [`memory`], [`pool`], [`graph`] and [`vmm`] are the
//! kinds of allocation, [`launch`] delays launches by measured GPU time, [`view`] reports sizes.
//!
//! Without a limits file (`MAYFLY_GPU_LIMITS`) every call is passed through. If the file is configured but unreadable,
//! allocations are refused: a container must not lose its limits by mistake. Not a security boundary: a program can
//! make system calls directly; the host compares the accounting with the driver's figures.
//!
//! Not here: the file's layout and rules (`gpu/proto`), host code.
#![warn(missing_debug_implementations)]
#![expect(unsafe_code, reason = "an interposed C interface is made of raw pointers; see the modules")]
#![expect(non_snake_case, reason = "the names are those of the driver")]
#![expect(clippy::missing_safety_doc, reason = "the contract is that of the driver's function of the name")]

mod account;
pub mod graph;
pub mod launch;
pub mod lookup;
pub mod memory;
pub mod pool;
pub mod view;
pub mod vmm;

/// `CUresult` and `nvmlReturn_t`.
type DriverCode = i32;
const SUCCESS: DriverCode = 0;
const OUT_OF_MEMORY: DriverCode = 2;
/// `CUDA_ERROR_NOT_FOUND`: the driver has no such function.
const NOT_FOUND: DriverCode = 500;

/// A function of the driver that is intercepted or called.
pub(crate) struct DriverHook {
    /// Includes a terminating zero.
    name: &'static std::ffi::CStr,
    /// NULL if it is only called.
    own: *const (),
    /// The driver's function, after its first lookup.
    real: std::sync::atomic::AtomicPtr<()>,
}

// SAFETY: `own` is the address of a function, which is only read.
unsafe impl Sync for DriverHook {}

/// Defines `$module::NAME` to call the driver's functions, and their slots.
macro_rules! driver_calls {
    ($module:ident, $slots:ident: $($name:ident($($arg:ident: $type:ty),*) = $own:expr;)*) => {
        /// The driver's functions.
        mod $module {
            use super::*;
            $(
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's function has")]
                pub(super) unsafe fn $name($($arg: $type),*) -> $crate::DriverCode {
                    let Some(address) = $crate::lookup::real(&super::$slots::$name) else {
                        return $crate::NOT_FOUND;
                    };
                    let function: unsafe extern "C" fn($($type),*) -> $crate::DriverCode =
                        // SAFETY: the driver's function of this name has this signature.
                        unsafe { std::mem::transmute(address.as_ptr()) };
                    // SAFETY: the arguments are the caller's, for the same function.
                    unsafe { function($($arg),*) }
                }
            )*
        }

        #[expect(non_upper_case_globals, reason = "named after the functions")]
        mod $slots {
            $(
                pub(super) static $name: $crate::DriverHook = $crate::DriverHook {
                    name: match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => c"",
                    },
                    own: $own,
                    real: std::sync::atomic::AtomicPtr::new(std::ptr::null_mut()),
                };
            )*
        }
    };
}
pub(crate) use driver_calls;

/// Defines exported functions, `real::NAME` to call the driver's, and the table `HOOKS`.
macro_rules! hooks {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::DriverCode $body
        )*

        $crate::driver_calls! { real, slots: $($name($($arg: $type),*) = super::$name as *const ();)* }

        pub(crate) static HOOKS: &[&$crate::DriverHook] = &[$(&slots::$name),*];
    };
}
pub(crate) use hooks;

/// Defines `driver::NAME` to call functions of the driver that are not intercepted. They are found by their exported
/// names, whose parameters do not change; a base name may stand for a version with other ones.
macro_rules! imports {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        $crate::driver_calls! { driver, imported: $($name($($arg: $type),*) = std::ptr::null();)* }
    };
}
pub(crate) use imports;
