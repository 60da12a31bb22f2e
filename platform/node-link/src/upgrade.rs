//! Requests that upgrade their connection: each has a connection of its own, over HTTP/1.1.
//!
//! ```text
//!   client ──upgraded──▶ API server ──relay──▶ NodeLink ──upgraded──▶ agent ──▶ container
//! ```
//! Within one process the agent gets the client's upgraded connection itself, and decides when it ends. Here the two
//! connections are joined, and the end of the agent's ends the client's.

use std::{
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::TcpStream,
    sync::OwnedSemaphorePermit,
};
use tokio_rustls::client::TlsStream;

use crate::{
    client::{Link, set_host},
    error::{LinkError, with_causes},
    pool::{self, Agent, Pool},
    tls,
};

/// Sends a request on a new connection, and joins the upgraded connections.
pub(crate) async fn call(
    link: &Arc<Link>,
    agent: &Agent,
    mut request: Request<Body>,
) -> Result<Response<Body>, LinkError> {
    let permit = Pool::upgrade_permit(link, agent)?;
    let client = request.extensions_mut().remove::<OnUpgrade>();
    set_host(request.headers_mut(), agent);
    let stream = pool::connect(link, agent, tls::HTTP1).await?;
    let no_response = |error: hyper::Error| LinkError::NoResponse {
        node: agent.node.to_string(),
        address: agent.address,
        cause: with_causes(&error),
    };
    let stream = TokioIo::new(PermittedStream { stream, _permit: permit });
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(stream).await.map_err(no_response)?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(error = with_causes(&error), "a connection to an agent ended early");
        }
    });
    let mut response = sender.send_request(request).await.map_err(no_response)?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(client) = client
    {
        tokio::spawn(relay(client, hyper::upgrade::on(&mut response), agent.clone()));
    }
    Ok(response.map(Body::new))
}

/// Copies bytes both ways until the agent ends its connection.
async fn relay(client: OnUpgrade, agent_side: OnUpgrade, agent: Agent) {
    let copied = async {
        let (client, agent_side) = tokio::try_join!(client, agent_side).map_err(io::Error::other)?;
        let (mut from_client, mut to_client) = tokio::io::split(TokioIo::new(client));
        let (mut from_agent, mut to_agent) = tokio::io::split(TokioIo::new(agent_side));
        let to_agent = async {
            tokio::io::copy(&mut from_client, &mut to_agent).await?;
            to_agent.shutdown().await
        };
        let to_client = async {
            let copied = tokio::io::copy(&mut from_agent, &mut to_client).await;
            to_client.shutdown().await?;
            copied.map(|_| ())
        };
        let mut to_client = pin!(to_client);
        tokio::select! {
            ended = to_client.as_mut() => ended,
            ended = to_agent => match ended {
                Ok(()) => to_client.await,
                Err(error) => Err(error),
            },
        }
    };
    if let Err(error) = copied.await {
        let node = &*agent.node;
        tracing::debug!(node, %error, "a stream to a node ended early");
    }
}

/// A connection that counts as an upgrade to its node until it is dropped.
struct PermittedStream {
    stream: TlsStream<TcpStream>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for PermittedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PermittedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
