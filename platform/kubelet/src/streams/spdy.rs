//! SPDY/3.1, the subset for exec, attach and port-forward: older clients speak it on the connection itself, newer ones
//! within the messages of a WebSocket.
//! The format: <https://www.chromium.org/spdy/spdy-protocol/spdy-protocol-draft3-1/>. The framing is pure: bytes in,
//! frames out. [`windows`] is flow control, [`transport`] a connection that speaks only SPDY.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use self::headers::{HeaderDecoder, HeaderEncoder};

#[cfg(test)]
pub(crate) mod client;
mod headers;
#[cfg(test)]
mod tests;
pub(crate) mod transport;
pub(crate) mod windows;

const VERSION: u16 = 3;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;
const FLAG_FIN: u8 = 1;
/// The setting `SETTINGS_INITIAL_WINDOW_SIZE`.
const INITIAL_WINDOW_SIZE: u32 = 7;
/// The largest control frame that is accepted, in bytes. Data frames may have any length: they are passed on in chunks.
const CONTROL_BYTES_MAX: usize = 64 << 10;
/// The largest data frame that is sent, in bytes.
pub(crate) const DATA_BYTES_MAX: usize = 32 << 10;

/// A frame of the peer, of the kinds that are used here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Open {
        stream: u32,
        headers: Vec<(String, String)>,
        fin: bool,
    },
    /// A chunk of a data frame; `fin` is set on the last one of the stream.
    Data {
        stream: u32,
        bytes: Bytes,
        fin: bool,
    },
    Reset {
        stream: u32,
    },
    Ping {
        id: u32,
    },
    GoAway,
    /// The new initial window of streams, in bytes.
    InitialWindow {
        bytes: u32,
    },
    /// Increases the window of a stream, or of the connection if the stream is 0.
    WindowUpdate {
        stream: u32,
        bytes: u32,
    },
}

/// The reason for which a connection fails.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("the SPDY connection is broken: {0}")]
pub(crate) struct SpdyError(&'static str);

/// The reason for which a stream is ended (`RST_STREAM`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResetReason {
    Protocol = 1,
    Refused = 3,
}

/// One side of a connection: header compression in both directions, and the incomplete next frame.
pub(crate) struct Codec {
    received: BytesMut,
    unfinished: Option<UnfinishedData>,
    decoder: HeaderDecoder,
    encoder: HeaderEncoder,
}

/// A data frame that is not complete yet.
#[derive(Clone, Copy)]
struct UnfinishedData {
    stream: u32,
    bytes_left: usize,
    fin: bool,
}

impl Codec {
    pub(crate) fn new() -> Result<Self, SpdyError> {
        Ok(Self {
            received: BytesMut::new(),
            unfinished: None,
            decoder: HeaderDecoder::new(),
            encoder: HeaderEncoder::new()?,
        })
    }

    /// Appends received bytes, in chunks of any size.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The next frame, or the received part of a data frame.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, SpdyError> {
        loop {
            if let Some(data) = self.unfinished {
                return Ok(self.data(data));
            }
            let Some(head) = self.received.get(..8) else { return Ok(None) };
            let length = usize::from(head[5]) << 16 | usize::from(head[6]) << 8 | usize::from(head[7]);
            let (is_control, fin) = (head[0] & 0x80 != 0, head[4] & FLAG_FIN != 0);
            if !is_control {
                let stream = self.received.get_u32();
                self.received.advance(4);
                self.unfinished = Some(UnfinishedData { stream, bytes_left: length, fin });
                continue;
            }
            if length > CONTROL_BYTES_MAX {
                return Err(SpdyError("a frame is too long"));
            }
            if self.received.len() < 8 + length {
                return Ok(None);
            }
            let mut frame = self.received.split_to(8 + length).freeze();
            let first = frame.get_u32();
            frame.advance(4);
            if let Some(frame) = self.control(first, frame, fin)? {
                return Ok(Some(frame));
            }
        }
    }

    fn data(&mut self, data: UnfinishedData) -> Option<Frame> {
        let UnfinishedData { stream, bytes_left, fin } = data;
        let here = bytes_left.min(self.received.len());
        if here == 0 && bytes_left > 0 {
            return None;
        }
        let bytes = self.received.split_to(here).freeze();
        let bytes_left = bytes_left - here;
        self.unfinished = (bytes_left > 0).then_some(UnfinishedData { stream, bytes_left, fin });
        Some(Frame::Data { stream, bytes, fin: fin && bytes_left == 0 })
    }

    fn control(&mut self, first: u32, mut frame: Bytes, fin: bool) -> Result<Option<Frame>, SpdyError> {
        if (first >> 16) & 0x7fff != u32::from(VERSION) {
            return Err(SpdyError("it is of another version"));
        }
        let kind = u16::try_from(first & 0xffff).unwrap_or(0);
        let needed = match kind {
            SYN_STREAM => 10,
            RST_STREAM | WINDOW_UPDATE => 8,
            SYN_REPLY | SETTINGS | PING | HEADERS => 4,
            _ => 0,
        };
        if frame.len() < needed {
            return Err(SpdyError("a frame is too short"));
        }
        Ok(match kind {
            SYN_STREAM => {
                let stream = stream_id(&mut frame);
                frame.advance(6);
                Some(Frame::Open { stream, headers: self.decoder.decode(&frame)?, fin })
            }
            SYN_REPLY | HEADERS => {
                // These fields are unused, but are part of the compression stream.
                frame.advance(4);
                self.decoder.decode(&frame)?;
                None
            }
            RST_STREAM => Some(Frame::Reset { stream: stream_id(&mut frame) }),
            SETTINGS => initial_window(frame),
            PING => Some(Frame::Ping { id: frame.get_u32() }),
            GOAWAY => Some(Frame::GoAway),
            WINDOW_UPDATE => {
                let stream = stream_id(&mut frame);
                Some(Frame::WindowUpdate { stream, bytes: frame.get_u32() & 0x7fff_ffff })
            }
            _ => None,
        })
    }

    /// The reply to an opened stream, without headers.
    pub(crate) fn reply(&mut self, stream: u32) -> Result<Bytes, SpdyError> {
        let payload = [&stream.to_be_bytes()[..], &self.encoder.encode(&[])?].concat();
        Ok(control_frame(SYN_REPLY, &payload))
    }
}

