//! The writer: one thread that owns the backend and commits groups of writes.
//!
//! ```text
//!  wait for a write ─▶ take what else is queued ─▶ plan ─▶ commit (one fsync) ─▶ publish ─▶ answer
//!        ▲                                           │ nothing accepted                       │
//!        └───────────────────────────────────────────┴────────────── maintain ◀────────────┘
//! ```
//!
//! While a group is written to the disk the next one gathers in the queue, so the cost of an fsync is shared. With that
//! alone, callers that write in a loop split into two halves that take turns; [`GroupCommitPolicy`] brings them into
//! one group. If the storage has other writers, `following.rs` writes the groups.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use mayfly_sqlite::GroupCommitPolicy;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::{
    backend::{CommitError, StorageBackend},
    batch::{EventBatch, RequestRevisions, written},
    following::FollowSignal,
    object::{Revision, WriteEvent},
    store::StoreContext,
    write::{Write, WriteError, Written},
};

/// Requests in one transaction: bounds how long a single one can wait for its group.
const BATCH_REQUESTS_MAX: usize = 1024;
/// A group waits for a quarter of a commit's time: its callers wait for the disk, and most are back within
/// microseconds.
const GATHER_SHARE: u32 = 4;
/// The longest a group waits for more requests.
const GATHER_MAX: Duration = Duration::from_millis(1);
/// The duration of one sleep while it waits, because waiting for the queue has no timeout; the kernel adds its own
/// slack.
const GATHER_STEP: Duration = Duration::from_micros(20);

pub(crate) enum WriterCommand {
    Write(QueuedWrite),
    /// Another writer has committed.
    Follow,
    Close,
}

pub(crate) struct QueuedWrite {
    pub(crate) writes: Vec<Write>,
    pub(crate) revisions: RequestRevisions,
    pub(crate) reply: oneshot::Sender<Result<Vec<Written>, WriteError>>,
    /// The permit for its bytes in the queue.
    pub(crate) room: OwnedSemaphorePermit,
}

pub(crate) struct Writer {
    pub(crate) shared: Arc<StoreContext>,
    pub(crate) backend: Box<dyn StorageBackend>,
    queue: mpsc::Receiver<WriterCommand>,
    gathering: GroupCommitPolicy,
    /// None: the storage has no other writers.
    follows: Option<Arc<FollowSignal>>,
}

/// The accepted requests of a plan, with their positions in it.
type Accepted = Vec<(Range<usize>, oneshot::Sender<Result<Vec<Written>, WriteError>>, OwnedSemaphorePermit)>;

pub(crate) fn start(
    shared: Arc<StoreContext>,
    backend: Box<dyn StorageBackend>,
    queue: mpsc::Receiver<WriterCommand>,
    follows: Option<Arc<FollowSignal>>,
) {
    let writer = Writer { follows, ..Writer::new(shared, backend, queue) };
    let thread = std::thread::Builder::new().name("store-writer".into());
    let body = || {
        let _stopped = StopNotifier(Arc::clone(&writer.shared));
        writer.run();
    };
    thread.spawn(body).expect("a thread for the store's writer");
}

/// Announces when dropped that the writer has ended, also after a panic.
pub(crate) struct StopNotifier(pub(crate) Arc<StoreContext>);

impl Drop for StopNotifier {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.broken.set("the store's writer ended unexpectedly; start the server again".into());
        }
        self.0.closed.send_replace(true);
        let signals = self.0.state.read().signals();
        for signal in signals {
            signal.send_modify(|_| {});
        }
    }
}

impl Writer {
    pub(crate) fn new(
        shared: Arc<StoreContext>,
        backend: Box<dyn StorageBackend>,
        queue: mpsc::Receiver<WriterCommand>,
    ) -> Self {
        let gathering = GroupCommitPolicy::new(BATCH_REQUESTS_MAX, GATHER_SHARE, GATHER_MAX);
        Self { shared, backend, queue, gathering, follows: None }
    }

    fn run(mut self) {
        let mut requests = Vec::new();
        while let Some(command) = self.queue.blocking_recv() {
            self.take(command, &mut requests);
            self.gather(&mut requests);
            let group = requests.len();
            match self.follows.clone() {
                None => drop(self.write(requests.drain(..))),
                Some(signal) => self.write_following(&signal, std::mem::take(&mut requests)),
            }
            self.gathering.done(group, self.queue.len());
            self.maintain();
        }
        self.backend.close();
    }

    /// Waits for a request; `false`: the queue has ended.
    pub(crate) async fn receive(&mut self, requests: &mut Vec<QueuedWrite>) -> bool {
        while requests.is_empty()
            && let Some(command) = self.queue.recv().await
        {
            self.take(command, requests);
        }
        !requests.is_empty()
    }

    /// Takes the requests that are queued now.
    pub(crate) fn receive_queued(&mut self, requests: &mut Vec<QueuedWrite>) {
        while requests.len() < BATCH_REQUESTS_MAX
            && let Ok(command) = self.queue.try_recv()
        {
            self.take(command, requests);
        }
    }

    /// Takes the queued requests, and waits a little for expected ones.
    fn gather(&mut self, requests: &mut Vec<QueuedWrite>) {
        let begin = Instant::now();
        loop {
            self.receive_queued(requests);
            let gathering = &self.gathering;
            if requests.len() >= gathering.expected() || begin.elapsed() >= gathering.wait_max() {
                return;
            }
            std::thread::sleep(GATHER_STEP);
        }
    }

