//! A journal in memory, lost with its process.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::execution::Digest;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::names::artifacts_in;
use super::write::execution_of;
use super::{
    Batch, Done, ExecutionOwner, ExecutionRow, Journal, JournalChange, JournalError, ListRows,
    QUEUE_BATCHES_MAX, RecordRow,
};
use mayfly_workflows_language::execution::RunStatus;

/// A journal for offline tests of workflows, and for the engine's own tests.
pub struct MemoryJournal {
    tables: Mutex<Tables>,
    /// Calls `done` on a separate thread, like every journal.
    told: Arc<Acknowledgements>,
}

impl std::fmt::Debug for MemoryJournal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryJournal").finish_non_exhaustive()
    }
}

/// The queue of acknowledgements, in the order of the writes.
#[derive(Default)]
struct Acknowledgements {
    queue: Mutex<Queue>,
    filled: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<(Done, Result<(), JournalError>)>,
    /// The journal was dropped: no further acknowledgements follow the queued ones.
    over: bool,
}

impl Default for MemoryJournal {
    fn default() -> Self {
        let told: Arc<Acknowledgements> = Arc::default();
        let for_thread = told.clone();
        std::thread::spawn(move || {
            loop {
                let mut queue = for_thread.queue.lock();
                while queue.waiting.is_empty() && !queue.over {
                    for_thread.filled.wait(&mut queue);
                }
                let next = std::mem::take(&mut queue.waiting);
                drop(queue);
                if next.is_empty() {
                    return;
                }
                next.into_iter().for_each(|(done, outcome)| done(outcome));
            }
        });
        Self { tables: Mutex::default(), told }
    }
}

impl Drop for MemoryJournal {
    fn drop(&mut self) {
        self.told.queue.lock().over = true;
        self.told.filled.notify_one();
    }
}

#[derive(Default)]
struct Tables {
    closed: bool,
    executions: BTreeMap<u64, ExecutionRow>,
    by_arn: HashMap<ExecutionArn, u64>,
    records: HashMap<u64, Vec<RecordRow>>,
    parts: HashMap<Digest, Arc<str>>,
    part_uses: HashSet<(u64, Digest)>,
    machines: HashMap<Digest, Arc<[u8]>>,
    map_runs: HashMap<MapRunArn, u64>,
    checkpoints: HashMap<u64, (u64, Vec<u8>)>,
}

impl Tables {
    fn apply(&mut self, change: JournalChange, execution: Option<u64>) -> Result<(), JournalError> {
        match change {
            JournalChange::Machine { digest, body } => {
                self.machines.entry(digest).or_insert(body);
            }
            JournalChange::Part { digest, text } => {
                self.parts.entry(digest).or_insert(text);
                self.part_uses.extend(execution.map(|execution| (execution, digest)));
            }
            JournalChange::Start(row) => {
                if self.by_arn.contains_key(&row.arn) {
                    return Err(JournalError::Database(format!("{} is there already", row.arn)));
                }
                self.by_arn.insert(row.arn.clone(), row.id);
                self.executions.insert(row.id, *row);
            }
            JournalChange::Record { execution, row } => self.records.entry(execution).or_default().push(row),
            JournalChange::Outcome { execution, row } => {
                if row.status != RunStatus::Running {
                    self.checkpoints.remove(&execution);
                }
                if let Some(there) = self.executions.get_mut(&execution) {
                    there.outcome = *row;
                }
            }
            JournalChange::Checkpoint { execution, seq, body } => {
                self.checkpoints.insert(execution, (seq, body));
            }
            JournalChange::Remove { execution } => {
                let running = |row: &ExecutionRow| row.outcome.status == RunStatus::Running;
                if self.executions.get(&execution).is_some_and(running) {
                    return Ok(());
                }
                if let Some(gone) = self.executions.remove(&execution) {
                    self.by_arn.remove(&gone.arn);
                    if self.executions.values().all(|row| row.machine != gone.machine) {
                        self.machines.remove(&gone.machine);
                    }
                }
                self.records.remove(&execution);
                self.part_uses.retain(|(of, _)| *of != execution);
                self.map_runs.retain(|_, of| *of != execution);
            }
            JournalChange::MapRun { arn, execution } => {
                self.map_runs.insert(arn, execution);
            }
        }
        Ok(())
    }
}

impl Tables {
    /// Whether the artifact is referenced anywhere in an execution.
    fn names(&self, row: &ExecutionRow, artifact: &Digest) -> bool {
        let names = |text: &[u8]| artifacts_in(text).any(|found| found == *artifact);
        let records = self.records.get(&row.id).map(Vec::as_slice).unwrap_or_default();
        let parts = self.part_uses.iter().filter(|(execution, _)| *execution == row.id);
        let mut parts = parts.filter_map(|(_, part)| self.parts.get(part));
        row.input.text().is_some_and(|text| names(text.as_bytes()))
            || records.iter().any(|record| names(&record.body))
            || parts.any(|part| names(part.as_bytes()))
            || self.machines.get(&row.machine).is_some_and(|body| names(body))
    }
}

