//! Images on a node. An optional capability of a [`Runtime`].
//!
//! [`Runtime`]: crate::Runtime

use std::{fmt, path::Path};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::pod::RuntimeError;

/// When an image is pulled from its registry (`imagePullPolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    Always,
    #[default]
    IfNotPresent,
    Never,
}

/// An image that is present on a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageRecord {
    /// The full reference: registry, repository and tag or digest.
    pub reference: String,
    /// The digest of the manifest.
    pub digest: String,
    /// The identity in a container's status: `NAME@DIGEST` of an image from a registry; the digest of the configuration
    /// of one from an archive, which no registry is known to have. Empty in records of earlier versions.
    #[serde(default)]
    pub id: String,
    /// The compressed size of the image, in bytes.
    pub bytes: u64,
    /// When the reference was last set, RFC 3339.
    pub updated: String,
}

/// Credentials for registries: the text of a Docker `config.json`, as in Secrets of the type
/// `kubernetes.io/dockerconfigjson`.
#[derive(Clone, PartialEq, Eq)]
pub struct PullSecret(pub Vec<u8>);

impl fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PullSecret({} bytes)", self.0.len())
    }
}

/// The images of a runtime.
#[async_trait]
pub trait ImageStore: Send + Sync {
    /// Imports an OCI or Docker archive (tar). Returns the images in it.
    async fn import(&self, archive: &Path) -> Result<Vec<ImageRecord>, RuntimeError>;

    /// Pulls an image from its registry, for the node's platform. Content that is already present is not fetched again.
    ///
    /// # Errors
    /// [`RuntimeError::ImageMissing`] with the registry's message; [`RuntimeError::ImageName`].
    async fn pull(&self, reference: &str, secrets: &[PullSecret]) -> Result<ImageRecord, RuntimeError>;

    /// The image, if this node has it.
    ///
    /// # Errors
    /// [`RuntimeError::ImageName`] for an invalid name.
    async fn find(&self, reference: &str) -> Result<Option<ImageRecord>, RuntimeError>;

    /// Whether listing the images would not start a service first: a node that has not run any container yet has no
    /// images.
    fn is_started(&self) -> bool;

    async fn list(&self) -> Result<Vec<ImageRecord>, RuntimeError>;

    /// Removes a reference; its content is removed when no other image or container uses it.
    ///
    /// # Errors
    /// [`RuntimeError::ImageMissing`] if the image does not exist.
    async fn remove(&self, reference: &str) -> Result<(), RuntimeError>;
}
