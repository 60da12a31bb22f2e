//! Function → Revision → ReplicaSet.
//!
//! ```text
//!  Function spec changed ──▶ number N (annotated on the Function first) ──▶ Revision <name>-N, immutable
//!  Revision, component present ──▶ ReplicaSet of the same name, `scaling.min` replicas if it gets traffic
//!  Revision old, without traffic, past the history limit ──▶ deleted (and its ReplicaSet with it)
//! ```
//!
//! [`plan`] decides from a snapshot; [`act`] carries the plan out; [`status`] computes the status. The `replicas` of an
//! existing ReplicaSet are the autoscaler's; this controller only raises them to `scaling.min` while the revision gets
//! traffic.

mod act;
mod oci;
mod plan;
mod presence;
mod status;
#[cfg(test)]
mod tests;

pub(crate) use act::FunctionController;

use std::{fmt, sync::Arc};

use mayfly_api::{Function, ObjectKey};
use mayfly_distribution::RegistryClient;
use tokio::sync::watch;

/// The settings of the function controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The URL of the gateway, without a slash at the end: `http://127.0.0.1:8080`.
    pub gateway_url: String,
    /// Revisions without traffic that are kept for a function.
    pub history_max: usize,
    /// The largest number of functions that are reconciled at the same time.
    pub workers_max: usize,
    /// Checked before a function becomes Ready; without it, a ready revision is sufficient.
    pub routes: Option<Routes>,
    /// The client for components of `spec.source.oci`; without it they are not supported.
    pub registries: Option<RegistryClient>,
    /// Whether nodes run containers, which functions with `spec.source.image` need.
    pub containers: bool,
}

/// The state of the routes of this process's gateway.
#[derive(Clone)]
pub struct Routes {
    /// Whether requests are routed by this state of a function; the second argument is its latest ready revision.
    pub follow: Arc<RouteFollows>,
    /// Changes whenever routes change.
    pub changes: watch::Receiver<u64>,
}

/// See [`Routes::follow`].
pub type RouteFollows = dyn Fn(&Function, Option<&str>) -> bool + Send + Sync;

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes").finish_non_exhaustive()
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            gateway_url: "http://127.0.0.1:8080".into(),
            history_max: 10,
            workers_max: 16,
            routes: None,
            registries: None,
            containers: true,
        }
    }
}

/// The function that a revision, ReplicaSet or pod belongs to.
fn function_key<K: kube::Resource>(object: &K) -> Option<ObjectKey> {
    let function = crate::metadata::label(object, mayfly_api::wellknown::LABEL_FUNCTION)?;
    Some(ObjectKey::new(object.meta().namespace.clone()?, function))
}
