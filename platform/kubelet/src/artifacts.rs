//! The artifact store of the cluster's server, as the origin of a joined node's cache: a client of the API's
//! `/artifacts` (`platform/apiserver/src/artifacts.rs` describes the protocol).
//!
//! It is here rather than beside the cache, so that the wasm host does not depend on a client of the API.

use std::{fmt, io};

use ::http::{Method, Request, Response, StatusCode, header};
use bytes::Bytes;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, future::BoxFuture};
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::Frame;
use kube::client::Body;
use mayfly_api::Digest;
use mayfly_artifacts::{ArtifactOrigin, ContentStream, OriginError};
use serde_json::Value;

/// The largest body of a refusal that is read, in bytes.
const REFUSAL_BYTES_MAX: usize = 64 << 10;

/// Reads and writes the artifacts of the cluster's server, with the permissions of the client's user.
#[derive(Clone)]
pub struct ApiArtifacts {
    client: kube::Client,
}

impl fmt::Debug for ApiArtifacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiArtifacts").finish_non_exhaustive()
    }
}

impl ApiArtifacts {
    pub fn new(client: kube::Client) -> Self {
        Self { client }
    }

    /// Returns the response if it is a success; `None` if the artifact does not exist.
    async fn call(
        &self,
        method: Method,
        digest: Digest,
        body: Body,
    ) -> Result<Option<Response<Body>>, OriginError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("/artifacts/{digest}"))
            // The type of any content. A component was checked when it was first uploaded.
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .body(body)
            .map_err(|error| OriginError::Refused(error.to_string()))?;
        let response = self.client.send(request).await.map_err(unreachable)?;
        match response.status() {
            status if status.is_success() => Ok(Some(response)),
            StatusCode::NOT_FOUND => Ok(None),
            status => Err(refusal(status, response.into_body()).await),
        }
    }
}

impl ArtifactOrigin for ApiArtifacts {
    fn fetch(&self, digest: Digest) -> BoxFuture<'_, Result<Option<ContentStream>, OriginError>> {
        async move {
            let response = self.call(Method::GET, digest, Body::empty()).await?;
            Ok(response
                .map(|response| response.into_body().into_data_stream().map_err(io::Error::other).boxed()))
        }
        .boxed()
    }

    fn renew(&self, digest: Digest) -> BoxFuture<'_, Result<bool, OriginError>> {
        self.call(Method::POST, digest, Body::empty()).map(|renewed| Ok(renewed?.is_some())).boxed()
    }

    fn upload(
        &self,
        digest: Digest,
        bytes: u64,
        content: ContentStream,
    ) -> BoxFuture<'_, Result<(), OriginError>> {
        async move {
            let body = streamed(content).await?;
            let uploaded = self.call(Method::PUT, digest, body).await?;
            uploaded
                .map(|_| tracing::debug!(%digest, bytes, "artifact stored on the server"))
                .ok_or_else(|| OriginError::Refused("the server has no artifact store at /artifacts".into()))
        }
        .boxed()
    }
}

/// A request body that is sent as it is read. The client's type has no constructor for one, but makes one from the
/// response of any service.
async fn streamed(content: ContentStream) -> Result<Body, OriginError> {
    let mut content = Some(content);
    let echo = tower::service_fn(move |_: Request<Body>| {
        let content = content.take().unwrap_or_else(|| futures::stream::empty().boxed());
        let body = StreamBody::new(content.map_ok(Frame::data));
        futures::future::ok::<_, io::Error>(Response::new(body))
    });
    let response = kube::Client::new(echo, "").send(Request::new(Body::empty())).await;
    response.map(Response::into_body).map_err(unreachable)
}

/// The request got no response.
fn unreachable(error: kube::Error) -> OriginError {
    OriginError::Unavailable(with_causes(&error))
}

/// The message of an error with those of its causes, which name the address and the system's error.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}

async fn refusal(status: StatusCode, body: Body) -> OriginError {
    let body = Limited::new(body, REFUSAL_BYTES_MAX).collect().await;
    let text: Bytes = body.map(|body| body.to_bytes()).unwrap_or_default();
    let document: Value = serde_json::from_slice(&text).unwrap_or_default();
    let message = match document["message"].as_str() {
        Some(message) => format!("{message} ({status})"),
        None => status.to_string(),
    };
    match status {
        StatusCode::PAYLOAD_TOO_LARGE => OriginError::TooLarge(message),
        // Another digest than announced: the content was damaged on its way.
        StatusCode::UNPROCESSABLE_ENTITY | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            OriginError::Unavailable(message)
        }
        status if status.is_server_error() => OriginError::Unavailable(message),
        _ => OriginError::Refused(message),
    }
}
