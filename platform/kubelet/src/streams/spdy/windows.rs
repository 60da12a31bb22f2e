//! Flow control (section 2.6.8): the number of bytes that a peer accepts, on each stream and on the connection.
//!
//! The usual peers of exec and port-forward (`moby/spdystream`) do not implement it: they neither announce nor extend
//! windows, and rely on the connection's own flow control. Their windows would be exhausted after 64 KiB. So windows
//! apply once a peer announces one, with everything sent before counted.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::SpdyError;

/// The initial size of all windows, in bytes.
const INITIAL_BYTES: i64 = 64 << 10;
/// The largest size of a window, in bytes.
const BYTES_MAX: i64 = i32::MAX as i64;

/// The windows of one connection. Pure.
#[derive(Debug)]
struct Windows {
    /// Whether the peer uses flow control.
    in_use: bool,
    initial: i64,
    connection: i64,
    /// The windows of the open streams. A window may be negative.
    streams: HashMap<u32, i64>,
}

impl Default for Windows {
    fn default() -> Self {
        let (initial, connection) = (INITIAL_BYTES, INITIAL_BYTES);
        Self { in_use: false, initial, connection, streams: HashMap::new() }
    }
}

/// The number of bytes that may be sent on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allowance {
    Bytes(usize),
    /// None until the window is extended.
    Wait,
    /// None: the stream is closed.
    Closed,
}

impl Windows {
    fn take(&mut self, stream: u32, wanted: usize) -> Allowance {
        let Some(window) = self.streams.get_mut(&stream) else { return Allowance::Closed };
        let open = usize::try_from((*window).min(self.connection)).unwrap_or(0);
        let taken = if self.in_use { wanted.min(open) } else { wanted };
        if taken == 0 && wanted > 0 {
            return Allowance::Wait;
        }
        let bytes = i64::try_from(taken).unwrap_or(i64::MAX);
        *window = window.saturating_sub(bytes);
        self.connection = self.connection.saturating_sub(bytes);
        Allowance::Bytes(taken)
    }

    fn update(&mut self, stream: u32, bytes: u32) -> Result<(), SpdyError> {
        self.in_use = true;
        let window = match stream {
            0 => &mut self.connection,
            stream => match self.streams.get_mut(&stream) {
                Some(window) => window,
                // The stream was closed meanwhile.
                None => return Ok(()),
            },
        };
        *window += i64::from(bytes);
        if *window > BYTES_MAX {
            return Err(SpdyError("a window is too large"));
        }
        Ok(())
    }

    /// Applies a changed initial size to the open streams, too; the connection's window does not change.
    fn set_initial(&mut self, bytes: u32) {
        self.in_use = true;
        let change = i64::from(bytes) - self.initial;
        self.initial = i64::from(bytes);
        self.streams.values_mut().for_each(|window| *window += change);
    }
}

/// [`Windows`], shared by the tasks that send on one connection.
#[derive(Debug, Default)]
pub(crate) struct SendWindows {
    windows: Mutex<Windows>,
    changed: Notify,
}

impl SendWindows {
    pub(crate) fn open(&self, stream: u32) {
        let mut windows = self.windows.lock();
        let initial = windows.initial;
        windows.streams.insert(stream, initial);
    }

    /// Closes a stream for sending: it has ended, or the peer has reset it.
    pub(crate) fn close(&self, stream: u32) {
        self.windows.lock().streams.remove(&stream);
        self.changed.notify_waiters();
    }

    pub(crate) fn update(&self, stream: u32, bytes: u32) -> Result<(), SpdyError> {
        self.windows.lock().update(stream, bytes)?;
        self.changed.notify_waiters();
        Ok(())
    }

    pub(crate) fn set_initial(&self, bytes: u32) {
        self.windows.lock().set_initial(bytes);
        self.changed.notify_waiters();
    }

    /// Whether the peer uses flow control, so that this side has to extend the peer's windows.
    pub(crate) fn is_in_use(&self) -> bool {
        self.windows.lock().in_use
    }

    /// Returns when a stream is closed for sending.
    pub(crate) async fn closed(&self, stream: u32) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if !self.windows.lock().streams.contains_key(&stream) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until bytes may be sent on a stream, and returns their number, at most `wanted`; `None` when it is closed.
    pub(crate) async fn reserve(&self, stream: u32, wanted: usize) -> Option<usize> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the check, so that no change between them is missed.
            changed.as_mut().enable();
            match self.windows.lock().take(stream, wanted) {
                Allowance::Bytes(bytes) => return Some(bytes),
                Allowance::Closed => return None,
                Allowance::Wait => {}
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_announces_no_window_gets_everything() {
        let mut windows = Windows::default();
        windows.streams.insert(1, INITIAL_BYTES);
        for _ in 0..10 {
            assert_eq!(windows.take(1, 32 << 10), Allowance::Bytes(32 << 10));
        }
        assert_eq!(windows.take(3, 1), Allowance::Closed);
    }

    #[test]
    fn no_more_is_sent_than_both_windows_allow() {
        let mut windows = Windows::default();
        windows.streams.extend([(1, INITIAL_BYTES), (3, INITIAL_BYTES)]);
        assert_eq!(windows.take(1, 50_000), Allowance::Bytes(50_000), "before the peer announces a window");
        windows.update(3, 1).unwrap();
        assert_eq!(windows.take(1, 50_000), Allowance::Bytes((64 << 10) - 50_000));
        assert_eq!(windows.take(1, 1), Allowance::Wait);
        windows.update(1, 100).unwrap();
        assert_eq!(windows.take(1, 1), Allowance::Wait, "the connection's window is used up");
        assert_eq!(windows.take(3, 1), Allowance::Wait);
        windows.update(0, 150).unwrap();
        assert_eq!(windows.take(1, 1_000), Allowance::Bytes(100));
        assert_eq!(windows.take(3, 1_000), Allowance::Bytes(50));
        assert_eq!(windows.take(3, 0), Allowance::Bytes(0));
    }

    #[test]
    fn a_new_initial_size_changes_open_streams() {
        let mut windows = Windows::default();
        windows.streams.insert(1, INITIAL_BYTES);
        assert_eq!(windows.take(1, 1_000), Allowance::Bytes(1_000));
        windows.set_initial(600);
        assert_eq!(windows.take(1, 1), Allowance::Wait, "the window is negative");
        windows.update(1, 401).unwrap();
        assert_eq!(windows.take(1, 10), Allowance::Bytes(1));
        assert!(windows.update(1, u32::try_from(BYTES_MAX).unwrap()).is_ok());
        assert!(windows.update(1, 1).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_waits_for_its_window() {
        let windows = SendWindows::default();
        windows.open(1);
        windows.set_initial(0);
        let mut reserved = std::pin::pin!(windows.reserve(1, 10));
        assert!(futures::poll!(&mut reserved).is_pending());
        windows.update(1, 4).unwrap();
        assert_eq!(reserved.await, Some(4));
        let mut reserved = std::pin::pin!(windows.reserve(1, 10));
        assert!(futures::poll!(&mut reserved).is_pending());
        windows.close(1);
        assert_eq!(reserved.await, None);
    }
}
