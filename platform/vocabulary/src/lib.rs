//! The types that the data types of the Kubernetes API (`platform/api`) and the workflow language
//! (`workflows/language`) share.
//!
//! **Belongs here:** a type that both crates define otherwise: the digest of a content, the type of a state machine,
//! and the reading of JSON into a type of one's own.
//!
//! **Does not belong here:** a type that one of the two crates can own. Both are on floor 0 and neither depends on the
//! other; both may depend on this crate, which depends on no other crate of the workspace.
//!
//! Start reading at [`Digest`].

#![warn(missing_docs, missing_debug_implementations)]

mod digest;
pub mod json;
mod state_machine_type;

pub use digest::{Digest, InvalidDigest, bare_hex};
pub use state_machine_type::StateMachineType;
