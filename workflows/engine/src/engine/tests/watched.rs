//! A journal whose writes a test observes, and can drop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use mayfly_workflows_journal::{
    Batch, ExecutionRow, Journal, JournalError, ListRows, RecordRow, StoredExecution,
};
use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::execution::Digest;

type See = dyn Fn(Batch) -> Option<Batch> + Send + Sync;

/// Passes everything through to a journal; each write first goes through `see`.
pub(super) struct Watched {
    journal: Arc<dyn Journal>,
    see: Box<See>,
    /// How often executions were read together.
    pub(super) groups_read: AtomicU64,
    /// Records that were read.
    pub(super) records_read: AtomicU64,
    /// Called by the next reader of an execution's records, after it has read them.
    pub(super) read: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// So many of the next questions for an execution by its number fail.
    pub(super) refused_reads: AtomicU64,
}

impl Watched {
    pub(super) fn new(
        journal: Arc<dyn Journal>,
        see: impl Fn(Batch) -> Option<Batch> + Send + Sync + 'static,
    ) -> Self {
        Self {
            journal,
            see: Box::new(see),
            groups_read: AtomicU64::new(0),
            records_read: AtomicU64::new(0),
            read: Mutex::default(),
            refused_reads: AtomicU64::new(0),
        }
    }
}

impl Journal for Watched {
    fn write(&self, batch: Batch) -> Result<(), JournalError> {
        match (self.see)(batch) {
            Some(batch) => self.journal.write(batch),
            None => Ok(()),
        }
    }

    fn last_execution(&self) -> Result<u64, JournalError> {
        self.journal.last_execution()
    }

    fn execution(&self, id: u64) -> Result<Option<ExecutionRow>, JournalError> {
        let refuse = |left: u64| left.checked_sub(1);
        if self.refused_reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refuse).is_ok() {
            return Err(JournalError::Database("refused by the test".to_owned()));
        }
        self.journal.execution(id)
    }

    fn execution_by_arn(&self, arn: &ExecutionArn) -> Result<Option<ExecutionRow>, JournalError> {
        self.journal.execution_by_arn(arn)
    }

    fn records(&self, id: u64, after: u64) -> Result<Vec<RecordRow>, JournalError> {
        let records = self.journal.records(id, after)?;
        self.records_read.fetch_add(records.len() as u64, Ordering::Relaxed);
        let read = self.read.lock().take();
        if let Some(read) = read {
            read();
        }
        Ok(records)
    }

    fn checkpoint(&self, id: u64) -> Result<Option<(u64, Vec<u8>)>, JournalError> {
        self.journal.checkpoint(id)
    }

    fn open_with_records(&self, ids: &[u64]) -> Result<Vec<StoredExecution>, JournalError> {
        self.groups_read.fetch_add(1, Ordering::Relaxed);
        self.journal.open_with_records(ids)
    }

    fn part(&self, digest: &Digest) -> Result<Option<String>, JournalError> {
        self.journal.part(digest)
    }

    fn machine(&self, digest: &Digest) -> Result<Option<Vec<u8>>, JournalError> {
        self.journal.machine(digest)
    }

    fn list(&self, query: &ListRows) -> Result<Vec<ExecutionRow>, JournalError> {
        self.journal.list(query)
    }

    fn open_executions(&self) -> Result<Vec<u64>, JournalError> {
        self.journal.open_executions()
    }

    fn ended_before(&self, stop_ms: i64, limit: usize) -> Result<Vec<u64>, JournalError> {
        self.journal.ended_before(stop_ms, limit)
    }

    fn user_of(&self, artifact: &Digest) -> Result<Option<ExecutionArn>, JournalError> {
        self.journal.user_of(artifact)
    }

    fn map_run(&self, arn: &MapRunArn) -> Result<Option<u64>, JournalError> {
        self.journal.map_run(arn)
    }

    fn close(&self) {
        self.journal.close();
    }
}
