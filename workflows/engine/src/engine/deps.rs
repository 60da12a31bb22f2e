//! The engine's dependencies, each behind one small trait.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt as _};
use http::{Request, Response};
use mayfly_workflows_language::arn::{ActivityArn, ExecutionArn, StateMachineArn};

use super::objects::ObjectStore;
use crate::catalog::Catalog;
use crate::service::{ServiceError, StartExecution, WorkflowService};

/// A function to call for a task.
#[derive(Clone)]
pub struct FunctionCall {
    /// The ARN or name, as the definition gives it.
    pub function: String,
    /// JSON text.
    pub payload: String,
    /// Fire and forget (`InvocationType: Event`).
    pub detached: bool,
    /// Equal for all attempts of one call: after a crash the function may be called again with a key that it has
    /// seen.
    pub idempotency_key: String,
}

/// Shows no payloads.
impl std::fmt::Debug for FunctionCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FunctionCall")
            .field("function", &self.function)
            .field("detached", &self.detached)
            .field("idempotency_key", &self.idempotency_key)
            .finish_non_exhaustive()
    }
}

/// The answer of a function.
#[derive(Clone)]
pub struct FunctionOutput {
    /// JSON text.
    pub payload: String,
    /// HTTP status of the invocation, 200 (202 when detached).
    pub status: u16,
    /// The version that answered (`$LATEST`); empty when none has yet, because the call is detached.
    pub executed_version: String,
}

/// Shows no payloads.
impl std::fmt::Debug for FunctionOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FunctionOutput")
            .field("status", &self.status)
            .field("executed_version", &self.executed_version)
            .finish_non_exhaustive()
    }
}

/// The task of a call, by ARNs.
#[derive(Debug, Clone)]
pub struct CallOrigin {
    /// The state machine's.
    pub state_machine: StateMachineArn,
    /// The execution's.
    pub execution: ExecutionArn,
}

/// The error of a function that gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionError {
    /// The error's name, as retriers and catchers match it.
    pub error_type: String,
    /// A text, usually JSON (`{"errorMessage":…,"errorType":…}`).
    pub cause: String,
}

impl FunctionError {
    /// An error of this name.
    pub fn new(error_type: impl Into<String>, cause: impl Into<String>) -> Self {
        Self { error_type: error_type.into(), cause: cause.into() }
    }

    /// Error for an integration that AWS supports and this installation does not.
    pub fn not_supported(cause: impl Into<String>) -> Self {
        Self::new("Mayfly.IntegrationNotSupported", cause)
    }
}

/// Reasons for which a call of a function or a service has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvokeError {
    /// The call's outcome, which the execution sees.
    Failed(FunctionError),
    /// The function cannot be called at this moment, because the server has not loaded its functions yet or is
    /// shutting down. Nothing was called, so this is no outcome; the engine tries again later.
    Unavailable {
        /// The reason, for the log.
        reason: String,
    },
}

impl From<FunctionError> for InvokeError {
    fn from(error: FunctionError) -> Self {
        Self::Failed(error)
    }
}

/// Calls functions: through the gateway in the server, scripted in tests.
pub trait Functions: Send + Sync {
    /// Calls one and waits for its answer. Dropping the future gives up.
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, InvokeError>>;
}

/// Sends the requests of `http:invoke` tasks, and those to services at an endpoint.
pub trait HttpTasks: Send + Sync {
    /// Sends a request. Connection errors are returned as text.
    fn send(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>>;

    /// Sends a request whose response may be large: the body is a stream without a size limit.
    fn open(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Streamed>, String>> {
        let answer = self.send(request);
        Box::pin(async move { Ok(answer.await?.map(|body| futures::stream::iter([Ok(body)]).boxed())) })
    }
}

/// A body that comes bit by bit; a connection that breaks is text.
pub type Streamed = BoxStream<'static, Result<Bytes, String>>;

/// The wire form of Step Functions' operations, for tasks whose arguments are requests (`states:startExecution`,
/// `aws-sdk:sfn:…`). The API crate implements it; the operations themselves are the [`WorkflowService`]'s.
pub trait WireOperations: Send + Sync {
    /// Decodes the request of a StartExecution and checks it against the service model.
    fn decode_start(&self, request: &serde_json::Value) -> Result<StartExecution, OperationError>;

    /// Carries out one operation; times of the answer are seconds, as on the wire.
    fn call<'a>(
        &'a self,
        service: &'a WorkflowService,
        operation: &'a str,
        request: &'a serde_json::Value,
    ) -> BoxFuture<'a, Result<serde_json::Value, OperationError>>;
}

/// No wire form: tasks that call Step Functions fail.
#[derive(Debug, Default)]
pub struct NoWireOperations;

impl NoWireOperations {
    fn error() -> OperationError {
        OperationError {
            code: "ServiceUnavailable".to_owned(),
            message: "the Step Functions API is not running in this process".to_owned(),
        }
    }
}

impl WireOperations for NoWireOperations {
    fn decode_start(&self, _request: &serde_json::Value) -> Result<StartExecution, OperationError> {
        Err(Self::error())
    }

    fn call<'a>(
        &'a self,
        _service: &'a WorkflowService,
        _operation: &'a str,
        _request: &'a serde_json::Value,
    ) -> BoxFuture<'a, Result<serde_json::Value, OperationError>> {
        Box::pin(async { Err(Self::error()) })
    }
}

/// An operation's refusal, as tasks see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationError {
    /// `StateMachineDoesNotExist`.
    pub code: String,
    /// The service's error message.
    pub message: String,
}

