//! The protocol: awsJson1_0 over HTTP, on any host name (so `sync-` prefixes work), any signature accepted.
//!
//! One header is Mayfly's own: `x-mayfly-wait: 30` makes DescribeExecution wait for the execution's end, for as
//! many seconds at most, so that clients need not poll. StartExecution of a standard machine takes it too,
//! and then answers what DescribeExecution would.

use std::time::Duration;

use ::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use http_body_util::{BodyExt, Limited};
use serde_json::Value;

use super::error::StepFunctionsError;
use super::{Answer, Api};
use mayfly_workflows_engine::service::CredentialScope;

/// The maximum size of a body: a definition of 1 MiB with every character escaped fits.
const BODY_BYTES_MAX: usize = 8 << 20;
/// The prefix of `X-Amz-Target`.
const TARGET_PREFIX: &str = "AWSStepFunctions.";
/// Our own header, and the longest wait it may ask for: load balancers cut idle connections after a minute.
const WAIT: &str = "x-mayfly-wait";
const WAIT_MAX: Duration = Duration::from_secs(60);
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/x-amz-json-1.0");

/// Serves the API at `/`.
pub fn router(api: Api) -> Router {
    Router::new().route("/", post(serve)).with_state(api)
}

async fn serve(State(api): State<Api>, request: Request<Body>) -> Response<Body> {
    let request_id = api.service.random_uuid();
    let (head, body) = request.into_parts();
    let answer = match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(body) => answer(&api, &head.headers, &body.to_bytes()).await,
        Err(_) => {
            Err(StepFunctionsError::serialization(Some("The request body is too large or broken off".into())))
        }
    };
    respond(&answer, &request_id)
}

async fn answer(api: &Api, headers: &HeaderMap, body: &[u8]) -> Answer {
    let target = headers.get("x-amz-target").and_then(|target| target.to_str().ok()).unwrap_or_default();
    let operation = target.strip_prefix(TARGET_PREFIX).ok_or_else(StepFunctionsError::unknown_operation)?;
    let params = match body {
        b"" => Value::Object(Default::default()),
        body => serde_json::from_slice(body).map_err(|_| StepFunctionsError::serialization(None))?,
    };
    if !params.is_object() {
        return Err(StepFunctionsError::serialization(Some("Unexpected value type in payload".into())));
    }
    match wait(headers)? {
        Some(limit) if operation == "DescribeExecution" => api.describe_ended(&params, limit).await,
        Some(limit) if operation == "StartExecution" => Box::pin(api.start_and_wait(&params, limit)).await,
        _ => Box::pin(api.call(operation, &params, &scope(headers))).await,
    }
}

/// The longest wait for the requested event before the answer.
fn wait(headers: &HeaderMap) -> Result<Option<Duration>, StepFunctionsError> {
    let Some(value) = headers.get(WAIT) else { return Ok(None) };
    let seconds = value.to_str().ok().and_then(|text| text.parse().ok());
    match seconds.map(Duration::from_secs) {
        Some(limit) if limit <= WAIT_MAX => Ok(Some(limit)),
        _ => Err(StepFunctionsError::validation(format!(
            "the header {WAIT} takes a number of seconds up to {}",
            WAIT_MAX.as_secs()
        ))),
    }
}

/// Region and account from `Authorization: … Credential=<key>/<date>/<region>/states/aws4_request`. An
/// access key that is an account number names the account.
fn scope(headers: &HeaderMap) -> CredentialScope {
    let mut scope = CredentialScope::default();
    let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some((_, credential)) = authorization.and_then(|value| value.split_once("Credential=")) else {
        return scope;
    };
    let mut fields = credential.split([',', ' ']).next().unwrap_or_default().split('/');
    let (key, region) = (fields.next().unwrap_or_default(), fields.nth(1).unwrap_or_default());
    if key.len() == 12 && key.bytes().all(|byte| byte.is_ascii_digit()) {
        scope.account = key.to_owned();
    }
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !region.is_empty() && region.bytes().all(plain) {
        scope.region = region.to_owned();
    }
    scope
}

fn respond(answer: &Answer, request_id: &str) -> Response<Body> {
    let (status, body) = match answer {
        Ok(body) => (200, body.to_string()),
        Err(error) => (error.status, error.body().to_string()),
    };
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, CONTENT_TYPE);
    if let Ok(id) = HeaderValue::from_str(request_id) {
        headers.insert("x-amzn-requestid", id);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scope_comes_from_the_signature() {
        let mut headers = HeaderMap::new();
        assert_eq!(scope(&headers), CredentialScope::default());
        let value = "AWS4-HMAC-SHA256 Credential=123456789012/20261121/eu-west-1/states/aws4_request, \
                     SignedHeaders=host, Signature=0";
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static(value));
        assert_eq!(
            scope(&headers),
            CredentialScope { region: "eu-west-1".into(), account: "123456789012".into() }
        );
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer x"));
        assert_eq!(scope(&headers), CredentialScope::default());
    }
}
