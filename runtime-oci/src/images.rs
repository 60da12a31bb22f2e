//! Images in containerd: import, look-up, unpacking into snapshots, listing, removal.
//!
//! Content is kept from containerd's garbage collection by a lease while it comes in, and by labels afterwards:
//! the image record refers to its manifest, the manifest to its config and layers, the config to its snapshot.

use std::{
    collections::HashMap,
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use containerd_client::{
    services::v1::{
        ApplyRequest, CreateImageRequest, CreateRequest, DeleteImageRequest, DeleteRequest, GetImageRequest,
        Image, Info, ListImagesRequest, ReadContentRequest, UpdateImageRequest, UpdateRequest, WriteAction,
        WriteContentRequest,
        snapshots::{
            CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest,
        },
    },
    tonic::Code,
    types::Descriptor,
};
use futures::StreamExt as _;
use mayfly_runtime::{ImageRecord, RuntimeError};
use oci_spec::{
    distribution::Reference,
    image::{ImageConfiguration, ImageIndex, ImageManifest},
};
use parking_lot::Mutex;
use prost_types::FieldMask;
use sha2::{Digest as _, Sha256};
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    archive::{Archive, ArchivedImage, Blob},
    client::{Containerd, SNAPSHOTTER, failed, leased, or_absent, request},
};

/// How long a lease lasts that its owner did not give back (a crash), in hours.
const LEASE_HOURS: i64 = 24;
/// One message of content, in bytes; containerd takes 16 MiB at most.
const CHUNK_BYTES: usize = 1 << 20;
/// Chunks read ahead of the connection.
const CHUNKS_AHEAD: usize = 4;
/// Unpacked images remembered; each is a few KiB.
const RESOLVED_MAX: usize = 512;
/// Largest manifest, index or configuration, in bytes.
const DOCUMENT_BYTES_MAX: usize = 8 << 20;

/// An image that is unpacked and can be run.
#[derive(Clone, Debug)]
pub(crate) struct RunnableImage {
    pub(crate) name: String,
    pub(crate) config: ImageConfiguration,
    /// The snapshot of its topmost layer; empty for an image without layers.
    pub(crate) chain: String,
}

/// What this process knows of images.
#[derive(Default)]
pub(crate) struct UnpackedImages {
    resolved: Mutex<HashMap<String, Arc<RunnableImage>>>,
}

/// The full form of an image's name: `busybox` is `docker.io/library/busybox:latest`.
pub(crate) fn full_name(text: &str) -> Result<String, RuntimeError> {
    let reference: Reference = text
        .parse()
        .map_err(|error| RuntimeError::ImageName(format!("couldn't parse image name {text:?}: {error}")))?;
    Ok(reference.whole())
}

impl UnpackedImages {
    /// The image, unpacked; `None` when this node does not have it.
    pub(crate) async fn find(
        &self,
        client: &Containerd,
        name: &str,
    ) -> Result<Option<Arc<RunnableImage>>, RuntimeError> {
        let found = client.images().get(request(GetImageRequest { name: name.into() })).await;
        let Some(found) = or_absent(found).map_err(failed("look up an image"))? else { return Ok(None) };
        let Some(target) = found.into_inner().image.and_then(|image| image.target) else { return Ok(None) };
        if let Some(known) = self.resolved.lock().get(&target.digest).filter(|known| known.name == name) {
            return Ok(Some(known.clone()));
        }
        let image = Arc::new(self.unpacked(client, name, &target).await?);
        let mut resolved = self.resolved.lock();
        if resolved.len() >= RESOLVED_MAX {
            resolved.clear();
        }
        resolved.insert(target.digest, image.clone());
        Ok(Some(image))
    }

    /// Forgets what was resolved: a snapshot that should be there is not.
    pub(crate) fn forget(&self) {
        self.resolved.lock().clear();
    }

    async fn unpacked(
        &self,
        client: &Containerd,
        name: &str,
        target: &Descriptor,
    ) -> Result<RunnableImage, RuntimeError> {
        let lease = Lease::create(client).await?;
        let manifest = manifest(client, target).await?;
        let config_digest = manifest.config().digest().to_string();
        let text = read(client, &config_digest).await?;
        let config: ImageConfiguration = parse(&text, "configuration", &config_digest)?;
        let chain = unpack(client, &manifest, &config, &lease).await?;
        if !chain.is_empty() {
            label(client, &config_digest, &format!("containerd.io/gc.ref.snapshot.{SNAPSHOTTER}"), &chain)
                .await?;
        }
        lease.end().await;
        Ok(RunnableImage { name: name.into(), config, chain })
    }

