use std::cell::OnceCell;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use wasip2::http::types::IncomingRequest;

use super::body::Incoming;
use super::{Body, Content, Headers, HttpError, Method, Response, query};

/// A request: received by a handler, or to be sent with [`send`](Request::send).
///
/// Each part of a received request is fetched from the host at its first use, so unused parts cost nothing.
#[derive(Default)]
pub struct Request {
    method: OnceCell<Method>,
    target: OnceCell<String>,
    headers: OnceCell<Headers>,
    body: Option<Body>,
    timeout: Option<Duration>,
    /// The received request, from which parts are taken.
    source: Option<IncomingRequest>,
}

impl Request {
    /// A request to send: `target` is a complete URL. (A path suffices for tests of handlers.)
    pub fn new(method: Method, target: impl Into<String>) -> Self {
        Request { method: method.into(), target: target.into().into(), ..Request::default() }
    }

    /// A GET request to send; see [`new`](Self::new).
    pub fn get(target: impl Into<String>) -> Self {
        Request::new(Method::Get, target)
    }

    /// A POST request to send; see [`new`](Self::new).
    pub fn post(target: impl Into<String>) -> Self {
        Request::new(Method::Post, target)
    }

    pub(crate) fn incoming(source: IncomingRequest) -> Self {
        Request { source: Some(source), ..Request::default() }
    }

    /// The method; GET by default.
    pub fn method(&self) -> &Method {
        self.method.get_or_init(|| match &self.source {
            Some(source) => Method::from_wasi(source.method()),
            None => Method::default(),
        })
    }

    /// The request target: path and query of a received request, the URL of one to send.
    pub fn target(&self) -> &str {
        self.target.get_or_init(|| {
            let target = self.source.as_ref().and_then(IncomingRequest::path_with_query);
            target.unwrap_or_else(|| "/".to_owned())
        })
    }

    /// The path, without the query.
    pub fn path(&self) -> &str {
        let target = self.target();
        let bare = target.split(['?', '#']).next().unwrap_or(target);
        match bare.split_once("://") {
            // For a URL: the part after the host.
            Some((_, rest)) if !bare.starts_with('/') => rest.find('/').map_or("/", |slash| &rest[slash..]),
            _ => bare,
        }
    }

    /// The decoded value of a query parameter: the first one, if there are several.
    pub fn query(&self, name: &str) -> Option<String> {
        query::find(self.query_string()?, name)
    }

    /// The part after the `?`, as sent.
    pub fn query_string(&self) -> Option<&str> {
        self.target().split('#').next()?.split_once('?').map(|(_, query)| query)
    }

    /// The headers, names in lower case.
    pub fn headers(&self) -> &Headers {
        self.headers.get_or_init(|| match &self.source {
            Some(source) => Headers::from_wasi(&source.headers()),
            None => Headers::default(),
        })
    }

    /// Mutable access to the headers, before the request is sent.
    pub fn headers_mut(&mut self) -> &mut Headers {
        self.headers();
        self.headers.get_mut().expect("just set")
    }

    /// The first value of a header, if it is present and is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers().get(name)
    }

    /// Sets a header to one value.
    pub fn with_header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers_mut().insert(name, value);
        self
    }

    /// Sets the body: text, bytes or a stream.
    pub fn with_body(mut self, body: impl Into<Body>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Sets a JSON body and its content type.
    ///
    /// # Panics
    /// If the value cannot be serialised: a map whose keys are not strings, or an error of a custom `Serialize`.
    pub fn with_json(self, value: &impl Serialize) -> Self {
        let json = serde_json::to_vec(value).expect("a value with a JSON form");
        self.with_header("content-type", "application/json").with_body(json)
    }

    /// Sets the timeout of the connection, of the head of the response, and of each pause between two pieces of its
    /// body.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The body, for reading in chunks.
    pub fn body_mut(&mut self) -> &mut Body {
        let source = &self.source;
        self.body.get_or_insert_with(|| match source.as_ref().and_then(|source| source.consume().ok()) {
            Some(body) => Body(Content::Incoming(Incoming::new(body))),
            None => Body::empty(),
        })
    }

    /// The body, for reading or forwarding.
    pub fn into_body(mut self) -> Body {
        std::mem::take(self.body_mut())
    }

    /// The whole body as bytes, up to [`BODY_BYTES_MAX`](super::BODY_BYTES_MAX).
    pub async fn bytes(self) -> Result<Vec<u8>, HttpError> {
        self.into_body().bytes().await
    }

    /// The whole body as text, up to [`BODY_BYTES_MAX`](super::BODY_BYTES_MAX); text that is not UTF-8 is
    /// [`InvalidBody`](super::HttpErrorKind::InvalidBody).
    pub async fn text(self) -> Result<String, HttpError> {
        self.into_body().text().await
    }

    /// The whole body, parsed as JSON; errors as for [`text`](Self::text).
    pub async fn json<T: DeserializeOwned>(self) -> Result<T, HttpError> {
        self.into_body().json().await
    }

    /// Sends the request and waits for the head of the response; its body can then be read or forwarded.
    pub async fn send(self) -> Result<Response, HttpError> {
        super::client::send(self).await
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// The headers and body of a request to send.
    pub(crate) fn into_parts(mut self) -> (Headers, Body) {
        let headers = std::mem::take(self.headers_mut());
        (headers, self.into_body())
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method(), self.target())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_taken_apart() {
        let cases = [
            ("/a/b?x=1#f", "/a/b", Some("x=1")),
            ("/", "/", None),
            ("/?", "/", Some("")),
            ("https://host/p?q", "/p", Some("q")),
            ("https://host", "/", None),
            ("https://host?u=https://other/x", "/", Some("u=https://other/x")),
            ("/p?u=https://other/x", "/p", Some("u=https://other/x")),
            ("/p#f?x", "/p", None),
        ];
        for (target, path, query) in cases {
            let request = Request::get(target);
            assert_eq!((request.path(), request.query_string()), (path, query), "{target}");
        }
    }
}
