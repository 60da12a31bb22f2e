//! How many invocations wait: each function and each namespace has a share of what the engine holds, so that one that
//! does not keep up leaves room for the others, and all of them leave room for workflows.
//!
//! The invocations are counted by the engine's notifications of starts and ends. A count may be late by as many as are
//! on their way, so the limits are no exact ones.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use mayfly_api::ObjectKey;
use mayfly_workflows_engine::engine::{
    Engine, ExecutionChanged, ExecutionError, ExecutionOwner, ListQuery, RunStatus,
};
use parking_lot::Mutex;
use tokio::sync::broadcast::{
    Receiver,
    error::{RecvError, TryRecvError},
};
use tokio_util::sync::CancellationToken;

use super::parse_arn;

/// Executions of one page of the count after a start.
const PAGE: usize = 1_000;
/// The pause before executions that could not be listed are listed again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The numbers of invocations that may wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingLimits {
    pub(super) function: usize,
    pub(super) namespace: usize,
    pub(super) all: usize,
}

impl Default for WaitingLimits {
    /// The engine holds a million executions: four tenths of them stay for workflows.
    fn default() -> Self {
        Self { function: 100_000, namespace: 300_000, all: 600_000 }
    }
}

/// Too many invocations wait for another one.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{waiting} invocations of {whose} wait already, and at most {max} may")]
pub struct WaitingFull {
    whose: String,
    waiting: usize,
    max: usize,
}

/// The invocations that have not ended.
pub(super) struct WaitingInvocations {
    limits: WaitingLimits,
    hasher: RandomState,
    counts: Mutex<WaitingCounts>,
}

#[derive(Debug, Default)]
struct WaitingCounts {
    /// Hashes of the ids, so that a repeated notification is counted once.
    by_function: HashMap<ObjectKey, HashSet<u64>>,
    by_namespace: HashMap<String, usize>,
    all: usize,
}

impl WaitingCounts {
    fn add(&mut self, function: ObjectKey, id: u64) {
        let namespace = function.namespace.clone();
        if self.by_function.entry(function).or_default().insert(id) {
            *self.by_namespace.entry(namespace).or_default() += 1;
            self.all += 1;
        }
    }

    fn remove(&mut self, function: &ObjectKey, id: u64) {
        let Some(ids) = self.by_function.get_mut(function) else { return };
        if !ids.remove(&id) {
            return;
        }
        if ids.is_empty() {
            self.by_function.remove(function);
        }
        self.all -= 1;
        if let Some(count) = self.by_namespace.get_mut(&function.namespace) {
            *count -= 1;
            if *count == 0 {
                self.by_namespace.remove(&function.namespace);
            }
        }
    }
}

impl WaitingInvocations {
    pub(super) fn new(limits: WaitingLimits) -> Self {
        Self { limits, hasher: RandomState::new(), counts: Mutex::default() }
    }

    /// Whether one more invocation of a function may wait.
    pub(super) fn admit(&self, function: &ObjectKey) -> Result<(), WaitingFull> {
        let counts = self.counts.lock();
        let of_function = counts.by_function.get(function).map_or(0, HashSet::len);
        let of_namespace = counts.by_namespace.get(&function.namespace).copied().unwrap_or(0);
        let (whose, waiting, max) = if of_function >= self.limits.function {
            (format!("function {function}"), of_function, self.limits.function)
        } else if of_namespace >= self.limits.namespace {
            (format!("namespace {}", function.namespace), of_namespace, self.limits.namespace)
        } else if counts.all >= self.limits.all {
            ("all functions".to_owned(), counts.all, self.limits.all)
        } else {
            return Ok(());
        };
        Err(WaitingFull { whose, waiting, max })
    }

