//! The upgrade of a request's connection to WebSocket or to SPDY/3.1, including the negotiation of the subprotocol.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use base64::Engine as _;
use hyper_util::rt::TokioIo;
use sha1::{Digest as _, Sha1};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::protocol::{Role, WebSocketConfig},
};

use super::HttpRefusal;

/// The largest WebSocket message that is accepted, in bytes; kubectl's are 32 KiB.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// The constant that is hashed with the key of a WebSocket handshake (RFC 6455, section 1.3).
const HANDSHAKE_GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
const SPDY: &str = "SPDY/3.1";
/// The protocols that the client offers; in the response, the chosen one.
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// In a refusal, the supported protocols.
const ACCEPTED_PROTOCOLS: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");

/// A client's connection after its upgrade.
pub(crate) type Connection = TokioIo<hyper::upgrade::Upgraded>;
/// A connection that speaks WebSocket.
pub(crate) type WebSocket = WebSocketStream<Connection>;

/// The protocols of a resource.
pub(super) struct Protocols {
    /// An empty one is that of a client that names none.
    pub(super) websocket: &'static [&'static str],
    pub(super) spdy: &'static [&'static str],
}

/// A connection with its negotiated protocol.
pub(super) enum Upgraded {
    WebSocket(Box<WebSocket>, &'static str),
    Spdy(Connection, &'static str),
}

/// The requested transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    WebSocket,
    Spdy,
}

/// Why a request is not upgraded, in upstream's words.
#[derive(Debug, PartialEq, Eq)]
struct UpgradeRefusal {
    code: StatusCode,
    message: String,
    /// The supported protocols, if none of the client's is among them.
    accepted: &'static [&'static str],
}

/// Switches protocols, and passes the connection to `run`. Refusals are responses, too: 400 if the request is not an
/// upgrade, 403 if the client offers no supported protocol (upstream: `httpstream.Handshake`).
pub(super) fn upgrade<F: Future<Output = ()> + Send + 'static>(
    mut request: Request,
    protocols: &Protocols,
    run: impl FnOnce(Upgraded) -> F + Send + 'static,
) -> Result<Response, HttpRefusal> {
    let (transport, protocol) = match negotiate(request.headers(), protocols) {
        Ok(negotiated) => negotiated,
        Err(refusal) => return Ok(refusal.response()),
    };
    let answer = answer(request.headers(), transport, protocol)?;
    let on_upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let connection = match on_upgrade.await {
            Ok(upgraded) => TokioIo::new(upgraded),
            Err(error) => return tracing::debug!(%error, "a connection was not upgraded"),
        };
        let upgraded = match transport {
            Transport::Spdy => Upgraded::Spdy(connection, protocol),
            Transport::WebSocket => {
                let config = WebSocketConfig::default()
                    .max_message_size(Some(MESSAGE_BYTES_MAX))
                    .max_frame_size(Some(MESSAGE_BYTES_MAX));
                let socket = WebSocketStream::from_raw_socket(connection, Role::Server, Some(config)).await;
                Upgraded::WebSocket(Box::new(socket), protocol)
            }
        };
        run(upgraded).await;
    });
    Ok(answer)
}

/// Negotiates the transport and the protocol of a request.
fn negotiate(
    headers: &HeaderMap,
    protocols: &Protocols,
) -> Result<(Transport, &'static str), UpgradeRefusal> {
    let bad_request = |message: &str| UpgradeRefusal {
        code: StatusCode::BAD_REQUEST,
        message: message.into(),
        accepted: &[],
    };
    if has_token(headers, header::UPGRADE, "websocket") {
        let mut offered = tokens(headers, header::SEC_WEBSOCKET_PROTOCOL).peekable();
        let unnamed = offered.peek().is_none().then_some("");
        let protocol = first_known(offered.chain(unnamed), protocols.websocket);
        return protocol.map(|protocol| (Transport::WebSocket, protocol)).ok_or_else(|| UpgradeRefusal {
            code: StatusCode::FORBIDDEN,
            message: format!("unable to negotiate a protocol: there are {}", protocols.websocket.join(", ")),
            accepted: &[],
        });
    }
    if !has_token(headers, header::UPGRADE, SPDY) || !has_token(headers, header::CONNECTION, "upgrade") {
        return Err(bad_request(
            "unable to upgrade: missing upgrade headers in request: WebSocket and SPDY/3.1 are spoken here",
        ));
    }
    let mut offered = tokens(headers, STREAM_PROTOCOL).peekable();
    if offered.peek().is_none() {
        return Err(bad_request("unable to upgrade: X-Stream-Protocol-Version is required"));
    }
    let protocol = first_known(offered, protocols.spdy);
    protocol.map(|protocol| (Transport::Spdy, protocol)).ok_or_else(|| {
        let offered: Vec<_> = tokens(headers, STREAM_PROTOCOL).collect();
        UpgradeRefusal {
            code: StatusCode::FORBIDDEN,
            message: format!(
                "unable to upgrade: unable to negotiate protocol: client supports [{}], server accepts [{}]",
                offered.join(" "),
                protocols.spdy.join(" ")
            ),
            accepted: protocols.spdy,
        }
    })
}

