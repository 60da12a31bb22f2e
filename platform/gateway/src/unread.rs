//! A request's body that is read on when nobody wants it any more, so that the answer arrives.
//!
//! Over HTTP/1 a client may still be sending when it is answered. A connection that is closed with bytes unread is
//! reset, and the reset takes the answer along, on its way or in the client's own buffers (RFC 9112, 9.6).

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Version, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

/// How long it is read on: longer, and the client has to see the end of the connection.
pub(crate) const READ_ON_MAX: Duration = Duration::from_secs(5);

/// A body that came by socket. Dropped before its end, it is read on for a while.
pub(crate) struct Unread {
    /// Taken when it ends, and when it is dropped.
    incoming: Option<Incoming>,
    reads_on: bool,
}

impl Unread {
    /// Wraps a request's body. HTTP/2 can end one stream alone; and who waits to be told to go on (`Expect`) has sent
    /// nothing yet, and would be told.
    pub(crate) fn wrap(request: Request<Incoming>) -> Request<Self> {
        let reads_on = request.version() < Version::HTTP_2 && !request.headers().contains_key(header::EXPECT);
        request.map(|incoming| Self { incoming: Some(incoming), reads_on })
    }
}

impl http_body::Body for Unread {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(incoming).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.incoming = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        if !self.reads_on || self.is_end_stream() {
            return;
        }
        let (Some(mut incoming), Ok(runtime)) = (self.incoming.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        runtime.spawn(tokio::time::timeout(READ_ON_MAX, async move {
            while let Some(Ok(_)) = incoming.frame().await {}
        }));
    }
}
