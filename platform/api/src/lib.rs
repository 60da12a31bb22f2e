//! The data types of Mayfly's APIs, with their validation and defaults.
//!
//! **Belongs here:** Mayfly's kinds ([`Function`], [`Revision`], [`Workflow`], [`Execution`], [`JobQueue`]), the
//! built-in kinds ([`k8s`], re-exported from `k8s-openapi`), names, quantities, durations, digests, selectors;
//! validation and defaults; plans that several parts share. Everything is plain data and pure functions.
//!
//! **Does not belong here:** tokio, HTTP, files, clocks, and everything that acts.
//!
//! Start reading at [`function`], then [`wellknown`] for labels and annotations.

#![warn(missing_debug_implementations)]

mod component_image;
pub mod duration;
pub mod egress;
pub mod env;
pub mod function;
pub mod gang;
pub mod gpu_placement;
pub mod invocation;
pub mod job_io;
pub mod job_queue;
pub mod labels;
pub mod names;
pub mod node_fit;
pub mod quantity;
pub mod resources;
pub mod revision;
pub mod selector;
pub mod validation;
pub mod volume_claims;
pub mod wellknown;
pub mod workflow;

pub use component_image::component_of_image;
pub use function::{Function, FunctionSpec, FunctionStatus};
pub use job_queue::{JobQueue, JobQueueSpec, JobQueueStatus};
pub use mayfly_vocabulary::{Digest, InvalidDigest};
pub use names::ObjectKey;
pub use revision::{
    ComponentState, ComponentStatus, Revision, RevisionSpec, RevisionStatus, revision_name, revision_number,
};
pub use workflow::{Execution, Workflow, WorkflowSpec, WorkflowStatus};

/// The built-in kinds, so that all crates use the same version of them.
pub use k8s_openapi as k8s;
