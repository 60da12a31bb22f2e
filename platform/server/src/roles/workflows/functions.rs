//! Functions as tasks: called through the gateway of this process; errors have Lambda's names.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Full, Limited};
use mayfly_api::ObjectKey;
use mayfly_gateway::{GatewayHandle, Refusal, refusal::RefusalCode};
use mayfly_runtime::Body;
use mayfly_workflows_controller::invocations::FunctionCaller;
use mayfly_workflows_engine::engine::{
    Config, FunctionCall, FunctionError, FunctionOutput, Functions, InvokeError,
};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::ANSWER_BYTES_MAX;

/// The namespace of function names that contain none.
const NAMESPACE: &str = "default";
/// The header by which a function distinguishes a retry from a new call.
const HEADER_IDEMPOTENCY_KEY: &str = "idempotency-key";
/// Functions of this process, by name or by a Lambda ARN.
#[derive(Clone)]
pub(super) struct GatewayFunctions {
    gateway: GatewayHandle,
    arns: Arc<FunctionArns>,
}

impl GatewayFunctions {
    pub(super) fn new(gateway: GatewayHandle, arns: FunctionArns) -> Self {
        Self { gateway, arns: Arc::new(arns) }
    }

    /// The same functions, called through another handle.
    pub(super) fn through(&self, gateway: GatewayHandle) -> Self {
        Self { gateway, arns: self.arns.clone() }
    }
}

/// The ARN prefix before a function's name: `arn:aws:lambda:us-east-1:000000000000:function:`.
pub(super) struct FunctionArns(String);

impl FunctionArns {
    pub(super) fn new(config: &Config) -> Self {
        let Config { partition, region, account, .. } = config;
        Self(format!("arn:{partition}:lambda:{region}:{account}:function:"))
    }

    /// The ARN of a function given by name, partial ARN or ARN: Lambda responds with the ARN in each case.
    fn of(&self, function: &str) -> String {
        if function.starts_with("arn:") {
            return function.to_owned();
        }
        let name = function.split_once(":function:").map_or(function, |(_, name)| name);
        format!("{}{name}", self.0)
    }
}

/// The target of a call: `name`, `namespace.name`, `…:function:name` and `…:function:name:qualifier`. A qualifier
/// other than `$LATEST` is a tag of the function's traffic.
#[derive(Debug, PartialEq, Eq)]
struct FunctionName<'a> {
    namespace: &'a str,
    name: &'a str,
    tag: Option<&'a str>,
}

impl<'a> FunctionName<'a> {
    fn parse(text: &'a str) -> Self {
        let rest = text.split_once(":function:").map_or(text, |(_, rest)| rest);
        let (name, qualifier) = rest.split_once(':').map_or((rest, None), |(name, q)| (name, Some(q)));
        let (namespace, name) = name.split_once('.').unwrap_or((NAMESPACE, name));
        Self { namespace, name, tag: qualifier.filter(|qualifier| *qualifier != "$LATEST") }
    }
}

impl Functions for GatewayFunctions {
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, InvokeError>> {
        Box::pin(async move {
            match call.detached {
                true => self.enqueue(&call).await,
                false => self.invoke_once(&call).await,
            }
        })
    }
}

impl FunctionCaller for GatewayFunctions {
    fn call(
        &self,
        function: &ObjectKey,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<Response<Bytes>, InvokeError>> {
        let function = function.clone();
        Box::pin(async move {
            let request = request.map(|body| Full::new(body).map_err(|never| match never {}).boxed_unsync());
            let answer = self.gateway.call(&function.namespace, &function.name, request).await;
            let response = answer.map_err(|refusal| match has_no_room(&refusal) {
                true => InvokeError::Unavailable { reason: refusal.to_string() },
                false => self.refused(&function.to_string(), &refusal),
            })?;
            let (parts, body) = response.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| failed("Lambda.Unknown", error))?.to_bytes();
            Ok(Response::from_parts(parts, body))
        })
    }
}

impl GatewayFunctions {
    /// Queues an asynchronous invocation (`InvocationType: Event`); responds when it is durable.
    async fn enqueue(&self, call: &FunctionCall) -> Result<FunctionOutput, InvokeError> {
        let FunctionName { namespace, name, .. } = FunctionName::parse(&call.function);
        let mut request = request(call)?;
        request.headers_mut().insert(mayfly_gateway::HEADER_INVOCATION, HeaderValue::from_static("async"));
        let answer = self.gateway.call(namespace, name, request).await;
        answer.map(|_| accepted()).map_err(|refusal| self.refused(&call.function, &refusal))
    }