/// The first of the client's protocols that is known: its order is that of its preference.
fn first_known<'h>(
    mut offered: impl Iterator<Item = &'h str>,
    known: &'static [&'static str],
) -> Option<&'static str> {
    offered.find_map(|offered| known.iter().find(|known| **known == offered).copied())
}

/// Whether a request asks for a WebSocket (upstream's `IsWebSocketRequest`).
pub(crate) fn is_websocket(headers: &HeaderMap) -> bool {
    has_token(headers, header::UPGRADE, "websocket") && has_token(headers, header::CONNECTION, "upgrade")
}

impl UpgradeRefusal {
    fn response(self) -> Response {
        let mut response = (self.code, self.message).into_response();
        for protocol in self.accepted {
            response.headers_mut().append(ACCEPTED_PROTOCOLS, HeaderValue::from_static(protocol));
        }
        response
    }
}

/// The response that switches protocols.
fn answer(
    headers: &HeaderMap,
    transport: Transport,
    protocol: &'static str,
) -> Result<Response, HttpRefusal> {
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    *response.body_mut() = Body::empty();
    let answered = response.headers_mut();
    answered.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    let named = HeaderValue::from_static(protocol);
    match transport {
        Transport::Spdy => {
            answered.insert(header::UPGRADE, HeaderValue::from_static(SPDY));
            answered.insert(STREAM_PROTOCOL, named);
        }
        Transport::WebSocket => {
            let refuse = |message: String| (StatusCode::BAD_REQUEST, message);
            let key = headers.get(header::SEC_WEBSOCKET_KEY);
            let key = key.ok_or_else(|| refuse("no Sec-WebSocket-Key".into()))?;
            let accept = HeaderValue::try_from(accept_key(key.as_bytes()));
            answered.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            // A client that offers no protocol fails if the response names one (RFC 6455, section 4.1).
            if !protocol.is_empty() {
                answered.insert(header::SEC_WEBSOCKET_PROTOCOL, named);
            }
            answered.insert(header::SEC_WEBSOCKET_ACCEPT, accept.map_err(|error| refuse(error.to_string()))?);
        }
    }
    Ok(response)
}

/// The comma-separated values of all headers with a name.
fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

fn has_token(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|known| known.eq_ignore_ascii_case(token))
}

fn accept_key(key: &[u8]) -> String {
    let digest = Sha1::new().chain_update(key).chain_update(HANDSHAKE_GUID).finalize();
    base64::engine::general_purpose::STANDARD.encode(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROTOCOLS: Protocols =
        Protocols { websocket: &["v5.x", "v4.x"], spdy: &["v4.x", "v3.x", "v2.x", "x"] };

    fn negotiated(headers: &[(&'static str, &'static str)]) -> Result<(Transport, &'static str), u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        negotiate(&map, &PROTOCOLS).map_err(|refusal| {
            assert_eq!(refusal.accepted.is_empty(), !refusal.message.contains("server accepts"));
            refusal.code.as_u16()
        })
    }

    /// The example of RFC 6455, section 1.3.
    #[test]
    fn the_handshakes_key_is_accepted() {
        assert_eq!(accept_key(b"dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn a_websocket_has_the_clients_first_protocol_that_there_is() {
        let websocket = ("upgrade", "WebSocket");
        let offers =
            |protocols: &'static str| negotiated(&[websocket, ("sec-websocket-protocol", protocols)]);
        assert_eq!(offers("v9.x, v4.x, v5.x"), Ok((Transport::WebSocket, "v4.x")));
        assert_eq!(offers("v4.x"), Ok((Transport::WebSocket, "v4.x")));
        assert_eq!(offers("v9.x"), Err(403));
        assert_eq!(negotiated(&[websocket]), Err(403));
        let unnamed = Protocols { websocket: &["v5.x", ""], spdy: &[] };
        let headers = HeaderMap::from_iter([(header::UPGRADE, HeaderValue::from_static("websocket"))]);
        assert_eq!(negotiate(&headers, &unnamed), Ok((Transport::WebSocket, "")));
    }

    #[test]
    fn spdy_has_the_clients_first_protocol_that_there_is() {
        let [connection, upgrade] = [("connection", "keep-alive, Upgrade"), ("upgrade", "SPDY/3.1")];
        let version = |protocol: &'static str| ("x-stream-protocol-version", protocol);
        let offers = |offered: &[&'static str]| {
            let versions = offered.iter().map(|protocol| version(protocol));
            negotiated(&[connection, upgrade].into_iter().chain(versions).collect::<Vec<_>>())
        };
        assert_eq!(offers(&["v5.x", "v4.x", "v3.x"]), Ok((Transport::Spdy, "v4.x")));
        assert_eq!(offers(&["v2.x,v3.x"]), Ok((Transport::Spdy, "v2.x")));
        assert_eq!(offers(&["x"]), Ok((Transport::Spdy, "x")));
        assert_eq!(offers(&["v5.x"]), Err(403));
        assert_eq!(offers(&[]), Err(400), "upstream requires the header");
        assert_eq!(negotiated(&[upgrade, version("v4.x")]), Err(400));
        assert_eq!(negotiated(&[connection, version("v4.x")]), Err(400));
        assert_eq!(negotiated(&[connection, ("upgrade", "SPDY/3"), version("v4.x")]), Err(400));
    }
}
