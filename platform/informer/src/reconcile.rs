//! The loop in which level-triggered reconcilers run: a work queue and its workers.
//!
//! A key in the queue means that the object may have changed, never how. Keys are deduplicated; one key is never worked
//! on twice at the same time; after a failure the key is queued again with a growing, jittered pause. (The design is
//! that of client-go's `workqueue`.)

mod queue;

use std::{
    collections::HashMap,
    fmt::{Debug, Display},
    hash::Hash,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::Backoff;
use queue::{KeyQueue, Next};

/// Pauses after failures, unless a reconciler has its own.
pub const RETRY: Backoff = Backoff { first: Duration::from_millis(5), most: Duration::from_secs(60) };

/// The type of keys: `ObjectKey`, a uid, …
pub trait ReconcileKey: Clone + Eq + Ord + Hash + Debug + Send + Sync + 'static {}
impl<Q: Clone + Eq + Ord + Hash + Debug + Send + Sync + 'static> ReconcileKey for Q {}

/// The result of a successful reconciliation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing to do until something changes.
    Done,
    /// Reconcile again after this time, even if nothing changes.
    RequeueAfter(Duration),
}

/// Keys to reconcile. Cheap to clone; holds each key at most once.
pub struct WorkQueue<Q> {
    shared: Arc<Shared<Q>>,
}

impl<Q> std::fmt::Debug for WorkQueue<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkQueue").finish_non_exhaustive()
    }
}

struct Shared<Q> {
    queue: Mutex<KeyQueue<Q>>,
    notify: Notify,
}

impl<Q> Clone for WorkQueue<Q> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<Q: ReconcileKey> Default for WorkQueue<Q> {
    fn default() -> Self {
        Self::new(RETRY)
    }
}

impl<Q: ReconcileKey> WorkQueue<Q> {
    pub fn new(retry: Backoff) -> Self {
        let shared = Shared { queue: Mutex::new(KeyQueue::new(retry)), notify: Notify::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Adds `key`, to be reconciled now, or as soon as the work on it in progress has ended.
    pub fn add(&self, key: Q) {
        self.shared.queue.lock().add(key);
        self.shared.notify.notify_one();
    }

    /// Adds `key`, to be reconciled after `delay`, or earlier if it is added again.
    pub fn add_after(&self, key: Q, delay: Duration) {
        self.shared.queue.lock().add_at(key, Instant::now() + delay);
        self.shared.notify.notify_one();
    }

    /// Keys that wait for a worker.
    pub fn len(&self) -> usize {
        self.shared.queue.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Reconciles the queue's keys, `workers_max` at a time, until `stop`; then waits for the work in progress.
/// A panic in `reconcile` counts as a failure of its key.
pub async fn run<Q, F, Fut, E>(
    name: &'static str,
    queue: WorkQueue<Q>,
    workers_max: usize,
    stop: CancellationToken,
    reconcile: F,
) where
    Q: ReconcileKey,
    F: Fn(Q) -> Fut,
    Fut: Future<Output = Result<Outcome, E>> + Send + 'static,
    E: Display + Send + 'static,
{
    let mut tasks = JoinSet::new();
    let mut keys = HashMap::new();
    loop {
        let wake_at = loop {
            if tasks.len() >= workers_max || stop.is_cancelled() {
                break None;
            }
            let next = queue.shared.queue.lock().next(Instant::now());
            match next {
                Next::Key(key) => {
                    let task = tasks.spawn(reconcile(key.clone()));
                    keys.insert(task.id(), key);
                }
                Next::At(at) => break at,
            }
        };
        tokio::select! {
            Some(joined) = tasks.join_next_with_id() => {
                let (id, result) = match joined {
                    Ok((id, result)) => (id, result.map_err(|error| error.to_string())),
                    Err(error) => (error.id(), Err(format!("the reconciler panicked: {error}"))),
                };
                if let Some(key) = keys.remove(&id) {
                    settle(name, &queue, key, result);
                }
            }
            () = stop.cancelled(), if !stop.is_cancelled() => {}
            () = queue.shared.notify.notified(), if !stop.is_cancelled() => {}
            () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            else => return,
        }
        if stop.is_cancelled() && tasks.is_empty() {
            return;
        }
    }
}

fn settle<Q: ReconcileKey>(
    name: &'static str,
    queue: &WorkQueue<Q>,
    key: Q,
    result: Result<Outcome, String>,
) {
    let now = Instant::now();
    let mut queue = queue.shared.queue.lock();
    match result {
        Ok(Outcome::Done) => queue.succeeded(key, None),
        Ok(Outcome::RequeueAfter(delay)) => queue.succeeded(key, Some(now + delay)),
        Err(error) => {
            let failures = queue.failed(key.clone(), now);
            // The first failures are mostly lost races for a resourceVersion.
            if failures <= 3 {
                tracing::debug!(reconciler = name, ?key, %error, failures, "a reconciliation failed; will retry");
            } else {
                tracing::warn!(reconciler = name, ?key, %error, failures, "a reconciliation keeps failing; will retry");
            }
        }
    }
}

#[cfg(test)]
mod tests;
