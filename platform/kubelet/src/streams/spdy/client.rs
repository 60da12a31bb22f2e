//! The client's side in tests.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use super::{headers::HeaderEncoder, *};

pub(crate) struct SpdyClient(HeaderEncoder);

impl SpdyClient {
    pub(crate) fn new() -> Self {
        Self(HeaderEncoder::new().unwrap())
    }

    pub(crate) fn open(&mut self, stream: u32, headers: &[(&str, &str)]) -> Bytes {
        let compressed = self.0.encode(headers).unwrap();
        control_frame(SYN_STREAM, &[&stream.to_be_bytes()[..], &[0; 6], &compressed].concat())
    }

    pub(crate) fn more_headers(&mut self, stream: u32, headers: &[(&str, &str)]) -> Bytes {
        let compressed = self.0.encode(headers).unwrap();
        control_frame(HEADERS, &[&stream.to_be_bytes()[..], &compressed].concat())
    }
}

/// Announces the initial window of streams.
pub(crate) fn initial_window(bytes: u32) -> Bytes {
    let setting = [1, INITIAL_WINDOW_SIZE, bytes].map(u32::to_be_bytes).concat();
    control_frame(SETTINGS, &setting)
}

/// A client's connection.
pub(crate) struct SpdyTestConnection {
    io: DuplexStream,
    client: SpdyClient,
    codec: Codec,
}

impl SpdyTestConnection {
    pub(crate) fn new(io: DuplexStream) -> Self {
        Self { io, client: SpdyClient::new(), codec: Codec::new().unwrap() }
    }

    pub(crate) async fn open(&mut self, stream: u32, kind: &str) {
        let frame = self.client.open(stream, &[("streamtype", kind)]);
        self.send(frame).await;
    }

    pub(crate) async fn send(&mut self, frame: Bytes) {
        self.io.write_all(&frame).await.unwrap();
    }

    /// The next frame that the server sends, except pings; `None` when it has closed the connection.
    pub(crate) async fn frame(&mut self) -> Option<Frame> {
        loop {
            match self.codec.next_frame().unwrap() {
                Some(Frame::Ping { id }) if !is_of_client(id) => {}
                Some(frame) => return Some(frame),
                None => {
                    let mut piece = [0; 1024];
                    match self.io.read(&mut piece).await {
                        Ok(0) | Err(_) => return None,
                        Ok(read) => self.codec.push(&piece[..read]),
                    }
                }
            }
        }
    }

    /// The content of each stream that has ended before the server's GOAWAY.
    pub(crate) async fn until_go_away(&mut self) -> std::collections::BTreeMap<u32, Vec<u8>> {
        let (mut open, mut ended) = (std::collections::BTreeMap::<u32, Vec<u8>>::new(), Vec::new());
        loop {
            match self.frame().await.unwrap() {
                Frame::Data { stream, bytes, fin } => {
                    assert!(!ended.contains(&stream), "data of a stream that has ended");
                    open.entry(stream).or_default().extend_from_slice(&bytes);
                    if fin {
                        ended.push(stream);
                    }
                }
                Frame::GoAway => {
                    open.retain(|stream, _| ended.contains(stream));
                    return open;
                }
                _ => {}
            }
        }
    }
}
