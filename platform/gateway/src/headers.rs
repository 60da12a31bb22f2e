//! The headers that the gateway removes and adds.

use std::{cell::RefCell, net::SocketAddr, sync::Arc, time::Duration};

use bytes::{BufMut as _, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use mayfly_runtime::Timings;

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(crate) const X_FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
pub(crate) const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub(crate) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Set on the response to a request that found its component not loaded.
pub(crate) const MAYFLY_COLD: HeaderName = HeaderName::from_static("mayfly-cold");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Further headers that describe a request's origin, which the gateway does not set itself. Frameworks trust them, so a
/// client could claim any address.
const CLAIMS: [HeaderName; 6] = [
    header::FORWARDED,
    X_FORWARDED_PREFIX,
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-forwarded-scheme"),
    HeaderName::from_static("x-forwarded-server"),
    HeaderName::from_static("x-real-ip"),
];

/// The length limit of a client's request id, in bytes; longer ids are replaced.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Removes the headers that belong to one connection (RFC 9110, section 7.6.1). `te: trailers` stays: the client
/// accepts trailers, and they are passed on.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none of them: one pass over the few names, without hashing.
    if !headers.keys().any(is_hop_by_hop) {
        return;
    }
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().filter(|name| **name != header::TE) {
        headers.remove(name);
    }
    let trailers = headers.get_all(header::TE).into_iter().any(|value| {
        value.to_str().is_ok_and(|text| text.split(',').any(|t| t.trim().eq_ignore_ascii_case("trailers")))
    });
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Joins the `cookie` fields of an HTTP/2 request, which clients may split for a better compression. HTTP/1.1 and
/// applications allow one field only (RFC 9113, section 8.2.3).
pub(crate) fn join_cookies(headers: &mut HeaderMap) {
    let mut cookies = headers.get_all(header::COOKIE).iter();
    let (Some(first), Some(second)) = (cookies.next(), cookies.next()) else { return };
    let mut joined = first.as_bytes().to_vec();
    for cookie in std::iter::once(second).chain(cookies) {
        joined.extend_from_slice(b"; ");
        joined.extend_from_slice(cookie.as_bytes());
    }
    // Valid, because each part is.
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(header::COOKIE, joined);
    }
}

/// The protocol that a client requests to upgrade to. Upgrades to HTTP/2 (`h2c`) are ignored: requests within such a
/// connection would reach the endpoint without the rules of the Ingress.
pub(crate) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers.get_all(header::CONNECTION).into_iter().any(|value| {
        value.to_str().is_ok_and(|text| text.split(',').any(|t| t.trim().eq_ignore_ascii_case("upgrade")))
    });
    let is_http2 = |value: &HeaderValue| {
        let mut protocols = value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        protocols.any(|protocol| protocol.len() >= 3 && protocol[..3].eq_ignore_ascii_case(b"h2c"))
    };
    if headers.get_all(header::UPGRADE).iter().any(is_http2) {
        return None;
    }
    headers.get(header::UPGRADE).filter(|_| asks).cloned()
}

/// Whether a message has a transfer coding other than `chunked`, which hyper decodes.
pub(crate) fn has_other_coding(headers: &HeaderMap) -> bool {
    headers.get_all(header::TRANSFER_ENCODING).iter().any(|value| {
        let mut codings = value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        codings.any(|coding| !coding.eq_ignore_ascii_case(b"chunked"))
    })
}

const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
];

fn is_hop_by_hop(name: &HeaderName) -> bool {
    HOP_BY_HOP.contains(name)
}

/// The number of headers that the gateway adds to a request besides its id: their capacity is reserved at once, because
/// a growing map is reallocated.
const HEADERS_ADDED: usize = 4;

/// The listener that accepted a connection.
#[derive(Clone, Debug)]
pub(crate) struct Entrance {
    /// The TLS settings of the listener.
    tls: Option<Arc<rustls::ServerConfig>>,
    /// The function (`namespace/name`) that all requests are for, whatever their host and path.
    function: Option<Arc<str>>,
}

impl Entrance {
    pub(crate) const HTTP: Self = Self { tls: None, function: None };

    pub(crate) fn of_tls(config: Arc<rustls::ServerConfig>) -> Self {
        Self { tls: Some(config), ..Self::HTTP }
    }

    fn scheme(&self) -> HeaderValue {
        HeaderValue::from_static(if self.tls.is_some() { "https" } else { "http" })
    }

    /// The listener of a Service over a function.
    pub(crate) fn of_function(function: Arc<str>) -> Self {
        Self { function: Some(function), ..Self::HTTP }
    }
}

/// The peer of a connection, as header values for its requests.
pub(crate) struct Peer {
    address: HeaderValue,
    port: u16,
    entrance: Entrance,
}

impl Peer {
    pub(crate) fn new(address: SocketAddr, entrance: Entrance) -> Self {
        let port = address.port();
        let address = HeaderValue::try_from(address.ip().to_canonical().to_string());
        Self { address: address.unwrap_or(HeaderValue::from_static("unknown")), port, entrance }
    }

