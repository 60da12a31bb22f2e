//! `wasi:random@0.2` in pieces: wasmtime-wasi generates all bytes of a call at once, which blocks the thread for other
//! guests.
//!
//! In 0.3 a call may return fewer bytes than requested, so a limit per call suffices ([`PIECE_BYTES`]).

use wasmtime::{StoreContextMut, UpdateDeadline, component::Linker, format_err};
use wasmtime_wasi::{
    p2::bindings::random::{insecure::Host as _, random::Host as _},
    random::{WasiRandomCtx, WasiRandomView as _},
};

use crate::{cpu::slice, guest::StoreData};

/// Random bytes that are generated between two checks of the time slice: a few hundred microseconds.
pub(crate) const PIECE_BYTES: u64 = 32 << 10;
/// Random bytes that one call may request. The host holds them until they are copied to the guest.
const CALL_BYTES_MAX: u64 = 16 << 20;

/// The functions that are replaced, as wasmtime-wasi names them.
const FUNCTIONS: [(&str, &str, Make); 2] = [
    ("wasi:random/random@0.2.12", "get-random-bytes", WasiRandomCtx::get_random_bytes),
    ("wasi:random/insecure@0.2.12", "get-insecure-random-bytes", WasiRandomCtx::get_insecure_random_bytes),
];

type Make = fn(&mut WasiRandomCtx, u64) -> wasmtime::Result<Vec<u8>>;

/// Replaces wasmtime-wasi's functions in the linker.
pub(super) fn link(linker: &mut Linker<StoreData>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    for (interface, name, make) in FUNCTIONS {
        linker.instance(interface)?.func_wrap_async(
            name,
            move |store: StoreContextMut<'_, StoreData>, (length,): (u64,)| {
                Box::new(async move { Ok((bytes(store, length, make).await?,)) })
            },
        )?;
    }
    linker.allow_shadowing(false);
    Ok(())
}

async fn bytes(
    mut store: StoreContextMut<'_, StoreData>,
    length: u64,
    make: Make,
) -> wasmtime::Result<Vec<u8>> {
    if length > CALL_BYTES_MAX {
        return Err(format_err!(
            "it requested {length} random bytes in one call; the maximum is {CALL_BYTES_MAX}"
        ));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length)?);
    while let left @ 1.. = length - bytes.len() as u64 {
        let guest = store.data_mut();
        bytes.extend(make(guest.random(), left.min(PIECE_BYTES))?);
        if matches!(slice::at_tick(guest.program.lane.clock()), UpdateDeadline::Yield(_)) {
            tokio::task::yield_now().await;
        }
    }
    Ok(bytes)
}
