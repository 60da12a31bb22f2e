//! The interfaces that a guest may import, all linked in this module: `wasi:cli` (environment, outputs into the log;
//! input only for jobs), `wasi:clocks`, `wasi:random`, `wasi:http`, `wasi:config`, and the variables of Spin.
//! Interfaces of files and sockets exist because toolchains import them: sockets cannot be created, and the only files
//! are those of the function (`spec.files`) and the folders of a job (`mayfly_api::job_io`).

use wasmtime::{Engine, component::Linker};

use crate::{engine::AsyncModel, guest::StoreData};

pub(crate) mod body;
pub(crate) mod capture;
pub(crate) mod connect;
pub(crate) mod egress;
pub(crate) mod lookup;
pub(crate) mod output;
pub(crate) mod policy;
pub(crate) mod random;
pub(crate) mod response_body;
mod variables;

pub(crate) fn linker(engine: &Engine, model: AsyncModel) -> wasmtime::Result<Linker<StoreData>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(&mut linker)?;
    response_body::link(&mut linker)?;
    random::link(&mut linker)?;
    wasmtime_wasi_config::add_to_linker(&mut linker, |guest: &mut StoreData| guest.program.config().into())?;
    variables::link(&mut linker)?;
    if model == AsyncModel::Async {
        wasmtime_wasi::p3::add_to_linker(&mut linker)?;
        wasmtime_wasi_http::p3::add_to_linker(&mut linker)?;
    }
    Ok(linker)
}

#[cfg(test)]
mod tests;
