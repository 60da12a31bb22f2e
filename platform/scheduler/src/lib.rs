//! Places pods on nodes.
//!
//! **Belongs here:** the [`cache`] of what every node has and has given away; the [`filter`]s that say
//! whether a pod fits a node and the [`score`]s that say how well; [`plan`], the pure decision over a
//! snapshot; the [`queue`] of pods that wait; the loop that assumes, binds and tells why not.
//!
//! **Does not belong here:** making pods, running them, evicting them.
//!
//! The shape is upstream's: a pod is *assumed* on its node at once, so that the next decision sees it, and
//! bound in the background; a binding that fails is forgotten and the pod comes back. Every decision looks
//! at every node: rows are packed and small, so there is no sampling.
//!
//! Start reading at [`scheduler`], then [`plan`].

pub mod cache;
pub mod filter;
pub mod plan;
pub mod queue;
pub mod request;
pub mod scheduler;
pub mod score;

pub use plan::{FitError, Placement, plan};
pub use scheduler::{Config, Scheduler};
