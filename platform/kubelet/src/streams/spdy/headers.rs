//! The header blocks of SPDY/3.1 and their compression (section 2.6.10): all blocks that one side sends form one zlib
//! stream, which begins with a dictionary.

use bytes::{Buf as _, BufMut as _};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::SpdyError;

/// The largest header block, in bytes; those of exec and port-forward have a few short headers.
const HEADERS_BYTES_MAX: usize = 16 << 10;

/// Decompresses the blocks of one connection, in the order of their frames.
pub(crate) struct HeaderDecoder {
    inflate: Decompress,
    dictionary: Vec<u8>,
}

impl HeaderDecoder {
    pub(crate) fn new() -> Self {
        Self { inflate: Decompress::new(true), dictionary: dictionary() }
    }

    /// The names and values of a block.
    pub(crate) fn decode(&mut self, compressed: &[u8]) -> Result<Vec<(String, String)>, SpdyError> {
        let mut block = Vec::with_capacity(HEADERS_BYTES_MAX);
        let begun = self.inflate.total_in();
        let mut used = 0;
        while let Some(rest) = compressed.get(used..).filter(|rest| !rest.is_empty()) {
            if block.len() == HEADERS_BYTES_MAX {
                return Err(SpdyError("the headers are too long"));
            }
            match self.inflate.decompress_vec(rest, &mut block, FlushDecompress::Sync) {
                Ok(Status::Ok | Status::BufError) => {}
                // The stream must last as long as the connection.
                Ok(Status::StreamEnd) => return Err(SpdyError("the headers' compression has ended")),
                Err(error) if error.needs_dictionary().is_some() => {
                    let set = self.inflate.set_dictionary(&self.dictionary);
                    set.map_err(|_| SpdyError("the headers use a different dictionary"))?;
                }
                Err(_) => return Err(SpdyError("the headers cannot be decompressed")),
            }
            let now = usize::try_from(self.inflate.total_in() - begun).unwrap_or(usize::MAX);
            if now == used && block.len() < HEADERS_BYTES_MAX {
                return Err(SpdyError("the headers cannot be decompressed"));
            }
            used = now;
        }
        parse_headers(&block).ok_or(SpdyError("the headers are damaged"))
    }
}

/// Compresses the blocks of one connection, in the order of their frames.
pub(crate) struct HeaderEncoder(Compress);

impl HeaderEncoder {
    pub(crate) fn new() -> Result<Self, SpdyError> {
        let mut deflate = Compress::new(Compression::default(), true);
        deflate.set_dictionary(&dictionary()).map_err(|_| SpdyError("the dictionary is refused"))?;
        Ok(Self(deflate))
    }

    pub(crate) fn encode(&mut self, headers: &[(&str, &str)]) -> Result<Vec<u8>, SpdyError> {
        let mut block = Vec::new();
        put_length(&mut block, headers.len());
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            put_length(&mut block, text.len());
            block.put_slice(text.as_bytes());
        }
        // Deflate adds a few bytes to incompressible input.
        let mut compressed = Vec::with_capacity(64 + 2 * block.len());
        let deflated = self.0.compress_vec(&block, &mut compressed, FlushCompress::Sync);
        deflated.map_err(|_| SpdyError("the headers cannot be compressed"))?;
        Ok(compressed)
    }
}

fn put_length(block: &mut Vec<u8>, length: usize) {
    block.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
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
    // Each header takes at least eight bytes, so a false count ends early.
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

    #[test]
    fn the_dictionary_is_the_published_one() {
        let dictionary = dictionary();
        let (low, high) = dictionary.iter().fold((1_u32, 0_u32), |(low, high), byte| {
            let low = (low + u32::from(*byte)) % 65521;
            (low, (high + low) % 65521)
        });
        // The dictionary's Adler-32, which every compressed stream contains.
        assert_eq!((dictionary.len(), high << 16 | low), (1423, 0xe3c6_a7c2));
    }

    /// More data than the compression window, to check that both sides keep the same state.
    #[test]
    fn thousands_of_blocks_are_one_stream() {
        let (mut encoder, mut decoder) = (HeaderEncoder::new().unwrap(), HeaderDecoder::new());
        for request in 0..5_000 {
            let request = request.to_string();
            let long = format!("{request:-^80}");
            let headers = [("streamtype", "data"), ("port", "8080"), ("requestid", &request), ("x", &long)];
            let decoded = decoder.decode(&encoder.encode(&headers).unwrap()).unwrap();
            assert!(decoded.iter().map(|(name, value)| (&**name, &**value)).eq(headers), "{decoded:?}");
        }
    }

    #[test]
    fn damaged_blocks_are_refused() {
        assert_eq!(parse_headers(&[0, 0, 0, 1, 0, 0, 0, 9]), None);
        let block = |headers: &[(&str, &str)]| HeaderEncoder::new().unwrap().encode(headers).unwrap();
        let large = "x".repeat(HEADERS_BYTES_MAX);
        assert!(HeaderDecoder::new().decode(&block(&[("a", &large)])).is_err());
        assert!(HeaderDecoder::new().decode(&[9; 100]).is_err());
        // A stream that continues after its end.
        let mut deflate = Compress::new(Compression::default(), true);
        deflate.set_dictionary(&dictionary()).unwrap();
        let mut ended = Vec::with_capacity(100);
        deflate.compress_vec(&[0; 4], &mut ended, FlushCompress::Finish).unwrap();
        ended.extend([0; 100]);
        assert!(HeaderDecoder::new().decode(&ended).is_err());
    }
}
