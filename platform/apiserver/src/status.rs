//! Errors of the API, and their mapping to `Status` objects. The messages are upstream's
//! (`apimachinery/pkg/api/errors`), which people and programs recognise.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use mayfly_api::validation::FieldError;
use serde::Serialize;

use crate::{admission::Denied, registry::Kind};

/// The reasons that a webhook may give for a refusal (`metav1.StatusReason`).
const REASONS: [&str; 12] = [
    "Unauthorized",
    "Forbidden",
    "NotFound",
    "AlreadyExists",
    "Conflict",
    "Gone",
    "Invalid",
    "Timeout",
    "TooManyRequests",
    "BadRequest",
    "InternalError",
    "ServiceUnavailable",
];

/// A refusal, in the form in which a client gets it.
#[derive(Clone, Debug, Serialize)]
pub struct ApiError {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    metadata: StatusMeta,
    status: &'static str,
    pub message: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Box<Details>>,
    pub code: u16,
    /// Whether the response is plain text, as from Go's HTTP router, instead of a `Status`.
    #[serde(skip)]
    is_plain: bool,
}

/// The metadata of a `Status`.
#[derive(Clone, Debug, Default, Serialize)]
struct StatusMeta {
    #[serde(rename = "continue", skip_serializing_if = "Option::is_none")]
    continue_token: Option<Box<str>>,
}

/// The `details` of a `Status`: the object, and the causes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Details {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    #[serde(rename = "retryAfterSeconds", skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct Cause {
    pub reason: &'static str,
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

