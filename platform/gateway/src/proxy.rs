//! The way of one request, from its head to its answer's:
//! route → revision → bounds → a turn → the host → the answer's headers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, Uri, Version, header, uri::PathAndQuery};
use hyper::body::Incoming;
use mayfly_runtime::{Answer, Body, CallError};
use tokio::time::Instant;

use crate::{
    body::{self, Bounded, ResponseBody},
    headers::{self, Peer},
    metrics::GatewayCounts,
    refusal::Refusal,
    routes::{Found, Place, Table},
    target::{DemandSignal, Permit, RevisionTarget, Upstream},
};

/// What every request needs. Nothing in it is locked on a request's way.
pub(crate) struct Proxy {
    pub(crate) table: Arc<Table>,
    pub(crate) demand: Arc<DemandSignal>,
    pub(crate) counts: Arc<GatewayCounts>,
    pub(crate) request_bytes_max: u64,
    pub(crate) stall_timeout: Duration,
    pub(crate) trust_forwarded: bool,
}

/// A request that knows its way.
struct Ready {
    target: Arc<RevisionTarget>,
    request: Request<Body>,
    set_cookie: Option<HeaderValue>,
    /// Turns true when more of the body came than the bound allows.
    exceeded: Option<Arc<AtomicBool>>,
}

impl Proxy {
    /// Answers a request from a socket. Dropping the future, or the answer's body, cancels the guest.
    pub(crate) async fn serve(&self, peer: &Peer, mut request: Request<Incoming>) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let id = headers::request_id(request.headers_mut());
        let outcome = match self.prepare(peer, request) {
            Ok(ready) => self.call(ready, arrived).await,
            Err(refusal) => Err(refusal),
        };
        let mut response = outcome.unwrap_or_else(|refusal| {
            self.counts.refused(refusal.code);
            refusal.into_response(id.to_str().unwrap_or_default())
        });
        response.headers_mut().insert(headers::X_REQUEST_ID, id);
        response
    }

    /// Asks a function from inside the process.
    pub(crate) async fn ask(
        &self,
        key: &str,
        mut request: Request<Body>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let arrived = Instant::now();
        let id = headers::request_id(request.headers_mut());
        let outcome = match self.prepare_from_inside(key, request) {
            Ok(ready) => self.call(ready, arrived).await,
            Err(refusal) => Err(refusal),
        };
        let mut response = outcome.inspect_err(|refusal| self.counts.refused(refusal.code))?;
        response.headers_mut().insert(headers::X_REQUEST_ID, id);
        Ok(response)
    }

    /// Everything that can be done without waiting.
    fn prepare(&self, peer: &Peer, mut request: Request<Incoming>) -> Result<Ready, Refusal> {
        headers::strip_hop_by_hop(request.headers_mut());
        let hosts = request.headers().get_all(header::HOST).iter().count();
        if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
            return Err(Refusal::not_one_host(hosts));
        }
        let host = settle_host(&mut request);
        peer.forward(request.headers_mut(), host, self.trust_forwarded);
        let found = self.table.find(&Place::of(request.uri(), request.headers()))?;
        let (target, set_cookie) = choose(&found, request.headers())?;
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
                Ok(Ready { target, request: Request::from_parts(parts, body), set_cookie, exceeded })
            }
        }
    }

    /// The path is the function's own already, as it is under the function's host.
    fn prepare_from_inside(&self, key: &str, request: Request<Body>) -> Result<Ready, Refusal> {
        let found = Found { by_host: true, ..self.table.find(&Place::Path { key })? };
        let (target, set_cookie) = choose(&found, request.headers())?;
        Ok(Ready { target, request, set_cookie, exceeded: None })
    }

    /// Waits for a turn, calls the revision, and makes its answer the client's.
    async fn call(&self, ready: Ready, arrived: Instant) -> Result<Response<ResponseBody>, Refusal> {
        let Ready { target, request, set_cookie, exceeded } = ready;
        let access = AccessLog::of(&request);
        let called = self.answer(&target, request, arrived).await;
        let answered = if exceeded.is_some_and(|exceeded| exceeded.load(Ordering::Acquire)) {
            Err(Refusal::request_too_large(self.request_bytes_max))
        } else {
            called.map(|(answer, permit, queue)| response(answer, permit, queue, set_cookie))
        };
        if let Some(access) = access {
            access.write(&target, &answered, arrived);
        }
        answered
    }

    async fn answer(
        &self,
        target: &Arc<RevisionTarget>,
        request: Request<Body>,
        arrived: Instant,
    ) -> Result<(Answer, Permit, Duration), Refusal> {
        if let Upstream::Unavailable(refusal) = &**target.upstream.load() {
            return Err(refusal.clone());
        }
        let deadline = arrived + target.timeout;
        let mut permit = match target.admit(&self.demand, arrived, deadline).await {
            Ok(permit) => permit,
            Err(refusal) => {
                let counts = target.traffic.counts();
                counts.ended(Some(refusal.code.status().as_u16()), arrived.elapsed());
                return Err(refusal);
            }
        };
        let started = permit.started();
        let call = match &**target.upstream.load() {
            Upstream::Local(function) => function.call(request, deadline),
            Upstream::Unavailable(refusal) => return Err(refusal.clone()),
        };
        let called = call.await;
        let lacks_component = matches!(called, Err(CallError::ComponentMissing(_)));
        // Read on every request, written when it changes.
        if lacks_component != target.lacks_component.load(Ordering::Relaxed) {
            target.lacks_component.store(lacks_component, Ordering::Relaxed);
        }
        match called {
            Ok(answer) => {
                target.gate.note_run(started.elapsed());
                permit.status = Some(answer.response.status().as_u16());
                let (queue, timings) = (started - arrived, &answer.timings);
                if !queue.is_zero() || timings.cold {
                    let counts = target.traffic.counts();
                    if !queue.is_zero() {
                        counts.queue.observe(queue);
                    }
                    if timings.cold {
                        counts.cold.observe(timings.load + timings.instantiate);
                    }
                }
                Ok((answer, permit, queue))
            }
            Err(error) => {
                if let CallError::Internal(cause) = &error {
                    tracing::error!(revision = %target.key, %cause, "the host could not run a request");
                }
                let refusal = Refusal::from(error);
                permit.status = Some(refusal.code.status().as_u16());
                Err(refusal)
            }
        }
    }
}

