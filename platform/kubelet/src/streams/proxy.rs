//! HTTP requests to a port of a pod: the node's end of `pods/x/proxy` and `services/x/proxy`.
//!
//! Containers are reached at the pod's loopback address, as in port-forward; pods of other runtimes at their own
//! address.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse as _, Response},
};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use mayfly_api::k8s::api::core::v1::Pod;
use mayfly_runtime::{PodUid, streams::PortStream};
use serde_json::json;
use tokio::{net::TcpStream, sync::OwnedSemaphorePermit, time::timeout};
use tokio_rustls::rustls::pki_types::ServerName;

use super::{HttpRefusal, PodStreams};
use crate::unverified_tls;

/// The timeout of a connection (upstream's dialer).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// The number of path segments before the pod's path: `/proxy/NAMESPACE/POD/PORT`.
const SEGMENTS: usize = 4;

/// The port of a pod that a request is for: `/proxy/NAMESPACE/POD/[https:]PORT/…`.
#[derive(Debug, PartialEq, Eq)]
struct ProxiedPort<'p> {
    namespace: &'p str,
    pod: &'p str,
    port: u16,
    /// The connection uses TLS; the pod's certificate is not verified (as upstream's).
    tls: bool,
}

impl<'p> ProxiedPort<'p> {
    /// Reads the path itself: the rest of it may not be decodable.
    fn of_path(path: &'p str) -> Option<Self> {
        let mut segments = path.strip_prefix("/proxy/")?.split('/');
        let (namespace, pod, port) = (segments.next()?, segments.next()?, segments.next()?);
        let secure = port.strip_prefix("https:");
        let port = secure.unwrap_or(port).parse().ok()?;
        Some(Self { namespace, pod, port, tls: secure.is_some() })
    }
}

pub(crate) async fn proxy(State(streams): State<PodStreams>, request: Request) -> Response {
    let uri = request.uri().clone();
    let refusal = || (StatusCode::NOT_FOUND, format!("no port of a pod has the path {}", uri.path()));
    match ProxiedPort::of_path(uri.path()).ok_or_else(refusal) {
        Ok(to) => pass_on(&streams, &to, request).await.unwrap_or_else(refused),
        Err(refusal) => refused(refusal),
    }
}

/// A refusal as a `Status` of the API, since the API server forwards it like a pod's response.
fn refused((code, message): HttpRefusal) -> Response {
    let reason = match code {
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::TOO_MANY_REQUESTS => "TooManyRequests",
        _ => "ServiceUnavailable",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16()});
    (code, Json(status)).into_response()
}

async fn pass_on(
    streams: &PodStreams,
    to: &ProxiedPort<'_>,
    mut request: Request,
) -> Result<Response, HttpRefusal> {
    let pod = streams.pod(to.namespace, to.pod)?;
    // Held until the exchange, or the upgraded connection, has ended.
    let permit = Arc::new(streams.proxy_permit()?);
    let unreachable = |error: &dyn std::fmt::Display| {
        (StatusCode::SERVICE_UNAVAILABLE, format!("error trying to reach service: {error}"))
    };
    let stream = match timeout(CONNECT_TIMEOUT, connect(streams, &pod, to)).await {
        Ok(connected) => connected.map_err(|error| unreachable(&error))?,
        Err(late) => return Err(unreachable(&late)),
    };
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(|error| unreachable(&error))?;
    let held = permit.clone();
    drop(tokio::spawn(async move {
        let _held = held;
        connection.with_upgrades().await
    }));
    *request.uri_mut() = pod_path(request.uri());
    let upgrade = request.headers().get(header::UPGRADE).cloned();
    let client = request.extensions_mut().remove::<OnUpgrade>().zip(upgrade);
    request.headers_mut().remove(header::UPGRADE);
    request.headers_mut().remove(header::CONNECTION);
    if let Some((_, protocol)) = &client {
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(header::UPGRADE, protocol.clone());
    }
    if let Ok(host) = HeaderValue::try_from(host(&pod, to.port)) {
        request.headers_mut().insert(header::HOST, host);
    }
    let mut response = sender.send_request(request).await.map_err(|error| unreachable(&error))?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some((client, _)) = client else {
            return Err(unreachable(&"the pod switched protocols without a request to do so"));
        };
        let end = hyper::upgrade::on(&mut response);
        drop(tokio::spawn(copy(client, end, permit)));
        return Ok(response.map(|_| Body::empty()).into_response());
    }
    Ok(response.map(Body::new).into_response())
}

/// The path and query for the pod, without the prefix that selects it.
fn pod_path(uri: &Uri) -> Uri {
    let whole = uri.path_and_query().map_or("/", |path| path.as_str());
    let at = whole.match_indices('/').nth(SEGMENTS).map(|(at, _)| at);
    at.and_then(|at| whole[at..].parse().ok()).unwrap_or(Uri::from_static("/"))
}

/// The value of the `Host` header.
fn host(pod: &Pod, port: u16) -> String {
    match address(pod) {
        Some(address) => SocketAddr::new(address, port).to_string(),
        None => format!("localhost:{port}"),
    }
}

fn address(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_deref()?.parse().ok()
}

async fn connect(streams: &PodStreams, pod: &Pod, to: &ProxiedPort<'_>) -> io::Result<Box<dyn PortStream>> {
    let stream = connect_port(streams, pod, to.port).await?;
    if !to.tls {
        return Ok(stream);
    }
    let name = ServerName::from(address(pod).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    Ok(Box::new(unverified_tls::connector().connect(name, stream).await?))
}

async fn connect_port(streams: &PodStreams, pod: &Pod, port: u16) -> io::Result<Box<dyn PortStream>> {
    let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
    if let Ok(runtime) = streams.runtime(pod)
        && let Some(containers) = runtime.streams()
    {
        return containers.connect_port(&uid, port).await.map_err(io::Error::other);
    }
    let address = address(pod).ok_or_else(|| io::Error::other("the pod has no address"))?;
    Ok(Box::new(TcpStream::connect((address, port)).await?))
}

/// Copies bytes both ways until both sides have ended.
async fn copy(client: OnUpgrade, end: OnUpgrade, _permit: Arc<OwnedSemaphorePermit>) -> io::Result<()> {
    let (client, end) = tokio::try_join!(client, end).map_err(io::Error::other)?;
    let (mut client, mut end) = (TokioIo::new(client), TokioIo::new(end));
    tokio::io::copy_bidirectional(&mut client, &mut end).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_gets_its_own_path() {
        let path = |text: &str| pod_path(&text.parse().unwrap()).to_string();
        assert_eq!(path("/proxy/ns/web/80/a%20b//c/?d=/e"), "/a%20b//c/?d=/e");
        assert_eq!(path("/proxy/ns/web/80/"), "/");
        assert_eq!(path("/proxy/ns/web/80"), "/");
        assert_eq!(path("/proxy/ns/web/https:443/a%2Fb%FF"), "/a%2Fb%FF");
    }

    #[test]
    fn the_port_says_whether_tls_is_used() {
        let to = |port, tls| Some(ProxiedPort { namespace: "ns", pod: "web", port, tls });
        assert_eq!(ProxiedPort::of_path("/proxy/ns/web/80/a%2Fb"), to(80, false));
        assert_eq!(ProxiedPort::of_path("/proxy/ns/web/https:443/"), to(443, true));
        for wrong in ["/proxy/ns/web/", "/proxy/ns/web/http:80/", "/proxy/ns/web/99999/", "/proxy/ns"] {
            assert_eq!(ProxiedPort::of_path(wrong), None, "{wrong}");
        }
    }
}
