//! Exec and attach over SPDY/3.1, as kubectl before 1.31 and client-go's `NewSPDYExecutor` speak it.
//!
//! ```text
//!   upgraded ──▶ Opening ── every stream is open ──▶ Running ── the process has ended ──▶ Ended ──▶ (closed)
//!                   │ 30 seconds                        │ the client has gone               the client, or 30 seconds
//!                   ▼                                   ▼
//!                (closed)                      (the process is killed)
//! ```
//!
//! The client opens one stream for each of the process's (`streamtype`: stdin, stdout, stderr, resize), and `error`, on
//! which the outcome is sent. The protocol's versions are upstream's (`k8s.io/apimachinery/pkg/util/remotecommand`):
//! version 4 sends the outcome as a `Status`, earlier versions send a message in case of an error; the first two have
//! no terminal sizes.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use futures::StreamExt as _;
use mayfly_runtime::{
    ProcessSession, RuntimeError, StreamOptions, TerminalSize,
    streams::{InputStream, OutputStream},
};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::{
    channels::{Size, failure, outcome},
    spdy::{self, Codec, Frame, ResetReason, SpdyError, transport, windows::SendWindows},
};

const V4: &str = "v4.channel.k8s.io";
const V3: &str = "v3.channel.k8s.io";
pub(super) const PROTOCOLS: [&str; 4] = [V4, V3, "v2.channel.k8s.io", "channel.k8s.io"];

/// The timeout for a client to open its streams (upstream's `DefaultStreamCreationTimeout`).
const OPENING_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout for a client to disconnect after the outcome. The client closes the connection: a peer that sees it
/// closed may drop data that it has not read yet.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(30);
/// Frames queued for a slow client; beyond these, the process blocks.
const FRAMES_MAX: usize = 16;
/// Chunks of input queued for the process; beyond these, the client blocks.
const PIECES_MAX: usize = 4;
/// The longest text of a terminal size, in bytes.
const SIZE_BYTES_MAX: usize = 1 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum StreamKind {
    Error,
    Stdin,
    Stdout,
    Stderr,
    Resize,
}

impl StreamKind {
    fn of(headers: &[(String, String)]) -> Option<Self> {
        let header = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("streamtype"));
        Some(match header?.1.as_str() {
            "error" => Self::Error,
            "stdin" => Self::Stdin,
            "stdout" => Self::Stdout,
            "stderr" => Self::Stderr,
            "resize" => Self::Resize,
            _ => return None,
        })
    }
}

/// The streams of a session by kind: the expected ones, and the open ones. Pure.
struct Openings {
    expected: Vec<StreamKind>,
    open: HashMap<StreamKind, u32>,
    newest: u32,
}

impl Openings {
    fn new(protocol: &str, options: StreamOptions) -> Self {
        let has_sizes = options.tty && [V4, V3].contains(&protocol);
        let kinds = [
            (StreamKind::Error, true),
            (StreamKind::Stdin, options.stdin),
            (StreamKind::Stdout, options.stdout),
            // A terminal has one output (upstream ignores the option, too).
            (StreamKind::Stderr, options.stderr && !options.tty),
            (StreamKind::Resize, has_sizes),
        ];
        let expected = kinds.into_iter().filter(|(_, wanted)| *wanted).map(|(kind, _)| kind).collect();
        Self { expected, open: HashMap::new(), newest: 0 }
    }

    /// Adds a stream that the client opens, if it is expected.
    fn open(&mut self, stream: u32, headers: &[(String, String)]) -> Result<StreamKind, ResetReason> {
        // Clients number their streams with increasing odd numbers.
        if stream.is_multiple_of(2) || stream <= self.newest {
            return Err(ResetReason::Protocol);
        }
        self.newest = stream;
        let kind = StreamKind::of(headers).filter(|kind| self.expected.contains(kind));
        let kind = kind.filter(|kind| !self.open.contains_key(kind)).ok_or(ResetReason::Refused)?;
        self.open.insert(kind, stream);
        Ok(kind)
    }

    fn is_complete(&self) -> bool {
        self.open.len() == self.expected.len()
    }

    fn kind(&self, stream: u32) -> Option<StreamKind> {
        self.open.iter().find(|(_, known)| **known == stream).map(|(kind, _)| *kind)
    }
}

/// The sending side of a session.
#[derive(Clone)]
struct ClientOutput {
    frames: mpsc::Sender<Bytes>,
    windows: std::sync::Arc<SendWindows>,
}

impl ClientOutput {
    /// Sends bytes on a stream. Fails when the stream or the connection is closed.
    async fn send(&self, stream: u32, mut bytes: &[u8]) -> Result<(), ()> {
        while !bytes.is_empty() {
            let wanted = bytes.len().min(spdy::DATA_BYTES_MAX);
            let taken = self.windows.reserve(stream, wanted).await.ok_or(())?;
            let (now, later) = bytes.split_at(taken);
            self.frames.send(spdy::data(stream, now, false)).await.map_err(drop)?;
            bytes = later;
        }
        Ok(())
    }

