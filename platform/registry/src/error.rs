//! Refusals in the form of the distribution specification.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use mayfly_artifacts::UploadError;
use serde_json::json;

/// A refusal: a status, a code of the specification and a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegistryRefusal {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) message: String,
}

pub(crate) fn refusal(status: StatusCode, code: &'static str, message: impl Into<String>) -> RegistryRefusal {
    RegistryRefusal { status, code, message: message.into() }
}

impl RegistryRefusal {
    pub(crate) fn blob_unknown(digest: &str) -> Self {
        refusal(StatusCode::NOT_FOUND, "BLOB_UNKNOWN", format!("there is no blob {digest}"))
    }

    pub(crate) fn manifest_unknown(reference: &str) -> Self {
        refusal(StatusCode::NOT_FOUND, "MANIFEST_UNKNOWN", format!("there is no manifest {reference}"))
    }

    pub(crate) fn name_unknown(name: &str) -> Self {
        refusal(StatusCode::NOT_FOUND, "NAME_UNKNOWN", format!("there is no repository {name}"))
    }

    pub(crate) fn digest_invalid(text: &str) -> Self {
        let message =
            format!("{text:?} is not a digest that this registry supports: it uses sha256:<64 hex digits>");
        refusal(StatusCode::BAD_REQUEST, "DIGEST_INVALID", message)
    }

    pub(crate) fn unsupported() -> Self {
        refusal(StatusCode::METHOD_NOT_ALLOWED, "UNSUPPORTED", "the registry does not support this operation")
    }
}

impl From<std::io::Error> for RegistryRefusal {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                refusal(StatusCode::INSUFFICIENT_STORAGE, "DENIED", "the registry's disk is full")
            }
            kind => {
                tracing::error!(%error, "the registry's store failed");
                let message = format!("the registry's store failed ({kind}); see the server's log");
                refusal(StatusCode::INTERNAL_SERVER_ERROR, "UNKNOWN", message)
            }
        }
    }
}

impl From<UploadError> for RegistryRefusal {
    fn from(error: UploadError) -> Self {
        match error {
            UploadError::DigestMismatch { .. } => {
                refusal(StatusCode::BAD_REQUEST, "DIGEST_INVALID", error.to_string())
            }
            UploadError::TooLarge { limit } => {
                let message = format!("more than {limit} bytes");
                refusal(StatusCode::PAYLOAD_TOO_LARGE, "SIZE_INVALID", message)
            }
            UploadError::Full => std::io::Error::from(std::io::ErrorKind::StorageFull).into(),
            UploadError::Stream(_) => {
                refusal(StatusCode::BAD_REQUEST, "BLOB_UPLOAD_INVALID", error.to_string())
            }
            UploadError::Io(cause) => cause.into(),
            UploadError::Origin(_) => {
                refusal(StatusCode::SERVICE_UNAVAILABLE, "TOOMANYREQUESTS", error.to_string())
            }
        }
    }
}

impl IntoResponse for RegistryRefusal {
    fn into_response(self) -> Response {
        let body = json!({"errors": [{"code": self.code, "message": self.message, "detail": null}]});
        let mut response = (self.status, Json(body)).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            let challenge = HeaderValue::from_static("Basic realm=\"mayfly\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
