//! One log line per call, written at its end: its timings, the memory of its instance, its outcome.
//!
//! ```text
//! caller    ├─ load ─┼─ queue ─┼─ instantiate ─┼─ run ─┤ answered, failed, or abandoned
//! body                                                ├─ is read, where it streams ─┤
//! instance                     ├─ is made, answers, works on ─┤ its memory is known
//! ```
//! Caller, body and instance each hold the call's record, and the last one to drop it writes the line. If the log
//! filter excludes these lines, no records are created: nothing is allocated, and no clock is read.

use std::{sync::Arc, time::Duration};

use http::{HeaderValue, Request};
use mayfly_api::ObjectKey;
use mayfly_runtime::{Body, CallError, Timings};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::metrics::CallOutcome;

/// The target of the lines, by which a log filter selects them.
const TARGET: &str = "mayfly_runtime_wasm::calls";
/// The header that the gateway sets on every request and writes into its own log line.
const REQUEST_ID: &str = "x-request-id";

/// A shared reference to a call's record, if calls are recorded.
#[derive(Clone, Default)]
pub(crate) struct Recording(Option<Arc<Record>>);

struct Record {
    revision: ObjectKey,
    request_id: Option<HeaderValue>,
    call: Mutex<CallRecord>,
}

/// The phases of a call that were reached so far, and its result.
pub(crate) struct CallRecord {
    started: Instant,
    /// Whether the component had to be loaded.
    pub(crate) cold: bool,
    /// When the component was loaded.
    pub(crate) loaded: Option<Instant>,
    /// When a slot for the instance was available.
    pub(crate) slot_at: Option<Instant>,
    /// When the instance existed.
    pub(crate) instantiated: Option<Instant>,
    /// When the caller got an error or dropped the call.
    over: Option<Instant>,
    /// The timings of an answered call.
    pub(crate) timings: Option<Timings>,
    /// The error that the caller got instead of an answer; otherwise the first later one.
    error: Option<CallError>,
    memory_peak_bytes: u64,
    /// Whether the guest ended by itself.
    ended: bool,
}

impl Recording {
    /// Begins a call's record, if call records are logged.
    pub(crate) fn begin(revision: &ObjectKey, request: &Request<Body>, started: Instant) -> Self {
        if !tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
            return Self(None);
        }
        let (revision, request_id) = (revision.clone(), request.headers().get(REQUEST_ID).cloned());
        Self(Some(Arc::new(Record { revision, request_id, call: Mutex::new(CallRecord::new(started)) })))
    }

    /// Updates the record; does nothing if calls are not recorded.
    pub(crate) fn record(&self, note: impl FnOnce(&mut CallRecord)) {
        if let Some(record) = &self.0 {
            note(&mut record.call.lock());
        }
    }

    /// Records that the caller got this error instead of an answer.
    pub(crate) fn refused(&self, error: &CallError) {
        self.record(|call| {
            call.over = Some(Instant::now());
            call.error = Some(error.clone());
        });
    }

    /// Records that the caller dropped the call before its answer.
    pub(crate) fn abandoned(&self) {
        self.record(|call| call.over = Some(Instant::now()));
    }

    /// Records that the guest failed or was ended. An error that the caller got takes precedence.
    pub(crate) fn failed(&self, error: &CallError) {
        self.record(|call| {
            call.error.get_or_insert_with(|| error.clone());
        });
    }

    /// Records that the instance exists.
    pub(crate) fn instantiated(&self) {
        self.record(|call| {
            call.instantiated.get_or_insert_with(Instant::now);
        });
    }

    /// Records that the guest has ended or was dropped.
    pub(crate) fn guest_ended(&self, memory_peak_bytes: u64, ended: bool) {
        self.record(|call| {
            call.memory_peak_bytes = memory_peak_bytes;
            call.ended = ended;
        });
    }
}

impl CallRecord {
    fn new(started: Instant) -> Self {
        Self {
            started,
            cold: false,
            loaded: None,
            slot_at: None,
            instantiated: None,
            over: None,
            timings: None,
            error: None,
            memory_peak_bytes: 0,
            ended: false,
        }
    }

