//! The objects of buckets, behind one door: folders of the server, or a service that speaks S3.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use jiff::Timestamp;

use super::deps::FunctionError;

/// Buckets and what lies in them: a map's items are read there and its results written; tasks of `aws-sdk:s3`
/// are carried out there.
pub trait ObjectStore: Send + Sync {
    /// Opens an object for reading. A version is one that a listing of versions names.
    fn get(
        &self,
        bucket: &str,
        key: &str,
        version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>>;

    /// Writes one whole object.
    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), ObjectError>>;

    /// Lists the objects below a prefix in the order of their keys, from the beginning or from where a page ended.
    fn list(
        &self,
        bucket: &str,
        prefix: &str,
        from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>>;

    /// Performs an operation of `aws-sdk:s3`. An implementation that only stores a Map's files supports none.
    fn call(&self, call: ObjectCall) -> BoxFuture<'_, Result<serde_json::Value, ObjectError>> {
        Box::pin(async move { Err(ObjectError::not_implemented(&call.operation)) })
    }

    /// Is this bucket here even where a service has all others? One of the server's own is.
    fn keeps(&self, _bucket: &str) -> bool {
        false
    }
}

/// Buckets of a service, beside those that stay here.
pub(super) struct Divided {
    pub(super) here: Arc<dyn ObjectStore>,
    pub(super) there: Arc<dyn ObjectStore>,
}

impl Divided {
    fn of(&self, bucket: &str) -> &dyn ObjectStore {
        if self.here.keeps(bucket) { &*self.here } else { &*self.there }
    }
}

impl ObjectStore for Divided {
    fn get(
        &self,
        bucket: &str,
        key: &str,
        version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        self.of(bucket).get(bucket, key, version)
    }

    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        self.of(bucket).put(bucket, key, body)
    }

    fn list(
        &self,
        bucket: &str,
        prefix: &str,
        from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        self.of(bucket).list(bucket, prefix, from)
    }

    fn call(&self, call: ObjectCall) -> BoxFuture<'_, Result<serde_json::Value, ObjectError>> {
        let bucket = call.arguments["Bucket"].as_str().unwrap_or_default().to_owned();
        self.of(&bucket).call(call)
    }

    fn keeps(&self, bucket: &str) -> bool {
        self.here.keeps(bucket)
    }
}

/// The content of an object, as a stream.
pub type ObjectBody = BoxStream<'static, Result<Bytes, ObjectError>>;

/// An operation that a task requests.
#[derive(Debug, Clone)]
pub struct ObjectCall {
    /// As S3's model spells it: `ListObjectsV2`.
    pub operation: String,
    /// The task's arguments.
    pub arguments: serde_json::Value,
    /// The largest object that may be part of the answer; for a larger one the error is
    /// [`ObjectError::too_large`].
    pub body_bytes_max: usize,
}

/// A part of a listing.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectPage {
    /// The objects, by key.
    pub entries: Vec<ObjectEntry>,
    /// The token of the next page, if there is one.
    pub next: Option<String>,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectEntry {
    /// The object's key.
    pub key: String,
    /// Entity tag, quotes included.
    pub etag: String,
    /// Last change.
    pub last_modified: Timestamp,
    /// Bytes.
    pub size: u64,
    /// `STANDARD` by default.
    pub storage_class: String,
}

/// The reason for which an operation failed, worded as S3 words it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectError {
    /// `NoSuchKey`.
    pub code: String,
    /// The service's message; empty where it gives none.
    pub message: String,
    /// HTTP status; 0 when there was no answer.
    pub status: u16,
    /// The request's number, from a service that has one.
    pub request_id: Option<String>,
    /// S3's second number.
    pub extended_request_id: Option<String>,
}

/// The code of a request that got no answer.
const NO_ANSWER: &str = "SdkClientException";
/// The code of an answer that is larger than a payload may be.
const TOO_LARGE: &str = "States.DataLimitExceeded";
/// The errors that S3's model names; the SDK gives all others the service's general name.
const MODELLED: &[&str] = &[
    "BucketAlreadyExists",
    "BucketAlreadyOwnedByYou",
    "EncryptionTypeMismatch",
    "IdempotencyParameterMismatch",
    "InvalidObjectState",
    "InvalidRequest",
    "InvalidWriteOffset",
    "NoSuchBucket",
    "NoSuchKey",
    "NoSuchUpload",
    "ObjectAlreadyInActiveTierError",
    "ObjectNotInActiveTierError",
    "TooManyParts",
];

