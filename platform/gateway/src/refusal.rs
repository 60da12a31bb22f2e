//! The responses to requests that get none from a function: the one place that maps causes to statuses.

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use mayfly_runtime::CallError;
use serde::Serialize;

use crate::{body::ResponseBody, target::RevisionTarget};

/// The reason why a request was refused, or why its function did not respond.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{message}")]
pub struct Refusal {
    pub code: RefusalCode,
    /// A description of the error for people.
    pub message: Cow<'static, str>,
    /// What the client or the operator can do.
    pub hint: Cow<'static, str>,
    /// The time after which a retry may help.
    pub retry_after: Option<Duration>,
}

/// The kinds of refusals; see [`RefusalCode::as_str`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RefusalCode {
    /// No route, or no such tag.
    NotFound,
    /// The request is not valid HTTP.
    BadRequest,
    /// The request's head has more headers, or more bytes, than the gateway accepts.
    HeadTooLarge,
    /// The request's body is larger than the gateway accepts.
    RequestTooLarge,
    /// The function, or the revision of its traffic, is not ready.
    NotReady,
    /// Too many requests already wait for this revision.
    QueueFull,
    /// The request was not admitted in time.
    QueueTimeout,
    /// The host has no free resources.
    Overloaded,
    /// The component is not in the artifact store.
    ComponentMissing,
    /// The component cannot be loaded or linked.
    ComponentInvalid,
    /// The guest trapped.
    Trapped,
    OutOfMemory,
    TimedOut,
    /// The guest returned without a response.
    NoAnswer,
    /// The guest set an error as its response.
    GuestError,
    ResponseTooLarge,
    ShuttingDown,
    /// A joined node has no replica for the request, and cannot reach the server.
    ServerUnreachable,
    Internal,
}

impl RefusalCode {
    pub const ALL: [Self; 19] = [
        Self::NotFound,
        Self::BadRequest,
        Self::HeadTooLarge,
        Self::RequestTooLarge,
        Self::NotReady,
        Self::QueueFull,
        Self::QueueTimeout,
        Self::Overloaded,
        Self::ComponentMissing,
        Self::ComponentInvalid,
        Self::Trapped,
        Self::OutOfMemory,
        Self::TimedOut,
        Self::NoAnswer,
        Self::GuestError,
        Self::ResponseTooLarge,
        Self::ShuttingDown,
        Self::ServerUnreachable,
        Self::Internal,
    ];

    pub fn status(self) -> StatusCode {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            // The client's fault: more requests than the function's own limits permit. The other limits are the host's
            // capacity.
            Self::QueueFull => StatusCode::TOO_MANY_REQUESTS,
            Self::NotReady
            | Self::QueueTimeout
            | Self::Overloaded
            | Self::ComponentMissing
            | Self::ComponentInvalid
            | Self::ShuttingDown
            | Self::ServerUnreachable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Trapped
            | Self::OutOfMemory
            | Self::NoAnswer
            | Self::GuestError
            | Self::ResponseTooLarge => StatusCode::BAD_GATEWAY,
            Self::TimedOut => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The code in `error.code` and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::BadRequest => "bad_request",
            Self::HeadTooLarge => "head_too_large",
            Self::RequestTooLarge => "request_too_large",
            Self::NotReady => "not_ready",
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::Overloaded => "overloaded",
            Self::ComponentMissing => "component_missing",
            Self::ComponentInvalid => "component_invalid",
            Self::Trapped => "trapped",
            Self::OutOfMemory => "out_of_memory",
            Self::TimedOut => "timed_out",
            Self::NoAnswer => "no_answer",
            Self::GuestError => "guest_error",
            Self::ResponseTooLarge => "response_too_large",
            Self::ShuttingDown => "shutting_down",
            Self::ServerUnreachable => "server_unreachable",
            Self::Internal => "internal",
        }
    }
}

/// The number of headers of an HTTP/1.1 request: hyper's default, and that of Apache's httpd. Any other value would
/// cost an allocation for each request, so it is kept; over HTTP/2 only the bytes count.
const HEADERS_MAX: usize = 100;
const HINT_ROUTES: &str = "see the routes with `kubectl get functions -A` or `mayfly get functions`";

