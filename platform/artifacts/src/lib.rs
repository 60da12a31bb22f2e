//! Content-addressed files: uploaded components, and what is made from them.
//!
//! Here belong: taking a stream of bytes in under its digest, finding, listing and
//! removing it, and a place beside it for files derived from it (compiled components), which go when
//! it goes.
//!
//! Not here: what a component is, who may upload, which revision still names a digest.
//!
//! ```text
//! DIR/sha256/<64 digits>                    a content; its name is its digest
//! DIR/sha256/.upload-…                      one that is still arriving; swept at the next open
//! DIR/sha256/.aside-<64 digits>.<number>    one that is about to be removed; put back at the next open
//! DIR/derived/<engine>/<64 digits>.cwasm    made from the content of that name by that engine
//! ```
//! A file appears under its final name only when it is whole and on the disk. Start reading at
//! [`Artifacts`].

mod artifacts;
mod derived;
mod files;
mod removal;
mod upload;

pub use artifacts::{ArtifactInfo, Artifacts, OpenError};
pub use derived::{EngineHash, InvalidEngineHash};
pub use removal::{Removal, SetAside};
pub use upload::{Stored, UploadError};
