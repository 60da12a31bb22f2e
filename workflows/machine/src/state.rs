//! The state of one execution.

use super::event::ReportedEnd;
use super::ids::{EffectId, MapRunId, ThreadId, TimerId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::dataflow::{Variables, Verdict};
use mayfly_workflows_language::definition::{FlowId, Resource, StateId, StateMachine};
use mayfly_workflows_language::value::Value;
use serde::{Deserialize, Serialize};

use super::call::{Action, Call, ChildResult, ExecutionOutcome};
use crate::history::HistoryEvent;
use mayfly_workflows_language::execution::RunStatus;

/// The constant facts of an execution.
pub struct Facts {
    /// The execution's number in the journal.
    pub execution: u64,
    /// Its ARN.
    pub arn: ExecutionArn,
    /// Its name.
    pub name: Arc<str>,
    /// The ARN of the execution role.
    pub role_arn: Arc<str>,
    /// The unqualified ARN of the state machine.
    pub machine_arn: StateMachineArn,
    /// The name of the state machine.
    pub machine_name: Arc<str>,
    /// Express executions are not journalled.
    pub express: bool,
    /// The version that was started, if any.
    pub version_arn: Option<StateMachineArn>,
    /// The alias that was started, if any.
    pub alias_arn: Option<StateMachineArn>,
    /// The input, as the client sent it.
    pub input_text: Arc<str>,
    /// The parsed input.
    pub input: Value,
    /// The start, in milliseconds since the epoch.
    pub start_ms: i64,
    /// The seed of all random values.
    pub seed: [u8; 16],
    /// The AWS partition, such as `aws`.
    pub partition: Arc<str>,
    /// The AWS region, such as `us-east-1`.
    pub region: Arc<str>,
    /// The AWS account: twelve digits.
    pub account: Arc<str>,
    /// The flow to run: the whole machine, or a Map's processor.
    pub flow: FlowId,
    /// The ARN of the map run, for a child.
    pub map_run_arn: Option<MapRunArn>,
    pub limits: ExecutionLimits,
    /// The start runs no state: [`super::Event::Continue`] runs the first one. For executions whose expressions may
    /// take long, so that the start is durable before the first evaluation.
    pub starts_deferred: bool,
}

/// Shows neither the input nor the seed, from which task tokens are made.
impl std::fmt::Debug for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Facts").field("arn", &self.arn).finish_non_exhaustive()
    }
}

/// The edition of the machine's rules, stored with each execution. A change of a rule that affects how the records of
/// running executions are replayed requires a new edition, and a release keeps the rules of the editions that earlier
/// releases wrote. No release has had the editions before 4, so their rules are gone and their executions are refused.
pub const EDITION: u32 = 4;

/// Bounds of one execution.
#[derive(Debug, Clone, Copy)]
pub struct ExecutionLimits {
    /// The maximum size of an input, an output or a result as JSON text, in bytes: AWS's 256 KiB.
    pub payload_bytes_max: usize,
    /// The number of events at which an execution fails, as on AWS (25,000); `None`: no limit.
    pub history_events_max: Option<u64>,
    /// The number of states that run before other executions get a turn.
    pub fused_states_max: u32,
    /// Concurrent iterations of an inline Map without `MaxConcurrency`: AWS's 40.
    pub inline_iterations_max: u64,
    /// Concurrent children of a map run: AWS's 10,000.
    pub map_run_children_max: u64,
    /// The maximum duration of an express execution in seconds: AWS's five minutes.
    pub express_seconds_max: u64,
}

impl Default for ExecutionLimits {
    fn default() -> Self {
        Self {
            payload_bytes_max: 256 * 1024,
            history_events_max: None,
            fused_states_max: 1_000,
            inline_iterations_max: 40,
            map_run_children_max: 10_000,
            express_seconds_max: 300,
        }
    }
}