    async fn end(&self, stream: u32) {
        // If the client has disconnected, the receiving side of the session notices it.
        let _ = self.frames.send(spdy::data(stream, &[], true)).await;
    }

    /// Copies an output of the process until it ends, or the client resets the stream.
    async fn copy(&self, output: Option<OutputStream>, stream: Option<u32>) {
        let Some(stream) = stream else { return };
        if let Some(mut output) = output {
            let mut buffer = vec![0; spdy::DATA_BYTES_MAX];
            while let Ok(read) = output.read(&mut buffer).await {
                if read == 0 || self.send(stream, &buffer[..read]).await.is_err() {
                    break;
                }
            }
        }
        self.end(stream).await;
    }
}

/// Runs a session until the process ends or the client disconnects. `open` starts the process, or attaches to it.
pub(super) async fn run(
    connection: impl AsyncRead + AsyncWrite + Unpin + Send,
    protocol: &str,
    options: StreamOptions,
    open: impl Future<Output = Result<ProcessSession, RuntimeError>>,
) {
    let (reader, writer) = tokio::io::split(connection);
    let (frames, queue) = mpsc::channel(FRAMES_MAX);
    let client = ClientOutput { frames, windows: Default::default() };
    let (opened, streams) = oneshot::channel();
    let (stdin, pieces) = mpsc::channel(PIECES_MAX);
    let (sizes, size) = watch::channel(None);
    let input = ClientInput {
        openings: Openings::new(protocol, options),
        opened: Some(opened),
        stdin: Some(stdin),
        sizes: Sizes { text: Vec::new(), newest: sizes },
        client: client.clone(),
    };
    let process = async {
        let Ok(Ok(streams)) = timeout(OPENING_TIMEOUT, streams).await else {
            return tracing::debug!("a client did not open its streams in time");
        };
        serve(&client, protocol, &streams, open, pieces, size).await;
        tokio::time::sleep(CLOSING_TIMEOUT).await;
    };
    tokio::select! {
        ended = input.run(reader) => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a session ended");
            }
        }
        () = process => {}
        // The client disconnected.
        _ = transport::send(writer, queue) => {}
    }
}

/// Runs the process, from the opening of all streams until the outcome is sent.
async fn serve(
    client: &ClientOutput,
    protocol: &str,
    streams: &HashMap<StreamKind, u32>,
    open: impl Future<Output = Result<ProcessSession, RuntimeError>>,
    pieces: mpsc::Receiver<Bytes>,
    size: watch::Receiver<Option<TerminalSize>>,
) {
    let stream = |kind| streams.get(&kind).copied();
    let status = match open.await {
        Err(error) => {
            for kind in [StreamKind::Stdout, StreamKind::Stderr] {
                client.copy(None, stream(kind)).await;
            }
            failure(&error)
        }
        Ok(ProcessSession { stdin, stdout, stderr, resize, exit }) => {
            let outputs = async {
                tokio::join!(
                    client.copy(stdout, stream(StreamKind::Stdout)),
                    client.copy(stderr, stream(StreamKind::Stderr))
                );
                match exit.await {
                    Ok(code) => outcome(code),
                    Err(error) => failure(&error),
                }
            };
            let inputs = async {
                tokio::join!(
                    feed(client, stream(StreamKind::Stdin), stdin, pieces),
                    resize_terminal(resize, size)
                )
            };
            let mut outputs = std::pin::pin!(outputs);
            tokio::select! {
                biased;
                status = &mut outputs => status,
                _ = inputs => outputs.await,
            }
        }
    };
    if let Some(error) = stream(StreamKind::Error) {
        // The session is over whether or not the client receives the outcome.
        let _ = client.send(error, outcome_text(protocol, &status).as_bytes()).await;
    }
    for kind in [StreamKind::Error, StreamKind::Stdin, StreamKind::Resize] {
        if let Some(stream) = stream(kind) {
            client.end(stream).await;
        }
    }
    let newest = streams.values().max().copied().unwrap_or(0);
    // Errors are ignored for the same reason.
    let _ = client.frames.send(spdy::go_away(newest)).await;
}

/// The content of the error stream: a `Status` in version 4, an error message in earlier versions.
fn outcome_text(protocol: &str, status: &Value) -> String {
    match (protocol, status["status"].as_str()) {
        (V4, _) => status.to_string(),
        (_, Some("Success")) => String::new(),
        _ => status["message"].as_str().unwrap_or_default().to_owned(),
    }
}

/// Copies the client's input to the process until either side ends.
async fn feed(
    client: &ClientOutput,
    stream: Option<u32>,
    stdin: Option<InputStream>,
    mut pieces: mpsc::Receiver<Bytes>,
) {
    let (Some(mut stdin), Some(stream)) = (stdin, stream) else { return };
    while let Some(piece) = pieces.recv().await {
        if stdin.write_all(&piece).await.is_err() {
            // The process reads no more; the end of its outputs ends the session. The remaining input is discarded.
            return;
        }
        if client.windows.is_in_use()
            && client.frames.send(spdy::consumed(stream, piece.len())).await.is_err()
        {
            return;
        }
    }
    // Signals end of file; fails if the process reads no more.
    let _ = stdin.shutdown().await;
}

