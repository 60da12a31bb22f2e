//! The body of an outbound request's response, with a limit on the pauses in it.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use wasmtime_wasi_http::Error;

/// A body that fails when no data arrives for too long.
pub(crate) struct TimedBody {
    body: Incoming,
    pause_max: Duration,
    /// The timer that runs while the body is awaited.
    pause: Option<Pin<Box<Sleep>>>,
}

impl TimedBody {
    pub(crate) fn new(body: Incoming, pause_max: Duration) -> Self {
        Self { body, pause_max, pause: None }
    }
}

impl Body for TimedBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(frame) => {
                self.pause = None;
                Poll::Ready(frame.map(|frame| frame.map_err(Error::Hyper)))
            }
            Poll::Pending => {
                let pause_max = self.pause_max;
                let end = || Box::pin(tokio::time::sleep_until(Instant::now() + pause_max));
                let pause = self.pause.get_or_insert_with(end);
                pause.as_mut().poll(cx).map(|()| Some(Err(Error::ConnectionReadTimeout)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
