//! Buckets at an endpoint that speaks S3.

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use http::{Response, StatusCode};
use mayfly_workflows_language::value::{Map, Value};
use percent_encoding::percent_decode_str;

use super::model::{self, Operation};
use super::{ANSWER_MAX, Client, failing, rest_xml, services};
use crate::engine::{
    Config, EngineDeps, ObjectBody, ObjectCall, ObjectEntry, ObjectError, ObjectPage, ObjectStore, Streamed,
};

/// The longest answer in XML that is read; a page of a listing has a thousand keys of a kilobyte at most.
const XML_BYTES_MAX: usize = 8 << 20;

/// Operations whose response may contain an error although its status is 200.
const MAY_FAIL_LATE: &[&str] = &["CompleteMultipartUpload", "CopyObject", "UploadPartCopy"];

/// The buckets of the endpoint that was given for `s3`.
pub(crate) struct S3 {
    client: Client,
}

impl S3 {
    /// `None` when no endpoint was given.
    pub(crate) fn at_endpoint(config: &Config, deps: &EngineDeps) -> Option<Self> {
        Client::of(config, deps, services::named("s3")?).map(|client| Self { client })
    }

    /// Sends a request and returns the response before its body is read; a refusal of the service is an error.
    async fn open(&self, operation: &Operation, arguments: &Map) -> Result<Response<Streamed>, ObjectError> {
        let request =
            rest_xml::request(&self.client.url, operation, arguments).map_err(ObjectError::invalid)?;
        let answer = self.client.open(request).await.map_err(ObjectError::unreachable)?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        let body = collected(body, XML_BYTES_MAX).await.unwrap_or_default();
        Err(failing::of_s3(operation, &Response::from_parts(head, body)))
    }

    /// Asks for something that is no large object.
    async fn ask(&self, name: &str, arguments: &Map, bytes_max: usize) -> Result<Value, ObjectError> {
        let operation = model::S3.get(name).ok_or_else(|| ObjectError::not_implemented(name))?;
        let (head, body) = self.open(operation, arguments).await?.into_parts();
        let length = head
            .headers
            .get(http::header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse().ok());
        if operation.method != "HEAD" && length.is_some_and(|length: usize| length > bytes_max) {
            return Err(ObjectError::too_large());
        }
        let body = collected(body, bytes_max).await?;
        // Long operations may fail after the service has sent status 200.
        if MAY_FAIL_LATE.contains(&name) && failing::is_error(&body) {
            let mut failed = Response::new(body);
            *failed.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            *failed.headers_mut() = head.headers;
            return Err(failing::of_s3(operation, &failed));
        }
        rest_xml::answer(operation, &head.headers, &body).map_err(ObjectError::unreadable)
    }
}

/// A whole body, when it is not larger than that.
async fn collected(mut body: Streamed, bytes_max: usize) -> Result<Bytes, ObjectError> {
    let mut whole = BytesMut::new();
    while let Some(part) = next(&mut body).await {
        let part = part?;
        if whole.len() + part.len() > bytes_max {
            return Err(ObjectError::too_large());
        }
        whole.extend_from_slice(&part);
    }
    Ok(whole.freeze())
}

/// The next part of a body; a service that falls silent has broken off.
async fn next(body: &mut Streamed) -> Option<Result<Bytes, ObjectError>> {
    match tokio::time::timeout(ANSWER_MAX, body.next()).await {
        Ok(part) => part.map(|part| part.map_err(ObjectError::unreachable)),
        Err(_) => Some(Err(ObjectError::unreachable("the answer broke off"))),
    }
}

fn arguments<'a>(members: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) -> Map {
    let given = members.into_iter().filter_map(|(name, value)| Some((name.into(), Value::from(value?))));
    given.collect()
}

impl ObjectStore for S3 {
    fn get(
        &self,
        bucket: &str,
        key: &str,
        version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        let wanted = arguments([("Bucket", Some(bucket)), ("Key", Some(key)), ("VersionId", version)]);
        Box::pin(async move {
            let body = self.open(&model::S3["GetObject"], &wanted).await?.into_body();
            let parts = futures::stream::unfold(Some(body), async |body| {
                let mut body = body?;
                let part = next(&mut body).await?;
                let rest = part.is_ok().then_some(body);
                Some((part, rest))
            });
            Ok(parts.boxed())
        })
    }

    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        let wanted = arguments([("Bucket", Some(bucket)), ("Key", Some(key))]);
        Box::pin(async move {
            let request = rest_xml::request(&self.client.url, &model::S3["PutObject"], &wanted);
            let mut request = request.map_err(ObjectError::invalid)?;
            let kind = http::HeaderValue::from_static(rest_xml::BODY_KIND);
            request.headers_mut().insert(http::header::CONTENT_TYPE, kind);
            *request.body_mut() = body;
            let answer = self.client.send(request).await.map_err(ObjectError::unreachable)?;
            match answer.status().is_success() {
                true => Ok(()),
                false => Err(failing::of_s3(&model::S3["PutObject"], &answer)),
            }
        })
    }

    fn list(
        &self,
        bucket: &str,
        prefix: &str,
        from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        let wanted = arguments([
            ("Bucket", Some(bucket)),
            ("Prefix", Some(prefix).filter(|prefix| !prefix.is_empty())),
            ("ContinuationToken", from.as_deref()),
            // A key may hold letters that XML has not.
            ("EncodingType", Some("url")),
        ]);
        Box::pin(async move {
            let told = self.ask("ListObjectsV2", &wanted, XML_BYTES_MAX).await?;
            let is_encoded = told.get("EncodingType").and_then(Value::as_str) == Some("url");
            let contents = told.get("Contents").and_then(Value::as_array).unwrap_or_default();
            let entries = contents.iter().filter_map(|entry| object_entry(entry, is_encoded)).collect();
            let next = told.get("NextContinuationToken").and_then(Value::as_str).map(str::to_owned);
            Ok(ObjectPage { entries, next })
        })
    }

    fn call(&self, call: ObjectCall) -> BoxFuture<'_, Result<serde_json::Value, ObjectError>> {
        Box::pin(async move {
            let arguments = Value::from(&call.arguments);
            let arguments = arguments.as_object().cloned().unwrap_or_default();
            let bytes_max = if call.operation == "GetObject" { call.body_bytes_max } else { XML_BYTES_MAX };
            self.ask(&call.operation, &arguments, bytes_max).await.map(|told| told.to_serde())
        })
    }
}

fn object_entry(entry: &Value, is_encoded: bool) -> Option<ObjectEntry> {
    let text = |name: &str| entry.get(name).and_then(Value::as_str);
    let key = text("Key")?;
    let key = match is_encoded {
        true => percent_decode_str(&key.replace('+', " ")).decode_utf8_lossy().into_owned(),
        false => key.to_owned(),
    };
    Some(ObjectEntry {
        key,
        etag: text("ETag").unwrap_or_default().to_owned(),
        last_modified: text("LastModified").and_then(|at| at.parse().ok()).unwrap_or_default(),
        size: entry
            .get("Size")
            .and_then(Value::as_i64)
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or(0),
        storage_class: text("StorageClass").unwrap_or("STANDARD").to_owned(),
    })
}
