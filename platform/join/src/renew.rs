//! The renewal of a node's certificates while the node runs.

use std::time::Duration;

use jiff::Timestamp;
use rand::RngExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{JoinConfig, NodeCredentials, obtain::obtain};

/// Certificates are renewed when one divided by this is left of their validity: before a join would do it.
const RENEW_SHARE: i64 = 4;
/// The longest sleep: the system's clock may be set, and does not stop while the machine sleeps.
const CHECK_EVERY: Duration = Duration::from_secs(600);
/// The pause after a failed renewal; it is doubled with every further one up to [`CHECK_EVERY`].
const RETRY_FIRST: Duration = Duration::from_secs(10);

/// Renews the certificates before a fifth of their validity is left, until `stop`. New credentials are written to the
/// folder and then sent: [`crate::rotating_client`] uses them for the next request, and a TLS server of the node takes
/// its certificate from the same channel. Failed renewals are logged and repeated.
pub async fn renew(config: JoinConfig, credentials: watch::Sender<NodeCredentials>, stop: CancellationToken) {
    let mut failures = 0;
    loop {
        let current = credentials.borrow().clone();
        let now = (config.clock)();
        let pause = match failures {
            0 => until(current.renew_at(RENEW_SHARE), now),
            failures => retry_pause(failures),
        };
        if !pause.is_zero() && stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
        if (config.clock)() < current.renew_at(RENEW_SHARE) {
            failures = 0;
            continue;
        }
        let Some(obtained) = stop.run_until_cancelled(obtain(&config, RENEW_SHARE)).await else { return };
        failures += 1;
        let error = match obtained {
            Ok(obtained) => {
                if !obtained.credentials.is_same(&current) {
                    tracing::info!(expires = %obtained.credentials.expires_at(), "renewed the node's certificates");
                    credentials.send_replace(obtained.credentials);
                    failures = 0;
                }
                obtained.postponed
            }
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            tracing::warn!(%error, expires = %current.expires_at(), "cannot renew the node's certificates; will retry");
        }
    }
}

/// The time to sleep until `at`, at most [`CHECK_EVERY`].
fn until(at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or_default().min(CHECK_EVERY)
}

fn retry_pause(failures: u32) -> Duration {
    let pause = RETRY_FIRST.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(CHECK_EVERY);
    pause.mul_f64(rand::rng().random_range(0.5..=1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_bounded() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let at = |seconds: i64| Timestamp::from_second(1_000_000 + seconds).unwrap();
        assert_eq!(until(at(-5), now), Duration::ZERO);
        assert_eq!(until(at(5), now), Duration::from_secs(5));
        assert_eq!(until(at(100_000), now), CHECK_EVERY);
        for failures in [1, 5, 40, u32::MAX] {
            let pause = retry_pause(failures);
            assert!(pause >= RETRY_FIRST / 2 && pause <= CHECK_EVERY, "{failures}: {pause:?}");
        }
    }
}
