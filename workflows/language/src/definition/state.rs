//! States, compiled.

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
    /// The language in force here: the state's own, else the machine's.
    pub query_language: QueryLanguage,
    pub data: DataFlow,
    /// `Assign`: an object template, evaluated from the same snapshot as the output.
    /// A Choice state's own `Assign` is for when no rule matched.
    pub assign: Option<Template>,
    /// Task, Parallel and Map only.
    pub retry: Vec<Retrier>,
    /// Task, Parallel and Map only.
    pub catch: Vec<Catcher>,
    /// The next state. Succeed and Fail end; a Choice decides itself.
    pub next: Transition,
    pub kind: StateKind,
}

/// The target of a state, a rule or a catcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    End,
    Next(StateId),
    /// Only in a state compiled alone, as TestState does: the target is not there.
    Outside(Arc<str>),
}

/// The stages a state's input and result go through.
#[derive(Debug, Clone)]
pub enum DataFlow {
    JsonPath {
        input_path: PathField,
        /// `Parameters`; of a Map state it is the `item_selector` instead.
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
    /// Without `Parameters` or `Arguments`: they have another meaning.
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
    /// Absent or `"$"`: the result takes the input's place.
    Whole,
    /// `null`: the result is dropped, the input stays.
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
    /// `Resource` as it is written.
    pub arn: Arc<str>,
    /// Seconds; `States.Timeout` when they are over.
    pub timeout: Option<Quantity<u64>>,
    /// Seconds between heartbeats; `States.Timeout` too, which retriers and catchers may call
    /// `States.HeartbeatTimeout`.
    pub heartbeat: Option<Quantity<u64>>,
    /// `{"RoleArn": …}`.
    pub credentials: Option<Template>,
}

/// A number that is written down, or found in the data when the state runs.
#[derive(Debug, Clone)]
pub enum Quantity<T> {
    Value(T),
    /// From a `…Path` field.
    Path(Path),
    Expression(Expression),
}

#[derive(Debug, Clone)]
pub struct PassState {
    /// JSONPath only; JSONata states have `Output`.
    pub result: Option<Value>,
}

#[derive(Debug, Clone)]
pub struct ChoiceState {
    pub rules: Vec<ChoiceRule>,
    /// `None`: the state fails when no rule matches.
    pub default: Option<Transition>,
}

#[derive(Debug, Clone)]
pub struct ChoiceRule {
    pub condition: Condition,
    pub next: Transition,
    pub assign: Option<Template>,
    /// JSONata only.
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
    /// The instant and the text that names it.
    Value(Timestamp, Arc<str>),
    Path(Path),
    Expression(Expression),
}

#[derive(Debug, Clone)]
pub struct FailState {
    pub error: Option<Text>,
    pub cause: Option<Text>,
}

/// A string that is written down, or found when the state runs.
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
    /// Distributed only.
    pub item_reader: Option<ItemReader>,
    /// `ItemSelector`, or `Parameters` in older definitions.
    pub item_selector: Option<Template>,
    /// Distributed only.
    pub item_batcher: Option<Batcher>,
    /// Distributed only.
    pub result_writer: Option<ResultWriter>,
    /// 0 is no limit.
    pub max_concurrency: Quantity<u64>,
    /// Distributed only.
    pub tolerated_failure_count: Option<Quantity<u64>>,
    /// 0 to 100. Distributed only.
    pub tolerated_failure_percentage: Option<Quantity<f64>>,
    /// The map run's name begins with it. Distributed only.
    pub label: Option<Arc<str>>,
    /// Written with `Iterator`, as it was before `ItemProcessor`.
    pub legacy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapMode {
    Inline,
    /// Each item, or batch of items, is an execution of its own.
    Distributed(StateMachineType),
}

/// The source of a Map's items without a reader.
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

/// `ItemBatcher`: several items to one child execution.
#[derive(Debug, Clone)]
pub struct Batcher {
    pub batch_input: Option<Template>,
    pub max_items_per_batch: Option<Quantity<u64>>,
    pub max_input_bytes_per_batch: Option<Quantity<u64>>,
}

/// `ResultWriter`: results to a bucket instead of into the output.
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
    /// 1 when not given.
    pub interval_seconds: u64,
    /// 3 when not given; 0 is never.
    pub max_attempts: u64,
    /// 2.0 when not given.
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
    /// JSONPath only.
    pub result_path: ResultPath,
    pub assign: Option<Template>,
    /// JSONata only.
    pub output: Option<Template>,
    pub comment: Option<Arc<str>>,
}