impl From<ServiceError> for OperationError {
    fn from(error: ServiceError) -> Self {
        if !error.is_refusal() {
            tracing::warn!(%error, "an operation of a task cannot be carried out");
        }
        Self { code: error.code().to_owned(), message: error.message().unwrap_or_default() }
    }
}

/// Services that the server adds (`job:run`). They may start executions themselves, and are therefore made from the
/// [`OpenedEngine`](super::OpenedEngine) that they are given to.
pub trait Integrations: Send + Sync {
    /// Performs a call of a resource that [`EngineDeps::supports_integration`] accepts; for a resource that ends in
    /// `.sync`, until the service's work has ended.
    fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<serde_json::Value, InvokeError>>;
}

/// No services: for an engine whose [`EngineDeps::supports_integration`] accepts no resource.
#[derive(Debug, Default)]
pub struct NoIntegrations;

impl Integrations for NoIntegrations {
    fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<serde_json::Value, InvokeError>> {
        let cause = format!("no service carries out {}", call.resource);
        Box::pin(async move { Err(FunctionError::not_supported(cause).into()) })
    }
}

/// A service to call for a task.
#[derive(Clone)]
pub struct IntegrationCall {
    /// The resource as it is written.
    pub resource: String,
    /// The task's arguments.
    pub arguments: serde_json::Value,
    /// Reports the task's end, when the resource waits for it.
    pub task_token: String,
    /// Equal for all attempts of one call.
    pub idempotency_key: String,
    /// The task of the call.
    pub origin: CallOrigin,
    /// Receives the details for the history event `TaskSubmitted` once, for a call that has begun and continues;
    /// `None` when the history has the event already.
    pub submitted: Option<tokio::sync::mpsc::Sender<serde_json::Value>>,
    /// The number of earlier retries in this visit of the state.
    pub retries: u32,
}

/// Shows neither the arguments nor the task token.
impl std::fmt::Debug for IntegrationCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IntegrationCall")
            .field("resource", &self.resource)
            .field("idempotency_key", &self.idempotency_key)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

/// Answers every task in place of the service it names: how a definition is
/// tested offline. Items and results of distributed maps still go through
/// [`ObjectStore`].
pub trait Mocks: Send + Sync {
    /// The behaviour of this task's service. Called once for each attempt of a task.
    fn answer(&self, call: MockCall) -> MockAnswer;
}

/// A task that a mock answers.
#[derive(Clone)]
pub struct MockCall {
    /// The state's name.
    pub state: String,
    /// The resource as it is written.
    pub resource: String,
    /// The task's arguments.
    pub arguments: serde_json::Value,
    /// The number of earlier retries in this visit of the state.
    pub retries: u32,
}

/// Shows no payloads.
impl std::fmt::Debug for MockCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MockCall")
            .field("state", &self.state)
            .field("resource", &self.resource)
            .field("retries", &self.retries)
            .finish_non_exhaustive()
    }
}

/// The behaviour of a mocked task.
#[derive(Clone)]
pub struct MockAnswer {
    /// The duration, by the engine's clock.
    pub after: std::time::Duration,
    /// The interval of heartbeats until then.
    pub heartbeat: Option<std::time::Duration>,
    /// JSON text or an error; `None`: it never answers.
    pub outcome: Option<Result<String, FunctionError>>,
}

/// Shows no payloads.
impl std::fmt::Debug for MockAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MockAnswer")
            .field("after", &self.after)
            .field("heartbeat", &self.heartbeat)
            .finish_non_exhaustive()
    }
}

/// Knows the activities.
pub trait Activities: Send + Sync {
    /// Whether an activity has this ARN.
    fn exists(&self, arn: &ActivityArn) -> bool;
}

/// Everything [`super::Engine::open`] is given. [`super::OpenedEngine::start`] is given the rest.
#[derive(Clone)]
pub struct EngineDeps {
    /// Sends HTTP requests.
    pub http: Arc<dyn HttpTasks>,
    /// Buckets, where no endpoint is given for S3.
    pub objects: Arc<dyn ObjectStore>,
    /// Source of the current time; injected for tests.
    pub clock: Arc<dyn crate::timers::Clock>,
    /// Random numbers; injected for tests.
    pub randomness: Arc<dyn Randomness>,
    /// The state machines that tasks can start.
    pub catalog: Arc<Catalog>,
    /// The wire form of operations for tasks that call Step Functions.
    pub wire: Arc<dyn WireOperations>,
    /// Knows the activities: the catalog, but in tests.
    pub activities: Arc<dyn Activities>,
    /// Whether the integrations that the engine is started with carry out a resource
    /// (`arn:aws:states:::job:run.sync`).
    pub supports_integration: fn(&str) -> bool,
    /// Answers all tasks in the place of their services, in tests of definitions.
    pub mocks: Option<Arc<dyn Mocks>>,
}

impl std::fmt::Debug for EngineDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineDeps").finish_non_exhaustive()
    }
}

/// Source of random numbers.
pub trait Randomness: Send + Sync {
    /// Sixteen fresh random bytes.
    fn bytes(&self) -> [u8; 16];

    /// A fresh UUID, version 4.
    fn uuid(&self) -> uuid::Uuid {
        uuid::Builder::from_random_bytes(self.bytes()).into_uuid()
    }
}

/// The operating system's randomness.
#[derive(Debug, Default)]
pub struct OsRandomness;

impl Randomness for OsRandomness {
    fn bytes(&self) -> [u8; 16] {
        *uuid::Uuid::new_v4().as_bytes()
    }
}
