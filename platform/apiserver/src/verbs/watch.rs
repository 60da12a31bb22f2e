//! `watch`: a stream of JSON lines.
//!
//! A watch without selectors and tables never parses an object: its bytes are spliced into the line.
//!
//! ```text
//! initial events (resourceVersion unset or "0", or sendInitialEvents)
//!   └─ bookmark with k8s.io/initial-events-end (sendInitialEvents)
//!        └─ events … bookmarks … ─┬─ timeout, shutdown, client disconnected: the stream ends
//!                                 └─ too slow: an ERROR line with Status 410, then the end
//! ```
//! The source of the events, the store or a view of objects that another component stores, is a [`WatchSource`]; the
//! rest is common to both.

mod lines;
mod source;
mod writer;

use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use mayfly_api::validation::FieldError;
use mayfly_store::{Entry, ListOptions, Revision, WatchError};
use tokio::sync::OwnedSemaphorePermit;

use super::{not_a_revision, parse_revision};
use crate::{
    registry::Backing,
    render::ObjectView,
    request::{Query, check_list_options},
    selection::Selection,
    server::ServerState,
    status::ApiError,
};
use lines::Lines;
pub(crate) use source::{WatchEnded, WatchSource};

/// The start of a watch, as requested.
#[derive(Clone, Copy)]
pub(crate) struct Start {
    /// The revision that the client has seen.
    pub(crate) asked: Option<Revision>,
    /// Whether all objects are sent first, as ADDED; otherwise the events after `asked`, or after now.
    pub(crate) initial: bool,
    /// Whether a bookmark marks the end of the initial events.
    end_bookmark: bool,
}

/// A watch that is ready to start.
pub(crate) struct Beginning {
    pub(crate) initial: Vec<Arc<Entry>>,
    /// The revision of `initial`; `source` has the events after it.
    pub(crate) after: Revision,
    pub(crate) source: WatchSource,
}

impl Start {
    fn parse(query: &Query) -> Result<Self, ApiError> {
        check_list_options(query)?;
        let text = query.resource_version.as_deref().unwrap_or("");
        // As upstream, an error of the storage without a reason.
        let asked = parse_revision(text).map_err(|_| ApiError::without_reason(not_a_revision(text)))?;
        match query.send_initial_events {
            Some(true) if !query.allow_watch_bookmarks => {
                let detail = "sendInitialEvents requires it to be true";
                let error = FieldError::forbidden("allowWatchBookmarks", detail);
                Err(ApiError::invalid_options("ListOptions", &[error]))
            }
            Some(initial) => Ok(Self { asked, initial, end_bookmark: initial }),
            None => Ok(Self { asked, initial: asked.is_none(), end_bookmark: false }),
        }
    }
}

impl ServerState {
    /// The lines of a watch, from its beginning on. The permit is released with the stream.
    pub(crate) async fn watch(
        &self,
        namespace: &str,
        query: &Query,
        view: ObjectView,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<impl Stream<Item = Result<Bytes, std::io::Error>> + Send + use<>, ApiError> {
        let start = Start::parse(query)?;
        let mut selection = Selection::parse(view.kind, query)?;
        let beginning = match view.kind.backing {
            Backing::View => self.watch_view(namespace, query, view, start).await?,
            _ => self.watch_objects(namespace, view, start, &mut selection)?,
        };
        let after = beginning.after;
        if let Some(asked) = start.asked.filter(|asked| *asked > after) {
            return Err(ApiError::future_version(asked.0, after.0));
        }
        let timers = self.timers(query);
        Ok(Lines::new(beginning, start.end_bookmark, selection, view, timers, permit).stream())
    }

    fn watch_objects(
        &self,
        namespace: &str,
        view: ObjectView,
        start: Start,
        selection: &mut Selection,
    ) -> Result<Beginning, ApiError> {
        let range = selection.range(view.kind, namespace);
        let (after, initial) = if start.initial {
            let listing = self.store.list(&range, &ListOptions::default()).map_err(ApiError::internal)?;
            let selected = listing.entries.into_iter().filter(|entry| selection.matches(entry));
            (listing.revision, selected.collect())
        } else {
            (start.asked.unwrap_or_else(|| self.store.revision()), Vec::new())
        };
        let watch = self.store.watch(range, after).map_err(|error| match error {
            WatchError::TooOld { oldest } => ApiError::expired(after.0, oldest.0),
            WatchError::Future { current } => ApiError::future_version(after.0, current.0),
        })?;
        let source = WatchSource::Objects { watch, decoded: Arc::clone(&self.event_objects) };
        Ok(Beginning { initial, after, source })
    }
}
