//! The request headers that describe the route to components of Spin applications, as set by Spin's HTTP trigger.
//!
//! They are set where an Ingress with the annotation [`wellknown::ANNOTATION_SPIN_ROUTES`] leads to a function. Headers
//! with these names from a client are replaced or removed.
//!
//! [`wellknown::ANNOTATION_SPIN_ROUTES`]: mayfly_api::wellknown::ANNOTATION_SPIN_ROUTES

use std::fmt::Write as _;

use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};

use super::plan::PathMatch;

/// The prefix of headers that only the host may set.
const PREFIX: &str = "spin-";
const PATH_INFO: HeaderName = HeaderName::from_static("spin-path-info");
const FULL_URL: HeaderName = HeaderName::from_static("spin-full-url");
const MATCHED_ROUTE: HeaderName = HeaderName::from_static("spin-matched-route");
const BASE_PATH: HeaderName = HeaderName::from_static("spin-base-path");
const RAW_COMPONENT_ROUTE: HeaderName = HeaderName::from_static("spin-raw-component-route");
const COMPONENT_ROUTE: HeaderName = HeaderName::from_static("spin-component-route");
const CLIENT_ADDRESS: HeaderName = HeaderName::from_static("spin-client-addr");

/// A route in Spin's form: `/cart` or `/static/...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpinRoute {
    /// Includes the dots of a wildcard.
    raw: HeaderValue,
    /// Without the dots of a wildcard.
    component: HeaderValue,
    /// The length of the path before the wildcard; `None` for a route without a wildcard.
    wildcard_at: Option<usize>,
}

impl SpinRoute {
    /// The route of an Ingress's path; `None` if the path is not a valid header value.
    pub(super) fn of(path: &str, kind: PathMatch) -> Option<Self> {
        let plain = path.trim_end_matches('/');
        let raw = match kind {
            PathMatch::Prefix => format!("{plain}/..."),
            PathMatch::Exact if plain.is_empty() => "/".to_owned(),
            PathMatch::Exact => plain.to_owned(),
        };
        let component = if plain.is_empty() { "/" } else { plain };
        Some(Self {
            raw: HeaderValue::try_from(raw).ok()?,
            component: HeaderValue::from_str(component).ok()?,
            wildcard_at: (kind == PathMatch::Prefix).then_some(plain.len()),
        })
    }

    /// Sets the headers. `client`: the address and port of the connection's peer; the scheme and the host come from the
    /// request.
    pub(crate) fn describe(&self, headers: &mut HeaderMap, uri: &Uri, scheme: &str, client: HeaderValue) {
        let foreign: Vec<_> =
            headers.keys().filter(|name| name.as_str().starts_with(PREFIX)).cloned().collect();
        for name in foreign {
            headers.remove(name);
        }
        let path_info = self.wildcard_at.and_then(|at| uri.path().get(at..)).unwrap_or_default();
        let mut url = format!("{scheme}://");
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
        // Writing to a string cannot fail.
        let _ = write!(url, "{host}{}", uri.path_and_query().map_or("/", |whole| whole.as_str()));
        let text = |text: &str| HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""));
        for (name, value) in [
            (PATH_INFO, text(path_info)),
            (FULL_URL, text(&url)),
            (MATCHED_ROUTE, self.raw.clone()),
            (RAW_COMPONENT_ROUTE, self.raw.clone()),
            (COMPONENT_ROUTE, self.component.clone()),
            (BASE_PATH, HeaderValue::from_static("/")),
            (CLIENT_ADDRESS, client),
        ] {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_is_told_its_route() {
        for (path, kind, asked, raw, component, info) in [
            ("/foo", PathMatch::Prefix, "/foo/bar?a=1", "/foo/...", "/foo", "/bar"),
            ("/foo", PathMatch::Prefix, "/foo", "/foo/...", "/foo", ""),
            ("/", PathMatch::Prefix, "/a/b", "/...", "/", "/a/b"),
            ("/foo", PathMatch::Exact, "/foo?x", "/foo", "/foo", ""),
            ("/foo/", PathMatch::Exact, "/foo/", "/foo", "/foo", ""),
            ("/", PathMatch::Exact, "/", "/", "/", ""),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static("app.example"));
            headers.insert(PATH_INFO, HeaderValue::from_static("/etc/passwd"));
            headers.insert("spin-path-match-id", HeaderValue::from_static("7"));
            let route = SpinRoute::of(path, kind).unwrap();
            route.describe(
                &mut headers,
                &asked.parse().unwrap(),
                "https",
                HeaderValue::from_static("1.2.3.4:5"),
            );
            let expected = [
                ("spin-path-info", info.to_owned()),
                ("spin-full-url", format!("https://app.example{asked}")),
                ("spin-matched-route", raw.to_owned()),
                ("spin-raw-component-route", raw.to_owned()),
                ("spin-component-route", component.to_owned()),
                ("spin-base-path", "/".to_owned()),
                ("spin-client-addr", "1.2.3.4:5".to_owned()),
            ];
            for (name, value) in &expected {
                assert_eq!(headers[*name], **value, "{name} of {asked} at {path}");
            }
            assert_eq!(headers.len(), expected.len() + 1, "others are removed: {headers:?}");
        }
    }
}
