//! The rows of the journal.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::dataflow::Verdict;
use serde::{Deserialize, Serialize};

use mayfly_workflows_language::execution::RunStatus;
use mayfly_workflows_language::execution::{Digest, Payload};
use mayfly_workflows_language::ids::{EffectId, MapRunId};

/// One execution, with the data of list and describe requests.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecutionRow {
    /// The id, which increases in the order of starts.
    pub id: u64,
    /// Its ARN.
    pub arn: ExecutionArn,
    /// Its name.
    pub name: String,
    /// The unqualified ARN of its state machine.
    pub machine_arn: StateMachineArn,
    /// The state machine's content.
    pub machine: Digest,
    /// The version that was started.
    pub version_arn: Option<StateMachineArn>,
    /// The alias that was started.
    pub alias_arn: Option<StateMachineArn>,
    /// The map run it is a child of.
    pub map_run_arn: Option<MapRunArn>,
    /// Constant data of the execution: see [`Birth`].
    pub birth: Birth,
    /// The input, as the client sent it.
    pub input: Payload,
    /// Milliseconds since the epoch.
    pub start_ms: i64,
    /// The status and result.
    pub outcome: OutcomeRow,
}

impl ExecutionRow {
    /// Whether the execution has not ended.
    pub fn is_open(&self) -> bool {
        self.outcome.status == RunStatus::Running
    }
}

/// The data from which an open execution is recomputed, except payloads and the state machine.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredExecution {
    pub row: ExecutionRow,
    /// The newest checkpoint, and the sequence number of the record before it.
    pub checkpoint: Option<(u64, Vec<u8>)>,
    /// The records after the checkpoint, in order.
    pub records: Vec<RecordRow>,
}

/// The constant data of an execution apart from its input.
#[derive(Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Birth {
    /// The seed of all random values of the execution, including task tokens.
    pub seed: [u8; 16],
    /// `X-Amzn-Trace-Id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_header: Option<String>,
    /// Evaluations of the first step that were stopped by their time limit. `None` if this was not recorded: for an
    /// execution without JSONata, or one of an earlier version, which is recomputed as that version did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<Vec<Verdict>>,
    /// The parent's number and the index of this child in its map run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ChildOf>,
    /// The task that started the execution and waits for its end (`states:startExecution.sync`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_by: Option<WaitedBy>,
    /// The edition of the machine's rules (`machine::EDITION`) under which the execution started. Only development
    /// builds before edition 1 wrote none; their executions are refused like those of other unknown editions.
    #[serde(default)]
    pub edition: u32,
    /// The start ran no state: the first state follows in a record of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub starts_deferred: bool,
}

/// Does not show the seed, from which task tokens are made.
impl std::fmt::Debug for Birth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Birth")
            .field("parent", &self.parent)
            .field("waited_by", &self.waited_by)
            .field("edition", &self.edition)
            .finish_non_exhaustive()
    }
}

/// A task that waits for the end of the execution it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitedBy {
    /// The id of the execution that the task belongs to.
    pub execution: u64,
    /// The task's effect number in that execution.
    pub effect: EffectId,
}

/// The map run and execution that a child belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildOf {
    /// The parent execution's number.
    pub execution: u64,
    /// The map run's number in the parent.
    pub run: MapRunId,
    /// The index of the child.
    pub index: u32,
    /// The number of items of the child.
    pub items: u64,
}

/// The status and result of an execution; rewritten when it ends and when it is redriven.
#[derive(Debug, Clone, PartialEq)]
pub struct OutcomeRow {
    /// The status.
    pub status: RunStatus,
    /// The end, in milliseconds since the epoch.
    pub stop_ms: Option<i64>,
    /// The output.
    pub output: Option<Payload>,
    /// The error's name.
    pub error: Option<String>,
    /// The error's cause.
    pub cause: Option<String>,
    /// The number of redrives.
    pub redrive_count: u32,
    /// The last redrive, in milliseconds since the epoch.
    pub redrive_ms: Option<i64>,
}

impl OutcomeRow {
    /// The outcome of an execution that has just started.
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

/// One recorded event from outside.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordRow {
    /// 1, 2, 3… within the execution.
    pub seq: u64,
    /// The time of the event, in milliseconds since the epoch.
    pub at_ms: i64,
    /// The event, as `machine::Event` is encoded.
    pub body: Vec<u8>,
}

/// The owner of listed executions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecutionOwner {
    /// All executions except the children of map runs.
    Everyone,
    /// The executions of a state machine.
    StateMachine(StateMachineArn),
    /// The executions of a version.
    Version(StateMachineArn),
    /// The executions of an alias.
    Alias(StateMachineArn),
    /// The children of a map run.
    MapRun(MapRunArn),
}

/// A page of a list, newest first.
#[derive(Debug, Clone)]
pub struct ListRows {
    /// The owner of the executions.
    pub owner: ExecutionOwner,
    /// If set, only executions with this status.
    pub status: Option<RunStatus>,
    /// If set, only redriven executions, or only those never redriven.
    pub redriven: Option<bool>,
    /// If set, only executions with a smaller number.
    pub before: Option<u64>,
    /// The maximum number of executions.
    pub limit: usize,
}

/// A change to the journal.
#[derive(Debug, Clone)]
pub enum JournalChange {
    /// A state machine, stored once per digest.
    Machine {
        /// The digest of the body.
        digest: Digest,
        /// JSON text.
        body: std::sync::Arc<[u8]>,
    },
    /// A payload, stored once per digest.
    Part {
        /// The digest of the text.
        digest: Digest,
        /// JSON text.
        text: std::sync::Arc<str>,
    },
    /// A new execution.
    Start(Box<ExecutionRow>),
    /// An event of an execution.
    Record {
        /// The execution's number.
        execution: u64,
        /// The record.
        row: RecordRow,
    },
    /// An execution ended or was redriven.
    Outcome {
        /// The execution's number.
        execution: u64,
        /// The new outcome.
        row: Box<OutcomeRow>,
    },
    /// The state of an execution after one of its records; replaces the previous checkpoint.
    Checkpoint {
        /// The execution's number.
        execution: u64,
        /// The sequence number of that record.
        seq: u64,
        /// The encoded state machine.
        body: Vec<u8>,
    },
    /// Removes an ended execution, with the data that no other one references.
    Remove {
        /// The execution's number.
        execution: u64,
    },
    /// A map run began.
    MapRun {
        /// The map run's ARN.
        arn: MapRunArn,
        /// The execution it belongs to.
        execution: u64,
    },
}
