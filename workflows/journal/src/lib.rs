//! The journal of workflow executions.
//!
//! **Belongs here:** the trait [`Journal`], its implementations on SQLite and in memory, and their rows.
//!
//! **Does not belong here:** the effect of a record on an execution (`mayfly-workflows-machine`), residency and timers
//! (`mayfly-workflows-engine`).
//!
//! The journal stores the inputs of executions: starts, outcomes of effects, fired timers, stops. States, transitions
//! and histories are derived from them and are never written. A write is a [`Batch`]; batches of all executions that
//! arrive while the disk is busy become one transaction with one fsync (group commit), and each batch's `done` is
//! called only after it.
//!
//! [`SqliteJournal`] is durable; [`MemoryJournal`] is for offline tests of workflows. Both pass the same conformance
//! tests.

// A public type without `Debug` cannot be part of one that has it. Seeds are left out; payloads are not, so a row
// is not logged.
#![warn(missing_debug_implementations)]

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::execution::Digest;

mod memory;
mod names;
mod payload;
mod read;
mod row;
mod sqlite;
#[cfg(test)]
mod tests;
mod write;

pub use memory::MemoryJournal;
pub use payload::{PART_BYTES_MIN, loaded, stored};
pub use row::{
    Birth, ChildOf, ExecutionOwner, ExecutionRow, JournalChange, ListRows, OutcomeRow, RecordRow,
    StoredExecution, WaitedBy,
};
pub use sqlite::SqliteJournal;

/// The maximum number of queued batches before starts are refused. All other changes are accepted: they belong to open
/// executions, whose number is bounded.
const QUEUE_BATCHES_MAX: usize = 65_536;

/// The journal could not read or write.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JournalError {
    /// The database returned an error.
    #[error("{0}")]
    Database(String),
    /// A row cannot be decoded.
    #[error("row of {table} is damaged: {reason}")]
    RowDamaged {
        /// The table.
        table: &'static str,
        /// The reason.
        reason: String,
    },
    /// The rules of an execution's edition are not in this version of Mayfly, so its records cannot be replayed.
    #[error(
        "execution {execution} follows edition {edition} of the workflow rules, and this version of Mayfly has edition \
         {known} only: let the version of Mayfly that started the execution finish it"
    )]
    UnknownEdition {
        /// The execution's id.
        execution: u64,
        /// The edition of the execution.
        edition: u32,
        /// The edition that this version has.
        known: u32,
    },
    /// The queue of writes is full.
    #[error("too many starts wait for the disk: retry the start shortly")]
    Full,
    /// The journal is closed.
    #[error("the journal is closed")]
    Closed,
}

/// Why writes fail.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WriteFault {
    /// The write is retried until it succeeds; starts are refused meanwhile.
    #[error("cannot write the workflow journal, retrying: {0}")]
    Retrying(JournalError),
    /// The journal accepts no more writes. Only a restart of the process helps: everything acknowledged is durable,
    /// and executions continue from it.
    #[error("the workflow journal failed and accepts no more writes, restart Mayfly: {0}")]
    Failed(JournalError),
}

impl From<rusqlite::Error> for JournalError {
    fn from(error: rusqlite::Error) -> Self {
        JournalError::Database(error.to_string())
    }
}

/// Called once, on the journal's thread, after the batch is on disk or lost. It must not block; it passes work to other
/// threads.
pub type Done = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// Changes that become durable together.
pub struct Batch {
    /// The changes, in order.
    pub changes: Vec<JournalChange>,
    /// Called with the outcome of the write.
    pub done: Done,
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("changes", &self.changes.len()).finish_non_exhaustive()
    }
}

impl Batch {
    /// Whether the batch starts an execution.
    fn starts(&self) -> bool {
        self.changes.iter().any(|change| matches!(change, JournalChange::Start(_)))
    }

    /// Whether the batch starts an execution for a client, so that it can be refused. The start of a map run's child
    /// cannot be refused: its parent depends on it, and waits.
    fn may_be_refused(&self) -> bool {
        self.changes
            .iter()
            .any(|change| matches!(change, JournalChange::Start(row) if row.birth.parent.is_none()))
    }
}

/// A journal. A read sees every batch whose `done` has been called.
pub trait Journal: Send + Sync {
    /// Queues a batch without blocking. A start is refused while the queue is full. After a permanent error the journal
    /// refuses all later batches (nothing may be acknowledged behind a gap); only a start whose ARN already exists
    /// fails alone.
    fn write(&self, batch: Batch) -> Result<(), JournalError>;

    /// The highest execution number in use, 0 if there is none.
    fn last_execution(&self) -> Result<u64, JournalError>;

    /// An execution's row by number.
    fn execution(&self, id: u64) -> Result<Option<ExecutionRow>, JournalError>;

    /// An execution's row by ARN.
    fn execution_by_arn(&self, arn: &ExecutionArn) -> Result<Option<ExecutionRow>, JournalError>;

    /// The execution's records with `seq > after`, in order.
    fn records(&self, id: u64, after: u64) -> Result<Vec<RecordRow>, JournalError>;

    /// The execution's newest checkpoint and the sequence number of the record before it; `None` after the execution
    /// has ended.
    fn checkpoint(&self, id: u64) -> Result<Option<(u64, Vec<u8>)>, JournalError>;

    /// The numbers and ARNs of the given executions that have not ended.
    fn open_arns(&self, ids: &[u64]) -> Result<Vec<(u64, ExecutionArn)>, JournalError> {
        let mut arns = Vec::with_capacity(ids.len());
        for &id in ids {
            arns.extend(self.execution(id)?.filter(ExecutionRow::is_open).map(|row| (id, row.arn)));
        }
        Ok(arns)
    }

    /// The rows, checkpoints and later records of the given executions that have not ended.
    fn open_with_records(&self, ids: &[u64]) -> Result<Vec<StoredExecution>, JournalError> {
        let mut executions = Vec::with_capacity(ids.len());
        for &id in ids {
            let Some(row) = self.execution(id)?.filter(ExecutionRow::is_open) else { continue };
            let checkpoint = self.checkpoint(id)?;
            let records = self.records(id, checkpoint.as_ref().map_or(0, |(seq, _)| *seq))?;
            executions.push(StoredExecution { row, checkpoint, records });
        }
        Ok(executions)
    }

    /// A payload stored by its digest.
    fn part(&self, digest: &Digest) -> Result<Option<String>, JournalError>;

    /// A state machine stored by its digest.
    fn machine(&self, digest: &Digest) -> Result<Option<Vec<u8>>, JournalError>;

    /// Executions of one owner, newest first.
    fn list(&self, query: &ListRows) -> Result<Vec<ExecutionRow>, JournalError>;

    /// Numbers of the executions that have not ended, oldest first.
    fn open_executions(&self) -> Result<Vec<u64>, JournalError>;

    /// Executions that ended before a time, oldest first; children of a map run are not listed before the execution
    /// that has the run is gone.
    fn ended_before(&self, stop_ms: i64, limit: usize) -> Result<Vec<u64>, JournalError>;

    /// The error that prevents writes, if any.
    fn health(&self) -> Result<(), WriteFault> {
        Ok(())
    }

    /// The ARN of an open execution that references this artifact (`sha256:…`): in its definition, its input, or in any
    /// recorded event.
    fn user_of(&self, artifact: &Digest) -> Result<Option<ExecutionArn>, JournalError>;

    /// The execution that a map run belongs to.
    fn map_run(&self, arn: &MapRunArn) -> Result<Option<u64>, JournalError>;

    /// Writes the queued batches and stops. Later writes fail.
    fn close(&self);
}
