//! gRPC over unix sockets: serves a service, connects to one, registers as a plugin.

use std::{convert::Infallible, path::Path, time::Duration};

use futures::stream::{FuturesUnordered, StreamExt as _};
use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    body::Body,
    transport::{Channel, Endpoint, Uri},
};
use tower::Service;

use crate::proto::{RegisterRequest, registration_client::RegistrationClient};

/// The number of concurrent connections: a node has a few plugins, and each registers over a separate connection.
const CONNECTIONS_MAX: usize = 256;

/// The timeout of a registration, during which the kubelet calls the plugin back.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(20);

/// Serves until `stop`. A failed connection affects only its client.
pub async fn serve<S>(listener: UnixListener, service: S, stop: CancellationToken)
where
    S: Service<http::Request<hyper::body::Incoming>, Response = http::Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    let mut connections = FuturesUnordered::new();
    loop {
        let has_room = connections.len() < CONNECTIONS_MAX;
        tokio::select! {
            () = stop.cancelled() => return,
            Some(()) = connections.next() => {}
            accepted = listener.accept(), if has_room => {
                let stream = match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        tracing::warn!(%error, "could not accept a connection on a plugin socket");
                        tokio::task::yield_now().await;
                        continue;
                    }
                };
                let service = TowerToHyperService::new(service.clone());
                connections.push(async move {
                    let served = http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                    if let Err(error) = served {
                        tracing::debug!(%error, "a connection on a plugin socket ended");
                    }
                });
            }
        }
    }
}

/// Binds a socket, replacing one from an earlier process.
///
/// # Errors
/// The path cannot be bound.
pub fn bind(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Connects to the service on a socket.
///
/// # Errors
/// Nothing listens there.
pub async fn dial(socket: &Path) -> Result<Channel, String> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used: the connector has the path of the socket.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await.map_err(|error| format!("{error:?}"))
}

/// Registers a plugin with the kubelet at `socket`.
///
/// # Errors
/// The kubelet is unavailable, or refuses.
pub async fn register(socket: &Path, request: RegisterRequest) -> Result<(), String> {
    let register = async {
        let mut client = RegistrationClient::new(dial(socket).await?);
        client.register(request).await.map(|_| ()).map_err(|status| status.message().to_owned())
    };
    let answered = tokio::time::timeout(REGISTER_TIMEOUT, register).await;
    answered.unwrap_or_else(|_| Err(format!("no answer within {} s", REGISTER_TIMEOUT.as_secs())))
}
