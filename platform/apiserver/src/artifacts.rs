//! `/artifacts`: components, and inputs and outputs of jobs, by digest.
//!
//! | request | response |
//! |---|---|
//! | `PUT /artifacts/sha256:<hex>` | 201 new, 200 existed; 413 too large, 422 wrong digest or no component |
//! | … with `content-type: application/octet-stream` | the same for any content, which is not checked |
//! | `POST /artifacts/sha256:<hex>` | 200 if it exists: no upload is needed, and its age is that of a new upload |
//! | `GET /artifacts` | a list: digest, size, time of the last upload, type (`component`, `data`, `jobReport`) |
//! | `GET /artifacts/sha256:<hex>` | the content |
//! | `DELETE /artifacts/sha256:<hex>` | 409 while a function, revision, workflow, job, pod or open execution uses it |
//! | … with `if-unmodified-since: <HTTP date>` | 409 also if it was uploaded, or kept by POST, after that date |

use std::{
    collections::HashMap,
    fs::File,
    io::Read as _,
    path::Path,
    sync::{Arc, Weak},
    time::Duration,
};

use axum::{
    body::{Body, BodyDataStream},
    response::Response,
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use jiff::{SignedDuration, Timestamp, fmt::rfc2822::DateTimeParser};
use mayfly_api::{
    Digest,
    job_io::{OUTPUTS_BYTES, is_outputs},
};
use mayfly_artifacts::{Removal, UploadError};
use mayfly_store::{ListError, ListOptions, Range};
use memchr::memmem::Finder;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::io::ReaderStream;

use crate::{render::json_value, server::ServerState, status::ApiError};

/// Kinds whose objects can reference an artifact.
const REFERENCED_BY: [&str; 5] =
    ["functions.mayfly.dev", "revisions.mayfly.dev", "workflows.mayfly.dev", "jobs.batch", "pods"];

/// The type of an upload that need not be a component.
const ANY_CONTENT: &str = "application/octet-stream";

/// The first bytes of a component; a core module has another layer number (WebAssembly's Component Model,
/// `design/mvp/Binary.md`).
const COMPONENT_MAGIC: &[u8] = b"\0asm\x0d\0\x01\0";

/// The longest time for which the rest of a refused upload is read.
pub(crate) const DISCARD_TIME_MAX: Duration = Duration::from_secs(5);

/// The maximum number of concurrent uploads; further ones wait.
const UPLOADS_MAX: usize = 64;

/// Serialises uploads of one digest: a second one waits until the first is checked, and kept or removed.
pub(crate) struct Uploads {
    by_digest: Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>,
    turns: Semaphore,
}

impl Default for Uploads {
    fn default() -> Self {
        Self { by_digest: Mutex::default(), turns: Semaphore::new(UPLOADS_MAX) }
    }
}

impl Uploads {
    fn of(&self, digest: &Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut uploads = self.by_digest.lock();
        uploads.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = uploads.get(digest).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        uploads.insert(*digest, Arc::downgrade(&lock));
        lock
    }
}

impl ServerState {
    pub(crate) async fn artifact_request(
        &self,
        method: &Method,
        digest: Option<&str>,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Response, ApiError> {
        let Some(text) = digest else {
            return match *method {
                Method::GET => self.list_artifacts().await,
                _ => Err(ApiError::method_not_allowed()),
            };
        };
        let digest: Digest = text.parse().map_err(|error: mayfly_api::InvalidDigest| {
            ApiError::bad_request(format!(
                "{error}; an artifact's address is /artifacts/sha256:<64 hex digits>"
            ))
        })?;
        match *method {
            Method::PUT => {
                let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
                self.upload_artifact(digest, kind == Some(ANY_CONTENT), body).await
            }
            Method::POST => self.renew_artifact(&digest).await,
            Method::GET => self.read_artifact(&digest, true).await,
            Method::HEAD => self.read_artifact(&digest, false).await,
            Method::DELETE => self.remove_artifact(&digest, unmodified_since(headers)?).await,
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    async fn upload_artifact(&self, digest: Digest, any: bool, body: Body) -> Result<Response, ApiError> {
        let lock = self.uploads.of(&digest);
        let limit = self.config.artifact_bytes_max;
        let mut content = body.into_data_stream();
        let upload = async {
            let alone = lock.lock().await;
            // The semaphore is never closed.
            let turn = self.uploads.turns.acquire().await.ok();
            let content = with_stall_timeout(&mut content, self.config.upload_stall_timeout);
            (self.artifacts.upload(Some(digest), limit, content).await, alone, turn)
        };
        let (uploaded, alone, turn) =
            tokio::time::timeout(self.config.upload_timeout, upload).await.map_err(|_| {
                let seconds = self.config.upload_timeout.as_secs();
                ApiError::timeout(format!(
                    "the upload took longer than {seconds} s: retry with a faster connection or fewer uploads"
                ))
            })?;
        drop(turn);
        let stored = match uploaded {
            Ok(stored) => stored,
            Err(error) => {
                drop(alone);
                let _ = tokio::time::timeout(DISCARD_TIME_MAX, discard(&mut content, limit)).await;
                return Err(upload_error(error));
            }
        };
        // Read from the same clock as the files' modification times, with which it is compared.
        let stored_at = Timestamp::now();
        let about = if any { Value::Null } else { self.inspect(&digest, stored.existed, stored_at).await? };
        let code = if stored.existed { StatusCode::OK } else { StatusCode::CREATED };
        Ok(json_value(
            code,
            &json!({"digest": digest.to_string(), "bytes": stored.bytes, "component": about}),
        ))
    }

    /// Inspects an uploaded file and removes it if it is not a component. A file that `existed` before the upload, or
    /// that was reported as present after `stored_at`, is kept: it may be the input of a job.
    async fn inspect(&self, digest: &Digest, existed: bool, stored_at: Timestamp) -> Result<Value, ApiError> {
        let Some(path) = self.artifacts.path(digest) else { return Err(no_artifact(digest)) };
        let inspector = Arc::clone(&self.inspector);
        match tokio::task::spawn_blocking(move || inspector(&path)).await.map_err(ApiError::internal)? {
            Ok(about) => Ok(about),
            Err(why) => {
                // A referenced file stays, with the type under which it is referenced.
                if !existed
                    && let Err(error) = self.remove_unreferenced(digest, stored_at).await
                    && error.code >= 500
                {
                    return Err(error);
                }
                Err(ApiError::unprocessable(why))
            }
        }
    }

    async fn list_artifacts(&self) -> Result<Response, ApiError> {
        let list = self.artifacts.list().await.map_err(ApiError::internal)?;
        let artifacts = self.artifacts.clone();
        let look = move || -> Vec<Value> {
            let described = list.iter().map(|artifact| {
                json!({
                    "digest": artifact.digest.to_string(),
                    "bytes": artifact.bytes,
                    "created": crate::meta::timestamp(artifact.created),
                    "type": artifacts.path(&artifact.digest).map_or("data", |path| type_of(&path)),
                })
            });
            described.collect()
        };
        let items = tokio::task::spawn_blocking(look).await.map_err(ApiError::internal)?;
        Ok(json_value(
            StatusCode::OK,
            &json!({"kind": "ArtifactList", "apiVersion": "mayfly.dev/v1", "items": items}),
        ))
    }

    /// Reads an artifact. `content`: whether the response has the content, or only the headers about it.
    async fn read_artifact(&self, digest: &Digest, content: bool) -> Result<Response, ApiError> {
        let file = match self.artifacts.open_content(digest).await {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(no_artifact(digest)),
            Err(error) => return Err(unreadable(&error)),
        };
        let bytes = file.metadata().await.map_err(|error| unreadable(&error))?.len();
        let path = self.artifacts.path(digest).ok_or_else(|| no_artifact(digest))?;
        let kind = tokio::task::spawn_blocking(move || type_of(&path)).await.map_err(ApiError::internal)?;
        let body = if content { Body::from_stream(ReaderStream::new(file)) } else { Body::empty() };
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        let kind = match kind {
            "component" => "application/wasm",
            "jobReport" => "application/json",
            _ => ANY_CONTENT,
        };
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
        Ok(response)
    }

    async fn renew_artifact(&self, digest: &Digest) -> Result<Response, ApiError> {
        match self.artifacts.renew(digest).await.map_err(ApiError::internal)? {
            true => Ok(json_value(StatusCode::OK, &json!({"digest": digest.to_string()}))),
            false => Err(no_artifact(digest)),
        }
    }

    /// Removes an artifact. `until`: only if it was not uploaded after this time.
    async fn remove_artifact(&self, digest: &Digest, until: Option<Timestamp>) -> Result<Response, ApiError> {
        self.remove_unreferenced(digest, until.unwrap_or(Timestamp::MAX)).await?;
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"});
        Ok(json_value(StatusCode::OK, &status))
    }

    /// The first check refuses an artifact that is in use. The second one runs after the artifact was made
    /// unavailable and detects references that were written in between.
    async fn remove_unreferenced(&self, digest: &Digest, until: Timestamp) -> Result<(), ApiError> {
        self.require_unreferenced(digest).await?;
        let aside = match self.artifacts.quarantine(digest, until).await.map_err(ApiError::internal)? {
            Removal::Quarantined(aside) => aside,
            Removal::Missing => return Err(no_artifact(digest)),
            Removal::Newer => return Err(artifact_conflict(digest, "was uploaded again")),
        };
        match self.require_unreferenced(digest).await {
            Ok(()) => aside.remove().await.map_err(ApiError::internal),
            Err(error) => {
                aside.restore().await;
                Err(error)
            }
        }
    }

    async fn require_unreferenced(&self, digest: &Digest) -> Result<(), ApiError> {
        match self.referenced_by(digest).await? {
            Some(user) => Err(artifact_conflict(digest, &format!("is in use by {user}"))),
            None => Ok(()),
        }
    }

    /// The object that references the artifact, with the remedy. All objects that can are searched, beside other
    /// requests: an index would cost every write, and removals are rare.
    async fn referenced_by(&self, digest: &Digest) -> Result<Option<String>, ApiError> {
        let (store, text) = (self.store.clone(), digest.to_string());
        let look = move || -> Result<Option<String>, ListError> {
            let finder = Finder::new(&text);
            for resource in REFERENCED_BY {
                let list = store.list(&Range::resource(resource), &ListOptions::default())?;
                if let Some(entry) = list.entries.iter().find(|entry| finder.find(&entry.value).is_some()) {
                    return Ok(Some(format!("{}: delete that first", entry.key)));
                }
            }
            Ok(None)
        };
        let named = tokio::task::spawn_blocking(look).await.map_err(ApiError::internal)?;
        match named.map_err(ApiError::internal)? {
            Some(object) => Ok(Some(object)),
            None => Ok(self.views.user_of(digest).await?),
        }
    }
}

/// Wraps the body so that it fails when no data arrives for `stall_timeout`: other uploads of the same digest wait
/// for this one.
fn with_stall_timeout(
    content: &mut BodyDataStream,
    stall_timeout: Duration,
) -> impl Stream<Item = Result<Bytes, axum::BoxError>> {
    stream::unfold(content, move |content| async move {
        let chunk = match tokio::time::timeout(stall_timeout, content.next()).await {
            Ok(chunk) => chunk?.map_err(axum::BoxError::from),
            Err(_) => Err(format!("no data of the upload arrived for {} s", stall_timeout.as_secs()).into()),
        };
        Some((chunk, content))
    })
}

/// Reads the rest of a refused body. Most clients read the response after they have sent the whole body, and would
/// otherwise report a broken connection instead of the refusal.
pub(crate) async fn discard(content: &mut BodyDataStream, limit_bytes: u64) {
    let mut room = limit_bytes;
    while let Some(Ok(chunk)) = content.next().await {
        let Some(rest) = room.checked_sub(chunk.len() as u64) else { return };
        room = rest;
    }
}

/// The type of a file, from its first bytes. A file that cannot be read is `data`; reading its content reports the
/// error.
fn type_of(path: &Path) -> &'static str {
    let mut beginning = Vec::with_capacity(OUTPUTS_BYTES);
    let read = File::open(path).and_then(|file| file.take(OUTPUTS_BYTES as u64).read_to_end(&mut beginning));
    match read {
        Ok(_) if beginning.starts_with(COMPONENT_MAGIC) => "component",
        Ok(_) if is_outputs(&beginning) => "jobReport",
        _ => "data",
    }
}

/// The end of the second that `if-unmodified-since` names. The list shows upload times in whole seconds, too.
fn unmodified_since(headers: &HeaderMap) -> Result<Option<Timestamp>, ApiError> {
    let Some(value) = headers.get(header::IF_UNMODIFIED_SINCE) else { return Ok(None) };
    let since = DateTimeParser::new().parse_timestamp(value.as_bytes());
    let since = since.map_err(|error| ApiError::bad_request(format!("if-unmodified-since: {error}")))?;
    Ok(Some(since.saturating_add(SignedDuration::from_nanos(999_999_999)).unwrap_or(Timestamp::MAX)))
}

fn no_artifact(digest: &Digest) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "NotFound", format!("artifacts {:?} not found", digest.to_string()))
}

fn artifact_conflict(digest: &Digest, why: &str) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, "Conflict", format!("artifact {digest} {why}"))
}

fn upload_error(error: UploadError) -> ApiError {
    match error {
        UploadError::DigestMismatch { .. } => ApiError::unprocessable(error.to_string()),
        UploadError::TooLarge { .. } => {
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", error.to_string())
        }
        UploadError::Full => ApiError::disk_full(error),
        UploadError::Stream(_) => ApiError::bad_request(error.to_string()),
        UploadError::Io(cause) => unreadable(&cause),
        UploadError::Origin(_) => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", error.to_string())
        }
    }
}

/// An I/O error of the server. Its text can contain a path of the server, and is logged only.
fn unreadable(cause: &std::io::Error) -> ApiError {
    tracing::error!(%cause, "the artifact store failed");
    ApiError::internal(format!("the server's artifact store failed ({}); see the server's log", cause.kind()))
}
