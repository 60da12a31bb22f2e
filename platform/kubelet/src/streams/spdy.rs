//! SPDY/3.1 framing, as far as port-forward needs it (kubectl's only protocol for it).
//!
//! The format: <https://www.chromium.org/spdy/spdy-protocol/spdy-protocol-draft3-1/>. Flow control is not used:
//! the peers of this protocol (`moby/spdystream`) ignore it on both sides. Pure: bytes in, frames out.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress};

const VERSION: u16 = 3;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const FLAG_FIN: u8 = 1;
/// Largest frame that is taken, in bytes; the format allows 16 MiB.
const FRAME_BYTES_MAX: usize = 1 << 20;
/// Largest block of headers, in bytes; port-forward sends three short ones.
const HEADERS_BYTES_MAX: usize = 16 << 10;
/// Largest data frame that is sent, in bytes.
pub(super) const DATA_BYTES_MAX: usize = 32 << 10;

/// A frame of the peer that means something here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Open { stream: u32, headers: Vec<(String, String)>, fin: bool },
    Data { stream: u32, bytes: Bytes, fin: bool },
    Reset { stream: u32 },
    Ping { id: u32 },
    GoAway,
}

/// The reason for which a connection fails.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("the SPDY connection is broken: {0}")]
pub(super) struct SpdyError(&'static str);

/// One side of a connection: header compression in both directions, and the part of the next frame that was received.
pub(super) struct Codec {
    received: BytesMut,
    inflate: Decompress,
    deflate: Compress,
    dictionary: Vec<u8>,
}

impl Codec {
    pub(super) fn new() -> Result<Self, SpdyError> {
        let dictionary = dictionary();
        let mut deflate = Compress::new(Compression::default(), true);
        deflate.set_dictionary(&dictionary).map_err(|_| SpdyError("the dictionary is refused"))?;
        Ok(Self { received: BytesMut::new(), inflate: Decompress::new(true), deflate, dictionary })
    }

    /// Takes bytes of the peer, in pieces of any size.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The next whole frame, if it has come.
    pub(super) fn next_frame(&mut self) -> Result<Option<Frame>, SpdyError> {
        loop {
            let Some(head) = self.received.get(..8) else { return Ok(None) };
            let length = usize::from(head[5]) << 16 | usize::from(head[6]) << 8 | usize::from(head[7]);
            if length > FRAME_BYTES_MAX {
                return Err(SpdyError("a frame is too long"));
            }
            if self.received.len() < 8 + length {
                return Ok(None);
            }
            let mut frame = self.received.split_to(8 + length).freeze();
            let (first, flags) = (frame.get_u32(), frame.get_u8());
            frame.advance(3);
            let fin = flags & FLAG_FIN != 0;
            if first >> 31 == 0 {
                return Ok(Some(Frame::Data { stream: first, bytes: frame, fin }));
            }
            if let Some(frame) = self.control(first, frame, fin)? {
                return Ok(Some(frame));
            }
        }
    }

    fn control(&mut self, first: u32, mut frame: Bytes, fin: bool) -> Result<Option<Frame>, SpdyError> {
        if (first >> 16) & 0x7fff != u32::from(VERSION) {
            return Err(SpdyError("it is of another version"));
        }
        let kind = u16::try_from(first & 0xffff).unwrap_or(0);
        let needed = match kind {
            SYN_STREAM => 10,
            RST_STREAM => 8,
            PING => 4,
            _ => 0,
        };
        if frame.len() < needed {
            return Err(SpdyError("a frame is too short"));
        }
        Ok(match kind {
            SYN_STREAM => {
                let stream = frame.get_u32() & 0x7fff_ffff;
                frame.advance(6);
                Some(Frame::Open { stream, headers: self.headers(&frame)?, fin })
            }
            RST_STREAM => Some(Frame::Reset { stream: frame.get_u32() & 0x7fff_ffff }),
            PING => Some(Frame::Ping { id: frame.get_u32() }),
            GOAWAY => Some(Frame::GoAway),
            // Settings, window updates and further headers change nothing here.
            _ => None,
        })
    }

    /// All blocks of a connection are one compressed stream.
    fn headers(&mut self, compressed: &[u8]) -> Result<Vec<(String, String)>, SpdyError> {
        let mut block = Vec::with_capacity(HEADERS_BYTES_MAX);
        let begun = self.inflate.total_in();
        loop {
            let used = usize::try_from(self.inflate.total_in() - begun).unwrap_or(usize::MAX);
            let Some(rest) = compressed.get(used..).filter(|rest| !rest.is_empty()) else { break };
            if block.len() == HEADERS_BYTES_MAX {
                return Err(SpdyError("the headers are too long"));
            }
            match self.inflate.decompress_vec(rest, &mut block, FlushDecompress::Sync) {
                Ok(_) => {}
                Err(error) if error.needs_dictionary().is_some() => {
                    let dictionary = std::mem::take(&mut self.dictionary);
                    let set = self.inflate.set_dictionary(&dictionary);
                    set.map_err(|_| SpdyError("the headers' dictionary is another one"))?;
                }
                Err(_) => return Err(SpdyError("the headers cannot be decompressed")),
            }
        }
        parse_headers(&block).ok_or(SpdyError("the headers are damaged"))
    }

    /// The answer to a stream's opening, without headers.
    pub(super) fn reply(&mut self, stream: u32) -> Result<Bytes, SpdyError> {
        let mut block = Vec::with_capacity(64);
        // No headers: their number, 0.
        let deflated = self.deflate.compress_vec(&[0; 4], &mut block, FlushCompress::Sync);
        deflated.map_err(|_| SpdyError("the headers cannot be compressed"))?;
        let mut payload = BytesMut::new();
        payload.put_u32(stream);
        payload.put_slice(&block);
        Ok(control_frame(SYN_REPLY, 0, &payload))
    }
}

/// A piece of a stream, [`DATA_BYTES_MAX`] bytes at most; `fin` ends this side of it.
pub(super) fn data(stream: u32, bytes: &[u8], fin: bool) -> Bytes {
    let mut frame = BytesMut::with_capacity(8 + bytes.len());
    frame.put_u32(stream & 0x7fff_ffff);
    put_length(&mut frame, if fin { FLAG_FIN } else { 0 }, bytes.len());
    frame.put_slice(bytes);
    frame.freeze()
}

pub(super) fn ping(id: u32) -> Bytes {
    control_frame(PING, 0, &id.to_be_bytes())
}

/// Refuses a stream.
pub(super) fn reset(stream: u32) -> Bytes {
    /// `REFUSED_STREAM`.
    const REFUSED: u32 = 3;
    control_frame(RST_STREAM, 0, &[stream.to_be_bytes(), REFUSED.to_be_bytes()].concat())
}

fn control_frame(kind: u16, flags: u8, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(8 + payload.len());
    frame.put_u16(0x8000 | VERSION);
    frame.put_u16(kind);
    put_length(&mut frame, flags, payload.len());
    frame.put_slice(payload);
    frame.freeze()
}

/// Flags in the first byte, the length in the other three.
fn put_length(frame: &mut BytesMut, flags: u8, length: usize) {
    let length = u32::try_from(length).unwrap_or(0x00ff_ffff) & 0x00ff_ffff;
    frame.put_u32(u32::from(flags) << 24 | length);
}

fn parse_headers(block: &[u8]) -> Option<Vec<(String, String)>> {
    let mut block = block;
    let text = |block: &mut &[u8]| -> Option<String> {
        let length = usize::try_from(block.try_get_u32().ok()?).ok()?;
        let (text, rest) = block.split_at_checked(length)?;
        *block = rest;
        String::from_utf8(text.to_vec()).ok()
    };
    let count = block.try_get_u32().ok()?;
    // Each takes eight bytes at least, so a false number ends early.
    (0..count).map(|_| Some((text(&mut block)?, text(&mut block)?))).collect()
}

/// The dictionary of the header compression (section 2.6.10.1): words with their lengths, then frequent values.
fn dictionary() -> Vec<u8> {
    let words = WORDS.iter().flat_map(|word| {
        let length = u32::try_from(word.len()).unwrap_or(0);
        length.to_be_bytes().into_iter().chain(word.bytes())
    });
    words.chain(VALUES.bytes()).collect()
}

#[rustfmt::skip]
const WORDS: [&str; 65] = [
    "options", "head", "post", "put", "delete", "trace", "accept", "accept-charset", "accept-encoding",
    "accept-language", "accept-ranges", "age", "allow", "authorization", "cache-control", "connection",
    "content-base", "content-encoding", "content-language", "content-length", "content-location",
    "content-md5", "content-range", "content-type", "date", "etag", "expect", "expires", "from", "host",
    "if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since",
    "last-modified", "location", "max-forwards", "pragma", "proxy-authenticate", "proxy-authorization",
    "range", "referer", "retry-after", "server", "te", "trailer", "transfer-encoding", "upgrade",
    "user-agent", "vary", "via", "warning", "www-authenticate", "method", "get", "status", "200 OK",
    "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin",
];
#[rustfmt::skip]
const VALUES: &str = concat!(
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 N",
    "on-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized4",
    "03 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan",
    " Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTch",
    "unked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,",
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,en",
    "q=0.",
);

#[cfg(test)]
mod tests {
    use super::*;

    /// A client: what kubectl does.
    struct SpdyClient(Compress);

    impl SpdyClient {
        fn new() -> Self {
            let mut deflate = Compress::new(Compression::default(), true);
            deflate.set_dictionary(&dictionary()).unwrap();
            Self(deflate)
        }

        fn open(&mut self, stream: u32, headers: &[(&str, &str)]) -> Bytes {
            let mut block = u32::try_from(headers.len()).unwrap().to_be_bytes().to_vec();
            for text in headers.iter().flat_map(|(name, value)| [name, value]) {
                block.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
                block.extend(text.bytes());
            }
            let mut compressed = Vec::with_capacity(4096);
            self.0.compress_vec(&block, &mut compressed, FlushCompress::Sync).unwrap();
            let payload = [&stream.to_be_bytes()[..], &[0; 6], &compressed].concat();
            control_frame(SYN_STREAM, 0, &payload)
        }
    }

    #[test]
    fn the_dictionary_is_the_published_one() {
        let dictionary = dictionary();
        let (low, high) = dictionary.iter().fold((1_u32, 0_u32), |(low, high), byte| {
            let low = (low + u32::from(*byte)) % 65521;
            (low, (high + low) % 65521)
        });
        // Its Adler-32, which every compressed stream contains.
        assert_eq!((dictionary.len(), high << 16 | low), (1423, 0xe3c6_a7c2));
    }

    #[test]
    fn streams_are_opened_in_pieces_of_any_size() {
        let mut client = SpdyClient::new();
        let headers = [("streamtype", "error"), ("port", "80"), ("requestid", "0")];
        let second = [("streamtype", "data"), ("port", "80"), ("requestid", "0")];
        let sent =
            [client.open(1, &headers), client.open(3, &second), data(3, b"hello", true), ping(7)].concat();
        let owned = |list: &[(&str, &str)]| {
            list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<Vec<_>>()
        };
        for size in [1, 7, 4096] {
            let mut codec = Codec::new().unwrap();
            let mut frames = Vec::new();
            for piece in sent.chunks(size) {
                codec.push(piece);
                while let Some(frame) = codec.next_frame().unwrap() {
                    frames.push(frame);
                }
            }
            assert_eq!(
                frames,
                [
                    Frame::Open { stream: 1, headers: owned(&headers), fin: false },
                    Frame::Open { stream: 3, headers: owned(&second), fin: false },
                    Frame::Data { stream: 3, bytes: Bytes::from_static(b"hello"), fin: true },
                    Frame::Ping { id: 7 },
                ]
            );
        }
    }

    #[test]
    fn a_reply_can_be_read_with_the_dictionary() {
        let mut codec = Codec::new().unwrap();
        let mut inflate = Decompress::new(true);
        for (at, stream) in [1_u32, 3].into_iter().enumerate() {
            let reply = codec.reply(stream).unwrap();
            assert_eq!(reply[..4], [0x80, 3, 0, 2]);
            let mut block = Vec::with_capacity(64);
            let mut compressed = &reply[12..];
            if at == 0 {
                let needed =
                    inflate.decompress_vec(compressed, &mut block, FlushDecompress::Sync).unwrap_err();
                assert_eq!(needed.needs_dictionary(), Some(0xe3c6_a7c2));
                compressed = &compressed[usize::try_from(inflate.total_in()).unwrap()..];
                inflate.set_dictionary(&dictionary()).unwrap();
            }
            inflate.decompress_vec(compressed, &mut block, FlushDecompress::Sync).unwrap();
            assert_eq!(parse_headers(&block), Some(Vec::new()));
        }
    }

    #[test]
    fn damage_ends_the_connection() {
        for bytes in [
            &[0x80, 2, 0, 1, 0, 0, 0, 0][..],
            &[0x80, 3, 0, 1, 0, 0, 0, 2, 0, 0],
            &[0, 0, 0, 1, 0, 0xff, 0xff, 0xff],
            &[0x80, 3, 0, 1, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 9, 9],
        ] {
            let mut codec = Codec::new().unwrap();
            codec.push(bytes);
            assert!(codec.next_frame().is_err(), "{bytes:?}");
        }
        assert_eq!(parse_headers(&[0, 0, 0, 1, 0, 0, 0, 9]), None);
    }
}
