//! Applies one event: the machine runs until all threads wait.

use super::ids::{ThreadId, TimerId};
use std::collections::VecDeque;

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::dataflow::{Ambient, Variables};
use mayfly_workflows_language::definition::{State, StateId, StateKind, Transition};
use mayfly_workflows_language::value::Value;

use super::call::{Action, ExecutionOutcome};
use super::error_source::ErrorSource;
use super::event::Event;
use super::failure::RaisedError;
use super::stages::StateOutput;
use super::state::{Active, Machine, Output, Phase, Thread, Timer, Wakes};
use crate::history::{DetailField, EventDetails, HistoryEvent};

/// The maximum duration of a standard execution: one year, as on AWS.
pub(super) const EXECUTION_SECONDS_MAX: u64 = 31_536_000;

/// The root thread's number.
pub(super) const ROOT: ThreadId = ThreadId(0);

/// One application of an event to a machine.
pub(super) struct Turn<'a> {
    pub(super) m: &'a mut Machine,
    pub(super) at_ms: i64,
    pub(super) ambient: Ambient,
    pub(super) out: &'a mut Output,
    pub(super) queue: VecDeque<ThreadId>,
    /// Whether a Parallel or Map fails because of one of its parts.
    pub(super) parts_failed: bool,
    /// Whether the parts in parallel to a failed one have to record that they were aborted.
    pub(super) parts_to_record: bool,
}

impl Machine {
    /// Applies one event, which occurred at `at_ms`. `seq` is its sequence number in the journal, and part of the seed
    /// of all random values.
    pub fn apply(&mut self, at_ms: i64, seq: u64, event: Event, out: &mut Output) {
        if self.outcome.is_some() && !matches!(event, Event::Redrive { .. }) {
            return;
        }
        let seed = seed_of(&self.facts.seed, seq);
        let ambient = match out.recorded_verdicts.take() {
            Some(verdicts) => Ambient::replay(at_ms, seed, verdicts),
            None => Ambient::new(at_ms, seed),
        };
        let ambient = ambient.of_state_machine(self.facts.machine_arn.clone());
        let mut turn = Turn {
            m: self,
            at_ms,
            ambient,
            out,
            queue: VecDeque::new(),
            parts_failed: false,
            parts_to_record: false,
        };
        turn.take(event);
        turn.run();
        let Turn { ambient, out, .. } = turn;
        out.verdicts = ambient.into_verdicts();
    }
}

