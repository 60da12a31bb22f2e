//! The end of past states: lists at revisions older than five to ten minutes are refused, as with the compaction of
//! etcd (upstream's `storage/etcd3/compact.go`), even while the store still has these revisions. Clients of long lists
//! so get the errors that they are written for, at the same times.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use mayfly_store::Revision;

use crate::server::ServerState;

/// The oldest revision at which lists are served.
#[derive(Debug, Default)]
pub(crate) struct Compaction(AtomicU64);

impl Compaction {
    pub(crate) fn oldest(&self) -> Revision {
        Revision(self.0.load(Ordering::Relaxed))
    }

    fn advance(&self, oldest: Revision) {
        self.0.store(oldest.0, Ordering::Relaxed);
    }
}

/// Ends at each interval the states before the previous one, until the server stops.
pub(crate) async fn run(server: Arc<ServerState>) {
    let mut previous = server.compaction.oldest();
    loop {
        tokio::select! {
            () = server.shutdown.cancelled() => return,
            () = tokio::time::sleep(server.config.compaction_interval) => {}
        }
        server.compaction.advance(previous);
        previous = server.store.revision();
    }
}