    fn take(&mut self, command: WriterCommand, requests: &mut Vec<QueuedWrite>) {
        match command {
            WriterCommand::Write(request) => requests.push(request),
            // Each group begins by following, also an empty one.
            WriterCommand::Follow => {}
            // Queued requests are still written; then the queue ends.
            WriterCommand::Close => self.queue.close(),
        }
    }

    /// Writes a group; returns the events that it committed.
    pub(crate) fn write(&mut self, requests: impl Iterator<Item = QueuedWrite>) -> Vec<Arc<WriteEvent>> {
        let (after, events, accepted) = self.plan(requests);
        if events.is_empty() {
            answer(accepted, &events);
            return events;
        }
        match self.commit(after, &events) {
            Ok(()) => {
                let published = self.shared.state.write().publish(&events);
                answer(accepted, &events);
                published.wake();
                events
            }
            Err(error) => {
                for (_, reply, _) in accepted {
                    let _ = reply.send(Err(error.clone()));
                }
                Vec::new()
            }
        }
    }

    /// Checks every request; refused ones are answered at once. Returns the revision that it was planned from as well.
    fn plan(
        &self,
        requests: impl Iterator<Item = QueuedWrite>,
    ) -> (Revision, Vec<Arc<WriteEvent>>, Accepted) {
        let state = self.shared.state.read();
        let after = state.revision();
        let mut batch = EventBatch::new(after, |key| state.get(key));
        let mut accepted = Accepted::new();
        for QueuedWrite { writes, revisions, reply, room } in requests {
            match batch.add(writes, revisions) {
                Ok(events) => accepted.push((events, reply, room)),
                // A caller that went away needs no response.
                Err(error) => drop(reply.send(Err(error))),
            }
        }
        (after, batch.into_events(), accepted)
    }

    fn commit(&mut self, after: Revision, events: &[Arc<WriteEvent>]) -> Result<(), WriteError> {
        self.check_usable()?;
        let committed = self.commit_once(after, events);
        self.record(committed, events.len())
    }

    /// Refuses writes after the storage has failed.
    pub(crate) fn check_usable(&self) -> Result<(), WriteError> {
        match self.shared.broken.get() {
            Some(reason) => Err(WriteError::Failed(Arc::clone(reason))),
            None => Ok(()),
        }
    }

    pub(crate) fn commit_once(
        &mut self,
        after: Revision,
        events: &[Arc<WriteEvent>],
    ) -> Result<(), CommitError> {
        let begin = Instant::now();
        let committed = self.backend.commit(after, events);
        self.gathering.committed(begin.elapsed());
        committed
    }

    /// Records the result of a commit of so many writes.
    pub(crate) fn record(&self, committed: Result<(), CommitError>, writes: usize) -> Result<(), WriteError> {
        match committed {
            Ok(()) => {
                let counters = &self.shared.counters;
                counters.commits.fetch_add(1, Ordering::Relaxed);
                counters.writes.fetch_add(writes as u64, Ordering::Relaxed);
                self.shared.full.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(CommitError::Full) => {
                self.shared.full.store(true, Ordering::Relaxed);
                tracing::warn!(writes, "disk full: writes are refused until there is space");
                Err(WriteError::Full)
            }
            Err(CommitError::Refused(error)) => {
                tracing::warn!(%error, writes, "writes refused");
                Err(WriteError::Failed(error.into()))
            }
            // After a failed sync it is unknown which data is on the disk, and the kernel may report success for the
            // next sync although it is not: no further writes are safe. The same holds after another writer has used a
            // storage for one writer.
            Err(problem @ (CommitError::Broken(_) | CommitError::Outdated { .. })) => {
                tracing::error!(%problem, "the storage takes no more writes until the next start");
                Err(self.refuse_writes(format!("{problem}; writing stopped until the next start")))
            }
        }
    }

    /// Accepts no more writes, for a reason that only a restart may repair; returns the error of the next ones.
    fn refuse_writes(&self, reason: String) -> WriteError {
        let reason: Arc<str> = reason.into();
        // The first reason is the one that counts.
        let _ = self.shared.broken.set(Arc::clone(&reason));
        WriteError::Failed(reason)
    }

    /// Refuses writes, and closes the store once the queued ones have been refused.
    pub(crate) fn stop(&mut self, reason: String) -> WriteError {
        self.queue.close();
        self.refuse_writes(reason)
    }

    pub(crate) fn revision(&self) -> Revision {
        self.shared.state.read().revision()
    }

    fn maintain(&mut self) {
        match self.backend.maintain() {
            Ok(false) => {}
            Ok(true) => drop(self.shared.counters.checkpoints.fetch_add(1, Ordering::Relaxed)),
            Err(error) => tracing::warn!(error, "the storage could not be maintained; will try again"),
        }
    }
}

fn answer(accepted: Accepted, events: &[Arc<WriteEvent>]) {
    for (range, reply, _room) in accepted {
        let written = events[range].iter().map(|event| written(event)).collect();
        // A caller that went away needs no response.
        let _ = reply.send(Ok(written));
    }
}
