//! The stored form of an asynchronous invocation: an execution's input; pure.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use jiff::{SignedDuration, Timestamp};
use mayfly_api::{ObjectKey, invocation::AsyncInvocation};
use mayfly_workflows_language::value::Value;
use serde::{Deserialize, Serialize};

/// Headers whose values are credentials: they are not shown.
const SECRET_HEADERS: [&str; 8] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "x-api-key",
    "x-auth-token",
    "x-amz-security-token",
    "x-csrf-token",
    "x-goog-iap-jwt-assertion",
];
/// The text in their place.
const REDACTED: &str = "(redacted)";

/// An asynchronous invocation as the journal has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StoredInvocation {
    pub(super) namespace: String,
    pub(super) function: String,
    /// The event is given up after this.
    pub(super) deadline: Timestamp,
    /// Whether the body is JSON text.
    pub(super) is_json: bool,
    pub(super) request: StoredRequest,
    /// Absent in invocations of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry: Option<StoredRetry>,
}

/// The rules of retries at the time of the request; those of the state machine of the execution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StoredRetry {
    attempts_max: u32,
    /// Before the first retry. Each further delay is twice as long.
    delay_seconds: u64,
}

impl StoredRetry {
    pub(super) fn of(rules: &AsyncInvocation) -> Self {
        Self {
            attempts_max: rules.maximum_retry_attempts,
            delay_seconds: rules.retry_delay.0.as_secs().max(1),
        }
    }

    /// The delay before the next retry, in seconds; `None` if all are used up.
    fn next_delay(self, retries: u32) -> Option<u64> {
        let doubled = 1_u64.checked_shl(retries).unwrap_or(u64::MAX).saturating_mul(self.delay_seconds);
        (retries < self.attempts_max).then(|| doubled.min(AsyncInvocation::RETRY_DELAY_MAX.0.as_secs()))
    }
}

/// A request whose body is kept byte for byte: signatures of webhooks stay valid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StoredRequest {
    method: String,
    /// With the query.
    path: String,
    /// Names and values. A value that is not visible ASCII is left out, since JSON cannot hold it.
    headers: Vec<(String, String)>,
    /// Text, or Base64 if `is_base64`.
    body: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_base64: bool,
}

impl StoredRequest {
    pub(super) fn of(request: &Request<Bytes>) -> Self {
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let text = |(name, value): (&HeaderName, &HeaderValue)| {
            Some((name.to_string(), value.to_str().ok()?.to_owned()))
        };
        let (body, is_base64) = match std::str::from_utf8(request.body()) {
            Ok(text) => (text.to_owned(), false),
            Err(_) => (BASE64.encode(request.body()), true),
        };
        Self {
            method: request.method().to_string(),
            path: path.to_owned(),
            headers: request.headers().iter().filter_map(text).collect(),
            body,
            is_base64,
        }
    }

    /// The request as it is shown: without the values of headers that are credentials.
    pub(super) fn shown(&self) -> Self {
        let redacted = |(name, value): &(String, String)| {
            let is_secret = SECRET_HEADERS.contains(&name.to_ascii_lowercase().as_str());
            (name.clone(), if is_secret { REDACTED.to_owned() } else { value.clone() })
        };
        Self { headers: self.headers.iter().map(redacted).collect(), ..self.clone() }
    }

    /// # Errors
    /// The reason, for a stored form that another program wrote.
    pub(super) fn request(&self) -> Result<Request<Bytes>, String> {
        let body = match self.is_base64 {
            true => BASE64.decode(&self.body).map_err(|error| error.to_string())?.into(),
            false => Bytes::from(self.body.clone()),
        };
        let method = self.method.parse::<Method>().map_err(|error| error.to_string())?;
        let uri = self.path.parse::<Uri>().map_err(|error| error.to_string())?;
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body(body).map_err(|error| error.to_string())
    }
}

impl StoredInvocation {
    pub(super) fn new(
        function: &ObjectKey,
        request: &Request<Bytes>,
        deadline: Timestamp,
        retry: StoredRetry,
    ) -> Self {
        // By the parser of the state that delivers it to the destination of failures, which has limits of its own.
        let is_json = str::from_utf8(request.body()).is_ok_and(|text| Value::parse(text).is_ok());
        Self {
            namespace: function.namespace.clone(),
            function: function.name.clone(),
            deadline,
            is_json,
            request: StoredRequest::of(request),
            retry: Some(retry),
        }
    }

