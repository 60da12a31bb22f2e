//! Objects in folders: what distributed maps read their items from, and write their results to.
//!
//! One bucket is no folder: [`ARTIFACTS`] is the artifact store, read-only, its keys the digests that `mayfly
//! artifact push` prints.

use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use futures::future::BoxFuture;
use mayfly_api::Digest;
use mayfly_artifacts::Artifacts;
use mayfly_workflows_engine::engine::{ObjectEntry, Objects};

/// Buckets as folders, their objects as files: what a map reads its items from, and writes its results to.
pub(super) struct Buckets {
    pub(super) folder: PathBuf,
    pub(super) artifacts: Artifacts,
}

/// The bucket of the artifact store.
const ARTIFACTS: &str = "artifacts";
const NO_SUCH_KEY: &str = "The specified key does not exist.";

impl Buckets {
    /// Where an object lies; a key never leads out of its bucket.
    fn path(&self, bucket: &str, key: &str) -> Result<PathBuf, String> {
        let plain = |text: &str| {
            let mut parts = Path::new(text).components();
            !text.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
        };
        if !plain(bucket) || bucket.contains('/') {
            return Err(format!("The specified bucket is not valid: {bucket:?}"));
        }
        if !plain(key) {
            return Err(format!("The specified key is not valid: {key:?}"));
        }
        if bucket == ARTIFACTS {
            let digest: Digest = key.parse().map_err(|error| format!("{NO_SUCH_KEY} ({error})"))?;
            return self.artifacts.path(&digest).ok_or_else(|| NO_SUCH_KEY.to_owned());
        }
        Ok(self.folder.join(bucket).join(key))
    }

    async fn list_artifacts(&self, prefix: String) -> Result<Vec<ObjectEntry>, String> {
        let listed = self.artifacts.list().await.map_err(|error| error.to_string())?;
        let entries = listed.into_iter().map(|artifact| {
            let key = artifact.digest.to_string();
            ObjectEntry {
                etag: format!("\"{}\"", artifact.digest.hex()),
                key,
                last_modified: artifact.created,
                size: artifact.bytes,
            }
        });
        Ok(entries.filter(|entry| entry.key.starts_with(&prefix)).collect())
    }
}

impl Objects for Buckets {
    fn get(&self, bucket: &str, key: &str) -> BoxFuture<'_, Result<Bytes, String>> {
        let path = self.path(bucket, key);
        Box::pin(async move {
            let path = path?;
            let content = tokio::fs::read(&path).await.map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => NO_SUCH_KEY.to_owned(),
                _ => format!("cannot read {}: {error}", path.display()),
            })?;
            Ok(content.into())
        })
    }

    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), String>> {
        let path = match bucket {
            ARTIFACTS => Err("the bucket artifacts is read-only: it is the artifact store".to_owned()),
            _ => self.path(bucket, key),
        };
        Box::pin(async move {
            let path = path?;
            let write = move || {
                let folder = path.parent().unwrap_or(Path::new("."));
                std::fs::create_dir_all(folder)?;
                // A reader sees the old object or the new one.
                let mut file = tempfile::NamedTempFile::new_in(folder)?;
                std::io::Write::write_all(&mut file, &body)?;
                file.as_file().sync_all()?;
                file.persist(&path).map(drop).map_err(|error| error.error)
            };
            let written = tokio::task::spawn_blocking(write).await.map_err(|error| error.to_string())?;
            written.map_err(|error| format!("cannot write: {error}"))
        })
    }

    fn list(&self, bucket: &str, prefix: &str) -> BoxFuture<'_, Result<Vec<ObjectEntry>, String>> {
        if bucket == ARTIFACTS {
            return Box::pin(self.list_artifacts(prefix.to_owned()));
        }
        let (root, prefix) = (self.path(bucket, "-"), prefix.to_owned());
        Box::pin(async move {
            let mut root = root?;
            root.pop();
            let walk = move || {
                let mut entries = Vec::new();
                gather(&root, &root, &prefix, &mut entries)?;
                entries.sort_by(|a, b| a.key.cmp(&b.key));
                Ok::<_, std::io::Error>(entries)
            };
            let listed = tokio::task::spawn_blocking(walk).await.map_err(|error| error.to_string())?;
            listed.map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => "The specified bucket does not exist".to_owned(),
                _ => error.to_string(),
            })
        })
    }
}

fn gather(root: &Path, folder: &Path, prefix: &str, entries: &mut Vec<ObjectEntry>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        if about.is_dir() {
            gather(root, &entry.path(), prefix, entries)?;
            continue;
        }
        let path = entry.path();
        let key = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if !key.starts_with(prefix) {
            continue;
        }
        let last_modified = jiff::Timestamp::try_from(about.modified()?).map_err(std::io::Error::other)?;
        // S3's entity tags promise nothing but to change with the content.
        let etag = format!("\"{:x}-{:x}\"", last_modified.as_nanosecond(), about.len());
        entries.push(ObjectEntry { key, etag, last_modified, size: about.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn objects_are_kept_in_their_buckets() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let buckets = Buckets { folder: folder.path().join("buckets"), artifacts };
        assert!(buckets.get("b", "a/1.json").await.unwrap_err().contains("does not exist"));
        buckets.put("b", "a/1.json", "[1]".into()).await.unwrap();
        buckets.put("b", "c.json", "[]".into()).await.unwrap();
        assert_eq!(buckets.get("b", "a/1.json").await.unwrap(), "[1]");
        let keys = |entries: Vec<ObjectEntry>| entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>();
        assert_eq!(keys(buckets.list("b", "").await.unwrap()), ["a/1.json", "c.json"]);
        assert_eq!(keys(buckets.list("b", "a/").await.unwrap()), ["a/1.json"]);
        assert!(buckets.list("none", "").await.is_err());
        for (bucket, key) in
            [("..", "x"), ("b", "../x"), ("b", "/etc/passwd"), ("a/b", "x"), ("", "x"), ("b", "")]
        {
            assert!(buckets.put(bucket, key, Bytes::new()).await.is_err(), "{bucket} {key}");
        }
    }

    #[tokio::test]
    async fn the_artifact_store_is_a_bucket() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let content = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"[1, 2]"))]);
        let digest = artifacts.upload(None, 100, content).await.unwrap().digest.to_string();
        let buckets = Buckets { folder: folder.path().join("buckets"), artifacts };
        assert_eq!(buckets.get("artifacts", &digest).await.unwrap(), "[1, 2]");
        let listed = buckets.list("artifacts", "sha256:").await.unwrap();
        assert_eq!((listed.len(), &*listed[0].key, listed[0].size), (1, &*digest, 6));
        assert!(buckets.get("artifacts", "sha256:nonsense").await.unwrap_err().starts_with(NO_SUCH_KEY));
        let other = Digest::of(b"other").to_string();
        assert_eq!(buckets.get("artifacts", &other).await.unwrap_err(), NO_SUCH_KEY);
        assert!(buckets.put("artifacts", &digest, Bytes::new()).await.unwrap_err().contains("read-only"));
    }
}