/// The revision that answers, and the cookie that keeps the client with it.
fn choose(found: &Found, headers: &HeaderMap) -> Result<(Arc<RevisionTarget>, Option<HeaderValue>), Refusal> {
    let choice = found.route.choose(headers, found.tag.as_deref(), found.by_host)?;
    Ok((choice.target.clone(), choice.set_cookie.cloned()))
}

/// The guest's answer as the client gets it.
fn response(
    answer: Answer,
    permit: Permit,
    queue: Duration,
    set_cookie: Option<HeaderValue>,
) -> Response<ResponseBody> {
    let Answer { response, timings } = answer;
    let mut response = response.map(|body| ResponseBody::guest(body, permit));
    let answer_headers = response.headers_mut();
    headers::strip_hop_by_hop(answer_headers);
    answer_headers.insert(headers::SERVER_TIMING, headers::server_timing(queue, &timings));
    if timings.cold {
        answer_headers.insert(headers::MAYFLY_COLD, HeaderValue::from_static("true"));
    }
    if let Some(cookie) = set_cookie.filter(|cookie| !sets_cookie(answer_headers, cookie)) {
        answer_headers.append(header::SET_COOKIE, cookie);
    }
    response
}

/// Whether the function sets the same cookie itself: then the visitor stays by its value.
fn sets_cookie(answer: &HeaderMap, cookie: &HeaderValue) -> bool {
    let name = |value: &HeaderValue| {
        let bytes = value.as_bytes();
        bytes.iter().position(|byte| *byte == b'=').map(|end| bytes[..end].trim_ascii().to_vec())
    };
    let ours = name(cookie);
    answer.get_all(header::SET_COOKIE).iter().any(|theirs| name(theirs) == ours)
}

