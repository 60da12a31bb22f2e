//! The ticker of controllers that examine all objects periodically.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// Ticks at once and then periodically, until the process stops.
pub(crate) struct ResyncTicker {
    ticks: Interval,
    stop: CancellationToken,
}

impl ResyncTicker {
    pub(crate) fn every(period: Duration, stop: CancellationToken) -> Self {
        let mut ticks = interval(period);
        // After a tick whose work took long, the next one keeps the full period as distance.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, stop }
    }

    /// Waits for the next tick; false once the process stops.
    pub(crate) async fn next(&mut self) -> bool {
        self.stop.run_until_cancelled(self.ticks.tick()).await.is_some()
    }
}
