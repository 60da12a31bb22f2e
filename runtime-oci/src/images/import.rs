//! Writes an archive's blobs to the content store.

use std::{collections::HashMap, io::Read as _, sync::Arc};

use containerd_client::types::Descriptor;
use mayfly_distribution::is_index;
use mayfly_runtime::RuntimeError;
use oci_spec::image::{ImageIndex, ImageManifest};
use tokio::task::spawn_blocking;

use super::content::{DOCUMENT_BYTES_MAX, Lease, parse, write};
use crate::{
    archive::{Archive, ArchivedImage, Blob},
    client::Containerd,
};

/// Writes an image's blobs, children before the documents that refer to them.
pub(super) async fn store(
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
            // An index may list platforms that were not saved.
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
    read.map_err(|error| RuntimeError::Invalid(format!("cannot read the archive: {error}")))
}
