//! The connections of a SPDY client: each is a pair of streams.

use std::{collections::HashMap, sync::Arc};

use futures::{Stream, StreamExt as _};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_tungstenite::tungstenite::Bytes;

use super::{
    super::spdy::{self, Codec, Frame, ResetReason, SpdyError, windows::SendWindows},
    ForwardTarget, Framing, PIECES_MAX,
};

/// The number of concurrent connections of one client.
const CONNECTIONS_MAX: usize = 256;

/// The data and error streams of one connection.
struct SpdyPair {
    data: u32,
    error: u32,
    windows: Arc<SendWindows>,
}

impl Framing for SpdyPair {
    async fn reserve(&self, wanted: usize) -> Option<usize> {
        self.windows.reserve(self.data, wanted).await
    }
    fn data(&self, bytes: &[u8]) -> Bytes {
        spdy::data(self.data, bytes, false)
    }
    fn end(&self) -> Option<Bytes> {
        Some(spdy::data(self.data, &[], true))
    }
    fn error(&self, text: &str) -> Bytes {
        spdy::data(self.error, text.as_bytes(), false)
    }
    fn error_end(&self) -> Option<Bytes> {
        Some(spdy::data(self.error, &[], true))
    }
    fn consumed(&self, bytes: usize) -> Option<Bytes> {
        self.windows.is_in_use().then(|| spdy::consumed(self.data, bytes))
    }
    async fn closed(&self) {
        self.windows.closed(self.data).await;
    }
}

/// The connections of a SPDY client.
#[derive(Default)]
struct SpdyConnections {
    /// Streams whose partner is not open yet, by request id.
    waiting: HashMap<String, WaitingStream>,
    /// The receivers of streams' data.
    open: HashMap<u32, mpsc::Sender<Bytes>>,
    windows: Arc<SendWindows>,
    newest: u32,
    /// The client has announced that it opens no more streams.
    is_leaving: bool,
}

/// One of the two streams of a connection.
struct WaitingStream {
    stream: u32,
    is_data: bool,
    port: u16,
}

/// Forwards until the client disconnects.
pub(super) async fn serve(
    target: &ForwardTarget,
    received: &mut (impl Stream<Item = Bytes> + Unpin),
) -> Result<(), SpdyError> {
    let (mut codec, mut connections) = (Codec::new()?, SpdyConnections::default());
    // One task for each connection, so that none waits for another's queue; all are dropped when the client
    // disconnects.
    let mut running = JoinSet::new();
    loop {
        let bytes = tokio::select! {
            bytes = received.next() => bytes,
            Some(ended) = running.join_next() => {
                if let Ok(stream) = ended {
                    connections.close(stream);
                }
                continue;
            }
        };
        let Some(bytes) = bytes else { return Ok(()) };
        codec.push(&bytes);
        while let Some(frame) = codec.next_frame()? {
            let mut opened = None;
            let answer = match frame {
                Frame::Open { stream, headers, .. } => {
                    let opening = connections.opened(stream, &headers, running.len());
                    match opening {
                        Opening::Refuse(reason) => Some(spdy::reset(stream, reason)),
                        Opening::Wait => Some(codec.reply(stream)?),
                        Opening::Connect(pair) => {
                            opened = Some(pair);
                            Some(codec.reply(stream)?)
                        }
                    }
                }
                Frame::Data { stream, bytes, fin } => {
                    connections.data(stream, bytes, fin).await;
                    None
                }
                frame => connections.control(&frame)?,
            };
            if let Some(answer) = answer
                && target.messages.send(answer).await.is_err()
            {
                return Ok(());
            }
            // Started after the reply: nothing may be sent on a stream before it.
            if let Some(StreamPair { data, error, port }) = opened {
                let (sender, pieces) = mpsc::channel(PIECES_MAX);
                connections.open.insert(data, sender);
                let framing = SpdyPair { data, error, windows: connections.windows.clone() };
                let connection = target.clone().forward(port, framing, pieces);
                running.spawn(async move {
                    connection.await;
                    data
                });
            }
        }
    }
}

/// The streams of one connection, and the port of the pod that it is for.
#[derive(Debug, PartialEq, Eq)]
struct StreamPair {
    data: u32,
    error: u32,
    port: u16,
}

/// The result of a stream that the client opens.
#[derive(Debug, PartialEq, Eq)]
enum Opening {
    /// The other stream of the same request is still missing.
    Wait,
    Connect(StreamPair),
    Refuse(ResetReason),
}

impl SpdyConnections {
    /// Removes a connection's data stream: it has ended, or the client has reset it.
    fn close(&mut self, stream: u32) {
        self.open.remove(&stream);
        self.windows.close(stream);
    }

    /// Passes data to the pod's side; waits while its queue is full.
    async fn data(&mut self, stream: u32, bytes: Bytes, fin: bool) {
        if let Some(sender) = self.open.get(&stream)
            && !bytes.is_empty()
        {
            // Fails when the connection to the pod has ended.
            let _ = sender.send(bytes).await;
        }
        if fin {
            self.open.remove(&stream);
        }
    }

