//! The contract of the request path: the gateway calls functions of a host in the same process.
//!
//! The gateway calls [`FunctionHost::prepare`] once per revision, when it builds its routes, and keeps the handle.
//! Preparing loads nothing. The first [`HostedFunction::call`] loads the component if it is cold;
//! [`HostedFunction::unload`] makes it cold again. The *policy* (queueing, concurrency, when to unload) belongs to the
//! gateway and the kubelet; the host protects the machine (memory, instances, CPU).

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use mayfly_api::{Digest, ObjectKey, egress::EgressRule, function::Isolation};
use tokio::time::Instant;

/// An error while a body is streamed.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// A streamed body, in either direction.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// Everything that a host needs to run one revision. Created at deploy time, so that nothing in it has to be looked up,
/// parsed or formatted per request.
#[derive(Clone, Debug, PartialEq)]
pub struct HostedSpec {
    /// Namespace and name of the Revision.
    pub revision: ObjectKey,
    /// Name of the Function, for logs and metrics.
    pub function: String,
    pub component: Digest,
    /// All references are resolved.
    pub env: Vec<(String, String)>,
    /// The limit for all linear memories of one instance, in bytes.
    pub memory_bytes_max: u64,
    /// The time limit from admission by the gateway to the end of the response.
    pub timeout: Duration,
    /// The largest response body, in bytes.
    pub response_bytes_max: u64,
    /// The rate limit of logs, in bytes per second; `None`: the host's default.
    pub log_bytes_per_second: Option<u64>,
    pub isolation: Isolation,
    /// Rules of permitted outbound HTTP. Empty: none.
    pub egress: Vec<EgressRule>,
    /// The tar archive whose content instances see as `/`, read-only.
    pub files: Option<Digest>,
}

/// A host that runs functions. Implemented by the wasm host and by [`crate::simulated`].
pub trait FunctionHost: Send + Sync + 'static {
    /// Registers a revision. Cheap: no file is opened, nothing is compiled. An equal spec returns the same handle; a
    /// changed spec (a Secret's value, for example) returns a new one, and calls in flight finish on the old.
    fn prepare(&self, spec: HostedSpec) -> Arc<dyn HostedFunction>;

    /// Removes a deleted revision. Calls in flight finish.
    fn forget(&self, revision: &ObjectKey);
}

/// One revision on this host.
pub trait HostedFunction: Send + Sync + 'static {
    /// Calls the function. Starts at once, and resolves when the guest has returned status and headers; the body
    /// streams after that. Dropping the future, or the response's body, cancels the guest. `deadline` covers the whole
    /// response, including the body: a body truncated by it ends with an error.
    fn call(
        &self,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, CallError>>;

    /// Loads the component now, so that the next call is warm (adoption by a pod, `scaling.min`).
    fn load(&self) -> BoxFuture<'static, Result<(), CallError>>;

    /// Whether the component is in memory.
    fn is_loaded(&self) -> bool;

    /// Drops the component from memory. Calls in flight finish; the next call is cold.
    fn unload(&self);
}

/// A guest's response, and its timings.
pub struct Answer {
    pub response: Response<Body>,
    pub timings: Timings,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("status", &self.response.status()).finish_non_exhaustive()
    }
}

/// The phases of a call, up to the guest's status and headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Whether the component was not in memory when the call arrived.
    pub cold: bool,
    /// The wait for a free instance slot of the host.
    pub queue: Duration,
    /// The time for compiling or mapping the component. Zero when warm.
    pub load: Duration,
    /// The time for creating the instance. Zero if one was reused.
    pub instantiate: Duration,
    /// The time that the guest ran until it returned status and headers.
    pub run: Duration,
}

impl Timings {
    /// The time from the call to the response.
    pub fn total(&self) -> Duration {
        self.queue + self.load + self.instantiate + self.run
    }
}

/// The reason why a call got no response from the guest. The gateway maps each to a status in one place.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum CallError {
    /// Memory, files or another resource of the node did not become available before the deadline.
    #[error("this node has no room for another instance")]
    Overloaded { retry_after: Duration },
    /// No instance slot became available in time: the function uses its share, or all slots are taken.
    #[error("no instance could be made in time: the function has {held} of this node's {max}")]
    NoSlot { held: usize, max: usize, retry_after: Duration },
    #[error("component {0} is not in the artifact store: deploy the function again")]
    ComponentMissing(Digest),
    /// The component, or the function's files, cannot be fetched from the cluster's server at the moment, or there is
    /// no space for them here. They may exist; the text is the cause.
    #[error("{why}")]
    ComponentUnavailable { why: String, retry_after: Duration },
    /// The component cannot be loaded or linked; the text names the import or the world.
    #[error("the component cannot run here: {0}")]
    ComponentInvalid(String),
    /// The guest trapped; the text is the trap and its location.
    #[error("the function trapped: {0}")]
    Trapped(String),
    #[error("the function needed more memory than its limit of {}", mayfly_api::quantity::Bytes(*limit_bytes))]
    OutOfMemory { limit_bytes: u64 },
    #[error("the function did not answer within its timeout of {}", mayfly_api::duration::Span(*limit))]
    TimedOut { limit: Duration },
    /// The guest returned without setting a response.
    #[error("the function returned without answering")]
    NoAnswer,
    /// The guest set an error instead of a response; the text is its error code.
    #[error("the function answered with an error: {0}")]
    GuestError(String),
    #[error("the answer is larger than the function's limit of {}", mayfly_api::quantity::Bytes(*limit_bytes))]
    ResponseTooLarge { limit_bytes: u64 },
    #[error("the host is shutting down")]
    ShuttingDown,
    #[error("{0}")]
    Internal(String),
}
