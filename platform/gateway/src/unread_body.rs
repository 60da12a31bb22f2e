//! Request bodies for several attempts: an attempt that read nothing of the body returns it for the next one.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http_body::{Frame, SizeHint};
use mayfly_runtime::Body;
use parking_lot::Mutex;

/// Holds a request's body after an attempt that did not read it.
#[derive(Clone, Default)]
pub(crate) struct UnreadBody(Arc<Mutex<Option<Body>>>);

impl UnreadBody {
    /// Lends the body to one attempt; it is returned unless a part of it is read.
    pub(crate) fn lend(&self, body: Body) -> LentBody {
        LentBody { body: Some(body), is_read: false, back: self.clone() }
    }

    /// The body that an attempt returned.
    pub(crate) fn take(&self) -> Option<Body> {
        self.0.lock().take()
    }
}

/// A body that returns to its [`UnreadBody`] when it is dropped unread.
pub(crate) struct LentBody {
    body: Option<Body>,
    is_read: bool,
    back: UnreadBody,
}

impl http_body::Body for LentBody {
    type Data = <Body as http_body::Body>::Data;
    type Error = <Body as http_body::Body>::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        this.is_read = true;
        this.body.as_mut().map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(context))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(http_body::Body::size_hint).unwrap_or_default()
    }
}

impl Drop for LentBody {
    fn drop(&mut self) {
        if !self.is_read {
            *self.back.0.lock() = self.body.take();
        }
    }
}
