//! Calls that the machine requests. The executor performs them without further decisions.

use super::ids::{EffectId, MapRunId, TimerId};
use std::sync::Arc;

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::definition::{FlowId, Resource, StateId};
use mayfly_workflows_language::value::Value;
use serde::{Deserialize, Serialize};

use mayfly_workflows_language::execution::RunStatus;

/// One thing to do, after its cause is journalled.
#[derive(Debug, Clone)]
pub enum Action {
    /// Carry out an effect and report its outcome under its number.
    Effect {
        /// The machine's number for it.
        n: EffectId,
        /// The call.
        call: Call,
    },
    /// No state waits for this effect any more.
    Forget {
        /// The effect.
        n: EffectId,
    },
    /// Wake the machine.
    SetTimer {
        /// The machine's number for it.
        n: TimerId,
        /// The time, in milliseconds since the epoch.
        at_ms: i64,
    },
    /// Removes a timer.
    ClearTimer {
        /// The timer.
        n: TimerId,
    },
    /// Start a child of a map run; starting it twice is starting it once.
    StartChild(Box<ChildStart>),
    /// Stops a child of a map run, or an execution whose end a task waited for.
    StopChild {
        /// The child's ARN.
        arn: ExecutionArn,
    },
    /// A map run began: make it findable by its ARN.
    RegisterRun {
        /// The map run's ARN.
        arn: MapRunArn,
    },
    /// Apply [`super::Event::Continue`] when others had their turn.
    Continue,
    /// The execution ended.
    End,
}

/// The result of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutionOutcome {
    /// Never running.
    pub status: RunStatus,
    /// JSON text.
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
    /// The map run, as the machine numbers it.
    pub run: MapRunId,
    /// Which child.
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
    /// Its input.
    pub input: Value,
    /// The number of its items.
    pub items: u64,
    /// It may have ended before: then it is taken up again.
    pub redrive: bool,
}

/// An effect.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Call {
    /// A Task state's work.
    Task(Box<TaskCall>),
    /// Read a distributed Map's items.
    ReadItems {
        /// The Map state, whose `ItemReader` describes the source.
        state: StateId,
        /// The reader's arguments.
        #[serde(with = "super::checkpoint::exact")]
        arguments: Value,
        /// `MaxItems`, when there is a limit.
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
        /// The children, as they ended.
        #[serde(with = "super::checkpoint::results")]
        results: Arc<Vec<ChildResult>>,
    },
}

/// A Task state's work.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "super::checkpoint::StoredCall", into = "super::checkpoint::StoredCall")]
pub struct TaskCall {
    /// The resource that performs it.
    pub resource: Resource,
    /// The resource as it is written.
    pub arn: Arc<str>,
    /// The arguments.
    pub arguments: Value,
    /// The party that reports the task's end, if it is not the called service.
    pub token: Arc<str>,
    /// The service's answer when it accepted the task, if it has.
    pub submitted: Option<Value>,
}

/// A child of a map run that ended, for the result files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChildResult {
    /// The child's ARN.
    pub arn: ExecutionArn,
    /// The result of the execution.
    pub outcome: ExecutionOutcome,
    /// Its input.
    #[serde(with = "super::checkpoint::shared")]
    pub input: Arc<str>,
    /// When it was started.
    pub start_ms: i64,
    /// When its end became known.
    pub stop_ms: i64,
}