fn belongs(row: &ExecutionRow, owner: &ExecutionOwner) -> bool {
    match owner {
        ExecutionOwner::Everyone => row.map_run_arn.is_none(),
        ExecutionOwner::StateMachine(arn) => row.machine_arn == *arn && row.map_run_arn.is_none(),
        ExecutionOwner::Version(arn) => row.version_arn.as_ref() == Some(arn),
        ExecutionOwner::Alias(arn) => row.alias_arn.as_ref() == Some(arn),
        ExecutionOwner::MapRun(arn) => row.map_run_arn.as_ref() == Some(arn),
    }
}

impl Journal for MemoryJournal {
    fn write(&self, batch: Batch) -> Result<(), JournalError> {
        let mut tables = self.tables.lock();
        if tables.closed {
            return Err(JournalError::Closed);
        }
        if batch.may_be_refused() && self.told.queue.lock().waiting.len() >= QUEUE_BATCHES_MAX {
            return Err(JournalError::Full);
        }
        let execution = batch.changes.iter().find_map(execution_of);
        let outcome = batch.changes.into_iter().try_for_each(|change| tables.apply(change, execution));
        // Pushed while the lock is held, so that acknowledgements have the order of the writes.
        self.told.queue.lock().waiting.push((batch.done, outcome));
        self.told.filled.notify_one();
        Ok(())
    }

    fn last_execution(&self) -> Result<u64, JournalError> {
        Ok(self.tables.lock().executions.keys().next_back().copied().unwrap_or(0))
    }

    fn execution(&self, id: u64) -> Result<Option<ExecutionRow>, JournalError> {
        Ok(self.tables.lock().executions.get(&id).cloned())
    }

    fn execution_by_arn(&self, arn: &ExecutionArn) -> Result<Option<ExecutionRow>, JournalError> {
        let tables = self.tables.lock();
        Ok(tables.by_arn.get(arn).and_then(|id| tables.executions.get(id)).cloned())
    }

    fn records(&self, id: u64, after: u64) -> Result<Vec<RecordRow>, JournalError> {
        let tables = self.tables.lock();
        let all = tables.records.get(&id).map(Vec::as_slice).unwrap_or_default();
        Ok(all.iter().filter(|row| row.seq > after).cloned().collect())
    }

    fn checkpoint(&self, id: u64) -> Result<Option<(u64, Vec<u8>)>, JournalError> {
        Ok(self.tables.lock().checkpoints.get(&id).cloned())
    }

    fn part(&self, digest: &Digest) -> Result<Option<String>, JournalError> {
        Ok(self.tables.lock().parts.get(digest).map(|text| text.to_string()))
    }

    fn machine(&self, digest: &Digest) -> Result<Option<Vec<u8>>, JournalError> {
        Ok(self.tables.lock().machines.get(digest).map(|body| body.to_vec()))
    }

    fn list(&self, query: &ListRows) -> Result<Vec<ExecutionRow>, JournalError> {
        let tables = self.tables.lock();
        let newest_first =
            tables.executions.range(..query.before.unwrap_or(u64::MAX)).rev().map(|(_, row)| row);
        Ok(newest_first
            .filter(|row| belongs(row, &query.owner))
            .filter(|row| query.status.is_none_or(|status| row.outcome.status == status))
            .filter(|row| query.redriven.is_none_or(|redriven| (row.outcome.redrive_count > 0) == redriven))
            .take(query.limit)
            .cloned()
            .collect())
    }

    fn open_executions(&self) -> Result<Vec<u64>, JournalError> {
        let tables = self.tables.lock();
        let open = tables.executions.values().filter(|row| row.outcome.status == RunStatus::Running);
        Ok(open.map(|row| row.id).collect())
    }

    fn ended_before(&self, stop_ms: i64, limit: usize) -> Result<Vec<u64>, JournalError> {
        let tables = self.tables.lock();
        let has_ended = |row: &&ExecutionRow| {
            let parent = row.map_run_arn.as_ref().and_then(|arn| tables.map_runs.get(arn));
            let parent = parent.and_then(|id| tables.executions.get(id));
            row.outcome.stop_ms.is_some_and(|at_ms| at_ms < stop_ms)
                && row.outcome.status != RunStatus::Running
                && parent.is_none_or(|parent| parent.outcome.status != RunStatus::Running)
        };
        Ok(tables.executions.values().filter(has_ended).take(limit).map(|row| row.id).collect())
    }

    fn user_of(&self, artifact: &Digest) -> Result<Option<ExecutionArn>, JournalError> {
        let tables = self.tables.lock();
        let mut open = tables.executions.values().filter(|row| row.outcome.status == RunStatus::Running);
        let user = open.find(|row| tables.names(row, artifact));
        Ok(user.map(|row| row.arn.clone()))
    }

    fn map_run(&self, arn: &MapRunArn) -> Result<Option<u64>, JournalError> {
        Ok(self.tables.lock().map_runs.get(arn).copied())
    }

    fn close(&self) {
        self.tables.lock().closed = true;
    }
}