/// The state of one execution.
#[derive(Debug, Serialize)]
pub struct Machine {
    #[serde(skip)]
    pub(super) facts: Arc<Facts>,
    #[serde(skip)]
    pub(super) definition: Arc<StateMachine>,
    pub(super) outcome: Option<ExecutionOutcome>,
    pub(super) next_event: u64,
    pub(super) next_number: u32,
    pub(super) threads: BTreeMap<ThreadId, Thread>,
    pub(super) timers: BTreeMap<TimerId, Timer>,
    /// The effects in progress, with the thread that waits for each.
    pub(super) effects: BTreeMap<EffectId, ThreadId>,
    pub(super) runs: BTreeMap<MapRunId, MapRunState>,
    pub(super) ready: VecDeque<ThreadId>,
    /// Reported ends of tasks that the next [`super::Event::Continue`] evaluates.
    pub(super) reported: VecDeque<(EffectId, ReportedEnd)>,
    pub(super) redrive_count: u32,
    pub(super) redrive_ms: Option<i64>,
    /// The tokens and times of the last redrives, oldest first.
    #[serde(skip_serializing_if = "VecDeque::is_empty")]
    pub(super) redrive_tokens: VecDeque<(String, i64)>,
    /// The state that a redrive resumes; `failed_in` in stored checkpoints.
    #[serde(rename = "failed_in")]
    pub(super) failed_snapshot: Option<FailureSnapshot>,
}

/// The state at an execution's failure, from which a redrive resumes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FailureSnapshot {
    pub(super) threads: BTreeMap<ThreadId, Thread>,
}

/// A running flow.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Thread {
    pub(super) parent: Option<ParentSlot>,
    /// The number of the event that precedes its next event.
    pub(super) cursor: u64,
    #[serde(with = "super::checkpoint::variables")]
    pub(super) variables: Variables,
    /// The innermost enclosing iteration.
    pub(super) item: Option<Item>,
    pub(super) active: Option<Active>,
    /// The state to enter, with its input.
    #[serde(with = "super::checkpoint::next")]
    pub(super) next: Option<(StateId, Value)>,
}

/// The destination of a thread's result.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct ParentSlot {
    pub(super) thread: ThreadId,
    pub(super) slot: u32,
}

/// `$$.Map.Item`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Item {
    /// Counted from 0.
    pub index: u64,
    /// The item.
    #[serde(with = "super::checkpoint::exact")]
    pub value: Value,
}

/// The current state of a thread.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Active {
    pub(super) state: StateId,
    /// The number of its StateEntered event.
    pub(super) entered: u64,
    pub(super) entered_ms: i64,
    #[serde(with = "super::checkpoint::exact")]
    pub(super) input: Value,
    /// Uses of each retrier in this visit.
    pub(super) attempts: Vec<u32>,
    pub(super) retries: u32,
    pub(super) phase: Phase,
}

/// The event that a state waits for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Phase {
    /// Nothing: the state is being executed.
    Entered,
    /// A Wait state's timer.
    Wait { timer: TimerId },
    /// A retrier's timer.
    Backoff { timer: TimerId },
    /// A Task's effect.
    Task(Box<TaskPhase>),
    /// The branches of a Parallel.
    Parallel {
        #[serde(with = "super::checkpoint::options")]
        outputs: Vec<Option<Value>>,
    },
    /// The iterations of an inline Map.
    Map(Box<MapPhase>),
    /// The children of a distributed Map, or the reading of its items or the writing of its results.
    Run(Box<RunPhase>),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TaskPhase {
    pub(super) effect: EffectId,
    pub(super) call: Call,
    pub(super) timeout: Option<TimerId>,
    pub(super) heartbeat: Option<(TimerId, u64)>,
    pub(super) seconds: TaskSeconds,
    /// Whether the task can be performed; always true except for activities.
    pub(super) accepted: bool,
    /// Whether a worker has taken the task, so that it is not handed out again.
    pub(super) taken: bool,
}

impl TaskPhase {
    /// Whether the engine performs nothing for the task: a worker or the holder of a token has it, or it waits in an
    /// activity's queue.
    fn waits_outside(&self) -> bool {
        let is_activity =
            matches!(&self.call, Call::Task(task) if matches!(task.resource, Resource::Activity(_)));
        self.taken || (is_activity && self.accepted)
    }
}

