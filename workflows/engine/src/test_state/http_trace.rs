//! An HTTP task's request and response, as TRACE shows them.

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use mayfly_workflows_language::value::Value;
use parking_lot::Mutex;
use serde_json::json;

use super::failing::MockedError;
use super::inspection::Inspection;
use crate::engine::HttpTasks;
use crate::executor;

/// Sends the request that the arguments describe; what went over the wire is kept where it is asked for.
pub(super) async fn invoke(
    http: &dyn HttpTasks,
    arguments: &Value,
    inspection: Option<&mut Inspection>,
) -> Result<Value, MockedError> {
    let recorder = Recorder { http, request: Mutex::new(None), response: Mutex::new(None) };
    let outcome = executor::http::invoke(&recorder, arguments).await;
    if let Some(inspection) = inspection {
        if let Some(request) = recorder.request.into_inner() {
            inspection.fact("request", request);
        }
        if let Some(response) = recorder.response.into_inner() {
            inspection.fact("response", response);
        }
    }
    outcome.map_err(|error| MockedError { error: Some(error.error_type), cause: Some(error.cause) })
}

struct Recorder<'a> {
    http: &'a dyn HttpTasks,
    request: Mutex<Option<serde_json::Value>>,
    response: Mutex<Option<serde_json::Value>>,
}

impl HttpTasks for Recorder<'_> {
    fn send(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>> {
        Box::pin(async move {
            let protocol = request.uri().scheme_str().unwrap_or("http").to_owned();
            *self.request.lock() = Some(json!({
                "protocol": protocol,
                "method": request.method().as_str(),
                "url": request.uri().to_string(),
                "headers": listed(request.headers()),
                "body": String::from_utf8_lossy(request.body()),
            }));
            let response = self.http.send(request).await?;
            *self.response.lock() = Some(json!({
                "protocol": protocol,
                "statusCode": response.status().as_str(),
                "statusMessage": response.status().canonical_reason().unwrap_or_default(),
                "headers": listed(response.headers()),
                "body": String::from_utf8_lossy(response.body()),
            }));
            Ok(response)
        })
    }
}

/// `[name: value, name: value]`.
fn listed(headers: &HeaderMap) -> String {
    let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        format!("{name}: {}", String::from_utf8_lossy(value.as_bytes()))
    };
    format!("[{}]", headers.iter().map(header).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Teapot;

    impl HttpTasks for Teapot {
        fn send(&self, _: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>> {
            let response =
                Response::builder().status(418).header("x-one", "1").body(Bytes::from_static(b"short"));
            Box::pin(async { response.map_err(|error| error.to_string()) })
        }
    }

    #[tokio::test]
    async fn what_went_over_the_wire_is_shown() {
        let arguments = Value::parse(
            r#"{"ApiEndpoint": "https://h/p", "Method": "POST", "Headers": {"X-Two": "2"}, "RequestBody": "b"}"#,
        );
        let arguments = arguments.expect("JSON");
        let mut inspection = Inspection::default();
        let failed = invoke(&Teapot, &arguments, Some(&mut inspection)).await.expect_err("a teapot");
        assert_eq!(failed.error.as_deref(), Some("States.Http.StatusCode.418"));
        let shown = inspection.done();
        assert_eq!(shown["request"]["url"], "https://h/p");
        assert_eq!(
            shown["request"]["headers"],
            "[x-two: 2, user-agent: Amazon|StepFunctions|HttpInvoke|us-east-1, range: bytes=0-262144, \
             content-type: application/json]"
        );
        assert_eq!(
            shown["response"],
            json!({
                "protocol": "https", "statusCode": "418", "statusMessage": "I'm a teapot",
                "headers": "[x-one: 1]", "body": "short",
            })
        );
    }
}
