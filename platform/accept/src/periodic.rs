//! Log messages that many connections cause, written at most once per period.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The period.
const PERIOD: Duration = Duration::from_secs(60);

/// Counts occurrences and reports when a message about them is due.
#[derive(Debug, Default)]
pub(crate) struct Periodic(Mutex<Occurrences>);

#[derive(Debug, Default)]
struct Occurrences {
    reported: Option<Instant>,
    count: u64,
}

impl Periodic {
    /// Counts one occurrence. If a message is due, returns the number of occurrences since the last message.
    pub(crate) fn count(&self) -> Option<u64> {
        let mut occurrences = self.0.lock();
        occurrences.count += 1;
        let now = Instant::now();
        if occurrences.reported.is_some_and(|at| now - at < PERIOD) {
            return None;
        }
        occurrences.reported = Some(now);
        Some(std::mem::take(&mut occurrences.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_message_per_period_counts_all() {
        let periodic = Periodic::default();
        assert_eq!(periodic.count(), Some(1));
        assert_eq!((0..5).filter_map(|_| periodic.count()).count(), 0);
        tokio::time::advance(PERIOD).await;
        assert_eq!(periodic.count(), Some(6));
        assert_eq!(periodic.count(), None);
    }
}
