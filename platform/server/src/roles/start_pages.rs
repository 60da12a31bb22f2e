//! Releases the memory of code that only the start needs: two thirds of an idle server's resident memory.

use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The time after which controllers and informers have handled the objects that existed at the start.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// Releases the pages once, when the server is ready and has settled; ends with `stop`.
pub(super) async fn release(mut ready: watch::Receiver<bool>, stop: CancellationToken) {
    let released = async {
        // Fails only when the server is stopping.
        let _ = ready.wait_for(|ready| *ready).await;
        tokio::time::sleep(SETTLED_AFTER).await;
        if let Err(error) = mayfly_runtime_wasm::release_program_pages() {
            tracing::debug!(%error, "the pages of the program stay resident");
        }
    };
    stop.run_until_cancelled(released).await;
    stop.cancelled().await;
}
