//! One shared, decoded copy of each kind a process needs, and the loop that reconcilers run in.
//!
//! **Belongs here:** [`Informer`], a kind's objects kept up to date by list and watch; [`Informers`], the
//! one set of them that a process shares, so that an event is decoded once; [`reconcile`], the work queue
//! and loop that controllers and the kubelet drive with an informer's changes; [`events`], by which they
//! tell people what they did; [`EnvObjects`], the two kinds that environments are made from, followed once
//! an environment names one.
//!
//! **Does not belong here:** what any reconciler decides, any other kind in particular, other writes to the API.
//!
//! An outage of the API leaves every copy as it was: readers keep their last snapshot, and the informer
//! lists again, with growing and jittered pauses, until the API is back.
//!
//! Start reading at [`informer`].

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
