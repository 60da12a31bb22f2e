//! Redrive: a failed execution continues from its failed states.

use super::ids::ThreadId;
use super::state::{FailureSnapshot, Machine, Phase, Wakes};
use super::turn::{Turn, milliseconds};
use crate::history::EventDetails;

/// The number of redrive requests that are idempotent; on AWS these are the last ten within 15 minutes.
const TOKENS_KEPT: usize = 10;
const TOKEN_VALID_MS: i64 = 15 * 60 * 1000;

impl Turn<'_> {
    /// Saves the current state, in case this failure ends the execution.
    pub(super) fn snapshot_failure(&mut self) {
        if self.m.failed_snapshot.is_none() && !self.m.facts.express {
            self.m.failed_snapshot = Some(FailureSnapshot { threads: self.m.threads.clone() });
        }
    }

    /// Continues a failed, timed out or stopped execution: states that had not succeeded run again with their input;
    /// the results of the others are kept. Retry counts are reset.
    pub(super) fn redrive(&mut self, token: Option<String>) {
        let Some(snapshot) = self.m.failed_snapshot.take() else { return };
        if let Some(token) = token {
            if self.m.redrive_tokens.len() >= TOKENS_KEPT {
                self.m.redrive_tokens.pop_front();
            }
            self.m.redrive_tokens.push_back((token, self.at_ms));
        }
        self.m.outcome = None;
        self.m.redrive_count += 1;
        self.m.redrive_ms = Some(self.at_ms);
        let count = self.m.redrive_count;
        let previous = self.m.next_event - 1;
        let redriven = self.emit(previous, "ExecutionRedriven", || {
            Some(EventDetails::new("executionRedrivenEventDetails").number("redriveCount", count.into()))
        });
        if let Some(seconds) = self.m.definition.timeout_seconds
            && self.m.facts.map_run_arn.is_none()
        {
            self.set_timer(self.at_ms.saturating_add(milliseconds(seconds)), Wakes::Execution);
        }
        self.m.threads = snapshot.threads;
        let numbers: Vec<ThreadId> = self.m.threads.keys().copied().collect();
        for number in numbers {
            let below = self
                .m
                .threads
                .values()
                .any(|thread| thread.parent.is_some_and(|place| place.thread == number));
            let Some(thread) = self.m.threads.get_mut(&number) else { continue };
            thread.cursor = redriven;
            if let Some(active) = &mut thread.active {
                active.attempts.clear();
                active.retries = 0;
                match active.phase {
                    Phase::Parallel { .. } | Phase::Map(_) if below => continue,
                    Phase::Run(_) => {
                        self.redrive_run(number);
                        continue;
                    }
                    _ => active.phase = Phase::Entered,
                }
            }
            self.queue.push_back(number);
        }
    }
}

impl Machine {
    /// Whether there is a failed state from which a redrive can start.
    pub fn can_redrive(&self) -> bool {
        self.outcome.is_some() && self.failed_snapshot.is_some()
    }

    /// The time of the redrive by an earlier request with the same token, if recent enough at `now_ms`.
    pub fn redriven_by(&self, token: &str, now_ms: i64) -> Option<i64> {
        let named = self.redrive_tokens.iter().rev().find(|(named, _)| named == token);
        named.map(|(_, at_ms)| *at_ms).filter(|at_ms| now_ms - at_ms <= TOKEN_VALID_MS)
    }
}
