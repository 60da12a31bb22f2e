//! One shared, decoded copy of each kind that a process needs, and the loop in which reconcilers run.
//!
//! **Belongs here:** [`Informer`], a kind's objects kept up to date by list and watch; [`Informers`], the one set of
//! them that a process shares, so that an event is decoded once; [`reconcile`], the work queue and loop that
//! controllers and the kubelet drive with an informer's changes; [`events`], the recorder of Events; [`EnvObjects`],
//! the two kinds that environment variables refer to, watched once one does.
//!
//! **Does not belong here:** the decisions of reconcilers, any other kind in particular, other writes to the API.
//!
//! While the API is unreachable every copy stays as it was: readers keep their last snapshot, and the informer lists
//! again, with growing and jittered pauses, until the API answers.
//!
//! Start reading at [`informer`].

#![warn(missing_debug_implementations)]

mod backoff;
mod changes;
mod env_objects;
pub mod events;
mod follow;
pub mod informer;
mod objects;
pub mod reconcile;
mod set;

pub use backoff::Backoff;
pub use changes::Changes;
pub use env_objects::{EnvObject, EnvObjects};
pub use events::EventRecorder;
pub use follow::follow;
pub use informer::{Change, Index, Informer};
pub use kube::runtime::watcher::Config as WatchConfig;
pub use set::Informers;
