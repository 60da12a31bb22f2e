//! Calls of `wasi:http/handler@0.3`.

use std::future::poll_fn;

use http::Request;
use mayfly_runtime::{Body, CallError};
use wasmtime_wasi_http::{
    WasiHttpView as _,
    p3::{
        self,
        bindings::{Service, ServicePre},
    },
};

use super::{Reply, p2::to_guest};
use crate::{
    failure,
    guest::Guest,
    reuse::{Instance, Store},
};

/// A new instance.
pub(crate) async fn instantiate(pre: &ServicePre<Guest>, store: &mut Store) -> wasmtime::Result<Service> {
    pre.instantiate_async(store).await
}

/// One call: the answer goes to `reply`, and the guest goes on until nothing is left for it to do.
pub(crate) async fn call(
    instance: &mut Instance<Service>,
    request: Request<Body>,
    reply: &Reply,
) -> Result<(), CallError> {
    let Instance { store, exports, .. } = instance;
    let (request, sent) = p3::Request::from_http(store.data_mut().http().hooks, to_guest(request));
    let called = store.run_concurrent(async |accessor| -> wasmtime::Result<()> {
        let request = accessor.with(|mut access| access.get().http().table.push(request))?;
        match exports.wasi_http_handler().call_handle(accessor, request).await? {
            Ok(response) => {
                let response = accessor.with(|mut access| {
                    let response = access.get().http().table.delete(response)?;
                    response.into_http(&mut access, sent)
                })?;
                reply.put(Ok(response));
            }
            Err(code) => reply.put(Err(format!("{code:?}"))),
        }
        poll_fn(|cx| accessor.poll_no_interesting_tasks(cx)).await;
        Ok(())
    });
    called.await.flatten().map_err(|error| {
        reply.rescue();
        failure::call_error(&error, &store.data().memory)
    })
}
