//! Executions: start, stop, redrive, describe, list.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use mayfly_workflows_journal::WaitedBy;
use mayfly_workflows_language::arn::{ArnQualifier, ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::JsonText;
use mayfly_workflows_language::value::Value;

use super::names::not_of_map;
use super::{ResourceName, ServiceError, WorkflowService};
use crate::engine::{
    Description, ExecutionOwner, HistoryQuery, ListQuery, Page, RedriveStatus, StartRequest, Started,
    StartedMachine,
};

/// AWS's limit of an input or an output, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 262_144;

/// The reason for which an execution is not redriven while its machine is being deleted (the model's words).
const DELETING: &str = "State machine is in DELETING status";

/// An execution to start.
#[derive(Clone)]
pub struct StartExecution {
    /// The state machine, or one of its versions or aliases.
    pub state_machine: StateMachineArn,
    /// The execution's name; a random one without it.
    pub name: Option<ResourceName>,
    /// JSON text; `{}` without it.
    pub input: Option<String>,
    /// `X-Amzn-Trace-Id`, passed through.
    pub trace_header: Option<String>,
}

/// Shows no payloads.
impl std::fmt::Debug for StartExecution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StartExecution")
            .field("state_machine", &self.state_machine)
            .field("name", &self.name)
            .field("trace_header", &self.trace_header)
            .finish_non_exhaustive()
    }
}

/// The definition that an execution runs, as it was when it started.
#[derive(Debug, Clone)]
pub struct ExecutionDefinition {
    /// The state machine.
    pub machine: Arc<StartedMachine>,
    /// The execution.
    pub execution: Description,
}

/// Parses the input of an execution: JSON, and not longer than AWS allows.
pub(crate) fn parse_input(input: &JsonText) -> Result<Value, ServiceError> {
    let text = input.text();
    ServiceError::check_length("input", None, text.len(), 0..=PAYLOAD_BYTES_MAX)?;
    input.value().map_err(|error| ServiceError::InvalidExecutionInput(error.describe(text)))
}

impl WorkflowService {
    /// StartExecution; returns when the start is durable (EXPRESS: when the execution runs).
    ///
    /// # Errors
    /// The state machine does not exist, the input is not JSON, the name is taken by another execution, too many
    /// executions are open, or the journal cannot be written.
    pub async fn start_execution(&self, request: StartExecution) -> Result<Started, ServiceError> {
        let request = self.start_request(request, None).await?;
        Ok(self.engine.start_execution(request).await?)
    }

    /// StartExecution for a task that waits for the execution's end. The execution must be one that can be described at
    /// its end, so an EXPRESS state machine is refused.
    ///
    /// # Errors
    /// As [`WorkflowService::start_execution`].
    pub async fn start_awaited(
        &self,
        request: StartExecution,
        waited_by: WaitedBy,
    ) -> Result<Started, ServiceError> {
        let request = self.start_request(request, Some(StateMachineType::Standard)).await?;
        Ok(self.engine.start_for(request, Some(waited_by)).await?)
    }

    /// StartSyncExecution: runs an EXPRESS execution to its end.
    ///
    /// # Errors
    /// As [`WorkflowService::start_execution`].
    pub async fn start_sync_execution(&self, request: StartExecution) -> Result<Description, ServiceError> {
        let request = self.start_request(request, Some(StateMachineType::Express)).await?;
        Ok(self.engine.start_sync(request).await?)
    }

    /// Resolves and checks a start.
    async fn start_request(
        &self,
        request: StartExecution,
        wanted: Option<StateMachineType>,
    ) -> Result<StartRequest, ServiceError> {
        let StartExecution { state_machine, name, input, trace_header } = request;
        not_of_map(&state_machine)?;
        self.finish_deletion(&state_machine.unqualified()).await?;
        let target = self.target(&state_machine)?;
        if wanted.is_some_and(|wanted| wanted != target.machine.kind) {
            return Err(ServiceError::StateMachineTypeNotSupported);
        }
        let input = JsonText::from(input.unwrap_or_else(|| "{}".to_owned()));
        parse_input(&input)?;
        Ok(StartRequest {
            state_machine: target.machine,
            name: name.map(ResourceName::into_string),
            input,
            trace_header,
            version_arn: target.version_arn,
            alias_arn: target.alias_arn,
        })
    }

    /// StopExecution; returns the time of the end.
    ///
    /// # Errors
    /// The execution does not exist, or the journal fails.
    pub async fn stop_execution(
        &self,
        arn: &ExecutionArn,
        error: Option<String>,
        cause: Option<String>,
    ) -> Result<Timestamp, ServiceError> {
        Ok(self.engine.stop(arn, error, cause).await?)
    }

    /// RedriveExecution; returns the time of the redrive. `token` identifies the request.
    ///
    /// # Errors
    /// The execution does not exist, cannot be redriven, or the journal fails.
    pub async fn redrive_execution(
        &self,
        arn: &ExecutionArn,
        token: Option<&str>,
    ) -> Result<Timestamp, ServiceError> {
        let found = self.engine.describe(arn).await?;
        if found.is_some_and(|found| self.redrivable(&found) == deleting()) {
            return Err(ServiceError::ExecutionNotRedrivable(DELETING.to_owned()));
        }
        Ok(self.engine.redrive(arn, token).await?)
    }

