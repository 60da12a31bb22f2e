//! The contract of the request path: the gateway calls, a host in the same process answers.
//!
//! The gateway calls [`FunctionHost::prepare`] once per revision, when it builds its routes, and keeps the handle.
//! Preparing loads nothing. The first [`HostedFunction::call`] loads the component if it is cold;
//! [`HostedFunction::unload`] makes it cold again. The *policy* (queueing, concurrency, when to unload) is that of the
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

/// Everything that a host needs to run one revision. Created at deploy time, so that nothing in it has to be looked
/// up, parsed or formatted per request.
#[derive(Clone, Debug, PartialEq)]
pub struct HostedSpec {
    /// Namespace and name of the Revision.
    pub revision: ObjectKey,
    /// Name of the Function, for logs and metrics.
    pub function: String,
    pub component: Digest,
    /// Resolved: no references left.
    pub env: Vec<(String, String)>,
    /// Bytes over all linear memories of one instance.
    pub memory_bytes_max: u64,
    /// From admission by the gateway to the end of the answer.
    pub timeout: Duration,
    /// Bytes of the answer's body.
    pub response_bytes_max: u64,
    /// Bytes per second that go to the log; `None`: the host's default.
    pub log_bytes_per_second: Option<u64>,
    pub isolation: Isolation,
    /// Outbound HTTP that is allowed. Empty: none.
    pub egress: Vec<EgressRule>,
    /// The tar archive whose content instances see as `/`, read-only.
    pub files: Option<Digest>,
}

/// A host that answers requests. Implemented by the wasm host and by [`crate::simulated`].
pub trait FunctionHost: Send + Sync + 'static {
    /// Makes a revision known. Cheap: no file is opened, nothing is compiled. Calling again with an equal
    /// spec gives the same handle; a changed spec (a Secret's value, say) gives a new one, and calls in
    /// flight finish on the old.
    fn prepare(&self, spec: HostedSpec) -> Arc<dyn HostedFunction>;

    /// Forgets a revision (it was deleted). Calls in flight finish.
    fn forget(&self, revision: &ObjectKey);
}

/// One revision on this host.
pub trait HostedFunction: Send + Sync + 'static {
    /// Answers a request. Begins at once, and resolves when the guest has given status and headers; the
    /// body streams after that. Dropping the future, or the response's body, cancels the guest. `deadline`
    /// covers the whole answer, body included: a body cut short by it ends with an error.
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

/// A guest's answer, and its timings.
pub struct Answer {
    pub response: Response<Body>,
    pub timings: Timings,
}

/// The parts of a call's duration, up to the guest's status and headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// The component was not in memory when the call arrived.
    pub cold: bool,
    /// Waiting for a free instance slot of the host.
    pub queue: Duration,
    /// Compiling or mapping the component. Zero when warm.
    pub load: Duration,
    /// Making the instance. Zero when one was reused.
    pub instantiate: Duration,
    /// The guest's own time until it answered.
    pub run: Duration,
}

impl Timings {
    /// From the call to the answer.
    pub fn total(&self) -> Duration {
        self.queue + self.load + self.instantiate + self.run
    }
}

/// Why a call got no answer from the guest. The gateway maps each to a status, in one place.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum CallError {
    /// No memory, file or other resource of the node's before the deadline.
    #[error("this node has no room for another instance")]
    Overloaded { retry_after: Duration },
    /// No instance slot in time: the function has its share, or all are taken.
    #[error("no instance could be made in time: the function has {held} of this node's {max}")]
    NoSlot { held: usize, max: usize, retry_after: Duration },
    #[error("component {0} is not in the artifact store: deploy the function again")]
    ComponentMissing(Digest),
    /// The component cannot be loaded or linked; the text names the import or the world.
    #[error("the component cannot run here: {0}")]
    ComponentInvalid(String),
    /// The guest trapped; the text is the trap and where.
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
