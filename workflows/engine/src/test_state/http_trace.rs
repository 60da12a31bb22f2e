//! An HTTP task's request and response, as TRACE shows them.

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use mayfly_workflows_language::value::Value;
use parking_lot::Mutex;

use super::failing::MockedError;
use super::inspection::{HttpRequestTrace, HttpResponseTrace, InspectionData};
use crate::engine::HttpTasks;
use crate::executor;

/// Sends the request that the arguments describe; what went over the wire is kept where it is asked for.
pub(super) async fn invoke(
    http: &dyn HttpTasks,
    arguments: &Value,
    inspection: Option<&mut InspectionData>,
) -> Result<Value, MockedError> {
    let recorder = Recorder { http, request: Mutex::new(None), response: Mutex::new(None) };
    let outcome = executor::http::invoke(&recorder, arguments).await;
    if let Some(inspection) = inspection {
        inspection.request = recorder.request.into_inner();
        inspection.response = recorder.response.into_inner();
    }
    outcome.map_err(|error| MockedError {
        error: Some(error.error_type.into()),
        cause: Some(error.cause.into()),
    })
}

struct Recorder<'a> {
    http: &'a dyn HttpTasks,
    request: Mutex<Option<HttpRequestTrace>>,
    response: Mutex<Option<HttpResponseTrace>>,
}

impl HttpTasks for Recorder<'_> {
    fn send(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>> {
        Box::pin(async move {
            let protocol = request.uri().scheme_str().unwrap_or("http").to_owned();
            *self.request.lock() = Some(HttpRequestTrace {
                protocol: protocol.clone(),
                method: request.method().to_string(),
                url: request.uri().to_string(),
                headers: listed(request.headers()),
                body: String::from_utf8_lossy(request.body()).into_owned(),
            });
            let response = self.http.send(request).await?;
            *self.response.lock() = Some(HttpResponseTrace {
                protocol,
                status_code: response.status().as_str().to_owned(),
                status_message: response.status().canonical_reason().unwrap_or_default().to_owned(),
                headers: listed(response.headers()),
                body: String::from_utf8_lossy(response.body()).into_owned(),
            });
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
        let mut inspection = InspectionData::default();
        let failed = invoke(&Teapot, &arguments, Some(&mut inspection)).await.expect_err("a teapot");
        assert_eq!(failed.error.as_deref(), Some("States.Http.StatusCode.418"));
        let request = inspection.request.expect("a request");
        assert_eq!(request.url, "https://h/p");
        assert_eq!(
            request.headers,
            "[x-two: 2, user-agent: Amazon|StepFunctions|HttpInvoke|us-east-1, range: bytes=0-262144, \
             content-type: application/json]"
        );
        assert_eq!(
            inspection.response,
            Some(HttpResponseTrace {
                protocol: "https".to_owned(),
                status_code: "418".to_owned(),
                status_message: "I'm a teapot".to_owned(),
                headers: "[x-one: 1]".to_owned(),
                body: "short".to_owned(),
            })
        );
    }
}