    /// DescribeExecution. `redrive_status` takes the state machine's deletion into account.
    ///
    /// # Errors
    /// The execution does not exist, or the journal fails.
    pub async fn describe_execution(&self, arn: &ExecutionArn) -> Result<Description, ServiceError> {
        let found = self.engine.describe(arn).await?;
        let found = found.ok_or_else(|| ServiceError::ExecutionDoesNotExist(arn.clone()))?;
        Ok(self.with_redrive_status(found))
    }

    /// DescribeExecution when the execution has ended, or as it is after `limit`. Not an operation of AWS, whose clients
    /// poll.
    ///
    /// # Errors
    /// As [`WorkflowService::describe_execution`].
    pub async fn describe_ended(
        &self,
        arn: &ExecutionArn,
        limit: Duration,
    ) -> Result<Description, ServiceError> {
        match tokio::time::timeout(limit, self.engine.wait(arn)).await {
            Ok(Ok(Some(found))) => Ok(self.with_redrive_status(found)),
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(None)) | Err(_) => self.describe_execution(arn).await,
        }
    }

    fn with_redrive_status(&self, found: Description) -> Description {
        let redrive_status = self.redrivable(&found);
        Description { redrive_status, ..found }
    }

    /// Whether an execution can be redriven: as its own end says, as long as its state machine is kept. (The model lists
    /// the reason for a machine that is being deleted; Mayfly gives it for one that was deleted, too.)
    fn redrivable(&self, found: &Description) -> RedriveStatus {
        let machine = found.state_machine_arn.without_label();
        let is_kept = self.catalog().read().machine(&machine).is_some_and(|machine| !machine.deleting);
        match &found.redrive_status {
            RedriveStatus::Redrivable if !is_kept => deleting(),
            status => status.clone(),
        }
    }

    /// DescribeStateMachineForExecution.
    ///
    /// # Errors
    /// The execution does not exist, or the journal fails.
    pub async fn describe_state_machine_for_execution(
        &self,
        arn: &ExecutionArn,
    ) -> Result<ExecutionDefinition, ServiceError> {
        let missing = || ServiceError::ExecutionDoesNotExist(arn.clone());
        let machine = self.engine.snapshot(arn).await?.ok_or_else(missing)?;
        let execution = self.engine.describe(arn).await?.ok_or_else(missing)?;
        Ok(ExecutionDefinition { machine, execution })
    }

    /// GetExecutionHistory: events in the shape of the API.
    ///
    /// # Errors
    /// The execution does not exist, the page is not one of its history, or the journal fails.
    pub async fn execution_history(
        &self,
        arn: &ExecutionArn,
        query: HistoryQuery,
    ) -> Result<Page<serde_json::Value>, ServiceError> {
        let page = self.engine.history(arn, query).await?;
        page.ok_or_else(|| ServiceError::ExecutionDoesNotExist(arn.clone()))
    }

    /// The owner of executions that are listed by the ARN of a state machine, a version or an alias.
    ///
    /// # Errors
    /// There is none with this ARN, or it is an EXPRESS state machine, whose executions are not kept.
    pub fn executions_of(&self, arn: StateMachineArn) -> Result<ExecutionOwner, ServiceError> {
        let missing = || ServiceError::StateMachineDoesNotExist(arn.clone());
        let book = self.catalog().read();
        let machine = book.machine(&arn.unqualified()).ok_or_else(missing)?;
        if machine.kind == StateMachineType::Express {
            return Err(ServiceError::StateMachineTypeNotSupported);
        }
        Ok(match arn.qualifier() {
            None => ExecutionOwner::StateMachine(arn),
            Some(ArnQualifier::Version(number)) => {
                book.version(&machine.arn, number).ok_or_else(missing)?;
                ExecutionOwner::Version(arn)
            }
            Some(ArnQualifier::Alias(name)) => {
                book.alias(&machine.arn, name).ok_or(ServiceError::ResourceNotFound)?;
                ExecutionOwner::Alias(arn)
            }
        })
    }

    /// The owner of executions that are the children of a map run.
    ///
    /// # Errors
    /// The map run does not exist, or the journal fails.
    pub async fn children_of(&self, arn: MapRunArn) -> Result<ExecutionOwner, ServiceError> {
        match self.engine.has_map_run(&arn).await? {
            true => Ok(ExecutionOwner::MapRun(arn)),
            false => Err(ServiceError::ResourceNotFound),
        }
    }

    /// ListExecutions, newest first.
    ///
    /// # Errors
    /// The page is not one of this list, or the journal fails.
    pub async fn list_executions(&self, query: ListQuery) -> Result<Page<Description>, ServiceError> {
        Ok(self.engine.list(query).await?)
    }
}

fn deleting() -> RedriveStatus {
    RedriveStatus::NotRedrivable(DELETING.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_json_of_at_most_256_kib() {
        assert_eq!(parse_input(&"{}".into()), Ok(Value::empty_object()));
        assert!(matches!(parse_input(&"{".into()), Err(ServiceError::InvalidExecutionInput(_))));
        let large = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX));
        let refused = parse_input(&large.into()).expect_err("too long");
        assert_eq!(
            refused.to_string(),
            "1 validation error detected: Value at 'input' failed to satisfy constraint: Member must have length less \
             than or equal to 262144"
        );
    }
}
