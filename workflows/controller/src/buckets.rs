//! Objects in folders: the source of items and the target of results of distributed maps, and the buckets of tasks of
//! `aws-sdk:s3` if no endpoint is given for S3.
//!
//! One bucket is no folder: [`ARTIFACTS`] is the artifact store, read-only; its keys are the digests that `mayfly
//! artifact push` prints.
//!
//! [`files`] reads and writes files, [`operations`] implements S3's operations. A folder stores the content of objects
//! alone: no versions, tags, metadata or content types.

mod files;
mod operations;

use std::{io::Read, path::PathBuf};

use bytes::{Buf as _, Bytes};
use futures::{StreamExt as _, TryStreamExt as _, future::BoxFuture};
use mayfly_api::Digest;
use mayfly_artifacts::Artifacts;
use mayfly_workflows_engine::engine::{
    ObjectBody, ObjectCall, ObjectEntry, ObjectError, ObjectPage, ObjectStore,
};
use tokio_util::io::ReaderStream;

/// Buckets as folders, their objects as files.
#[derive(Clone)]
pub struct Buckets {
    folder: PathBuf,
    artifacts: Artifacts,
}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buckets").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// The bucket of the artifact store.
const ARTIFACTS: &str = "artifacts";
/// The folder of incomplete files; no bucket's name begins with a dot.
const UNFINISHED: &str = ".unfinished";
/// Bytes of a file that are read at a time.
const READ_BYTES: usize = 64 << 10;

impl Buckets {
    pub fn new(folder: PathBuf, artifacts: Artifacts) -> Self {
        Self { folder, artifacts }
    }

    /// A bucket's folder.
    fn bucket(&self, bucket: &str) -> Result<PathBuf, ObjectError> {
        if bucket.is_empty() || bucket.starts_with('.') || bucket.contains(['/', '\0']) {
            return Err(invalid(400, "InvalidBucketName", "bucket", bucket));
        }
        Ok(self.folder.join(bucket))
    }

    /// The path of an object. A key cannot lead out of its bucket, and two keys have different paths.
    fn path(&self, bucket: &str, key: &str) -> Result<PathBuf, ObjectError> {
        let folder = self.bucket(bucket)?;
        let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
        if !key.split('/').all(plain) {
            return Err(invalid(400, "InvalidArgument", "key", key));
        }
        if bucket == ARTIFACTS {
            let digest: Digest = key.parse().map_err(|_| ObjectError::no_such_key())?;
            return self.artifacts.path(&digest).ok_or_else(ObjectError::no_such_key);
        }
        Ok(folder.join(key))
    }

    /// The path of an object to write.
    fn writable(&self, bucket: &str, key: &str) -> Result<PathBuf, ObjectError> {
        not_artifacts(bucket)?;
        self.path(bucket, key)
    }

    /// A missing file is a missing key, or the whole bucket is missing.
    fn missing(&self, bucket: &str) -> ObjectError {
        let there = bucket == ARTIFACTS || self.bucket(bucket).is_ok_and(|folder| folder.is_dir());
        if there { ObjectError::no_such_key() } else { ObjectError::no_such_bucket() }
    }

    /// The metadata of an object.
    fn about(&self, bucket: &str, key: &str) -> Result<ObjectEntry, ObjectError> {
        let path = self.path(bucket, key)?;
        let found =
            files::entry(&path, key.to_owned()).map_err(failed)?.ok_or_else(|| self.missing(bucket))?;
        Ok(match bucket == ARTIFACTS {
            true => ObjectEntry { etag: digest_tag(key), ..found },
            false => found,
        })
    }

    /// All objects below a prefix, by key.
    async fn all(&self, bucket: &str, prefix: &str) -> Result<Vec<ObjectEntry>, ObjectError> {
        if bucket == ARTIFACTS {
            let listed = self.artifacts.list().await.map_err(failed)?;
            let entries = listed.into_iter().map(|artifact| {
                let key = artifact.digest.to_string();
                ObjectEntry {
                    etag: digest_tag(&key),
                    key,
                    last_modified: artifact.created,
                    size: artifact.bytes,
                    storage_class: files::STORAGE_CLASS.to_owned(),
                }
            });
            let mut entries: Vec<_> = entries.filter(|entry| entry.key.starts_with(prefix)).collect();
            entries.sort_by(|a, b| a.key.cmp(&b.key));
            return Ok(entries);
        }
        let (root, prefix) = (self.bucket(bucket)?, prefix.to_owned());
        let listed = blocking(move || files::list(&root, &prefix).map_err(failed)).await?;
        listed.ok_or_else(ObjectError::no_such_bucket)
    }

    /// Writes an object; its entity tag.
    async fn write(
        &self,
        bucket: &str,
        key: &str,
        body: impl Read + Send + 'static,
    ) -> Result<String, ObjectError> {
        let (path, key) = (self.writable(bucket, key)?, key.to_owned());
        let unfinished = self.folder.join(UNFINISHED);
        blocking(move || {
            files::write(&unfinished, &path, body).map_err(failed)?;
            let written = files::entry(&path, key).map_err(failed)?;
            Ok(written.map(|entry| entry.etag).unwrap_or_default())
        })
        .await
    }
}

fn digest_tag(key: &str) -> String {
    format!("\"{}\"", key.rsplit(':').next().unwrap_or(key))
}

fn invalid(status: u16, code: &str, what: &str, given: &str) -> ObjectError {
    ObjectError::new(status, code, format!("The specified {what} is not valid: {given:?}"))
}

