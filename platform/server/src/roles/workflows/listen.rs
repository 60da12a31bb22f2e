//! The workflows listener: the Step Functions API, `PutEvents` beside it, CloudEvents at `/events`, and the
//! asynchronous invocations of functions below `/invocations`.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::post,
};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use mayfly_workflows_api::{Api, router};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use mayfly_workflows_controller::{events, invocations::Invocations, triggers::EventRules};

/// The largest request with events, in bytes: AWS's limit of all entries together is 256 KiB; JSON's escapes need more.
const BODY_BYTES_MAX: usize = 1 << 20;
/// The prefix of the targets of EventBridge's operations.
const EVENTS_TARGET: &str = "AWSEvents.";

#[derive(Clone)]
struct ListenerState {
    workflows: Router,
    events: EventRules,
}

/// The Step Functions API, and events on the same listener.
pub(super) fn routes(api: Api, events: EventRules, invocations: Arc<Invocations>) -> Router {
    let state = ListenerState { workflows: router(api), events };
    let root = post(by_target).fallback(not_a_call);
    Router::new()
        .route("/", root)
        .route("/events", post(cloud_events))
        .with_state(state)
        .merge(super::invocations::routes(invocations))
}

/// The response to a browser.
async fn not_a_call() -> Response {
    let said = "This is the AWS Step Functions API: its operations are POSTs, which an AWS SDK or the aws CLI makes \
                (--endpoint-url with this address).\n";
    (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "POST")], said).into_response()
}

/// Routes by the target header: AWS services share one address.
async fn by_target(State(state): State<ListenerState>, request: Request<Body>) -> Response {
    let target =
        request.headers().get("x-amz-target").and_then(|target| target.to_str().ok()).unwrap_or_default();
    let Some(operation) = target.strip_prefix(EVENTS_TARGET).map(str::to_owned) else {
        return match state.workflows.oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
    };
    let Ok(body) = read(request.into_body()).await else {
        return aws_answer(400, &refusal("SerializationException", "the request is too large or broken off"));
    };
    if operation != "PutEvents" {
        let why = format!(
            "{operation} is not served here: which events start what is said in spec.triggers of a Workflow"
        );
        return aws_answer(400, &refusal("UnknownOperationException", why));
    }
    match serde_json::from_slice::<Value>(&body) {
        Ok(request) => match events::put(&state.events, &request).await {
            Ok(answer) => aws_answer(200, &answer),
            Err(why) => aws_answer(400, &refusal("ValidationException", why)),
        },
        Err(error) => aws_answer(400, &refusal("SerializationException", error.to_string())),
    }
}

/// CloudEvents 1.0 over HTTP: structured, a batch of them, or binary.
async fn cloud_events(State(state): State<ListenerState>, request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = read(body).await else {
        let why = format!("a request has {BODY_BYTES_MAX} bytes at most\n");
        return (StatusCode::PAYLOAD_TOO_LARGE, why).into_response();
    };
    // All events of a batch are parsed before the first starts anything: a refused batch has no effect.
    let events = match events::of_clouds(&parts.headers, &body) {
        Ok(events) => events,
        Err(why) => return (StatusCode::BAD_REQUEST, format!("{why}\n")).into_response(),
    };
    for (event, identity) in &events {
        if let Err(why) = state.events.publish(event, identity).await {
            return (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response();
        }
    }
    StatusCode::ACCEPTED.into_response()
}

async fn read(body: Body) -> Result<Bytes, ()> {
    Ok(Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(drop)?.to_bytes())
}

fn refusal(code: &str, why: impl Into<String>) -> Value {
    json!({"__type": code, "message": why.into()})
}

fn aws_answer(status: u16, body: &Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-amz-json-1.1"));
    if let Ok(id) = HeaderValue::from_str(&uuid::Uuid::new_v4().to_string()) {
        headers.insert("x-amzn-requestid", id);
    }
    response
}
