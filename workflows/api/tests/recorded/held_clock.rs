//! What surrounds the engine in a replay: a clock that jumps only when it is let go.

use futures::future::BoxFuture;
use jiff::Timestamp;
use mayfly_workflows_engine::timers::{Clock, VirtualClock};
use tokio::sync::watch;

/// A virtual clock with a brake: while it is held, a timer that is not due does not fire.
pub(crate) struct HeldClock {
    clock: VirtualClock,
    held: watch::Sender<bool>,
}

impl HeldClock {
    pub(crate) fn new() -> HeldClock {
        // A time whose milliseconds end in no zero, as those recorded: a date is printed without trailing
        // zeros, and a recorded Content-Length counts its digits.
        let second = Timestamp::now().as_second();
        let start = Timestamp::new(second, 123_000_000).expect("today can be told");
        HeldClock { clock: VirtualClock::at(start), held: watch::Sender::new(true) }
    }

    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }
}

impl Clock for HeldClock {
    fn now_ms(&self) -> i64 {
        self.clock.now_ms()
    }

    fn sleep_until(&self, at_ms: i64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut held = self.held.subscribe();
            if self.clock.now_ms() < at_ms {
                let released = held.wait_for(|held| !held).await.is_ok();
                assert!(released, "the clock lives as long as its waiters");
            }
            self.clock.sleep_until(at_ms).await;
        })
    }

    fn is_virtual(&self) -> bool {
        true
    }
}
