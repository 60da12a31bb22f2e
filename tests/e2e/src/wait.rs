//! Waits for conditions, with a timeout.

use std::{future::Future, time::Duration};

use anyhow::{Result, anyhow};
use tokio::time::Instant;

/// The timeout of any condition: long, because the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The interval between two checks of a condition.
const POLL: Duration = Duration::from_millis(20);

/// Checks until the condition returns a value. An error of a check counts as "not yet", and is reported at the
/// deadline.
pub async fn until<T, F>(what: &str, mut look: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    let deadline = Instant::now() + PATIENCE;
    loop {
        let last = match look().await {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if Instant::now() > deadline {
            let waited = format!("{what}: not so after {PATIENCE:?}");
            return Err(match last {
                Some(error) => error.context(waited),
                None => anyhow!(waited),
            });
        }
        tokio::time::sleep(POLL).await;
    }
}
