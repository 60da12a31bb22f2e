//! Asynchronous invocations: requests that are acknowledged when they are queued durably, before their function has
//! answered.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use mayfly_api::ObjectKey;
use mayfly_runtime::Body;

use crate::{Refusal, ResponseBody};

/// The header that selects the kind of invocation: `async`, or `sync`, which is the default.
pub const HEADER_INVOCATION: HeaderName = HeaderName::from_static("mayfly-invocation");
/// The response header with the id of an asynchronous invocation.
pub const HEADER_INVOCATION_ID: HeaderName = HeaderName::from_static("mayfly-invocation-id");
/// The largest body of an asynchronous invocation in bytes, as for Lambda's events (256 KB).
pub const INVOCATION_BYTES_MAX: usize = 256 << 10;

/// The timeout of queueing an invocation at another gateway.
pub(crate) const INVOCATION_TIMEOUT: Duration = Duration::from_secs(10);

/// A durable queue of requests to functions. Implemented outside of the gateway.
pub trait InvocationQueue: Send + Sync {
    /// Queues a request to a function; its path is relative to the function. Returns the invocation's id when the
    /// request is durable. A request with the same `idempotency-key` header as an earlier one is not queued again; the
    /// earlier id is returned.
    ///
    /// # Errors
    /// [`Refusal::invocation_refused`]: nothing was queued.
    fn enqueue(&self, function: ObjectKey, request: Request<Bytes>)
    -> BoxFuture<'_, Result<String, Refusal>>;
}

/// Queues a request and returns the response 202, with the invocation's id in a header and in the JSON body.
pub(crate) async fn enqueue(
    queue: Option<&dyn InvocationQueue>,
    function: ObjectKey,
    request: Request<Body>,
) -> Result<Response<ResponseBody>, Refusal> {
    let id = queued(queue, function, request).await?;
    let mut response = Response::new(ResponseBody::full(format!("{{\"invocation\":\"{id}\"}}\n").into()));
    *response.status_mut() = StatusCode::ACCEPTED;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(id) = HeaderValue::try_from(id) {
        headers.insert(HEADER_INVOCATION_ID, id);
    }
    Ok(response)
}

/// Queues a request; returns the invocation's id.
pub(crate) async fn queued(
    queue: Option<&dyn InvocationQueue>,
    function: ObjectKey,
    request: Request<Body>,
) -> Result<String, Refusal> {
    let Some(queue) = queue else {
        return Err(Refusal::invocation_refused("this server has no queue of asynchronous invocations"));
    };
    let (mut parts, body) = request.into_parts();
    parts.headers.remove(HEADER_INVOCATION);
    let body = collect(body).await?;
    queue.enqueue(function, Request::from_parts(parts, body)).await
}

/// Reads a body of at most [`INVOCATION_BYTES_MAX`] bytes.
async fn collect(mut body: Body) -> Result<Bytes, Refusal> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Refusal::body_lost(&error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > INVOCATION_BYTES_MAX {
            return Err(Refusal::request_too_large(INVOCATION_BYTES_MAX as u64));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// Whether the request is an asynchronous invocation.
///
/// # Errors
/// The header has a value other than `async` and `sync`.
pub(crate) fn is_async(headers: &HeaderMap) -> Result<bool, Refusal> {
    match headers.get(HEADER_INVOCATION).map(HeaderValue::as_bytes) {
        None | Some(b"sync") => Ok(false),
        Some(b"async") => Ok(true),
        Some(_) => Err(Refusal::unknown_invocation()),
    }
}
