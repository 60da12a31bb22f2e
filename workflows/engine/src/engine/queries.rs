//! Descriptions and lists of executions.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::Digest;
use std::sync::Arc;

use super::Engine;
use super::error::ExecutionError;
use super::types::{Description, ListQuery, Page, StartedMachine};
use mayfly_workflows_journal::ListRows;

impl Engine {
    /// Describes an execution; `None` when there is none with this ARN.
    pub async fn describe(&self, arn: &ExecutionArn) -> Result<Option<Description>, ExecutionError> {
        if let Some(running) = self.inner.live.by_arn(arn) {
            let kind = running.state_machine.kind;
            if let Some(cell) = running.cell.try_lock() {
                return Ok(Some(self.inner.describe_row(&cell.row, kind)));
            }
            // A light expression may hold the lock for a while on a busy host; the journal has everything that was acknowledged.
            if running.may_block
                && !running.express
                && let Some(stored) = self.inner.describe_stored(arn).await?
            {
                return Ok(Some(stored));
            }
            let cell = running.lock();
            return Ok(Some(self.inner.describe_row(&cell.row, kind)));
        }
        self.inner.describe_stored(arn).await
    }

    /// The ARN of an execution that has not ended, running or evicted, and that names this artifact: in its
    /// definition, its input, or in anything that came to it from outside.
    pub async fn user_of(&self, artifact: Digest) -> Result<Option<ExecutionArn>, ExecutionError> {
        Ok(self.inner.read(move |journal| journal.user_of(&artifact)).await?)
    }

    /// Waits for an execution's end; `None` when there is none with this ARN. A journal that cannot be read for a
    /// while is waited for.
    ///
    /// # Errors
    /// The execution cannot be read and time does not help, or the engine shuts down.
    pub async fn wait(&self, arn: &ExecutionArn) -> Result<Option<Description>, ExecutionError> {
        self.inner.wait(arn).await
    }

    /// The state machine an execution runs, as it was when it started.
    pub async fn snapshot(&self, arn: &ExecutionArn) -> Result<Option<Arc<StartedMachine>>, ExecutionError> {
        if let Some(running) = self.inner.live.by_arn(arn) {
            return Ok(Some(running.state_machine.clone()));
        }
        let (inner, wanted) = (self.inner.clone(), arn.clone());
        Ok(self
            .inner
            .read(move |journal| match journal.execution_by_arn(&wanted)? {
                Some(row) => Ok(Some(inner.definitions.get(row.machine)?)),
                None => Ok(None),
            })
            .await?)
    }

    /// Lists executions, newest first.
    pub async fn list(&self, query: ListQuery) -> Result<Page<Description>, ExecutionError> {
        let before =
            query.from.as_deref().map(str::parse).transpose().map_err(|_| ExecutionError::InvalidPage)?;
        let rows = ListRows {
            owner: query.owner,
            status: query.status,
            redriven: query.redriven,
            before,
            limit: query.limit.saturating_add(1),
        };
        let mut rows = self.inner.read(move |journal| journal.list(&rows)).await?;
        let more = rows.len() > query.limit;
        rows.truncate(query.limit);
        let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
        let items = rows.iter().map(|row| self.inner.describe_row(row, StateMachineType::Standard)).collect();
        Ok(Page { items, next })
    }
}
