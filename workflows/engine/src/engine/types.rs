//! Requests to the engine and its responses, in the terms of the Step Functions API.

use std::sync::Arc;

use jiff::Timestamp;
use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::definition::{self, StateMachineType};
use mayfly_workflows_language::execution::{JsonText, RunStatus};
use serde::{Deserialize, Serialize};

use mayfly_workflows_journal::ExecutionOwner;

use crate::catalog::{EncryptionConfiguration, LoggingConfiguration, TracingConfiguration};

/// The state machine an execution runs, as it was when it started.
///
/// Made once per revision by the catalog and shared; kept in the journal, so that an execution outlives the deletion of
/// its state machine.
#[derive(Debug, Clone)]
pub struct StartedMachine {
    /// ARN without version or alias.
    pub arn: StateMachineArn,
    /// The name; `machine/label` for the children of a map run.
    pub name: String,
    /// The role that executions assume.
    pub role_arn: String,
    /// Standard or express.
    pub kind: StateMachineType,
    /// The definition as it was uploaded.
    pub definition_text: Arc<str>,
    /// The same, compiled.
    pub definition: Arc<definition::StateMachine>,
    /// The configuration of the revision; none if the state machine is not one of the catalog.
    pub details: Option<RevisionDetails>,
    /// The executed part of the definition: all of it if absent, a Map's processor for the children of a map run.
    pub flow: Option<definition::FlowId>,
}

/// The configuration of a state machine's revision, as it was when an execution started. Not used by the engine; its
/// serialised form is part of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevisionDetails {
    /// The encryption of executions.
    pub encryption_configuration: EncryptionConfiguration,
    /// The logging of executions.
    pub logging_configuration: LoggingConfiguration,
    /// The id of the revision; none for the first one.
    pub revision_id: Option<String>,
    /// The tracing of executions.
    pub tracing_configuration: TracingConfiguration,
    /// When the revision was made, in milliseconds since the epoch.
    pub update_date: i64,
}

/// Starts one execution.
#[derive(Debug, Clone)]
pub struct StartRequest {
    /// The state machine to run.
    pub state_machine: Arc<StartedMachine>,
    /// The execution's name; a random UUID when absent.
    pub name: Option<String>,
    /// JSON text, checked by the service; kept as it is written.
    pub input: JsonText,
    /// `X-Amzn-Trace-Id`, passed through.
    pub trace_header: Option<String>,
    /// Present when a version was started.
    pub version_arn: Option<StateMachineArn>,
    /// Present when an alias was started.
    pub alias_arn: Option<StateMachineArn>,
}

/// An accepted start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The execution's ARN.
    pub execution_arn: ExecutionArn,
    /// The time of the start; of the first start when equal starts came twice.
    pub start_date: Timestamp,
}

/// Whether an execution may be redriven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedriveStatus {
    /// The execution may be redriven.
    Redrivable,
    /// The execution may not be redriven; with AWS's reason.
    NotRedrivable(String),
    /// Only together with the map run it belongs to.
    RedrivableByMapRun,
}

/// The content of the answer of `DescribeExecution`.
#[derive(Clone)]
pub struct Description {
    /// The execution's ARN.
    pub execution_arn: ExecutionArn,
    /// The state machine's ARN, unqualified.
    pub state_machine_arn: StateMachineArn,
    /// The execution's name.
    pub name: String,
    /// Standard or express.
    pub kind: StateMachineType,
    /// The execution's status.
    pub status: RunStatus,
    /// When it started.
    pub start_date: Timestamp,
    /// When it ended.
    pub stop_date: Option<Timestamp>,
    /// The input, as it was written.
    pub input: Arc<str>,
    /// The output, when it succeeded.
    pub output: Option<Arc<str>>,
    /// The error's name, when it did not.
    pub error: Option<String>,
    /// The error's cause.
    pub cause: Option<String>,
    /// `X-Amzn-Trace-Id` of the start.
    pub trace_header: Option<String>,
    /// Version that was started.
    pub version_arn: Option<StateMachineArn>,
    /// Alias that was started.
    pub alias_arn: Option<StateMachineArn>,
    /// The map run that this child belongs to.
    pub map_run_arn: Option<MapRunArn>,
    /// The number of items that this child processes.
    pub item_count: Option<u64>,
    /// The number of redrives.
    pub redrive_count: u32,
    /// When it was last redriven.
    pub redrive_date: Option<Timestamp>,
    /// Whether the execution may be redriven now.
    pub redrive_status: RedriveStatus,
}

/// Shows no payloads.
impl std::fmt::Debug for Description {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Description")
            .field("execution_arn", &self.execution_arn)
            .field("kind", &self.kind)
            .field("status", &self.status)
            .field("start_date", &self.start_date)
            .field("stop_date", &self.stop_date)
            .field("error", &self.error)
            .field("redrive_count", &self.redrive_count)
            .finish_non_exhaustive()
    }
}

/// One page of a longer list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// The items of the page.
    pub items: Vec<T>,
    /// The token of the next page; absent on the last.
    pub next: Option<String>,
}

/// A question for [`super::Engine::list`]; answers come newest first.
#[derive(Debug, Clone)]
pub struct ListQuery {
    /// The owner of the executions.
    pub owner: ExecutionOwner,
    /// Only executions of this status.
    pub status: Option<RunStatus>,
    /// Only those that were (`true`) or never were (`false`) redriven.
    pub redriven: Option<bool>,
    /// The maximum number of items on a page.
    pub limit: usize,
    /// [`Page::next`] of the page before.
    pub from: Option<String>,
}

/// A question for [`super::Engine::history`].
#[derive(Debug, Clone)]
pub struct HistoryQuery {
    /// Newest first.
    pub reverse: bool,
    /// Inputs and outputs too.
    pub include_data: bool,
    /// The maximum number of items on a page.
    pub limit: usize,
    /// [`Page::next`] of the page before.
    pub from: Option<String>,
}

/// A worker's piece of work.
#[derive(Clone, PartialEq, Eq)]
pub struct ActivityTask {
    /// Names the work when its outcome is reported.
    pub token: String,
    /// JSON text.
    pub input: String,
}

/// Shows neither the token nor the input.
impl std::fmt::Debug for ActivityTask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ActivityTask").finish_non_exhaustive()
    }
}
