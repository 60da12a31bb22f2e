//! Compiled states.

use std::sync::Arc;

use jiff::Timestamp;

use super::StateMachineType;
use super::{FlowId, QueryLanguage, Resource, StateId};
use crate::choice;
use crate::jsonata::Expression;
use crate::path::{Path, ReferencePath};
use crate::template::Template;
use crate::value::Value;

/// One state.
#[derive(Debug, Clone)]
pub struct State {
    pub id: StateId,
    pub name: Arc<str>,
    pub comment: Option<Arc<str>>,
    pub flow: super::FlowId,
    /// The state's own query language, or else the machine's.
    pub query_language: QueryLanguage,
    pub data: DataFlow,
    /// `Assign`: an object template, evaluated on the same snapshot as the output. A Choice state's own `Assign`
    /// applies if no rule matched.
    pub assign: Option<Template>,
    /// Only in Task, Parallel and Map states.
    pub retry: Vec<Retrier>,
    /// Only in Task, Parallel and Map states.
    pub catch: Vec<Catcher>,
    /// The next state. Succeed and Fail end the flow; a Choice state has rules instead.
    pub next: Transition,
    pub kind: StateKind,
}

/// The target of a state, a rule or a catcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    End,
    Next(StateId),
    /// A target that does not exist, in a state that was compiled alone for TestState.
    Outside(Arc<str>),
}

/// The stages that process a state's input and result.
#[derive(Debug, Clone)]
pub enum DataFlow {
    JsonPath {
        input_path: PathField,
        /// `Parameters`; a Map state has `item_selector` instead.
        parameters: Option<Template>,
        result_selector: Option<Template>,
        result_path: ResultPath,
        output_path: PathField,
    },
    Jsonata {
        arguments: Option<Template>,
        output: Option<Template>,
    },
}

impl DataFlow {
    /// Removes `Parameters` or `Arguments`, for states in which they have another meaning.
    pub(crate) fn without_parameters(mut self) -> DataFlow {
        match &mut self {
            DataFlow::JsonPath { parameters, .. } => *parameters = None,
            DataFlow::Jsonata { arguments, .. } => *arguments = None,
        }
        self
    }
}

/// `InputPath` and `OutputPath`.
#[derive(Debug, Clone)]
pub enum PathField {
    /// Absent or `"$"`: everything.
    Whole,
    /// `null`: an empty object.
    Nothing,
    Path(Path),
}

/// `ResultPath`.
#[derive(Debug, Clone)]
pub enum ResultPath {
    /// Absent or `"$"`: the result replaces the input.
    Whole,
    /// `null`: the result is discarded, the input is kept.
    Discard,
    Path(ReferencePath),
}

/// The type of a state, with its fields.
#[derive(Debug, Clone)]
pub enum StateKind {
    Task(TaskState),
    Pass(PassState),
    Choice(ChoiceState),
    Wait(WaitState),
    Succeed,
    Fail(FailState),
    Parallel(ParallelState),
    Map(Box<MapState>),
}

impl StateKind {
    /// The value of `Type`.
    pub fn name(&self) -> &'static str {
        match self {
            StateKind::Task(_) => "Task",
            StateKind::Pass(_) => "Pass",
            StateKind::Choice(_) => "Choice",
            StateKind::Wait(_) => "Wait",
            StateKind::Succeed => "Succeed",
            StateKind::Fail(_) => "Fail",
            StateKind::Parallel(_) => "Parallel",
            StateKind::Map(_) => "Map",
        }
    }
}

#[derive(Debug, Clone)]
pub struct TaskState {
    pub resource: Resource,
    /// `Resource` as written.
    pub arn: Arc<str>,
    /// Seconds until the task fails with `States.Timeout`.
    pub timeout: Option<Quantity<u64>>,
    /// Maximum seconds between heartbeats, after which the task fails with `States.Timeout`; retriers and catchers may
    /// also match it as `States.HeartbeatTimeout`.
    pub heartbeat: Option<Quantity<u64>>,
    /// `{"RoleArn": …}`.
    pub credentials: Option<Template>,
}

/// A literal number, or one that is read from the data at run time.
#[derive(Debug, Clone)]
pub enum Quantity<T> {
    Value(T),
    /// From a `…Path` field.
    Path(Path),
    Expression(Expression),
}

#[derive(Debug, Clone)]
pub struct PassState {
    /// Only in JSONPath; JSONata states have `Output`.
    pub result: Option<Value>,
}

#[derive(Debug, Clone)]
pub struct ChoiceState {
    pub rules: Vec<ChoiceRule>,
    /// `None`: the state fails if no rule matches.
    pub default: Option<Transition>,
}

#[derive(Debug, Clone)]
pub struct ChoiceRule {
    pub condition: Condition,
    pub next: Transition,
    pub assign: Option<Template>,
    /// Only in JSONata.
    pub output: Option<Template>,
    pub comment: Option<Arc<str>>,
}

#[derive(Debug, Clone)]
pub enum Condition {
    JsonPath(choice::ChoiceTest),
    Jsonata(Expression),
    /// JSONata's `"Condition": true` or `false`.
    Always(bool),
}

#[derive(Debug, Clone)]
pub enum WaitState {
    Seconds(Quantity<u64>),
    Timestamp(TimestampField),
}