fn not_artifacts(bucket: &str) -> Result<(), ObjectError> {
    let message = "the bucket artifacts is read-only: it is the artifact store";
    if bucket == ARTIFACTS { Err(ObjectError::new(403, "AccessDenied", message)) } else { Ok(()) }
}

/// The file system would not.
fn failed(error: impl std::fmt::Display) -> ObjectError {
    ObjectError::new(500, "InternalError", format!("The bucket's folder cannot be used: {error}"))
}

/// Work on files, beside the runtime's own threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ObjectError> + Send + 'static,
) -> Result<T, ObjectError> {
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}

impl ObjectStore for Buckets {
    fn keeps(&self, bucket: &str) -> bool {
        bucket == ARTIFACTS
    }

    fn get(
        &self,
        bucket: &str,
        key: &str,
        version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        let wanted = match version {
            None | Some("null") => self.path(bucket, key),
            Some(version) => Err(invalid(404, "NoSuchVersion", "version", version)),
        };
        let bucket = bucket.to_owned();
        Box::pin(async move {
            let path = wanted?;
            let is_file = tokio::fs::metadata(&path).await.is_ok_and(|about| about.is_file());
            if !is_file {
                return Err(self.missing(&bucket));
            }
            let file = tokio::fs::File::open(&path).await.map_err(failed)?;
            Ok(ReaderStream::with_capacity(file, READ_BYTES).map_err(failed).boxed())
        })
    }

    /// Creates a missing bucket, so that results can be written to it.
    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        let (bucket, key) = (bucket.to_owned(), key.to_owned());
        Box::pin(async move { self.write(&bucket, &key, body.reader()).await.map(drop) })
    }

    /// All that there is, as one page.
    fn list(
        &self,
        bucket: &str,
        prefix: &str,
        _from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        let (bucket, prefix) = (bucket.to_owned(), prefix.to_owned());
        Box::pin(async move { Ok(ObjectPage { entries: self.all(&bucket, &prefix).await?, next: None }) })
    }

    fn call(&self, call: ObjectCall) -> BoxFuture<'_, Result<serde_json::Value, ObjectError>> {
        Box::pin(operations::carry_out(self, call))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(buckets: &Buckets, bucket: &str, key: &str) -> Result<String, ObjectError> {
        let parts: Vec<Bytes> = buckets.get(bucket, key, None).await?.try_collect().await?;
        Ok(String::from_utf8(parts.concat()).unwrap())
    }

    async fn keys(buckets: &Buckets, bucket: &str, prefix: &str) -> Result<Vec<String>, ObjectError> {
        let page = buckets.list(bucket, prefix, None).await?;
        Ok(page.entries.into_iter().map(|entry| entry.key).collect())
    }

    #[tokio::test]
    async fn objects_are_kept_in_their_buckets() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let buckets = Buckets::new(folder.path().join("buckets"), artifacts);
        assert_eq!(read(&buckets, "b", "a/1.json").await, Err(ObjectError::no_such_bucket()));
        buckets.put("b", "a/1.json", "[1]".into()).await.unwrap();
        buckets.put("b", "a-b", "x".into()).await.unwrap();
        buckets.put("b", "c.json", "[]".into()).await.unwrap();
        assert_eq!(read(&buckets, "b", "a/1.json").await.unwrap(), "[1]");
        assert_eq!(keys(&buckets, "b", "").await.unwrap(), ["a-b", "a/1.json", "c.json"]);
        assert_eq!(keys(&buckets, "b", "a/").await.unwrap(), ["a/1.json"]);
        assert_eq!(keys(&buckets, "none", "").await, Err(ObjectError::no_such_bucket()));
        for key in ["a", "a/2.json"] {
            assert_eq!(read(&buckets, "b", key).await, Err(ObjectError::no_such_key()), "{key}");
        }
        assert_eq!(buckets.get("b", "c.json", Some("v1")).await.err().unwrap().code, "NoSuchVersion");
        for (bucket, key) in [
            ("..", "x"),
            (".unfinished", "x"),
            ("b", "../x"),
            ("b", "a/../x"),
            ("b", "a//1.json"),
            ("b", "/etc/passwd"),
            ("a/b", "x"),
            ("", "x"),
            ("b", ""),
            ("b", "a\0b"),
        ] {
            let refused = buckets.put(bucket, key, Bytes::new()).await.unwrap_err();
            assert_eq!(refused.status, 400, "{bucket} {key}");
        }
    }

    #[tokio::test]
    async fn the_artifact_store_is_a_bucket() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let content = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"[1, 2]"))]);
        let digest = artifacts.upload(None, 100, content).await.unwrap().digest.to_string();
        let buckets = Buckets::new(folder.path().join("buckets"), artifacts);
        assert_eq!(read(&buckets, "artifacts", &digest).await.unwrap(), "[1, 2]");
        let listed = buckets.list("artifacts", "sha256:", None).await.unwrap().entries;
        assert_eq!((listed.len(), &*listed[0].key, listed[0].size), (1, &*digest, 6));
        let about = buckets.about("artifacts", &digest).unwrap();
        assert_eq!((&about.etag, about.size), (&listed[0].etag, 6));
        let other = Digest::of(b"other").to_string();
        for key in ["sha256:nonsense", &other] {
            assert_eq!(read(&buckets, "artifacts", key).await, Err(ObjectError::no_such_key()));
        }
        let refused = buckets.put("artifacts", &digest, Bytes::new()).await.unwrap_err();
        assert!(refused.message.contains("read-only"), "{refused:?}");
    }
}
