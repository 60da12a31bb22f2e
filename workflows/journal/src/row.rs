//! The rows of the journal.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::dataflow::Verdict;
use serde::{Deserialize, Serialize};

use mayfly_workflows_language::execution::RunStatus;
use mayfly_workflows_language::execution::{ContentDigest, Payload};

/// One execution, as it is listed and described.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecutionRow {
    /// The id, which rises in order of starts.
    pub id: u64,
    /// Its ARN.
    pub arn: ExecutionArn,
    /// Its name.
    pub name: String,
    /// The unqualified ARN of its state machine.
    pub machine_arn: StateMachineArn,
    /// The state machine's content.
    pub machine: ContentDigest,
    /// The version that was started.
    pub version_arn: Option<StateMachineArn>,
    /// The alias that was started.
    pub alias_arn: Option<StateMachineArn>,
    /// The map run it is a child of.
    pub map_run_arn: Option<MapRunArn>,
    /// The data with which the machine begins: see [`Birth`].
    pub birth: Birth,
    /// The input, as it was written.
    pub input: Payload,
    /// Milliseconds since the epoch.
    pub start_ms: i64,
    /// The status and result.
    pub outcome: OutcomeRow,
}

impl ExecutionRow {
    /// Whether it has not ended.
    pub fn is_open(&self) -> bool {
        self.outcome.status == RunStatus::Running
    }
}

/// Everything an open execution is recomputed from, but for its payloads and its state machine.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredExecution {
    /// Its row.
    pub row: ExecutionRow,
    /// Its newest checkpoint and the sequence number of the record before it.
    pub checkpoint: Option<(u64, Vec<u8>)>,
    /// The records after the checkpoint, in order.
    pub records: Vec<RecordRow>,
}

/// The constant data of an execution beside its input.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Birth {
    /// Seeds everything random in it, task tokens too.
    pub seed: [u8; 16],
    /// `X-Amzn-Trace-Id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_header: Option<String>,
    /// Evaluations of the first step that the wall clock ended. Absent where no record says which: an execution
    /// without JSONata, or one of an earlier version, which is computed again as it was then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<Vec<Verdict>>,
    /// The parent's number and the place of this child in its map run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ChildOf>,
    /// The task that started it and waits for its end (`states:startExecution.sync`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_by: Option<WaitedBy>,
    /// Which edition of the machine's rules it runs by (`machine::EDITION`): an execution of an earlier
    /// version, which noted none, is computed again as it was then.
    #[serde(default)]
    pub edition: u32,
}

/// A task that waits for the end of the execution it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitedBy {
    /// The id of the execution that the task belongs to.
    pub execution: u64,
    /// The task, as that execution's machine numbers its effects.
    pub effect: u32,
}

/// The map run and execution that a child belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildOf {
    /// The parent execution's number.
    pub execution: u64,
    /// The map run, as the parent's machine numbers it.
    pub run: u32,
    /// Which child.
    pub index: u32,
    /// The number of its items.
    pub items: u64,
}

/// The status and result of an execution; rewritten when it ends and when it is redriven.
#[derive(Debug, Clone, PartialEq)]
pub struct OutcomeRow {
    /// The status.
    pub status: RunStatus,
    /// When it ended.
    pub stop_ms: Option<i64>,
    /// Its output.
    pub output: Option<Payload>,
    /// The error's name.
    pub error: Option<String>,
    /// The error's cause.
    pub cause: Option<String>,
    /// The number of redrives.
    pub redrive_count: u32,
    /// When it was last redriven.
    pub redrive_ms: Option<i64>,
}

impl OutcomeRow {
    /// The outcome of an execution that runs.
    pub fn running() -> Self {
        Self {
            status: RunStatus::Running,
            stop_ms: None,
            output: None,
            error: None,
            cause: None,
            redrive_count: 0,
            redrive_ms: None,
        }
    }
}

/// One thing that came from outside.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordRow {
    /// 1, 2, 3… within the execution.
    pub seq: u64,
    /// When it came.
    pub at_ms: i64,
    /// The event, as `machine::Event` is encoded.
    pub body: Vec<u8>,
}

/// The owner of listed executions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecutionOwner {
    /// All executions except the children of map runs.
    Everyone,
    /// A state machine's.
    Machine(StateMachineArn),
    /// A version's.
    Version(StateMachineArn),
    /// An alias's.
    Alias(StateMachineArn),
    /// A map run's.
    MapRun(MapRunArn),
}

/// A page of a list, newest first.
#[derive(Debug, Clone)]
pub struct ListRows {
    /// The owner of the executions.
    pub owner: ExecutionOwner,
    /// Only with this status.
    pub status: Option<RunStatus>,
    /// Only redriven, or never redriven.
    pub redriven: Option<bool>,
    /// Only with a smaller number.
    pub before: Option<u64>,
    /// At most so many.
    pub limit: usize,
}

/// One change.
#[derive(Debug, Clone)]
pub enum JournalChange {
    /// A state machine, once per content.
    Machine {
        /// Of the body.
        digest: ContentDigest,
        /// JSON.
        body: std::sync::Arc<[u8]>,
    },
    /// A payload, once per content.
    Part {
        /// Of the text.
        digest: ContentDigest,
        /// JSON text.
        text: std::sync::Arc<str>,
    },
    /// A new execution.
    Start(Box<ExecutionRow>),
    /// Something that happened to an execution.
    Record {
        /// The execution's id.
        execution: u64,
        /// The record.
        row: RecordRow,
    },
    /// An execution ended or was taken up again.
    Outcome {
        /// The execution's id.
        execution: u64,
        /// The new outcome.
        row: Box<OutcomeRow>,
    },
    /// The state of an execution after one of its records, in place of the one before.
    Checkpoint {
        /// The execution's id.
        execution: u64,
        /// After which record.
        seq: u64,
        /// The encoded state machine.
        body: Vec<u8>,
    },
    /// Deletes an ended execution and everything that only it refers to.
    Remove {
        /// The execution's id.
        execution: u64,
    },
    /// A map run began.
    MapRun {
        /// Its ARN.
        arn: MapRunArn,
        /// The execution it belongs to.
        execution: u64,
    },
}
