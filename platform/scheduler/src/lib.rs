//! Places pods on nodes.
//!
//! **Belongs here:** the cache of nodes and of what is bound to them, the snapshot made from it, the plan
//! (filters and scores) for one pod, preemption, the queue of pods that wait, binding.
//!
//! **Does not belong here:** how many pods there are (controllers), running them (the kubelet), any store
//! but the API.
//!
//! ```text
//!  informers ──▶ cache ──(changed nodes only)──▶ snapshot ──▶ plan ──▶ assume in the cache ──▶ bind (async)
//!      └───────▶ queue: active │ backing off │ unschedulable ──▲                  └─ failed: forget, retry
//! ```
//! One task owns cache, snapshot and queue; binding runs beside it. The pods of a gang are planned as one decision, all
//! or none ([`gangs`]). Start reading at [`plan`], then
//! [`Scheduler`].

#![warn(missing_debug_implementations)]

mod budgets;
pub mod cache;
mod evict;
pub mod gangs;
pub mod plan;
mod pod_constraints;
pub mod pod_index;
pub mod preemption;
pub mod queue;
pub mod rehearsal;
pub mod request;
mod run;
pub mod snapshot;
mod state;
mod storage;
mod topology;
pub mod volumes;

pub use rehearsal::Rehearsal;
pub use run::{Config, Scheduler};
