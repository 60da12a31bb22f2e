//! Errors of services under the names that Step Functions gives them.

use bytes::Bytes;
use http::Response;
use serde_json::Value;

use super::services::Service;
use crate::engine::FunctionError;

/// Whose errors, in which kind of integration.
pub(super) struct Naming<'a> {
    pub(super) service: &'a Service,
    pub(super) aws_sdk: bool,
}

/// Codes that no service's model has: the SDKs give them the service's general name.
const UNMODELLED: &[&str] = &[
    "AccessDeniedException",
    "ExpiredTokenException",
    "IncompleteSignatureException",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "SerializationException",
    "UnknownOperationException",
    "UnrecognizedClientException",
];

impl Naming<'_> {
    /// An error that the service answered.
    pub(super) fn refused(&self, response: &Response<Bytes>) -> FunctionError {
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let body: Value = serde_json::from_slice(response.body()).unwrap_or_default();
        let text = |name: &str| body.get(name).and_then(Value::as_str);
        let status = response.status();
        let code = header("x-amzn-errortype")
            .or_else(|| text("__type"))
            .or_else(|| text("code"))
            .map(bare)
            .unwrap_or_else(|| if status.is_server_error() { "InternalFailure" } else { "UnknownError" });
        let message = text("message").or_else(|| text("Message")).unwrap_or_default();
        let request_id =
            header("x-amzn-requestid").or_else(|| header("x-amz-request-id")).unwrap_or_default();
        let status = status.as_u16();
        match &self.service.optimised {
            Some(words) if !self.aws_sdk => FunctionError {
                error_type: format!("{}.{}", words.prefix, self.exception(code, words.generic)),
                cause: format!(
                    "{message} (Service: {}; Status Code: {status}; Error Code: {code}; Request ID: {request_id}; \
                     Proxy: null)",
                    words.service
                ),
            },
            _ => {
                let sdk = self.service.sdk;
                FunctionError {
                    error_type: format!("{sdk}.{}", self.exception(code, &format!("{sdk}Exception"))),
                    cause: format!(
                        "{message} (Service: {sdk}, Status Code: {status}, Request ID: {request_id}) (SDK Attempt \
                         Count: 1)"
                    ),
                }
            }
        }
    }

    fn exception(&self, code: &str, generic: &str) -> String {
        let named = if code.ends_with("Exception") { code.to_owned() } else { format!("{code}Exception") };
        let unmodelled = UNMODELLED.contains(&named.as_str())
            || (self.service.key() == "dynamodb" && named == "ValidationException");
        if unmodelled { generic.to_owned() } else { named }
    }

    /// The service did not answer, or not in its protocol.
    pub(super) fn unreachable(&self, cause: &str) -> FunctionError {
        let prefix = match &self.service.optimised {
            Some(words) if !self.aws_sdk => words.prefix,
            _ => self.service.sdk,
        };
        FunctionError {
            error_type: format!("{prefix}.SdkClientException"),
            cause: format!("Unable to execute HTTP request: {cause}"),
        }
    }
}

/// `com.amazonaws.sqs#QueueDoesNotExist:http://…` is `QueueDoesNotExist`.
fn bare(code: &str) -> &str {
    let code = code.rsplit('#').next().unwrap_or(code);
    code.split(':').next().unwrap_or(code)
}

#[cfg(test)]
mod tests {
    use super::super::services::named;
    use super::*;

    fn error(service: &str, aws_sdk: bool, body: &str) -> FunctionError {
        let naming = Naming { service: named(service).expect("there"), aws_sdk };
        let response = Response::builder().status(400).header("x-amzn-requestid", "r-1");
        naming.refused(&response.body(Bytes::from(body.to_owned())).expect("a response"))
    }

    #[test]
    fn errors_have_the_names_that_people_catch() {
        let not_there =
            r#"{"__type":"com.amazonaws.dynamodb.v20120810#ResourceNotFoundException","message":"no table"}"#;
        let told = error("dynamodb", true, not_there);
        assert_eq!(told.error_type, "DynamoDb.ResourceNotFoundException");
        assert_eq!(
            told.cause,
            "no table (Service: DynamoDb, Status Code: 400, Request ID: r-1) (SDK Attempt Count: 1)"
        );
        let told = error("dynamodb", false, not_there);
        assert_eq!(told.error_type, "DynamoDB.ResourceNotFoundException");
        assert_eq!(
            told.cause,
            "no table (Service: AmazonDynamoDBv2; Status Code: 400; Error Code: ResourceNotFoundException; Request ID: \
             r-1; Proxy: null)"
        );
        for (service, aws_sdk, body, expected) in [
            ("dynamodb", false, r#"{"__type":"x#ValidationException"}"#, "DynamoDB.AmazonDynamoDBException"),
            (
                "sqs",
                true,
                r#"{"__type":"com.amazonaws.sqs#QueueDoesNotExist"}"#,
                "Sqs.QueueDoesNotExistException",
            ),
            ("ssm", true, r#"{"__type":"ParameterNotFound"}"#, "Ssm.ParameterNotFoundException"),
            ("kms", true, r#"{"__type":"UnrecognizedClientException"}"#, "Kms.KmsException"),
            ("ecs", false, "<html>", "ECS.UnknownErrorException"),
        ] {
            assert_eq!(error(service, aws_sdk, body).error_type, expected, "{body}");
        }
    }
}
