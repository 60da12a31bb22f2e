//! Body wrappers for every HTTP/1 server in the process: the gateway, and the listener of a wasm pod.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Version, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;

use crate::{Body, BodyError};

/// The longest time for which an unwanted request body is drained before the connection is closed.
pub const DRAIN_MAX: Duration = Duration::from_secs(5);

/// A request body that is drained for up to [`DRAIN_MAX`] when it is dropped before its end.
///
/// An HTTP/1 client may still be sending when it gets the response. A connection that is closed with unread bytes is
/// reset, and the reset may destroy the response on its way or in the client's buffers (RFC 9112, 9.6).
pub struct DrainOnDrop<B: http_body::Body<Data = Bytes> + Unpin + Send + 'static> {
    /// `None` after its end and after the drop.
    incoming: Option<B>,
    drains: bool,
}

impl<B: http_body::Body<Data = Bytes> + Unpin + Send + 'static> std::fmt::Debug for DrainOnDrop<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DrainOnDrop").field("drains", &self.drains).finish_non_exhaustive()
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin + Send + 'static> DrainOnDrop<B> {
    /// Wraps a request's body. HTTP/2 can reset a single stream, so it needs no draining. A client that sent `Expect:
    /// 100-continue` has not sent its body yet, and draining would request it.
    pub fn wrap(request: Request<B>) -> Request<Self> {
        let drains = request.version() < Version::HTTP_2 && !request.headers().contains_key(header::EXPECT);
        request.map(|incoming| Self { incoming: Some(incoming), drains })
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin + Send + 'static> http_body::Body for DrainOnDrop<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(incoming).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.incoming = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(B::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or(SizeHint::with_exact(0), B::size_hint)
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin + Send + 'static> Drop for DrainOnDrop<B> {
    fn drop(&mut self) {
        if !self.drains || self.is_end_stream() {
            return;
        }
        let (Some(mut incoming), Ok(runtime)) = (self.incoming.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        runtime.spawn(tokio::time::timeout(DRAIN_MAX, async move {
            while let Some(Ok(_)) = incoming.frame().await {}
        }));
    }
}

/// A response body that delays its error by one poll.
///
/// hyper drops its buffered output when a body fails. Returning `Pending` once lets hyper flush the frames that came
/// before the error; otherwise a response that fails at once is lost whole.
pub struct FlushBeforeError {
    body: Body,
    failed: Option<BodyError>,
}

impl std::fmt::Debug for FlushBeforeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlushBeforeError").finish_non_exhaustive()
    }
}

impl FlushBeforeError {
    pub fn new(body: Body) -> Self {
        Self { body, failed: None }
    }
}

impl http_body::Body for FlushBeforeError {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            Some(Err(error)) => {
                // hyper flushes while it waits for the next frame.
                self.failed = Some(error);
                context.waker().wake_by_ref();
                Poll::Pending
            }
            frame => Poll::Ready(frame),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.failed.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
