//! Histories, computed from the journal.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::execution::RunStatus;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Engine;
use super::error::ExecutionError;
use super::types::{HistoryQuery, Page};
use mayfly_workflows_machine::history::HistoryEvent;

/// Histories that are cached: the number of clients that can page through one each.
const KEPT_MAX: usize = 4;
/// The time for which a history stays cached after its last use.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// Histories of ended executions that clients read page by page: they do not change, and computing one for each
/// page would take the square of its length.
#[derive(Default)]
pub(super) struct Histories {
    kept: Mutex<VecDeque<Kept>>,
}

struct Kept {
    execution: u64,
    /// One that was taken up again has another history.
    redrive_count: u32,
    events: Arc<Vec<HistoryEvent>>,
    used: Instant,
}

impl Histories {
    fn get(&self, execution: u64, redrive_count: u32) -> Option<Arc<Vec<HistoryEvent>>> {
        let mut all = self.kept.lock();
        let kept = all.iter_mut();
        let mut found =
            kept.filter(|kept| kept.execution == execution && kept.redrive_count == redrive_count);
        let kept = found.next()?;
        kept.used = Instant::now();
        Some(kept.events.clone())
    }

    fn keep(&self, execution: u64, redrive_count: u32, events: Arc<Vec<HistoryEvent>>) {
        let mut all = self.kept.lock();
        all.retain(|kept| kept.execution != execution);
        if all.len() >= KEPT_MAX {
            all.pop_front();
        }
        all.push_back(Kept { execution, redrive_count, events, used: Instant::now() });
    }

    /// Drops the histories that were not read lately.
    pub(super) fn forget_unused(&self) {
        self.kept.lock().retain(|kept| kept.used.elapsed() < KEPT_FOR);
    }
}

impl Engine {
    /// An execution's history, events in the API's shape; `None` when there is no such execution.
    ///
    /// # Errors
    /// The page is none that an answer named, or the journal cannot be read.
    pub async fn history(
        &self,
        arn: &ExecutionArn,
        query: HistoryQuery,
    ) -> Result<Option<Page<serde_json::Value>>, ExecutionError> {
        let from: usize = match query.from.as_deref() {
            Some(from) => from.parse().map_err(|_| ExecutionError::InvalidPage)?,
            None => 0,
        };
        let Some(events) = self.events(arn).await? else { return Ok(None) };
        let item = |event: &HistoryEvent| event.to_json(query.include_data);
        let items: Vec<_> = match query.reverse {
            true => events.iter().rev().skip(from).take(query.limit).map(item).collect(),
            false => events.iter().skip(from).take(query.limit).map(item).collect(),
        };
        let end = from + items.len();
        let next = (end < events.len()).then(|| end.to_string());
        Ok(Some(Page { items, next }))
    }

    /// All events of an execution, computed from its journal.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn events(&self, arn: &ExecutionArn) -> Result<Option<Arc<Vec<HistoryEvent>>>, ExecutionError> {
        let (inner, wanted) = (self.inner.clone(), arn.clone());
        Ok(self
            .inner
            .read(move |journal| {
                let Some(row) = journal.execution_by_arn(&wanted)? else { return Ok(None) };
                let (execution, redrive_count) = (row.id, row.outcome.redrive_count);
                let ended = row.outcome.status != RunStatus::Running;
                let kept = ended.then(|| inner.histories.get(execution, redrive_count)).flatten();
                if kept.is_some() {
                    return Ok(kept);
                }
                let row = inner.row_with_payloads(row)?;
                let state_machine = inner.definitions.get(row.machine)?;
                let (_, _, events) = inner.replay(&row, &state_machine, true)?;
                let events = Arc::new(events);
                if ended {
                    inner.histories.keep(execution, redrive_count, events.clone());
                }
                Ok(Some(events))
            })
            .await?)
    }
}
