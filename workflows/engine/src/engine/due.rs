//! Timers that became due together, as the threads that deliver them share them.

use mayfly_workflows_language::arn::ExecutionArn;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::inner::Inner;
use super::live::{NameReservation, ResidentExecution};
use super::open::LoadedExecution;
use crate::timers::TimerKey;
use mayfly_workflows_journal::{JournalError, StoredExecution};

/// Executions that are read in one transaction. Their records are in memory together.
const READ_TOGETHER: usize = 32;

/// Due timers. Several threads may deliver them: each takes one after the other.
pub(super) struct DueGroup {
    queue: Mutex<DueQueue>,
    delivered: AtomicUsize,
}

#[derive(Default)]
struct DueQueue {
    /// Not looked at.
    keys: VecDeque<TimerKey>,
    /// Found or read, to be delivered before the others.
    found: VecDeque<(TimerKey, DueExecution)>,
}

/// The execution of a due timer.
enum DueExecution {
    Resident(Arc<ResidentExecution>),
    /// Read from the journal; its ARN is reserved until it is in memory.
    Stored(NameReservation, Box<StoredExecution>),
}

impl DueGroup {
    pub(super) fn new(keys: Vec<TimerKey>) -> Arc<Self> {
        let queue = DueQueue { keys: keys.into(), found: VecDeque::new() };
        Arc::new(Self { queue: Mutex::new(queue), delivered: AtomicUsize::new(0) })
    }

    /// Whether a timer waits for a thread.
    pub(super) fn waits(&self) -> bool {
        let queue = self.queue.lock();
        !(queue.keys.is_empty() && queue.found.is_empty())
    }

    /// How many timers were delivered.
    pub(super) fn delivered(&self) -> usize {
        self.delivered.load(Ordering::Acquire)
    }

    /// Delivers timers until none waits. Blocks the thread.
    pub(super) fn deliver(&self, inner: &Arc<Inner>) {
        loop {
            let unread = {
                let mut queue = self.queue.lock();
                if let Some((key, execution)) = queue.found.pop_front() {
                    drop(queue);
                    deliver_one(inner, key, execution);
                    self.delivered.fetch_add(1, Ordering::AcqRel);
                    continue;
                }
                let count = queue.keys.len().min(READ_TOGETHER);
                queue.keys.drain(..count).collect::<Vec<_>>()
            };
            if unread.is_empty() {
                return;
            }
            match find(inner, &unread) {
                Ok(found) => self.queue.lock().found.extend(found),
                // One that cannot be read does not hinder the others.
                Err(_) => unread.into_iter().for_each(|key| deliver_alone(inner, key)),
            }
        }
    }
}

/// The executions of these timers. Those that have ended are left out.
fn find(inner: &Arc<Inner>, keys: &[TimerKey]) -> Result<Vec<(TimerKey, DueExecution)>, JournalError> {
    let mut found = Vec::with_capacity(keys.len());
    let mut evicted = Vec::new();
    for &key in keys {
        match inner.live.by_id(key.execution) {
            Some(running) => found.push((key, DueExecution::Resident(running))),
            None => evicted.push(key),
        }
    }
    if evicted.is_empty() {
        return Ok(found);
    }
    let ids: Vec<u64> = evicted.iter().map(|key| key.execution).collect();
    let arns: HashMap<u64, ExecutionArn> = inner.journal.open_arns(&ids)?.into_iter().collect();
    let mut reserved = HashMap::new();
    for key in evicted {
        match arns.get(&key.execution).map(|arn| inner.live.take(arn)) {
            Some(Some(place)) => drop(reserved.insert(key.execution, (key, place))),
            // Another task is reading it, or it is being evicted, or it is here with another timer.
            Some(None) => inner.fire_reserved(key),
            // It has ended; or it is not durable, and in memory.
            None => {
                let running = inner.live.by_id(key.execution);
                found.extend(running.map(|running| (key, DueExecution::Resident(running))));
            }
        }
    }
    // Reserve the ARNs first, read the rows second: the previous holder of a reservation may have ended its
    // execution since.
    let ids: Vec<u64> = ids.into_iter().filter(|id| reserved.contains_key(id)).collect();
    for stored in inner.journal.open_with_records(&ids)? {
        if let Some((key, place)) = reserved.remove(&stored.row.id) {
            found.push((key, DueExecution::Stored(place, Box::new(stored))));
        }
    }
    Ok(found)
}

fn deliver_one(inner: &Arc<Inner>, key: TimerKey, execution: DueExecution) {
    match execution {
        DueExecution::Resident(running) => inner.deliver_timer(&running, key),
        DueExecution::Stored(place, stored) => match inner.recomputed_from(*stored) {
            Ok(running) => {
                inner.take_up(place, &running);
                inner.deliver_timer(&running, key);
            }
            Err(error) => inner.fire_later(key, &error),
        },
    }
}

/// Reads one execution and delivers its timer.
fn deliver_alone(inner: &Arc<Inner>, key: TimerKey) {
    if let Some(running) = inner.live.by_id(key.execution) {
        return inner.deliver_timer(&running, key);
    }
    match inner.load_one(&*inner.journal, key.execution) {
        Ok(LoadedExecution::Resident(running)) => inner.deliver_timer(&running, key),
        Ok(LoadedExecution::Reserved) => inner.fire_reserved(key),
        // One that is not durable yet is in memory.
        Ok(LoadedExecution::Ended) => {
            if let Some(running) = inner.live.by_id(key.execution) {
                inner.deliver_timer(&running, key);
            }
        }
        Err(error) => inner.fire_later(key, &error),
    }
}