    /// Imports all images of an archive.
    pub(crate) async fn import(
        &self,
        client: &Containerd,
        path: PathBuf,
    ) -> Result<Vec<ImageRecord>, RuntimeError> {
        let opened = spawn_blocking(move || Archive::open(&path)).await;
        let archive = opened
            .map_err(|error| RuntimeError::Internal(error.to_string()))?
            .map_err(|error| RuntimeError::Invalid(error.to_string()))?;
        let archive = Arc::new(archive);
        let lease = Lease::create(client).await?;
        let mut records = Vec::new();
        for image in archive.images.clone() {
            store(client, &archive, &image, &lease).await?;
            for name in &image.names {
                let name = full_name(name)?;
                let target = Descriptor {
                    media_type: image.media_type.clone(),
                    digest: image.digest.clone(),
                    size: i64::try_from(image.bytes).unwrap_or(i64::MAX),
                    ..Descriptor::default()
                };
                set_image(client, &name, target).await?;
                self.find(client, &name).await?;
                records.push(name);
            }
        }
        lease.end().await;
        let all = self.list(client).await?;
        Ok(all.into_iter().filter(|image| records.contains(&image.reference)).collect())
    }

    pub(crate) async fn list(&self, client: &Containerd) -> Result<Vec<ImageRecord>, RuntimeError> {
        let listed = client.images().list(request(ListImagesRequest::default())).await;
        let mut records = Vec::new();
        for image in listed.map_err(failed("list images"))?.into_inner().images {
            let Some(target) = image.target else { continue };
            // One whose content is being removed counts as empty.
            let bytes = match manifest(client, &target).await {
                Ok(manifest) => {
                    let layers: u64 = manifest.layers().iter().map(|layer| layer.size()).sum();
                    layers + manifest.config().size()
                }
                Err(_) => 0,
            };
            let updated = image
                .updated_at
                .and_then(|at| jiff::Timestamp::new(at.seconds, at.nanos).ok().map(|at| at.to_string()));
            records.push(ImageRecord {
                reference: image.name,
                digest: target.digest,
                bytes,
                updated: updated.unwrap_or_default(),
            });
        }
        records.sort_by(|one, other| one.reference.cmp(&other.reference));
        Ok(records)
    }

    pub(crate) async fn remove(&self, client: &Containerd, name: &str) -> Result<(), RuntimeError> {
        let message = DeleteImageRequest { name: name.into(), sync: true, target: None };
        let removed = or_absent(client.images().delete(request(message)).await);
        self.forget();
        match removed.map_err(failed("remove an image"))? {
            Some(_) => Ok(()),
            None => Err(RuntimeError::ImageMissing(format!("there is no image {name}"))),
        }
    }
}

/// Keeps new content while it is not referred to.
struct Lease {
    client: Containerd,
    id: String,
}

impl Lease {
    async fn create(client: &Containerd) -> Result<Self, RuntimeError> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let now = jiff::Timestamp::now();
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = format!("mayfly-{}-{}-{number}", std::process::id(), now.as_nanosecond());
        let expires = now + jiff::SignedDuration::from_hours(LEASE_HOURS);
        let labels = [("containerd.io/gc.expire".to_owned(), expires.to_string())].into();
        let created = client.leases().create(request(CreateRequest { id: id.clone(), labels })).await;
        created.map_err(failed("make a lease"))?;
        Ok(Self { client: client.clone(), id })
    }

    /// A lease that is not given back expires.
    async fn end(self) {
        let message = DeleteRequest { id: self.id.clone(), sync: false };
        if let Err(error) = self.client.leases().delete(request(message)).await {
            tracing::debug!(%error, "cannot give back a lease");
        }
    }
}

async fn set_image(client: &Containerd, name: &str, target: Descriptor) -> Result<(), RuntimeError> {
    let image = Image { name: name.into(), target: Some(target), ..Image::default() };
    let message = CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
    match client.images().create(request(message)).await {
        Err(status) if status.code() == Code::AlreadyExists => {
            let message = UpdateImageRequest {
                image: Some(image),
                update_mask: Some(FieldMask { paths: vec!["target".into()] }),
                source_date_epoch: None,
            };
            client.images().update(request(message)).await.map_err(failed("update an image"))?;
            Ok(())
        }
        result => result.map(|_| ()).map_err(failed("make an image")),
    }
}

