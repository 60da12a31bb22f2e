//! Rewrites a request's URI into the form that functions and endpoints see.

use bytes::Bytes;
use http::{HeaderValue, Request, Uri, header, uri::PathAndQuery};
use hyper::body::Incoming;
use mayfly_runtime::wire::DrainOnDrop;

/// Moves the host into the `host` header, and leaves only the path in the URI: one form for guests, independent of the
/// client's HTTP version. Returns the host.
pub(crate) fn normalise_host(request: &mut Request<DrainOnDrop<Incoming>>) -> Option<HeaderValue> {
    if let Some(authority) = request.uri().authority() {
        let value = HeaderValue::from_str(authority.as_str()).ok()?;
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = path.map_or(Uri::from_static("/"), Uri::from);
        request.headers_mut().insert(header::HOST, value);
    }
    request.headers().get(header::HOST).cloned()
}

/// The path without its function's prefix; at least `/`.
pub(crate) fn without_prefix(uri: &Uri, prefix_bytes: usize) -> Uri {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let rest = match whole.get(prefix_bytes..) {
        None | Some("" | "/") => return Uri::from_static("/"),
        Some(rest) if rest.starts_with('/') => Bytes::copy_from_slice(rest.as_bytes()),
        Some(rest) => Bytes::from(format!("/{rest}")),
    };
    PathAndQuery::from_maybe_shared(rest).map_or(Uri::from_static("/"), Uri::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_sees_the_rest_of_the_path() {
        for (path, rest) in [
            ("/fn/ns/hello", "/"),
            ("/fn/ns/hello/", "/"),
            ("/fn/ns/hello/a//b?c=%20d", "/a//b?c=%20d"),
            ("/fn/ns/hello?x=1", "/?x=1"),
        ] {
            assert_eq!(without_prefix(&path.parse().unwrap(), "/fn/ns/hello".len()), rest, "{path}");
        }
    }
}
