//! Port-forward: TCP connections into a pod over one WebSocket, in two protocols.
//!
//! kubectl tunnels SPDY/3.1 in the messages (`SPDY/3.1+portforward.k8s.io`): two streams for each connection, one for
//! its data and one for what went wrong. Other clients use channels (`v4.channel.k8s.io`): for the n-th port of the
//! query channel 2n carries the data of one connection and 2n+1 its error; both begin with the port's number.

use std::{collections::HashMap, sync::Arc};

use futures::{SinkExt as _, StreamExt as _, stream::SplitSink};
use mayfly_runtime::{PodUid, Runtime};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
    task::JoinSet,
};
use tokio_tungstenite::tungstenite::{Bytes, Message};

use super::{
    WebSocket,
    spdy::{self, Codec, Frame, SpdyError},
};

const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
/// kubectl's first.
pub(super) const PROTOCOLS: [&str; 4] =
    [TUNNEL, "v4.channel.k8s.io", "portforward.k8s.io", "v5.channel.k8s.io"];

/// Messages that wait for a slow client; then the pod's connections wait.
const MESSAGES_MAX: usize = 32;
/// Pieces of one connection that wait for the pod.
const PIECES_MAX: usize = 16;
/// The largest number of connections of one client.
const CONNECTIONS_MAX: usize = 256;

/// The encoding of a connection's bytes for the client.
trait Framing: Send + Sync + 'static {
    fn data(&self, bytes: &[u8]) -> Message;
    fn end(&self) -> Option<Message>;
    fn error(&self, text: &str) -> Message;
    fn error_end(&self) -> Option<Message>;
}

/// Two SPDY streams.
struct SpdyPair {
    data: u32,
    error: u32,
}

impl Framing for SpdyPair {
    fn data(&self, bytes: &[u8]) -> Message {
        Message::Binary(spdy::data(self.data, bytes, false))
    }
    fn end(&self) -> Option<Message> {
        Some(Message::Binary(spdy::data(self.data, &[], true)))
    }
    fn error(&self, text: &str) -> Message {
        Message::Binary(spdy::data(self.error, text.as_bytes(), false))
    }
    fn error_end(&self) -> Option<Message> {
        Some(Message::Binary(spdy::data(self.error, &[], true)))
    }
}

/// Two channels.
struct ChannelPair {
    data: u8,
}

impl ChannelPair {
    fn message(channel: u8, bytes: &[u8]) -> Message {
        Message::Binary([&[channel], bytes].concat().into())
    }
}

impl Framing for ChannelPair {
    fn data(&self, bytes: &[u8]) -> Message {
        Self::message(self.data, bytes)
    }
    fn end(&self) -> Option<Message> {
        None
    }
    fn error(&self, text: &str) -> Message {
        Self::message(self.data + 1, text.as_bytes())
    }
    fn error_end(&self) -> Option<Message> {
        None
    }
}

/// The pod whose ports are forwarded, and the connection to the client.
#[derive(Clone)]
struct ForwardTarget {
    runtime: Arc<dyn Runtime>,
    uid: PodUid,
    messages: mpsc::Sender<Message>,
}

impl ForwardTarget {
    /// One connection, from its opening to its end.
    async fn forward(self, port: u16, framing: impl Framing, mut pieces: mpsc::Receiver<Bytes>) {
        let connected = match self.runtime.streams() {
            Some(streams) => streams.connect_port(&self.uid, port).await.map_err(|error| error.to_string()),
            None => Err("this pod's ports cannot be forwarded".into()),
        };
        let result = match connected {
            Ok(connection) => self.copy(connection, &framing, &mut pieces).await,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            let text = format!("error forwarding port {port} to pod {}: {error}", self.uid);
            let _ = self.messages.send(framing.error(&text)).await;
        }
        for end in framing.error_end().into_iter().chain(framing.end()) {
            let _ = self.messages.send(end).await;
        }
    }

