//! Images in containerd: import, lookup, unpacking into snapshots, listing, removal.
//!
//! Content is protected from containerd's garbage collection by a lease while it is received, and by labels afterwards:
//! the image record refers to its manifest, the manifest to its config and layers, the config to its snapshot.

mod content;
mod import;
mod pull;
mod unpack;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use containerd_client::{
    services::v1::{DeleteImageRequest, GetImageRequest, Image, ListImagesRequest},
    types::Descriptor,
};
use mayfly_distribution::{Reference, parse_reference};
use mayfly_runtime::{ImageRecord, RuntimeError};
use oci_spec::image::ImageConfiguration;
use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use self::{
    content::{ImageOrigin, Lease, label, manifest, parse, read, set_image},
    import::store,
    unpack::unpack,
};
use crate::{
    archive::Archive,
    client::{Containerd, SNAPSHOTTER, failed, or_absent, request},
};

/// The number of cached unpacked images; each takes a few KiB.
const RESOLVED_MAX: usize = 512;

/// An image that is unpacked and can be run.
#[derive(Clone, Debug)]
pub(crate) struct RunnableImage {
    pub(crate) name: String,
    pub(crate) config: ImageConfiguration,
    /// The chain ID (snapshot name) of its topmost layer; empty for an image without layers.
    pub(crate) chain: String,
}

/// Cache of unpacked images, and the running pulls.
#[derive(Default)]
pub(crate) struct UnpackedImages {
    resolved: Mutex<HashMap<String, Arc<RunnableImage>>>,
    pulls: pull::Pulls,
}

/// The full form of an image's name: `busybox` is `docker.io/library/busybox:latest`.
pub(crate) fn full_name(text: &str) -> Result<String, RuntimeError> {
    Ok(parse_name(text)?.whole())
}

/// Parses an image's name into its full form.
pub(crate) fn parse_name(text: &str) -> Result<Reference, RuntimeError> {
    parse_reference(text).map_err(|error| RuntimeError::ImageName(error.to_string()))
}

impl UnpackedImages {
    /// The image, unpacked; `None` if this node does not have it.
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

    /// Clears the cache, after an expected snapshot was missing.
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
                set_image(client, &name, target, ImageOrigin::Archive).await?;
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
            records.extend(record(client, image).await);
        }
        records.sort_by(|one, other| one.reference.cmp(&other.reference));
        Ok(records)
    }

    /// The record of one image, if this node has it.
    pub(crate) async fn record(
        &self,
        client: &Containerd,
        name: &str,
    ) -> Result<Option<ImageRecord>, RuntimeError> {
        let found = client.images().get(request(GetImageRequest { name: name.into() })).await;
        let found = or_absent(found).map_err(failed("look up an image"))?;
        match found.and_then(|found| found.into_inner().image) {
            Some(image) => Ok(record(client, image).await),
            None => Ok(None),
        }
    }

    pub(crate) async fn remove(&self, client: &Containerd, name: &str) -> Result<(), RuntimeError> {
        let message = DeleteImageRequest { name: name.into(), sync: true, target: None };
        let removed = or_absent(client.images().delete(request(message)).await);
        self.forget();
        match removed.map_err(failed("remove an image"))? {
            Some(_) => Ok(()),
            None => Err(RuntimeError::ImageMissing(format!("image {name} does not exist"))),
        }
    }
}

/// containerd's record of an image; `None` for one without content.
async fn record(client: &Containerd, image: Image) -> Option<ImageRecord> {
    let origin = ImageOrigin::of(&image);
    let target = image.target?;
    // An image that is being removed counts as empty.
    let (bytes, config) = match manifest(client, &target).await {
        Ok(manifest) => {
            let layers: u64 = manifest.layers().iter().map(|layer| layer.size()).sum();
            (layers + manifest.config().size(), Some(manifest.config().digest().to_string()))
        }
        Err(_) => (0, None),
    };
    let updated = image
        .updated_at
        .and_then(|at| jiff::Timestamp::new(at.seconds, at.nanos).ok().map(|at| at.to_string()));
    Some(ImageRecord {
        id: image_id(&image.name, &target.digest, config.filter(|_| origin == ImageOrigin::Archive)),
        reference: image.name,
        digest: target.digest,
        bytes,
        updated: updated.unwrap_or_default(),
    })
}

/// The identity of an image in the status of its containers. `config`: the digest of its configuration, if no registry
/// is known to have it.
fn image_id(name: &str, digest: &str, config: Option<String>) -> String {
    match (config, parse_name(name)) {
        (Some(config), _) => config,
        (None, Ok(name)) => format!("{}/{}@{digest}", name.registry(), name.repository()),
        (None, Err(_)) => digest.to_owned(),
    }
}

/// The machine's architecture as images name it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Checks that this process can read the archive before containerd receives a request.
pub(crate) fn check_archive(path: &Path) -> Result<(), RuntimeError> {
    match path.is_file() {
        true => Ok(()),
        false => Err(RuntimeError::Invalid(format!("{} is not a file", path.display()))),
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

    #[test]
    fn an_image_is_identified_by_its_digest_in_a_registry_or_by_its_configuration() {
        let id = |name: &str, config: Option<&str>| image_id(name, "sha256:m", config.map(str::to_owned));
        assert_eq!(id("docker.io/library/busybox:1.36", None), "docker.io/library/busybox@sha256:m");
        assert_eq!(id("localhost:5000/team/app:1", None), "localhost:5000/team/app@sha256:m");
        let pinned = format!("docker.io/a/b@sha256:{}", "0".repeat(64));
        assert_eq!(id(&pinned, None), "docker.io/a/b@sha256:m");
        assert_eq!(id("docker.io/library/busybox:local", Some("sha256:c")), "sha256:c");
    }
}
