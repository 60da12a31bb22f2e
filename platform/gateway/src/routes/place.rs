//! Parses the target of a request from its head.

use std::borrow::Cow;

use http::{HeaderMap, Uri, header, uri::PathAndQuery};
use mayfly_api::wellknown::{FUNCTION_HOST_SUFFIX, FUNCTION_PATH_PREFIX};

/// The part of a request that selects its route.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RoutePlace<'a> {
    /// `/fn/<namespace>/<name>/…`
    Path {
        /// `<namespace>/<name>`
        key: &'a str,
    },
    /// `<label>.<namespace>.fn.localhost`; the label is a name, or a tag and a name.
    Host {
        /// `<namespace>/<label>`
        key: String,
    },
    /// Neither of these forms.
    Nowhere,
}

impl<'a> RoutePlace<'a> {
    /// A function's own host takes precedence over the path: all paths below it belong to the function.
    pub(crate) fn of(uri: &'a Uri, headers: &HeaderMap) -> Self {
        if let Some(key) = host_of(uri, headers).and_then(function_host) {
            return Self::Host { key };
        }
        match function_path(uri.path()) {
            Some(key) => Self::Path { key },
            None => Self::Nowhere,
        }
    }
}

/// The request's host: from the URI in HTTP/2, from a header in HTTP/1.1.
pub(crate) fn host_of<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    match uri.authority() {
        Some(authority) => Some(authority.as_str()),
        None => headers.get(header::HOST)?.to_str().ok(),
    }
}

fn function_host(host: &str) -> Option<String> {
    let host = match host.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => host,
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    let front = host.len().checked_sub(FUNCTION_HOST_SUFFIX.len())?;
    let (labels, suffix) = (host.get(..front)?, host.get(front..)?);
    if !suffix.eq_ignore_ascii_case(FUNCTION_HOST_SUFFIX) {
        return None;
    }
    let (label, namespace) = labels.split_once('.')?;
    let mut key = String::with_capacity(labels.len());
    key.push_str(namespace);
    key.push('/');
    key.push_str(label);
    key.make_ascii_lowercase();
    Some(key)
}

fn function_path(path: &str) -> Option<&str> {
    let rest = path.strip_prefix(FUNCTION_PATH_PREFIX)?;
    let namespace = rest.find('/')?;
    let name = rest[namespace + 1..].find('/').map_or(rest.len(), |end| namespace + 1 + end);
    if namespace == 0 || name == namespace + 1 { None } else { Some(&rest[..name]) }
}

/// The number of path segments that select a function: `fn`, a namespace, a name.
const LEADING_SEGMENTS: usize = 3;

/// The same URI with the unreserved characters of its leading segments decoded: both forms are equivalent (RFC 3986,
/// section 6.2.2.2). The function's own part of the path is unchanged. `None` if nothing is encoded.
pub(crate) fn with_unreserved_decoded(uri: &Uri) -> Option<Uri> {
    let whole = uri.path_and_query()?.as_str();
    let path = uri.path();
    let end = path.match_indices('/').nth(LEADING_SEGMENTS).map_or(path.len(), |(at, _)| at);
    let plain = decode_unreserved(&whole[..end])?;
    let whole = PathAndQuery::try_from(plain + &whole[end..]).ok()?;
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(whole);
    Uri::from_parts(parts).ok()
}

/// A path in the form in which paths are compared: without percent-encodings of characters that need none (RFC 3986,
/// section 6.2.2.2).
pub(crate) fn comparable_path(path: &str) -> Cow<'_, str> {
    let plain = path.contains('%').then(|| decode_unreserved(path));
    plain.flatten().map_or(Cow::Borrowed(path), Cow::Owned)
}

