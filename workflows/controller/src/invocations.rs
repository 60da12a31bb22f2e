//! Asynchronous invocations of functions: requests that are answered once they are durable, and carried out later.
//!
//! Each is an execution of a state machine of its function ([`definition`]), so that the workflow engine's journal
//! keeps it, its timers retry it, and a restart of the server continues it. A function is called at least once for
//! each. These state machines are not in the catalog: neither the Step Functions API nor Workflow objects show them.

mod definition;
mod error;
mod gate;
mod stored;
mod waiting;

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderName, HeaderValue, Request, Response};
use jiff::{SignedDuration, Timestamp};
use mayfly_api::{
    Function, ObjectKey,
    invocation::AsyncInvocation,
    workflow::names::{EXECUTION_PREFIX, ROLE, STATE_MACHINE_PREFIX},
};
use mayfly_informer::Informer;
use mayfly_workflows_engine::engine::{
    Description, Engine, ExecutionChanged, ExecutionError, ExecutionOwner, HistoryQuery, IntegrationCall,
    InvokeError, ListQuery, RunStatus, StartError, StartRequest, StartedMachine, StateMachineType,
};
use mayfly_workflows_language::arn::{ExecutionArn, StateMachineArn};
use mayfly_workflows_language::parse;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::broadcast::Receiver;
use tokio_util::sync::CancellationToken;

pub use self::waiting::WaitingFull;
use self::{
    definition::{EVENT_AGE_EXCEEDED, definition},
    error::{failed, function_error, with_json_cause},
    gate::CallGate,
    stored::{StoredInvocation, StoredRetry},
    waiting::{WaitingInvocations, WaitingLimits},
};

/// The task of the state machines.
const RESOURCE: &str = "arn:aws:states:::mayfly:invoke";
/// The start of the names of the state machines. A name with a slash cannot be given to a workflow.
const MACHINE_PREFIX: &str = "mayfly-invocations/";
/// The header by which clients mark requests that are the same, and functions recognise a second attempt.
const HEADER_IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header by which a function learns the invocation's id.
const HEADER_INVOCATION_ID: HeaderName = HeaderName::from_static("mayfly-invocation-id");
/// Asynchronous calls of one function at the same time. The others wait here, in the order of their arrival, and leave
/// the function's queue in the gateway to synchronous requests.
const CALLS_MAX: u32 = 64;
/// State machines and gates that are kept; unused ones are removed beyond it.
const KEPT_MAX: usize = 1_024;
/// The last events of an invocation's history that are shown.
const HISTORY_MAX: usize = 100;
/// Events of an invocation's history that are read: three for each attempt and each delivery, of which there are fewer
/// than 200, and a few of the states around them.
const EVENTS_MAX: usize = 1_000;
/// Invocations of one page while a function's invocations are removed.
const PURGE_PAGE: usize = 256;

/// Calls functions of this cluster.
pub trait FunctionCaller: Send + Sync {
    /// Sends a request to a function and reads its answer.
    ///
    /// # Errors
    /// [`InvokeError::Unavailable`] if the call was not begun and can be repeated at once.
    fn call(
        &self,
        function: &ObjectKey,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<Response<Bytes>, InvokeError>>;
}

/// The asynchronous invocations of all functions.
pub struct Invocations {
    engine: Engine,
    functions: Informer<Function>,
    caller: Arc<dyn FunctionCaller>,
    machines: Mutex<HashMap<ObjectKey, (AsyncInvocation, Arc<StartedMachine>)>>,
    gates: Mutex<HashMap<ObjectKey, Weak<CallGate>>>,
    waiting: WaitingInvocations,
}

impl std::fmt::Debug for Invocations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Invocations").finish_non_exhaustive()
    }
}