    /// The address and the port.
    pub(crate) fn socket_address(&self) -> HeaderValue {
        let address = self.address.to_str().unwrap_or_default();
        let text = match address.contains(':') {
            true => format!("[{address}]:{}", self.port),
            false => format!("{address}:{}", self.port),
        };
        HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("unknown"))
    }

    pub(crate) fn tls(&self) -> Option<Arc<rustls::ServerConfig>> {
        self.entrance.tls.clone()
    }

    /// The function that all requests are for, if the connection came through a function's own listener.
    pub(crate) fn function(&self) -> Option<&str> {
        self.entrance.function.as_deref()
    }

    /// Sets the headers that describe the request's origin. The client's own values, also those of `forwarded`, which
    /// frameworks prefer to the others (RFC 7239), are kept only behind a trusted proxy.
    pub(crate) fn forward(&self, headers: &mut HeaderMap, host: Option<HeaderValue>, trusted: bool) {
        headers.reserve(HEADERS_ADDED);
        if !trusted {
            headers.insert(X_FORWARDED_FOR, self.address.clone());
            headers.insert(X_FORWARDED_PROTO, self.entrance.scheme());
            match host {
                Some(host) => headers.insert(X_FORWARDED_HOST, host),
                None => headers.remove(X_FORWARDED_HOST),
            };
            for claim in CLAIMS {
                headers.remove(claim);
            }
            return;
        }
        headers.append(X_FORWARDED_FOR, self.address.clone());
        headers.entry(X_FORWARDED_PROTO).or_insert(self.entrance.scheme());
        if let Some(host) = host {
            headers.entry(X_FORWARDED_HOST).or_insert(host);
        }
    }
}

thread_local! {
    /// A buffer for header values, split off piece by piece: one allocation for about twenty requests.
    static HEADER_BUFFER: RefCell<BytesMut> = RefCell::new(BytesMut::new());
}
/// Small, because a header value keeps the whole buffer alive.
const ROOM_BYTES: usize = 2048;

/// A header value of at most `bytes_max` visible ASCII characters, written by `write`.
fn header_text(bytes_max: usize, write: impl FnOnce(&mut BytesMut)) -> HeaderValue {
    let text = HEADER_BUFFER.with_borrow_mut(|room| {
        if room.capacity() < bytes_max {
            *room = BytesMut::with_capacity(ROOM_BYTES.max(bytes_max));
        }
        write(room);
        room.split().freeze()
    });
    HeaderValue::from_maybe_shared(text).unwrap_or(HeaderValue::from_static("?"))
}

/// The request's id: the client's own if it is valid, otherwise a new one. Also sets it on the request.
pub(crate) fn request_id(headers: &mut HeaderMap) -> HeaderValue {
    if let Some(id) = headers.get(X_REQUEST_ID).filter(|id| is_sane(id.as_bytes())) {
        return id.clone();
    }
    let id = new_request_id();
    headers.insert(X_REQUEST_ID, id.clone());
    id
}

fn is_sane(id: &[u8]) -> bool {
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(b);
    !id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX && id.iter().all(allowed)
}

fn new_request_id() -> HeaderValue {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut random: u128 = rand::random();
    let mut text = [0u8; 32];
    for digit in &mut text {
        *digit = DIGITS[(random & 0xf) as usize];
        random >>= 4;
    }
    header_text(text.len(), |room| room.put_slice(&text))
}