fn decode_unreserved(text: &str) -> Option<String> {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    let mut changed = false;
    while let Some(at) = rest.find('%') {
        let (before, from) = rest.split_at(at);
        plain.push_str(before);
        let code = from.get(1..3).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let byte = code.and_then(|digits| u8::from_str_radix(digits, 16).ok()).map(char::from);
        rest = match byte.filter(|byte| byte.is_ascii_alphanumeric() || "-._~".contains(*byte)) {
            Some(byte) => {
                plain.push(byte);
                changed = true;
                &from[3..]
            }
            None => {
                plain.push('%');
                &from[1..]
            }
        };
    }
    plain.push_str(rest);
    changed.then_some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(uri: &str, host: Option<&str>) -> String {
        let mut request = http::Request::builder().uri(uri);
        if let Some(host) = host {
            request = request.header(header::HOST, host);
        }
        let request = request.body(()).unwrap();
        match RoutePlace::of(request.uri(), request.headers()) {
            RoutePlace::Path { key } => format!("path {key}"),
            RoutePlace::Host { key } => format!("host {key}"),
            RoutePlace::Nowhere => "nowhere".into(),
        }
    }

    #[test]
    fn paths_are_compared_without_needless_encodings() {
        for (sent, compared) in [
            ("/admin/x", "/admin/x"),
            ("/%61dmin/%78%2D", "/admin/x-"),
            ("/caf%C3%A9/%2Fa%20", "/caf%C3%A9/%2Fa%20"),
            ("/%6", "/%6"),
        ] {
            assert_eq!(comparable_path(sent), compared, "{sent}");
        }
    }

    #[test]
    fn encoded_or_not_is_the_same() {
        for (sent, plain) in [
            ("/fn/ns/hello/", None),
            ("/fn/ns/gr%65et/", Some("/fn/ns/greet/")),
            ("/%66n/n%73/gr%65%65t?x=%65", Some("/fn/ns/greet?x=%65")),
            ("/fn/ns/my%2Dfn/%65%20/b", Some("/fn/ns/my-fn/%65%20/b")),
            ("/fn/ns/my%2dfn", Some("/fn/ns/my-fn")),
            // A reserved character, or an invalid encoding.
            ("/fn/ns%2Fgreet/x", None),
            ("/fn/ns/gr%6", None),
            ("/fn/ns/gr%zzeet/%65", None),
            ("/fn/ns/hello/%65", None),
        ] {
            let found = with_unreserved_decoded(&sent.parse().unwrap()).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), plain, "{sent}");
        }
    }

    #[test]
    fn paths_and_hosts() {
        for (uri, host, expected) in [
            ("/fn/ns/hello", None, "path ns/hello"),
            ("/fn/ns/hello/", None, "path ns/hello"),
            ("/fn/ns/hello/a/b?c=d/e", None, "path ns/hello"),
            ("/fn/ns/hello?c=d/e", None, "path ns/hello"),
            ("/fn/ns/hello", Some("127.0.0.1:8080"), "path ns/hello"),
            ("/fn/ns/", None, "nowhere"),
            ("/fn/ns", None, "nowhere"),
            ("/fn//hello", None, "nowhere"),
            ("/fn/ns//x", None, "nowhere"),
            ("/FN/ns/hello", None, "nowhere"),
            ("/", None, "nowhere"),
            ("/", Some("hello.ns.fn.localhost"), "host ns/hello"),
            ("/fn/other/x", Some("hello.ns.fn.localhost:8080"), "host ns/hello"),
            ("/", Some("Hello.NS.FN.localhost."), "host ns/hello"),
            ("/", Some("canary-hello.ns.fn.localhost"), "host ns/canary-hello"),
            ("/", Some("a.b.c.fn.localhost"), "host b.c/a"),
            ("/", Some("hello.fn.localhost"), "nowhere"),
            ("/", Some(".fn.localhost"), "nowhere"),
            ("/", Some("fn.localhost"), "nowhere"),
            ("http://hello.ns.fn.localhost:8080/x", None, "host ns/hello"),
            ("http://example.com/fn/ns/hello/", Some("hello.ns.fn.localhost"), "path ns/hello"),
        ] {
            assert_eq!(place(uri, host), expected, "{uri} {host:?}");
        }
    }
}