    /// Both directions; over when the pod's side has ended.
    async fn copy(
        &self,
        connection: Box<dyn mayfly_runtime::streams::PortStream>,
        framing: &impl Framing,
        pieces: &mut mpsc::Receiver<Bytes>,
    ) -> Result<(), String> {
        let (mut reader, mut writer) = tokio::io::split(connection);
        let to_pod = async {
            while let Some(piece) = pieces.recv().await {
                if writer.write_all(&piece).await.is_err() {
                    break;
                }
            }
            // The client has sent everything; answers still come.
            let _ = writer.shutdown().await;
        };
        let from_pod = async {
            let mut buffer = vec![0; spdy::DATA_BYTES_MAX];
            loop {
                match reader.read(&mut buffer).await {
                    Ok(0) => return Ok(()),
                    Ok(read) => {
                        if self.messages.send(framing.data(&buffer[..read])).await.is_err() {
                            return Ok(());
                        }
                    }
                    Err(error) => return Err(error.to_string()),
                }
            }
        };
        let mut from_pod = std::pin::pin!(from_pod);
        tokio::select! {
            biased;
            result = &mut from_pod => result,
            () = to_pod => from_pod.await,
        }
    }
}

/// Forwards until the client disconnects.
pub(super) async fn run(
    socket: WebSocket,
    protocol: &str,
    runtime: Arc<dyn Runtime>,
    uid: PodUid,
    ports: Vec<u16>,
) {
    let (sink, source) = socket.split();
    let (messages, queue) = mpsc::channel(MESSAGES_MAX);
    let target = ForwardTarget { runtime, uid, messages };
    let received = source
        .take_while(|message| std::future::ready(!matches!(message, Err(_) | Ok(Message::Close(_)))))
        .filter_map(|message| {
            std::future::ready(match message {
                Ok(Message::Binary(bytes)) => Some(bytes),
                _ => None,
            })
        });
    let serve = async {
        let mut received = std::pin::pin!(received);
        match protocol == TUNNEL {
            true => {
                if let Err(error) = tunnel(&target, &mut received).await {
                    tracing::debug!(%error, "a port-forward ended");
                }
            }
            false => channels(&target, &ports, &mut received).await,
        }
    };
    tokio::select! {
        () = serve => {}
        () = write(sink, queue) => {}
    }
}

async fn write(mut sink: SplitSink<WebSocket, Message>, mut queue: mpsc::Receiver<Message>) {
    while let Some(message) = queue.recv().await {
        if sink.send(message).await.is_err() {
            return;
        }
    }
}

/// The connections of a SPDY tunnel.
#[derive(Default)]
struct Tunnel {
    /// Error streams whose data stream has not been opened yet, by request.
    waiting: HashMap<String, u32>,
    /// The receivers of streams' data.
    open: HashMap<u32, mpsc::Sender<Bytes>>,
}

async fn tunnel(
    target: &ForwardTarget,
    received: &mut (impl futures::Stream<Item = Bytes> + Unpin),
) -> Result<(), SpdyError> {
    let (mut codec, mut tunnel) = (Codec::new()?, Tunnel::default());
    // Tasks, so that one connection does not wait for another's queue; dropped with the tunnel.
    let mut running = JoinSet::new();
    loop {
        let bytes = tokio::select! {
            bytes = received.next() => bytes,
            Some(ended) = running.join_next() => {
                if let Ok(stream) = ended {
                    tunnel.open.remove(&stream);
                }
                continue;
            }
        };
        let Some(bytes) = bytes else { return Ok(()) };
        codec.push(&bytes);
        while let Some(frame) = codec.next_frame()? {
            let answer = match frame {
                Frame::Open { stream, headers, .. } => {
                    let reply = codec.reply(stream)?;
                    match tunnel.opened(stream, &headers, running.len()) {
                        Opening::Wait => Some(reply),
                        Opening::Refuse => Some(spdy::reset(stream)),
                        Opening::Connect { port, error } => {
                            let (sender, pieces) = mpsc::channel(PIECES_MAX);
                            tunnel.open.insert(stream, sender);
                            let connection =
                                target.clone().forward(port, SpdyPair { data: stream, error }, pieces);
                            running.spawn(async move {
                                connection.await;
                                stream
                            });
                            Some(reply)
                        }
                    }
                }
                Frame::Data { stream, bytes, fin } => {
                    if let Some(sender) = tunnel.open.get(&stream)
                        && !bytes.is_empty()
                    {
                        let _ = sender.send(bytes).await;
                    }
                    if fin {
                        tunnel.open.remove(&stream);
                    }
                    None
                }
                Frame::Reset { stream } => {
                    tunnel.open.remove(&stream);
                    None
                }
                Frame::Ping { id } => Some(spdy::ping(id)),
                Frame::GoAway => return Ok(()),
            };
            if let Some(answer) = answer
                && target.messages.send(Message::Binary(answer)).await.is_err()
            {
                return Ok(());
            }
        }
    }
}

