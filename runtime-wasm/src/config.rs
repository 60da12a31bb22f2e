//! The configuration of the wasm host; every value has a default with its reason.

use std::{path::PathBuf, time::Duration};

/// The configuration of the wasm host.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of instances. `None`: one per [`INSTANCE_BYTES_EXPECTED`] of memory, between
    /// [`INSTANCES_MIN`] and [`INSTANCES_MAX`].
    pub instances_max: Option<u32>,
    /// The largest number of instances of one function, over all its revisions. `None`: as many as remain free, so at
    /// most half of all (`crate::slots`).
    pub function_instances_max: Option<u32>,
    /// Bytes of memory over all instances, including what the host holds for them. `None`: half of the memory of the
    /// machine (or of the cgroup's limit), which leaves the rest to the server, compilation and the page cache.
    pub memory_bytes_max: Option<u64>,
    /// The maximum size of one linear memory in bytes; a function's own limit may be lower. Every slot reserves
    /// address space for it, so 4 GiB (all that wasm32 can address) costs nothing else.
    pub linear_memory_bytes_max: u64,
    /// The interval at which running guests are interrupted. A guest that computes yields its thread after one to two
    /// ticks, and one past its deadline ends at most two ticks later. 2 ms cost 500 wake-ups a second while there is
    /// an engine.
    pub tick: Duration,
    /// Threads on which calls that take longer than a time slice continue. `None`: the number of cores.
    pub long_call_threads: Option<usize>,
    /// Where components are compiled.
    pub compile_in: CompileIn,
    /// Bytes of memory that a compiler process may take. `None`: half of the machine's.
    pub compile_memory_bytes_max: Option<u64>,
    /// The processor time that a compiler process may use for one component; its duration may be six times as long on
    /// a busy processor.
    pub compile_timeout: Duration,
    /// Threads that compile components. `None`: half of the cores, at least one, so that compilation never starves
    /// serving.
    pub compile_threads: Option<usize>,
    /// The file that keeps the measured speed of compilation over a restart, for estimates. `None`: it is not kept.
    pub compile_speed_file: Option<PathBuf>,
    /// The maximum number of components in the compilation queue; more are rejected as overload.
    pub compile_queue_max: usize,
    /// Bytes of mapped machine code that stay loaded; beyond this, the least recently used component is unloaded.
    pub loaded_bytes_max: u64,
    /// The longest wait of a call for an instance slot (its own deadline may be earlier).
    pub slot_wait_max: Duration,
    /// Calls that one instance of a `reuse` function answers before it is replaced, so that a leak in the
    /// guest stays small.
    pub reuse_calls_max: u32,
    /// The maximum age of an instance of a `reuse` function.
    pub reuse_age_max: Duration,
    /// Idle instances that one `reuse` function keeps.
    pub reuse_idle_max: usize,
    /// Memory of one container of a pod that names no limit, in bytes.
    pub pod_memory_bytes_default: u64,
    /// The largest number of connections that one pod serves; further ones wait to be accepted.
    pub pod_connections_max: usize,
    /// The longest time for which a pod's client may leave its answer unread.
    pub pod_stall_timeout: Duration,
    /// How the memory of instances is wiped.
    pub wipe: Wipe,
    /// Limits of outbound HTTP.
    pub egress: EgressConfig,
    /// Bytes a second that one function or container may write to its log. Beyond it a function loses lines, and a job
    /// waits. Keeps one guest from using all of the disk bandwidth.
    pub log_bytes_per_second: u64,
}

/// Where components are compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompileIn {
    /// On threads of this process: for tests and tools.
    ThisProcess,
    /// In a separate process for each component: `PROGRAM compile ARG…`, which must pass its arguments to
    /// [`compile_worker`](crate::compile_worker). For servers: the compiler's memory returns to the system, and a crash
    /// affects only that component.
    Process(PathBuf),
}

