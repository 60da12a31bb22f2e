use std::fmt;

use wasip2::http::types::{ErrorCode, http_error_code};
use wasip2::io::streams::StreamError;

/// A request that could not be sent, or a body that could not be read or written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpError {
    kind: HttpErrorKind,
    message: String,
}

/// The kind of an error, for code that decides about a retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpErrorKind {
    /// The platform denies this destination to the function; list it under `egress`.
    Denied,
    /// A timeout expired.
    Timeout,
    /// The name is unknown or the address does not answer.
    Unreachable,
    /// The TLS handshake failed.
    Tls,
    /// The peer violated HTTP, or closed the connection early.
    Protocol,
    /// The request is invalid: its URL, method or headers.
    InvalidRequest,
    /// A body does not have the expected format.
    InvalidBody,
    /// A body is larger than the reader permitted.
    TooLarge,
    /// The reader has closed the body.
    Closed,
}

impl HttpErrorKind {
    /// The name in `errorType`.
    pub fn name(self) -> &'static str {
        match self {
            HttpErrorKind::Denied => "Denied",
            HttpErrorKind::Timeout => "Timeout",
            HttpErrorKind::Unreachable => "Unreachable",
            HttpErrorKind::Tls => "Tls",
            HttpErrorKind::Protocol => "Protocol",
            HttpErrorKind::InvalidRequest => "InvalidRequest",
            HttpErrorKind::InvalidBody => "InvalidBody",
            HttpErrorKind::TooLarge => "TooLarge",
            HttpErrorKind::Closed => "Closed",
        }
    }

    fn says(self) -> &'static str {
        match self {
            HttpErrorKind::Denied => "the destination is denied",
            HttpErrorKind::Timeout => "it took too long",
            HttpErrorKind::Unreachable => "the destination does not answer",
            HttpErrorKind::Tls => "no encrypted connection could be made",
            HttpErrorKind::Protocol => "the exchange broke off",
            HttpErrorKind::InvalidRequest => "the request cannot be sent",
            HttpErrorKind::InvalidBody => "the body is not what was expected",
            HttpErrorKind::TooLarge => "the body is too large",
            HttpErrorKind::Closed => "the reader has gone",
        }
    }
}

impl HttpError {
    pub(crate) fn new(kind: HttpErrorKind, message: impl Into<String>) -> Self {
        HttpError { kind, message: message.into() }
    }

    /// The kind of the error.
    pub fn kind(&self) -> HttpErrorKind {
        self.kind
    }

    pub(crate) fn from_code(code: &ErrorCode) -> Self {
        use HttpErrorKind as Kind;
        let kind = match code {
            ErrorCode::HttpRequestDenied | ErrorCode::DestinationIpProhibited => {
                return HttpError::new(
                    Kind::Denied,
                    "this destination is denied; list it under spec.egress of the function",
                );
            }
            ErrorCode::DnsTimeout
            | ErrorCode::ConnectionTimeout
            | ErrorCode::ConnectionReadTimeout
            | ErrorCode::ConnectionWriteTimeout
            | ErrorCode::HttpResponseTimeout => Kind::Timeout,
            ErrorCode::DnsError(_)
            | ErrorCode::DestinationNotFound
            | ErrorCode::DestinationUnavailable
            | ErrorCode::DestinationIpUnroutable
            | ErrorCode::ConnectionRefused
            | ErrorCode::ConnectionLimitReached => Kind::Unreachable,
            ErrorCode::TlsProtocolError | ErrorCode::TlsCertificateError | ErrorCode::TlsAlertReceived(_) => {
                Kind::Tls
            }
            ErrorCode::HttpRequestMethodInvalid
            | ErrorCode::HttpRequestUriInvalid
            | ErrorCode::HttpRequestUriTooLong => Kind::InvalidRequest,
            ErrorCode::HttpRequestBodySize(_) | ErrorCode::HttpResponseBodySize(_) => Kind::TooLarge,
            _ => Kind::Protocol,
        };
        let code = match code {
            ErrorCode::DnsError(details) => match &details.rcode {
                Some(why) => format!("DnsError: {why}"),
                None => "DnsError".to_owned(),
            },
            // `ErrorCode::ConnectionRefused` → `ConnectionRefused`
            other => format!("{other:?}").replace("ErrorCode::", ""),
        };
        HttpError::new(kind, format!("{} ({code})", kind.says()))
    }

    /// The same error, with the failed operation in its message.
    pub(crate) fn while_doing(self, what: &str) -> Self {
        HttpError { message: format!("{what}: {}", self.message), ..self }
    }

    pub(crate) fn from_stream(error: &StreamError) -> Self {
        match error {
            StreamError::Closed => HttpError::new(HttpErrorKind::Closed, "the reader has gone"),
            StreamError::LastOperationFailed(cause) => match http_error_code(cause) {
                Some(code) => HttpError::from_code(&code),
                None => HttpError::new(HttpErrorKind::Protocol, cause.to_debug_string()),
            },
        }
    }
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for HttpError {}
