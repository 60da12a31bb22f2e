//! Sleeping.

use std::time::Duration;

/// Waits without blocking the host's thread.
pub async fn sleep(duration: Duration) {
    #[cfg(target_arch = "wasm32")]
    {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        crate::executor::ready(wasip2::clocks::monotonic_clock::subscribe_duration(nanos)).await;
    }
    // Tests on the host have no WASI clock.
    #[cfg(not(target_arch = "wasm32"))]
    std::thread::sleep(duration);
}