/// Why an invocation was not queued.
#[derive(Debug, thiserror::Error)]
pub enum EnqueueError {
    /// Too many invocations wait.
    #[error(transparent)]
    Full(#[from] WaitingFull),
    #[error(transparent)]
    Start(#[from] StartError),
    /// The invocation to repeat cannot be read.
    #[error("{0}")]
    Unreadable(String),
}

/// One page of a function's invocations, newest first.
#[derive(Debug)]
pub struct InvocationPage {
    /// The invocations, as [`Invocations::describe`] returns them but without request, response and history.
    pub items: Vec<Value>,
    /// The token of the next page.
    pub next: Option<String>,
}

/// Whether an execution or a state machine with this ARN belongs to asynchronous invocations.
pub fn is_of_invocations(arn: &str) -> bool {
    [EXECUTION_PREFIX, STATE_MACHINE_PREFIX]
        .iter()
        .any(|prefix| arn.strip_prefix(prefix).is_some_and(|name| name.starts_with(MACHINE_PREFIX)))
}

fn machine_name(function: &ObjectKey) -> String {
    format!("{MACHINE_PREFIX}{}.{}", function.namespace, function.name)
}

fn machine_arn(function: &ObjectKey) -> StateMachineArn {
    StateMachineArn::from_trusted(format!("{STATE_MACHINE_PREFIX}{}", machine_name(function)))
}

/// The function and the id of an execution that is an invocation.
fn parse_arn(arn: &ExecutionArn) -> Option<(ObjectKey, &str)> {
    let (machine, id) =
        arn.as_str().strip_prefix(EXECUTION_PREFIX)?.strip_prefix(MACHINE_PREFIX)?.split_once(':')?;
    let (namespace, function) = machine.split_once('.')?;
    Some((ObjectKey::new(namespace, function), id))
}

pub(crate) fn execution_arn(function: &ObjectKey, id: &str) -> ExecutionArn {
    ExecutionArn::from_trusted(format!("{EXECUTION_PREFIX}{}:{id}", machine_name(function)))
}

impl Invocations {
    pub fn new(engine: Engine, functions: Informer<Function>, caller: Arc<dyn FunctionCaller>) -> Self {
        let waiting = WaitingInvocations::new(WaitingLimits::default());
        Self { engine, functions, caller, machines: Mutex::default(), gates: Mutex::default(), waiting }
    }

    /// Queues a request to a function and returns the invocation's id when it is durable. Requests to one function
    /// with the same `idempotency-key` header are one invocation.
    ///
    /// # Errors
    /// Nothing was queued.
    pub async fn enqueue(
        &self,
        function: ObjectKey,
        request: Request<Bytes>,
    ) -> Result<String, EnqueueError> {
        let key = request.headers().get(HEADER_IDEMPOTENCY_KEY);
        let name = key.map(|key| hex::encode(&Sha256::digest(key.as_bytes())[..16]));
        self.start(function, request, name).await
    }

    /// Starts the execution of an invocation.
    async fn start(
        &self,
        function: ObjectKey,
        request: Request<Bytes>,
        name: Option<String>,
    ) -> Result<String, EnqueueError> {
        self.waiting.admit(&function)?;
        let object = self.functions.get(&function);
        let rules = object.and_then(|object| object.spec.async_invocation.clone()).unwrap_or_default();
        let age = SignedDuration::try_from(rules.maximum_event_age.0).unwrap_or(SignedDuration::MAX);
        let deadline = Timestamp::now().checked_add(age).unwrap_or(Timestamp::MAX);
        let stored = StoredInvocation::new(&function, &request, deadline, StoredRetry::of(&rules));
        let start = StartRequest {
            state_machine: self.machine(&function, rules),
            name: name.clone(),
            // A structure of strings and numbers always has a JSON text.
            input: serde_json::to_string(&stored).unwrap_or_default().into(),
            trace_header: None,
            version_arn: None,
            alias_arn: None,
        };
        match (self.engine.start_execution(start).await, name) {
            (Ok(started), _) => Ok(started.execution_arn.last_field().to_owned()),
            // The earlier request has another deadline, and so another input.
            (Err(StartError::AlreadyExists { .. }), Some(name)) => Ok(name),
            (Err(error), _) => Err(error.into()),
        }
    }

    /// Counts the invocations that wait, and applies changes of functions to the calls that wait, until `stop`.
    /// `changes` begin before the engine resumes any execution.
    pub async fn follow(&self, changes: Receiver<ExecutionChanged>, stop: CancellationToken) {
        let resizing = stop.run_until_cancelled(self.resize_gates());
        tokio::join!(self.waiting.follow(&self.engine, changes, stop.clone()), resizing);
    }

    async fn resize_gates(&self) {
        let mut functions = self.functions.subscribe();
        loop {
            for function in functions.next().await {
                let gate = self.gates.lock().get(&function).and_then(Weak::upgrade);
                if let Some(gate) = gate {
                    gate.resize(self.calls_max(&function));
                }
            }
        }
    }

    /// The state machine of a function with these rules.
    fn machine(&self, function: &ObjectKey, rules: AsyncInvocation) -> Arc<StartedMachine> {
        let mut machines = self.machines.lock();
        if let Some((of, machine)) = machines.get(function)
            && *of == rules
        {
            return machine.clone();
        }
        let text = definition(function, &rules).to_string();
        let compiled = parse::compile(&text, StateMachineType::Standard);
        let compiled =
            compiled.unwrap_or_else(|_| unreachable!("a unit test compiles every form of it: {text}"));
        let machine = Arc::new(StartedMachine {
            arn: machine_arn(function),
            name: machine_name(function),
            role_arn: ROLE.to_owned(),
            kind: StateMachineType::Standard,
            definition_text: text.into(),
            definition: Arc::new(compiled),
            details: None,
            flow: None,
        });
        if machines.len() >= KEPT_MAX {
            machines.clear();
        }
        machines.insert(function.clone(), (rules, machine.clone()));
        machine
    }

    /// The bound of a function's calls at the same time.
    fn gate(&self, function: &ObjectKey) -> Arc<CallGate> {
        let mut gates = self.gates.lock();
        if let Some(gate) = gates.get(function).and_then(Weak::upgrade) {
            return gate;
        }
        let gate = Arc::new(CallGate::new(self.calls_max(function)));
        if gates.len() >= KEPT_MAX {
            gates.retain(|_, gate| gate.strong_count() > 0);
        }
        gates.insert(function.clone(), Arc::downgrade(&gate));
        gate
    }

    /// Asynchronous calls that a function may have at the same time.
    fn calls_max(&self, function: &ObjectKey) -> usize {
        let capacity = self.functions.get(function).map_or(CALLS_MAX, |object| {
            object.spec.limits.concurrency.saturating_mul(object.spec.scaling.max)
        });
        capacity.clamp(1, CALLS_MAX) as usize
    }

    /// Whether this is the resource of the task that invokes a function.
    pub(super) fn supports(resource: &str) -> bool {
        resource == RESOURCE
    }

    /// One attempt. Waits for the function's gate; the result is the answer's status.
    pub(super) async fn attempt(&self, call: IntegrationCall) -> Result<Value, InvokeError> {
        let stored: StoredInvocation =
            serde_json::from_value(call.arguments).map_err(|error| failed("States.Runtime", &error))?;
        let mut request = stored.request.request().map_err(|why| failed("States.Runtime", &why))?;
        let function = stored.key();
        let left = stored.deadline.duration_since(Timestamp::now());
        let left = Duration::try_from(left).unwrap_or(Duration::ZERO);
        let too_old =
            || failed(EVENT_AGE_EXCEEDED, &"the event reached its maximum age before the function answered");
        if left.is_zero() {
            return Err(too_old().into());
        }
        let gate = self.gate(&function);
        let Ok(turn) = tokio::time::timeout(left, gate.turn()).await else { return Err(too_old().into()) };
        // The gate is never closed.
        let _turn = turn.map_err(|error| failed("States.Runtime", &error))?;
        let id = call.origin.execution.last_field();
        if let Ok(id) = HeaderValue::try_from(id) {
            request.headers_mut().entry(HEADER_IDEMPOTENCY_KEY).or_insert_with(|| id.clone());
            request.headers_mut().insert(HEADER_INVOCATION_ID, id);
        }
        let error = match self.caller.call(&function, request).await {
            Ok(response) if response.status().is_success() || response.status().is_redirection() => {
                return Ok(json!({"statusCode": response.status().as_u16()}));
            }
            Ok(response) => function_error(response.status().as_u16(), response.body()),
            Err(InvokeError::Failed(error)) => with_json_cause(error),
            Err(unavailable) => return Err(unavailable),
        };
        match stored.is_given_up(call.retries, Timestamp::now()) {
            true => Err(too_old().into()),
            false => Err(error.into()),
        }
    }

    /// A function's invocations, newest first; `status` as in the Step Functions API, `from` the token of a page.
    ///
    /// # Errors
    /// [`ExecutionError::InvalidPage`] for a token of another list.
    pub async fn list(
        &self,
        function: &ObjectKey,
        status: Option<RunStatus>,
        limit: usize,
        from: Option<String>,
    ) -> Result<InvocationPage, ExecutionError> {
        let of = ExecutionOwner::StateMachine(machine_arn(function));
        let page = self.engine.list(ListQuery { owner: of, status, redriven: None, limit, from }).await?;
        let items = page.items.iter().map(|found| summary(function, found)).collect();
        Ok(InvocationPage { items, next: page.next })
    }

    /// One invocation with its request, its result and the lines of its history; `None` if it does not exist.
    ///
    /// # Errors
    /// Of the journal.
    pub async fn describe(&self, function: &ObjectKey, id: &str) -> Result<Option<Value>, ExecutionError> {
        let arn = execution_arn(function, id);
        let Some(found) = self.engine.describe(&arn).await? else { return Ok(None) };
        let mut described = summary(function, &found);
        if let Ok(stored) = serde_json::from_str::<StoredInvocation>(&found.input) {
            described["request"] = json!(stored.request.shown());
            described["deadline"] = json!(stored.deadline);
        }
        if let Some(cause) = found.cause {
            described["cause"] = cause.into();
        }
        let query = HistoryQuery { reverse: false, include_data: false, limit: EVENTS_MAX, from: None };
        let history = self.engine.history(&arn, query).await?.map(|page| page.items).unwrap_or_default();
        described["attempts"] = attempts(&history).into();
        let shown = history.len().saturating_sub(HISTORY_MAX);
        described["history"] = history[shown..].iter().map(super::executions::line).collect();
        Ok(Some(described))
    }

    /// Queues the request of an invocation again, as a new invocation with an id of its own, and returns the id;
    /// `None` if the invocation does not exist. The function gets the idempotency key that the earlier attempts had:
    /// the client's, or the id of the first invocation.
    ///
    /// # Errors
    /// Nothing was queued.
    pub async fn retry(&self, function: &ObjectKey, id: &str) -> Result<Option<String>, EnqueueError> {
        let arn = execution_arn(function, id);
        let unreadable = |error: &dyn std::fmt::Display| EnqueueError::Unreadable(error.to_string());
        let Some(found) = self.engine.describe(&arn).await.map_err(|error| unreadable(&error))? else {
            return Ok(None);
        };
        let stored: StoredInvocation =
            serde_json::from_str(&found.input).map_err(|error| unreadable(&error))?;
        let mut request = stored.request.request().map_err(|error| unreadable(&error))?;
        if let Ok(id) = HeaderValue::try_from(id) {
            request.headers_mut().entry(HEADER_IDEMPOTENCY_KEY).or_insert(id);
        }
        // Without a name of the key's, by which it would be recognised as the earlier one.
        self.start(function.clone(), request, None).await.map(Some)
    }

    /// Removes a function's invocations: those that have not ended are ended first. With `status` only those of this
    /// status. Returns the number of removed invocations.
    ///
    /// # Errors
    /// Some may have been removed.
    pub async fn purge(
        &self,
        function: &ObjectKey,
        status: Option<RunStatus>,
    ) -> Result<usize, ExecutionError> {
        let mut purged = 0;
        let mut from = None;
        loop {
            let of = ExecutionOwner::StateMachine(machine_arn(function));
            let query = ListQuery { owner: of, status, redriven: None, limit: PURGE_PAGE, from };
            let page = self.engine.list(query).await?;
            let arns: Vec<ExecutionArn> = page.items.into_iter().map(|found| found.execution_arn).collect();
            // Together, so that the journal makes a page durable in a few groups instead of one by one.
            futures::future::try_join_all(arns.iter().map(|arn| self.end(arn))).await?;
            purged += self.engine.forget(arns).await?;
            match page.next {
                Some(next) => from = Some(next),
                None => return Ok(purged),
            }
        }
    }

    /// Ends an invocation that is to be removed. One that retention or another purge removed meanwhile is no error.
    async fn end(&self, arn: &ExecutionArn) -> Result<(), ExecutionError> {
        match self.engine.stop(arn, Some("Mayfly.Purged".to_owned()), None).await {
            Ok(_) | Err(ExecutionError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The attempts to call the function, from an invocation's history, oldest event first. The deliveries to the
/// destination of failures, which a choice by the form of the event precedes, are not attempts.
fn attempts(history: &[Value]) -> usize {
    let of_function = history.iter().take_while(|event| event["type"] != "ChoiceStateEntered");
    of_function.filter(|event| event["type"] == "TaskStarted").count()
}

/// An invocation as it is listed.
fn summary(function: &ObjectKey, found: &Description) -> Value {
    let mut summary = json!({
        "id": found.name,
        "namespace": function.namespace,
        "function": function.name,
        "status": found.status.as_str(),
        "queuedTime": format!("{:.3}", found.start_date),
    });
    if let Some(stopped) = found.stop_date {
        summary["endTime"] = format!("{stopped:.3}").into();
    }
    if let Some(error) = &found.error {
        summary["error"] = error.as_str().into();
    }
    summary
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arns_of_invocations_are_recognised() {
        let function = ObjectKey::new("shop", "charge");
        assert!(is_of_invocations(machine_arn(&function).as_str()));
        assert!(is_of_invocations(execution_arn(&function, "i").as_str()));
        assert_eq!(parse_arn(&execution_arn(&function, "i")), Some((function.clone(), "i")));
        assert_eq!(parse_arn(&ExecutionArn::from_trusted(format!("{EXECUTION_PREFIX}shop.charge:i"))), None);
        assert!(!is_of_invocations(&format!("{STATE_MACHINE_PREFIX}mayfly-invocations")));
        assert!(!is_of_invocations(&format!("{EXECUTION_PREFIX}shop.charge:i")));
    }

    #[test]
    fn deliveries_are_no_attempts() {
        let history = |types: &[&str]| types.iter().map(|one| json!({"type": one})).collect::<Vec<_>>();
        let failed = ["TaskScheduled", "TaskStarted", "TaskFailed"].repeat(2);
        let delivered = ["TaskStateExited", "ChoiceStateEntered", "TaskScheduled", "TaskStarted"];
        assert_eq!(attempts(&history(&[&failed[..], &delivered].concat())), 2);
        assert_eq!(attempts(&history(&["TaskStateEntered", "TaskScheduled", "TaskStarted"])), 1);
        assert_eq!(attempts(&[]), 0);
    }
}
