//! Task: an effect, its time limits, and its outcome.

use super::ids::{EffectId, ThreadId};
use std::sync::Arc;

use mayfly_workflows_language::definition::{
    IntegrationPattern, QueryLanguage, Resource, State, StateId, StateKind, TaskState,
};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::value::Value;

use super::call::{Action, Call, TaskCall};
use super::envelope;
use super::error_source::ErrorSource;
use super::event::ReportedEnd;
use super::failure::RaisedError;
use super::quantity;
use super::stages::Unobserved;
use super::state::{Phase, TaskPhase, TaskSeconds, Wakes};
use super::token::Token;
use super::turn::{Turn, failure_details, milliseconds};
use crate::history::{DetailField, EventDetails};
use mayfly_workflows_language::execution::Payload;

impl Turn<'_> {
    pub(super) fn run_task(
        &mut self,
        number: ThreadId,
        state: &State,
        task: &TaskState,
    ) -> Result<(), ErrorSource> {
        let effect = EffectId(self.number());
        let token: Arc<str> = Token::new(self.m.facts.execution, effect, &self.m.facts.seed).to_text().into();
        let effective = self.effective_input(number, state)?;
        let arguments = self.stages_with(number, state, Some(&token), None, |stages| {
            stages.arguments(&effective, &mut Unobserved)
        })?;
        startable(state, task, &arguments)?;
        let (seconds, credentials) = self.evaluate(number, state, &effective, |scope| {
            Ok::<_, StateError>((quantity::task_limits(scope, task)?, quantity::credentials(scope, task)?))
        })?;
        let call = Call::Task(Box::new(TaskCall {
            resource: task.resource.clone(),
            arn: task.arn.clone(),
            arguments: arguments.clone(),
            token,
            submitted: None,
        }));
        let is_activity = matches!(task.resource, Resource::Activity(_));
        self.m.effects.insert(effect, number);
        if let Some(active) = self.active_mut(number) {
            active.phase = Phase::Task(Box::new(TaskPhase {
                effect,
                call: call.clone(),
                timeout: None,
                heartbeat: None,
                seconds,
                accepted: !is_activity,
                taken: false,
            }));
        }
        // The engine checks that an activity exists before its task is scheduled.
        if !is_activity {
            self.scheduled(number, task, &arguments, seconds, credentials.as_ref());
            self.start_timeout(number, seconds);
            self.start_heartbeat(number, seconds);
        }
        self.out.actions.push(Action::Effect { n: effect, call });
        Ok(())
    }

    fn start_timeout(&mut self, number: ThreadId, seconds: TaskSeconds) {
        let Some(timeout) = seconds.timeout else { return };
        let at_ms = self.at_ms.saturating_add(milliseconds(timeout));
        let timer = self.set_timer(at_ms, Wakes::TaskTimeout(number));
        if let Some(Phase::Task(task)) = self.active_mut(number).map(|active| &mut active.phase) {
            task.timeout = Some(timer);
        }
    }

    fn start_heartbeat(&mut self, number: ThreadId, seconds: TaskSeconds) {
        let Some(heartbeat) = seconds.heartbeat else { return };
        let at_ms = self.at_ms.saturating_add(milliseconds(heartbeat));
        let timer = self.set_timer(at_ms, Wakes::Heartbeat(number));
        if let Some(Phase::Task(task)) = self.active_mut(number).map(|active| &mut active.phase) {
            task.heartbeat = Some((timer, heartbeat));
        }
    }

    /// The error of a task that missed a heartbeat. The guide lists `States.HeartbeatTimeout` as an error name (for
    /// retriers and catchers), and says that such a task "fails with a `States.Timeout` error name".
    pub(super) fn missed_heartbeat() -> RaisedError {
        RaisedError { missed_heartbeat: true, ..RaisedError::named("States.Timeout") }
    }

    /// Records the events of a scheduled task.
    fn scheduled(
        &mut self,
        number: ThreadId,
        task: &TaskState,
        arguments: &Value,
        seconds: TaskSeconds,
        credentials: Option<&Value>,
    ) {
        let cursor = self.cursor(number);
        let region = self.m.facts.region.clone();
        let kind = match &task.resource {
            Resource::Function(_) => "LambdaFunctionScheduled",
            Resource::Activity(_) => "ActivityScheduled",
            _ => "TaskScheduled",
        };
        let scheduled = self.emit(cursor, kind, || {
            let details = match &task.resource {
                Resource::Function(_) => EventDetails::new("lambdaFunctionScheduledEventDetails")
                    .data("input", arguments.to_text())
                    .text("resource", task.arn.clone()),
                Resource::Activity(_) => EventDetails::new("activityScheduledEventDetails")
                    .data("input", arguments.to_text())
                    .text("resource", task.arn.clone())
                    .maybe_number("heartbeatInSeconds", seconds.heartbeat),
                _ => {
                    let (kind, name) = event_names(task);
                    EventDetails::new("taskScheduledEventDetails")
                        .bare_data("parameters", arguments.to_text())
                        .text("region", region)
                        .text("resource", name)
                        .text("resourceType", kind)
                        .maybe_number("heartbeatInSeconds", seconds.heartbeat)
                }
            };
            let details = details.maybe_number("timeoutInSeconds", seconds.timeout);
            Some(match credentials {
                Some(credentials) => {
                    details.field("taskCredentials", DetailField::Object(role_of(credentials)))
                }
                None => details,
            })
        });
        let started = match &task.resource {
            Resource::Activity(_) => scheduled,
            Resource::Function(_) => self.emit(scheduled, "LambdaFunctionStarted", || None),
            _ => self.emit(scheduled, "TaskStarted", || {
                Some(with_resource(EventDetails::new("taskStartedEventDetails"), task))
            }),
        };
        self.set_cursor(number, started);
    }

    pub(super) fn task_accepted(&mut self, effect: EffectId) {
        let definition = self.m.definition.clone();
        let Some((number, state)) = self.task_of(effect) else { return };
        let StateKind::Task(task) = &definition.state(state).kind else { return };
        let Some(Phase::Task(phase)) = self.active_mut(number).map(|active| &mut active.phase) else {
            return;
        };
        if std::mem::replace(&mut phase.accepted, true) {
            return;
        }
        let seconds = phase.seconds;
        let Call::Task(call) = &phase.call else { return };
        let arguments = call.arguments.clone();
        self.scheduled(number, task, &arguments, seconds, None);
        self.start_timeout(number, seconds);
    }

    pub(super) fn task_refused(&mut self, effect: EffectId, cause: String) {
        let definition = self.m.definition.clone();
        let Some((number, state)) = self.task_of(effect) else { return };
        let Some(Phase::Task(phase)) = self.active(number).map(|active| &active.phase) else { return };
        if !phase.accepted {
            self.handle_error(number, definition.state(state), ErrorSource::Data(StateError::runtime(cause)));
        }
    }

    pub(super) fn task_began(&mut self, effect: EffectId, worker: Option<&str>) {
        let Some((number, _)) = self.task_of(effect) else { return };
        let cursor = self.cursor(number);
        let began = self.emit(cursor, "ActivityStarted", || {
            Some(EventDetails::new("activityStartedEventDetails").maybe("workerName", worker))
        });
        self.set_cursor(number, began);
        let at_ms = self.at_ms;
        let Some(Phase::Task(task)) = self.active_mut(number).map(|active| &mut active.phase) else { return };
        task.taken = true;
        // The heartbeat interval begins when the worker takes the task.
        let (seconds, heartbeat) = (task.seconds, task.heartbeat);
        match heartbeat {
            None => self.start_heartbeat(number, seconds),
            Some((n, seconds)) => {
                let at_ms = at_ms.saturating_add(milliseconds(seconds));
                if let Some(timer) = self.m.timers.get_mut(&n) {
                    timer.at_ms = at_ms;
                }
                self.out.actions.push(Action::SetTimer { n, at_ms });
            }
        }
    }

    pub(super) fn task_submitted(&mut self, effect: EffectId, output: &Payload) {
        let definition = self.m.definition.clone();
        let Some((number, state)) = self.task_of(effect) else { return };
        let StateKind::Task(task) = &definition.state(state).kind else { return };
        let Some(text) = output.text() else { return };
        let cursor = self.cursor(number);
        let submitted = self.emit(cursor, "TaskSubmitted", || {
            Some(with_resource(
                EventDetails::new("taskSubmittedEventDetails").data("output", text.clone()),
                task,
            ))
        });
        self.set_cursor(number, submitted);
        let value = Value::parse(text).unwrap_or_default();
        let waits_for_token = task.resource.pattern() == IntegrationPattern::WaitForTaskToken;
        if let Some(Phase::Task(phase)) = self.active_mut(number).map(|active| &mut active.phase) {
            phase.taken = waits_for_token;
            if let Call::Task(call) = &mut phase.call {
                call.submitted = Some(value);
            }
        }
    }

    pub(super) fn effect_succeeded(&mut self, effect: EffectId, output: &Payload) {
        let definition = self.m.definition.clone();
        let Some((number, state)) = self.task_of(effect) else { return };
        let state = definition.state(state);
        let Some(json) = output.json() else { return };
        let StateKind::Task(task) = &state.kind else {
            self.run_effect_succeeded(number, state, json.text());
            return;
        };
        match json.value() {
            Ok(value) => self.task_succeeded((number, effect), state, task, value, || json.text().clone()),
            Err(error) => {
                let failure = RaisedError::new("States.Runtime", format!("The result is not JSON: {error}"));
                self.effect_failed(effect, failure);
            }
        }
    }

    /// A function's response in the service's envelope.
    pub(super) fn function_answered(
        &mut self,
        effect: EffectId,
        answer: &Payload,
        status: u16,
        version: Option<&str>,
    ) {
        let definition = self.m.definition.clone();
        let Some((number, state)) = self.task_of(effect) else { return };
        let state = definition.state(state);
        let (Some(text), StateKind::Task(task)) = (answer.text(), &state.kind) else { return };
        let request_id = envelope::request_id(&self.m.facts.seed, effect);
        let version = version.unwrap_or(envelope::LATEST);
        let result = envelope::of_function(text, status, version, self.at_ms, request_id);
        let told = result.clone();
        self.task_succeeded((number, effect), state, task, result, || told.to_text().into());
    }

    /// Handles a task's result; `text` returns its form in the history.
    fn task_succeeded(
        &mut self,
        (number, effect): (ThreadId, EffectId),
        state: &State,
        task: &TaskState,
        value: Value,
        text: impl FnOnce() -> Arc<str>,
    ) {
        if let Err(ErrorSource::Failed(failure)) = self.check_size(state, &value) {
            self.effect_failed(effect, failure);
            return;
        }
        let cursor = self.cursor(number);
        let succeeded = match &task.resource {
            Resource::Function(_) => self.emit(cursor, "LambdaFunctionSucceeded", || {
                Some(EventDetails::new("lambdaFunctionSucceededEventDetails").data("output", text()))
            }),
            Resource::Activity(_) => self.emit(cursor, "ActivitySucceeded", || {
                Some(EventDetails::new("activitySucceededEventDetails").data("output", text()))
            }),
            _ => self.emit(cursor, "TaskSucceeded", || {
                Some(with_resource(
                    EventDetails::new("taskSucceededEventDetails").data("output", text()),
                    task,
                ))
            }),
        };
        self.set_cursor(number, succeeded);
        self.end_task(number, effect);
        self.leave_with_checked(number, state, value);
    }

    pub(super) fn effect_failed(&mut self, effect: EffectId, failure: RaisedError) {
        let definition = self.m.definition.clone();
        let Some((number, state)) = self.task_of(effect) else { return };
        let state = definition.state(state);
        let StateKind::Task(task) = &state.kind else {
            self.run_effect_failed(number, failure);
            return;
        };
        let cursor = self.cursor(number);
        let event = match &task.resource {
            Resource::Function(_) => self.emit(cursor, "LambdaFunctionFailed", || {
                Some(failure_details("lambdaFunctionFailedEventDetails", &failure))
            }),
            Resource::Activity(_) => self.emit(cursor, "ActivityFailed", || {
                Some(failure_details("activityFailedEventDetails", &failure))
            }),
            _ => self.emit(cursor, "TaskFailed", || {
                Some(with_resource(failure_details("taskFailedEventDetails", &failure), task))
            }),
        };
        self.set_cursor(number, event);
        self.end_task(number, effect);
        self.handle_error(number, state, ErrorSource::Failed(failure));
    }

    /// Ends the task's effect and time limits, and keeps its reported end for the next turn.
    pub(super) fn task_reported(&mut self, effect: EffectId, end: ReportedEnd) {
        let Some((number, _)) = self.task_of(effect) else { return };
        let Some(Phase::Task(task)) = self.active(number).map(|active| &active.phase) else { return };
        let timers = [task.timeout, task.heartbeat.map(|(timer, _)| timer)];
        timers.into_iter().flatten().for_each(|timer| self.clear_timer(timer));
        // Otherwise an earlier event has requested the turn.
        if self.m.ready.is_empty() && self.m.reported.is_empty() {
            self.out.actions.push(Action::Continue);
        }
        self.m.reported.push_back((effect, end));
    }

    pub(super) fn task_timed_out(&mut self, number: ThreadId, failure: RaisedError) {
        let definition = self.m.definition.clone();
        let Some(active) = self.active(number) else { return };
        let Phase::Task(phase) = &active.phase else { return };
        let (effect, call) = (phase.effect, phase.call.clone());
        let state = definition.state(active.state);
        let StateKind::Task(task) = &state.kind else { return };
        let cursor = self.cursor(number);
        let event = match &task.resource {
            Resource::Function(_) => self.emit(cursor, "LambdaFunctionTimedOut", || {
                Some(failure_details("lambdaFunctionTimedOutEventDetails", &failure))
            }),
            Resource::Activity(_) => self.emit(cursor, "ActivityTimedOut", || {
                Some(failure_details("activityTimedOutEventDetails", &failure))
            }),
            _ => self.emit(cursor, "TaskTimedOut", || {
                Some(with_resource(failure_details("taskTimedOutEventDetails", &failure), task))
            }),
        };
        self.set_cursor(number, event);
        self.out.actions.push(Action::Forget { n: effect });
        self.stop_awaited(&call);
        self.end_task(number, effect);
        self.handle_error(number, state, ErrorSource::Failed(failure));
    }

    /// Cancels the timers and the effect of a task that has its outcome.
    fn end_task(&mut self, number: ThreadId, effect: EffectId) {
        self.m.effects.remove(&effect);
        let Some(active) = self.active_mut(number) else { return };
        if let Phase::Task(task) = std::mem::replace(&mut active.phase, Phase::Entered) {
            for timer in task.timeout.into_iter().chain(task.heartbeat.map(|(timer, _)| timer)) {
                self.clear_timer(timer);
            }
        }
    }

    /// The thread that waits for an effect, and the state it is in.
    fn task_of(&self, effect: EffectId) -> Option<(ThreadId, StateId)> {
        if self.m.is_reported(effect) {
            return None;
        }
        let number = *self.m.effects.get(&effect)?;
        Some((number, self.active(number)?.state))
    }
}