    async fn invoke_once(&self, call: &FunctionCall) -> Result<FunctionOutput, InvokeError> {
        let name = FunctionName::parse(&call.function);
        let request = request(call)?;
        let answer = self.gateway.call(name.namespace, name.name, request).await;
        let response = answer.map_err(|refusal| self.refused(&call.function, &refusal))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| failed("Lambda.Unknown", error))?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if status.is_success() {
            return Ok(FunctionOutput {
                payload: json_of(text),
                status: 200,
                executed_version: "$LATEST".into(),
            });
        }
        Err(contract_error(&text)
            .unwrap_or_else(|| {
                let cause =
                    json!({"errorMessage": text, "errorType": "Lambda.Unknown", "status": status.as_u16()})
                        .to_string();
                FunctionError::new("Lambda.Unknown", cause)
            })
            .into())
    }

    /// Maps a refusal of the gateway to the call's outcome, or to a reason to retry later.
    fn refused(&self, function: &str, refusal: &Refusal) -> InvokeError {
        match is_transient(refusal, self.gateway.is_ready()) {
            true => InvokeError::Unavailable { reason: refusal.to_string() },
            false => refused(function, &self.arns, refusal).into(),
        }
    }
}

/// Whether a refusal is not about the function: the gateway does not know all routes yet, is being stopped, or the
/// function's first revision is being created. A failed revision stays refused until a new one is deployed, which
/// retriers and catchers have to see.
fn is_transient(refusal: &Refusal, routes_known: bool) -> bool {
    match refusal.code {
        RefusalCode::ShuttingDown => true,
        RefusalCode::NotReady => !routes_known || refusal.retry_after.is_some(),
        RefusalCode::NotFound => !routes_known,
        _ => false,
    }
}

/// Whether a refusal is due to a lack of capacity: asynchronous invocations wait then, as for Lambda's throttling.
fn has_no_room(refusal: &Refusal) -> bool {
    matches!(refusal.code, RefusalCode::QueueFull | RefusalCode::QueueTimeout | RefusalCode::Overloaded)
}

/// The request of a call: a POST of the event to the function.
fn request(call: &FunctionCall) -> Result<Request<Body>, FunctionError> {
    let mut request = Request::post("/").header(header::CONTENT_TYPE, "application/json");
    if let Ok(key) = HeaderValue::try_from(&call.idempotency_key) {
        request = request.header(HEADER_IDEMPOTENCY_KEY, key);
    }
    if let Some(tag) = FunctionName::parse(&call.function).tag {
        request = request.header(mayfly_gateway::HEADER_TAG, tag);
    }
    let body = Full::new(Bytes::from(call.payload.clone())).map_err(|never| match never {}).boxed_unsync();
    request.body(body).map_err(|error| failed("Lambda.InvalidParameterValueException", error))
}

/// The answer to an asynchronous call: no version has been executed yet.
fn accepted() -> FunctionOutput {
    FunctionOutput { payload: "null".into(), status: 202, executed_version: String::new() }
}

/// Converts a response to JSON: JSON is unchanged, an empty text is null, any other text is a string, since an HTTP
/// handler may return it without an error.
fn json_of(text: String) -> String {
    match serde_json::from_str::<IgnoredAny>(&text) {
        Ok(IgnoredAny) => text,
        Err(_) if text.trim().is_empty() => "null".into(),
        Err(_) => Value::String(text).to_string(),
    }
}

/// The error that a function reports by the contract: a body with `errorType` and `errorMessage`.
fn contract_error(text: &str) -> Option<FunctionError> {
    let body: Value = serde_json::from_str(text).ok()?;
    let error_type = body.get("errorType")?.as_str()?;
    Some(FunctionError::new(error_type, text))
}

fn failed(error_type: &str, error: impl std::fmt::Display) -> FunctionError {
    let cause = json!({"errorMessage": error.to_string(), "errorType": error_type}).to_string();
    FunctionError::new(error_type, cause)
}

