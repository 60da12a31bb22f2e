//! Content-addressed files: uploaded components, and what is made from them.
//!
//! Here belong: taking a stream of bytes in by digest, finding, listing, verifying and removing it,
//! and a place beside it for files derived from it (compiled components), which go when it goes.
//!
//! Not here: what a component is, who may upload, which revision still names a digest; the API
//! server and the artifact collector know that. Start reading at [`Artifacts`].

mod artifacts;
mod derived;
mod upload;

pub use artifacts::{ArtifactInfo, Artifacts, VerifyError};
pub use derived::EngineHash;
pub use upload::{Stored, UploadError};
