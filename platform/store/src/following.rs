//! The writer of a store whose storage has other writers.
//!
//! ```text
//!  wait for a write or a wake-up ─▶ follow ─▶ plan ─▶ commit (one fsync) ─▶ publish ─▶ answer
//!                                     ▲                   │ another writer was first
//!                                     └───────────────────┘
//! ```
//!
//! Every group begins with the commits of the other writers, so a write is checked against everything that was
//! acknowledged before it, by any store. Reads are answered from what was followed so far. One thread commits, follows
//! and publishes, so a store publishes each commit once and in the order of the revisions.
//!
//! A store that can no longer follow stops, because its reads would be out of date from then on.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Wake,
};

use tokio::sync::mpsc;

use crate::{
    backend::CommitError,
    batch::{EventBatch, written},
    object::{Revision, WriteEvent},
    write::{WriteError, Written},
    writer::{QueuedWrite, Writer, WriterCommand},
};

/// Commits of a group that may fail because another writer was first, each time after this one has followed it.
const ATTEMPTS_MAX: u32 = 64;

/// Wakes the writer after a commit of another writer.
pub(crate) struct FollowSignal {
    /// Weak, so that the store still closes when its last handle is dropped.
    commands: mpsc::WeakSender<WriterCommand>,
    /// Whether the writer has been woken and has not begun to follow, so that the queue holds one wake-up at most.
    woken: AtomicBool,
}

impl FollowSignal {
    pub(crate) fn new(commands: mpsc::WeakSender<WriterCommand>) -> Arc<Self> {
        Arc::new(Self { commands, woken: AtomicBool::new(false) })
    }
}

impl Wake for FollowSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.woken.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(commands) = self.commands.upgrade() {
            // A full queue wakes the writer as well: it follows before each group.
            let _ = commands.try_send(WriterCommand::Follow);
        }
    }
}

/// A group as it would be committed: the revision that it was planned from, its events, and for each request their
/// positions, or why it is refused.
struct PlannedGroup {
    after: Revision,
    events: Vec<Arc<WriteEvent>>,
    requests: Vec<Result<Range<usize>, WriteError>>,
}

impl Writer {
    /// Follows the other writers, then writes a group, which may be empty.
    pub(crate) fn write_following(&mut self, signal: &FollowSignal, requests: Vec<QueuedWrite>) {
        let answers = self.answers(signal, &requests);
        for (request, answer) in requests.into_iter().zip(answers) {
            // A caller that went away needs no response.
            let _ = request.reply.send(answer);
        }
    }

    /// The answers to the requests, in their order.
    fn answers(
        &mut self,
        signal: &FollowSignal,
        requests: &[QueuedWrite],
    ) -> Vec<Result<Vec<Written>, WriteError>> {
        for _ in 0..ATTEMPTS_MAX {
            if let Err(error) = self.follow(signal).and_then(|()| self.check_usable()) {
                return vec![Err(error); requests.len()];
            }
            let PlannedGroup { after, events, requests } = self.plan_for_retry(requests);
            let mut committed = Ok(());
            if !events.is_empty() {
                committed = match self.commit_once(after, &events) {
                    Err(CommitError::Outdated { .. }) => continue,
                    result => self.record(result, events.len()),
                };
            }
            if committed.is_ok() {
                self.publish(&events);
            }
            let answer = |positions: Range<usize>| match &committed {
                Ok(()) => Ok(events[positions].iter().map(|event| written(event)).collect()),
                Err(error) => Err(error.clone()),
            };
            return requests.into_iter().map(|planned| planned.and_then(answer)).collect();
        }
        vec![Err(WriteError::Overloaded); requests.len()]
    }

    /// Publishes the commits of the other writers.
    fn follow(&mut self, signal: &FollowSignal) -> Result<(), WriteError> {
        // Before the storage is read: a commit after this wakes the writer again.
        signal.woken.swap(false, Ordering::AcqRel);
        let from = self.revision();
        match self.backend.follow(from) {
            Ok(events) => {
                self.publish(&events);
                Ok(())
            }
            Err(error) => {
                let reason = format!("the commits after revision {from} cannot be followed ({error})");
                tracing::error!(reason, "the store stops");
                Err(self.stop(format!("{reason}; start the server again")))
            }
        }
    }

    /// Plans a group without consuming it. The keys and values are shared, not copied.
    fn plan_for_retry(&self, requests: &[QueuedWrite]) -> PlannedGroup {
        let state = self.shared.state.read();
        let after = state.revision();
        let mut batch = EventBatch::new(after, |key| state.get(key));
        let requests = requests.iter().map(|request| batch.add(request.writes.clone(), request.revisions));
        let requests = requests.collect();
        PlannedGroup { after, events: batch.into_events(), requests }
    }

    fn publish(&self, events: &[Arc<WriteEvent>]) {
        if !events.is_empty() {
            let published = self.shared.state.write().publish(events);
            published.wake();
        }
    }
}
