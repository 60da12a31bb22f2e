//! How an execution ends, and what is taken back when a state is left early.

use std::sync::Arc;

use mayfly_workflows_language::value::Value;

use super::call::{Action, Outcome};
use super::failure::Failure;
use super::state::Phase;
use super::turn::{Turn, failed};
use crate::engine::Status;
use crate::history::Details;

impl Turn<'_> {
    /// Ends the execution with an output.
    pub(super) fn end_succeeded(&mut self, cursor: u64, output: &Value) {
        let text: Arc<str> = output.to_text().into();
        let for_event = text.clone();
        self.emit(cursor, "ExecutionSucceeded", || {
            Some(Details::new("executionSucceededEventDetails").data("output", for_event))
        });
        self.end(Outcome { status: Status::Succeeded, output: Some(text), error: None, cause: None });
    }

    /// Ends the execution with an error.
    pub(super) fn end_failed(&mut self, cursor: u64, failure: Failure) {
        self.emit(cursor, "ExecutionFailed", || Some(failed("executionFailedEventDetails", &failure)));
        self.keep_wreck();
        self.end(Outcome {
            status: Status::Failed,
            output: None,
            error: failure.error,
            cause: failure.cause,
        });
    }

    pub(super) fn time_out(&mut self) {
        self.keep_wreck();
        self.emit(0, "ExecutionTimedOut", || Some(Details::new("executionTimedOutEventDetails")));
        self.end(Outcome { status: Status::TimedOut, output: None, error: None, cause: None });
    }

    pub(super) fn abort(&mut self, failure: Failure) {
        self.keep_wreck();
        self.emit(0, "ExecutionAborted", || Some(failed("executionAbortedEventDetails", &failure)));
        self.end(Outcome {
            status: Status::Aborted,
            output: None,
            error: failure.error,
            cause: failure.cause,
        });
    }

    fn end(&mut self, outcome: Outcome) {
        let threads: Vec<u32> = self.m.threads.keys().copied().collect();
        for number in threads {
            self.cancel_state(number);
        }
        let timers: Vec<u32> = self.m.timers.keys().copied().collect();
        for n in timers {
            self.clear_timer(n);
        }
        self.m.threads.clear();
        self.m.ready.clear();
        self.queue.clear();
        self.m.outcome = Some(outcome.clone());
        self.out.actions.push(Action::End(outcome));
    }

    /// Takes back everything that a thread's state has under way, the threads
    /// below it included.
    pub(super) fn cancel_state(&mut self, number: u32) {
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
            }
            Phase::Parallel { .. } | Phase::Map(_) => self.cancel_below(number),
            Phase::Run(run) => self.cancel_run(&run),
        }
    }

    fn cancel_below(&mut self, number: u32) {
        let below: Vec<u32> = self
            .m
            .threads
            .iter()
            .filter(|(_, thread)| thread.parent.is_some_and(|place| place.thread == number))
            .map(|(number, _)| *number)
            .collect();
        for number in below {
            self.cancel_state(number);
            self.m.threads.remove(&number);
            self.queue.retain(|queued| *queued != number);
        }
    }
}