async fn resize_terminal(
    resize: Option<mpsc::Sender<TerminalSize>>,
    mut size: watch::Receiver<Option<TerminalSize>>,
) {
    let Some(resize) = resize else { return };
    // The first size may have been set before the process started.
    size.mark_changed();
    while size.changed().await.is_ok() {
        let newest = *size.borrow_and_update();
        if let Some(newest) = newest
            && resize.send(newest).await.is_err()
        {
            return;
        }
    }
}

/// Parses terminal sizes: concatenated JSON objects, in chunks of any length.
struct Sizes {
    text: Vec<u8>,
    newest: watch::Sender<Option<TerminalSize>>,
}

impl Sizes {
    fn push(&mut self, bytes: &[u8]) {
        self.text.extend_from_slice(bytes);
        let mut objects = serde_json::Deserializer::from_slice(&self.text).into_iter::<Size>();
        let mut newest = None;
        while let Some(Ok(size)) = objects.next() {
            newest = Some(TerminalSize { width: size.width, height: size.height });
        }
        let used = objects.byte_offset();
        self.text.drain(..used);
        if self.text.len() > SIZE_BYTES_MAX {
            // Not a valid size, and without delimiters the text after it cannot be parsed either.
            self.text.clear();
        }
        if newest.is_some() {
            self.newest.send_replace(newest);
        }
    }
}

/// The receiving side of a session.
struct ClientInput {
    openings: Openings,
    /// Completed when all streams are open.
    opened: Option<oneshot::Sender<HashMap<StreamKind, u32>>>,
    /// `None` after the input's end.
    stdin: Option<mpsc::Sender<Bytes>>,
    sizes: Sizes,
    client: ClientOutput,
}

impl ClientInput {
    /// Passes input to the process, unless it reads no more.
    async fn give_input(&mut self, bytes: Bytes) {
        if let Some(stdin) = &self.stdin
            && stdin.send(bytes).await.is_err()
        {
            self.stdin = None;
        }
    }

    /// Handles frames until the client disconnects.
    async fn run(mut self, reader: impl AsyncRead + Unpin + Send) -> Result<(), SpdyError> {
        let mut codec = Codec::new()?;
        let mut received = std::pin::pin!(transport::received(reader));
        while let Some(bytes) = received.next().await {
            codec.push(&bytes);
            while let Some(frame) = codec.next_frame()? {
                if let Some(answer) = self.handle_frame(frame, &mut codec).await?
                    && self.client.frames.send(answer).await.is_err()
                {
                    return Ok(());
                }
                // Sent after the reply: nothing may be sent on a stream before it.
                self.tell_opened();
            }
        }
        Ok(())
    }

    /// Handles a frame, and returns the response.
    async fn handle_frame(&mut self, frame: Frame, codec: &mut Codec) -> Result<Option<Bytes>, SpdyError> {
        let windows = &self.client.windows;
        match frame {
            Frame::Open { stream, headers, fin } => {
                // Encoded before the check: a refused header block is still part of the compression stream, and so is
                // its reply.
                let kind = match self.openings.open(stream, &headers) {
                    Ok(kind) => kind,
                    Err(reason) => return Ok(Some(spdy::reset(stream, reason))),
                };
                windows.open(stream);
                if fin && kind == StreamKind::Stdin {
                    self.stdin = None;
                }
                return codec.reply(stream).map(Some);
            }
            Frame::Data { stream, bytes, fin } => {
                let kind = self.openings.kind(stream);
                match kind {
                    Some(StreamKind::Stdin) if !bytes.is_empty() => self.give_input(bytes).await,
                    Some(StreamKind::Resize) => self.sizes.push(&bytes),
                    _ => {}
                }
                if fin && kind == Some(StreamKind::Stdin) {
                    self.stdin = None;
                }
            }
            Frame::Reset { stream } => {
                windows.close(stream);
                if self.openings.kind(stream) == Some(StreamKind::Stdin) {
                    self.stdin = None;
                }
            }
            Frame::Ping { id } if spdy::is_of_client(id) => return Ok(Some(spdy::ping(id))),
            // A reply to our ping, or the announcement of no more streams: open streams continue.
            Frame::Ping { .. } | Frame::GoAway => {}
            Frame::InitialWindow { bytes } => windows.set_initial(bytes),
            Frame::WindowUpdate { stream, bytes } => windows.update(stream, bytes)?,
        }
        Ok(None)
    }

    fn tell_opened(&mut self) {
        if self.openings.is_complete()
            && let Some(opened) = self.opened.take()
        {
            // The receiver is gone after the timeout: the session ends.
            let _ = opened.send(self.openings.open.clone());
        }
    }
}

#[cfg(test)]
mod tests;
