//! A task's arguments as a request, an answer as a task's result.

use bytes::Bytes;
use http::{Method, Request, Response, Uri, header};
use mayfly_workflows_language::definition::IntegrationKind;
use mayfly_workflows_language::value::{Map, Value};

use super::services::{Protocol, Service};
use super::{model, not_carried_out, query};
use crate::engine::FunctionError;
use crate::executor::sdk::{capital, small};
use mayfly_workflows_machine::envelope::Envelope;
use mayfly_workflows_machine::time_text;

/// Members whose own members are named by the user: their case is kept.
const MAPS: &[&str] =
    &["Parameters", "Tags", "DockerLabels", "Options", "LogOptions", "DriverOpts", "Labels", "Attributes"];
/// Arguments of optimised integrations that may be JSON and are text on the wire.
const TEXTS: &[&str] = &["MessageBody", "Detail", "Message"];
/// Seconds since the epoch before this are no time: counts and durations end in `Time` too.
const TIME_MIN: f64 = 946_684_800.0;
/// From here on a number is of milliseconds, which services do not send as a time.
const TIME_MAX: f64 = 100_000_000_000.0;

/// The request of one operation.
pub(super) fn request(
    url: &Uri,
    service: &Service,
    action: &str,
    kind: IntegrationKind,
    arguments: &Value,
) -> Result<Request<Bytes>, FunctionError> {
    // Only these take JSON there; a table's item may have an attribute of any name.
    let takes_json = kind == IntegrationKind::Optimised && matches!(service.key(), "sqs" | "events" | "sns");
    let members = request_members(arguments, service.camel, takes_json);
    let base = url.to_string();
    let base = base.trim_end_matches('/');
    let invalid = |cause: String| FunctionError::new("States.Runtime", cause);
    let builder = match service.protocol {
        Protocol::Json { target, version } => Request::builder()
            .uri(format!("{base}/"))
            .header(header::CONTENT_TYPE, format!("application/x-amz-json-{version}"))
            .header("x-amz-target", format!("{target}.{}", capital(action))),
        Protocol::Batch => Request::builder()
            .uri(format!("{base}/v1/{}", action.to_ascii_lowercase()))
            .header(header::CONTENT_TYPE, "application/json"),
        Protocol::Query { model, version } => {
            let name = capital(action);
            let operation = model.get(&name).ok_or_else(|| not_carried_out(service.key(), action, model))?;
            let arguments = members.as_object().cloned().unwrap_or_default();
            model::check(operation, &arguments).map_err(invalid)?;
            return query::request(url, &name, version, operation, &arguments).map_err(invalid);
        }
        Protocol::Lambda | Protocol::RestXml => {
            let service = service.key();
            return Err(FunctionError::not_supported(format!(
                "{service}:{action} is not sent to an endpoint; lambda:invoke and aws-sdk:s3 are"
            )));
        }
    };
    builder
        .method(Method::POST)
        .body(Bytes::from(members.to_text()))
        .map_err(|error| invalid(error.to_string()))
}

/// Arguments as the service reads them. Nulls are left out.
fn request_members(value: &Value, camel: bool, takes_json: bool) -> Value {
    match value {
        Value::Object(members) => {
            let mut spelled = Map::new();
            for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
                let value = match value {
                    value if takes_json && TEXTS.contains(&&**name) && !value.is_string() => {
                        Value::from(value.to_text())
                    }
                    value if MAPS.contains(&&**name) && value.is_object() => value.clone(),
                    value => request_members(value, camel, takes_json),
                };
                spelled.insert(if camel { small(name).into() } else { name.clone() }, value);
            }
            Value::from(spelled)
        }
        Value::Array(items) => items.iter().map(|item| request_members(item, camel, takes_json)).collect(),
        other => other.clone(),
    }
}