/// Writes an image's blobs, those below before those that refer to them.
async fn store(
    client: &Containerd,
    archive: &Arc<Archive>,
    image: &ArchivedImage,
    lease: &Lease,
) -> Result<(), RuntimeError> {
    let target = Descriptor {
        media_type: image.media_type.clone(),
        digest: image.digest.clone(),
        ..Descriptor::default()
    };
    let mut manifests = vec![(target, String::new())];
    let mut documents = Vec::new();
    while let Some((target, parent)) = manifests.pop() {
        let Some(blob) = archive.blobs.get(&target.digest) else {
            if parent.is_empty() {
                return Err(RuntimeError::Invalid(format!("the archive lacks {}", target.digest)));
            }
            // An index may name platforms that were not saved.
            continue;
        };
        let text = read_blob(archive, blob).await?;
        let mut labels = HashMap::new();
        if is_index(&target.media_type) {
            let index: ImageIndex = parse(&text, "index", &target.digest)?;
            for (at, child) in index.manifests().iter().enumerate() {
                labels.insert(format!("containerd.io/gc.ref.content.m.{at}"), child.digest().to_string());
                let child = Descriptor {
                    media_type: child.media_type().to_string(),
                    digest: child.digest().to_string(),
                    ..Descriptor::default()
                };
                manifests.push((child, target.digest.clone()));
            }
        } else {
            let manifest: ImageManifest = parse(&text, "manifest", &target.digest)?;
            let config = manifest.config().digest().to_string();
            labels.insert("containerd.io/gc.ref.content.config".into(), config.clone());
            let mut parts = vec![config];
            for (at, layer) in manifest.layers().iter().enumerate() {
                let digest = layer.digest().to_string();
                labels.insert(format!("containerd.io/gc.ref.content.l.{at}"), digest.clone());
                parts.push(digest);
            }
            for digest in parts {
                let blob = archive.blobs.get(&digest);
                let blob =
                    blob.ok_or_else(|| RuntimeError::Invalid(format!("the archive lacks {digest}")))?;
                write(client, archive, &digest, blob, HashMap::new(), lease).await?;
            }
        }
        documents.push((target.digest, blob.clone(), labels));
    }
    for (digest, blob, labels) in documents.into_iter().rev() {
        write(client, archive, &digest, &blob, labels, lease).await?;
    }
    Ok(())
}

