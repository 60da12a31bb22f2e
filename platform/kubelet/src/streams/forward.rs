//! Port-forward: TCP connections into a pod over one connection of the client, in two protocols.
//!
//! kubectl speaks SPDY/3.1, with two streams for each connection, one for data and one for errors: newer versions in
//! the messages of a WebSocket (`SPDY/3.1+portforward.k8s.io`), older ones on the connection itself
//! (`portforward.k8s.io`). Other clients use channels of a WebSocket (`v4.channel.k8s.io`): for the n-th port of the
//! query channel 2n carries the data of one connection and 2n+1 its error; both begin with the port's number.

use std::sync::Arc;

use futures::{SinkExt as _, Stream, StreamExt as _, stream::SplitSink};
use mayfly_runtime::{PodUid, Runtime};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
};
use tokio_tungstenite::tungstenite::{Bytes, Message};

use super::{
    spdy::{self, transport},
    upgrade::{Protocols, Upgraded, WebSocket},
};

mod connections;

const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
/// In the order of preference: kubectl's protocol first.
pub(super) const PROTOCOLS: Protocols = Protocols {
    websocket: &[TUNNEL, "v4.channel.k8s.io", "portforward.k8s.io", "v5.channel.k8s.io"],
    spdy: &["portforward.k8s.io"],
};

/// Messages queued for a slow client; beyond these, the pod's connections block.
const MESSAGES_MAX: usize = 32;
/// Chunks of one connection queued for the pod.
const PIECES_MAX: usize = 16;

/// The encoding of a connection's bytes for the client: frames of SPDY, or messages of channels.
trait Framing: Send + Sync + 'static {
    /// Waits until data may be sent, and returns the number of bytes, at most `wanted`; `None` when the client accepts
    /// no more.
    fn reserve(&self, wanted: usize) -> impl Future<Output = Option<usize>> + Send;
    fn data(&self, bytes: &[u8]) -> Bytes;
    fn end(&self) -> Option<Bytes>;
    fn error(&self, text: &str) -> Bytes;
    fn error_end(&self) -> Option<Bytes>;
    /// Reports to the client that the pod has consumed this many bytes.
    fn consumed(&self, bytes: usize) -> Option<Bytes>;
    /// Returns when the client has closed the connection.
    fn closed(&self) -> impl Future<Output = ()> + Send;
}

/// The data and error channels of one connection.
struct ChannelPair {
    data: u8,
}

impl ChannelPair {
    fn message(channel: u8, bytes: &[u8]) -> Bytes {
        [&[channel], bytes].concat().into()
    }
}

impl Framing for ChannelPair {
    async fn reserve(&self, wanted: usize) -> Option<usize> {
        Some(wanted)
    }
    fn data(&self, bytes: &[u8]) -> Bytes {
        Self::message(self.data, bytes)
    }
    fn end(&self) -> Option<Bytes> {
        None
    }
    fn error(&self, text: &str) -> Bytes {
        Self::message(self.data + 1, text.as_bytes())
    }
    fn error_end(&self) -> Option<Bytes> {
        None
    }
    fn consumed(&self, _: usize) -> Option<Bytes> {
        None
    }
    async fn closed(&self) {
        std::future::pending().await
    }
}

/// The pod whose ports are forwarded, and the connection to the client.
#[derive(Clone)]
struct ForwardTarget {
    runtime: Arc<dyn Runtime>,
    uid: PodUid,
    messages: mpsc::Sender<Bytes>,
}

impl ForwardTarget {
    /// Forwards one connection, from its opening to its end.
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

    /// Copies both directions until the pod closes its side.
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
                if let Some(message) = framing.consumed(piece.len())
                    && self.messages.send(message).await.is_err()
                {
                    break;
                }
            }
            // The client has sent everything; responses may still arrive.
            let _ = writer.shutdown().await;
        };
        let from_pod = async {
            let mut buffer = vec![0; spdy::DATA_BYTES_MAX];
            loop {
                match reader.read(&mut buffer).await {
                    Ok(0) => return Ok(()),
                    Ok(read) => {
                        let mut bytes = &buffer[..read];
                        while !bytes.is_empty() {
                            let Some(taken) = framing.reserve(bytes.len()).await else { return Ok(()) };
                            let (now, later) = bytes.split_at(taken);
                            if self.messages.send(framing.data(now)).await.is_err() {
                                return Ok(());
                            }
                            bytes = later;
                        }
                    }
                    Err(error) => return Err(error.to_string()),
                }
            }
        };
        let mut from_pod = std::pin::pin!(from_pod);
        tokio::select! {
            biased;
            result = &mut from_pod => return result,
            () = framing.closed() => return Ok(()),
            () = to_pod => {}
        }
        tokio::select! {
            result = from_pod => result,
            () = framing.closed() => Ok(()),
        }
    }
}

/// Forwards until the client disconnects.
pub(super) async fn run(connection: Upgraded, runtime: Arc<dyn Runtime>, uid: PodUid, ports: Vec<u16>) {
    let (messages, queue) = mpsc::channel(MESSAGES_MAX);
    let target = ForwardTarget { runtime, uid, messages };
    match connection {
        Upgraded::Spdy(connection, _) => {
            let (reader, writer) = tokio::io::split(connection);
            tokio::select! {
                () = serve_spdy(&target, transport::received(reader)) => {}
                // The client disconnected.
                _ = transport::send(writer, queue) => {}
            }
        }
        Upgraded::WebSocket(socket, protocol) => {
            let (sink, source) = (*socket).split();
            let received = source
                .take_while(|message| std::future::ready(!matches!(message, Err(_) | Ok(Message::Close(_)))))
                .filter_map(|message| {
                    std::future::ready(match message {
                        Ok(Message::Binary(bytes)) => Some(bytes),
                        _ => None,
                    })
                });
            let serve = async {
                match protocol == TUNNEL {
                    true => serve_spdy(&target, received).await,
                    false => channels(&target, &ports, &mut std::pin::pin!(received)).await,
                }
            };
            tokio::select! {
                () = serve => {}
                () = write(sink, queue) => {}
            }
        }
    }
}

async fn write(mut sink: SplitSink<WebSocket, Message>, mut queue: mpsc::Receiver<Bytes>) {
    while let Some(message) = queue.recv().await {
        if sink.send(Message::Binary(message)).await.is_err() {
            return;
        }
    }
}

async fn serve_spdy(target: &ForwardTarget, received: impl Stream<Item = Bytes>) {
    let mut received = std::pin::pin!(received);
    if let Err(error) = connections::serve(target, &mut received).await {
        tracing::debug!(%error, "a port-forward ended");
    }
}

/// The protocol of channels: one connection for each port of the query.
async fn channels(target: &ForwardTarget, ports: &[u16], received: &mut (impl Stream<Item = Bytes> + Unpin)) {
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
