//! The content store: leases, blobs, labels, image records.

use std::{collections::HashMap, io::Read as _, sync::Arc};

use containerd_client::{
    services::v1::{
        CreateImageRequest, CreateRequest, DeleteRequest, Image, Info, ReadContentRequest,
        UpdateImageRequest, UpdateRequest, WriteAction, WriteContentRequest,
    },
    tonic::Code,
    types::Descriptor,
};
use futures::StreamExt as _;
use mayfly_distribution::is_index;
use mayfly_runtime::RuntimeError;
use oci_spec::image::{ImageIndex, ImageManifest};
use prost_types::FieldMask;
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::ReceiverStream;

use super::architecture;
use crate::{
    archive::{Archive, Blob},
    client::{Containerd, failed, leased, request},
};

/// The lifetime of a lease that was not released (after a crash), in hours.
const LEASE_HOURS: i64 = 24;
/// The maximum size of one message with content, in bytes; containerd accepts at most 16 MiB.
const CHUNK_BYTES: usize = 1 << 20;
/// The number of chunks read ahead of the connection.
const CHUNKS_AHEAD: usize = 4;
/// The maximum size of a manifest, index or configuration, in bytes.
pub(super) const DOCUMENT_BYTES_MAX: usize = 8 << 20;

/// A lease, which protects new content until it is referenced.
pub(super) struct Lease {
    client: Containerd,
    pub(super) id: String,
}

impl Lease {
    pub(super) async fn create(client: &Containerd) -> Result<Self, RuntimeError> {
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

    /// Releases the lease. A lease that is not released expires.
    pub(super) async fn end(self) {
        let message = DeleteRequest { id: self.id.clone(), sync: false };
        if let Err(error) = self.client.leases().delete(request(message)).await {
            tracing::debug!(%error, "cannot give back a lease");
        }
    }
}

/// The label of an image record whose content came from an archive.
const LABEL_ARCHIVE: &str = "mayfly.dev/archive";

/// The source of an image's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageOrigin {
    Registry,
    Archive,
}

impl ImageOrigin {
    pub(super) fn of(image: &Image) -> Self {
        match image.labels.contains_key(LABEL_ARCHIVE) {
            true => Self::Archive,
            false => Self::Registry,
        }
    }

    fn labels(self) -> HashMap<String, String> {
        match self {
            Self::Registry => HashMap::new(),
            Self::Archive => [(LABEL_ARCHIVE.to_owned(), "true".to_owned())].into(),
        }
    }
}

/// Sets the target of an image's name, and its origin.
pub(super) async fn set_image(
    client: &Containerd,
    name: &str,
    target: Descriptor,
    origin: ImageOrigin,
) -> Result<(), RuntimeError> {
    let labels = origin.labels();
    let image = Image { name: name.into(), target: Some(target), labels, ..Image::default() };
    let message = CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
    match client.images().create(request(message)).await {
        Err(status) if status.code() == Code::AlreadyExists => {
            let message = UpdateImageRequest {
                image: Some(image),
                update_mask: Some(FieldMask { paths: vec!["target".into(), "labels".into()] }),
                source_date_epoch: None,
            };
            client.images().update(request(message)).await.map_err(failed("update an image"))?;
            Ok(())
        }
        result => result.map(|_| ()).map_err(failed("make an image")),
    }
}

/// Writes one blob; containerd checks its digest.
pub(super) async fn write(
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
            // A closed stream: containerd has the content already, or its response has the error.
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
        Ok(()) => fed.map_err(|error| RuntimeError::Invalid(format!("cannot read the archive: {error}"))),
    }
}

/// Sets one label of a blob.
pub(super) async fn label(
    client: &Containerd,
    digest: &str,
    name: &str,
    value: &str,
) -> Result<(), RuntimeError> {
    let labels = [(name.to_owned(), value.to_owned())].into();
    let message = UpdateRequest {
        info: Some(Info { digest: digest.into(), labels, ..Info::default() }),
        update_mask: Some(FieldMask { paths: vec![format!("labels.{name}")] }),
    };
    client.content().update(request(message)).await.map(|_| ()).map_err(failed("label content"))
}

/// Reads a document from the content store.
pub(super) async fn read(client: &Containerd, digest: &str) -> Result<Vec<u8>, RuntimeError> {
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
pub(super) async fn manifest(
    client: &Containerd,
    target: &Descriptor,
) -> Result<ImageManifest, RuntimeError> {
    let text = read(client, &target.digest).await?;
    if !is_index(&target.media_type) {
        return parse(&text, "manifest", &target.digest);
    }
    let index: ImageIndex = parse(&text, "index", &target.digest)?;
    let digest = variant(&index)?;
    let text = read(client, &digest).await?;
    parse(&text, "manifest", &digest)
}

/// The digest of the manifest for this machine's platform.
pub(super) fn variant(index: &ImageIndex) -> Result<String, RuntimeError> {
    let platform = architecture();
    let fits = |descriptor: &&oci_spec::image::Descriptor| {
        descriptor.platform().as_ref().is_none_or(|known| {
            known.os().to_string() == "linux" && known.architecture().to_string() == platform
        })
    };
    let chosen = index.manifests().iter().find(fits).ok_or_else(|| {
        RuntimeError::Invalid(format!(
            "no match for platform in manifest: the image has none for linux/{platform}"
        ))
    })?;
    Ok(chosen.digest().to_string())
}

pub(super) fn parse<T: serde::de::DeserializeOwned>(
    text: &[u8],
    what: &str,
    digest: &str,
) -> Result<T, RuntimeError> {
    serde_json::from_slice(text)
        .map_err(|error| RuntimeError::Invalid(format!("the image's {what} {digest} is damaged: {error}")))
}
