//! The failure of a state or a part of it: recorded in the history, retried, caught, or passed to the surrounding
//! state.

use super::ids::ThreadId;
use mayfly_workflows_language::definition::State;
use mayfly_workflows_language::error::StateError;

use super::failure::{self, RaisedError};
use super::state::{ParentSlot, Phase};
use super::turn::{Turn, iteration};
use crate::history::EventDetails;

/// An error that is being handled, or an error of the state's data whose message is still incomplete.
pub(super) enum ErrorSource {
    /// An error that retriers and catchers get unchanged.
    Failed(RaisedError),
    /// An error of the state's data.
    Data(StateError),
}

impl From<StateError> for ErrorSource {
    fn from(error: StateError) -> Self {
        ErrorSource::Data(error)
    }
}

impl From<RaisedError> for ErrorSource {
    fn from(failure: RaisedError) -> Self {
        ErrorSource::Failed(failure)
    }
}

impl Turn<'_> {
    /// Handles the failure of a state: of its data, its task or its branches.
    pub(super) fn handle_error(&mut self, number: ThreadId, state: &State, source: ErrorSource) {
        if self.active(number).is_none() {
            return;
        }
        let failure = self.recorded_failure(number, state, source);
        self.cancel_state(number);
        if !self.retried(number, state, &failure) && !self.caught(number, state, &failure) {
            self.flow_failed(number, failure);
        }
    }

    /// Converts to the final error, and records the event of a failed expression.
    pub(super) fn recorded_failure(
        &mut self,
        number: ThreadId,
        state: &State,
        source: ErrorSource,
    ) -> RaisedError {
        let (failure, location) = self.final_error(number, state, source);
        if let Some(location) = location {
            self.evaluation_failed(number, state, &failure, &location);
        }
        failure
    }

    /// Converts to the final error, with the path of the expression if one failed.
    pub(super) fn final_error(
        &self,
        number: ThreadId,
        state: &State,
        source: ErrorSource,
    ) -> (RaisedError, Option<String>) {
        match source {
            ErrorSource::Failed(failure) => (failure, None),
            ErrorSource::Data(error) => {
                let entered = self.active(number).map_or(0, |active| active.entered);
                (failure::in_state(&state.name, entered, &error), error.location)
            }
        }
    }

    /// Records the event of a failed expression; there is none without a location.
    fn evaluation_failed(&mut self, number: ThreadId, state: &State, failure: &RaisedError, location: &str) {
        let cursor = self.cursor(number);
        let id = self.emit(cursor, "EvaluationFailed", || {
            Some(
                EventDetails::new("evaluationFailedEventDetails")
                    .maybe("cause", failure.cause.as_deref())
                    .maybe("error", failure.error.as_deref())
                    .maybe("location", Some(location).filter(|location| !location.is_empty()))
                    .text("state", state.name.clone()),
            )
        });
        self.set_cursor(number, id);
    }

    pub(super) fn flow_failed(&mut self, number: ThreadId, failure: RaisedError) {
        let cursor = self.cursor(number);
        let place = self.m.threads.get(&number).and_then(|thread| thread.parent);
        match place {
            None => self.end_failed(cursor, failure),
            Some(_) if failure.is_runtime() && !self.is_awaited_around(number, &failure) => {
                self.end_failed(cursor, failure);
            }
            Some(ParentSlot { thread, slot }) => self.part_failed(thread, slot, number, cursor, failure),
        }
    }

    /// Whether an enclosing state has a retrier or catcher for this error. If none has, `States.Runtime` ends the
    /// execution where it occurs, without failure events of the enclosing states (measured on AWS:
    /// floci-io/floci#2868).
    fn is_awaited_around(&self, number: ThreadId, failure: &RaisedError) -> bool {
        let mut around = self.m.threads.get(&number).and_then(|thread| thread.parent);
        while let Some(place) = around {
            let Some(thread) = self.m.threads.get(&place.thread) else { return false };
            if let Some(active) = &thread.active {
                let state = self.m.definition.state(active.state);
                let retried = state.retry.iter().map(|retrier| &retrier.error_equals);
                let mut names = retried.chain(state.catch.iter().map(|catcher| &catcher.error_equals));
                if names.any(|names| failure.is_matched_by(names)) {
                    return true;
                }
            }
            around = thread.parent;
        }
        false
    }

    /// Handles a failed branch or iteration, with which the enclosing state fails.
    fn part_failed(
        &mut self,
        parent: ThreadId,
        slot: u32,
        number: ThreadId,
        cursor: u64,
        failure: RaisedError,
    ) {
        let definition = self.m.definition.clone();
        let Some(active) = self.active(parent) else { return };
        let state = definition.state(active.state);
        if matches!(active.phase, Phase::Map(_)) {
            self.emit(cursor, "MapIterationFailed", || {
                Some(iteration("mapIterationFailedEventDetails", state, slot))
            });
        }
        self.snapshot_failure();
        self.m.threads.remove(&number);
        self.set_cursor(parent, cursor);
        self.parts_failed = true;
        self.parts_to_record = true;
        self.handle_error(parent, state, ErrorSource::Failed(failure));
    }
}
