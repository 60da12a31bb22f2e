use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Body, BodyWriter, Headers, HttpError, HttpErrorKind};

/// A response: returned by a handler, or received for an outbound request.
#[derive(Debug, Default)]
pub struct Response {
    status: u16,
    headers: Headers,
    body: Body,
}

impl Response {
    /// An empty response.
    pub fn new(status: u16) -> Self {
        Response { status, ..Response::default() }
    }

    /// 200 with plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Response::new(200).with_header("content-type", "text/plain; charset=utf-8").with_body(text.into())
    }

    /// 200 with a JSON body. A value that cannot be serialised results in status 500.
    pub fn json(value: &impl Serialize) -> Self {
        Json(value).into_response()
    }

    /// 200 with a body written in chunks; see [`Body::stream`].
    pub fn stream<F>(write: F) -> Self
    where
        F: AsyncFnOnce(&mut BodyWriter) -> Result<(), crate::Error> + 'static,
    {
        Response::new(200).with_body(Body::stream(write))
    }

    /// Sets the status, such as 201. An invalid status (outside 100 to 999) is sent as 500.
    pub fn with_status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }

    /// Sets a header to one value.
    pub fn with_header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.insert(name, value);
        self
    }

    /// Sets the body: text, bytes or a stream.
    pub fn with_body(mut self, body: impl Into<Body>) -> Self {
        self.body = body.into();
        self
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The headers, names in lower case.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Mutable access to the headers, before the response is sent.
    pub fn headers_mut(&mut self) -> &mut Headers {
        &mut self.headers
    }

    /// The first value of a header, if it is present and is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// The body, for reading in chunks.
    pub fn body_mut(&mut self) -> &mut Body {
        &mut self.body
    }

    /// The body, for reading or forwarding.
    pub fn into_body(self) -> Body {
        self.body
    }

    /// The whole body as bytes, up to [`BODY_BYTES_MAX`](super::BODY_BYTES_MAX).
    pub async fn bytes(self) -> Result<Vec<u8>, HttpError> {
        self.body.bytes().await
    }

    /// The whole body as text. Invalid data from another server is that server's error, not the caller's:
    /// [`HttpErrorKind::Protocol`].
    pub async fn into_text(self) -> Result<String, HttpError> {
        self.body.text().await.map_err(upstream)
    }

    /// The whole body, parsed as JSON; errors as for [`into_text`](Self::into_text).
    pub async fn into_json<T: DeserializeOwned>(self) -> Result<T, HttpError> {
        self.body.json().await.map_err(upstream)
    }

    pub(crate) fn into_parts(self) -> (u16, Headers, Body) {
        (self.status, self.headers, self.body)
    }

    pub(crate) fn from_parts(status: u16, headers: Headers, body: Body) -> Self {
        Response { status, headers, body }
    }
}

fn upstream(error: HttpError) -> HttpError {
    match error.kind() {
        HttpErrorKind::InvalidBody => HttpError::new(HttpErrorKind::Protocol, error.to_string()),
        _ => error,
    }
}

/// A value that a handler can return.
pub trait IntoResponse {
    /// Converts the value to a response.
    fn into_response(self) -> Response;
}

impl IntoResponse for Response {
    fn into_response(self) -> Response {
        self
    }
}

impl IntoResponse for () {
    fn into_response(self) -> Response {
        Response::new(204)
    }
}

impl IntoResponse for String {
    fn into_response(self) -> Response {
        Response::text(self)
    }
}

impl IntoResponse for &str {
    fn into_response(self) -> Response {
        Response::text(self)
    }
}

impl<R: IntoResponse, E: Into<crate::Error>> IntoResponse for Result<R, E> {
    fn into_response(self) -> Response {
        match self {
            Ok(answer) => answer.into_response(),
            Err(error) => crate::rt::failed(error.into()),
        }
    }
}

/// 200 with the value as JSON.
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(json) => Response::new(200).with_header("content-type", "application/json").with_body(json),
            Err(error) => crate::rt::failed(error.into()),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Json<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
