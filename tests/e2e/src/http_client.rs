//! An HTTP client for functions, with bodies that stream in both directions.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// A request's body.
pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// The timeout of a response.
const TIMEOUT: Duration = Duration::from_secs(120);

/// An HTTP client of one address.
#[derive(Clone)]
pub struct Http {
    address: SocketAddr,
    client: Client<HttpConnector, Body>,
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A complete response.
#[derive(Debug)]
pub struct CompleteResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl CompleteResponse {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; on failure the error contains the body.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("no JSON: {self:?}"))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// A body in memory.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A streamed body.
pub fn streamed(pieces: impl Stream<Item = Bytes> + Send + 'static) -> Body {
    StreamBody::new(pieces.map(|piece| Ok(Frame::data(piece)))).boxed_unsync()
}

impl Http {
    pub fn new(address: SocketAddr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self { address, client: Client::builder(TokioExecutor::new()).build(connector) }
    }

    /// The same address over HTTP/2 without TLS (prior knowledge).
    #[must_use]
    pub fn h2c(&self) -> Self {
        let client = Client::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
        Self { address: self.address, client }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub async fn get(&self, path: &str) -> Result<CompleteResponse> {
        self.call(self.request(Method::GET, path), full("")).await
    }

    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Result<CompleteResponse> {
        self.call(self.request(Method::POST, path), full(body)).await
    }

    pub fn request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder().method(method).uri(format!("http://{}{path}", self.address))
    }

    /// Sends a request and reads the whole response.
    pub async fn call(&self, request: http::request::Builder, body: Body) -> Result<CompleteResponse> {
        let response = self.open(request, body).await?;
        let (head, body) = response.into_parts();
        let body = tokio::time::timeout(TIMEOUT, body.collect()).await.context("the body did not end")?;
        let body = body.context("the body was cut short")?.to_bytes();
        Ok(CompleteResponse { status: head.status, headers: head.headers, body })
    }

    /// Sends a request; returns the response as soon as its head has arrived.
    pub async fn open(&self, request: http::request::Builder, body: Body) -> Result<Response<Incoming>> {
        let request = request.body(body)?;
        let uri = request.uri().clone();
        let response = tokio::time::timeout(TIMEOUT, self.client.request(request)).await;
        response.with_context(|| format!("{uri} did not answer"))?.with_context(|| format!("{uri} broke off"))
    }
}
