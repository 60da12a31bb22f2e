//! How many replicas each revision should have.
//!
//! [`policy`] decides, from exact demand and time, with Knative's meanings; [`owner`] watches the revisions
//! that have work or replicas, asks the policy and writes `replicas`. A revision at rest is not watched and
//! costs nothing.

mod owner;
mod policy;
mod window;

pub(crate) use owner::Autoscaler;
