//! Failures of states.

use super::ids::ThreadId;
use std::sync::Arc;

use mayfly_workflows_language::definition::{State, StateKind};
use mayfly_workflows_language::error::StateError;

use super::error_source::ErrorSource;
use super::retry::{self, RetryDecision};
use super::stages;
use super::state::{Phase, Wakes};
use super::turn::Turn;

/// An error, as retriers and catchers get it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RaisedError {
    /// The error's name.
    pub error: Option<Arc<str>>,
    /// The error's cause.
    pub cause: Option<Arc<str>>,
    /// Whether a heartbeat was missed: the error is `States.Timeout`, and `States.HeartbeatTimeout` matches as well.
    pub missed_heartbeat: bool,
}

impl RaisedError {
    /// A named error with a cause.
    pub(crate) fn new(error: &str, cause: impl Into<Arc<str>>) -> Self {
        Self::of(Some(error.into()), Some(cause.into()))
    }

    /// An error as a client reported it: name and cause are optional.
    pub(crate) fn of(error: Option<Arc<str>>, cause: Option<Arc<str>>) -> Self {
        Self { error, cause, missed_heartbeat: false }
    }

    /// Whether the error ends the execution unless a catcher lists it by name (`States.Runtime`).
    pub(super) fn is_runtime(&self) -> bool {
        self.error.as_deref() == Some(mayfly_workflows_language::error::names::RUNTIME)
    }

    /// A named error without a cause.
    pub(crate) fn named(error: &str) -> Self {
        Self::of(Some(error.into()), None)
    }

    /// Whether a list of `ErrorEquals` matches the error.
    pub(super) fn is_matched_by(&self, error_equals: &[Arc<str>]) -> bool {
        let by = |error| retry::error_matches(error_equals, error);
        by(self.error.as_deref()) || (self.missed_heartbeat && by(Some(retry::HEARTBEAT_TIMEOUT)))
    }
}

/// AWS's message about an error of a state's data, with the state's name and the number of the event of its entry.
pub(super) fn in_state(name: &str, entered: u64, error: &StateError) -> RaisedError {
    let cause = format!(
        "An error occurred while executing the state '{name}' (entered at the event id #{entered}). {}",
        error.cause
    );
    RaisedError::new(&error.error, cause)
}

impl Turn<'_> {
    /// Applies the state's retriers to a failure; returns `true` if one matches.
    pub(super) fn retried(&mut self, number: ThreadId, state: &State, failure: &RaisedError) -> bool {
        if state.retry.is_empty() {
            return false;
        }
        let Some(active) = self.active(number) else { return false };
        let takes = |error_equals: &[Arc<str>]| failure.is_matched_by(error_equals);
        let decision = retry::decide(&state.retry, &active.attempts, takes, || self.ambient.next_double());
        let RetryDecision::Retry { retrier, wait_ms } = decision else { return false };
        self.parts_failed = false;
        let timer = self.set_timer(self.at_ms.saturating_add(wait_ms), Wakes::Backoff(number));
        self.m.failed_snapshot = None;
        if let Some(active) = self.active_mut(number) {
            active.attempts.resize(state.retry.len(), 0);
            active.attempts[retrier] += 1;
            active.retries += 1;
            active.phase = Phase::Backoff { timer };
        }
        true
    }

    /// Applies the state's catchers to a failure; returns `true` if one matches.
    pub(super) fn caught(&mut self, number: ThreadId, state: &State, failure: &RaisedError) -> bool {
        let mut catchers = state.catch.iter().enumerate();
        let Some(catcher) = catchers.find(|(_, catcher)| failure.is_matched_by(&catcher.error_equals)) else {
            self.state_failed(number, state);
            return false;
        };
        self.m.failed_snapshot = None;
        self.state_failed(number, state);
        let error_output = stages::error_output(failure.error.as_ref(), failure.cause.as_ref());
        match self.stages(number, state, |stages| stages.finish_caught(catcher, &error_output)) {
            Ok(left) => self.leave(number, state, left, &catcher.1.next),
            Err(error) => {
                let failure = self.recorded_failure(number, state, ErrorSource::Data(error));
                self.flow_failed(number, failure);
            }
        }
        true
    }

    /// Records the failure event of a Parallel or Map, which AWS has if a branch or an iteration failed, or if the
    /// items of the Map are not an array.
    fn state_failed(&mut self, number: ThreadId, state: &State) {
        let kind = match &state.kind {
            StateKind::Parallel(_) => "ParallelStateFailed",
            StateKind::Map(_) => "MapStateFailed",
            _ => return,
        };
        if !std::mem::take(&mut self.parts_failed) {
            return;
        }
        let cursor = self.cursor(number);
        let failed = self.emit(cursor, kind, || None);
        self.set_cursor(number, failed);
    }
}
