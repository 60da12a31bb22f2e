//! Notifications of starts and ends of executions, sent when the change is durable, for components that mirror
//! executions.

use mayfly_workflows_language::definition::StateMachineType;
use std::sync::Arc;

use tokio::sync::broadcast;

use super::Engine;
use super::inner::Inner;
use super::live::ResidentExecution;
use super::types::Description;
use mayfly_workflows_journal::ExecutionRow;

/// Changes that a listener may be behind before it loses the oldest.
const BEHIND_MAX: usize = 4_096;

/// A change of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutionChange {
    /// It began.
    Started,
    /// It ended, or was taken up again.
    Moved,
}

/// A change, and the execution after it: without input, output and cause, since many changes may wait for a
/// listener.
#[derive(Debug, Clone)]
pub struct ExecutionChanged {
    /// The change.
    pub change: ExecutionChange,
    /// The execution now.
    pub execution: Arc<Description>,
}

/// Tells listeners; costs nothing while there is none.
pub(super) struct ChangeBroadcast(broadcast::Sender<ExecutionChanged>);

impl Default for ChangeBroadcast {
    fn default() -> Self {
        ChangeBroadcast(broadcast::Sender::new(BEHIND_MAX))
    }
}

impl Engine {
    /// Subscribes to the starts and ends of STANDARD executions, without the children of map runs. A listener that
    /// falls behind gets an error and has to list the executions again.
    pub fn changes(&self) -> broadcast::Receiver<ExecutionChanged> {
        self.inner.changes.0.subscribe()
    }
}

impl Inner {
    /// Broadcasts a durable change of an execution.
    pub(super) fn broadcast_change(
        &self,
        change: ExecutionChange,
        running: &ResidentExecution,
        row: &ExecutionRow,
    ) {
        if running.express || row.map_run_arn.is_some() || self.changes.0.receiver_count() == 0 {
            return;
        }
        let whole = self.describe_row(row, StateMachineType::Standard);
        let execution = Arc::new(Description { input: "".into(), output: None, cause: None, ..whole });
        // Ignore a closed receiver.
        let _ = self.changes.0.send(ExecutionChanged { change, execution });
    }
}
