//! The audit log: which user requested what, and the outcome (`audit.k8s.io/v1` Event, one JSON object a line).
//!
//! Off unless a policy is configured. The [`policy`] decides for each request how much is recorded;
//! [`log`] writes the lines. A request waits for space in the queue of lines, never for the disk itself.

mod log;
mod policy;

use std::{
    net::IpAddr,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{Uri, header, request::Parts};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use jiff::Timestamp;
use mayfly_accept::{ClientConnection, PeerCertificate};
use serde_json::{Value, json};

pub use self::policy::AuditPolicyError;
use self::{
    log::AuditLog,
    policy::{AuditDecision, AuditLevel, AuditPolicy, AuditStage},
};
use crate::{
    access::User,
    config::Clock,
    decode::decode,
    negotiate,
    rbac::{AccessDecision, Attributes},
    request::RequestTarget,
};

/// The audit log of a server: its policy and its file.
#[derive(Debug)]
pub struct Audit {
    policy: AuditPolicy,
    log: AuditLog,
}

/// An error of [`Audit::create`].
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error(transparent)]
    Policy(#[from] AuditPolicyError),
    #[error("the audit log cannot be opened: {0}")]
    Log(#[from] std::io::Error),
}

impl Audit {
    /// Reads a policy (YAML or JSON) and opens the log for appending.
    ///
    /// # Errors
    /// The policy is not accepted, or the file cannot be opened.
    pub fn create(policy: &str, log: &Path) -> Result<Self, AuditError> {
        Ok(Self { policy: AuditPolicy::parse(policy)?, log: AuditLog::open(log)? })
    }

    /// The record of a request; `None` if the policy does not record it. `user`: `None` if the authentication failed;
    /// such a request is recorded once, at the start of its response (as upstream).
    pub(crate) fn record(
        &self,
        user: Option<&User>,
        asked: &Attributes<'_>,
        parts: &Parts,
        target: Option<&RequestTarget>,
        clock: &Clock,
    ) -> Option<AuditRecord> {
        let decision = self.policy.decide(user, asked);
        if decision.level == AuditLevel::None {
            return None;
        }
        let now = clock();
        let mut event = json!({
            "kind": "Event",
            "apiVersion": "audit.k8s.io/v1",
            "level": decision.level.as_str(),
            "auditID": uuid::Uuid::new_v4().to_string(),
            "requestURI": uri_text(&parts.uri),
            "verb": asked.verb,
            "user": user.map_or_else(|| json!({}), user_info),
            "requestReceivedTimestamp": micro_time(now),
        });
        if let Some(agent) = parts.headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()) {
            event["userAgent"] = agent.into();
        }
        let source_ips = source_ips(parts);
        if !source_ips.is_empty() {
            event["sourceIPs"] = source_ips.into();
        }
        if user.is_none() {
            event["responseStatus"] = json!({"metadata": {}, "message": failed_authentication(parts)});
        }
        if let Some(target) = target {
            event["objectRef"] = object_ref(target);
        }
        let authenticated = user.is_some();
        Some(AuditRecord { log: self.log.clone(), clock: clock.clone(), decision, authenticated, event })
    }
}

/// The audit event of one request.
pub(crate) struct AuditRecord {
    log: AuditLog,
    clock: Clock,
    decision: AuditDecision,
    authenticated: bool,
    event: Value,
}

impl AuditRecord {
    /// Records the stage RequestReceived of an authenticated request.
    pub(crate) async fn received(&self) {
        if self.authenticated
            && let Some(line) = self.line(AuditStage::RequestReceived)
        {
            self.log.write(line).await;
        }
    }

    /// Records the user that the request impersonates.
    pub(crate) fn impersonates(&mut self, user: &User) {
        self.event["impersonatedUser"] = user_info(user);
    }

    /// Records the authorizer's decision.
    pub(crate) fn decided(&mut self, decision: &AccessDecision) {
        let (word, reason) = match decision {
            AccessDecision::Allowed { reason } => ("allow", reason.as_str()),
            AccessDecision::Refused { .. } => ("forbid", ""),
        };
        self.event["annotations"] =
            json!({"authorization.k8s.io/decision": word, "authorization.k8s.io/reason": reason});
    }

