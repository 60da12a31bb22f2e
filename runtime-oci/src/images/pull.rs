//! Pulls images from registries into the content store.
//!
//! ```text
//! resolve (a document: size-limited, its digest computed) ─▶ this platform's manifest ─▶ missing config and layers, a
//! few concurrently ─▶ documents, with labels that protect their references ─▶ image record ─▶ unpack
//! ```
//! An interrupted layer continues where it stopped, also in a later pull: containerd stores the received part under a
//! name derived from the digest. containerd verifies the digest of the complete content, which is removed on a
//! mismatch.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use containerd_client::{
    services::v1::{
        AbortRequest, GetImageRequest, InfoRequest, StatusRequest, WriteAction, WriteContentRequest,
    },
    tonic::{Code, Status},
    types::Descriptor,
};
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use mayfly_distribution::{
    Keychain, PullError, Reference, RegistryClient, RemoteDocument, RemoteImage, is_index,
};
use mayfly_runtime::{ImageRecord, PullSecret, RuntimeError};
use oci_spec::image::{ImageIndex, ImageManifest};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    UnpackedImages,
    content::{ImageOrigin, Lease, label, parse, set_image, variant},
};
use crate::client::{Containerd, failed, leased, or_absent, request};

/// The maximum number of concurrent pulls; further ones wait. (Upstream pulls one, or unlimited; its users configure
/// 10.)
const PULLS_MAX: usize = 10;
/// The maximum number of concurrently fetched layers of one image (containerd's default).
const LAYERS_MAX: usize = 3;
/// The maximum number of continuations of an interrupted layer, and the pause before each, multiplied by its number.
const CONTINUATIONS_MAX: u32 = 5;
const CONTINUE_AFTER: Duration = Duration::from_millis(500);
/// The number of pieces of a layer that are queued for containerd; a piece has some ten KiB.
const PIECES_AHEAD: usize = 16;
/// The maximum size of a piece in one message, in bytes; containerd accepts at most 16 MiB.
const PIECE_BYTES_MAX: usize = 4 << 20;
/// The maximum number of layers of one image: overlayfs mounts at most 500, and containerd's snapshots need some of
/// these.
const LAYERS_OF_IMAGE_MAX: usize = 256;

/// Serialises pulls of the same image or blob, and limits the number of concurrent pulls.
pub(super) struct Pulls {
    turns: Semaphore,
    locks: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
}

impl Default for Pulls {
    fn default() -> Self {
        Self { turns: Semaphore::new(PULLS_MAX), locks: Mutex::default() }
    }
}

impl Pulls {
    /// The lock of an image's name, or of a blob's digest.
    fn lock(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock();
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(name).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(name.to_owned(), Arc::downgrade(&lock));
        lock
    }
}

/// A blob that an image needs.
#[derive(Clone, Debug)]
struct RequiredBlob {
    digest: String,
    bytes: u64,
}

impl UnpackedImages {
    /// Fetches the missing parts of an image, and unpacks it.
    pub(crate) async fn pull(
        &self,
        client: &Containerd,
        registries: &RegistryClient,
        reference: &Reference,
        secrets: &[PullSecret],
    ) -> Result<ImageRecord, RuntimeError> {
        let name = reference.whole();
        let lock = self.pulls.lock(&name);
        let _alone = lock.lock().await;
        // The semaphore is never closed.
        let _turn = self.pulls.turns.acquire().await.ok();
        let failed_to = |why: &dyn std::fmt::Display| {
            RuntimeError::ImageMissing(format!("failed to pull and unpack image {name:?}: {why}"))
        };
        let keychain = keychain(secrets);
        let remote = registries
            .open(reference, &keychain)
            .await
            .map_err(|error| failed_to(&format!("failed to resolve reference {name:?}: {error}")))?;
        let target = Descriptor {
            media_type: remote.target.media_type.clone(),
            digest: remote.target.digest.clone(),
            size: i64::try_from(remote.target.bytes.len()).unwrap_or(i64::MAX),
            ..Descriptor::default()
        };
        let lease = Lease::create(client).await?;
        if !is_current(client, &name, &target).await? {
            self.fetch(client, &remote, &lease).await.map_err(|error| failed_to(&error))?;
            set_image(client, &name, target, ImageOrigin::Registry).await?;
        }
        let unpacked = self.find(client, &name).await.map_err(|error| failed_to(&error))?;
        lease.end().await;
        let record = self.record(client, &name).await?.filter(|_| unpacked.is_some());
        record.ok_or_else(|| failed_to(&"it was removed meanwhile"))
    }

