//! Handles one request: route, revision, limits, queue, host, and the headers of the response.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, header};
use hyper::body::Incoming;
use mayfly_api::ObjectKey;
use mayfly_runtime::{Answer, Body, wire::DrainOnDrop};
use tokio::time::Instant;

use crate::{
    access_log::AccessLog,
    body::{self, Bounded, ResponseBody},
    headers::{self, Peer},
    ingress::{
        IngressBackend, IngressTable, SpinRoute,
        forward::{EndpointForwarder, Upgrade},
    },
    invocations::{self, InvocationQueue},
    metrics::GatewayCounts,
    nodes::Peers,
    refusal::Refusal,
    rewrite::{normalise_host, without_prefix},
    routes::{self, FoundRoute, RoutePlace, RouteTable, SetCookie},
    run::{RequestTurn, RunAnswer},
    target::{DemandSignal, RevisionTarget},
};

/// The state that all requests share. No part of it is locked while a request is handled.
#[derive(Clone)]
pub(crate) struct Proxy {
    pub(crate) table: Arc<RouteTable>,
    pub(crate) ingress: Arc<ArcSwap<IngressTable>>,
    pub(crate) forwarder: Arc<EndpointForwarder>,
    pub(crate) demand: Arc<DemandSignal>,
    pub(crate) counts: Arc<GatewayCounts>,
    pub(crate) request_bytes_max: u64,
    pub(crate) stall_timeout: Duration,
    pub(crate) trust_forwarded: bool,
    /// The other gateways of the cluster.
    pub(crate) peers: Peers,
    /// Receives asynchronous invocations. `None`: they are refused.
    pub(crate) queue: Option<Arc<dyn InvocationQueue>>,
}

/// The origin of a request from a socket.
struct Origin<'a> {
    /// `namespace/name`, if the listener or an Ingress determines the function.
    function: Option<&'a str>,
    /// The route of a Spin application's component.
    spin: Option<&'a SpinRoute>,
}

/// A request with a checked head and a route.
enum Prepared {
    Call(Ready),
    /// An asynchronous invocation.
    Enqueue {
        function: ObjectKey,
        request: Request<Body>,
        exceeded: Option<Arc<AtomicBool>>,
    },
}

/// A request with a resolved target.
struct Ready {
    target: Arc<RevisionTarget>,
    request: Request<Body>,
    set_cookie: Option<SetCookie>,
    /// Becomes true when the body exceeds the limit.
    exceeded: Option<Arc<AtomicBool>>,
}