/// The `server-timing` header: the phases of a request's duration in milliseconds.
pub(crate) fn server_timing(queue: Duration, timings: &Timings) -> HeaderValue {
    let entries: [(&[u8], Duration); 4] = [
        (b"queue;dur=", queue + timings.queue),
        (b", load;dur=", timings.load),
        (b", instantiate;dur=", timings.instantiate),
        (b", run;dur=", timings.run),
    ];
    const NUMBER_BYTES_MAX: usize = 24;
    let bytes_max = entries.iter().map(|(name, _)| name.len() + NUMBER_BYTES_MAX).sum();
    header_text(bytes_max, |room| {
        for (name, took) in entries {
            room.put_slice(name);
            put_milliseconds(room, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        }
    })
}

/// Writes microseconds as milliseconds with three decimals; `format!` takes ten times as long.
fn put_milliseconds(room: &mut BytesMut, us: u64) {
    let mut digits = [b'0'; 21];
    let mut first = digits.len();
    let mut rest = us;
    // At least four digits: one before the decimal point.
    while rest > 0 || first > digits.len() - 4 {
        first -= 1;
        digits[first] = b"0123456789"[(rest % 10) as usize];
        rest /= 10;
    }
    let (whole, decimals) = digits[first..].split_at(digits.len() - first - 3);
    room.put_slice(whole);
    room.put_u8(b'.');
    room.put_slice(decimals);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v)));
        let mut map = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            map.append(name, value);
        });
        map
    }

    #[test]
    fn hop_by_hop_headers_go() {
        for (before, after) in [
            (map(&[("accept", "*/*")]), map(&[("accept", "*/*")])),
            (map(&[("connection", "keep-alive, X-Mine"), ("x-mine", "1"), ("a", "b")]), map(&[("a", "b")])),
            (map(&[("te", "gzip, Trailers"), ("connection", "te")]), map(&[("te", "trailers")])),
            (map(&[("te", "gzip"), ("upgrade", "websocket"), ("keep-alive", "5")]), map(&[])),
            (map(&[("transfer-encoding", "chunked"), ("trailer", "x")]), map(&[("trailer", "x")])),
            (map(&[("proxy-connection", "x"), ("proxy-authorization", "y")]), map(&[])),
        ] {
            let mut headers = before.clone();
            strip_hop_by_hop(&mut headers);
            assert_eq!(headers, after, "{before:?}");
        }
    }

    #[test]
    fn cookies_are_one_field() {
        for (before, after) in [
            (map(&[("a", "b")]), map(&[("a", "b")])),
            (map(&[("cookie", "a=1")]), map(&[("cookie", "a=1")])),
            (
                map(&[("cookie", "a=1"), ("b", "c"), ("cookie", "d=2"), ("cookie", "e=3; f=4")]),
                map(&[("cookie", "a=1; d=2; e=3; f=4"), ("b", "c")]),
            ),
        ] {
            let mut headers = before.clone();
            join_cookies(&mut headers);
            assert_eq!(headers, after, "{before:?}");
        }
    }

    #[test]
    fn upgrades_to_another_http_are_ignored() {
        let asked = |protocol| upgrade(&map(&[("connection", "keep-alive, Upgrade"), ("upgrade", protocol)]));
        assert_eq!(asked("websocket"), Some(HeaderValue::from_static("websocket")));
        for protocol in ["h2c", "H2C", "websocket, h2c"] {
            assert_eq!(asked(protocol), None, "{protocol}");
        }
        assert_eq!(upgrade(&map(&[("upgrade", "websocket")])), None);
    }

    #[test]
    fn only_chunked_is_understood() {
        for (sent, other) in [("chunked", false), ("Chunked", false), ("gzip, chunked", true), ("gzip", true)]
        {
            assert_eq!(has_other_coding(&map(&[("transfer-encoding", sent)])), other, "{sent}");
        }
        assert!(!has_other_coding(&map(&[("content-encoding", "gzip")])));
    }

    #[test]
    fn forwarded_headers_are_the_sockets_unless_a_proxy_is_trusted() {
        let peer = Peer::new("[::ffff:10.0.0.9]:7000".parse().unwrap(), Entrance::HTTP);
        assert_eq!(peer.socket_address(), "10.0.0.9:7000");
        let other = Peer::new("[2001:db8::1]:7000".parse().unwrap(), Entrance::HTTP);
        assert_eq!(other.socket_address(), "[2001:db8::1]:7000");
        let host = || Some(HeaderValue::from_static("example.com"));
        let claimed = map(&[
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-prefix", "/evil"),
            ("forwarded", "for=1.1.1.1"),
            ("x-real-ip", "1.1.1.1"),
            ("x-forwarded-port", "443"),
        ]);
        let mut headers = claimed.clone();
        peer.forward(&mut headers, host(), false);
        let expected = map(&[
            ("x-forwarded-for", "10.0.0.9"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-host", "example.com"),
        ]);
        assert_eq!(headers, expected);
        let mut headers = claimed;
        peer.forward(&mut headers, host(), true);
        let expected = map(&[
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-for", "10.0.0.9"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "example.com"),
            ("x-forwarded-prefix", "/evil"),
            ("forwarded", "for=1.1.1.1"),
            ("x-real-ip", "1.1.1.1"),
            ("x-forwarded-port", "443"),
        ]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn sane_ids_stay() {
        let long = "a".repeat(REQUEST_ID_BYTES_MAX + 1);
        for (id, stays) in [("abc-1.2_3:4", true), ("a b", false), ("", false), (long.as_str(), false)] {
            let mut headers = HeaderMap::new();
            headers.insert(X_REQUEST_ID, HeaderValue::from_str(id).unwrap());
            let found = request_id(&mut headers);
            assert_eq!(found == id, stays, "{id}");
            assert_eq!(headers[X_REQUEST_ID], found);
            assert!(is_sane(found.as_bytes()));
        }
        assert_ne!(request_id(&mut HeaderMap::new()), request_id(&mut HeaderMap::new()));
    }

    #[test]
    fn milliseconds() {
        for (us, text) in [(0, "0.000"), (7, "0.007"), (1_234, "1.234"), (60_000_000, "60000.000")] {
            let mut room = BytesMut::new();
            put_milliseconds(&mut room, us);
            assert_eq!(room, text);
        }
        let mut room = BytesMut::new();
        put_milliseconds(&mut room, u64::MAX);
        assert_eq!(room, "18446744073709551.615");
    }

    #[test]
    fn timing_reads_as_browsers_want_it() {
        let ms = Duration::from_millis;
        let timings =
            Timings { queue: ms(1), load: ms(2), run: Duration::from_micros(12), ..Timings::default() };
        assert_eq!(
            server_timing(Duration::from_micros(500), &timings),
            "queue;dur=1.500, load;dur=2.000, instantiate;dur=0.000, run;dur=0.012"
        );
    }
}
