//! Request and response bodies with their limits.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Response, StatusCode, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use mayfly_runtime::{
    Body, BodyError,
    wire::{DrainOnDrop, FlushBeforeError},
};
use tokio::{
    sync::oneshot,
    time::{Instant, Sleep},
};

use crate::{listen::OpenRequest, target::Permit};

/// A response's body. Its end or drop releases the request's slot.
pub struct ResponseBody {
    inner: Inner,
    /// Keeps the connection from counting as idle.
    active: Option<OpenRequest>,
    /// Receives `active` when the connection is upgraded to another protocol.
    upgraded: Option<oneshot::Sender<OpenRequest>>,
}

impl std::fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

enum Inner {
    /// Written by the gateway itself.
    Full(Option<Bytes>),
    /// Streamed by a guest.
    Guest { body: FlushBeforeError, permit: Option<Permit> },
}

impl ResponseBody {
    pub(crate) fn full(bytes: Bytes) -> Self {
        let inner = Inner::Full(Some(bytes).filter(|bytes| !bytes.is_empty()));
        Self { inner, active: None, upgraded: None }
    }

    /// A response that an endpoint streams.
    pub(crate) fn forwarded(body: Body) -> Self {
        let inner = Inner::Guest { body: FlushBeforeError::new(body), permit: None };
        Self { inner, active: None, upgraded: None }
    }

    /// No body: the connection switches protocols, and does not count as idle while `holder` keeps the value that it
    /// receives.
    pub(crate) fn upgraded(holder: oneshot::Sender<OpenRequest>) -> Self {
        Self { upgraded: Some(holder), ..Self::full(Bytes::new()) }
    }

    /// `permit`: `None` for a request that another gateway has admitted.
    pub(crate) fn guest(body: Body, permit: Option<Permit>) -> Self {
        // An empty body may never be polled.
        let permit = if body.is_end_stream() { None } else { permit };
        let inner = Inner::Guest { body: FlushBeforeError::new(body), permit };
        Self { inner, active: None, upgraded: None }
    }

    /// Keeps the connection from counting as idle until the body ends.
    pub(crate) fn hold(&mut self, active: OpenRequest) {
        if let Inner::Guest { permit: Some(permit), .. } = &self.inner {
            active.answering(permit.deadline());
        }
        match self.upgraded.take() {
            // Without a receiver the other side is gone, and the connection ends.
            Some(holder) => drop(holder.send(active)),
            None => self.active = Some(active),
        }
    }
}

/// Reads a whole body.
///
/// # Errors
/// It fails, or has more than `bytes_max` bytes.
pub(crate) async fn collect(mut body: Body, bytes_max: usize) -> Result<Bytes, BodyError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if bytes.len() + data.len() > bytes_max {
            return Err(format!("it has more than {bytes_max} bytes").into());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// A body without data.
pub(crate) fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// Whether responses with this status never have a body (RFC 9110, 15.3.5 and 15.4.5).
pub(crate) fn is_forbidden(status: StatusCode) -> bool {
    status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED
}

/// Removes the body, as for HEAD; `content-length` states its length if that is known. An empty body says nothing about
/// its length: endpoints and many guests answer HEAD without one. Releases the request's slot.
pub(crate) fn without(response: Response<ResponseBody>) -> Response<ResponseBody> {
    let (mut parts, body) = response.into_parts();
    if parts.status == StatusCode::NO_CONTENT {
        parts.headers.remove(header::CONTENT_LENGTH);
    } else if parts.status != StatusCode::NOT_MODIFIED
        && let Some(bytes) = body.size_hint().exact().filter(|bytes| *bytes > 0)
    {
        parts.headers.entry(header::CONTENT_LENGTH).or_insert(bytes.into());
    }
    Response::from_parts(parts, ResponseBody::full(Bytes::new()))
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.inner {
            Inner::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Inner::Guest { body, permit } => {
                let polled = Pin::new(body).poll_frame(context);
                if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
                    permit.take();
                }
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Full(bytes) => bytes.is_none(),
            Inner::Guest { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Inner::Guest { body, .. } => body.size_hint(),
        }
    }
}

/// The reason why a request's body ended early, as reported to the guest's host.
#[derive(Debug, thiserror::Error)]
enum RequestBodyError {
    #[error("the request's body is larger than the limit of {0} bytes")]
    TooLarge(u64),
    #[error("the client sent nothing of the request's body for {} seconds", .0.as_secs())]
    Stalled(Duration),
    #[error("the client's connection failed: {0}")]
    Client(#[from] hyper::Error),
}

/// A request's body from a socket.
struct RequestBody {
    incoming: DrainOnDrop<Incoming>,
    limit_bytes: u64,
    left_bytes: u64,
    too_large: Option<Arc<AtomicBool>>,
    stall_timeout: Duration,
    /// Set while no data arrives.
    stall: Option<Pin<Box<Sleep>>>,
    stalled: bool,
}

/// A body with its size limit applied.
pub(crate) enum Bounded {
    /// The declared length exceeds the limit.
    TooLarge,
    /// `exceeded` becomes true if more data than the limit arrives; `None` if the length was declared and checked.
    Body { body: Body, exceeded: Option<Arc<AtomicBool>> },
}

/// Limits the size of a request's body. Free for a request without a body.
pub(crate) fn bounded(incoming: DrainOnDrop<Incoming>, limit_bytes: u64, stall_timeout: Duration) -> Bounded {
    if incoming.is_end_stream() {
        return Bounded::Body { body: empty(), exceeded: None };
    }
    let announced = incoming.size_hint().exact();
    if announced.is_some_and(|bytes| bytes > limit_bytes) {
        return Bounded::TooLarge;
    }
    let exceeded = announced.is_none().then(|| Arc::new(AtomicBool::new(false)));
    let body = RequestBody {
        incoming,
        limit_bytes,
        left_bytes: limit_bytes,
        too_large: exceeded.clone(),
        stall_timeout,
        stall: None,
        stalled: false,
    };
    Bounded::Body { body: body.boxed_unsync(), exceeded }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.incoming).poll_frame(context) else {
            return this
                .poll_stall(context)
                .map(|()| Some(Err(RequestBodyError::Stalled(this.stall_timeout).into())));
        };
        this.stalled = false;
        let frame = match frame {
            None => return Poll::Ready(None),
            Some(Err(error)) => return Poll::Ready(Some(Err(RequestBodyError::from(error).into()))),
            Some(Ok(frame)) => frame,
        };
        let bytes = frame.data_ref().map_or(0, |data| data.remaining() as u64);
        let Some(left_bytes) = this.left_bytes.checked_sub(bytes) else {
            if let Some(too_large) = &this.too_large {
                too_large.store(true, Ordering::Release);
            }
            return Poll::Ready(Some(Err(RequestBodyError::TooLarge(this.limit_bytes).into())));
        };
        this.left_bytes = left_bytes;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl RequestBody {
    fn poll_stall(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let deadline = || Instant::now() + self.stall_timeout;
        let stall = match &mut self.stall {
            Some(stall) if self.stalled => stall,
            Some(stall) => {
                stall.as_mut().reset(deadline());
                stall
            }
            None => self.stall.insert(Box::pin(tokio::time::sleep(self.stall_timeout))),
        };
        self.stalled = true;
        stall.as_mut().poll(context)
    }
}
