//! The beat of those controllers that look at everything now and then.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// One look at once, then one every so often, until the process stops.
pub(crate) struct Looks {
    ticks: Interval,
    stop: CancellationToken,
}

impl Looks {
    pub(crate) fn every(period: Duration, stop: CancellationToken) -> Self {
        let mut ticks = interval(period);
        // After a look that took long, the next one keeps its distance.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, stop }
    }

    /// Waits until it is time to look; false when there will be no more looks.
    pub(crate) async fn next(&mut self) -> bool {
        self.stop.run_until_cancelled(self.ticks.tick()).await.is_some()
    }
}
