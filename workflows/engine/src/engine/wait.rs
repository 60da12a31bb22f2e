//! Executions waited for: until their end, or until they can be read.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::RunStatus;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::error::ExecutionError;
use super::inner::Inner;
use super::types::Description;
use mayfly_workflows_journal::JournalError;

/// The pause before an execution that could not be read is read again for its waiters.
const READ_RETRY: Duration = Duration::from_secs(1);

impl Inner {
    /// Waits for an execution's end; `None` when there is no such execution. A temporary failure to read the journal
    /// is waited out, because it does not mean that the execution does not exist.
    pub(crate) async fn wait(
        self: &Arc<Self>,
        arn: &ExecutionArn,
    ) -> Result<Option<Description>, ExecutionError> {
        loop {
            match self.wait_readable(arn).await {
                Err(ExecutionError::Journal(error @ JournalError::Database(_)))
                    if !self.shutdown.is_closing() =>
                {
                    tracing::warn!(%arn, %error, "an execution that is waited for cannot be read; trying again");
                    // From here on this task only waits: a virtual clock may jump.
                    drop(self.timers.alarm(READ_RETRY).await.map_err(|_| ExecutionError::Closed)?);
                }
                answer => return answer,
            }
        }
    }

    async fn wait_readable(
        self: &Arc<Self>,
        arn: &ExecutionArn,
    ) -> Result<Option<Description>, ExecutionError> {
        loop {
            if let Some(running) = self.ensure_resident_by_arn(arn).await? {
                let ends = {
                    let mut cell = running.lock();
                    if cell.evicted {
                        // The execution was evicted after it was found: load it and try again.
                        continue;
                    }
                    (cell.row.outcome.status == RunStatus::Running).then(|| {
                        let (sender, receiver) = oneshot::channel();
                        cell.waiters.push(sender);
                        receiver
                    })
                };
                if let Some(ends) = ends {
                    return ends.await.map(Some).map_err(|_| ExecutionError::Closed);
                }
            }
            let Some(stored) = self.describe_stored(arn).await? else { return Ok(None) };
            if stored.status != RunStatus::Running {
                return Ok(Some(stored));
            }
            // It had ended and was taken up again meanwhile.
            tokio::task::yield_now().await;
        }
    }

    pub(super) async fn describe_stored(
        self: &Arc<Self>,
        arn: &ExecutionArn,
    ) -> Result<Option<Description>, ExecutionError> {
        let (inner, wanted) = (self.clone(), arn.clone());
        Ok(self
            .read(move |journal| {
                let Some(row) = journal.execution_by_arn(&wanted)? else { return Ok(None) };
                let row = inner.row_with_payloads(row)?;
                Ok(Some(inner.describe_row(&row, StateMachineType::Standard)))
            })
            .await?)
    }
}