    /// The durations of the phases. The phase in which a call failed lasted until the failure; later ones are zero.
    fn timings(&self) -> Timings {
        if let Some(timings) = self.timings {
            return timings;
        }
        let over = self.over.unwrap_or(self.started);
        let [loaded, slotted, instantiated] =
            [self.loaded, self.slot_at, self.instantiated].map(|reached| reached.unwrap_or(over));
        Timings {
            cold: self.cold,
            queue: slotted.saturating_duration_since(loaded),
            load: loaded.saturating_duration_since(self.started),
            instantiate: instantiated.saturating_duration_since(slotted),
            run: over.saturating_duration_since(instantiated),
        }
    }

    /// The call's result. A guest that answered may fail afterwards, or be ended because the client does not read the
    /// body: then that is the result.
    fn outcome(&self) -> CallOutcome {
        match &self.error {
            Some(error) => error.into(),
            None if self.timings.is_some() && self.ended => CallOutcome::Answered,
            None => CallOutcome::Cancelled,
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let call = self.call.get_mut();
        let timings = call.timings();
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        tracing::debug!(
            target: TARGET,
            revision = %self.revision,
            request_id = self.request_id.as_ref().and_then(|id| id.to_str().ok()),
            cold = timings.cold,
            queue_us = micros(timings.queue),
            load_us = micros(timings.load),
            instantiate_us = micros(timings.instantiate),
            run_us = micros(timings.run),
            memory_peak_bytes = call.memory_peak_bytes,
            outcome = call.outcome().as_str(),
            error = call.error.as_ref().map(tracing::field::display),
        );
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Empty};

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const TIMED_OUT: CallError = CallError::TimedOut { limit: MS };

    #[test]
    fn calls_are_not_recorded_when_tracing_is_disabled() {
        let request = Request::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
        let recording = Recording::begin(&ObjectKey::new("default", "hello-00001"), &request, Instant::now());
        assert!(recording.0.is_none());
        recording.record(|_| panic!("there is no record"));
    }

    #[test]
    fn a_failed_call_spent_its_time_where_it_failed() {
        let started = Instant::now();
        let at = |ms: u32| started + MS * ms;
        // The reached phase, and the durations of load, queue, instantiate and run, in milliseconds.
        for (reached, expect) in [(0, [8, 0, 0, 0]), (1, [1, 7, 0, 0]), (2, [1, 2, 5, 0]), (3, [1, 2, 1, 4])]
        {
            let mut call = CallRecord::new(started);
            let phases = [(&mut call.loaded, 1), (&mut call.slot_at, 3), (&mut call.instantiated, 4)];
            for (phase, ms) in phases.into_iter().take(reached) {
                *phase = Some(at(ms));
            }
            call.over = Some(at(8));
            let timings = call.timings();
            let took = [timings.load, timings.queue, timings.instantiate, timings.run];
            assert_eq!(took, expect.map(|ms: u32| MS * ms), "{reached} phases were reached");
        }
    }

    #[test]
    fn an_answered_call_records_the_timings_of_its_answer() {
        let timings = Timings { cold: true, run: MS * 3, ..Timings::default() };
        let call = CallRecord { timings: Some(timings), ..CallRecord::new(Instant::now()) };
        assert_eq!(call.timings(), timings);
    }

    #[test]
    fn outcome_follows_the_guest_after_its_answer() {
        let answered = Some(Timings::default());
        for (timings, error, ended, expect) in [
            (answered, None, true, "answered"),
            (answered, None, false, "cancelled"),
            (answered, Some(TIMED_OUT), false, "timed_out"),
            (None, Some(TIMED_OUT), false, "timed_out"),
            (None, Some(CallError::NoAnswer), true, "no_answer"),
            (None, None, false, "cancelled"),
            (None, None, true, "cancelled"),
        ] {
            let call = CallRecord { timings, error, ended, ..CallRecord::new(Instant::now()) };
            assert_eq!(call.outcome().as_str(), expect);
        }
    }

    #[test]
    fn error_of_the_caller_takes_precedence_over_later_guest_errors() {
        let record = Record {
            revision: ObjectKey::new("default", "hello-00001"),
            request_id: None,
            call: Mutex::new(CallRecord::new(Instant::now())),
        };
        let recording = Recording(Some(Arc::new(record)));
        let error = |recording: &Recording| recording.0.as_ref().unwrap().call.lock().error.clone();
        recording.failed(&CallError::NoAnswer);
        recording.refused(&TIMED_OUT);
        recording.failed(&CallError::ShuttingDown);
        assert_eq!(error(&recording), Some(TIMED_OUT));
    }
}
