//! The bearer token among the subprotocols of a WebSocket, since browsers cannot set the header `Authorization`
//! (upstream's `apiserver/pkg/authentication/request/websocket`).

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::{HeaderMap, HeaderValue, header};

use crate::streams::is_websocket;

/// The beginning of the subprotocol; the token in base64url follows.
const BEARER: &str = "base64url.bearer.authorization.k8s.io.";

/// The subprotocols that a client offers.
fn subprotocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).into_iter();
    let values = values.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    values.map(str::trim).filter(|protocol| !protocol.is_empty())
}

/// The token of a WebSocket's request. There has to be exactly one, and another subprotocol.
pub(super) fn bearer(headers: &HeaderMap) -> Option<String> {
    if !is_websocket(headers) {
        return None;
    }
    let mut tokens = subprotocols(headers).filter_map(|protocol| protocol.strip_prefix(BEARER));
    let token = tokens.next().filter(|_| tokens.next().is_none())?;
    if subprotocols(headers).all(|protocol| protocol.starts_with(BEARER)) {
        return None;
    }
    String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()
}

/// Removes tokens from the subprotocols of a request that may be forwarded to a node or a pod.
pub(crate) fn remove_bearer(headers: &mut HeaderMap) {
    if !subprotocols(headers).any(|protocol| protocol.starts_with(BEARER)) {
        return;
    }
    let kept: Vec<_> =
        subprotocols(headers).filter(|protocol| !protocol.starts_with(BEARER)).map(str::to_owned).collect();
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    if let Ok(value) = HeaderValue::try_from(kept.join(", "))
        && !kept.is_empty()
    {
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offering(protocols: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::try_from(protocols).unwrap());
        headers
    }

    #[test]
    fn exactly_one_token_beside_another_protocol_is_read() {
        let token = format!("{BEARER}{}", URL_SAFE_NO_PAD.encode("secret"));
        assert_eq!(bearer(&offering(&format!("v4.channel.k8s.io, {token}"))), Some("secret".to_owned()));
        for wrong in [
            token.clone(),
            format!("{token}, {token}, v4.channel.k8s.io"),
            format!("{BEARER}?, v4.channel.k8s.io"),
            "v4.channel.k8s.io".to_owned(),
        ] {
            assert_eq!(bearer(&offering(&wrong)), None, "{wrong}");
        }
        let mut headers = offering(&format!("{token}, v4.channel.k8s.io"));
        headers.remove(header::UPGRADE);
        assert_eq!(bearer(&headers), None, "no WebSocket");
    }

    #[test]
    fn a_token_is_removed_and_the_other_protocols_stay() {
        let token = format!("{BEARER}{}", URL_SAFE_NO_PAD.encode("secret"));
        for (offered, kept) in
            [(format!("{token}, a, b"), Some("a, b")), (token.clone(), None), ("a,b".to_owned(), Some("a,b"))]
        {
            let mut headers = offering(&offered);
            remove_bearer(&mut headers);
            let left = headers.get(header::SEC_WEBSOCKET_PROTOCOL).map(|value| value.to_str().unwrap());
            assert_eq!(left, kept, "{offered}");
        }
    }
}
