//! A writer without a thread: its owner decides when the queued writes are committed.

use std::sync::Arc;

use crate::{
    object::WriteEvent,
    writer::{QueuedWrite, StopNotifier, Writer},
};

/// The writer of a store for deterministic simulations ([`crate::Store::in_memory_stepped`]). Nothing is written unless
/// its owner calls [`Self::commit`]; once it is dropped, writes are refused as those of a closed store.
pub struct SteppedWriter {
    writer: Writer,
    requests: Vec<QueuedWrite>,
    _stopped: StopNotifier,
}

impl std::fmt::Debug for SteppedWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SteppedWriter").field("queued", &self.requests.len()).finish_non_exhaustive()
    }
}

impl SteppedWriter {
    pub(crate) fn new(writer: Writer, stopped: StopNotifier) -> Self {
        Self { writer, requests: Vec::new(), _stopped: stopped }
    }

    /// Waits for a write that is not committed; `false`: the store was closed and there is none. May be dropped while
    /// it waits.
    pub async fn queued(&mut self) -> bool {
        self.writer.receive(&mut self.requests).await
    }

    /// Commits the queued writes as one group, publishes and answers them. Returns the committed events in the order
    /// of their revisions, also those that share a request.
    pub fn commit(&mut self) -> Vec<Arc<WriteEvent>> {
        self.writer.receive_queued(&mut self.requests);
        self.writer.write(self.requests.drain(..))
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use crate::{Config, EventKind, Key, Revision, Store, Write, WriteError};

    fn create(name: &str) -> Write {
        Write::Create { key: Key::new("pods", "a", name), value: "{}".into() }
    }

    /// Polls once.
    async fn is_ready<F: Future + Unpin>(future: &mut F) -> bool {
        tokio::select! { biased; _ = future => true, () = std::future::ready(()) => false }
    }

    #[tokio::test]
    async fn a_write_waits_for_its_commit() {
        let (store, mut writer) = Store::in_memory_stepped(Config::new(""));
        let (one, other) = (store.clone(), store.clone());
        let mut first = Box::pin(one.write(create("first")));
        let mut second = Box::pin(other.write(create("second")));
        assert!(!is_ready(&mut first).await && !is_ready(&mut second).await);
        assert!(writer.queued().await);
        assert_eq!(store.revision(), Revision(0), "nothing is visible before the commit");

        let events = writer.commit();
        let names: Vec<_> = events.iter().map(|event| (event.kind, &*event.entry.key.name)).collect();
        assert_eq!(names, [(EventKind::Created, "first"), (EventKind::Created, "second")]);
        assert_eq!(second.await.unwrap().revision, store.revision());
        assert!(first.await.is_ok());
        assert!(writer.commit().is_empty(), "a write is committed once");

        drop(writer);
        assert!(matches!(store.write(create("third")).await, Err(WriteError::Closed)));
    }
}