#[derive(Debug, Clone)]
pub enum TimestampField {
    /// The instant, and its text in the definition.
    Value(Timestamp, Arc<str>),
    Path(Path),
    Expression(Expression),
}

#[derive(Debug, Clone)]
pub struct FailState {
    pub error: Option<Text>,
    pub cause: Option<Text>,
}

/// A literal string, or one that is evaluated at run time.
#[derive(Debug, Clone)]
pub enum Text {
    Literal(Arc<str>),
    /// From a `…Path` field: a path or an intrinsic function.
    Template(Template),
    Expression(Expression),
}

#[derive(Debug, Clone)]
pub struct ParallelState {
    pub branches: Vec<FlowId>,
}

#[derive(Debug, Clone)]
pub struct MapState {
    pub processor: FlowId,
    pub mode: MapMode,
    pub items: Items,
    /// Only in distributed mode.
    pub item_reader: Option<ItemReader>,
    /// `ItemSelector`, or `Parameters` in older definitions.
    pub item_selector: Option<Template>,
    /// Only in distributed mode.
    pub item_batcher: Option<Batcher>,
    /// Only in distributed mode.
    pub result_writer: Option<ResultWriter>,
    /// 0 means no limit.
    pub max_concurrency: Quantity<u64>,
    /// Only in distributed mode.
    pub tolerated_failure_count: Option<Quantity<u64>>,
    /// 0 to 100. Only in distributed mode.
    pub tolerated_failure_percentage: Option<Quantity<f64>>,
    /// The prefix of the map run's name. Only in distributed mode.
    pub label: Option<Arc<str>>,
    /// Whether the definition has the older field `Iterator` instead of `ItemProcessor`.
    pub legacy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapMode {
    Inline,
    /// Each item, or batch of items, is a child execution.
    Distributed(StateMachineType),
}

/// The source of a Map's items if it has no `ItemReader`.
#[derive(Debug, Clone)]
pub enum Items {
    /// The input itself.
    Whole,
    /// `ItemsPath`.
    Path(Path),
    /// JSONata's `Items`.
    Template(Template),
}

/// `ItemReader`: items from a file or a listing.
#[derive(Debug, Clone)]
pub struct ItemReader {
    /// A resource such as `arn:aws:states:::s3:getObject`.
    pub resource: Arc<str>,
    /// `Parameters` or `Arguments`.
    pub arguments: Option<Template>,
    /// `ReaderConfig.InputType`: JSON, JSONL, CSV, MANIFEST, PARQUET.
    pub input_type: Option<Arc<str>>,
    /// `ReaderConfig.Transformation`: NONE or LOAD_AND_FLATTEN.
    pub transformation: Option<Arc<str>>,
    /// `ReaderConfig.ManifestType`: ATHENA_DATA or S3_INVENTORY.
    pub manifest_type: Option<Arc<str>>,
    /// `ReaderConfig.CSVHeaderLocation`: FIRST_ROW or GIVEN.
    pub csv_header_location: Option<Arc<str>>,
    pub csv_headers: Vec<Arc<str>>,
    /// `ReaderConfig.CSVDelimiter`: COMMA, PIPE, SEMICOLON, SPACE or TAB.
    pub csv_delimiter: Option<Arc<str>>,
    /// `ReaderConfig.ItemsPointer`: a JSON pointer into the file.
    pub items_pointer: Option<Arc<str>>,
    pub max_items: Option<Quantity<u64>>,
}

/// `ItemBatcher`: several items per child execution.
#[derive(Debug, Clone)]
pub struct Batcher {
    pub batch_input: Option<Template>,
    pub max_items_per_batch: Option<Quantity<u64>>,
    pub max_input_bytes_per_batch: Option<Quantity<u64>>,
}

/// `ResultWriter`: writes results to a bucket instead of the output.
#[derive(Debug, Clone)]
pub struct ResultWriter {
    pub resource: Option<Arc<str>>,
    /// `Parameters` or `Arguments`.
    pub arguments: Option<Template>,
    /// `WriterConfig.OutputType`: JSON or JSONL.
    pub output_type: Option<Arc<str>>,
    /// `WriterConfig.Transformation`: NONE, COMPACT or FLATTEN.
    pub transformation: Option<Arc<str>>,
}

/// One entry of `Retry`.
#[derive(Debug, Clone)]
pub struct Retrier {
    pub error_equals: Vec<Arc<str>>,
    /// Default: 1.
    pub interval_seconds: u64,
    /// Default: 3; 0 means no retry.
    pub max_attempts: u64,
    /// Default: 2.0.
    pub backoff_rate: f64,
    pub max_delay_seconds: Option<u64>,
    pub jitter: Jitter,
    pub comment: Option<Arc<str>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jitter {
    None,
    Full,
}

/// One entry of `Catch`.
#[derive(Debug, Clone)]
pub struct Catcher {
    pub error_equals: Vec<Arc<str>>,
    pub next: Transition,
    /// Only in JSONPath.
    pub result_path: ResultPath,
    pub assign: Option<Template>,
    /// Only in JSONata.
    pub output: Option<Template>,
    pub comment: Option<Arc<str>>,
}