impl ObjectError {
    /// An error with S3's name for it.
    pub fn new(status: u16, code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            message: message.into(),
            status,
            request_id: None,
            extended_request_id: None,
        }
    }

    /// There is no such object.
    pub fn no_such_key() -> Self {
        Self::new(404, "NoSuchKey", "The specified key does not exist.")
    }

    /// There is no such bucket.
    pub fn no_such_bucket() -> Self {
        Self::new(404, "NoSuchBucket", "The specified bucket does not exist")
    }

    /// The service did not answer.
    pub fn unreachable(cause: impl std::fmt::Display) -> Self {
        Self::new(0, NO_ANSWER, format!("Unable to execute HTTP request: {cause}"))
    }

    /// The service's response cannot be parsed.
    pub fn unreadable(cause: impl std::fmt::Display) -> Self {
        Self::new(0, NO_ANSWER, cause.to_string())
    }

    /// The arguments are not the operation's.
    pub fn invalid(cause: impl Into<String>) -> Self {
        Self::new(0, "States.Runtime", cause)
    }

    /// The object does not fit into a payload.
    pub fn too_large() -> Self {
        let cause = "The state/task 'aws-sdk:s3' returned a result with a size exceeding the maximum number of bytes \
                     service limit.";
        Self::new(0, TOO_LARGE, cause)
    }

    /// The operation or argument is not supported.
    pub fn not_implemented(what: &str) -> Self {
        Self::new(501, "NotImplemented", format!("A functionality that is not implemented here: {what}"))
    }

    /// The error as the SDK integration reports it. `request_id` makes an id when the service gave none.
    pub(crate) fn for_task(self, request_id: impl FnOnce() -> String) -> FunctionError {
        if self.status == 0 {
            let is_whole = self.code.starts_with("States.");
            let error_type = if is_whole { self.code } else { format!("S3.{}", self.code) };
            return FunctionError::new(error_type, self.message);
        }
        let name = match MODELLED.contains(&self.code.as_str()) {
            true => format!("{}Exception", self.code),
            false => "S3Exception".to_owned(),
        };
        // A response to HEAD has no message; the SDK then prints `null`.
        let message = if self.message.is_empty() { "null" } else { self.message.as_str() };
        let id = self.request_id.unwrap_or_else(request_id);
        let extended = self.extended_request_id.map(|id| format!(", Extended Request ID: {id}"));
        let (status, extended) = (self.status, extended.unwrap_or_default());
        FunctionError::new(
            format!("S3.{name}"),
            format!(
                "{message} (Service: S3, Status Code: {status}, Request ID: {id}{extended}) (SDK Attempt Count: 1)"
            ),
        )
    }

    /// As the cause of a map that cannot read its items or write its results.
    pub(crate) fn for_map(self) -> String {
        let Some(id) = self.request_id else { return self.message };
        let extended = self.extended_request_id.unwrap_or_default();
        format!(
            "{} (Service: Amazon S3; Status Code: {}; Error Code: {}; Request ID: {id}; S3 Extended Request ID: \
             {extended}; Proxy: null)",
            self.message, self.status, self.code
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_as_the_sdk_tells_them() {
        let told = |error: ObjectError| {
            let told = error.for_task(|| "MADE".to_owned());
            (told.error_type, told.cause)
        };
        let (name, cause) = told(ObjectError::no_such_key());
        assert_eq!(name, "S3.NoSuchKeyException");
        assert_eq!(
            cause,
            "The specified key does not exist. (Service: S3, Status Code: 404, Request ID: MADE) (SDK Attempt Count: 1)"
        );
        let denied = ObjectError {
            request_id: Some("R".into()),
            extended_request_id: Some("E=".into()),
            ..ObjectError::new(403, "AccessDenied", "Access Denied")
        };
        assert_eq!(
            denied.clone().for_map(),
            "Access Denied (Service: Amazon S3; Status Code: 403; Error Code: AccessDenied; Request ID: R; S3 Extended \
             Request ID: E=; Proxy: null)"
        );
        let (name, cause) = told(denied);
        assert_eq!(name, "S3.S3Exception");
        assert_eq!(
            cause,
            "Access Denied (Service: S3, Status Code: 403, Request ID: R, Extended Request ID: E=) (SDK Attempt \
             Count: 1)"
        );
        assert!(told(ObjectError::new(404, "NoSuchBucket", "")).1.starts_with("null (Service: S3,"));
        assert_eq!(told(ObjectError::unreachable("refused")).0, "S3.SdkClientException");
        assert_eq!(told(ObjectError::too_large()).0, "States.DataLimitExceeded");
    }
}
