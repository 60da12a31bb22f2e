//! A socket that records its connection's state: received and sent bytes, and writes that the client does not accept.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};

use crate::{port::ConnectionSlot, state::ConnectionState};

/// The first bytes of every HTTP/2 connection; no method of HTTP/1.1 starts with them.
const H2_OPENING: &[u8; 3] = b"PRI";

/// A client's decrypted byte stream. The timer is armed only while a write is pending. It owns the connection's slot on
/// the port, so that an upgraded socket is still counted.
pub(crate) struct WatchedStream<S> {
    stream: S,
    state: Arc<ConnectionState>,
    stall_timeout: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// Whether `waiting` runs for the pending write.
    armed: bool,
    opening: [u8; 3],
    opening_bytes: usize,
    _slot: ConnectionSlot,
}

impl<S> WatchedStream<S> {
    pub(crate) fn new(stream: S, slot: ConnectionSlot, stall_timeout: Duration) -> Self {
        Self {
            stream,
            state: slot.state().clone(),
            stall_timeout,
            waiting: None,
            armed: false,
            opening: [0; 3],
            opening_bytes: 0,
            _slot: slot,
        }
    }

    fn watch_write(
        &mut self,
        polled: Poll<io::Result<usize>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(result) = polled {
            self.armed = false;
            if let Ok(bytes) = result {
                self.state.sent(bytes);
            }
            return Poll::Ready(result);
        }
        if self.state.is_upgraded() {
            return Poll::Pending;
        }
        let deadline = Instant::now() + self.stall_timeout;
        let sleep = match &mut self.waiting {
            Some(sleep) => {
                if !self.armed {
                    sleep.as_mut().reset(deadline);
                }
                sleep
            }
            None => self.waiting.insert(Box::pin(tokio::time::sleep_until(deadline))),
        };
        self.armed = true;
        sleep.as_mut().poll(context).map(|()| {
            let stalled = "the client accepted no part of its response for too long";
            Err(io::Error::new(io::ErrorKind::TimedOut, stalled))
        })
    }

    /// Detects the protocol by the first bytes.
    fn look_at_opening(&mut self, bytes: &[u8]) {
        let wanted = self.opening.len() - self.opening_bytes;
        let taken = wanted.min(bytes.len());
        if taken == 0 {
            return;
        }
        self.opening[self.opening_bytes..self.opening_bytes + taken].copy_from_slice(&bytes[..taken]);
        self.opening_bytes += taken;
        if &self.opening == H2_OPENING {
            self.state.speaks_h2();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = polled {
            let received = &buffer.filled()[before..];
            this.look_at_opening(received);
            if !received.is_empty() && !this.state.received(received.len()) {
                let flood = "the client sends protocol frames without requests";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, flood)));
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch_write(polled, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch_write(polled, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