    /// Whether an attempt that failed now, after this many retries, was the last one because the next retry would begin
    /// after the deadline.
    pub(super) fn is_given_up(&self, retries: u32, now: Timestamp) -> bool {
        let delay = self.retry.and_then(|retry| retry.next_delay(retries));
        let delay = delay.and_then(|seconds| i64::try_from(seconds).ok()).map(SignedDuration::from_secs);
        delay.is_some_and(|delay| now.checked_add(delay).is_ok_and(|next| next >= self.deadline))
    }

    pub(super) fn key(&self) -> ObjectKey {
        ObjectKey::new(self.namespace.as_str(), self.function.as_str())
    }
}

#[cfg(test)]
mod tests {
    use mayfly_api::duration::Span;

    use super::*;

    #[test]
    fn credentials_are_not_shown() {
        let request = Request::post("/")
            .header("Authorization", "Bearer s3cret")
            .header("cookie", "session=s3cret")
            .header("X-Api-Key", "s3cret")
            .header("accept", "text/plain")
            .body(Bytes::from_static(b"{}"))
            .unwrap();
        let stored = StoredRequest::of(&request);
        let shown = serde_json::to_string(&stored.shown()).unwrap();
        assert!(!shown.contains("s3cret") && shown.matches(REDACTED).count() == 3, "{shown}");
        assert!(shown.contains("text/plain"), "{shown}");
        assert_eq!(stored.request().unwrap().headers()["authorization"], "Bearer s3cret");
    }

    #[test]
    fn an_event_is_given_up_when_its_next_retry_would_be_too_late() {
        let rules = AsyncInvocation {
            maximum_retry_attempts: 20,
            retry_delay: Span::from_secs(2),
            ..AsyncInvocation::default()
        };
        let request = Request::post("/").body(Bytes::new()).unwrap();
        let deadline: Timestamp = "2026-11-23T10:00:00Z".parse().unwrap();
        let function = ObjectKey::new("shop", "charge");
        let stored = StoredInvocation::new(&function, &request, deadline, StoredRetry::of(&rules));
        for (retries, seconds_left, expected) in [
            (0, 3, false),
            (0, 2, true),
            (1, 5, false),
            (1, 4, true),
            // The longest delay.
            (19, 301, false),
            (19, 300, true),
            // All retries are used up: the attempt's own error is the result.
            (20, 1, false),
            (u32::MAX, 1, false),
        ] {
            let now = deadline - SignedDuration::from_secs(seconds_left);
            assert_eq!(stored.is_given_up(retries, now), expected, "{retries} {seconds_left}");
        }
        let earlier = StoredInvocation { retry: None, ..stored };
        assert!(!earlier.is_given_up(0, deadline));
    }

    #[test]
    fn json_is_what_the_delivery_can_parse() {
        let nested = |depth: usize| [vec![b'['; depth], vec![b']'; depth]].concat();
        let number = |digits: usize| vec![b'1'; digits];
        for (body, expected) in [
            (br#"{"a": "\ud800"}"#.to_vec(), true),
            (br#"{"a": 1e999}"#.to_vec(), false),
            (nested(1_000), true),
            (nested(1_001), false),
            (number(1_000), true),
            (number(1_001), false),
            (b"\"\xff\"".to_vec(), false),
            (Vec::new(), false),
        ] {
            let request = Request::post("/").body(Bytes::from(body.clone())).unwrap();
            let retry = StoredRetry::of(&AsyncInvocation::default());
            let stored =
                StoredInvocation::new(&ObjectKey::new("shop", "charge"), &request, Timestamp::MAX, retry);
            let parsed = Value::parse(&stored.request.body).is_ok();
            assert_eq!((stored.is_json, parsed), (expected, expected), "{} bytes", body.len());
        }
    }

    #[test]
    fn a_request_is_the_same_after_it_was_stored() {
        for body in [&b"{\"a\": 1.0e2 }"[..], b"", b"\xff\x00", "gr\u{fc}n".as_bytes()] {
            let request = Request::put("/a%20b?c=d")
                .header("x-one", "1")
                .header("x-two", "2")
                .header("x-one", "3")
                .body(Bytes::copy_from_slice(body))
                .unwrap();
            let function = ObjectKey::new("shop", "charge");
            let deadline = "2026-11-23T10:00:00Z".parse().unwrap();
            let retry = StoredRetry::of(&AsyncInvocation::default());
            let stored = StoredInvocation::new(&function, &request, deadline, retry);
            let text = serde_json::to_string(&stored).unwrap();
            let read: StoredInvocation = serde_json::from_str(&text).unwrap();
            assert_eq!(read, stored);
            assert_eq!(read.is_json, body.starts_with(b"{"));
            let again = read.request.request().unwrap();
            assert_eq!(
                (again.method(), again.uri(), again.body()),
                (request.method(), request.uri(), request.body())
            );
            assert_eq!(again.headers(), request.headers());
        }
    }
}
