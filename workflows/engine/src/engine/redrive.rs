//! Ended executions taken up again.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::execution::RunStatus;
use std::sync::Arc;

use super::Engine;
use super::error::{ExecutionError, RedriveError};
use super::inner::{Inner, timestamp};
use super::types::RedriveStatus;
use mayfly_workflows_journal::ExecutionRow;
use mayfly_workflows_machine::{Event, Machine};

impl Inner {
    /// Takes up an ended execution: computed again, then redriven.
    pub(super) async fn redrive_row(
        self: &Arc<Self>,
        row: ExecutionRow,
        token: Option<String>,
    ) -> Result<i64, RedriveError> {
        let _redriven = self.retention_lock.read().await;
        let Some(place) = self.live.take(&row.arn) else { return Err(RedriveError::AlreadyRunning) };
        let inner = self.clone();
        let loaded = self
            .read(move |journal| match journal.execution(row.id)? {
                // Another redrive may have run it, and it may have ended again.
                Some(row) if row.outcome.status != RunStatus::Running => Ok(Some(inner.recomputed(row)?)),
                _ => Ok(None),
            })
            .await
            .map_err(ExecutionError::from)?;
        let Some(running) = loaded else { return Err(RedriveError::AlreadyRunning) };
        if !running.with_machine(Machine::can_redrive).await.unwrap_or(false) {
            return Err(RedriveError::NotRedrivable("Execution has nothing to be redriven".to_owned()));
        }
        place.fill(&running);
        self.open.add(1);
        self.deliver_durably(&running, Event::Redrive { token, deferred: running.evaluates_apart }).await?;
        let redriven = running.lock().row.outcome.redrive_ms;
        Ok(redriven.unwrap_or_else(|| self.now_ms()))
    }

    /// When a request of this name redrove the execution, if it did lately.
    async fn redriven_by(
        self: &Arc<Self>,
        arn: &ExecutionArn,
        token: &str,
    ) -> Result<Option<i64>, ExecutionError> {
        let wanted = arn.clone();
        let Some(row) = self.read(move |journal| journal.execution_by_arn(&wanted)).await? else {
            return Ok(None);
        };
        // A redrive that is not in the row is not durable and must not be acknowledged.
        let Some(last_ms) = row.outcome.redrive_ms else { return Ok(None) };
        let running = match self.ensure_resident_by_arn(arn).await? {
            Some(running) => running,
            None => {
                let inner = self.clone();
                self.read(move |journal| {
                    let row = journal.execution(row.id)?;
                    row.map(|row| inner.recomputed(row)).transpose()
                })
                .await?
                .ok_or_else(|| ExecutionError::NotFound(arn.clone()))?
            }
        };
        let (token, now_ms) = (token.to_owned(), self.now_ms());
        let redriven = running.with_machine(move |machine| machine.redriven_by(&token, now_ms)).await;
        Ok(redriven.flatten().filter(|at_ms| *at_ms <= last_ms))
    }
}

impl Engine {
    /// Redrives an execution that failed, timed out or was stopped. `token` identifies the request: for a quarter of
    /// an hour a repeated request gets the same response and changes nothing.
    pub async fn redrive(
        &self,
        arn: &ExecutionArn,
        token: Option<&str>,
    ) -> Result<jiff::Timestamp, RedriveError> {
        let Some(token) = token else { return self.redrive_once(arn, None).await };
        if let Some(before) = self.inner.redriven_by(arn, token).await? {
            return Ok(timestamp(before));
        }
        match self.redrive_once(arn, Some(token)).await {
            // Two equal requests may have come at the same time.
            Err(refused @ (RedriveError::AlreadyRunning | RedriveError::NotRedrivable(_))) => {
                let before = self.inner.redriven_by(arn, token).await?;
                before.map(timestamp).ok_or(refused)
            }
            redriven => redriven,
        }
    }

    async fn redrive_once(
        &self,
        arn: &ExecutionArn,
        token: Option<&str>,
    ) -> Result<jiff::Timestamp, RedriveError> {
        let there = self.describe(arn).await?.ok_or_else(|| ExecutionError::NotFound(arn.clone()))?;
        match there.redrive_status {
            RedriveStatus::Redrivable => {}
            RedriveStatus::NotRedrivable(reason) => return Err(RedriveError::NotRedrivable(reason)),
            RedriveStatus::RedrivableByMapRun => {
                return Err(RedriveError::NotRedrivable(
                    "Execution is a child workflow execution and can only be redriven by its Map Run"
                        .to_owned(),
                ));
            }
        }
        let wanted = arn.clone();
        let row = self
            .inner
            .read(move |journal| journal.execution_by_arn(&wanted))
            .await
            .map_err(ExecutionError::from)?
            .ok_or_else(|| ExecutionError::NotFound(arn.clone()))?;
        Ok(timestamp(self.inner.redrive_row(row, token.map(str::to_owned)).await?))
    }
}
