//! Errors of services under the names that Step Functions gives them.

use bytes::Bytes;
use http::Response;
use mayfly_workflows_language::definition::IntegrationKind;
use serde_json::Value;

use super::model::Operation;
use super::services::{Protocol, Service};
use crate::engine::{FunctionError, ObjectError};

/// The service and the integration whose errors are named.
pub(super) struct Naming<'a> {
    pub(super) service: &'a Service,
    pub(super) kind: IntegrationKind,
}

/// Codes that no service's model has: the SDKs give them the service's general name.
const UNMODELLED: &[&str] = &[
    "AccessDeniedException",
    "ExpiredTokenException",
    "IncompleteSignatureException",
    "InvalidClientTokenIdException",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "SerializationException",
    "SignatureDoesNotMatchException",
    "UnknownOperationException",
    "UnrecognizedClientException",
];

impl Naming<'_> {
    /// An error that the service answered.
    pub(super) fn refused(&self, response: &Response<Bytes>) -> FunctionError {
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let body: Value = match self.service.protocol {
            Protocol::Query { .. } => in_xml(response.body()),
            _ => serde_json::from_slice(response.body()).unwrap_or_default(),
        };
        let text = |name: &str| body.get(name).and_then(Value::as_str);
        let status = response.status();
        let code = header("x-amzn-errortype")
            .or_else(|| text("__type"))
            .or_else(|| text("code"))
            .map(bare)
            .unwrap_or_else(|| if status.is_server_error() { "InternalFailure" } else { "UnknownError" });
        let message = text("message").or_else(|| text("Message")).unwrap_or_default();
        let request_id = header("x-amzn-requestid")
            .or_else(|| header("x-amz-request-id"))
            .or_else(|| text("RequestId"))
            .unwrap_or_default();
        let status = status.as_u16();
        match &self.service.optimised {
            Some(words) if self.kind == IntegrationKind::Optimised => FunctionError::new(
                format!("{}.{}", words.prefix, self.exception(code, words.generic)),
                format!(
                    "{message} (Service: {}; Status Code: {status}; Error Code: {code}; Request ID: {request_id}; \
                     Proxy: null)",
                    words.service
                ),
            ),
            _ => {
                let sdk = self.service.sdk;
                FunctionError::new(
                    format!("{sdk}.{}", self.exception(code, &format!("{sdk}Exception"))),
                    format!(
                        "{message} (Service: {sdk}, Status Code: {status}, Request ID: {request_id}) (SDK Attempt \
                         Count: 1)"
                    ),
                )
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
            Some(words) if self.kind == IntegrationKind::Optimised => words.prefix,
            _ => self.service.sdk,
        };
        FunctionError::new(
            format!("{prefix}.SdkClientException"),
            format!("Unable to execute HTTP request: {cause}"),
        )
    }
}

/// An error in a response of S3. The response to a HEAD request has no body.
pub(super) fn of_s3(operation: &Operation, response: &Response<Bytes>) -> ObjectError {
    let header = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
    let body = in_xml(response.body());
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let status = response.status();
    let by_status = match (status.as_u16(), operation.input.contains_key("Key")) {
        (404, true) => "NoSuchKey",
        (404, false) => "NoSuchBucket",
        _ => "UnknownError",
    };
    let code = text("code").unwrap_or_else(|| match operation.method.as_str() {
        "HEAD" => by_status.to_owned(),
        _ => "UnknownError".to_owned(),
    });
    ObjectError {
        request_id: header("x-amz-request-id").or_else(|| text("RequestId")),
        extended_request_id: header("x-amz-id-2").or_else(|| text("HostId")),
        ..ObjectError::new(status.as_u16(), &code, text("message").unwrap_or_default())
    }
}

/// Whether the body is an error although the status is 2xx.
pub(super) fn is_error(body: &[u8]) -> bool {
    let text = std::str::from_utf8(body).unwrap_or_default().trim_start();
    let inside = match text.strip_prefix("<?xml") {
        Some(rest) => rest.split_once("?>").map_or("", |(_, inside)| inside.trim_start()),
        None => text,
    };
    inside.starts_with("<Error>") || inside.starts_with("<Error ")
}

