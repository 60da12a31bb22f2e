//! Calls of `wasi:http/handler@0.3`.

use std::{future::poll_fn, pin::Pin};

use http::{
    Request, Uri,
    header::HOST,
    uri::{Authority, PathAndQuery, Scheme},
};
use mayfly_runtime::{Body, CallError};
use wasmtime::component::Resource;
use wasmtime_wasi_http::{
    Error, WasiHttpView as _,
    p3::{
        self,
        bindings::{Service, ServicePre},
    },
};

use super::{GuestReply, p2::to_guest};
use crate::{
    failure,
    guest::StoreData,
    reuse::{Instance, Store},
};

/// A new instance.
pub(crate) async fn instantiate(pre: &ServicePre<StoreData>, store: &mut Store) -> wasmtime::Result<Service> {
    pre.instantiate_async(store).await
}

/// One call, with its request already in the store of the instance that will run it. The answer goes to `reply`, and
/// the guest continues until it has no work left.
pub(crate) struct Preview3Call {
    request: Resource<p3::Request>,
    sent: Sent,
    reply: GuestReply,
}

/// Completes when the request's body has been sent.
type Sent = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

impl Preview3Call {
    pub(crate) fn new(
        store: &mut Store,
        request: Request<Body>,
        reply: &GuestReply,
    ) -> Result<Self, CallError> {
        let http = store.data_mut().http();
        let (request, sent) = p3::Request::from_http(http.hooks, with_authority(to_guest(request)));
        let pushed = http.table.push(request).map_err(wasmtime::Error::from);
        let request = pushed.map_err(|error| failure::call_error(&error, &store.data().memory))?;
        Ok(Self { request, sent: Box::pin(sent), reply: reply.clone() })
    }

    /// Records that its instance exists.
    pub(crate) fn instantiated(&self) {
        self.reply.instantiated();
    }

    pub(crate) async fn run(self, instance: &mut Instance<Service>) -> Result<(), CallError> {
        let Self { request, sent, reply } = self;
        let Instance { store, exports, .. } = instance;
        let called = store.run_concurrent(async |accessor| -> wasmtime::Result<()> {
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
            reply.drain_body();
            let error = failure::call_error(&error, &store.data().memory);
            reply.fail(&error);
            error
        })
    }
}

/// Adds scheme and authority to the request's URI, where the bindings read them. A received request may have the
/// authority in its `host` header only.
fn with_authority<B>(mut request: Request<B>) -> Request<B> {
    let host = request.headers().get(HOST).map(|host| Authority::try_from(host.as_bytes()));
    if request.uri().authority().is_none()
        && let Some(Ok(authority)) = host
    {
        let mut parts = request.uri().clone().into_parts();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(authority);
        parts.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_request_has_its_hosts_authority() {
        for (host, uri, expected) in [
            (Some("a:1"), "/x?y", "http://a:1/x?y"),
            (Some("a"), "/", "http://a/"),
            (Some("a:1"), "http://b/x", "http://b/x"),
            (Some("a/b"), "/x?y", "/x?y"),
            (None, "/x?y", "/x?y"),
        ] {
            let mut request = Request::new(());
            *request.uri_mut() = Uri::from_static(uri);
            if let Some(host) = host {
                request.headers_mut().insert(HOST, HeaderValue::from_static(host));
            }
            assert_eq!(with_authority(request).uri().to_string(), expected, "{host:?} {uri}");
        }
    }
}