async fn read_blob(archive: &Arc<Archive>, blob: &Blob) -> Result<Vec<u8>, RuntimeError> {
    let (archive, blob) = (archive.clone(), blob.clone());
    let read = move || {
        let mut bytes = Vec::new();
        archive.reader(&blob)?.take(DOCUMENT_BYTES_MAX as u64).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let read = spawn_blocking(read).await.map_err(|error| RuntimeError::Internal(error.to_string()))?;
    read.map_err(|error| RuntimeError::Invalid(format!("the archive cannot be read: {error}")))
}

/// Writes one blob; containerd checks its digest.
async fn write(
    client: &Containerd,
    archive: &Arc<Archive>,
    digest: &str,
    blob: &Blob,
    labels: HashMap<String, String>,
    lease: &Lease,
) -> Result<(), RuntimeError> {
    let (sender, messages) = tokio::sync::mpsc::channel(CHUNKS_AHEAD);
    let total = i64::try_from(blob.bytes()).unwrap_or(i64::MAX);
    let first = WriteContentRequest {
        action: WriteAction::Write as i32,
        r#ref: format!("{}-{digest}", lease.id),
        total,
        expected: digest.into(),
        ..WriteContentRequest::default()
    };
    let (archive, blob, known_labels) = (archive.clone(), blob.clone(), labels.clone());
    let feeder = spawn_blocking(move || -> std::io::Result<()> {
        let mut reader = archive.reader(&blob)?;
        let mut offset = 0;
        let mut message = first.clone();
        loop {
            let mut data = Vec::with_capacity(CHUNK_BYTES);
            let read = std::io::Read::by_ref(&mut reader).take(CHUNK_BYTES as u64).read_to_end(&mut data)?;
            message.offset = offset;
            offset += i64::try_from(read).unwrap_or(0);
            let is_last = read < CHUNK_BYTES;
            message.data = data;
            if is_last {
                message.action = WriteAction::Commit as i32;
                message.labels = known_labels.clone();
            }
            // A closed stream: containerd has the content already, or says why not.
            if sender.blocking_send(message.clone()).is_err() || is_last {
                return Ok(());
            }
        }
    });
    let answer = client.content().write(leased(ReceiverStream::new(messages), &lease.id)).await;
    let result = match answer {
        Ok(stream) => {
            let mut stream = stream.into_inner();
            loop {
                match stream.next().await {
                    Some(Ok(_)) => {}
                    Some(Err(status)) => break Err(status),
                    None => break Ok(()),
                }
            }
        }
        Err(status) => Err(status),
    };
    let fed = feeder.await.map_err(|error| RuntimeError::Internal(error.to_string()))?;
    match result {
        Err(status) if status.code() == Code::AlreadyExists => {
            for (name, value) in labels {
                label(client, digest, &name, &value).await?;
            }
            Ok(())
        }
        Err(status) => Err(failed("store content")(status)),
        Ok(()) => fed.map_err(|error| RuntimeError::Invalid(format!("the archive cannot be read: {error}"))),
    }
}

/// Sets one label of a blob.
async fn label(client: &Containerd, digest: &str, name: &str, value: &str) -> Result<(), RuntimeError> {
    let labels = [(name.to_owned(), value.to_owned())].into();
    let message = UpdateRequest {
        info: Some(Info { digest: digest.into(), labels, ..Info::default() }),
        update_mask: Some(FieldMask { paths: vec![format!("labels.{name}")] }),
    };
    client.content().update(request(message)).await.map(|_| ()).map_err(failed("label content"))
}

/// Reads a document from the content store.
async fn read(client: &Containerd, digest: &str) -> Result<Vec<u8>, RuntimeError> {
    let message = ReadContentRequest { digest: digest.into(), offset: 0, size: 0 };
    let answer = client.content().read(request(message)).await.map_err(failed("read an image's document"))?;
    let mut stream = answer.into_inner();
    let mut bytes = Vec::new();
    while let Some(part) = stream.next().await {
        bytes.extend_from_slice(&part.map_err(failed("read an image's document"))?.data);
        if bytes.len() > DOCUMENT_BYTES_MAX {
            return Err(RuntimeError::Invalid(format!("the document {digest} is too large")));
        }
    }
    Ok(bytes)
}

/// The manifest for this machine's platform.
async fn manifest(client: &Containerd, target: &Descriptor) -> Result<ImageManifest, RuntimeError> {
    let text = read(client, &target.digest).await?;
    if !is_index(&target.media_type) {
        return parse(&text, "manifest", &target.digest);
    }
    let index: ImageIndex = parse(&text, "index", &target.digest)?;
    let platform = architecture();
    let fits = |descriptor: &&oci_spec::image::Descriptor| {
        descriptor.platform().as_ref().is_none_or(|known| {
            known.os().to_string() == "linux" && known.architecture().to_string() == platform
        })
    };
    let chosen = index
        .manifests()
        .iter()
        .find(fits)
        .ok_or_else(|| RuntimeError::Invalid(format!("the image has no variant for linux/{platform}")))?;
    let digest = chosen.digest().to_string();
    let text = read(client, &digest).await?;
    parse(&text, "manifest", &digest)
}

fn is_index(media_type: &str) -> bool {
    media_type.contains("image.index") || media_type.contains("manifest.list")
}

/// The machine's architecture as images name it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn parse<T: serde::de::DeserializeOwned>(text: &[u8], what: &str, digest: &str) -> Result<T, RuntimeError> {
    serde_json::from_slice(text)
        .map_err(|error| RuntimeError::Invalid(format!("the image's {what} {digest} is damaged: {error}")))
}

/// The name of the snapshot of each layer on those below it (`image-spec/config.md`, ChainID).
fn chain_ids(diff_ids: &[String]) -> Vec<String> {
    let mut chain: Vec<String> = Vec::new();
    for diff in diff_ids {
        let next = match chain.last() {
            None => diff.clone(),
            Some(below) => format!("sha256:{}", hex::encode(Sha256::digest(format!("{below} {diff}")))),
        };
        chain.push(next);
    }
    chain
}

