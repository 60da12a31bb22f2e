//! Mocks bound to an engine, and moments that they wait for.

use mayfly_workflows_machine::TimerId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::Engine;
use super::inner::{Busy, Inner};
use crate::timers::TimerKey;

/// The number that no execution has: alarms lie in the wheel under it.
pub(super) const NO_EXECUTION: u64 = 0;

/// The waiters of a virtual clock, by time.
#[derive(Default)]
pub(super) struct Alarms {
    last: u32,
    waiting: HashMap<TimerId, oneshot::Sender<Busy>>,
}

impl Inner {
    /// Resolves after this time. The value keeps a virtual clock still until it is dropped, so that the waiter can
    /// act first.
    pub(crate) fn alarm(&self, after: Duration) -> oneshot::Receiver<Busy> {
        let (sender, receiver) = oneshot::channel();
        let timer = {
            let mut alarms = self.alarms.lock();
            alarms.last = alarms.last.wrapping_add(1);
            let timer = TimerId(alarms.last);
            alarms.waiting.insert(timer, sender);
            timer
        };
        let after_ms = i64::try_from(after.as_millis()).unwrap_or(i64::MAX / 2);
        let key = TimerKey { execution: NO_EXECUTION, timer, may_block: false };
        self.set_timer(key, self.now_ms().saturating_add(after_ms));
        receiver
    }

    /// An alarm is due.
    pub(super) fn ring(self: &Arc<Self>, timer: TimerId) {
        if let Some(waiting) = self.alarms.lock().waiting.remove(&timer) {
            // The waiting state may have timed out meanwhile.
            let _ = waiting.send(self.busy());
        }
    }

    /// A sign of life for a task, from inside.
    pub(crate) async fn sign_of_life(self: &Arc<Self>, token: &str) {
        // A task that has ended needs none.
        let _ = Engine { inner: self.clone() }.send_task_heartbeat(token).await;
    }
}
