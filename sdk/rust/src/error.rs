use std::any::Any;
use std::fmt;

use crate::http::{HttpError, HttpErrorKind, Response};

/// The error of a failed call: a status outside 2xx and the JSON body `{"errorType": …, "errorMessage": …}`. Workflows
/// match on the type (`Catch`, `Retry`), people read the message.
///
/// Every `std::error::Error` converts into it (so `?` works), with the name of the Rust type as error type and status
/// 500. Errors of [`http`](mod@crate::http) keep their kind as type and get a matching status (an invalid request is a
/// 400, an unreachable upstream server a 502).
///
/// A function's own error type may convert with statuses and types of its own choice:
///
/// ```
/// enum OrderError { SoldOut }
///
/// impl From<OrderError> for mayfly::Error {
///     fn from(error: OrderError) -> Self {
///         match error {
///             OrderError::SoldOut => mayfly::Error::new("SoldOut", "nothing left").with_status(409),
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Error {
    error_type: String,
    message: String,
    status: u16,
}

impl Error {
    /// An error with status 500.
    pub fn new(error_type: impl Into<String>, message: impl Into<String>) -> Self {
        Error { error_type: error_type.into(), message: message.into(), status: 500 }
    }

    /// The same error with another status. A status below 400 would mean success, so it becomes 500.
    pub fn with_status(mut self, status: u16) -> Self {
        self.status = if (400..=599).contains(&status) { status } else { 500 };
        self
    }

    /// An invalid request: type `BadRequest`, status 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Error::new("BadRequest", message).with_status(400)
    }

    /// A missing resource: type `NotFound`, status 404.
    pub fn not_found(message: impl Into<String>) -> Self {
        Error::new("NotFound", message).with_status(404)
    }

    /// The `errorType` in the response, which workflows match in `Retry` and `Catch`.
    pub fn error_type(&self) -> &str {
        &self.error_type
    }

    /// The `errorMessage` in the response.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The HTTP status of the response, 400 to 599.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The response with this error.
    pub(crate) fn to_response(&self) -> Response {
        let body = serde_json::json!({"errorType": self.error_type, "errorMessage": self.message});
        Response::new(self.status).with_header("content-type", "application/json").with_body(body.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.error_type, self.message)
    }
}

// `Error` itself does not implement `std::error::Error`, which would conflict with this conversion.
impl<E: std::error::Error + 'static> From<E> for Error {
    fn from(error: E) -> Self {
        if let Some(http) = (&error as &dyn Any).downcast_ref::<HttpError>() {
            return Error::new(http.kind().name(), http.to_string()).with_status(status_of(http.kind()));
        }
        Error::new(short_type_name::<E>(), messages(&error))
    }
}

fn status_of(kind: HttpErrorKind) -> u16 {
    match kind {
        HttpErrorKind::InvalidBody => 400,
        HttpErrorKind::TooLarge => 413,
        HttpErrorKind::Timeout => 504,
        HttpErrorKind::InvalidRequest => 500,
        HttpErrorKind::Denied
        | HttpErrorKind::Unreachable
        | HttpErrorKind::Tls
        | HttpErrorKind::Protocol
        | HttpErrorKind::Closed => 502,
    }
}

/// `alloc::vec::Vec<my::Kind>` → `Vec`, `std::num::ParseIntError` → `ParseIntError`.
fn short_type_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}

/// The message, followed by those of its causes that add information.
fn messages(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<i32, Error> {
        Ok(text.parse::<i32>()?)
    }

    #[test]
    fn any_error_converts_with_its_type_name() {
        let error = parse("x").unwrap_err();
        assert_eq!(error.error_type(), "ParseIntError");
        assert_eq!(error.message(), "invalid digit found in string");
        assert_eq!(error.status(), 500);
    }

    #[test]
    fn http_errors_keep_kind_and_status() {
        let cases = [
            (HttpErrorKind::Denied, "Denied", 502),
            (HttpErrorKind::InvalidBody, "InvalidBody", 400),
            (HttpErrorKind::TooLarge, "TooLarge", 413),
            (HttpErrorKind::Timeout, "Timeout", 504),
        ];
        for (kind, name, status) in cases {
            let error = Error::from(HttpError::new(kind, "because"));
            assert_eq!((error.error_type(), error.status()), (name, status));
        }
    }

    #[test]
    fn causes_are_told() {
        #[derive(Debug)]
        struct Outer(std::num::ParseIntError);
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("cannot read the count")
            }
        }
        impl std::error::Error for Outer {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&self.0)
            }
        }
        let error = Error::from(Outer("".parse::<i32>().unwrap_err()));
        assert_eq!(error.to_string(), "Outer: cannot read the count: cannot parse integer from empty string");
    }

    #[test]
    fn an_error_never_looks_like_success() {
        for status in [0, 200, 302, 399, 600] {
            assert_eq!(Error::new("E", "m").with_status(status).status(), 500);
        }
        assert_eq!(Error::not_found("m").status(), 404);
    }
}