/// Makes a snapshot of each layer that has none; gives the topmost one's name.
async fn unpack(
    client: &Containerd,
    manifest: &ImageManifest,
    config: &ImageConfiguration,
    lease: &Lease,
) -> Result<String, RuntimeError> {
    let diff_ids: Vec<String> = config.rootfs().diff_ids().iter().map(ToString::to_string).collect();
    if diff_ids.len() != manifest.layers().len() {
        return Err(RuntimeError::Invalid(
            "the image's manifest and configuration name different layers".into(),
        ));
    }
    let mut parent = String::new();
    for ((chain, layer), diff) in chain_ids(&diff_ids).into_iter().zip(manifest.layers()).zip(&diff_ids) {
        let stat = StatSnapshotRequest { snapshotter: SNAPSHOTTER.into(), key: chain.clone() };
        let known =
            or_absent(client.snapshots().stat(request(stat)).await).map_err(failed("look up a snapshot"))?;
        if known.is_none() {
            apply(client, layer, diff, &chain, &parent, lease).await?;
        }
        parent = chain;
    }
    Ok(parent)
}

async fn apply(
    client: &Containerd,
    layer: &oci_spec::image::Descriptor,
    diff: &str,
    chain: &str,
    parent: &str,
    lease: &Lease,
) -> Result<(), RuntimeError> {
    let key = format!("extract-{} {chain}", lease.id);
    let prepare = PrepareSnapshotRequest {
        snapshotter: SNAPSHOTTER.into(),
        key: key.clone(),
        parent: parent.into(),
        ..PrepareSnapshotRequest::default()
    };
    let prepared = client.snapshots().prepare(leased(prepare, &lease.id)).await;
    let mounts = prepared.map_err(failed("prepare a snapshot"))?.into_inner().mounts;
    let descriptor = Descriptor {
        media_type: layer.media_type().to_string(),
        digest: layer.digest().to_string(),
        size: i64::try_from(layer.size()).unwrap_or(i64::MAX),
        ..Descriptor::default()
    };
    let message = ApplyRequest { diff: Some(descriptor), mounts, ..ApplyRequest::default() };
    let applied = client.diff().apply(leased(message, &lease.id)).await;
    let checked = applied.map_err(failed("unpack a layer")).and_then(|answer| {
        let found = answer.into_inner().applied.map(|applied| applied.digest).unwrap_or_default();
        match found == diff {
            true => Ok(()),
            false => Err(RuntimeError::Invalid(format!("a layer is {found}, but the image says {diff}"))),
        }
    });
    let committed = match checked {
        Ok(()) => {
            let commit = CommitSnapshotRequest {
                snapshotter: SNAPSHOTTER.into(),
                name: chain.into(),
                key: key.clone(),
                ..CommitSnapshotRequest::default()
            };
            match client.snapshots().commit(leased(commit, &lease.id)).await {
                // Another start unpacked the same layer meanwhile.
                Err(status) if status.code() == Code::AlreadyExists => Err(None),
                result => result.map(|_| ()).map_err(|status| Some(failed("keep a layer")(status))),
            }
        }
        Err(error) => Err(Some(error)),
    };
    let Err(error) = committed else { return Ok(()) };
    let remove = RemoveSnapshotRequest { snapshotter: SNAPSHOTTER.into(), key };
    let _ = client.snapshots().remove(request(remove)).await;
    error.map_or(Ok(()), Err)
}

/// Checks that an archive's path can be read by this process before containerd is asked for anything.
pub(crate) fn check_archive(path: &Path) -> Result<(), RuntimeError> {
    match path.is_file() {
        true => Ok(()),
        false => Err(RuntimeError::Invalid(format!("{} is no file", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_completed() {
        for (text, full) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:local", "docker.io/library/busybox:local"),
            ("a/b:1", "docker.io/a/b:1"),
            ("localhost:5000/a:1", "localhost:5000/a:1"),
        ] {
            assert_eq!(full_name(text).unwrap(), full);
        }
        assert!(matches!(full_name("A b"), Err(RuntimeError::ImageName(_))));
    }

    /// The example of the image specification, recomputed.
    #[test]
    fn chains_of_layers() {
        let diffs = ["sha256:a".to_owned(), "sha256:b".to_owned()];
        let chain = chain_ids(&diffs);
        assert_eq!(chain[0], "sha256:a");
        assert_eq!(chain[1], format!("sha256:{}", hex::encode(Sha256::digest("sha256:a sha256:b"))));
        assert!(chain_ids(&[]).is_empty());
    }
}
