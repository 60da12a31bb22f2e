//! Numbers of a map run's items and children by status.

use super::state::{Child, MapRunState};
use mayfly_workflows_language::execution::RunStatus;

impl MapRunState {
    /// The number of items of children that did not succeed.
    fn failed_items(&self) -> u64 {
        let failed = |child: &&Child| {
            let status = child.result.as_ref().map(|result| result.outcome.status);
            matches!(status, Some(RunStatus::Failed | RunStatus::TimedOut | RunStatus::Aborted))
        };
        self.children.iter().filter(failed).map(|child| child.items).sum()
    }

    /// Whether more items failed than are tolerated.
    #[expect(clippy::cast_precision_loss, reason = "item counts fit a double")]
    pub(super) fn exceeded(&self) -> bool {
        let failed = self.failed_items();
        if failed == 0 {
            return false;
        }
        let too_many = self.tolerated_count.is_some_and(|count| failed > count);
        let too_large = self
            .tolerated_percentage
            .is_some_and(|part| failed as f64 * 100.0 / (self.items().max(1) as f64) > part);
        too_many || too_large || (self.tolerated_count.is_none() && self.tolerated_percentage.is_none())
    }

    /// The total number of items.
    pub fn items(&self) -> u64 {
        self.children.iter().map(|child| child.items).sum()
    }

    /// `itemCounts` and `executionCounts`.
    pub fn counts(&self) -> (MapRunCounts, MapRunCounts) {
        let (mut items, mut children) = (MapRunCounts::default(), MapRunCounts::default());
        for (index, child) in self.children.iter().enumerate() {
            for (counts, weight) in [(&mut items, child.items), (&mut children, 1)] {
                counts.total += weight;
                let place = match child.result.as_ref().map(|result| result.outcome.status) {
                    Some(RunStatus::Succeeded) => &mut counts.succeeded,
                    Some(RunStatus::Failed) => &mut counts.failed,
                    Some(RunStatus::TimedOut) => &mut counts.timed_out,
                    Some(_) => &mut counts.aborted,
                    // Items that were never started stay pending when the run ends (measured: floci-io/floci#2694).
                    None if index >= self.next => &mut counts.pending,
                    None if self.status == RunStatus::Running => &mut counts.running,
                    None => &mut counts.aborted,
                };
                *place += weight;
            }
        }
        // No results are written while the run continues; at its end the successful ones count as written, by a
        // ResultWriter or into the state's result.
        if self.results_written || self.status == RunStatus::Succeeded {
            items.results_written = items.succeeded;
            children.results_written = children.succeeded;
        }
        (items, children)
    }
}

/// Numbers of a run's items or children by status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MapRunCounts {
    /// Not started yet.
    pub pending: u64,
    /// Running.
    pub running: u64,
    /// Succeeded.
    pub succeeded: u64,
    /// Failed.
    pub failed: u64,
    /// Timed out.
    pub timed_out: u64,
    /// Aborted.
    pub aborted: u64,
    /// The total.
    pub total: u64,
    /// Written by the result writer.
    pub results_written: u64,
    /// Failed, and cannot be redriven.
    pub failures_not_redrivable: u64,
    /// Waiting for a redrive to reach them.
    pub pending_redrive: u64,
}