/// An answer as a workflow sees it: members begin with a capital, times are text.
pub(super) fn answer(
    response: &Response<Bytes>,
    service: &Service,
    action: &str,
    kind: IntegrationKind,
    now_ms: i64,
) -> Result<Value, String> {
    if let Protocol::Query { model, .. } = service.protocol {
        let operation = model.get(&capital(action)).ok_or("the operation is not known")?;
        let (value, request_id) = query::answer(operation, response.body())?;
        return Ok(around(value, response, &request_id, "text/xml", kind, now_ms));
    }
    let text = std::str::from_utf8(response.body()).map_err(|_| "the answer is not UTF-8 text".to_owned())?;
    let value = match text.trim() {
        "" => Value::empty_object(),
        text => Value::parse(text).map_err(|error| format!("the answer is not JSON: {error}"))?,
    };
    let value = response_members(&value, service.camel, kind);
    Ok(around(value, response, "", "application/x-amz-json-1.0", kind, now_ms))
}

/// Around the answer of an optimised integration are the call's own facts.
fn around(
    value: Value,
    response: &Response<Bytes>,
    request_id: &str,
    content_type: &str,
    kind: IntegrationKind,
    now_ms: i64,
) -> Value {
    if kind == IntegrationKind::AwsSdk {
        return value;
    }
    let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let envelope = Envelope {
        request_id: header("x-amzn-requestid").unwrap_or(request_id),
        bytes: response.body().len(),
        at_ms: now_ms,
        content_type: header("content-type").unwrap_or(content_type),
        extra: &[],
    };
    let members = value.as_object().into_iter().flat_map(Map::iter);
    let mut members: Vec<(std::sync::Arc<str>, Value)> =
        members.map(|(name, value)| (name.clone(), value.clone())).collect();
    members.extend(envelope.members().map(|(name, value)| (name.into(), value)));
    members.sort_by(|(a, _), (b, _)| a.cmp(b));
    Value::object(members)
}

/// An answer's members as a workflow spells them, times as text. `camel`: the service begins them small.
fn response_members(value: &Value, camel: bool, kind: IntegrationKind) -> Value {
    match value {
        Value::Object(members) => {
            let mut spelled = Map::new();
            for (name, value) in members.iter() {
                let shown = if camel { capital(name) } else { name.to_string() };
                let shown = match kind {
                    IntegrationKind::AwsSdk => in_the_sdks_spelling(shown),
                    IntegrationKind::Optimised => shown,
                };
                let value = match value {
                    value if MAPS.contains(&shown.as_str()) && value.is_object() => value.clone(),
                    value => match time(&shown, value) {
                        Some(time) => time,
                        None => response_members(value, camel, kind),
                    },
                };
                spelled.insert(std::sync::Arc::<str>::from(shown), value);
            }
            Value::from(spelled)
        }
        Value::Array(items) => items.iter().map(|item| response_members(item, camel, kind)).collect(),
        other => other.clone(),
    }
}

/// The SDK for Java writes a run of capitals as a word: `MD5OfMessageBody` is `Md5OfMessageBody`.
fn in_the_sdks_spelling(name: String) -> String {
    match name.strip_prefix("MD5Of") {
        Some(rest) => format!("Md5Of{rest}"),
        None => name,
    }
}

/// The SDK integrations show seconds since the epoch as text.
#[expect(clippy::cast_possible_truncation, reason = "milliseconds of our millennium")]
fn time(name: &str, value: &Value) -> Option<Value> {
    let is_time = ["Date", "Time", "At", "Timestamp"].iter().any(|ending| name.ends_with(ending));
    let seconds = value.is_number().then(|| value.as_f64()).flatten()?;
    (is_time && (TIME_MIN..TIME_MAX).contains(&seconds))
        .then(|| Value::from(time_text((seconds * 1000.0).round() as i64)))
}

#[cfg(test)]
mod tests {
    use super::super::services::named;
    use super::*;
    use IntegrationKind::{AwsSdk, Optimised};

    fn sent(service: &str, action: &str, kind: IntegrationKind, arguments: &str) -> Request<Bytes> {
        let service = named(service).expect("in the table");
        let arguments = Value::parse(arguments).expect("JSON");
        let url: Uri = "http://localhost:4566".parse().expect("a URL");
        request(&url, service, action, kind, &arguments).expect("a request")
    }

