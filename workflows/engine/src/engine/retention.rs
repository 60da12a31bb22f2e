//! The deletion of executions that ended before the retention period.

use std::sync::Weak;
use std::time::Duration;

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::execution::RunStatus;

use super::Engine;
use super::inner::Inner;
use mayfly_workflows_journal::{Batch, JournalChange, JournalError};

/// The interval of the search for old executions.
const ROUND: Duration = Duration::from_secs(600);
/// The delay of the first round, so that it does not compete with the start.
const FIRST: Duration = Duration::from_secs(30);
/// Executions deleted in one transaction; other writes come between two of them.
const BATCH_MAX: usize = 256;

impl Inner {
    /// Deletes executions that ended before the retention period. Returns how many were deleted.
    pub(super) async fn delete_expired_round(&self) -> Result<usize, JournalError> {
        let retention_ms = i64::try_from(self.config.limits.retention.as_millis()).unwrap_or(i64::MAX);
        let before_ms = self.now_ms().saturating_sub(retention_ms);
        let mut forgotten = 0;
        loop {
            // One that is being taken up again does not run yet by its row.
            let _settled = self.retention_lock.write().await;
            let old = self.read(move |journal| journal.ended_before(before_ms, BATCH_MAX)).await?;
            if old.is_empty() {
                return Ok(forgotten);
            }
            forgotten += old.len();
            self.remove(old).await?;
        }
    }

    /// Deletes ended executions. The caller holds the retention lock.
    async fn remove(&self, ended: Vec<u64>) -> Result<(), JournalError> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let batch = Batch {
            changes: ended.into_iter().map(|execution| JournalChange::Remove { execution }).collect(),
            done: Box::new(move |outcome| {
                // The engine may have gone meanwhile.
                let _ = sender.send(outcome);
            }),
        };
        {
            let _deletes = self.definitions.begin_deletion();
            self.journal.write(batch)?;
        }
        receiver.await.map_err(|_| JournalError::Closed)?
    }
}

impl Engine {
    /// Deletes at once the executions that ended before the retention period, which otherwise happens every ten
    /// minutes. Returns how many were deleted.
    pub async fn delete_expired(&self) -> Result<usize, JournalError> {
        self.inner.delete_expired_round().await
    }

    /// Deletes the executions among these that have ended. Returns how many were deleted.
    pub async fn forget(&self, arns: Vec<ExecutionArn>) -> Result<usize, JournalError> {
        let _settled = self.inner.retention_lock.write().await;
        let ended = self.inner.read(move |journal| {
            let mut ended = Vec::with_capacity(arns.len());
            for arn in &arns {
                let row = journal.execution_by_arn(arn)?;
                ended.extend(row.filter(|row| row.outcome.status != RunStatus::Running).map(|row| row.id));
            }
            Ok(ended)
        });
        let ended = ended.await?;
        let forgotten = ended.len();
        if forgotten > 0 {
            self.inner.remove(ended).await?;
        }
        Ok(forgotten)
    }
}

/// Deletes old executions until the engine is dropped.
pub(super) async fn delete_expired(engine: Weak<Inner>) {
    let mut rest = FIRST;
    loop {
        tokio::time::sleep(rest).await;
        rest = ROUND;
        let Some(inner) = engine.upgrade() else { return };
        match inner.delete_expired_round().await {
            Ok(0) => {}
            Ok(deleted) => tracing::info!(deleted, "deleted expired executions"),
            Err(error) => tracing::warn!(%error, "expired executions could not be deleted"),
        }
    }
}