impl Proxy {
    /// Handles a request from a socket. Dropping the future, or the response's body, cancels the guest.
    ///
    /// All work that does not wait, including the start of the call, is done before the future is returned, which keeps
    /// it small.
    pub(crate) fn serve(
        &self,
        peer: &Peer,
        mut request: Request<Incoming>,
    ) -> impl Future<Output = Response<ResponseBody>> + use<'_> {
        let arrived = Instant::now();
        let id = headers::request_id(request.headers_mut());
        let begun = match self.ingress_backend(peer, &request) {
            Some(backend) => self.begin_ingress(peer, request, backend, arrived),
            None => {
                let prepared = self.prepare(peer, request, &Origin { function: peer.function(), spin: None });
                prepared.map(|prepared| self.begin_prepared(prepared, arrived))
            }
        };
        async move {
            let outcome = match begun {
                Ok(Continuation::Function(begun)) => self.end(begun).await,
                Ok(Continuation::Other(answering)) => answering.await,
                Err(refusal) => Err(refusal),
            };
            let mut response = outcome.unwrap_or_else(|refusal| {
                self.counts.refused(refusal.code);
                refusal.into_response(id.to_str().unwrap_or_default())
            });
            response.headers_mut().insert(headers::X_REQUEST_ID, id);
            response
        }
    }

    /// Handles a request from inside the process.
    pub(crate) async fn ask(
        &self,
        key: &str,
        mut request: Request<Body>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let arrived = Instant::now();
        let id = headers::request_id(request.headers_mut());
        let outcome = match self.prepare_from_inside(key, request) {
            Ok(prepared) => match self.begin_prepared(prepared, arrived) {
                Continuation::Function(begun) => self.end(begun).await,
                Continuation::Other(answering) => answering.await,
            },
            Err(refusal) => Err(refusal),
        };
        let mut response = outcome.inspect_err(|refusal| self.counts.refused(refusal.code))?;
        response.headers_mut().insert(headers::X_REQUEST_ID, id);
        Ok(response)
    }

    /// The function for a call from inside the process, if it exists.
    pub(crate) fn find(&self, key: &str) -> Result<(), Refusal> {
        self.table.find(&RoutePlace::Path { key }).map(|_| ())
    }

    /// The backend that the Ingresses choose for a request: hosts of Ingresses take precedence over functions, an
    /// Ingress without a host comes after them.
    fn ingress_backend(&self, peer: &Peer, request: &Request<Incoming>) -> Option<Arc<IngressBackend>> {
        let table = self.ingress.load();
        if table.is_empty() || peer.function().is_some() {
            return None;
        }
        let (uri, headers) = (request.uri(), request.headers());
        let path = routes::comparable_path(uri.path());
        let of_host = routes::host_of(uri, headers).and_then(|host| table.of_host(host, &path));
        let is_nowhere = || RoutePlace::of(uri, headers) == RoutePlace::Nowhere;
        of_host.or_else(|| is_nowhere().then(|| table.of_any_host(&path))?).cloned()
    }

    fn begin_ingress(
        &self,
        peer: &Peer,
        mut request: Request<Incoming>,
        backend: Arc<IngressBackend>,
        arrived: Instant,
    ) -> Result<Continuation, Refusal> {
        if let IngressBackend::Function { key, spin } = &*backend {
            let origin = Origin { function: Some(&**key), spin: spin.as_ref() };
            let prepared = self.prepare(peer, request, &origin)?;
            return Ok(self.begin_prepared(prepared, arrived));
        }
        let protocol = headers::upgrade(request.headers()).filter(|_| request.version() == Version::HTTP_11);
        let upgrade = protocol.map(|protocol| Upgrade { protocol, client: hyper::upgrade::on(&mut request) });
        let mut request = DrainOnDrop::wrap(request);
        self.rewrite_head(peer, &mut request)?;
        let (parts, incoming) = request.into_parts();
        let (body, exceeded) = match body::bounded(incoming, self.request_bytes_max, self.stall_timeout) {
            Bounded::TooLarge => return Err(Refusal::request_too_large(self.request_bytes_max)),
            Bounded::Body { body, exceeded } => (body, exceeded),
        };
        let (forwarder, limit) = (self.forwarder.clone(), self.request_bytes_max);
        Ok(Continuation::Other(Box::pin(async move {
            let IngressBackend::Endpoints(service) = &*backend else { return Err(Refusal::no_route()) };
            let answered = forwarder.forward(service, Request::from_parts(parts, body), upgrade).await;
            match exceeded.is_some_and(|exceeded| exceeded.load(Ordering::Acquire)) {
                true => Err(Refusal::request_too_large(limit)),
                false => answered,
            }
        })))
    }

    /// Checks a request's head, and rewrites it for the function or endpoint.
    fn rewrite_head(&self, peer: &Peer, request: &mut Request<DrainOnDrop<Incoming>>) -> Result<(), Refusal> {
        if request.method() == Method::CONNECT {
            return Err(Refusal::tunnel());
        }
        if headers::has_other_coding(request.headers()) {
            return Err(Refusal::transfer_coding());
        }
        headers::strip_hop_by_hop(request.headers_mut());
        if request.version() == Version::HTTP_2 {
            headers::join_cookies(request.headers_mut());
        }
        let hosts = request.headers().get_all(header::HOST).iter().count();
        if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
            return Err(Refusal::not_one_host(hosts));
        }
        let host = normalise_host(request);
        if host.as_ref().is_some_and(|host| host.to_str().is_err()) {
            return Err(Refusal::host_is_no_text());
        }
        peer.forward(request.headers_mut(), host, self.trust_forwarded);
        Ok(())
    }

    /// The non-blocking part of handling a request.
    fn prepare(
        &self,
        peer: &Peer,
        request: Request<Incoming>,
        origin: &Origin<'_>,
    ) -> Result<Prepared, Refusal> {
        let mut request = DrainOnDrop::wrap(request);
        self.rewrite_head(peer, &mut request)?;
        if let Some(spin) = origin.spin {
            let uri = request.uri().clone();
            let headers = request.headers_mut();
            let scheme = headers.get(headers::X_FORWARDED_PROTO).and_then(|scheme| scheme.to_str().ok());
            let scheme = scheme.unwrap_or("http").to_owned();
            spin.describe(headers, &uri, &scheme, peer.socket_address());
        }
        let found = match origin.function {
            Some(key) => FoundRoute { by_host: true, ..self.table.find(&RoutePlace::Path { key })? },
            None => self.find_route(&mut request)?,
        };
        let is_async = invocations::is_async(request.headers())?;
        if found.by_host {
            request.headers_mut().remove(headers::X_FORWARDED_PREFIX);
        } else {
            let prefix = found.route.prefix.clone();
            *request.uri_mut() = without_prefix(request.uri(), prefix.len());
            request.headers_mut().insert(headers::X_FORWARDED_PREFIX, prefix);
        }
        let (parts, incoming) = request.into_parts();
        match body::bounded(incoming, self.request_bytes_max, self.stall_timeout) {
            Bounded::TooLarge => Err(Refusal::request_too_large(self.request_bytes_max)),
            Bounded::Body { body, exceeded } => {
                prepared(&found, is_async, Request::from_parts(parts, body), exceeded)
            }
        }
    }

    /// The route of a request that names its function by host or path; private functions have no such route.
    fn find_route(&self, request: &mut Request<DrainOnDrop<Incoming>>) -> Result<FoundRoute, Refusal> {
        let found = self.find_any_route(request)?;
        if found.route.is_private() {
            return Err(Refusal::no_function(&found.route.key.namespace, &found.route.key.name));
        }
        Ok(found)
    }

    /// The request's route. Function names contain no `%`: an address without a route is looked up again with its
    /// percent-encodings decoded.
    fn find_any_route(&self, request: &mut Request<DrainOnDrop<Incoming>>) -> Result<FoundRoute, Refusal> {
        let found = self.table.find(&RoutePlace::of(request.uri(), request.headers()));
        if found.is_err()
            && let Some(plain) = routes::with_unreserved_decoded(request.uri())
        {
            *request.uri_mut() = plain;
            return self.table.find(&RoutePlace::of(request.uri(), request.headers()));
        }
        found
    }

    /// The path is already relative to the function, as under the function's own host.
    fn prepare_from_inside(&self, key: &str, request: Request<Body>) -> Result<Prepared, Refusal> {
        let found = FoundRoute { by_host: true, ..self.table.find(&RoutePlace::Path { key })? };
        prepared(&found, invocations::is_async(request.headers())?, request, None)
    }

    /// Calls the revision if the request is admitted, or queues the asynchronous invocation.
    fn begin_prepared(&self, prepared: Prepared, arrived: Instant) -> Continuation {
        match prepared {
            Prepared::Call(ready) => Continuation::Function(self.begin(ready, arrived)),
            Prepared::Enqueue { function, request, exceeded } => {
                let (queue, limit) = (self.queue.clone(), self.request_bytes_max);
                Continuation::Other(Box::pin(async move {
                    let queued = invocations::enqueue(queue.as_deref(), function, request).await;
                    match exceeded.is_some_and(|exceeded| exceeded.load(Ordering::Acquire)) {
                        true => Err(Refusal::request_too_large(limit)),
                        false => queued,
                    }
                }))
            }
        }
    }

    /// Calls the revision, if the request is admitted.
    fn begin(&self, ready: Ready, arrived: Instant) -> StartedRequest {
        let Ready { target, request, set_cookie, exceeded } = ready;
        let access = AccessLog::of(&request);
        let turn = self.turn(&target, request, arrived);
        StartedRequest { target, turn, arrived, set_cookie, exceeded, access }
    }

    fn turn(&self, target: &Arc<RevisionTarget>, request: Request<Body>, arrived: Instant) -> RequestTurn {
        let deadline = arrived + target.timeout;
        if let Peers::Leader(leader) = &self.peers
            && leader.is_for_leader(target)
        {
            return RequestTurn::Forwarded(leader.call(target, &self.demand, request, arrived, deadline));
        }
        RequestTurn::begin(target, &self.demand, self.peers.nodes(), None, request, arrived, deadline)
    }

    /// Waits for the revision's response, and converts it for the client.
    async fn end(&self, begun: StartedRequest) -> Result<Response<ResponseBody>, Refusal> {
        let StartedRequest { target, turn, arrived, set_cookie, exceeded, access } = begun;
        let called = turn.end(&target, arrived).await;
        let answered = if exceeded.is_some_and(|exceeded| exceeded.load(Ordering::Acquire)) {
            Err(Refusal::request_too_large(self.request_bytes_max))
        } else {
            called.map(|answered| response(answered, set_cookie))
        };
        if let Some(access) = access {
            access.write(&target, &answered, arrived);
        }
        answered
    }
}

