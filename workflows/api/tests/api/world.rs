//! An engine in memory, with the API on it.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use mayfly_workflows_api::router;
use mayfly_workflows_engine::timers::SystemClock;
use serde_json::Value;
use tower::ServiceExt;

use crate::stand_ins;

pub(crate) struct StepFunctionsRouter {
    router: Router,
}

impl StepFunctionsRouter {
    pub(crate) async fn new() -> StepFunctionsRouter {
        let (_, _, api) = stand_ins::engine(None, Arc::new(SystemClock)).await;
        StepFunctionsRouter { router: router(api) }
    }

    /// What an operation answers; it has to succeed.
    pub(crate) async fn call(&self, operation: &str, params: Value) -> Value {
        let target = format!("AWSStepFunctions.{operation}");
        let (status, _, answer) = self.post(Some(&target), &params.to_string()).await;
        assert_eq!(status, 200, "{operation} {params}: {answer}");
        answer
    }

    /// Code and message of an operation that is refused.
    pub(crate) async fn refused(&self, operation: &str, params: Value) -> String {
        let target = format!("AWSStepFunctions.{operation}");
        let (status, _, answer) = self.post(Some(&target), &params.to_string()).await;
        assert_eq!(status, 400, "{operation} {params}: {answer}");
        let code = answer["__type"].as_str().and_then(|kind| kind.split('#').nth(1)).unwrap_or_default();
        format!("{code}: {}", answer["message"].as_str().unwrap_or_default())
    }

    /// A call with a signature that names an account and a region.
    pub(crate) async fn signed(&self, operation: &str, params: &Value, account: &str, region: &str) -> Value {
        let credential = format!(
            "AWS4-HMAC-SHA256 Credential={account}/20260101/{region}/states/aws4_request, SignedHeaders=host, \
             Signature=0"
        );
        let request = Request::post("/")
            .header("host", "sync-localhost")
            .header("authorization", credential)
            .header("x-amz-target", format!("AWSStepFunctions.{operation}"))
            .body(Body::from(params.to_string()));
        let (status, _, answer) = self.send(request.expect("a request")).await;
        assert_eq!(status, 200, "{operation}: {answer}");
        answer
    }

    /// An operation that waits for the end; the status of the answer, and the answer.
    pub(crate) async fn wait(&self, operation: &str, params: Value, seconds: &str) -> (u16, Value) {
        let request = Request::post("/")
            .header("x-amz-target", format!("AWSStepFunctions.{operation}"))
            .header("x-mayfly-wait", seconds)
            .body(Body::from(params.to_string()));
        let (status, _, answer) = self.send(request.expect("a request")).await;
        (status, answer)
    }

    /// A request as it goes over the wire.
    pub(crate) async fn post(&self, target: Option<&str>, body: &str) -> (u16, HeaderMap, Value) {
        let mut request = Request::post("/").header("content-type", "application/x-amz-json-1.0");
        if let Some(target) = target {
            request = request.header("x-amz-target", target);
        }
        self.send(request.body(Body::from(body.to_owned())).expect("a request")).await
    }

    async fn send(&self, request: Request<Body>) -> (u16, HeaderMap, Value) {
        let response = self.router.clone().oneshot(request).await.expect("the router answers");
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        (head.status.as_u16(), head.headers, serde_json::from_slice(&body).expect("JSON"))
    }
}