/// The members of an error in XML, at any depth, under their names in JSON.
fn in_xml(body: &[u8]) -> Value {
    let text = std::str::from_utf8(body).unwrap_or_default();
    let Ok(document) = roxmltree::Document::parse(text) else { return Value::Null };
    let member = |(name, shown): (&str, &str)| {
        let node = document.descendants().find(|node| node.tag_name().name() == name)?;
        Some((shown.to_owned(), Value::from(node.text().unwrap_or_default())))
    };
    let members =
        [("Code", "code"), ("Message", "message"), ("RequestId", "RequestId"), ("HostId", "HostId")];
    Value::Object(members.into_iter().filter_map(member).collect())
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
    use IntegrationKind::{AwsSdk, Optimised};

    fn error(service: &str, kind: IntegrationKind, body: &str) -> FunctionError {
        let naming = Naming { service: named(service).expect("there"), kind };
        let response = Response::builder().status(400).header("x-amzn-requestid", "r-1");
        naming.refused(&response.body(Bytes::from(body.to_owned())).expect("a response"))
    }

    #[test]
    fn errors_in_xml_have_them_too() {
        let body = "<ErrorResponse><Error><Type>Sender</Type><Code>NotFound</Code><Message>Topic does not exist</Message>\
                    </Error><RequestId>r-1</RequestId></ErrorResponse>";
        let told = error("sns", Optimised, body);
        assert_eq!(told.error_type, "SNS.NotFoundException");
        assert_eq!(
            told.cause,
            "Topic does not exist (Service: AmazonSNS; Status Code: 400; Error Code: NotFound; Request ID: r-1; Proxy: \
             null)"
        );
        let s3 = |name: &str, status: u16, body: &str| {
            let response = Response::builder().status(status).header("x-amz-id-2", "h");
            let response = response.body(Bytes::from(body.to_owned())).expect("a response");
            let told = of_s3(&super::super::model::S3[name], &response).for_task(String::new);
            (told.error_type, told.cause)
        };
        let body = "<?xml version=\"1.0\"?>\n<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.\
                    </Message><RequestId>R</RequestId></Error>";
        assert!(is_error(body.as_bytes()) && !is_error(b"<CopyObjectResult/>"));
        let (name, cause) = s3("GetObject", 404, body);
        assert_eq!(name, "S3.NoSuchKeyException");
        assert!(cause.ends_with("Request ID: R, Extended Request ID: h) (SDK Attempt Count: 1)"), "{cause}");
        assert_eq!(s3("HeadObject", 404, "").0, "S3.NoSuchKeyException");
        assert_eq!(s3("HeadBucket", 404, "").0, "S3.NoSuchBucketException");
        assert_eq!(s3("HeadObject", 403, "").0, "S3.S3Exception");
        assert_eq!(s3("GetObject", 503, "<html>").0, "S3.S3Exception");
    }

    #[test]
    fn errors_have_the_names_that_people_catch() {
        let not_there =
            r#"{"__type":"com.amazonaws.dynamodb.v20120810#ResourceNotFoundException","message":"no table"}"#;
        let told = error("dynamodb", AwsSdk, not_there);
        assert_eq!(told.error_type, "DynamoDb.ResourceNotFoundException");
        assert_eq!(
            told.cause,
            "no table (Service: DynamoDb, Status Code: 400, Request ID: r-1) (SDK Attempt Count: 1)"
        );
        let told = error("dynamodb", Optimised, not_there);
        assert_eq!(told.error_type, "DynamoDB.ResourceNotFoundException");
        assert_eq!(
            told.cause,
            "no table (Service: AmazonDynamoDBv2; Status Code: 400; Error Code: ResourceNotFoundException; Request ID: \
             r-1; Proxy: null)"
        );
        for (service, kind, body, expected) in [
            (
                "dynamodb",
                Optimised,
                r#"{"__type":"x#ValidationException"}"#,
                "DynamoDB.AmazonDynamoDBException",
            ),
            (
                "sqs",
                AwsSdk,
                r#"{"__type":"com.amazonaws.sqs#QueueDoesNotExist"}"#,
                "Sqs.QueueDoesNotExistException",
            ),
            ("ssm", AwsSdk, r#"{"__type":"ParameterNotFound"}"#, "Ssm.ParameterNotFoundException"),
            ("kms", AwsSdk, r#"{"__type":"UnrecognizedClientException"}"#, "Kms.KmsException"),
            ("ecs", Optimised, "<html>", "ECS.UnknownErrorException"),
        ] {
            assert_eq!(error(service, kind, body).error_type, expected, "{body}");
        }
    }
}
