//! Adds a body to the error responses that hyper writes itself.
//!
//! A request head that cannot be parsed, or is too large, never reaches the service: hyper answers with a status and an
//! empty body, and closes the connection. This socket wrapper replaces that response with a refusal in the gateway's
//! usual form.
//!
//! Such a response is detected by timing, not by its bytes (a function may answer with any bytes): hyper writes it
//! after all responses to earlier requests were flushed, and before another request has started. This costs one
//! comparison for each write.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use http::{HeaderMap, StatusCode};
use mayfly_runtime::wire::DRAIN_MAX;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

use super::connection::{ConnectionActivity, Requests};
use crate::{headers, proxy::Proxy, refusal::Refusal};

/// The position of the three digits after `HTTP/1.1 `.
const STATUS_AT: std::ops::Range<usize> = 9..12;

/// A connection's socket.
pub(super) struct ParseErrorBody<S> {
    stream: S,
    proxy: Arc<Proxy>,
    activity: Arc<ConnectionActivity>,
    head_bytes_max: usize,
    /// The state of the connection's requests at the last complete flush.
    flushed: Requests,
    /// The unwritten rest of the response that replaces hyper's empty one.
    rest: Bytes,
    /// Whether a response was replaced, so that further writes of hyper are dropped.
    refused: bool,
    /// The end of lingering; set when nothing more is written, and data of the refused request is still read.
    lingers: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncWrite + Unpin> ParseErrorBody<S> {
    pub(super) fn new(
        stream: S,
        proxy: Arc<Proxy>,
        activity: Arc<ConnectionActivity>,
        head_bytes_max: usize,
    ) -> Self {
        let flushed = activity.requests();
        Self {
            stream,
            proxy,
            activity,
            head_bytes_max,
            flushed,
            rest: Bytes::new(),
            refused: false,
            lingers: None,
        }
    }

    /// Whether `answer` is an empty error response of hyper, which is replaced then.
    fn takes(&mut self, answer: &[u8]) -> bool {
        if self.activity.requests() != self.flushed {
            return false;
        }
        let Some(status) = answer.get(STATUS_AT).and_then(|digits| StatusCode::from_bytes(digits).ok())
        else {
            return false;
        };
        if !status.is_client_error() {
            return false;
        }
        let refusal = match status {
            StatusCode::BAD_REQUEST => Refusal::no_request(),
            _ => Refusal::head_too_large(self.head_bytes_max),
        };
        self.proxy.counts.refused(refusal.code);
        self.rest = error_response(status, &refusal);
        self.refused = true;
        true
    }

    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.rest.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.rest))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.rest.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

/// The complete response.
fn error_response(status: StatusCode, refusal: &Refusal) -> Bytes {
    let id = headers::request_id(&mut HeaderMap::new());
    let id = id.to_str().unwrap_or_default();
    let body = refusal.document(id);
    let name = headers::X_REQUEST_ID;
    let mut text = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{name}: {id}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    )
    .into_bytes();
    text.extend_from_slice(&body);
    text.into()
}

impl<S: AsyncRead + Unpin> AsyncRead for ParseErrorBody<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before {
            self.activity.read();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ParseErrorBody<S> {
    /// Reads and discards incoming data for a limited time: a connection closed with unread data is reset, and the
    /// reset may destroy the response.
    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let until = self.lingers.get_or_insert_with(|| Box::pin(tokio::time::sleep(DRAIN_MAX)));
        if until.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        let mut unread = [MaybeUninit::uninit(); 4096];
        loop {
            let mut buffer = ReadBuf::uninit(&mut unread);
            let read = ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(());
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ParseErrorBody<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.takes(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if slices.first().is_some_and(|head| self.takes(head)) {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes after it has written everything that was pending.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_rest(context))?;
        let requests = self.activity.requests();
        if requests.is_quiet() {
            self.flushed = requests;
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingers.is_none() {
            ready!(self.poll_rest(context))?;
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        }
        if self.refused {
            ready!(self.poll_linger(context));
        }
        Poll::Ready(Ok(()))
    }
}
