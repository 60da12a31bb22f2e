//! The body of a response from another process: limited in time and size, and counted until its end.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use mayfly_runtime::{BodyError, CallError};
use tokio::time::{Instant, Sleep};

/// A response's body that ends with an error at the deadline or above the size limit. Holds the permit of its request.
pub(crate) struct DeadlineBody<B, P> {
    inner: B,
    deadline: Pin<Box<Sleep>>,
    timeout: Duration,
    bytes: u64,
    bytes_max: u64,
    _permit: P,
}

impl<B, P> DeadlineBody<B, P> {
    /// `timeout`: the limit that led to the deadline, for the error's message.
    pub(crate) fn new(inner: B, deadline: Instant, timeout: Duration, bytes_max: u64, permit: P) -> Self {
        let deadline = Box::pin(tokio::time::sleep_until(deadline));
        Self { inner, deadline, timeout, bytes: 0, bytes_max, _permit: permit }
    }
}

impl<B, P> http_body::Body for DeadlineBody<B, P>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BodyError>,
    P: Unpin,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(context) {
            if let Some(Ok(frame)) = &frame {
                self.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                if self.bytes > self.bytes_max {
                    let too_large = CallError::ResponseTooLarge { limit_bytes: self.bytes_max };
                    return Poll::Ready(Some(Err(too_large.into())));
                }
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let timed_out = CallError::TimedOut { limit: self.timeout };
        self.deadline.as_mut().poll(context).map(|()| Some(Err(timed_out.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