/// Puts the host into the `host` header, wherever the client put it, and leaves the path alone in the URI:
/// one form for guests, whichever HTTP the client speaks. Returns the host.
fn settle_host(request: &mut Request<Incoming>) -> Option<HeaderValue> {
    if let Some(authority) = request.uri().authority() {
        let value = HeaderValue::from_str(authority.as_str()).ok()?;
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = path.map_or(Uri::from_static("/"), Uri::from);
        request.headers_mut().insert(header::HOST, value);
    }
    request.headers().get(header::HOST).cloned()
}

/// What is left of a path behind its function's prefix: `/` at least.
fn without_prefix(uri: &Uri, prefix_bytes: usize) -> Uri {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let rest = match whole.get(prefix_bytes..) {
        None | Some("" | "/") => return Uri::from_static("/"),
        Some(rest) if rest.starts_with('/') => Bytes::copy_from_slice(rest.as_bytes()),
        Some(rest) => Bytes::from(format!("/{rest}")),
    };
    PathAndQuery::from_maybe_shared(rest).map_or(Uri::from_static("/"), Uri::from)
}

/// One line for each request, when somebody wants to see them.
struct AccessLog {
    method: http::Method,
    path: String,
    request_id: HeaderValue,
}

impl AccessLog {
    fn of(request: &Request<Body>) -> Option<Self> {
        if !tracing::enabled!(target: "mayfly_gateway::access", tracing::Level::DEBUG) {
            return None;
        }
        let request_id = request.headers().get(headers::X_REQUEST_ID).cloned();
        Some(Self {
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            request_id: request_id.unwrap_or(HeaderValue::from_static("")),
        })
    }

    fn write(
        self,
        target: &RevisionTarget,
        outcome: &Result<Response<ResponseBody>, Refusal>,
        arrived: Instant,
    ) {
        let (status, code, timing) = match outcome {
            Ok(response) => (response.status(), "", response.headers().get(headers::SERVER_TIMING)),
            Err(refusal) => (refusal.code.status(), refusal.code.as_str(), None),
        };
        tracing::debug!(
            target: "mayfly_gateway::access",
            revision = %target.key,
            method = %self.method,
            path = self.path,
            status = status.as_u16(),
            refusal = code,
            request_id = self.request_id.to_str().unwrap_or_default(),
            took_us = u64::try_from(arrived.elapsed().as_micros()).unwrap_or(u64::MAX),
            timing = timing.and_then(|timing| timing.to_str().ok()).unwrap_or_default(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_of_the_functions_own_is_left_alone() {
        let ours = HeaderValue::from_static("session=hello-00001; Path=/fn/ns/hello");
        for (theirs, same) in [("session=abc; Path=/", true), ("session2=abc", false), ("a=session=x", false)]
        {
            let answer = HeaderMap::from_iter([(header::SET_COOKIE, HeaderValue::from_static(theirs))]);
            assert_eq!(sets_cookie(&answer, &ours), same, "{theirs}");
        }
        assert!(!sets_cookie(&HeaderMap::new(), &ours));
    }

    #[test]
    fn the_guest_sees_the_rest_of_the_path() {
        for (path, rest) in [
            ("/fn/ns/hello", "/"),
            ("/fn/ns/hello/", "/"),
            ("/fn/ns/hello/a//b?c=%20d", "/a//b?c=%20d"),
            ("/fn/ns/hello?x=1", "/?x=1"),
        ] {
            assert_eq!(without_prefix(&path.parse().unwrap(), "/fn/ns/hello".len()), rest, "{path}");
        }
    }
}