    async fn fetch(
        &self,
        client: &Containerd,
        remote: &RemoteImage,
        lease: &Lease,
    ) -> Result<(), RuntimeError> {
        let mut documents = vec![remote.target.clone()];
        if is_index(&remote.target.media_type) {
            let index: ImageIndex = parse(&remote.target.bytes, "index", &remote.target.digest)?;
            let chosen = remote.manifest(&variant(&index)?).await.map_err(missing)?;
            documents.push(chosen);
        }
        let last = &documents[documents.len() - 1];
        let manifest: ImageManifest = parse(&last.bytes, "manifest", &last.digest)?;
        if manifest.layers().len() > LAYERS_OF_IMAGE_MAX {
            let count = manifest.layers().len();
            return Err(RuntimeError::Invalid(format!(
                "the image has {count} layers, more than the {LAYERS_OF_IMAGE_MAX} that can be mounted"
            )));
        }
        let needed = std::iter::once(manifest.config())
            .chain(manifest.layers())
            .map(|part| RequiredBlob { digest: part.digest().to_string(), bytes: part.size() });
        stream::iter(needed.map(Ok))
            .try_for_each_concurrent(LAYERS_MAX, |blob| self.fetch_blob(client, remote, blob, lease))
            .await?;
        for document in documents.iter().rev() {
            keep_document(client, document, labels(document)?, lease).await?;
        }
        Ok(())
    }

