//! Messages for failures of a guest.

use std::time::Duration;

use mayfly_artifacts::{FetchError, UnpackError};
use mayfly_runtime::CallError;
use wasmtime::{PoolConcurrencyLimitError, Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use crate::{
    guest::{MemoryRefusal, MemoryUse},
    slots::SlotShare,
};

/// Stack frames of the guest that a trap's message names.
const FRAMES_SHOWN: usize = 4;
/// The `retry-after` of responses of an overloaded host.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// No slot for an instance of the function became free in time.
pub(crate) fn no_slot(share: &SlotShare) -> CallError {
    CallError::NoSlot { held: share.held(), max: share.slots().max(), retry_after: RETRY_AFTER }
}

/// The files of the function cannot be unpacked.
pub(crate) fn unpack_error(error: &UnpackError) -> CallError {
    match error {
        UnpackError::Missing(digest) => CallError::ComponentMissing(*digest),
        UnpackError::Refused { .. } => CallError::ComponentInvalid(error.to_string()),
        UnpackError::Io { .. } => CallError::Internal(error.to_string()),
        UnpackError::NotFetched(error) => fetch_error(error),
    }
}

/// A component or an archive of files cannot be read.
pub(crate) fn fetch_error(error: &FetchError) -> CallError {
    match error {
        FetchError::Missing(digest) => CallError::ComponentMissing(*digest),
        FetchError::Origin { .. } | FetchError::Damaged { .. } | FetchError::Full { .. } => {
            CallError::ComponentUnavailable { why: error.to_string(), retry_after: RETRY_AFTER }
        }
        FetchError::Io { .. } => CallError::Internal(error.to_string()),
    }
}

/// Maps a failed instantiation or call.
pub(crate) fn call_error(error: &wasmtime::Error, memory: &MemoryUse) -> CallError {
    if error.is::<PoolConcurrencyLimitError>() {
        return CallError::Overloaded { retry_after: RETRY_AFTER };
    }
    // The adapter for WASI 0.1 passes only success or failure, not the exit code.
    if error.is::<I32Exit>() {
        return CallError::Trapped("it exited before it answered".to_owned());
    }
    // A guest that gets no more memory ends in `unreachable` or aborts: report the memory as the cause.
    match memory.refused() {
        Some(MemoryRefusal::Limit) => CallError::OutOfMemory { limit_bytes: memory.max() },
        Some(MemoryRefusal::Host) => CallError::Overloaded { retry_after: RETRY_AFTER },
        None => CallError::Trapped(trap(error)),
    }
}

/// Describes a trap and its location: `wasm unreachable instruction executed in app::parse (called by app::handle)`.
pub(crate) fn trap(error: &wasmtime::Error) -> String {
    let what = match error.downcast_ref::<Trap>() {
        Some(trap) => trap.to_string().trim_start_matches("wasm trap: ").to_owned(),
        // The message of the host function that failed.
        None => error.root_cause().to_string(),
    };
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else { return what };
    let names: Vec<String> = backtrace
        .frames()
        .iter()
        .filter_map(|frame| frame.func_name().map(demangled))
        .filter(|name| !is_plumbing(name))
        .take(FRAMES_SHOWN)
        .collect();
    match names.split_first() {
        None => what,
        Some((first, [])) => format!("{what} in {first}"),
        Some((first, callers)) => format!("{what} in {first} (called by {})", callers.join(", ")),
    }
}

/// A Rust name without its hash; other names unchanged.
fn demangled(name: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(name))
}

/// Functions on every panic's stack that carry no information.
fn is_plumbing(name: &str) -> bool {
    ["rust_panic", "__rust_", "std::panicking", "core::panicking", "abort", "std::sys", "__rustc"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}
