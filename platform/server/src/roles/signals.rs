//! The signals that end a role.

use tokio::signal::unix::{Signal, SignalKind, signal};

use mayfly_cli::EXIT_INTERRUPTED;

/// Waits for SIGINT and SIGTERM.
pub(super) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    pub(super) fn listen() -> anyhow::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    pub(super) async fn received(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Ends the process at the next signal: it aborts the drain. Acknowledged writes are not lost.
    pub(super) async fn exit_on_the_next(mut self) {
        self.received().await;
        std::process::exit(EXIT_INTERRUPTED.into());
    }
}