fn seed_of(seed: &[u8; 16], seq: u64) -> u64 {
    let (left, right) = seed.split_at(8);
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |sum, byte| (sum << 8) | u64::from(*byte));
    number(left) ^ number(right).rotate_left(17) ^ seq.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Turn<'_> {
    fn take(&mut self, event: Event) {
        match event {
            Event::Start => self.start(),
            Event::Timer { n } => self.timer(n),
            Event::Accepted { n } => self.task_accepted(n),
            Event::Refused { n, cause } => self.task_refused(n, cause),
            Event::Began { n, worker } => self.task_began(n, worker.as_deref()),
            Event::Submitted { n, output } => self.task_submitted(n, &output),
            Event::Succeeded { n, output } => self.effect_succeeded(n, &output),
            Event::Answered { n, output, status, version } => {
                self.function_answered(n, &output, status, version.as_deref());
            }
            Event::Failed { n, error, cause } => {
                let failure = RaisedError::of(error.map(Into::into), cause.map(Into::into));
                self.effect_failed(n, failure);
            }
            Event::Child { run, index, status, output, error, cause } => {
                let outcome = ExecutionOutcome {
                    status,
                    output: output.as_ref().and_then(|output| output.text().cloned()),
                    error: error.map(Into::into),
                    cause: cause.map(Into::into),
                };
                self.child_ended(run, index, outcome);
            }
            Event::UpdateRun {
                run,
                max_concurrency,
                tolerated_failure_count,
                tolerated_failure_percentage,
            } => {
                self.update_run(run, max_concurrency, tolerated_failure_count, tolerated_failure_percentage);
            }
            Event::Reported { n, end } => self.task_reported(n, end),
            Event::Continue => {
                while let Some((n, end)) = self.m.reported.pop_front() {
                    self.take(end.event(n, false));
                }
                self.queue.append(&mut self.m.ready);
            }
            Event::Stop { error, cause } => {
                self.abort(RaisedError::of(error.map(Into::into), cause.map(Into::into)));
            }
            Event::Redrive { token, deferred } => {
                self.redrive(token);
                if deferred {
                    self.m.ready.append(&mut self.queue);
                    self.out.actions.push(Action::Continue);
                }
            }
        }
    }

    fn start(&mut self) {
        let facts = self.m.facts.clone();
        let definition = self.m.definition.clone();
        self.emit(0, "ExecutionStarted", || {
            Some(
                EventDetails::new("executionStartedEventDetails")
                    .data("input", facts.input_text.clone())
                    .text("roleArn", facts.role_arn.clone())
                    .maybe("stateMachineAliasArn", facts.alias_arn.as_ref().map(StateMachineArn::as_str))
                    .maybe("stateMachineVersionArn", facts.version_arn.as_ref().map(StateMachineArn::as_str)),
            )
        });
        // A map run's child has its parent's definition, but not its timeout.
        let own = definition.timeout_seconds.filter(|_| facts.map_run_arn.is_none());
        let express = facts.express.then_some(facts.limits.express_seconds_max);
        if let Some(seconds) = own.into_iter().chain(express).min() {
            self.set_timer(self.at_ms.saturating_add(milliseconds(seconds)), Wakes::Execution);
        }
        let flow = definition.flow(facts.flow);
        self.m.threads.insert(
            ROOT,
            Thread {
                parent: None,
                cursor: 0,
                variables: Variables::default(),
                item: None,
                active: None,
                next: Some((flow.start_at, facts.input.clone())),
            },
        );
        if facts.starts_deferred {
            self.m.ready.push_back(ROOT);
            self.out.actions.push(Action::Continue);
        } else {
            self.queue.push_back(ROOT);
        }
    }

    fn timer(&mut self, n: TimerId) {
        let Some(timer) = self.m.timers.remove(&n) else { return };
        match timer.wakes {
            Wakes::Wait(thread) => self.wait_over(thread),
            Wakes::Backoff(thread) => {
                if let Some(active) = self.active_mut(thread) {
                    active.phase = Phase::Entered;
                    self.queue.push_back(thread);
                }
            }
            Wakes::TaskTimeout(thread) => self.task_timed_out(thread, RaisedError::named("States.Timeout")),
            Wakes::Heartbeat(thread) => self.task_timed_out(thread, Self::missed_heartbeat()),
            Wakes::Execution => self.time_out(),
        }
    }

    fn run(&mut self) {
        let mut entered = 0;
        while let Some(thread) = self.queue.pop_front() {
            if self.m.outcome.is_some() {
                break;
            }
            entered += 1;
            if entered > self.m.facts.limits.fused_states_max {
                self.queue.push_front(thread);
                self.m.ready = std::mem::take(&mut self.queue);
                self.out.actions.push(Action::Continue);
                break;
            }
            self.step(thread);
            self.end_at_event_limit();
        }
    }

    fn end_at_event_limit(&mut self) {
        if let Some(max) = self.m.facts.limits.history_events_max
            && self.m.next_event > max
            && self.m.outcome.is_none()
        {
            let failure = RaisedError::new(
                "States.Runtime",
                format!("The execution reached the maximum number of history events ({max})."),
            );
            let cursor = self.m.threads.get(&ROOT).map_or(0, |root| root.cursor);
            self.end_failed(cursor, failure);
        }
    }

    /// Runs a thread's current state, after entering it if it is new.
    fn step(&mut self, number: ThreadId) {
        let definition = self.m.definition.clone();
        let Some(thread) = self.m.threads.get_mut(&number) else { return };
        if let Some((id, input)) = thread.next.take() {
            let state = definition.state(id);
            self.enter(number, state, input);
        }
        let Some(active) = self.active(number) else { return };
        if !matches!(active.phase, Phase::Entered) {
            return;
        }
        let state = definition.state(active.state);
        let outcome = match &state.kind {
            StateKind::Pass(pass) => self.run_pass(number, state, pass),
            StateKind::Succeed => self.run_succeed(number, state),
            StateKind::Choice(choice) => self.run_choice(number, state, choice),
            StateKind::Fail(fail) => self.run_fail(number, state, fail),
            StateKind::Wait(wait) => self.run_wait(number, state, wait),
            StateKind::Task(task) => self.run_task(number, state, task),
            StateKind::Parallel(parallel) => self.run_parallel(number, state, parallel),
            StateKind::Map(map) => self.run_map(number, state, map),
        };
        if let Err(source) = outcome {
            self.handle_error(number, state, source);
        }
    }

    fn enter(&mut self, number: ThreadId, state: &State, input: Value) {
        self.out.transitions += 1;
        let cursor = self.m.threads.get(&number).map_or(0, |thread| thread.cursor);
        let first = number == ROOT && self.m.next_event == 2;
        let facts = self.m.facts.clone();
        let entered = self.emit(cursor, entered_kind(&state.kind), || {
            let text = if first && keeps_input_text(&state.kind) {
                facts.input_text.clone()
            } else {
                input.to_text().into()
            };
            Some(
                EventDetails::new("stateEnteredEventDetails")
                    .data("input", text)
                    .text("name", state.name.clone()),
            )
        });
        let entered_ms = self.at_ms;
        if let Some(thread) = self.m.threads.get_mut(&number) {
            thread.cursor = entered;
            thread.active = Some(Active {
                state: state.id,
                entered,
                entered_ms,
                input,
                attempts: Vec::new(),
                retries: 0,
                phase: Phase::Entered,
            });
        }
    }

    /// Leaves the thread's state with an output.
    pub(super) fn leave(&mut self, number: ThreadId, state: &State, left: StateOutput, next: &Transition) {
        if let Err(source) = self.check_size(state, &left.output) {
            self.handle_error(number, state, source);
            return;
        }
        let cursor = self.cursor(number);
        let StateOutput { output, assigned } = left;
        let exited = self.emit(cursor, exited_kind(&state.kind), || {
            let mut details = EventDetails::new("stateExitedEventDetails");
            if !assigned.is_empty() {
                details = details.field("assignedVariables", DetailField::Variables(assigned.clone()));
            }
            Some(details.text("name", state.name.clone()).data("output", output.to_text()))
        });
        let Some(thread) = self.m.threads.get_mut(&number) else { return };
        thread.cursor = exited;
        thread.active = None;
        if !assigned.is_empty() {
            thread.variables = thread.variables.assign(&assigned);
        }
        match next {
            Transition::Next(id) => {
                thread.next = Some((*id, output));
                self.queue.push_back(number);
            }
            Transition::End | Transition::Outside(_) => self.flow_ended(number, output),
        }
    }

    fn flow_ended(&mut self, number: ThreadId, output: Value) {
        let Some(thread) = self.m.threads.remove(&number) else { return };
        let Some(parent) = thread.parent else {
            self.end_succeeded(thread.cursor, &output);
            return;
        };
        match self.active(parent.thread).map(|active| &active.phase) {
            Some(Phase::Parallel { .. }) => self.branch_ended(parent, thread.cursor, output),
            Some(Phase::Map(_)) => self.iteration_ended(parent, thread.cursor, output),
            _ => {}
        }
    }

    /// Sets a timer; if it would be due after the execution's maximum duration, the execution times out at that point
    /// instead.
    pub(super) fn set_timer(&mut self, at_ms: i64, wakes: Wakes) -> TimerId {
        let facts = &self.m.facts;
        let begin_ms = self.m.redrive_ms.unwrap_or(facts.start_ms);
        let end_ms = begin_ms.saturating_add(milliseconds(EXECUTION_SECONDS_MAX));
        let (at_ms, wakes) = match !facts.express && at_ms > end_ms {
            true => (end_ms, Wakes::Execution),
            false => (at_ms, wakes),
        };
        let n = TimerId(self.number());
        self.m.timers.insert(n, Timer { at_ms, wakes });
        self.out.actions.push(Action::SetTimer { n, at_ms });
        n
    }

    pub(super) fn clear_timer(&mut self, n: TimerId) {
        if self.m.timers.remove(&n).is_some() {
            self.out.actions.push(Action::ClearTimer { n });
        }
    }

    /// Allocates a number for a thread, an effect, a timer or a map run.
    pub(super) fn number(&mut self) -> u32 {
        let n = self.m.next_number;
        self.m.next_number += 1;
        n
    }

    /// Numbers an event, and records it if there is a recorder.
    pub(super) fn emit(
        &mut self,
        previous: u64,
        kind: &str,
        details: impl FnOnce() -> Option<EventDetails>,
    ) -> u64 {
        let id = self.m.next_event;
        self.m.next_event += 1;
        if let Some(history) = &mut self.out.history {
            history.push(HistoryEvent {
                id,
                previous,
                at_ms: self.at_ms,
                kind: kind.to_owned(),
                details: details(),
            });
        }
        id
    }

    pub(super) fn active(&self, number: ThreadId) -> Option<&Active> {
        self.m.threads.get(&number)?.active.as_ref()
    }

    pub(super) fn active_mut(&mut self, number: ThreadId) -> Option<&mut Active> {
        self.m.threads.get_mut(&number)?.active.as_mut()
    }

    pub(super) fn cursor(&self, number: ThreadId) -> u64 {
        self.m.threads.get(&number).map_or(0, |thread| thread.cursor)
    }

    pub(super) fn set_cursor(&mut self, number: ThreadId, cursor: u64) {
        if let Some(thread) = self.m.threads.get_mut(&number) {
            thread.cursor = cursor;
        }
    }

    /// Checks AWS's limit on the size of a state's result.
    pub(super) fn check_size(&self, state: &State, value: &Value) -> Result<(), ErrorSource> {
        if value.text_len() <= self.m.facts.limits.payload_bytes_max {
            return Ok(());
        }
        let who = match &state.kind {
            // The message names a service by its type, a function or an activity by its ARN.
            StateKind::Task(task) => {
                task.resource.event_names().map_or_else(|| task.arn.clone(), |(kind, _)| kind.into())
            }
            _ => state.name.clone(),
        };
        Err(ErrorSource::Failed(RaisedError::new(
            "States.DataLimitExceeded",
            format!(
                "The state/task '{who}' returned a result with a size exceeding the maximum number of bytes service limit."
            ),
        )))
    }

    pub(super) fn start_thread(&mut self, at: StateId, input: Value, thread: Thread) -> ThreadId {
        let number = ThreadId(self.number());
        self.m.threads.insert(number, Thread { next: Some((at, input)), ..thread });
        self.queue.push_back(number);
        number
    }
}