/// Whether the integration can be called with the evaluated arguments. The message is AWS's for `Parameters`, as users
/// quote it; it is assumed to be the same for `Arguments`.
fn startable(state: &State, task: &TaskState, arguments: &Value) -> Result<(), StateError> {
    let Some(shape) = task.resource.parameters() else { return Ok(()) };
    let problems = shape.problems(arguments);
    if problems.is_empty() {
        return Ok(());
    }
    let field = if state.query_language == QueryLanguage::Jsonata { "Arguments" } else { "Parameters" };
    Err(StateError::runtime(format!(
        "The {field} '{}' could not be used to start the Task: [{}]",
        arguments.to_text(),
        problems.join(", ")
    )))
}

fn event_names(task: &TaskState) -> (String, String) {
    task.resource.event_names().unwrap_or_else(|| ("unknown".to_owned(), task.arn.to_string()))
}

/// `resource` and `resourceType`, the last fields of every task event.
fn with_resource(details: EventDetails, task: &TaskState) -> EventDetails {
    let (kind, name) = event_names(task);
    details.text("resource", name).text("resourceType", kind)
}

/// `{"RoleArn": …}` in the spelling of events.
fn role_of(credentials: &Value) -> Value {
    match credentials.get("RoleArn") {
        Some(role) => Value::object([("roleArn", role.clone())]),
        None => Value::empty_object(),
    }
}
