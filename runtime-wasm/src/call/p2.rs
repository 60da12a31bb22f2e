//! Calls of `wasi:http/incoming-handler@0.2`.

use http::Request;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Empty};
use mayfly_runtime::{Body, CallError};
use wasmtime::component::Resource;
use wasmtime_wasi_http::{
    Error, WasiBody, WasiHttpView as _,
    p2::{
        bindings::http::types::{IncomingRequest, ResponseOutparam, Scheme},
        bindings::{Proxy, ProxyPre},
    },
};

use super::GuestReply;
use crate::{
    failure,
    guest::StoreData,
    reuse::{Instance, Store},
};

/// A new instance.
pub(crate) async fn instantiate(pre: &ProxyPre<StoreData>, store: &mut Store) -> wasmtime::Result<Proxy> {
    pre.instantiate_async(store).await
}

/// One call, with its arguments already in the store of the instance that will run it. The answer goes to `reply` as
/// soon as the guest sets it.
pub(crate) struct Preview2Call {
    request: Resource<IncomingRequest>,
    answer: Resource<ResponseOutparam>,
    reply: GuestReply,
}

impl Preview2Call {
    pub(crate) fn new(
        store: &mut Store,
        request: Request<Body>,
        reply: &GuestReply,
    ) -> Result<Self, CallError> {
        let made = arguments(store, request, reply);
        let (request, answer) = made.map_err(|error| failure::call_error(&error, &store.data().memory))?;
        Ok(Self { request, answer, reply: reply.clone() })
    }

    /// Records that its instance exists.
    pub(crate) fn instantiated(&self) {
        self.reply.instantiated();
    }

    pub(crate) async fn run(self, instance: &mut Instance<Proxy>) -> Result<(), CallError> {
        let Self { request, answer, reply } = self;
        let handler = instance.exports.wasi_http_incoming_handler();
        handler.call_handle(&mut instance.store, request, answer).await.map_err(|error| {
            reply.drain_body();
            let error = failure::call_error(&error, &instance.store.data().memory);
            reply.fail(&error);
            error
        })
    }
}

fn arguments(
    store: &mut Store,
    request: Request<Body>,
    reply: &GuestReply,
) -> wasmtime::Result<(Resource<IncomingRequest>, Resource<ResponseOutparam>)> {
    let mut http = store.data_mut().http();
    let request = http.new_incoming_request(Scheme::Http, to_guest(request))?;
    let reply = reply.clone();
    let answer = http.new_response_outparam_from_callback(move |answer| {
        reply.put(answer.map_err(|code| format!("{code:?}")));
    })?;
    Ok((request, answer))
}

/// Converts the request to the bindings' type, and adds the authority that they require.
pub(super) fn to_guest(request: Request<Body>) -> Request<WasiBody> {
    let (mut parts, body) = request.into_parts();
    if parts.uri.authority().is_none() && !parts.headers.contains_key(http::header::HOST) {
        parts.headers.insert(http::header::HOST, http::HeaderValue::from_static("localhost"));
    }
    let body = if body.is_end_stream() {
        Empty::new().map_err(|never| match never {}).boxed_unsync()
    } else {
        body.map_err(|error| Error::InternalError(Some(error.to_string()))).boxed_unsync()
    };
    Request::from_parts(parts, body)
}