/// The gateway's refusals under the names that retriers and catchers use on AWS.
fn refused(function: &str, arns: &FunctionArns, refusal: &Refusal) -> FunctionError {
    let error_type = match refusal.code {
        RefusalCode::BadRequest | RefusalCode::HeadTooLarge => "Lambda.InvalidParameterValueException",
        RefusalCode::NotFound => {
            let cause = format!(
                "Function not found: {} (Service: Lambda, Status Code: 404, Request ID: {})",
                arns.of(function),
                uuid::Uuid::new_v4()
            );
            return FunctionError::new("Lambda.ResourceNotFoundException", cause);
        }
        RefusalCode::QueueFull | RefusalCode::QueueTimeout | RefusalCode::Overloaded => {
            "Lambda.TooManyRequestsException"
        }
        RefusalCode::NotReady
        | RefusalCode::ComponentMissing
        | RefusalCode::ServerUnreachable
        | RefusalCode::ShuttingDown => "Lambda.ServiceException",
        RefusalCode::TimedOut => "Sandbox.Timedout",
        RefusalCode::OutOfMemory => "Runtime.OutOfMemory",
        RefusalCode::Trapped | RefusalCode::NoAnswer | RefusalCode::GuestError => "Runtime.ExitError",
        RefusalCode::ComponentInvalid => "Runtime.InvalidEntrypoint",
        RefusalCode::RequestTooLarge => "Lambda.RequestTooLargeException",
        RefusalCode::ResponseTooLarge => "Function.ResponseSizeTooLarge",
        RefusalCode::Internal => "Lambda.Unknown",
    };
    failed(error_type, refusal)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn functions_are_found_by_name_and_by_arn() {
        let of = |namespace, name, tag| FunctionName { namespace, name, tag };
        for (text, expected) in [
            ("hello", of("default", "hello", None)),
            ("shop.hello", of("shop", "hello", None)),
            ("hello:canary", of("default", "hello", Some("canary"))),
            ("arn:aws:lambda:us-east-1:123456789012:function:hello", of("default", "hello", None)),
            ("arn:aws:lambda:us-east-1:123456789012:function:shop.hello:$LATEST", of("shop", "hello", None)),
            (
                "arn:aws:lambda:eu-west-1:123456789012:function:hello:blue",
                of("default", "hello", Some("blue")),
            ),
        ] {
            assert_eq!(FunctionName::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn a_function_that_is_not_there_is_named_by_its_arn() {
        let arns = FunctionArns::new(&Config::default());
        let arn = "arn:aws:lambda:us-east-1:000000000000:function:nope";
        for (asked, named) in [
            ("nope", arn.to_owned()),
            ("shop.nope", "arn:aws:lambda:us-east-1:000000000000:function:shop.nope".to_owned()),
            ("nope:blue", format!("{arn}:blue")),
            ("000000000000:function:nope", arn.to_owned()),
            (arn, arn.to_owned()),
        ] {
            assert_eq!(arns.of(asked), named, "{asked}");
        }
    }

    #[test]
    fn an_error_that_is_told_keeps_its_type_and_its_text() {
        let text = r#"{"errorType":"OutOfStock","errorMessage":"none left","errorData":1}"#;
        let error = contract_error(text).unwrap();
        assert_eq!((error.error_type.as_str(), error.cause.as_str()), ("OutOfStock", text));
        for text in ["oops", "{}", r#"{"errorType":1}"#] {
            assert_eq!(contract_error(text), None, "{text}");
        }
    }

    #[test]
    fn a_refusal_that_passes_is_no_outcome() {
        let refusal = |code, retry_after| Refusal { code, message: "".into(), hint: "".into(), retry_after };
        let soon = Some(Duration::from_secs(1));
        for (code, retry_after, routes_known, passing) in [
            (RefusalCode::NotReady, soon, false, true),
            (RefusalCode::NotReady, soon, true, true),
            (RefusalCode::NotReady, None, false, true),
            (RefusalCode::NotReady, None, true, false),
            (RefusalCode::NotFound, None, false, true),
            (RefusalCode::NotFound, None, true, false),
            (RefusalCode::ShuttingDown, None, true, true),
            (RefusalCode::Trapped, None, false, false),
            (RefusalCode::QueueFull, soon, true, false),
        ] {
            assert_eq!(is_transient(&refusal(code, retry_after), routes_known), passing, "{code:?}");
        }
    }

    #[test]
    fn an_answer_becomes_json() {
        for (answer, expected) in
            [(r#"{"a":1}"#, r#"{"a":1}"#), ("", "null"), (" \n", "null"), ("hi", r#""hi""#)]
        {
            assert_eq!(json_of(answer.into()), expected, "{answer:?}");
        }
    }
}
