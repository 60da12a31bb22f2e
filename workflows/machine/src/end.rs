//! The end of an execution, and the cancellation of effects and timers when a state is left early.

use super::ids::{ThreadId, TimerId};
use std::sync::Arc;

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::definition::{IntegrationPattern, Resource, StateKind};
use mayfly_workflows_language::value::Value;

use super::call::{Action, Call, ExecutionOutcome};
use super::failure::RaisedError;
use super::state::Phase;
use super::turn::{Turn, failure_details, iteration};
use crate::history::EventDetails;
use mayfly_workflows_language::execution::RunStatus;

impl Turn<'_> {
    /// Ends the execution with an output.
    pub(super) fn end_succeeded(&mut self, cursor: u64, output: &Value) {
        let text: Arc<str> = output.to_text().into();
        let for_event = text.clone();
        self.emit(cursor, "ExecutionSucceeded", || {
            Some(EventDetails::new("executionSucceededEventDetails").data("output", for_event))
        });
        self.end(ExecutionOutcome {
            status: RunStatus::Succeeded,
            output: Some(text),
            error: None,
            cause: None,
        });
    }

    /// Ends the execution with an error.
    pub(super) fn end_failed(&mut self, cursor: u64, failure: RaisedError) {
        self.emit(cursor, "ExecutionFailed", || {
            Some(failure_details("executionFailedEventDetails", &failure))
        });
        self.snapshot_failure();
        self.end(ExecutionOutcome {
            status: RunStatus::Failed,
            output: None,
            error: failure.error,
            cause: failure.cause,
        });
    }

    pub(super) fn time_out(&mut self) {
        self.snapshot_failure();
        // The event has the error name, DescribeExecution does not, and the event has no predecessor (measured on AWS:
        // floci-io/floci#2782). For an express execution the event is the only place for it.
        self.emit(0, "ExecutionTimedOut", || {
            Some(EventDetails::new("executionTimedOutEventDetails").text("error", "States.Timeout"))
        });
        let error = self.m.facts.express.then(|| "States.Timeout".into());
        self.end(ExecutionOutcome { status: RunStatus::TimedOut, output: None, error, cause: None });
    }

    pub(super) fn abort(&mut self, failure: RaisedError) {
        self.snapshot_failure();
        self.emit(0, "ExecutionAborted", || Some(failure_details("executionAbortedEventDetails", &failure)));
        self.end(ExecutionOutcome {
            status: RunStatus::Aborted,
            output: None,
            error: failure.error,
            cause: failure.cause,
        });
    }

    fn end(&mut self, outcome: ExecutionOutcome) {
        let threads: Vec<ThreadId> = self.m.threads.keys().copied().collect();
        for number in threads {
            self.cancel_state(number);
        }
        let timers: Vec<TimerId> = self.m.timers.keys().copied().collect();
        for n in timers {
            self.clear_timer(n);
        }
        self.m.threads.clear();
        self.m.ready.clear();
        self.m.reported.clear();
        self.queue.clear();
        self.m.outcome = Some(outcome);
        self.out.actions.push(Action::End);
    }

    /// Cancels all effects and timers of a thread's state, including those of threads below it.
    pub(super) fn cancel_state(&mut self, number: ThreadId) {
        let Some(active) = self.active_mut(number) else { return };
        match std::mem::replace(&mut active.phase, Phase::Entered) {
            Phase::Entered => {}
            Phase::Wait { timer } | Phase::Backoff { timer } => self.clear_timer(timer),
            Phase::Task(task) => {
                for timer in task.timeout.into_iter().chain(task.heartbeat.map(|(timer, _)| timer)) {
                    self.clear_timer(timer);
                }
                if self.m.effects.remove(&task.effect).is_some() {
                    self.out.actions.push(Action::Forget { n: task.effect });
                }
                self.stop_awaited(&task.call);
            }
            Phase::Parallel { .. } | Phase::Map(_) => {
                self.record_aborted_below(number);
                self.cancel_below(number);
            }
            Phase::Run(run) => self.cancel_run(&run),
        }
    }

    /// Stops the execution that a task (`states:startExecution.sync`) waits for: AWS calls StopExecution when the task
    /// is aborted (developer guide, "Run a Job (.sync)"). The guide does not say whether this applies to a task that
    /// timed out; Mayfly stops the execution then as well, like that of its own `job:run`.
    pub(super) fn stop_awaited(&mut self, call: &Call) {
        if let Call::Task(call) = call
            && let Resource::StartExecution { pattern: IntegrationPattern::Sync, .. } = call.resource
            && let Some(arn) = call.submitted.as_ref().and_then(|answer| answer.get("ExecutionArn"))
            && let Some(arn) = arn.as_str()
        {
            self.out.actions.push(Action::StopChild { arn: ExecutionArn::from_trusted(arn) });
        }
    }

    /// Records the abort of everything that runs in parallel to a failed part, innermost states first. These events do
    /// not follow each other. (The API reference shows that such events exist, with only an iteration's index in them;
    /// no recording shows their order.)
    fn record_aborted_below(&mut self, number: ThreadId) {
        if std::mem::take(&mut self.parts_to_record) {
            for number in self.threads_below(number) {
                self.record_aborted(number);
            }
        }
    }

    fn record_aborted(&mut self, number: ThreadId) {
        let definition = self.m.definition.clone();
        let Some(thread) = self.m.threads.get(&number) else { return };
        let (cursor, place) = (thread.cursor, thread.parent);
        let state = thread.active.as_ref().map(|active| definition.state(active.state));
        for number in self.threads_below(number) {
            self.record_aborted(number);
        }
        let kind = match state.map(|state| &state.kind) {
            Some(StateKind::Task(_)) => Some("TaskStateAborted"),
            Some(StateKind::Wait(_)) => Some("WaitStateAborted"),
            Some(StateKind::Parallel(_)) => Some("ParallelStateAborted"),
            Some(StateKind::Map(_)) => Some("MapStateAborted"),
            _ => None,
        };
        if let Some(kind) = kind {
            self.emit(cursor, kind, || None);
        }
        let around = place.and_then(|place| Some((place.slot, self.active(place.thread)?.state)));
        if let Some((slot, around)) = around
            && let around = definition.state(around)
            && matches!(around.kind, StateKind::Map(_))
        {
            self.emit(cursor, "MapIterationAborted", || {
                Some(iteration("mapIterationAbortedEventDetails", around, slot))
            });
        }
    }

    fn threads_below(&self, number: ThreadId) -> Vec<ThreadId> {
        let threads = self.m.threads.iter();
        threads
            .filter(|(_, thread)| thread.parent.is_some_and(|place| place.thread == number))
            .map(|(number, _)| *number)
            .collect()
    }

    fn cancel_below(&mut self, number: ThreadId) {
        for number in self.threads_below(number) {
            self.cancel_state(number);
            self.m.threads.remove(&number);
            self.queue.retain(|queued| *queued != number);
        }
    }
}