/// The continuation of a request.
enum Continuation {
    Function(StartedRequest),
    /// The endpoints of a Service, or the queue of asynchronous invocations.
    Other(BoxFuture<'static, Result<Response<ResponseBody>, Refusal>>),
}

/// A request that was started, or waits for admission.
struct StartedRequest {
    target: Arc<RevisionTarget>,
    turn: RequestTurn,
    arrived: Instant,
    set_cookie: Option<SetCookie>,
    exceeded: Option<Arc<AtomicBool>>,
    access: Option<AccessLog>,
}

/// Chooses the revision for the request, and the cookie that keeps the client on it.
fn choose(
    found: &FoundRoute,
    headers: &HeaderMap,
) -> Result<(Arc<RevisionTarget>, Option<SetCookie>), Refusal> {
    let choice = found.route.choose(headers, found.tag.as_deref(), found.by_host)?;
    Ok((choice.target.clone(), choice.set_cookie))
}

/// Resolves the target of a request, except for an asynchronous invocation, whose target is resolved when it is
/// executed.
fn prepared(
    found: &FoundRoute,
    is_async: bool,
    mut request: Request<Body>,
    exceeded: Option<Arc<AtomicBool>>,
) -> Result<Prepared, Refusal> {
    if is_async {
        if let Some(tag) = found.tag.as_deref().and_then(|tag| HeaderValue::try_from(tag).ok()) {
            request.headers_mut().insert(routes::HEADER_TAG, tag);
        }
        return Ok(Prepared::Enqueue { function: found.route.key.clone(), request, exceeded });
    }
    let (target, set_cookie) = choose(found, request.headers())?;
    Ok(Prepared::Call(Ready { target, request, set_cookie, exceeded }))
}

/// The guest's response in the client's form.
fn response(answered: RunAnswer, set_cookie: Option<SetCookie>) -> Response<ResponseBody> {
    let RunAnswer { answer: Answer { response, timings }, permit, queue } = answered;
    let mut response = response.map(|body| ResponseBody::guest(body, permit));
    let answer_headers = response.headers_mut();
    headers::strip_hop_by_hop(answer_headers);
    // Appended to the guest's own timings, if it sends any.
    answer_headers.append(headers::SERVER_TIMING, headers::server_timing(queue, &timings));
    if timings.cold {
        answer_headers.insert(headers::MAYFLY_COLD, HeaderValue::from_static("true"));
    }
    if let Some(cookie) = set_cookie.and_then(|set_cookie| set_cookie.beside(answer_headers)) {
        answer_headers.append(header::SET_COOKIE, cookie);
    }
    response
}
