//! The source of a watch's events.

use std::sync::Arc;

use mayfly_store::{Entry, Revision, Watch, WatchClosed, WriteEvent};

use crate::{event_objects::EventObjects, selection::Selection, status::ApiError, views::ViewEvents};

pub(crate) enum WatchSource {
    /// The store.
    Objects { watch: Watch, decoded: Arc<EventObjects> },
    /// A view, for kinds whose objects another component stores.
    View(ViewEvents),
}

/// There will be no more events.
pub(crate) enum WatchEnded {
    /// The stream ends without an error, and the client reconnects.
    Closed,
    /// The watch ends with this error.
    Failed(ApiError),
}

impl WatchSource {
    /// The next event. May be dropped while it waits without losing one.
    pub(super) async fn next(&mut self) -> Result<Arc<WriteEvent>, WatchEnded> {
        match self {
            Self::Objects { watch, .. } => match watch.next().await {
                Ok(event) => Ok(event),
                Err(WatchClosed::Closed) => Err(WatchEnded::Closed),
                Err(WatchClosed::Lagged { oldest }) => {
                    Err(WatchEnded::Failed(ApiError::expired(watch.progress().0, oldest.0)))
                }
            },
            Self::View(events) => events.next().await,
        }
    }

    /// The revision up to which all events were returned.
    pub(super) fn progress(&mut self) -> Revision {
        match self {
            Self::Objects { watch, .. } => watch.progress(),
            Self::View(events) => events.progress(),
        }
    }

    pub(super) fn matches(&self, selection: &Selection, entry: &Entry) -> bool {
        match self {
            Self::Objects { decoded, .. } => selection.matches_event(entry, decoded),
            // Not cached: the cache is keyed by the store's revisions, and a view has its own.
            Self::View(_) => selection.matches(entry),
        }
    }
}
