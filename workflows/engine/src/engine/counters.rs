//! Counters of started and ended executions, for metrics.

use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::RunStatus;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Engine;

/// Numbers since the engine was opened, by type; children of map runs are executions too.
#[derive(Debug, Default)]
pub(crate) struct ExecutionCounters([OfKind; 2]);

#[derive(Debug, Default)]
struct OfKind {
    started: AtomicU64,
    ended: [AtomicU64; ENDS.len()],
}

/// The final statuses of an execution.
const ENDS: [RunStatus; 4] =
    [RunStatus::Succeeded, RunStatus::Failed, RunStatus::TimedOut, RunStatus::Aborted];

/// Executions of one type since the engine was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutionCount {
    /// `STANDARD` or `EXPRESS`.
    pub kind: StateMachineType,
    /// That began; those that were taken up again when the engine was opened are not among them.
    pub started: u64,
    /// That ended, by how; one that is redriven may end again.
    pub ended: [(RunStatus, u64); ENDS.len()],
}

impl ExecutionCounters {
    fn of(&self, kind: StateMachineType) -> &OfKind {
        match kind {
            StateMachineType::Standard => &self.0[0],
            StateMachineType::Express => &self.0[1],
        }
    }

    pub(super) fn started(&self, kind: StateMachineType) {
        self.of(kind).started.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes an outcome, be it none yet (a redrive).
    pub(super) fn ended(&self, kind: StateMachineType, status: RunStatus) {
        if let Some(end) = ENDS.iter().position(|end| *end == status) {
            self.of(kind).ended[end].fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Engine {
    /// The number of open executions: running, in memory or evicted.
    pub fn open_executions(&self) -> usize {
        self.inner.open.count()
    }

    /// The numbers of started and ended executions.
    pub fn executions_so_far(&self) -> [ExecutionCount; 2] {
        [StateMachineType::Standard, StateMachineType::Express].map(|kind| {
            let of = self.inner.counters.of(kind);
            let ended = std::array::from_fn(|end| (ENDS[end], of.ended[end].load(Ordering::Relaxed)));
            ExecutionCount { kind, started: of.started.load(Ordering::Relaxed), ended }
        })
    }
}
