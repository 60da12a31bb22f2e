//! Questions about executions.

use std::sync::Arc;

use super::Engine;
use super::error::ExecutionError;
use super::types::{Description, HistoryQuery, Kind, ListQuery, Of, Page, StateMachine};
use crate::history::HistoryEvent;
use crate::journal::{ListRows, Owner, artifacts_in};

impl Engine {
    /// Describes an execution; `None` when there is none with this ARN.
    pub async fn describe(&self, arn: &str) -> Result<Option<Description>, ExecutionError> {
        if let Some(running) = self.inner.live.by_arn(arn) {
            let cell = running.cell.lock();
            return Ok(Some(self.inner.describe_row(&cell.row, running.state_machine.kind)));
        }
        self.inner.describe_stored(arn).await
    }

    /// The ARN of an execution that has not ended, running or asleep, and that names this artifact: in its
    /// definition, its input, or in anything that came to it from outside. `artifact` is `sha256:` and 64 digits.
    pub async fn user_of(&self, artifact: &str) -> Result<Option<String>, ExecutionError> {
        let Some(artifact) = artifacts_in(artifact.as_bytes()).next() else { return Ok(None) };
        Ok(self.inner.read(move |journal| journal.user_of(&artifact)).await?)
    }

    /// Waits for an execution's end; `None` when there is none with this ARN. A journal that cannot be read for a
    /// while is waited for.
    ///
    /// # Errors
    /// The execution cannot be read and time does not help, or the engine shuts down.
    pub async fn wait(&self, arn: &str) -> Result<Option<Description>, ExecutionError> {
        self.inner.wait(arn).await
    }

    /// The state machine an execution runs, as it was when it started.
    pub async fn snapshot(&self, arn: &str) -> Result<Option<Arc<StateMachine>>, ExecutionError> {
        if let Some(running) = self.inner.live.by_arn(arn) {
            return Ok(Some(running.state_machine.clone()));
        }
        let (inner, wanted) = (self.inner.clone(), arn.to_owned());
        Ok(self
            .inner
            .read(move |journal| match journal.execution_by_arn(&wanted)? {
                Some(row) => Ok(Some(inner.machine_of(row.machine)?)),
                None => Ok(None),
            })
            .await?)
    }

    /// Lists executions, newest first.
    pub async fn list(&self, query: ListQuery) -> Result<Page<Description>, ExecutionError> {
        let before =
            query.from.as_deref().map(str::parse).transpose().map_err(|_| ExecutionError::InvalidPage)?;
        let owner = match query.of {
            Of::Everyone => Owner::Everyone,
            Of::StateMachine(arn) => Owner::Machine(arn),
            Of::Version(arn) => Owner::Version(arn),
            Of::Alias(arn) => Owner::Alias(arn),
            Of::MapRun(arn) => Owner::MapRun(arn),
        };
        let rows = ListRows {
            owner,
            status: query.status,
            redriven: query.redriven,
            before,
            limit: query.limit.saturating_add(1),
        };
        let mut rows = self.inner.read(move |journal| journal.list(&rows)).await?;
        let more = rows.len() > query.limit;
        rows.truncate(query.limit);
        let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
        let items = rows.iter().map(|row| self.inner.describe_row(row, Kind::Standard)).collect();
        Ok(Page { items, next })
    }

    /// An execution's history, events in the API's shape; `None` when there is
    /// no such execution.
    pub async fn history(
        &self,
        arn: &str,
        query: HistoryQuery,
    ) -> Result<Option<Page<serde_json::Value>>, ExecutionError> {
        let from: usize = match query.from.as_deref() {
            Some(from) => from.parse().map_err(|_| ExecutionError::InvalidPage)?,
            None => 0,
        };
        let Some(mut events) = self.events(arn).await? else { return Ok(None) };
        if query.reverse {
            events.reverse();
        }
        let items = events.iter().skip(from).take(query.limit);
        let items: Vec<_> = items.map(|event| event.to_json(query.include_data)).collect();
        let end = from + items.len();
        let next = (end < events.len()).then(|| end.to_string());
        Ok(Some(Page { items, next }))
    }

    /// All events of an execution, computed from its journal.
    pub async fn events(&self, arn: &str) -> Result<Option<Vec<HistoryEvent>>, ExecutionError> {
        let (inner, wanted) = (self.inner.clone(), arn.to_owned());
        Ok(self
            .inner
            .read(move |journal| {
                let Some(row) = journal.execution_by_arn(&wanted)? else { return Ok(None) };
                let row = inner.whole_row(row)?;
                let state_machine = inner.machine_of(row.machine)?;
                let (_, _, events) = inner.replay(&row, &state_machine, true)?;
                Ok(Some(events))
            })
            .await?)
    }
}
