//! The contract between the host and the libraries that run in a container with shared GPUs.
//!
//! [`limits`] is the memory-mapped file of one container: its devices, their limits, and the usage of each process of
//! the container. The host creates it ([`LimitsFile::create`]) and mounts it at [`CONTAINER_LIMITS_PATH`]; the shim
//! (`gpu/shim`) opens it and does the accounting in it. [`accounting`] has the rules for memory, [`quota`] those for
//! GPU time, [`elastic`] the host's part of elastic quotas. [`sim`] is the shared state of the simulated GPUs of
//! `gpu/fake-cuda` and `gpu/fake-nvml`.
//!
//! Not here: symbols of CUDA or NVML, Kubernetes. The file is not a security boundary: a container may write to it, so
//! the host compares it with the driver's own figures.
#![warn(missing_debug_implementations)]
#![expect(unsafe_code, reason = "a shared mapping is raw memory; every use has its argument")]

pub mod accounting;
pub mod elastic;
pub mod limits;
pub mod process;
pub mod quota;
pub mod sim;

pub use elastic::ElasticBalancer;
pub use limits::{DeviceLimit, DeviceUsage, LimitsError, LimitsFile};

/// The environment variable with the path of the limits file; without it the shim does nothing.
pub const LIMITS_ENV: &str = "MAYFLY_GPU_LIMITS";
/// Environment variable of the dynamic linker; the value in a container is [`CONTAINER_SHIM_PATH`].
pub const PRELOAD_ENV: &str = "LD_PRELOAD";
/// Environment variable of the dynamic linker; the value in a container is [`CONTAINER_DRIVER_DIR`].
pub const LIBRARY_PATH_ENV: &str = "LD_LIBRARY_PATH";

/// The path of the limits file in a container. Mounted read-write, since the shim does the accounting in it.
pub const CONTAINER_LIMITS_PATH: &str = "/run/mayfly/gpu/limits";
/// The path of the shim in a container. Mounted read-only.
pub const CONTAINER_SHIM_PATH: &str = "/run/mayfly/gpu/libmayfly_gpu_shim.so";
/// The folder of the driver libraries in a container, under the names that programs load.
pub const CONTAINER_DRIVER_DIR: &str = "/run/mayfly/gpu/driver";
/// The path of the state of simulated GPUs in a container. Mounted read-write.
pub const CONTAINER_SIM_PATH: &str = "/run/mayfly/gpu/sim";

/// File name of the limiting library, beside the `mayfly` executable.
pub const SHIM_FILE: &str = "libmayfly_gpu_shim.so";
/// File name of the simulated CUDA driver, beside the `mayfly` executable; mounted as [`CUDA_SONAME`].
pub const FAKE_CUDA_FILE: &str = "libmayfly_gpu_fake_cuda.so";
/// File name of the simulated NVML, beside the `mayfly` executable; mounted as [`NVML_SONAME`].
pub const FAKE_NVML_FILE: &str = "libmayfly_gpu_fake_nvml.so";
/// Name under which programs load the CUDA driver.
pub const CUDA_SONAME: &str = "libcuda.so.1";
/// Name under which programs load NVML.
pub const NVML_SONAME: &str = "libnvidia-ml.so.1";

/// The environment of a container with limited GPUs: the limits file and the preloaded shim.
pub fn container_env() -> [(&'static str, &'static str); 2] {
    [(LIMITS_ENV, CONTAINER_LIMITS_PATH), (PRELOAD_ENV, CONTAINER_SHIM_PATH)]
}
