//! The number of replicas of each revision.
//!
//! [`policy`] decides it from exact demand and time, with Knative's semantics; [`owner`] watches the revisions with
//! requests or replicas, calls the policy and writes `replicas`. A revision at rest is not watched and costs nothing.

mod owner;
mod policy;
mod window;

pub(crate) use owner::Autoscaler;