/// The evaluated time limits of a task.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct TaskSeconds {
    pub(super) timeout: Option<u64>,
    pub(super) heartbeat: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MapPhase {
    #[serde(with = "super::checkpoint::all")]
    pub(super) items: Arc<Vec<Value>>,
    /// The value of `$` in the item selector.
    #[serde(with = "super::checkpoint::exact")]
    pub(super) input: Value,
    pub(super) next: usize,
    pub(super) running: u64,
    pub(super) concurrency: u64,
    #[serde(with = "super::checkpoint::options")]
    pub(super) outputs: Vec<Option<Value>>,
    /// The number of the newest MapIterationSucceeded event.
    pub(super) cursor: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RunPhase {
    pub(super) run: MapRunId,
    #[serde(with = "super::checkpoint::exact")]
    pub(super) input: Value,
    /// The effect that reads items or writes results.
    pub(super) effect: Option<(EffectId, Call)>,
}

/// A map run of a distributed Map.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MapRunState {
    /// Its ARN.
    pub arn: MapRunArn,
    /// The Map state.
    pub state: StateId,
    /// The run's status.
    pub status: RunStatus,
    /// The start, in milliseconds since the epoch.
    pub start_ms: i64,
    /// The end, in milliseconds since the epoch.
    pub stop_ms: Option<i64>,
    /// The largest number of concurrent children; 0 for no limit.
    pub max_concurrency: u64,
    /// The number of items that may fail, if given.
    pub tolerated_count: Option<u64>,
    /// The percentage of items that may fail, 0 to 100, if given.
    pub tolerated_percentage: Option<f64>,
    /// The number of redrives.
    pub redrive_count: u32,
    /// The last redrive, in milliseconds since the epoch.
    pub redrive_ms: Option<i64>,
    pub(super) children: Vec<Child>,
    pub(super) next: usize,
    pub(super) running: u64,
    #[serde(with = "super::checkpoint::shared")]
    pub(super) name: Arc<str>,
    pub(super) flow: FlowId,
    pub(super) express: bool,
    pub(super) results_written: bool,
}

/// A child of a map run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Child {
    pub(super) arn: ExecutionArn,
    #[serde(with = "super::checkpoint::exact")]
    pub(super) input: Value,
    pub(super) items: u64,
    pub(super) start_ms: i64,
    pub(super) result: Option<ChildResult>,
}

/// The receiver of a timer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Timer {
    pub(super) at_ms: i64,
    pub(super) wakes: Wakes,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Wakes {
    Wait(ThreadId),
    Backoff(ThreadId),
    TaskTimeout(ThreadId),
    Heartbeat(ThreadId),
    Execution,
}

/// The result of one [`Machine::apply`].
#[derive(Debug, Default)]
pub struct Output {
    /// The actions to execute, in order.
    pub actions: Vec<Action>,
    /// The history's events, if a history was requested.
    pub history: Option<Vec<HistoryEvent>>,
    /// The number of entered states.
    pub transitions: u64,
    /// The evaluations that were stopped by their time limit.
    pub verdicts: Vec<Verdict>,
    /// Set when an event is replayed: the evaluations that were stopped in the first run.
    pub recorded_verdicts: Option<Vec<Verdict>>,
}

impl Machine {
    /// A machine that waits for [`super::Event::Start`].
    pub fn new(facts: Arc<Facts>, definition: Arc<StateMachine>) -> Self {
        Self {
            facts,
            definition,
            outcome: None,
            next_event: 1,
            next_number: 1,
            threads: BTreeMap::new(),
            timers: BTreeMap::new(),
            effects: BTreeMap::new(),
            runs: BTreeMap::new(),
            ready: VecDeque::new(),
            reported: VecDeque::new(),
            redrive_count: 0,
            redrive_ms: None,
            redrive_tokens: VecDeque::new(),
            failed_snapshot: None,
        }
    }

    /// The constant facts.
    pub fn facts(&self) -> &Arc<Facts> {
        &self.facts
    }

    /// The definition that it runs.
    pub fn definition(&self) -> &Arc<StateMachine> {
        &self.definition
    }

    /// The result, if the execution has ended.
    pub fn outcome(&self) -> Option<&ExecutionOutcome> {
        self.outcome.as_ref()
    }

    /// The number of redrives, and the time of the last one.
    pub fn redrives(&self) -> (u32, Option<i64>) {
        (self.redrive_count, self.redrive_ms)
    }