    /// Counts what the engine tells until `stop`, and first what it had before.
    pub(super) async fn follow(
        &self,
        engine: &Engine,
        mut changes: Receiver<ExecutionChanged>,
        stop: CancellationToken,
    ) {
        loop {
            match stop.run_until_cancelled(self.count(engine, &mut changes)).await {
                None => return,
                Some(false) => continue,
                Some(true) => {}
            }
            loop {
                let told = tokio::select! {
                    told = changes.recv() => told,
                    () = stop.cancelled() => return,
                };
                match told {
                    Ok(changed) => self.note(&changed),
                    // Some are unknown now: all are counted again.
                    Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => return,
                }
            }
        }
    }

    /// Counts the open executions from their list. The notification of a change comes after the change can be read, and
    /// is handled after the page: it removes an execution that was read before its end. Returns false if notifications
    /// were lost meanwhile.
    async fn count(&self, engine: &Engine, changes: &mut Receiver<ExecutionChanged>) -> bool {
        *self.counts.lock() = WaitingCounts::default();
        let mut from = None;
        loop {
            match self.page(engine, from.clone()).await {
                Ok(next) => {
                    loop {
                        match changes.try_recv() {
                            Ok(changed) => self.note(&changed),
                            Err(TryRecvError::Lagged(_)) => return false,
                            Err(TryRecvError::Empty | TryRecvError::Closed) => break,
                        }
                    }
                    from = match next {
                        Some(next) => Some(next),
                        None => return true,
                    };
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot count the invocations that wait; will try again");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    async fn page(&self, engine: &Engine, from: Option<String>) -> Result<Option<String>, ExecutionError> {
        let status = Some(RunStatus::Running);
        let query = ListQuery { owner: ExecutionOwner::Everyone, status, redriven: None, limit: PAGE, from };
        let page = engine.list(query).await?;
        let mut counts = self.counts.lock();
        for found in &page.items {
            if let Some((function, id)) = parse_arn(&found.execution_arn) {
                counts.add(function, self.hasher.hash_one(id));
            }
        }
        Ok(page.next)
    }

    fn note(&self, changed: &ExecutionChanged) {
        let Some((function, id)) = parse_arn(&changed.execution.execution_arn) else { return };
        let id = self.hasher.hash_one(id);
        match changed.execution.status {
            RunStatus::Running => self.counts.lock().add(function, id),
            _ => self.counts.lock().remove(&function, id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_and_a_namespace_have_their_shares() {
        let waiting = WaitingInvocations::new(WaitingLimits { function: 2, namespace: 3, all: 4 });
        let keys: Vec<_> = [("a", "f"), ("a", "g"), ("b", "f"), ("b", "g")]
            .map(|(namespace, name)| ObjectKey::new(namespace, name))
            .into();
        let add = |key: &ObjectKey, id| waiting.counts.lock().add(key.clone(), id);
        let refused = |key: &ObjectKey| waiting.admit(key).err().map(|full| full.to_string());
        add(&keys[0], 1);
        // A repeated notification does not count.
        add(&keys[0], 1);
        assert_eq!(refused(&keys[0]), None);
        add(&keys[0], 2);
        let why = refused(&keys[0]).unwrap();
        assert_eq!(why, "2 invocations of function a/f wait already, and at most 2 may");
        assert_eq!(refused(&keys[1]), None);
        add(&keys[1], 3);
        assert!(refused(&keys[1]).unwrap().contains("namespace a"));
        assert_eq!(refused(&keys[2]), None);
        add(&keys[2], 4);
        assert!(refused(&keys[3]).unwrap().contains("all functions"));
        let remove = |key: &ObjectKey, id| waiting.counts.lock().remove(key, id);
        remove(&keys[0], 1);
        remove(&keys[0], 1);
        remove(&keys[1], 9);
        assert_eq!(refused(&keys[0]), None);
        remove(&keys[0], 2);
        remove(&keys[1], 3);
        remove(&keys[2], 4);
        let counts = waiting.counts.lock();
        assert!(
            counts.by_function.is_empty() && counts.by_namespace.is_empty() && counts.all == 0,
            "{counts:?}"
        );
    }
}