    /// Records the object of a request's body, if the policy asks for it, and returns the body. `bytes_max`: the
    /// maximum length of a recorded body; a longer body, or one of unknown length, is returned unread.
    pub(crate) async fn request_body(&mut self, parts: &Parts, body: Body, bytes_max: usize) -> Body {
        let length = body.size_hint().exact().filter(|length| *length > 0 && *length <= bytes_max as u64);
        if self.decision.level < AuditLevel::Request || length.is_none() {
            return body;
        }
        let Ok(bytes) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
            // The handler must not take a truncated body for a complete one.
            let error = std::io::Error::other("the request body ended early");
            return Body::from_stream(futures::stream::iter([Err::<Bytes, _>(error)]));
        };
        let form = negotiate::body_form(&parts.headers);
        let decoded = form.and_then(|form| decode(form, &bytes)).map(|decoded| decoded.value);
        if let Ok(value) = decoded.or_else(|_| serde_json::from_slice(&bytes)) {
            self.event["requestObject"] = self.without_managed_fields(value);
        }
        Body::from(bytes)
    }

    /// Records the outcome, and returns the response. That of a stream is recorded at its end.
    pub(crate) async fn responded(mut self, response: Response) -> Response {
        if !self.authenticated {
            self.event["responseStatus"]["code"] = response.status().as_u16().into();
            if let Some(line) = self.line(AuditStage::ResponseStarted) {
                self.log.write(line).await;
            }
            return response;
        }
        let (parts, body) = response.into_parts();
        let code = parts.status.as_u16();
        self.event["responseStatus"] = json!({"metadata": {}, "code": code});
        if body.size_hint().exact().is_none() {
            if let Some(line) = self.line(AuditStage::ResponseStarted) {
                self.log.write(line).await;
            }
            let body = AuditedBody { body, record: Some(self) };
            return Response::from_parts(parts, Body::new(body));
        }
        let is_json = parts.headers.get(header::CONTENT_TYPE).is_some_and(|form| form == "application/json");
        let is_read =
            is_json && (self.decision.level >= AuditLevel::RequestResponse || !parts.status.is_success());
        let body = if is_read {
            // A body in memory cannot fail.
            let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
            self.response_object(&bytes, parts.status.is_success());
            Body::from(bytes)
        } else {
            body
        };
        if let Some(line) = self.line(AuditStage::ResponseComplete) {
            self.log.write(line).await;
        }
        Response::from_parts(parts, body)
    }

    fn response_object(&mut self, bytes: &[u8], success: bool) {
        let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
        if !success && value["kind"] == "Status" {
            for field in ["status", "message", "reason", "details"] {
                if !value[field].is_null() {
                    self.event["responseStatus"][field] = value[field].clone();
                }
            }
        }
        if self.decision.level >= AuditLevel::RequestResponse {
            self.event["responseObject"] = self.without_managed_fields(value);
        }
    }

    fn without_managed_fields(&self, mut value: Value) -> Value {
        if self.decision.omit_managed_fields {
            let remove = |object: &mut Value| {
                if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
                    metadata.remove("managedFields");
                }
            };
            remove(&mut value);
            if let Some(items) = value.get_mut("items").and_then(Value::as_array_mut) {
                items.iter_mut().for_each(remove);
            }
        }
        value
    }

    /// The event at a stage, unless the policy omits the stage.
    fn line(&self, stage: AuditStage) -> Option<String> {
        if self.decision.omit_stages.contains(&stage) {
            return None;
        }
        let mut event = self.event.clone();
        event["stage"] = stage.as_str().into();
        event["stageTimestamp"] = micro_time((self.clock)()).into();
        Some(format!("{event}\n"))
    }
}

/// A streamed response that is recorded when it ends or its client disconnects.
struct AuditedBody {
    body: Body,
    record: Option<AuditRecord>,
}

impl http_body::Body for AuditedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AuditedBody {
    fn drop(&mut self) {
        let Some(record) = self.record.take() else { return };
        if let Some(line) = record.line(AuditStage::ResponseComplete) {
            record.log.try_write(line);
        }
    }
}

fn uri_text(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| uri.path().to_owned(), |path| path.as_str().to_owned())
}

/// The addresses that a request has passed through, the client's first: those that proxies have added to the headers,
/// then that of the connection. The headers are the client's own words; only the last address is certain.
fn source_ips(parts: &Parts) -> Vec<String> {
    let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let parsed = |text: &str| text.trim().parse::<IpAddr>().ok();
    let mut addresses: Vec<IpAddr> = text("x-forwarded-for").split(',').filter_map(parsed).collect();
    if let Some(address) = parsed(text("x-real-ip")).filter(|address| !addresses.contains(address)) {
        addresses.push(address);
    }
    let peer =
        parts.extensions.get::<ClientConnection>().map(|connection| connection.address().to_canonical());
    addresses.extend(peer.filter(|peer| addresses.last() != Some(peer)));
    addresses.iter().map(IpAddr::to_string).collect()
}

/// Upstream's description of a failed authentication.
fn failed_authentication(parts: &Parts) -> String {
    let authorization = parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let scheme = authorization.and_then(|text| text.split_once(' ')).map(|(scheme, _)| scheme);
    let is = |name: &str| scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(name));
    let has_certificate = parts.extensions.get::<PeerCertificate>().is_some();
    let methods = [("basic", is("basic")), ("bearer", is("bearer")), ("x509", has_certificate)];
    let attempted: Vec<_> = methods.into_iter().filter_map(|(name, used)| used.then_some(name)).collect();
    if attempted.is_empty() {
        return "Authentication failed, no credentials provided".into();
    }
    format!("Authentication failed, attempted: {}", attempted.join(", "))
}

fn user_info(user: &User) -> Value {
    let mut info = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        info["uid"] = user.uid.as_str().into();
    }
    if !user.extra.is_empty() {
        info["extra"] = json!(user.extra);
    }
    info
}

fn object_ref(target: &RequestTarget) -> Value {
    let mut reference = json!({"resource": target.kind.plural, "apiVersion": target.kind.version});
    let optional = [
        ("namespace", target.namespace.as_str()),
        ("name", target.name.as_deref().unwrap_or_default()),
        ("apiGroup", target.kind.group),
        ("subresource", target.subresource.as_deref().unwrap_or_default()),
    ];
    for (field, value) in optional.into_iter().filter(|(_, value)| !value.is_empty()) {
        reference[field] = value.into();
    }
    reference
}

/// A time as MicroTime: microseconds.
fn micro_time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}
