//! The OCI registry that Mayfly serves itself, so that images and artifacts need no other one (distribution-spec 1.1).
//!
//! **Belongs here:** pushing (in one piece or in chunks), pulling, tags, referrers, deletion, and the collection of
//! unreferenced contents.
//!
//! **Does not belong here:** the port, the client (`platform/distribution`), running pods.
//!
//! ```text
//! DIR/content/…                                contents by their digest: blobs and manifests (mayfly-artifacts)
//! DIR/repositories/<name>/manifests/<digits>   the media type of a manifest that the repository has
//! DIR/repositories/<name>/tags/<tag>           the digest that a tag names
//! DIR/uploads/<id>                             an upload in progress; removed at the next start
//! ```
//! In file names a repository's `/` is `+`, which no name has. Contents are shared by the repositories. Start reading
//! at [`RegistryServer`].

#![warn(missing_docs, missing_debug_implementations)]

mod blobs;
mod collect;
mod error;
mod manifests;
mod names;
mod server;
mod store;
mod uploads;

pub use server::{RegistryAccess, RegistryServer};
