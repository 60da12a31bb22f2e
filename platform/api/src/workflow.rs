//! `Workflow`: a state machine as an object, with its triggers; `Execution`: one run of it, read-only.
//!
//! A Workflow and the state machine of the same name in the Step Functions API are two views of one thing. Its
//! definition is an object or the text that was uploaded; [`definition`] compares definitions. In place of a definition
//! there may be `tasks` with dependencies, which the workflow language compiles to one.

pub mod definition;
pub mod names;
pub mod pattern;
pub mod schedule;
pub mod transform;
mod validation;

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::Value;

use crate::{
    duration::Span,
    k8s::apimachinery::pkg::apis::meta::v1::{Condition, Time},
};

pub use mayfly_vocabulary::StateMachineType;
pub use validation::{validate, validate_triggers};

/// A workflow: a state machine in the Amazon States Language, and what starts it. The same state machine is
/// served by the Step Functions API.
#[derive(CustomResource, Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "mayfly.dev",
    version = "v1",
    kind = "Workflow",
    doc = "A state machine in the Amazon States Language; the same one that the Step Functions API shows.",
    plural = "workflows",
    shortname = "wf",
    namespaced,
    status = "WorkflowStatus",
    derive = "Default",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct WorkflowSpec {
    /// STANDARD workflows survive restarts and have a history; EXPRESS ones answer at once and keep nothing.
    /// Immutable.
    #[serde(rename = "type", default, deserialize_with = "state_machine_type")]
    pub kind: StateMachineType,
    /// The state machine in the Amazon States Language: an object, or its JSON text. Either this or `tasks`.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    #[schemars(schema_with = "anything")]
    pub definition: Value,
    /// A graph of tasks by name, each with its `dependencies`, which is compiled to a state machine. Either this or
    /// `definition`.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    #[schemars(schema_with = "anything")]
    pub tasks: Value,
    /// The state machine's name (or ARN) where it is not the one that follows from the object's: `name` in the
    /// namespace default, `namespace.name` elsewhere. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_machine: Option<String>,
    /// The triggers of executions: by time (`schedule`) or by events (`event`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<Trigger>,
}

/// Reads the type of a workflow. [`StateMachineType`] itself also reads the spelling of early journals.
fn state_machine_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<StateMachineType, D::Error> {
    let word = String::deserialize(deserializer)?;
    StateMachineType::parse(&word).ok_or_else(|| D::Error::unknown_variant(&word, &["STANDARD", "EXPRESS"]))
}

/// Starts executions of a workflow, or asynchronous invocations of a function: at times (`schedule`) or when
/// something happens (`event`); one of the two.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Trigger {
    /// Unique in its workflow; executions are named after it.
    pub name: String,
    /// The schedule by which it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// The events that start it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<EventSource>,
    /// The executions' input. Without one: `{"trigger": …, "scheduledTime": …}`, or the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "anything")]
    pub input: Option<Value>,
    /// The input made from the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_transform: Option<InputTransform>,
    /// Whether the trigger starts nothing; times that pass meanwhile are not caught up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspend: bool,
}

/// The times of starts.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    /// Five fields (minute, hour, day, month, weekday), or six with seconds in front; or `@daily` and similar names.
    pub cron: String,
    /// An IANA time zone: `Europe/Berlin`. Default UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_zone: Option<String>,
    /// The policy for a start while an earlier execution of this trigger is running.
    #[serde(default)]
    pub overlap: Overlap,
    /// The number of missed starts (while the server was down) that are caught up, newest first. Default 1.
    #[serde(default = "one")]
    pub catch_up: u32,
    /// The maximum delay of a start. Default: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starting_deadline: Option<Span>,
    /// The maximum delay that is added to a start; always the same for the same start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<Span>,
}

fn one() -> u32 {
    1
}

/// The policy for a start while an earlier execution of the trigger is running.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// Both run.
    #[default]
    Allow,
    /// The new one is not started.
    Forbid,
    /// The earlier one is stopped.
    Replace,
}

/// The events that start an execution.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct EventSource {
    /// A pattern in EventBridge's language.
    #[schemars(schema_with = "anything")]
    pub pattern: Value,
}

/// An input made from an event.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct InputTransform {
    /// Names for parts of the event: `order: $.detail.order`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub paths: BTreeMap<String, String>,
    /// The input, with placeholders such as `<order>` for parts: an object whose texts have placeholders, or JSON
    /// text.
    #[schemars(schema_with = "anything")]
    pub template: Value,
}

/// The observed state of a workflow.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WorkflowStatus {
    /// The ARN of the state machine in the Step Functions API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_machine_arn: Option<String>,
    /// The state machine's revision; `INITIAL` for the one it was created with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_id: Option<String>,
    /// The definition that object and state machine last agreed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition_digest: Option<String>,
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`: executions of this definition can be started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The triggers, each with its last start and its next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<TriggerStatus>,
}

/// The state of a trigger.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TriggerStatus {
    /// The trigger's name.
    pub name: String,
    /// The schedule of the recorded times; another schedule starts without them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Earlier times are not started: the time at which the trigger, or its schedule, was created or resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// The last time of the schedule that was processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_schedule_time: Option<Time>,
    /// The next time of the schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_schedule_time: Option<Time>,
    /// The time of the last start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_start_time: Option<Time>,
    /// The execution that it started last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_execution: Option<String>,
    /// Executions it started that may still run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub active: Vec<String>,
    /// Starts that were not made: too late, or an earlier execution was running.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// The reason why the last start was not made, or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// One execution of a workflow: a view of the journal, read-only.
#[derive(CustomResource, Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "mayfly.dev",
    version = "v1",
    kind = "Execution",
    doc = "A run of a Workflow, as the engine's journal has it. Read only: `mayfly workflow start` and `stop`, or the Step Functions API, begin and end them.",
    plural = "executions",
    shortname = "exec",
    namespaced,
    status = "ExecutionStatus",
    derive = "Default",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct ExecutionSpec {
    /// The workflow's name, in the same namespace.
    pub workflow: String,
    /// The execution's own name.
    pub name: String,
    /// The ARN of the execution in the Step Functions API.
    pub execution_arn: String,
    /// The state machine's ARN.
    pub state_machine_arn: String,
    /// JSON text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<String>,
}

/// The observed state of an execution.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ExecutionStatus {
    /// RUNNING, SUCCEEDED, FAILED, TIMED_OUT or ABORTED.
    pub phase: String,
    /// The time of the start, to the millisecond.
    pub start_time: String,
    /// The time of the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_time: Option<String>,
    /// JSON text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// The error's name, when it did not succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The error's cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The number of times it was redriven.
    #[serde(default, skip_serializing_if = "is_none_yet")]
    pub redrive_count: u32,
    /// The history, a line for each event; only in the response to a request for one execution.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<String>,
}

fn is_none_yet(number: &u32) -> bool {
    *number == 0
}

/// The schema of a value of any type.
fn anything(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"x-kubernetes-preserve-unknown-fields": true})
}
