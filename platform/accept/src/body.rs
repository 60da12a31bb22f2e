//! Request bodies, which must make progress, and response bodies, which keep their connection busy.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use crate::state::ConnectionState;

/// The error of a request's body: a connection error, or a stall.
type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body that fails if no data arrives for too long while it is read.
#[derive(Debug)]
pub struct ProgressBody {
    body: Incoming,
    stall_timeout: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// Whether `waiting` runs for the awaited frame.
    armed: bool,
    state: Arc<ConnectionState>,
}

impl ProgressBody {
    pub(crate) fn new(body: Incoming, stall_timeout: Duration, state: Arc<ConnectionState>) -> Self {
        Self { body, stall_timeout, waiting: None, armed: false, state }
    }
}

impl Body for ProgressBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            this.armed = false;
            if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
                this.state.body_received(data.len());
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let deadline = Instant::now() + this.stall_timeout;
        let sleep = match &mut this.waiting {
            Some(sleep) => {
                if !this.armed {
                    sleep.as_mut().reset(deadline);
                }
                sleep
            }
            None => this.waiting.insert(Box::pin(tokio::time::sleep_until(deadline))),
        };
        this.armed = true;
        sleep.as_mut().poll(context).map(|()| {
            let stalled = "the rest of the request's body did not arrive in time";
            Some(Err(io::Error::new(io::ErrorKind::TimedOut, stalled).into()))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Keeps a connection busy from a request's head to the end of its response.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<ConnectionState>);

impl ActiveRequest {
    pub(crate) fn begin(state: &Arc<ConnectionState>) -> Self {
        state.request_began();
        Self(state.clone())
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.request_ended();
    }
}

/// A response's body that holds its request active.
pub(crate) struct ActiveBody<B> {
    pub(crate) body: B,
    pub(crate) _active: ActiveRequest,
}

impl<B: Body + Unpin> Body for ActiveBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