    /// Handles a frame that neither opens a stream nor carries data, and returns the response.
    fn control(&mut self, frame: &Frame) -> Result<Option<Bytes>, SpdyError> {
        match *frame {
            Frame::Reset { stream } => self.close(stream),
            Frame::Ping { id } => return Ok(spdy::is_of_client(id).then(|| spdy::ping(id))),
            Frame::GoAway => self.is_leaving = true,
            Frame::InitialWindow { bytes } => self.windows.set_initial(bytes),
            Frame::WindowUpdate { stream, bytes } => self.windows.update(stream, bytes)?,
            Frame::Open { .. } | Frame::Data { .. } => {}
        }
        Ok(None)
    }

    /// Finds a stream's partner (upstream: `httpStreamReceived` and `getStreamPair`).
    fn opened(&mut self, stream: u32, headers: &[(String, String)], running: usize) -> Opening {
        // Clients number their streams with increasing odd numbers.
        if stream.is_multiple_of(2) || stream <= self.newest {
            return Opening::Refuse(ResetReason::Protocol);
        }
        self.newest = stream;
        let header = |name: &str| {
            headers
                .iter()
                .find(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.as_str())
        };
        let port = header("port").and_then(|port| port.parse::<u16>().ok()).filter(|port| *port > 0);
        let is_data = match header("streamtype") {
            Some("data") => Some(true),
            Some("error") => Some(false),
            _ => None,
        };
        let (Some(port), Some(is_data)) = (port, is_data) else {
            return Opening::Refuse(ResetReason::Refused);
        };
        if is_data {
            self.windows.open(stream);
        }
        // Clients older than Kubernetes 1.2 send no request id: they open the error stream, then its data stream.
        let request = header("requestid").map(str::to_owned);
        let request =
            request.unwrap_or_else(|| if is_data { stream.saturating_sub(2) } else { stream }.to_string());
        match self.waiting.remove(&request) {
            Some(other) if other.is_data != is_data && other.port == port => {
                let (data, error) = if is_data { (stream, other.stream) } else { (other.stream, stream) };
                Opening::Connect(StreamPair { data, error, port })
            }
            None if !self.is_leaving && self.waiting.len() + running < CONNECTIONS_MAX => {
                self.waiting.insert(request, WaitingStream { stream, is_data, port });
                Opening::Wait
            }
            _ => {
                self.windows.close(stream);
                Opening::Refuse(ResetReason::Refused)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(kind: &str, port: &str, request: &str) -> Vec<(String, String)> {
        [("streamtype", kind), ("port", port), ("requestid", request)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec()
    }

    #[test]
    fn a_connection_is_two_streams_of_one_request() {
        let mut streams = SpdyConnections::default();
        let mut open = |stream, kind, port, request| streams.opened(stream, &headers(kind, port, request), 0);
        let connect = |data, error, port| Opening::Connect(StreamPair { data, error, port });
        let refused = Opening::Refuse(ResetReason::Refused);
        assert_eq!(open(1, "error", "80", "0"), Opening::Wait);
        assert_eq!(open(3, "data", "80", "0"), connect(3, 1, 80));
        assert_eq!(open(5, "data", "81", "1"), Opening::Wait, "in either order");
        assert_eq!(open(7, "error", "81", "1"), connect(5, 7, 81));
        assert_eq!(open(9, "other", "80", "2"), refused);
        assert_eq!(open(11, "error", "x", "3"), refused);
        assert_eq!(open(13, "error", "0", "3"), refused);
        assert_eq!(open(15, "error", "80", "4"), Opening::Wait);
        assert_eq!(open(17, "error", "80", "4"), refused, "two of one kind");
        let wrong = Opening::Refuse(ResetReason::Protocol);
        assert_eq!(open(17, "error", "80", "5"), wrong);
        assert_eq!(open(18, "error", "80", "5"), wrong);
    }

    #[test]
    fn streams_without_a_request_follow_each_other() {
        let mut streams = SpdyConnections::default();
        let without = |kind: &str| headers(kind, "80", "")[..2].to_vec();
        assert_eq!(streams.opened(1, &without("error"), 0), Opening::Wait);
        assert_eq!(
            streams.opened(3, &without("data"), 0),
            Opening::Connect(StreamPair { data: 3, error: 1, port: 80 })
        );
    }

    #[test]
    fn the_number_of_connections_is_limited() {
        let mut streams = SpdyConnections::default();
        let refused = Opening::Refuse(ResetReason::Refused);
        assert_eq!(streams.opened(1, &headers("error", "80", "0"), CONNECTIONS_MAX - 1), Opening::Wait);
        assert_eq!(streams.opened(3, &headers("error", "80", "1"), CONNECTIONS_MAX - 1), refused);
        assert!(matches!(
            streams.opened(5, &headers("data", "80", "0"), CONNECTIONS_MAX - 1),
            Opening::Connect(_)
        ));
        streams.is_leaving = true;
        assert_eq!(streams.opened(7, &headers("error", "80", "2"), 0), refused, "after GOAWAY");
    }
}