    /// The map runs of the execution, oldest first.
    pub fn map_runs(&self) -> impl Iterator<Item = (MapRunId, &MapRunState)> {
        self.runs.iter().map(|(number, run)| (*number, run))
    }

    /// Whether a state still waits for this effect.
    pub fn waits_for(&self, effect: EffectId) -> bool {
        self.effects.contains_key(&effect) && !self.is_reported(effect)
    }

    /// Whether the effect's end was reported and is not evaluated yet.
    pub(super) fn is_reported(&self, effect: EffectId) -> bool {
        self.reported.iter().any(|(reported, _)| *reported == effect)
    }

    /// The state that waits for this effect, and the number of its retries in this visit.
    pub fn state_of(&self, effect: EffectId) -> Option<(StateId, u32)> {
        let active = self.threads.get(self.effects.get(&effect)?)?.active.as_ref()?;
        Some((active.state, active.retries))
    }

    /// The heartbeat timer of an effect and its length in seconds.
    pub fn heartbeat(&self, effect: EffectId) -> Option<(TimerId, u64)> {
        let thread = self.threads.get(self.effects.get(&effect)?)?;
        match &thread.active.as_ref()?.phase {
            Phase::Task(task) => task.heartbeat,
            _ => None,
        }
    }

    /// Whether the execution waits only for timers, tokens and workers. Then it can be evicted from memory: the
    /// journal has everything needed to continue.
    pub fn only_waits(&self) -> bool {
        let waits = |thread: &Thread| match thread.active.as_ref().map(|active| &active.phase) {
            Some(Phase::Wait { .. } | Phase::Backoff { .. } | Phase::Parallel { .. } | Phase::Map(_)) => true,
            Some(Phase::Task(task)) => task.waits_outside(),
            Some(Phase::Entered | Phase::Run(_)) | None => false,
        };
        self.outcome.is_none()
            && self.ready.is_empty()
            && self.reported.is_empty()
            && self.threads.values().all(waits)
    }

    /// The due time of its next timer.
    pub fn next_timer_ms(&self) -> Option<i64> {
        self.timers.values().map(|timer| timer.at_ms).min()
    }

    /// Whether a state still waits for this timer.
    pub fn has_timer(&self, n: TimerId) -> bool {
        self.timers.contains_key(&n)
    }

    /// The actions for everything in progress, to be repeated after a crash: effects that no worker has taken, timers,
    /// children. Heartbeats are not journalled, so a worker gets its full heartbeat interval again.
    pub fn resume(&self, now_ms: i64) -> Vec<Action> {
        let mut actions = Vec::new();
        for (n, timer) in &self.timers {
            let whole = match timer.wakes {
                Wakes::Heartbeat(thread) => self.heartbeat_seconds(thread),
                _ => None,
            };
            let at_ms = whole.map_or(timer.at_ms, |seconds| {
                timer.at_ms.max(now_ms.saturating_add(super::turn::milliseconds(seconds)))
            });
            actions.push(Action::SetTimer { n: *n, at_ms });
        }
        for thread in self.threads.values() {
            match thread.active.as_ref().map(|active| &active.phase) {
                Some(Phase::Task(task)) if !task.taken && !self.is_reported(task.effect) => {
                    actions.push(Action::Effect { n: task.effect, call: task.call.clone() });
                }
                Some(Phase::Run(run)) => {
                    if let Some((n, call)) = &run.effect {
                        actions.push(Action::Effect { n: *n, call: call.clone() });
                    }
                }
                _ => {}
            }
        }
        for (number, run) in &self.runs {
            if run.status == RunStatus::Running {
                actions.push(Action::RegisterRun { arn: run.arn.clone() });
                actions.extend(run.children_under_way(*number));
            }
        }
        if !self.ready.is_empty() || !self.reported.is_empty() {
            actions.push(Action::Continue);
        }
        actions
    }

    fn heartbeat_seconds(&self, thread: ThreadId) -> Option<u64> {
        match &self.threads.get(&thread)?.active.as_ref()?.phase {
            Phase::Task(task) => task.seconds.heartbeat,
            _ => None,
        }
    }
}