/// The expected memory of an instance in bytes; determines the default number of slots.
pub const INSTANCE_BYTES_EXPECTED: u64 = 8 << 20;
/// The minimum number of instance slots, on any machine.
pub const INSTANCES_MIN: u32 = 64;
/// The maximum number of instance slots: each may need several of the 65,530 mappings that the kernel allows per
/// process.
pub const INSTANCES_MAX: u32 = 2000;

/// How memory is wiped between instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// Asks the kernel which pages were touched and overwrites those, if it supports that (since Linux 6.7).
    Auto,
    /// Overwrites the beginning and returns the rest to the kernel, without asking.
    Plain,
}

/// Limits of outbound HTTP.
#[derive(Clone, Debug)]
pub struct EgressConfig {
    /// The largest number of open connections of one function; further requests wait for one.
    pub connections_max: usize,
    /// Idle connections kept per destination.
    pub idle_connections_max: usize,
    /// The lifetime of an idle connection.
    pub idle_timeout: Duration,
    /// The timeout for getting a connection: waiting for the limit, resolving and connecting, including TLS.
    pub connect_timeout: Duration,
    /// The timeout from the sent request to the response's headers.
    pub first_byte_timeout: Duration,
    /// The timeout between two pieces of the response's body.
    pub between_bytes_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            instances_max: None,
            function_instances_max: None,
            memory_bytes_max: None,
            linear_memory_bytes_max: 4 << 30,
            tick: Duration::from_millis(2),
            long_call_threads: None,
            compile_in: CompileIn::ThisProcess,
            compile_memory_bytes_max: None,
            compile_timeout: Duration::from_secs(600),
            compile_threads: None,
            compile_speed_file: None,
            compile_queue_max: 1024,
            loaded_bytes_max: 1 << 30,
            slot_wait_max: Duration::from_secs(10),
            reuse_calls_max: 10_000,
            reuse_age_max: Duration::from_secs(600),
            reuse_idle_max: 64,
            pod_memory_bytes_default: 256 << 20,
            pod_connections_max: 1024,
            pod_stall_timeout: Duration::from_secs(60),
            wipe: Wipe::Auto,
            egress: EgressConfig::default(),
            log_bytes_per_second: 4 << 20,
        }
    }
}

impl Config {
    pub(crate) fn long_call_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.long_call_threads.unwrap_or_else(cores)
    }

    /// The first invalid setting, its value, and why it is invalid.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String, &'static str)> {
        let wrong = |setting, value: &dyn std::fmt::Debug, why| Err((setting, format!("{value:?}"), why));
        if self.instances_max == Some(0) {
            return wrong("instances_max", &0, "nothing could run");
        }
        if self.function_instances_max == Some(0) {
            return wrong("function_instances_max", &0, "no function could run");
        }
        if self.tick.is_zero() || self.tick > Duration::from_secs(1) {
            return wrong("tick", &self.tick, "guests are interrupted this often: between 0 and 1 s");
        }
        let memory = self.linear_memory_bytes_max;
        if memory == 0 || memory > 4 << 30 || !memory.is_multiple_of(64 << 10) {
            let why = "a linear memory has whole pages of 64 KiB, and at most 4 GiB";
            return wrong("linear_memory_bytes_max", &memory, why);
        }
        Ok(())
    }
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self {
            connections_max: 256,
            idle_connections_max: 32,
            idle_timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(10),
            first_byte_timeout: Duration::from_secs(600),
            between_bytes_timeout: Duration::from_secs(600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_rejected() {
        assert_eq!(Config::default().check(), Ok(()));
        for (config, setting) in [
            (Config { instances_max: Some(0), ..Config::default() }, "instances_max"),
            (Config { function_instances_max: Some(0), ..Config::default() }, "function_instances_max"),
            (Config { tick: Duration::ZERO, ..Config::default() }, "tick"),
            (Config { linear_memory_bytes_max: 5 << 30, ..Config::default() }, "linear_memory_bytes_max"),
            (Config { linear_memory_bytes_max: 100_000, ..Config::default() }, "linear_memory_bytes_max"),
        ] {
            assert_eq!(config.check().unwrap_err().0, setting);
        }
    }
}
