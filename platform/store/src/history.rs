//! The bounded history of one resource, for watches and for lists at a past revision; and of a shared storage.

use std::{collections::VecDeque, sync::Arc};

use tokio::sync::watch;

use crate::object::{Revision, WriteEvent};

/// The newest events of a resource (or of a storage), oldest first. A revision is in it with all its events, or not.
pub(crate) struct WatchHistory {
    events: VecDeque<Arc<WriteEvent>>,
    bytes: usize,
    /// Every event of this resource after this revision is in `events`.
    floor: Revision,
    /// Sends the newest revision of this resource to the watches that wait for it.
    signal: Arc<watch::Sender<Revision>>,
}

impl WatchHistory {
    /// An empty history, without the events up to `floor`.
    pub(crate) fn new(floor: Revision) -> Self {
        Self { events: VecDeque::new(), bytes: 0, floor, signal: Arc::new(watch::Sender::new(floor)) }
    }

    pub(crate) fn push(&mut self, event: Arc<WriteEvent>) {
        self.bytes += bytes_of(&event);
        self.events.push_back(event);
    }

    /// Moves the events of the oldest revision, which is one event unless it is a batch, to `forgotten`.
    pub(crate) fn forget(&mut self, forgotten: &mut Vec<Arc<WriteEvent>>) {
        while let Some(event) = self.events.pop_front() {
            self.bytes -= bytes_of(&event);
            self.floor = event.revision;
            forgotten.push(event);
            if self.events.front().is_none_or(|next| next.revision > self.floor) {
                return;
            }
        }
    }

    /// The events after a revision, oldest first; `None` when some of them were dropped. A revision in the middle of a
    /// batch's numbers is before the batch.
    pub(crate) fn after(&self, revision: Revision) -> Option<impl Iterator<Item = &Arc<WriteEvent>>> {
        if revision < self.floor {
            return None;
        }
        let start = self.events.partition_point(|event| event.revision <= revision);
        Some(self.events.range(start..))
    }

    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn floor(&self) -> Revision {
        self.floor
    }

    pub(crate) fn signal(&self) -> &Arc<watch::Sender<Revision>> {
        &self.signal
    }
}

/// The maximum memory that an event keeps alive: both states of the object, and the bookkeeping.
fn bytes_of(event: &WriteEvent) -> usize {
    const OVERHEAD: usize = 256;
    let previous = event.previous.as_ref().map_or(0, |previous| previous.value.len());
    OVERHEAD + event.entry.value.len() + previous
}
