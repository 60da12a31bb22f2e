//! Forwards requests of an Ingress to the endpoints of a Service over pooled HTTP/1.1 connections; a connection that
//! switches protocols (WebSocket) becomes a pair of byte streams.

use std::{collections::HashSet, io, net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header, uri::Authority};
use http_body_util::BodyExt as _;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use mayfly_runtime::Body;
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::plan::ServiceEndpoints;
use crate::{
    body::{self, ResponseBody},
    headers,
    listen::{OpenRequest, PROBE_AFTER, probe_silent_peer},
    refusal::{Refusal, RefusalCode},
    unread_body::{LentBody, UnreadBody},
};

/// The timeout of connecting to an endpoint.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout for an endpoint's response head.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// The number of endpoints tried for one request.
const ATTEMPTS: usize = 3;
/// The number of idle connections kept to each endpoint, and their lifetime: less than a server's usual keep-alive
/// timeout (5 s in Node).
const IDLE_CONNECTIONS_MAX: usize = 64;
const IDLE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(4);
/// The number of upgraded connections: each holds two sockets.
const UPGRADED_MAX: usize = 4096;

/// Forwards requests to endpoints.
pub(crate) struct EndpointForwarder {
    client: Client<HttpConnector, LentBody>,
    upgraded: Arc<Semaphore>,
    /// Closes upgraded connections.
    cut: CancellationToken,
}

/// A client's request to switch the connection's protocol.
pub(crate) struct Upgrade {
    pub(crate) protocol: HeaderValue,
    pub(crate) client: OnUpgrade,
}

impl EndpointForwarder {
    pub(crate) fn new(cut: CancellationToken) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(IDLE_CONNECTION_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .build({
                let mut connector = HttpConnector::new();
                connector.set_nodelay(true);
                connector.set_keepalive(Some(PROBE_AFTER));
                connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
                connector
            });
        Self { client, upgraded: Arc::new(Semaphore::new(UPGRADED_MAX)), cut }
    }

    /// Tries one endpoint after the other. A request that has not reached an endpoint is sent to the next one; a
    /// request that may have been processed, because its connection broke before the response, is only repeated if it
    /// is idempotent.
    pub(crate) async fn forward(
        &self,
        service: &ServiceEndpoints,
        request: Request<Body>,
        upgrade: Option<Upgrade>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        if let Some(upgrade) = upgrade {
            return self.upgrade(service, request, upgrade).await;
        }
        let (parts, body) = request.into_parts();
        let repeats = parts.method.is_idempotent() && http_body::Body::is_end_stream(&body);
        let unread = UnreadBody::default();
        let mut next = Some(body);
        let mut refusing = HashSet::new();
        let mut last = no_endpoint(service);
        for endpoint in service.in_turn().cycle().take(ATTEMPTS) {
            if refusing.contains(&endpoint) {
                continue;
            }
            let Some(body) = next.take() else { break };
            let mut request = Request::from_parts(parts.clone(), unread.lend(body));
            address(&mut request, endpoint);
            match timeout(ANSWER_TIMEOUT, self.client.request(request)).await {
                Ok(Ok(response)) => return Ok(answer(response)),
                Ok(Err(error)) => {
                    last = no_answer(service, endpoint, &error);
                    let is_refused = error.is_connect();
                    if is_refused {
                        refusing.insert(endpoint);
                    }
                    next = unread.take().filter(|_| is_refused).or_else(|| repeats.then(body::empty));
                }
                Err(_) => return Err(too_slow(service, endpoint)),
            }
        }
        Err(last)
    }

