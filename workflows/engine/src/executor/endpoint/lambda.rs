//! Functions that live elsewhere, over Lambda's own API.

use bytes::Bytes;
use http::{Request, header};
use mayfly_workflows_language::definition::IntegrationKind;

use super::failing::Naming;
use super::{Client, escaped, services};
use crate::engine::{FunctionCall, FunctionError, FunctionOutput, Reporter};

/// Calls a function at Lambda's endpoint; `None` when there is none.
pub(crate) async fn invoke(
    reporter: &Reporter,
    call: &FunctionCall,
) -> Option<Result<FunctionOutput, FunctionError>> {
    let service = services::named("lambda")?;
    let client = Client::of(&reporter.inner.config, &reporter.inner.deps, service)?;
    // Functions are Lambda's optimised integration; its errors have one prefix in both kinds.
    let naming = Naming { service, kind: IntegrationKind::AwsSdk };
    let (name, qualifier) = split(&call.function);
    let query = qualifier.map(|qualifier| format!("?Qualifier={}", escaped(qualifier))).unwrap_or_default();
    let base = client.url.to_string();
    let uri =
        format!("{}/2015-03-31/functions/{}/invocations{query}", base.trim_end_matches('/'), escaped(name));
    let kind = if call.detached { "Event" } else { "RequestResponse" };
    let request = Request::post(uri)
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-amz-invocation-type", kind)
        .body(Bytes::from(call.payload.clone()));
    let request = match request {
        Ok(request) => request,
        Err(error) => return Some(Err(naming.unreachable(&error.to_string()))),
    };
    let response = match client.send(request).await {
        Ok(response) => response,
        Err(cause) => return Some(Err(naming.unreachable(&cause))),
    };
    if !response.status().is_success() {
        return Some(Err(naming.refused(&response)));
    }
    let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let payload = String::from_utf8_lossy(response.body()).into_owned();
    if header("x-amz-function-error").is_some() {
        let body: serde_json::Value = serde_json::from_str(&payload).unwrap_or_default();
        let error_type =
            body.get("errorType").and_then(serde_json::Value::as_str).unwrap_or("Lambda.Unknown");
        return Some(Err(FunctionError::new(error_type, payload)));
    }
    Some(Ok(FunctionOutput {
        payload: if payload.is_empty() { "null".to_owned() } else { payload },
        status: response.status().as_u16(),
        executed_version: header("x-amz-executed-version")
            .unwrap_or(if call.detached { "" } else { "$LATEST" })
            .to_owned(),
    }))
}

/// A name or an ARN, and a version or alias.
fn split(function: &str) -> (&str, Option<&str>) {
    let from = function.find(":function:").map_or(0, |at| at + ":function:".len());
    match function[from..].find(':') {
        Some(at) => (&function[..from + at], Some(&function[from + at + 1..])),
        None => (function, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_named_as_lambda_names_them() {
        let arn = "arn:aws:lambda:us-east-1:123456789012:function:f";
        assert_eq!(split("f"), ("f", None));
        assert_eq!(split("f:blue"), ("f", Some("blue")));
        assert_eq!(split(arn), (arn, None));
        assert_eq!(split(&format!("{arn}:$LATEST")), (arn, Some("$LATEST")));
        assert_eq!(escaped("a:b/$c"), "a%3Ab%2F%24c");
    }
}
