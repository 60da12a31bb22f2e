//! The client of OCI registries (distribution-spec 1.1): names of images, credentials, mirrors, manifests and blobs.
//!
//! **Belongs here:** the requests of a pull to a registry, for both stores of its result: containerd's content store on
//! a node, and the artifact store for functions whose source is an artifact. The settings of `--registry-config` and
//! `--insecure-registry`, and the matching of pull secrets.
//!
//! **Does not belong here:** the storage of content, pull policies and back-off, the registry that Mayfly serves
//! itself.
//!
//! Responses of registries are not trusted: a document is bounded and its digest is computed; a blob's digest is
//! computed by the store that receives it. Start reading at [`RegistryClient`].

#![warn(missing_docs, missing_debug_implementations)]

mod challenge;
mod client;
mod config;
mod credentials;
mod document;
mod error;
mod reference;
mod transport;

pub use client::{BlobBody, RegistryClient, RemoteImage};
pub use config::{BuiltinRegistry, RegistryConfig, RegistryConfigError};
pub use credentials::{Keychain, RegistryLogin};
pub use document::{RemoteDocument, is_index};
pub use error::PullError;
pub use oci_spec::distribution::Reference;
pub use reference::{InvalidReference, parse_reference};
pub use transport::AnyCertificate;

/// The name by which pods and functions pull from the registry that Mayfly serves, independent of its port.
pub const BUILTIN_REGISTRY: &str = "registry.mayfly.internal";