    async fn upgrade(
        &self,
        service: &ServiceEndpoints,
        mut request: Request<Body>,
        Upgrade { protocol, client }: Upgrade,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let Ok(permit) = self.upgraded.clone().try_acquire_owned() else {
            return Err(Refusal::new(
                RefusalCode::Overloaded,
                format!("{UPGRADED_MAX} upgraded connections are open already"),
                "try again later",
            ));
        };
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(header::UPGRADE, protocol);
        let mut last = no_endpoint(service);
        for endpoint in service.in_turn().take(ATTEMPTS) {
            let stream = match timeout(CONNECT_TIMEOUT, TcpStream::connect(endpoint)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => {
                    last = no_answer(service, endpoint, &error);
                    continue;
                }
                Err(_) => {
                    last = too_slow(service, endpoint);
                    continue;
                }
            };
            // A failure only costs latency, or the connection for as long as a peer that has vanished keeps it.
            let _ = (stream.set_nodelay(true), probe_silent_peer(&stream));
            let broken = |error: hyper::Error| no_answer(service, endpoint, &error);
            let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
            let (mut sender, connection) = shaken.map_err(broken)?;
            // Detached: it ends with the exchange, or with the upgraded streams.
            drop(tokio::spawn(connection.with_upgrades()));
            address(&mut request, endpoint);
            *request.uri_mut() =
                request.uri().path_and_query().map_or(Uri::from_static("/"), |path| path.clone().into());
            let sent = timeout(ANSWER_TIMEOUT, sender.send_request(request)).await;
            let mut response = sent.map_err(|_| too_slow(service, endpoint))?.map_err(broken)?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Ok(answer(response));
            }
            let endpoint = hyper::upgrade::on(&mut response);
            let (active, held) = oneshot::channel();
            let (parts, _) = response.into_parts();
            drop(tokio::spawn(joined(client, endpoint, held, permit, self.cut.clone())));
            return Ok(Response::from_parts(parts, ResponseBody::upgraded(active)));
        }
        Err(last)
    }
}

/// Copies bytes both ways until both sides have ended. `active` keeps the client's connection from counting as idle.
async fn joined(
    client: OnUpgrade,
    endpoint: OnUpgrade,
    active: oneshot::Receiver<OpenRequest>,
    _permit: OwnedSemaphorePermit,
    cut: CancellationToken,
) {
    let copied = async {
        let _active = active.await;
        let (client, endpoint) = tokio::try_join!(client, endpoint).map_err(io::Error::other)?;
        copy(client, endpoint).await
    };
    if let Some(Err(error)) = cut.run_until_cancelled(copied).await {
        tracing::debug!(%error, "an upgraded connection ended early");
    }
}

async fn copy(client: Upgraded, endpoint: Upgraded) -> io::Result<()> {
    let (mut client, mut endpoint) = (TokioIo::new(client), TokioIo::new(endpoint));
    tokio::io::copy_bidirectional(&mut client, &mut endpoint).await.map(|_| ())
}

/// Sets the endpoint's address; the `host` header remains the client's.
fn address<B>(request: &mut Request<B>, endpoint: SocketAddr) {
    let path = request.uri().path_and_query().cloned();
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(http::uri::Scheme::HTTP);
    parts.authority = Authority::try_from(endpoint.to_string()).ok();
    parts.path_and_query = path.or_else(|| Some(http::uri::PathAndQuery::from_static("/")));
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    *request.version_mut() = Version::HTTP_11;
}

fn answer(response: Response<hyper::body::Incoming>) -> Response<ResponseBody> {
    let mut response = response.map(|body| ResponseBody::forwarded(body.map_err(Into::into).boxed_unsync()));
    headers::strip_hop_by_hop(response.headers_mut());
    response
}

fn no_endpoint(service: &ServiceEndpoints) -> Refusal {
    let hint = "see `kubectl get endpointslices` and `mayfly network show service`";
    Refusal::new(RefusalCode::NotReady, format!("Service {}: {}", service.service, service.missing), hint)
}

fn no_answer(service: &ServiceEndpoints, endpoint: SocketAddr, error: &dyn std::error::Error) -> Refusal {
    let cause = error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
    let message = format!("endpoint {endpoint} of Service {} gave no answer: {cause}", service.service);
    Refusal::new(RefusalCode::NoAnswer, message, "see the logs of its pod; it may have been ended")
}

fn too_slow(service: &ServiceEndpoints, endpoint: SocketAddr) -> Refusal {
    let message = format!("endpoint {endpoint} of Service {} gave no answer in time", service.service);
    Refusal::new(RefusalCode::TimedOut, message, "see the logs of its pod")
}