impl ApiError {
    pub(crate) fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: "Status",
            api_version: "v1",
            metadata: StatusMeta::default(),
            status: "Failure",
            message: message.into(),
            reason,
            details: None,
            code: code.as_u16(),
            is_plain: false,
        }
    }

    /// Sets the details to a resource that may have no row in the registry.
    pub(crate) fn about_resource(self, group: &str, plural: &str, name: &str) -> Self {
        self.about(group, plural, name)
    }

    fn about(mut self, group: &str, kind: &str, name: &str) -> Self {
        let details = self.details.get_or_insert_default();
        details.group = group.into();
        details.kind = kind.into();
        details.name = name.into();
        self
    }

    fn because(mut self, reason: &'static str, message: impl Into<String>, field: impl Into<String>) -> Self {
        let cause = Cause { reason, message: message.into(), field: field.into() };
        self.details.get_or_insert_default().causes.push(cause);
        self
    }

    fn retry_after(mut self, seconds: u32) -> Self {
        self.details.get_or_insert_default().retry_after_seconds = seconds;
        self
    }

    pub(crate) fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} not found", kind.resource());
        Self::new(StatusCode::NOT_FOUND, "NotFound", message).about(kind.group, kind.plural, name)
    }

    /// [`Self::not_found`] for a resource without a row in the registry, such as a subresource.
    pub(crate) fn resource_not_found(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{resource}.{group} {name:?} not found");
        Self::new(StatusCode::NOT_FOUND, "NotFound", message).about(group, resource, name)
    }

    pub(crate) fn already_exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", kind.resource());
        Self::new(StatusCode::CONFLICT, "AlreadyExists", message).about(kind.group, kind.plural, name)
    }

    /// All names generated from `generateName` exist already.
    pub(crate) fn generated_name_taken(kind: &Kind, name: &str) -> Self {
        let mut error = Self::already_exists(kind, name).retry_after(1);
        error.message = format!(
            "{} {name:?} already exists, the server was not able to generate a unique name for the object",
            kind.resource()
        );
        error
    }

    pub(crate) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", kind.resource());
        Self::new(StatusCode::CONFLICT, "Conflict", message).about(kind.group, kind.plural, name)
    }

    /// The preconditions of a deletion do not match the stored object.
    pub(crate) fn precondition_failed(kind: &Kind, name: &str, why: &str) -> Self {
        let group = stored_group(kind);
        let qualified = match group {
            "" => kind.kind.to_owned(),
            group => format!("{}.{group}", kind.kind),
        };
        let message = format!("Operation cannot be fulfilled on {qualified} {name:?}: {why}");
        Self::new(StatusCode::CONFLICT, "Conflict", message).about(group, kind.kind, name)
    }

    /// The object is not the one that the client read.
    pub(crate) fn modified(kind: &Kind, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    /// Server-side apply conflicts with fields of other managers: `(manager, field path)` each.
    pub(crate) fn apply_conflict(mut conflicts: Vec<(String, String)>) -> Self {
        conflicts.sort();
        let message = match conflicts.as_slice() {
            [(manager, field)] => format!("Apply failed with 1 conflict: conflict with {manager}: {field}"),
            _ => format!("Apply failed with {} conflicts: {}", conflicts.len(), conflict_list(&conflicts)),
        };
        let mut error = Self::new(StatusCode::CONFLICT, "Conflict", message);
        for (manager, field) in conflicts {
            error = error.because("FieldManagerConflict", format!("conflict with {manager}"), field);
        }
        error
    }

    pub(crate) fn invalid(kind: &Kind, name: &str, errors: &[FieldError]) -> Self {
        Self::invalid_named(stored_group(kind), kind.kind, name, errors)
    }

    /// [`Self::invalid`] for a kind without a row in the registry, such as that of a subresource.
    pub(crate) fn invalid_named(group: &str, kind: &str, name: &str, errors: &[FieldError]) -> Self {
        let qualified = match group {
            "" => kind.to_owned(),
            group => format!("{kind}.{group}"),
        };
        // As upstream, the message names an error once, while the causes repeat it.
        let mut list: Vec<String> = Vec::new();
        for text in errors.iter().map(|e| format!("{}: {}", e.path, e.message())) {
            if !list.contains(&text) {
                list.push(text);
            }
        }
        let all = if let [one] = list.as_slice() { one.clone() } else { format!("[{}]", list.join(", ")) };
        let message = format!("{qualified} {name:?} is invalid: {all}");
        let mut error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message);
        error = error.about(group, kind, name);
        for field in errors {
            error = error.because(field.cause(), field.message(), field.path.clone());
        }
        error
    }

    /// A patch, or a patched object, that does not fit the kind.
    pub(crate) fn invalid_patch(patch: &str, why: &str) -> Self {
        let message = format!(" \"\" is invalid: patch: Invalid value: {patch:?}: {why}");
        let cause = format!("Invalid value: {patch:?}: {why}");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message).because(
            "FieldValueInvalid",
            cause,
            "patch",
        )
    }

    /// A JSON patch that cannot be applied.
    pub(crate) fn patch_refused() -> Self {
        let message = "the server rejected our request due to an error in our request";
        let mut error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message);
        error.details = Some(Box::default());
        error
    }

    /// Options of a request (`CreateOptions`) that are not valid.
    pub(crate) fn invalid_options(options: &str, errors: &[FieldError]) -> Self {
        Self::invalid_named("meta.k8s.io", options, "", errors)
    }

    pub(crate) fn unprocessable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn forbidden(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("{} {name:?} is forbidden: {why}", kind.resource());
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message).about(kind.group, kind.plural, name)
    }

    pub(crate) fn namespace_terminating(kind: &Kind, name: &str, namespace: &str) -> Self {
        let why =
            format!("unable to create new content in namespace {namespace} because it is being terminated");
        Self::forbidden(kind, name, &why).because(
            "NamespaceTerminating",
            format!("namespace {namespace} is being terminated"),
            "metadata.namespace",
        )
    }

    /// The path does not exist.
    pub(crate) fn no_resource() -> Self {
        let message = "the server could not find the requested resource";
        let mut error = Self::new(StatusCode::NOT_FOUND, "NotFound", message);
        error.details = Some(Box::default());
        error
    }

    /// An error of upstream's filters, which run before the request is parsed: a line of text.
    pub(crate) fn of_filter(path: &str, why: &str) -> Self {
        let message = format!("Internal Server Error: {path:?}: {why}\n");
        let mut error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message);
        error.is_plain = true;
        error
    }

    /// A path outside of the API: upstream answers in plain text.
    pub(crate) fn no_path() -> Self {
        let mut error = Self::no_resource();
        error.is_plain = true;
        error
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        let mut error = Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message);
        error.details = Some(Box::default());
        error
    }

    pub(crate) fn not_acceptable() -> Self {
        let message = "only the following media types are accepted: application/json, \
                       application/json;as=Table, application/json;as=PartialObjectMetadata, application/yaml";
        Self::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message)
    }

    pub(crate) fn not_acceptable_stream() -> Self {
        let message = "only the following media types are accepted: application/json;stream=watch";
        Self::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message)
    }

    pub(crate) fn unsupported_media_type(allowed: &[&str]) -> Self {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {}",
            allowed.join(", ")
        );
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", message)
    }

    pub(crate) fn too_large(limit_bytes: usize) -> Self {
        let message = format!("Request entity too large: limit is {limit_bytes}");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", message)
    }

    pub(crate) fn too_large_patch(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", message)
    }

    pub(crate) fn too_many_requests(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message).retry_after(1)
    }

    /// A disruption budget allows no eviction now.
    pub(crate) fn disruption_refused(why: &str) -> Self {
        let message = "Cannot evict pod as it would violate the pod's disruption budget.";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message).because(
            "DisruptionBudget",
            why,
            "",
        )
    }

    /// A watch from a revision that is no longer kept.
    pub(crate) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(StatusCode::GONE, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// The revision of a list is no longer available.
    pub(crate) fn list_expired() -> Self {
        let message = "The resourceVersion for the provided list is too old.";
        Self::new(StatusCode::GONE, "Expired", message)
    }

    /// The revision of a continue token is no longer available. `token` continues at the same place with later states.
    pub(crate) fn continue_expired(token: String) -> Self {
        let message = "The provided continue parameter is too old to display a consistent list result. You can start \
                       a new list without the continue parameter, or use the continue token in this response to \
                       retrieve the remainder of the results. Continuing with the provided token results in an \
                       inconsistent list - objects that were created, modified, or deleted between the time the first \
                       chunk was returned and now may show up in the list.";
        let mut error = Self::new(StatusCode::GONE, "Expired", message);
        error.metadata.continue_token = Some(token.into());
        error
    }

    /// An error that upstream's storage gives without a reason: a text, and the code 500.
    pub(crate) fn without_reason(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "", message)
    }

    /// A revision that has not been reached yet.
    pub(crate) fn future_version(asked: u64, current: u64) -> Self {
        let message = format!("Too large resource version: {asked}, current: {current}");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
            .because("ResourceVersionTooLarge", "Too large resource version", "")
            .retry_after(1)
    }

    pub(crate) fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message).retry_after(1)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message).retry_after(1)
    }

    /// A webhook's refusal (upstream's `ToStatusErr`).
    pub(crate) fn webhook_denied(webhook: &str, denied: &Denied) -> Self {
        let by = format!("admission webhook {webhook:?} denied the request");
        let message = match (denied.message.as_str(), denied.reason.as_str()) {
            ("", "") => format!("{by} without explanation"),
            ("", reason) => format!("{by}: {reason}"),
            (message, _) => format!("{by}: {message}"),
        };
        // The response has an error code, even if the webhook gave another one.
        let code = StatusCode::from_u16(denied.code).ok().filter(|code| code.as_u16() >= 400);
        let reason = REASONS.iter().find(|reason| **reason == denied.reason).copied().unwrap_or("");
        Self::new(code.unwrap_or(StatusCode::BAD_REQUEST), reason, message)
    }

    /// A policy's refusal (upstream's `validating/dispatcher.go`).
    pub(crate) fn policy_denied(kind: &Kind, name: &str, why: &str, reason: &str) -> Self {
        let (code, reason) = match reason {
            "Forbidden" => (StatusCode::FORBIDDEN, "Forbidden"),
            "Unauthorized" => (StatusCode::UNAUTHORIZED, "Unauthorized"),
            "RequestEntityTooLarge" => (StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge"),
            _ => (StatusCode::UNPROCESSABLE_ENTITY, "Invalid"),
        };
        let mut error = Self::forbidden(kind, name, why).because("", why, "");
        (error.code, error.reason) = (code.as_u16(), reason);
        error
    }

    /// A call of a webhook that failed, or whose answer is invalid.
    pub(crate) fn webhook_failed(webhook: &str, why: &str) -> Self {
        let cause = format!("failed calling webhook {webhook:?}: {why}");
        let message = format!("Internal error occurred: {cause}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message).because("", cause, "")
    }

    pub(crate) fn internal(cause: impl std::fmt::Display) -> Self {
        tracing::error!(%cause, "internal error while answering an API request");
        let message = format!("Internal error occurred: {cause}");
        let shown = cause.to_string();
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message).because("", shown, "")
    }

    /// As upstream, a server error (500), although the client is at fault.
    pub(crate) fn version_on_create() -> Self {
        let message = "resourceVersion should not be set on objects to be created";
        let mut error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "", message);
        error.details = None;
        error
    }

    pub(crate) fn disk_full(cause: impl std::fmt::Display) -> Self {
        tracing::error!(%cause, "the disk is full");
        let message = "the server's disk is full: nothing was written; free some space and try again";
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "InternalError", message)
    }

    pub(crate) fn has_reason(&self, reason: &str) -> bool {
        self.reason == reason
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers serialise")
    }
}

/// The group that errors name: upstream treats Events of both groups as those of the core group.
fn stored_group(kind: &Kind) -> &'static str {
    if kind.group == "events.k8s.io" { "" } else { kind.group }
}

/// `conflicts with "a":`, then a line for each field, then the next manager.
fn conflict_list(conflicts: &[(String, String)]) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut last = None;
    for (manager, field) in conflicts {
        if last.replace(manager) != Some(manager) {
            lines.push(format!("conflicts with {manager}:"));
        }
        lines.push(format!("- {field}"));
    }
    lines.join("\n")
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let (body, content_type) = match self.is_plain {
            true if code == StatusCode::NOT_FOUND => {
                (Bytes::from_static(b"404 page not found\n"), "text/plain; charset=utf-8")
            }
            true => (Bytes::from(self.message), "text/plain; charset=utf-8"),
            false => (Bytes::from(self.to_json()), "application/json"),
        };
        let mut response = Response::new(body.into());
        *response.status_mut() = code;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(seconds) = self.details.as_ref().map(|d| d.retry_after_seconds).filter(|s| *s > 0) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if code == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
