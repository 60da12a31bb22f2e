//! The targets of triggers: executions of a workflow's state machine, or asynchronous invocations of a function.

use mayfly_workflows_language::arn::{ExecutionArn, StateMachineArn};
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, header};
use mayfly_api::{
    Function, ObjectKey, Workflow,
    workflow::{Trigger, TriggerStatus},
};
use mayfly_workflows_engine::engine::StartError;
use mayfly_workflows_engine::service::{ResourceName, ServiceError, StartExecution, WorkflowService};
use serde_json::Value;

use crate::{
    invocations::{EnqueueError, Invocations, execution_arn},
    objects::state_machine_arn,
};

/// The header of an invocation's name: the same name is queued once.
const HEADER_IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The object that has a trigger.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum TriggerOwner {
    Workflow(ObjectKey),
    Function(ObjectKey),
}

/// The things that a trigger starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StartTarget {
    /// Executions of the state machine with this ARN.
    StateMachine(StateMachineArn),
    /// Asynchronous invocations.
    Function(ObjectKey),
}

/// An object with its triggers.
pub(super) struct Triggered<'a> {
    pub(super) owner: TriggerOwner,
    pub(super) uid: &'a Option<String>,
    pub(super) generation: Option<i64>,
    pub(super) target: StartTarget,
    pub(super) triggers: &'a [Trigger],
    /// The state of the triggers in the object's status.
    pub(super) stored: &'a [TriggerStatus],
}

impl<'a> Triggered<'a> {
    pub(super) fn workflow(object: &'a Workflow) -> Self {
        Self {
            owner: TriggerOwner::Workflow(ObjectKey::of(object)),
            uid: &object.metadata.uid,
            generation: object.metadata.generation,
            target: StartTarget::StateMachine(state_machine_arn(object)),
            triggers: &object.spec.triggers,
            stored: object.status.as_ref().map_or(&[], |status| &status.triggers),
        }
    }

    pub(super) fn function(object: &'a Function) -> Self {
        let key = ObjectKey::of(object);
        Self {
            owner: TriggerOwner::Function(key.clone()),
            uid: &object.metadata.uid,
            generation: object.metadata.generation,
            target: StartTarget::Function(key),
            triggers: &object.spec.triggers,
            stored: object.status.as_ref().map_or(&[], |status| &status.triggers),
        }
    }
}

/// The result of a start.
#[derive(Debug)]
pub(super) enum StartOutcome {
    /// The execution, or the invocation's execution, with this ARN runs.
    Started(ExecutionArn),
    /// The name is taken: it was started before.
    AlreadyStarted,
    /// It was refused, and would be again.
    Refused(String),
    /// It may succeed the next time.
    Failed(String),
}

/// Starts executions and invocations. Cheap to clone.
#[derive(Clone)]
pub(super) struct Starter {
    pub(super) service: WorkflowService,
    pub(super) invocations: Arc<Invocations>,
}

impl Starter {
    /// Starts an execution or an invocation under a name. The same name starts nothing a second time.
    pub(super) async fn start(&self, target: &StartTarget, name: &str, input: &Value) -> StartOutcome {
        match target {
            StartTarget::StateMachine(machine) => self.start_execution(machine, name, input).await,
            StartTarget::Function(function) => self.invoke(function, name, input).await,
        }
    }

    async fn start_execution(&self, machine: &StateMachineArn, name: &str, input: &Value) -> StartOutcome {
        let name = match ResourceName::parse(name) {
            Ok(name) => name,
            Err(error) => return StartOutcome::Refused(reason(&error)),
        };
        let request = StartExecution {
            state_machine: machine.clone(),
            name: Some(name),
            input: Some(input.to_string()),
            trace_header: None,
        };
        match Box::pin(self.service.start_execution(request)).await {
            Ok(started) => StartOutcome::Started(started.execution_arn),
            Err(ServiceError::ExecutionAlreadyExists(_)) => StartOutcome::AlreadyStarted,
            Err(error @ ServiceError::ExecutionLimitExceeded { .. }) => StartOutcome::Failed(reason(&error)),
            Err(error) if error.is_refusal() => StartOutcome::Refused(reason(&error)),
            Err(error) => StartOutcome::Failed(reason(&error)),
        }
    }

    /// Invokes a function with an event, as a POST of its JSON to `/`.
    async fn invoke(&self, function: &ObjectKey, name: &str, input: &Value) -> StartOutcome {
        let mut request = Request::new(Bytes::from(input.to_string()));
        *request.method_mut() = http::Method::POST;
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match HeaderValue::try_from(name) {
            Ok(key) => headers.insert(HEADER_IDEMPOTENCY_KEY, key),
            Err(error) => return StartOutcome::Refused(error.to_string()),
        };
        match self.invocations.enqueue(function.clone(), request).await {
            Ok(id) => StartOutcome::Started(execution_arn(function, &id)),
            Err(EnqueueError::Start(error @ StartError::AlreadyExists { .. })) => {
                StartOutcome::Refused(error.to_string())
            }
            Err(error) => StartOutcome::Failed(error.to_string()),
        }
    }
}

fn reason(error: &ServiceError) -> String {
    format!("{}: {error}", error.code())
}