fn stream_id(frame: &mut Bytes) -> u32 {
    frame.get_u32() & 0x7fff_ffff
}

/// The one setting that is used here.
fn initial_window(mut frame: Bytes) -> Option<Frame> {
    let count = frame.get_u32();
    let settings = (0..count).map_while(|_| frame.try_get_u32().ok().zip(frame.try_get_u32().ok()));
    let windows = settings.filter(|(id, _)| id & 0x00ff_ffff == INITIAL_WINDOW_SIZE);
    windows.last().map(|(_, bytes)| Frame::InitialWindow { bytes: bytes & 0x7fff_ffff })
}

/// A chunk of a stream, at most [`DATA_BYTES_MAX`] bytes; `fin` ends this side of it.
pub(crate) fn data(stream: u32, bytes: &[u8], fin: bool) -> Bytes {
    let mut frame = BytesMut::with_capacity(8 + bytes.len());
    frame.put_u32(stream & 0x7fff_ffff);
    put_length(&mut frame, if fin { FLAG_FIN } else { 0 }, bytes.len());
    frame.put_slice(bytes);
    frame.freeze()
}

pub(crate) fn ping(id: u32) -> Bytes {
    control_frame(PING, &id.to_be_bytes())
}

/// Whether a ping was sent by the client: such a ping is answered.
pub(crate) fn is_of_client(ping: u32) -> bool {
    ping % 2 == 1
}

/// Ends a stream in both directions.
pub(crate) fn reset(stream: u32, reason: ResetReason) -> Bytes {
    control_frame(RST_STREAM, &[stream.to_be_bytes(), (reason as u32).to_be_bytes()].concat())
}

/// Announces that streams after `last` are not served.
pub(crate) fn go_away(last: u32) -> Bytes {
    /// The status `OK`.
    const REASON: u32 = 0;
    control_frame(GOAWAY, &[last.to_be_bytes(), REASON.to_be_bytes()].concat())
}

/// Extends the peer's windows by the bytes that this side has consumed, on the stream and on the connection.
pub(crate) fn consumed(stream: u32, bytes: usize) -> Bytes {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX) & 0x7fff_ffff;
    let update =
        |stream: u32| control_frame(WINDOW_UPDATE, &[stream.to_be_bytes(), bytes.to_be_bytes()].concat());
    [update(stream), update(0)].concat().into()
}

fn control_frame(kind: u16, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(8 + payload.len());
    frame.put_u16(0x8000 | VERSION);
    frame.put_u16(kind);
    put_length(&mut frame, 0, payload.len());
    frame.put_slice(payload);
    frame.freeze()
}

/// Flags in the first byte, the length in the other three.
fn put_length(frame: &mut BytesMut, flags: u8, length: usize) {
    let length = u32::try_from(length).unwrap_or(0x00ff_ffff) & 0x00ff_ffff;
    frame.put_u32(u32::from(flags) << 24 | length);
}