    async fn fetch_blob(
        &self,
        client: &Containerd,
        remote: &RemoteImage,
        blob: RequiredBlob,
        lease: &Lease,
    ) -> Result<(), RuntimeError> {
        let lock = self.pulls.lock(&blob.digest);
        let _alone = lock.lock().await;
        let info =
            client.content().info(leased(InfoRequest { digest: blob.digest.clone() }, &lease.id)).await;
        if or_absent(info).map_err(failed("look up content"))?.is_some() {
            // The lease protects the content until a label of the manifest does.
            return keep(client, &blob.digest, lease).await;
        }
        let name = format!("mayfly-pull-{}", blob.digest);
        for attempt in 0.. {
            let offset = written(client, &name).await?;
            let ended = match remote.blob(&blob.digest, offset).await {
                Ok(body) => {
                    let skip = offset - body.offset.min(offset);
                    let content = skipping(body.stream, skip);
                    let part = Part { name: &name, blob: &blob, offset, labels: HashMap::new() };
                    write(client, part, content, lease).await
                }
                Err(error) => Err(WriteError::Source(error)),
            };
            match ended {
                Ok(()) => return Ok(()),
                Err(WriteError::Source(error @ PullError::Unreachable { .. }))
                    if attempt < CONTINUATIONS_MAX =>
                {
                    tracing::debug!(digest = blob.digest, %error, "the transfer of a layer was interrupted");
                    tokio::time::sleep(CONTINUE_AFTER * (attempt + 1)).await;
                }
                Err(WriteError::Source(error @ PullError::Unreachable { .. })) => return Err(missing(error)),
                Err(error) => {
                    // The content has another digest: the next pull starts from the beginning.
                    let abort = AbortRequest { r#ref: name };
                    let _ = client.content().abort(request(abort)).await;
                    return Err(match error {
                        WriteError::Source(error) => missing(error),
                        WriteError::Store(status) => not_kept(&status),
                    });
                }
            }
        }
        Ok(())
    }
}

fn missing(error: PullError) -> RuntimeError {
    RuntimeError::ImageMissing(error.to_string())
}

/// Maps containerd's error, which names the actual and the expected digest.
fn not_kept(status: &Status) -> RuntimeError {
    RuntimeError::ImageMissing(format!("failed to keep content: {}", status.message()))
}

/// The credentials from pull secrets. A secret that cannot be decoded is ignored, as upstream does.
fn keychain(secrets: &[PullSecret]) -> Keychain {
    let mut keychain = Keychain::default();
    for secret in secrets {
        if let Err(error) = keychain.add_docker_config(&secret.0) {
            tracing::warn!(%error, "cannot use a pull secret");
        }
    }
    keychain
}

/// Whether the name already refers to this content, and the content is complete.
async fn is_current(client: &Containerd, name: &str, target: &Descriptor) -> Result<bool, RuntimeError> {
    let found = client.images().get(request(GetImageRequest { name: name.into() })).await;
    let known = or_absent(found).map_err(failed("look up an image"))?;
    let known = known.and_then(|known| known.into_inner().image);
    // One from an archive gets its identity in the registry.
    let known = known.filter(|image| ImageOrigin::of(image) == ImageOrigin::Registry);
    let known = known.and_then(|image| image.target);
    if known.is_none_or(|known| known.digest != target.digest) {
        return Ok(false);
    }
    let Ok(manifest) = super::manifest(client, target).await else { return Ok(false) };
    for part in std::iter::once(manifest.config()).chain(manifest.layers()) {
        let info = client.content().info(request(InfoRequest { digest: part.digest().to_string() })).await;
        if or_absent(info).map_err(failed("look up content"))?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The labels that protect a document's references from the garbage collector.
fn labels(document: &RemoteDocument) -> Result<HashMap<String, String>, RuntimeError> {
    let mut labels = HashMap::new();
    if is_index(&document.media_type) {
        let index: ImageIndex = parse(&document.bytes, "index", &document.digest)?;
        labels.insert("containerd.io/gc.ref.content.m.0".into(), variant(&index)?);
    } else {
        let manifest: ImageManifest = parse(&document.bytes, "manifest", &document.digest)?;
        labels.insert("containerd.io/gc.ref.content.config".into(), manifest.config().digest().to_string());
        for (at, layer) in manifest.layers().iter().enumerate() {
            labels.insert(format!("containerd.io/gc.ref.content.l.{at}"), layer.digest().to_string());
        }
    }
    Ok(labels)
}

async fn keep_document(
    client: &Containerd,
    document: &RemoteDocument,
    labels: HashMap<String, String>,
    lease: &Lease,
) -> Result<(), RuntimeError> {
    let blob = RequiredBlob { digest: document.digest.clone(), bytes: document.bytes.len() as u64 };
    let name = format!("{}-{}", lease.id, document.digest);
    let content = stream::once(std::future::ready(Ok(document.bytes.clone())));
    let part = Part { name: &name, blob: &blob, offset: 0, labels: labels.clone() };
    match write(client, part, content, lease).await {
        Ok(()) => {}
        Err(WriteError::Source(error)) => return Err(missing(error)),
        Err(WriteError::Store(status)) => return Err(not_kept(&status)),
    }
    for (name, value) in labels {
        label(client, &document.digest, &name, &value).await?;
    }
    Ok(())
}

/// Adds existing content to the lease.
async fn keep(client: &Containerd, digest: &str, lease: &Lease) -> Result<(), RuntimeError> {
    use containerd_client::services::v1::{AddResourceRequest, Resource};
    let resource = Resource { id: digest.into(), r#type: "content".into() };
    let message = AddResourceRequest { id: lease.id.clone(), resource: Some(resource) };
    client.leases().add_resource(request(message)).await.map(|_| ()).map_err(failed("keep content"))
}

/// The number of bytes of a blob that an earlier attempt wrote.
async fn written(client: &Containerd, name: &str) -> Result<u64, RuntimeError> {
    let status = client.content().status(request(StatusRequest { r#ref: name.into() })).await;
    let status = or_absent(status).map_err(failed("look up content"))?;
    let offset = status.and_then(|status| status.into_inner().status).map_or(0, |status| status.offset);
    Ok(u64::try_from(offset).unwrap_or(0))
}

/// Skips the first bytes of a response that begins before the requested offset.
fn skipping(
    content: impl Stream<Item = Result<Bytes, PullError>> + Send,
    mut skip: u64,
) -> impl Stream<Item = Result<Bytes, PullError>> + Send {
    content.map(move |chunk| {
        chunk.map(|mut chunk| {
            let left_out = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
            skip -= left_out as u64;
            chunk.split_off(left_out)
        })
    })
}

/// The blob to write, and the offset at which to continue.
struct Part<'a> {
    name: &'a str,
    blob: &'a RequiredBlob,
    offset: u64,
    labels: HashMap<String, String>,
}

enum WriteError {
    /// The source of the content failed.
    Source(PullError),
    /// containerd rejected the content.
    Store(Status),
}

/// Writes content to its end; containerd checks its length and its digest.
async fn write(
    client: &Containerd,
    part: Part<'_>,
    content: impl Stream<Item = Result<Bytes, PullError>> + Send,
    lease: &Lease,
) -> Result<(), WriteError> {
    let (sender, messages) = mpsc::channel(PIECES_AHEAD);
    let total = part.blob.bytes;
    let message = WriteContentRequest {
        action: WriteAction::Write as i32,
        r#ref: part.name.to_owned(),
        total: i64::try_from(total).unwrap_or(i64::MAX),
        expected: part.blob.digest.clone(),
        ..WriteContentRequest::default()
    };
    // The future owns the sender, so the stream of messages ends with it.
    let feed = async move {
        let mut content = std::pin::pin!(content);
        let mut offset = part.offset;
        while let Some(chunk) = content.next().await {
            let mut chunk = chunk.map_err(WriteError::Source)?;
            if offset + chunk.len() as u64 > total {
                let what = part.blob.digest.clone();
                return Err(WriteError::Source(PullError::TooLarge { what, bytes_max: total }));
            }
            while !chunk.is_empty() {
                let piece = chunk.split_to(chunk.len().min(PIECE_BYTES_MAX));
                let length = piece.len() as u64;
                let at = i64::try_from(offset).unwrap_or(i64::MAX);
                let message = WriteContentRequest { offset: at, data: piece.to_vec(), ..message.clone() };
                // A closed stream: containerd's response has the error.
                if sender.send(message).await.is_err() {
                    return Ok(());
                }
                offset += length;
            }
        }
        if offset < total {
            let cause = format!("the response ended after {offset} of {total} bytes");
            return Err(WriteError::Source(PullError::Unreachable { host: "the registry".into(), cause }));
        }
        let commit = WriteContentRequest {
            action: WriteAction::Commit as i32,
            offset: i64::try_from(offset).unwrap_or(i64::MAX),
            labels: part.labels,
            ..message.clone()
        };
        let _ = sender.send(commit).await;
        Ok(())
    };
    let written = async {
        let answer = client.content().write(leased(ReceiverStream::new(messages), &lease.id)).await?;
        answer.into_inner().try_for_each(|_| std::future::ready(Ok(()))).await
    };
    let (fed, written) = tokio::join!(feed, written);
    fed?;
    match written {
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        result => result.map_err(WriteError::Store),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_response_that_starts_before_the_requested_offset_is_trimmed() {
        let chunks = ["abc", "de", "f"].map(|text| Ok(Bytes::from_static(text.as_bytes())));
        let cut = async |skip| {
            let content: Vec<Bytes> =
                skipping(stream::iter(chunks.clone()), skip).try_collect().await.unwrap();
            String::from_utf8(content.concat()).unwrap()
        };
        assert_eq!(cut(0).await, "abcdef");
        assert_eq!(cut(4).await, "ef");
        assert_eq!(cut(6).await, "");
    }

    #[test]
    fn one_pull_of_a_name_at_a_time() {
        let pulls = Pulls::default();
        let first = pulls.lock("a");
        let guard = first.try_lock().unwrap();
        assert!(pulls.lock("a").try_lock().is_err());
        assert!(pulls.lock("b").try_lock().is_ok());
        drop(guard);
        assert!(pulls.lock("a").try_lock().is_ok());
        drop(first);
        pulls.lock("c");
        assert_eq!(pulls.locks.lock().len(), 1, "locks that nobody holds are forgotten");
    }
}