/// The handling of a stream that the client opens.
#[derive(Debug, PartialEq, Eq)]
enum Opening {
    /// An error stream; the data stream of the same request follows.
    Wait,
    Connect {
        port: u16,
        error: u32,
    },
    Refuse,
}

impl Tunnel {
    fn opened(&mut self, stream: u32, headers: &[(String, String)], running: usize) -> Opening {
        let header = |name: &str| {
            headers
                .iter()
                .find(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.as_str())
        };
        let request = header("requestid").unwrap_or_default().to_owned();
        match header("streamtype") {
            Some("error") if self.waiting.len() < CONNECTIONS_MAX => {
                self.waiting.insert(request, stream);
                Opening::Wait
            }
            Some("data") if running < CONNECTIONS_MAX => {
                let port = header("port").and_then(|port| port.parse().ok());
                match (port, self.waiting.remove(&request)) {
                    (Some(port), Some(error)) => Opening::Connect { port, error },
                    _ => Opening::Refuse,
                }
            }
            _ => Opening::Refuse,
        }
    }
}

/// The protocol of channels: one connection for each port of the query.
async fn channels(
    target: &ForwardTarget,
    ports: &[u16],
    received: &mut (impl futures::Stream<Item = Bytes> + Unpin),
) {
    let mut senders = Vec::new();
    let mut connections = Vec::new();
    for (at, port) in ports.iter().take(usize::from(u8::MAX / 2)).enumerate() {
        let data = u8::try_from(2 * at).unwrap_or(u8::MAX - 1);
        for channel in [data, data + 1] {
            let head = ChannelPair::message(channel, &port.to_le_bytes());
            if target.messages.send(head).await.is_err() {
                return;
            }
        }
        let (sender, pieces) = mpsc::channel(PIECES_MAX);
        senders.push(sender);
        connections.push(target.clone().forward(*port, ChannelPair { data }, pieces));
    }
    let input = async {
        while let Some(bytes) = received.next().await {
            let Some((channel, bytes)) = bytes.split_first() else { continue };
            if channel % 2 == 0
                && let Some(sender) = senders.get(usize::from(channel / 2))
            {
                let _ = sender.send(Bytes::copy_from_slice(bytes)).await;
            }
        }
    };
    tokio::select! {
        () = input => {}
        _ = futures::future::join_all(connections) => {}
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
        let mut tunnel = Tunnel::default();
        assert_eq!(tunnel.opened(1, &headers("error", "80", "0"), 0), Opening::Wait);
        assert_eq!(tunnel.opened(3, &headers("data", "80", "0"), 0), Opening::Connect { port: 80, error: 1 });
        assert_eq!(tunnel.opened(5, &headers("data", "80", "0"), 0), Opening::Refuse, "no error stream");
        assert_eq!(tunnel.opened(7, &headers("other", "80", "1"), 0), Opening::Refuse);
        assert_eq!(tunnel.opened(9, &headers("error", "x", "2"), 0), Opening::Wait);
        assert_eq!(tunnel.opened(11, &headers("data", "x", "2"), 0), Opening::Refuse, "no port");
        tunnel.opened(13, &headers("error", "80", "3"), 0);
        assert_eq!(tunnel.opened(15, &headers("data", "80", "3"), CONNECTIONS_MAX), Opening::Refuse);
    }
}
