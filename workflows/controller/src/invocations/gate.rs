//! The bound of a function's asynchronous calls at the same time. It can change while calls wait and run.

use parking_lot::Mutex;
use tokio::sync::{AcquireError, Semaphore, SemaphorePermit};

/// Admits calls in the order of their arrival.
#[derive(Debug)]
pub(super) struct CallGate {
    turns: Semaphore,
    size: Mutex<GateSize>,
}

#[derive(Debug)]
struct GateSize {
    calls_max: usize,
    /// Calls that run beyond a lowered bound: their turns are not given to others.
    excess: usize,
}

impl CallGate {
    pub(super) fn new(calls_max: usize) -> Self {
        Self { turns: Semaphore::new(calls_max), size: Mutex::new(GateSize { calls_max, excess: 0 }) }
    }

    /// Changes the bound. Running calls continue.
    pub(super) fn resize(&self, calls_max: usize) {
        let mut size = self.size.lock();
        if calls_max > size.calls_max {
            let more = calls_max - size.calls_max;
            let kept = more.min(size.excess);
            size.excess -= kept;
            self.turns.add_permits(more - kept);
        } else {
            let fewer = size.calls_max - calls_max;
            size.excess += fewer - self.turns.forget_permits(fewer);
        }
        size.calls_max = calls_max;
    }

    /// Waits until a call may begin; it ends when the turn is dropped.
    ///
    /// # Errors
    /// Never: the semaphore is not closed.
    pub(super) async fn turn(&self) -> Result<CallTurn<'_>, AcquireError> {
        let permit = self.turns.acquire().await?;
        Ok(CallTurn { gate: self, permit: Some(permit) })
    }
}

/// A call that was admitted.
#[derive(Debug)]
pub(super) struct CallTurn<'a> {
    gate: &'a CallGate,
    permit: Option<SemaphorePermit<'a>>,
}

impl Drop for CallTurn<'_> {
    fn drop(&mut self) {
        let mut size = self.gate.size.lock();
        if size.excess > 0
            && let Some(permit) = self.permit.take()
        {
            size.excess -= 1;
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// The number of calls that begin without waiting, and end again.
    fn room(gate: &CallGate) -> usize {
        let turns: Vec<_> = std::iter::from_fn(|| gate.turn().now_or_never()).collect();
        turns.len()
    }

    #[test]
    fn a_gate_grows_and_shrinks_while_calls_run() {
        let gate = CallGate::new(2);
        let mut running: Vec<_> = (0..2).map(|_| gate.turn().now_or_never().unwrap().unwrap()).collect();
        let mut waiting = Box::pin(gate.turn());
        assert!(waiting.as_mut().now_or_never().is_none());
        gate.resize(3);
        running.push(waiting.now_or_never().expect("it waited for the larger gate").unwrap());
        assert_eq!(room(&gate), 0);

        // The first two that end leave no room.
        gate.resize(1);
        for room_left in [0, 0, 1] {
            running.pop();
            assert_eq!(room(&gate), room_left);
        }

        // Turns in excess become regular ones when the gate grows again.
        let running: Vec<_> = (0..1).map(|_| gate.turn().now_or_never().unwrap().unwrap()).collect();
        gate.resize(0);
        gate.resize(2);
        assert_eq!(room(&gate), 1);
        drop(running);
        assert_eq!(room(&gate), 2);
    }
}