/// Converts seconds to milliseconds, bounded far above any limit.
pub(super) fn milliseconds(seconds: u64) -> i64 {
    i64::try_from(seconds).unwrap_or(i64::MAX / 2000).min(i64::MAX / 2000) * 1000
}

/// `error` and `cause`, if they are present.
pub(super) fn failure_details(member: &'static str, failure: &RaisedError) -> EventDetails {
    EventDetails::new(member)
        .maybe("cause", failure.cause.as_deref())
        .maybe("error", failure.error.as_deref())
}

/// The details of an iteration: `index` and `name`.
pub(super) fn iteration(member: &'static str, state: &State, index: u32) -> EventDetails {
    EventDetails::new(member).number("index", index.into()).text("name", state.name.clone())
}

/// AWS shows the execution's input as the client sent it to a Map with an item selector, and without whitespace to
/// every other first state.
fn keeps_input_text(kind: &StateKind) -> bool {
    matches!(kind, StateKind::Map(map) if map.item_selector.is_some())
}

fn entered_kind(kind: &StateKind) -> &'static str {
    match kind {
        StateKind::Task(_) => "TaskStateEntered",
        StateKind::Pass(_) => "PassStateEntered",
        StateKind::Choice(_) => "ChoiceStateEntered",
        StateKind::Wait(_) => "WaitStateEntered",
        StateKind::Succeed => "SucceedStateEntered",
        StateKind::Fail(_) => "FailStateEntered",
        StateKind::Parallel(_) => "ParallelStateEntered",
        StateKind::Map(_) => "MapStateEntered",
    }
}

fn exited_kind(kind: &StateKind) -> &'static str {
    match kind {
        StateKind::Task(_) => "TaskStateExited",
        StateKind::Pass(_) => "PassStateExited",
        StateKind::Choice(_) => "ChoiceStateExited",
        StateKind::Wait(_) => "WaitStateExited",
        StateKind::Succeed => "SucceedStateExited",
        StateKind::Fail(_) => "FailStateExited",
        StateKind::Parallel(_) => "ParallelStateExited",
        StateKind::Map(_) => "MapStateExited",
    }
}