    fn body(request: &Request<Bytes>) -> &str {
        std::str::from_utf8(request.body()).expect("text")
    }

    #[test]
    fn services_are_asked_in_their_own_spelling() {
        let request = sent(
            "sqs",
            "sendMessage",
            Optimised,
            r#"{"QueueUrl":"q","MessageBody":{"a":1},"DelaySeconds":null}"#,
        );
        assert_eq!(request.headers()["x-amz-target"], "AmazonSQS.SendMessage");
        assert_eq!(request.headers()["content-type"], "application/x-amz-json-1.0");
        assert_eq!(body(&request), r#"{"QueueUrl":"q","MessageBody":"{\"a\":1}"}"#);
        let request = sent(
            "ecs",
            "runTask",
            AwsSdk,
            r#"{"TaskDefinition":"t","Overrides":{"ContainerOverrides":[{"Name":"c","Environment":[{"Name":"A","Value":"b"}]}]}}"#,
        );
        assert_eq!(
            body(&request),
            r#"{"taskDefinition":"t","overrides":{"containerOverrides":[{"name":"c","environment":[{"name":"A","value":"b"}]}]}}"#
        );
        let request = sent("batch", "submitJob", Optimised, r#"{"JobName":"j","Parameters":{"Key":"v"}}"#);
        assert_eq!(request.uri(), "http://localhost:4566/v1/submitjob");
        assert_eq!(body(&request), r#"{"jobName":"j","parameters":{"Key":"v"}}"#);
        let request = sent("sns", "publish", Optimised, r#"{"TopicArn":"t","Message":{"a":1}}"#);
        assert_eq!(body(&request), "Action=Publish&Version=2010-03-31&TopicArn=t&Message=%7B%22a%22%3A1%7D");
        let request =
            sent("dynamodb", "putItem", Optimised, r#"{"TableName":"t","Item":{"Detail":{"S":"x"}}}"#);
        assert_eq!(body(&request), r#"{"TableName":"t","Item":{"Detail":{"S":"x"}}}"#);
    }

    fn shown(service: &str, kind: IntegrationKind, text: &str) -> String {
        let response =
            Response::builder().header("x-amzn-requestid", "r-1").body(Bytes::from(text.to_owned()));
        let response = response.expect("a response");
        answer(&response, named(service).expect("there"), "publish", kind, 0).expect("an answer").to_text()
    }

    #[test]
    fn answers_are_spelled_as_workflows_know_them() {
        assert_eq!(
            shown(
                "ecs",
                AwsSdk,
                r#"{"tasks":[{"taskArn":"a","createdAt":1700000000.25,"tags":[{"key":"k"}]}]}"#
            ),
            r#"{"Tasks":[{"TaskArn":"a","CreatedAt":"2023-11-14T22:13:20.250Z","Tags":[{"Key":"k"}]}]}"#
        );
        assert_eq!(shown("sqs", AwsSdk, r#"{"MD5OfMessageBody":"m"}"#), r#"{"Md5OfMessageBody":"m"}"#);
        assert_eq!(shown("glue", AwsSdk, r#"{"ExecutionTime":17}"#), r#"{"ExecutionTime":17}"#);
        assert_eq!(shown("kms", AwsSdk, ""), "{}");
        let published =
            "<PublishResponse><PublishResult><MessageId>i</MessageId></PublishResult></PublishResponse>";
        assert_eq!(shown("sns", AwsSdk, published), r#"{"MessageId":"i"}"#);
        assert!(shown("sns", Optimised, published).starts_with(r#"{"MessageId":"i","SdkHttpMetadata":"#));
        let optimised = shown("sqs", Optimised, r#"{"MessageId":"i","MD5OfMessageBody":"m"}"#);
        assert!(
            optimised.starts_with(r#"{"MD5OfMessageBody":"m","MessageId":"i","SdkHttpMetadata":"#),
            "{optimised}"
        );
        assert!(optimised.ends_with(r#""SdkResponseMetadata":{"RequestId":"r-1"}}"#), "{optimised}");
    }
}
