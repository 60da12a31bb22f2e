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

    /// A second signal aborts the drain. Acknowledged writes are not lost.
    pub(super) fn exit_on_the_next(mut self) {
        tokio::spawn(async move {
            self.received().await;
            std::process::exit(EXIT_INTERRUPTED.into());
        });
    }
}
