//! Executions that only wait are evicted from memory and loaded again when they are needed.
//!
//! An evicted execution keeps its entry in the timer queue and, when it waits for a worker, in the activity's queue.
//! A timer, a token or a request loads it: its state is recomputed from its records.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::execution::RunStatus;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::error::ExecutionError;
use super::inner::Inner;
use super::live::ResidentExecution;
use super::open::LoadedExecution;

/// The interval of the search for executions that only wait.
const ROUND: Duration = Duration::from_secs(2);

impl Inner {
    /// An execution that has not ended, in memory; read back if it slept.
    /// `None` when it has ended or never was.
    pub(super) async fn ensure_resident(
        self: &Arc<Self>,
        id: u64,
    ) -> Result<Option<Arc<ResidentExecution>>, ExecutionError> {
        loop {
            if let Some(running) = self.live.by_id(id)
                && !running.lock().evicted
            {
                return Ok(Some(running));
            }
            let inner = self.clone();
            let loaded = self
                .read(move |journal| match journal.execution(id)? {
                    Some(row) if row.outcome.status == RunStatus::Running => {
                        Ok(Some(inner.load_one(journal, id)?))
                    }
                    _ => Ok(None),
                })
                .await?;
            match loaded {
                Some(LoadedExecution::Resident(running)) => return Ok(Some(running)),
                // Another task is reading it, or it is being evicted; or it has ended since its row was read, which
                // the next round sees.
                Some(LoadedExecution::Reserved | LoadedExecution::Ended) => tokio::task::yield_now().await,
                // Ended meanwhile, or not durable yet: then it is in memory.
                None => return Ok(self.live.by_id(id)),
            }
        }
    }

    /// The same by ARN.
    pub(super) async fn ensure_resident_by_arn(
        self: &Arc<Self>,
        arn: &ExecutionArn,
    ) -> Result<Option<Arc<ResidentExecution>>, ExecutionError> {
        if let Some(running) = self.live.by_arn(arn)
            && !running.lock().evicted
        {
            return Ok(Some(running));
        }
        let wanted = arn.clone();
        match self.read(move |journal| journal.execution_by_arn(&wanted)).await? {
            Some(row) if row.outcome.status == RunStatus::Running => self.ensure_resident(row.id).await,
            _ => Ok(None),
        }
    }

    /// Evicts executions that have only waited for a while and have no timer soon. Returns how many were evicted.
    pub(super) fn evict_round(&self) -> usize {
        let now_ms = self.now_ms();
        let idle_ms = i64::try_from(self.config.limits.idle_in_memory.as_millis()).unwrap_or(i64::MAX);
        let mut evicted = 0;
        for running in self.live.all() {
            if running.express {
                continue;
            }
            // One that is busy at this moment does not only wait.
            let Some(mut cell) = running.cell.try_lock() else { continue };
            // A waiter that was dropped does not keep the execution in memory.
            cell.waiters.retain(|waiter| !waiter.is_closed());
            let rests = now_ms - cell.touched_ms >= idle_ms
                && cell.durable == Some(cell.seq)
                && cell.waiters.is_empty()
                && running.effects.lock().is_empty()
                && !cell.has_turn
                && cell.machine.as_ref().is_some_and(|machine| {
                    machine.only_waits()
                        && machine.next_timer_ms().is_none_or(|at_ms| at_ms - now_ms >= idle_ms)
                });
            if rests {
                cell.evicted = true;
                self.live.release(&running);
                evicted += 1;
            }
        }
        evicted
    }
}

/// Evicts idle executions until the engine is dropped.
pub(super) async fn evict_idle(engine: Weak<Inner>) {
    loop {
        tokio::time::sleep(ROUND).await;
        let Some(inner) = engine.upgrade() else { return };
        inner.histories.forget_unused();
        let evicted = inner.evict_round();
        if evicted > 0 {
            tracing::debug!(evicted, "evicted idle executions from memory");
        }
    }
}
