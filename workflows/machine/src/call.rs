//! Calls that the machine requests. The executor performs them without further decisions.

use super::ids::{EffectId, MapRunId, TimerId};
use std::sync::Arc;

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::definition::{FlowId, Resource, StateId};
use mayfly_workflows_language::value::Value;
use serde::{Deserialize, Serialize};

use mayfly_workflows_language::execution::RunStatus;

/// An action, to be executed after its cause is journalled.
#[derive(Debug, Clone)]
pub enum Action {
    /// Perform an effect, and report its outcome under its number.
    Effect {
        /// The number of the effect.
        n: EffectId,
        /// The call.
        call: Call,
    },
    /// Cancel an effect: no state waits for it any more.
    Forget {
        /// The effect.
        n: EffectId,
    },
    /// Set a timer, which reports [`super::Event::Timer`].
    SetTimer {
        /// The number of the timer.
        n: TimerId,
        /// The due time, in milliseconds since the epoch.
        at_ms: i64,
    },
    /// Cancel a timer.
    ClearTimer {
        /// The timer.
        n: TimerId,
    },
    /// Start a child of a map run; a repeated start has no effect.
    StartChild(Box<ChildStart>),
    /// Stop a child of a map run, or an execution that a task waited for.
    StopChild {
        /// The execution's ARN.
        arn: ExecutionArn,
    },
    /// A map run began: register its ARN.
    RegisterRun {
        /// The map run's ARN.
        arn: MapRunArn,
    },
    /// Apply [`super::Event::Continue`] after other executions had a turn.
    Continue,
    /// The execution ended.
    End,
}

/// The result of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutionOutcome {
    /// The final status.
    pub status: RunStatus,
    /// The output, as JSON text.
    #[serde(with = "super::checkpoint::maybe_shared")]
    pub output: Option<Arc<str>>,
    /// The error's name.
    #[serde(with = "super::checkpoint::maybe_shared")]
    pub error: Option<Arc<str>>,
    /// The error's cause.
    #[serde(with = "super::checkpoint::maybe_shared")]
    pub cause: Option<Arc<str>>,
}

/// A child execution of a map run.
#[derive(Debug, Clone)]
pub struct ChildStart {
    /// The map run's number in this execution.
    pub run: MapRunId,
    /// The index of the child.
    pub index: u32,
    /// The child's ARN.
    pub arn: ExecutionArn,
    /// The map run's ARN.
    pub run_arn: MapRunArn,
    /// `machine/label`, the name of the children's state machine.
    pub machine_name: Arc<str>,
    /// The flow of the parent's definition that it runs.
    pub flow: FlowId,
    /// Express executions are not journalled.
    pub express: bool,
    /// The child's input.
    pub input: Value,
    /// The number of items in the input.
    pub items: u64,
    /// Whether the child may have ended before: then it is redriven.
    pub redrive: bool,
}

/// An effect.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Call {
    /// Perform the work of a Task state.
    Task(Box<TaskCall>),
    /// Read a distributed Map's items.
    ReadItems {
        /// The Map state, whose `ItemReader` describes the source.
        state: StateId,
        /// The reader's arguments.
        #[serde(with = "super::checkpoint::exact")]
        arguments: Value,
        /// `MaxItems`, if there is a limit.
        max_items: Option<u64>,
    },
    /// Write a distributed Map's results.
    WriteResults {
        /// The Map state, whose `ResultWriter` describes the destination.
        state: StateId,
        /// The writer's arguments.
        #[serde(with = "super::checkpoint::exact")]
        arguments: Value,
        /// The map run.
        run_arn: MapRunArn,
        /// The results of the children.
        #[serde(with = "super::checkpoint::results")]
        results: Arc<Vec<ChildResult>>,
    },
}

/// The work of a Task state.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "super::checkpoint::StoredCall", into = "super::checkpoint::StoredCall")]
pub struct TaskCall {
    /// The resource that performs the work.
    pub resource: Resource,
    /// The resource as written in the definition.
    pub arn: Arc<str>,
    /// The arguments.
    pub arguments: Value,
    /// The token with which a party other than the called service may report the task's end.
    pub token: Arc<str>,
    /// The service's response when it accepted the task, if it has.
    pub submitted: Option<Value>,
}

/// Shows neither the arguments nor the token.
impl std::fmt::Debug for TaskCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskCall").field("arn", &self.arn).finish_non_exhaustive()
    }
}

/// An ended child of a map run, for the result files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChildResult {
    /// The child's ARN.
    pub arn: ExecutionArn,
    /// The result of the execution.
    pub outcome: ExecutionOutcome,
    /// The child's input.
    #[serde(with = "super::checkpoint::shared")]
    pub input: Arc<str>,
    /// When it was started.
    pub start_ms: i64,
    /// When its end became known.
    pub stop_ms: i64,
}
