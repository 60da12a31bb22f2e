//! Images on a node. An optional capability of a [`Runtime`].
//!
//! [`Runtime`]: crate::Runtime

use std::path::Path;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::pod::RuntimeError;

/// When a container's image is looked for in its registry (`imagePullPolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    Always,
    #[default]
    IfNotPresent,
    Never,
}

/// An image that a node has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageRecord {
    /// The full reference: registry, repository and tag or digest.
    pub reference: String,
    /// Of the manifest.
    pub digest: String,
    /// The compressed size of the image, in bytes.
    pub bytes: u64,
    /// When the reference was last set, RFC 3339.
    pub updated: String,
}

/// The images of a runtime.
#[async_trait]
pub trait ImageStore: Send + Sync {
    /// Takes in an OCI or Docker archive (tar). Returns the images that were in it.
    async fn import(&self, archive: &Path) -> Result<Vec<ImageRecord>, RuntimeError>;

    /// Fetches an image from its registry, in the node's platform.
    async fn pull(&self, reference: &str) -> Result<ImageRecord, RuntimeError>;

    async fn list(&self) -> Result<Vec<ImageRecord>, RuntimeError>;

    /// Removes a reference; its content goes when no other image and no container uses it.
    ///
    /// # Errors
    /// [`RuntimeError::ImageMissing`] when there is no such image.
    async fn remove(&self, reference: &str) -> Result<(), RuntimeError>;
}
