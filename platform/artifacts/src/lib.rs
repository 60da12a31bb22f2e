//! Content-addressed files: uploaded components, and files derived from them.
//!
//! **Belongs here:** receiving a stream of bytes under its digest, finding, listing and removing it, and a place for
//! files that are derived from it (compiled components, unpacked archives) and removed with it.
//!
//! **Also here:** the same directory as a cache of another node's store ([`Artifacts::open_cache`]): reads fetch what is
//! missing, writes go to the origin first.
//!
//! **Does not belong here:** the meaning of a component, permissions, references of revisions to digests, the
//! protocol between a cache and its origin ([`ArtifactOrigin`]).
//!
//! ```text
//! DIR/sha256/<64 digits>                    a content; its name is its digest
//! DIR/sha256/.upload-…                      an upload or a fetch in progress; removed at the next open
//! DIR/sha256/.evicted-…                     leaves a cache; removed at the next open
//! DIR/sha256/.aside-<64 digits>.<number>    a content in removal; restored at the next open
//! DIR/derived/<engine>/<64 digits>.cwasm    derived by that engine from the content of that name
//! DIR/unpacked/<64 digits>/                 the files of the tar archive of that name
//! DIR/unpacked/.unpacking-…                 an archive being unpacked or removed; removed at the next open
//! DIR/cache                                 marks a cache
//! ```
//! A file gets its final name only when it is complete and on the disk. Start reading at [`Artifacts`].

#![warn(missing_debug_implementations)]

mod artifacts;
mod cache;
mod derived;
mod files;
mod origin;
mod removal;
mod unpacked;
mod upload;

pub use artifacts::{ArtifactInfo, Artifacts, ArtifactsOpenError};
pub use cache::{ArtifactPin, CacheConfig, FetchError, PinnedPath};
pub use derived::{EngineHash, InvalidEngineHash};
pub use origin::{ArtifactOrigin, ContentStream, OriginError};
pub use removal::{Quarantined, Removal};
pub use unpacked::UnpackError;
pub use upload::{Stored, UploadError};