impl Refusal {
    pub(crate) fn new(
        code: RefusalCode,
        message: impl Into<Cow<'static, str>>,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { code, message: message.into(), hint: hint.into(), retry_after: None }
    }

    pub(crate) fn retry(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    pub(crate) fn no_function(namespace: &str, name: &str) -> Self {
        let message = format!("there is no function {name:?} in namespace {namespace:?}");
        Self::new(RefusalCode::NotFound, message, HINT_ROUTES)
    }

    pub(crate) fn no_route() -> Self {
        let message = "no route leads to this address: functions answer at /fn/<namespace>/<name>/ and at \
                       <name>.<namespace>.fn.localhost";
        Self::new(RefusalCode::NotFound, message, HINT_ROUTES)
    }

    pub(crate) fn starting() -> Self {
        let message = "this server has just started and has not loaded its functions yet";
        Self::new(RefusalCode::NotReady, message, "try again in a moment").retry(Duration::from_secs(1))
    }

    pub(crate) fn no_tag(function: &str, tag: &str, tags: &[&str]) -> Self {
        let message = format!("function {function} has no traffic target with the tag {tag:?}");
        let hint = match tags {
            [] => "its traffic has no tags: set one with `tag:` under spec.traffic".into(),
            tags => format!("its tags are: {}", tags.join(", ")),
        };
        Self::new(RefusalCode::NotFound, message, hint)
    }

    pub(crate) fn no_revision(function: &str) -> Self {
        let message = format!("function {function} has no revision yet");
        let hint = "it may have been deployed just now; if this persists, see `kubectl describe function`";
        Self::new(RefusalCode::NotReady, message, hint).retry(Duration::from_secs(1))
    }

    pub(crate) fn revision_missing(function: &str, revision: &str) -> Self {
        let message =
            format!("the traffic of function {function} goes to revision {revision}, which does not exist");
        let hint = "see `kubectl get revisions` and set spec.traffic to one of them, or to `latest: true`";
        Self::new(RefusalCode::NotReady, message, hint)
    }

    pub(crate) fn revision_not_ready(revision: &str, why: &str) -> Self {
        let message = format!("revision {revision} is not ready: {why}");
        Self::new(
            RefusalCode::NotReady,
            message,
            "see `kubectl describe revision`; deploy again once it is fixed",
        )
    }

    /// The queue currently accepts no asynchronous invocation.
    pub fn invocation_refused(why: impl std::fmt::Display) -> Self {
        let message = format!("the invocation was not queued: {why}");
        Self::new(RefusalCode::Overloaded, message, "try again in a moment").retry(Duration::from_secs(1))
    }

    /// Too many asynchronous invocations wait: of the function, its namespace, or all.
    pub fn too_many_invocations(why: impl std::fmt::Display) -> Self {
        let message = format!("the invocation was not queued: {why}");
        let hint =
            "wait until some have ended (mayfly invocations list), or remove them (mayfly invocations purge)";
        Self::new(RefusalCode::QueueFull, message, hint).retry(Duration::from_secs(5))
    }

    pub(crate) fn unknown_invocation() -> Self {
        Self::new(
            RefusalCode::BadRequest,
            "unknown kind of invocation",
            "the header mayfly-invocation is `async` or `sync`",
        )
    }

    pub(crate) fn body_lost(why: &str) -> Self {
        let message = format!("the request's body could not be read: {why}");
        Self::new(RefusalCode::BadRequest, message, "send the request again")
    }

    /// RFC 9112, section 3.2.
    pub(crate) fn not_one_host(hosts: usize) -> Self {
        let message = format!("the request has {hosts} Host headers; HTTP/1.1 requires exactly one");
        Self::new(RefusalCode::BadRequest, message, "send one Host header")
    }

    pub(crate) fn tunnel() -> Self {
        let message = "CONNECT requests a tunnel; the gateway is no forward proxy";
        Self::new(RefusalCode::BadRequest, message, "send the request itself, without a proxy in between")
    }

    pub(crate) fn host_is_no_text() -> Self {
        let message =
            "the request's Host header is not a valid name: it contains bytes other than visible ASCII";
        Self::new(RefusalCode::BadRequest, message, "send the host's name as ASCII (punycode)")
    }

    pub(crate) fn no_request() -> Self {
        let message = "not a valid HTTP request: its first line or one of its headers cannot be parsed";
        Self::new(RefusalCode::BadRequest, message, "speak HTTP/1.1, or HTTP/2 without TLS (h2c)")
    }

    /// RFC 9112, section 6.1: a coding that is not supported must not be ignored.
    pub(crate) fn transfer_coding() -> Self {
        let message = "the request's body has a transfer coding besides chunked, which is not decoded here";
        Self::new(
            RefusalCode::BadRequest,
            message,
            "compress the body as content (content-encoding), or send it plainly",
        )
    }

    pub(crate) fn head_too_large(limit_bytes: usize) -> Self {
        // hyper reports the same error for all three.
        let message = format!(
            "the request's head has more than {HEADERS_MAX} headers or {limit_bytes} bytes, or a content-length that no \
             body can have"
        );
        let hint = "send fewer or shorter headers (cookies are headers, too), or a shorter address";
        Self::new(RefusalCode::HeadTooLarge, message, hint)
    }

    pub(crate) fn request_too_large(limit_bytes: u64) -> Self {
        let message = format!("the request's body is larger than {limit_bytes} bytes");
        Self::new(RefusalCode::RequestTooLarge, message, "send less, or raise the gateway's limit")
    }

    pub(crate) fn queue_full(target: &RevisionTarget) -> Self {
        let message = format!("{} requests wait for revision {} already", target.gate.waiting(), target.key);
        let hint = "try again later; raise limits.concurrency or scaling.max if this is the usual load";
        Self::new(RefusalCode::QueueFull, message, hint).retry(target.gate.retry_after())
    }

    pub(crate) fn queue_too_slow(target: &RevisionTarget) -> Self {
        let timeout = mayfly_api::duration::Span(target.timeout);
        let message =
            format!("no turn came for this request within the {timeout} of revision {}", target.key);
        let hint = "it did not run; try again later, or raise limits.concurrency or scaling.max";
        Self::new(RefusalCode::QueueTimeout, message, hint).retry(target.gate.retry_after())
    }

    /// For other gateways only: see `NodeRefusal`.
    pub(crate) fn not_hosted() -> Self {
        Self::new(RefusalCode::NotReady, "this node does not run the revision", "send it to another node")
    }

    pub(crate) fn leader_unreachable(target: &RevisionTarget) -> Self {
        let message = format!(
            "this node has no replica of revision {} with room, and cannot reach the server for another one",
            target.key
        );
        let hint = "try again later; see the node's log and `kubectl get nodes`";
        Self::new(RefusalCode::ServerUnreachable, message, hint).retry(Duration::from_secs(1))
    }

    pub(crate) fn shutting_down() -> Self {
        CallError::ShuttingDown.into()
    }
}

impl From<CallError> for Refusal {
    fn from(error: CallError) -> Self {
        let message = error.to_string();
        let (code, hint, retry_after) = match error {
            CallError::Overloaded { retry_after } => {
                let hint =
                    "try again later, or start the server with more room (mayfly up --function-memory)";
                (RefusalCode::Overloaded, hint, Some(retry_after))
            }
            CallError::NoSlot { retry_after, .. } => {
                let hint = "try again later; instances are held for as long as calls last: lower the function's \
                            limits.concurrency or limits.timeout, or start the server with more \
                            (mayfly up --instances, --function-instances)";
                (RefusalCode::Overloaded, hint, Some(retry_after))
            }
            CallError::ComponentMissing(_) => {
                (RefusalCode::ComponentMissing, "`mayfly deploy` uploads it", None)
            }
            CallError::ComponentUnavailable { retry_after, .. } => {
                let hint = "try again later: the node fetches components from the cluster's server";
                (RefusalCode::NotReady, hint, Some(retry_after))
            }
            CallError::ComponentInvalid(_) => {
                (RefusalCode::ComponentInvalid, "build it for wasi:http and deploy it again", None)
            }
            CallError::Trapped(_) => (RefusalCode::Trapped, "`mayfly logs` shows what it wrote before", None),
            CallError::OutOfMemory { .. } => {
                (RefusalCode::OutOfMemory, "raise limits.memory if it needs more", None)
            }
            CallError::TimedOut { .. } => {
                (RefusalCode::TimedOut, "raise limits.timeout if it needs longer", None)
            }
            CallError::NoAnswer => {
                (RefusalCode::NoAnswer, "its handler must set a response on every path", None)
            }
            CallError::GuestError(_) => {
                (RefusalCode::GuestError, "`mayfly logs` shows what it wrote before", None)
            }
            CallError::ResponseTooLarge { .. } => {
                (RefusalCode::ResponseTooLarge, "raise limits.response if answers are that large", None)
            }
            CallError::ShuttingDown => (
                RefusalCode::ShuttingDown,
                "try again: this server is being stopped",
                Some(Duration::from_secs(1)),
            ),
            CallError::Internal(_) => {
                (RefusalCode::Internal, "the server's log has more about this request", None)
            }
        };
        Self { code, message: message.into(), hint: hint.into(), retry_after }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    error: Fields<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Fields<'a> {
    code: &'a str,
    message: &'a str,
    hint: &'a str,
    request_id: &'a str,
}

impl Refusal {
    /// The response's body.
    pub(crate) fn document(&self, request_id: &str) -> Vec<u8> {
        let Self { code, message, hint, .. } = self;
        let error = Fields { code: code.as_str(), message, hint, request_id };
        let mut text = serde_json::to_vec(&Document { error }).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// The response, as JSON. `request_id` is also the value of the response's header.
    pub fn into_response(self, request_id: &str) -> Response<ResponseBody> {
        let text = self.document(request_id);
        let Self { code, retry_after, .. } = &self;
        let mut response = Response::new(ResponseBody::full(Bytes::from(text)));
        *response.status_mut() = code.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use mayfly_api::Digest;

    use super::*;

    /// Checks the status of every cause; clients parse the body.
    #[tokio::test]
    async fn every_call_error_has_its_status() {
        let retry_after = Duration::from_millis(1500);
        for (error, status, code) in [
            (CallError::Overloaded { retry_after }, 503, "overloaded"),
            (CallError::NoSlot { held: 7, max: 8, retry_after }, 503, "overloaded"),
            (CallError::ComponentMissing(Digest::of(b"x")), 503, "component_missing"),
            (CallError::ComponentUnavailable { why: "away".into(), retry_after }, 503, "not_ready"),
            (CallError::ComponentInvalid("wasi:foo".into()), 503, "component_invalid"),
            (CallError::Trapped("unreachable".into()), 502, "trapped"),
            (CallError::OutOfMemory { limit_bytes: 5 }, 502, "out_of_memory"),
            (CallError::TimedOut { limit: Duration::from_secs(3) }, 504, "timed_out"),
            (CallError::NoAnswer, 502, "no_answer"),
            (CallError::GuestError("dns".into()), 502, "guest_error"),
            (CallError::ResponseTooLarge { limit_bytes: 5 }, 502, "response_too_large"),
            (CallError::ShuttingDown, 503, "shutting_down"),
            (CallError::Internal("disk".into()), 500, "internal"),
        ] {
            let message = error.to_string();
            let response = Refusal::from(error).into_response("id-1");
            assert_eq!(response.status(), status, "{code}");
            if code == "overloaded" {
                assert_eq!(response.headers()[header::RETRY_AFTER], "2");
            }
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error"]["code"], code);
            assert_eq!(body["error"]["message"], message);
            assert_eq!(body["error"]["requestId"], "id-1");
            assert!(!body["error"]["hint"].as_str().unwrap().is_empty());
        }
    }

    #[test]
    fn codes_are_distinct() {
        let texts: std::collections::BTreeSet<_> =
            RefusalCode::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(texts.len(), RefusalCode::ALL.len());
    }

    /// Clients rely on the codes, so each is documented with its status, cause and remedy.
    #[test]
    fn every_code_is_documented_with_its_status() {
        let page = include_str!("../../../docs/errors.md");
        for code in RefusalCode::ALL {
            let row = format!("| `{}` | {} |", code.as_str(), code.status().as_u16());
            assert!(page.contains(&row), "docs/errors.md has no row {row}");
        }
    }
}
