//! `watch`: a stream of JSON lines.
//!
//! A watch without selectors and tables never parses an object: its bytes are spliced into the line.
//!
//! ```text
//! initial events (resourceVersion unset or "0", or sendInitialEvents)
//!   └─ bookmark with k8s.io/initial-events-end (sendInitialEvents)
//!        └─ events … bookmarks … ─┬─ timeout, shutdown, client gone: the stream ends
//!                                 └─ fell behind: an ERROR line with Status 410, then the end
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, Stream, stream};
use mayfly_store::{Entry, Event, EventKind, ListOptions, Revision, Watch, WatchClosed, WatchError};
use rand::RngExt;
use serde_json::{Value, json};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, Interval, interval_at},
};
use tokio_util::sync::CancellationToken;

use super::parse_revision;
use crate::{
    config::Clock, event_objects::EventObjects, negotiate::Representation, registry::Kind, render::View,
    request::Query, selection::Selection, server::Inner, status::ApiError,
};

/// Lines are gathered into one frame up to about this many bytes while more events are waiting.
const FRAME_BYTES: usize = 64 << 10;
/// A last bookmark is sent this long before the end, so that the next watch starts close by.
const LAST_BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Where a watch begins.
enum Start {
    /// All objects as ADDED, then what follows.
    State {
        end_bookmark: bool,
    },
    After(Revision),
}

/// A running watch.
struct Lines {
    watch: Watch,
    selection: Selection,
    objects: Arc<EventObjects>,
    writer: LineWriter,
    initial: std::vec::IntoIter<Arc<Entry>>,
    end_bookmark: Option<Revision>,
    bookmarks: Option<Interval>,
    last_bookmark: Option<Instant>,
    deadline: Instant,
    shutdown: CancellationToken,
    ended: bool,
    _permit: OwnedSemaphorePermit,
}

impl Inner {
    pub(crate) fn watch(
        &self,
        namespace: &str,
        query: &Query,
        view: View,
        permit: OwnedSemaphorePermit,
    ) -> Result<impl Stream<Item = Result<Bytes, std::io::Error>> + Send + use<>, ApiError> {
        let kind = view.kind;
        let mut selection = Selection::parse(kind, query)?;
        let range = selection.range(kind, namespace);
        let start = self.watch_start(query)?;
        let (after, initial, end_bookmark) = match start {
            Start::After(revision) => (revision, Vec::new(), None),
            Start::State { end_bookmark } => {
                let listing = self.store.list(&range, &ListOptions::default()).map_err(ApiError::internal)?;
                let initial: Vec<_> =
                    listing.entries.into_iter().filter(|entry| selection.matches(entry)).collect();
                (listing.revision, initial, end_bookmark.then_some(listing.revision))
            }
        };
        let watch = self.store.watch(range, after).map_err(|error| match error {
            WatchError::TooOld { oldest } => ApiError::expired(after.0, oldest.0),
            WatchError::Future { current } => ApiError::future_version(after.0, current.0),
        })?;
        let now = Instant::now();
        let lasts = match query.timeout_seconds {
            Some(seconds) if seconds > 0 => Duration::from_secs(seconds),
            _ => self.config.watch_timeout.mul_f64(1.0 + rand::rng().random::<f64>() / 2.0),
        };
        let interval = self.config.bookmark_interval;
        let state = Lines {
            watch,
            selection,
            objects: Arc::clone(&self.event_objects),
            writer: LineWriter::new(view, Clock::clone(&self.clock)),
            initial: initial.into_iter(),
            end_bookmark,
            bookmarks: query.allow_watch_bookmarks.then(|| interval_at(now + interval, interval)),
            last_bookmark: query
                .allow_watch_bookmarks
                .then(|| now + lasts.saturating_sub(LAST_BOOKMARK_BEFORE_END)),
            deadline: now + lasts,
            shutdown: self.shutdown.clone(),
            ended: false,
            _permit: permit,
        };
        Ok(stream::unfold(state, |mut state| async move {
            let frame = state.next_frame().await?;
            Some((Ok(frame), state))
        }))
    }

    fn watch_start(&self, query: &Query) -> Result<Start, ApiError> {
        let asked = parse_revision(query.resource_version.as_deref().unwrap_or(""))?;
        if let Some(asked) = asked {
            self.not_in_the_future(asked)?;
        }
        let forbidden = |why: &str| {
            Err(ApiError::unprocessable(format!("ListOptions.meta.k8s.io \"\" is invalid: {why}")))
        };
        match (query.send_initial_events, query.resource_version_match.as_deref()) {
            (None, Some(_)) => forbidden(
                "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless \
                 sendInitialEvents is provided",
            ),
            (Some(_), rule) if rule != Some("NotOlderThan") => forbidden(
                "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to \
                 NotOlderThan",
            ),
            (Some(true), _) if !query.allow_watch_bookmarks => {
                forbidden("allowWatchBookmarks: Forbidden: sendInitialEvents requires it to be true")
            }
            (Some(true), _) => Ok(Start::State { end_bookmark: true }),
            (Some(false), _) => Ok(Start::After(asked.unwrap_or_else(|| self.store.revision()))),
            (None, None) => Ok(asked.map_or(Start::State { end_bookmark: false }, Start::After)),
        }
    }
}

/// What woke a watch.
enum Wake {
    Event(Result<Arc<Event>, WatchClosed>),
    Bookmark,
    End,
}

impl Lines {
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        if self.ended {
            return None;
        }
        self.initial_lines(&mut out);
        while out.is_empty() && !self.ended {
            match self.wake().await {
                Wake::Event(event) => {
                    self.event(&mut out, event);
                    while !self.ended && out.len() < FRAME_BYTES {
                        let Some(more) = self.watch.next().now_or_never() else { break };
                        self.event(&mut out, more);
                    }
                }
                Wake::Bookmark => {
                    let revision = self.watch.progress();
                    self.writer.bookmark(&mut out, revision, false);
                }
                Wake::End => return None,
            }
        }
        (!out.is_empty()).then(|| Bytes::from(out))
    }

    fn initial_lines(&mut self, out: &mut Vec<u8>) {
        while out.len() < FRAME_BYTES {
            let Some(entry) = self.initial.next() else {
                if let Some(revision) = self.end_bookmark.take() {
                    self.writer.bookmark(out, revision, true);
                }
                return;
            };
            self.writer.line(out, "ADDED", &entry.value, entry.modified);
        }
    }

    async fn wake(&mut self) -> Wake {
        let tick = async {
            match &mut self.bookmarks {
                Some(interval) => _ = interval.tick().await,
                None => std::future::pending().await,
            }
        };
        let last = async {
            match self.last_bookmark {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.shutdown.cancelled() => Wake::End,
            () = tokio::time::sleep_until(self.deadline) => Wake::End,
            event = self.watch.next() => Wake::Event(event),
            () = last => { self.last_bookmark = None; Wake::Bookmark }
            () = tick => Wake::Bookmark,
        }
    }

    fn event(&mut self, out: &mut Vec<u8>, event: Result<Arc<Event>, WatchClosed>) {
        let event = match event {
            Ok(event) => event,
            Err(WatchClosed::Closed) => {
                self.ended = true;
                return;
            }
            Err(WatchClosed::Lagged) => {
                self.ended = true;
                LineWriter::error(out, &ApiError::expired(self.watch.progress().0, 0));
                return;
            }
        };
        let kind = if self.selection.is_everything() {
            Some(match event.kind {
                EventKind::Created => "ADDED",
                EventKind::Modified => "MODIFIED",
                EventKind::Deleted => "DELETED",
            })
        } else {
            self.transition(&event)
        };
        let Some(kind) = kind else { return };
        // What leaves a selection is shown as it was while it was in it.
        let left = kind == "DELETED" && event.kind == EventKind::Modified;
        let shown = event.previous.as_ref().filter(|_| left).unwrap_or(&event.entry);
        self.writer.line(out, kind, &shown.value, event.revision);
    }

    /// What an event is for a watch with a selection: objects come into it and leave it.
    fn transition(&self, event: &Event) -> Option<&'static str> {
        let before = event.previous.as_ref().is_some_and(|previous| self.matches(previous));
        let after = event.kind != EventKind::Deleted && self.matches(&event.entry);
        match (before, after) {
            (false, true) => Some("ADDED"),
            (true, true) => Some("MODIFIED"),
            (true, false) => Some("DELETED"),
            (false, false) => None,
        }
    }

    fn matches(&self, entry: &Entry) -> bool {
        self.selection.matches_event(entry, &self.objects)
    }
}

/// Writes the lines of one watch.
pub(crate) struct LineWriter {
    view: View,
    clock: Clock,
    columns_sent: bool,
}

impl LineWriter {
    pub(crate) fn new(view: View, clock: Clock) -> Self {
        Self { view, clock, columns_sent: false }
    }

    /// Tells the client why the watch ends.
    pub(crate) fn error(out: &mut Vec<u8>, error: &ApiError) {
        out.extend_from_slice(b"{\"type\":\"ERROR\",\"object\":");
        out.extend_from_slice(&error.to_json());
        out.extend_from_slice(b"}\n");
    }

    pub(crate) fn line(&mut self, out: &mut Vec<u8>, kind: &str, stored: &[u8], revision: Revision) {
        let start = out.len();
        out.extend_from_slice(b"{\"type\":\"");
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\",\"object\":");
        let with_columns = !std::mem::replace(&mut self.columns_sent, true);
        if self.view.representation == Representation::Table {
            // Ages are those of the line, not of the watch.
            self.view.now = (self.clock)();
        }
        if let Err(error) = self.view.stored_with(out, stored, revision, with_columns) {
            tracing::error!(%error, kind = ?self.view.kind, "a stored object does not parse");
            return out.truncate(start);
        }
        out.extend_from_slice(b"}\n");
    }

    pub(crate) fn bookmark(&self, out: &mut Vec<u8>, revision: Revision, initial_end: bool) {
        let kind: &Kind = self.view.kind;
        let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({INITIAL_EVENTS_END: "true"});
        }
        let object = match self.view.representation {
            Representation::Object => {
                json!({"kind": kind.kind, "apiVersion": kind.api_version(), "metadata": metadata})
            }
            Representation::Metadata => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
            }
            Representation::Table => json!({
                "kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": Value::Null,
                "metadata": {"resourceVersion": revision.to_string()},
                "rows": [{"cells": Value::Null, "object": {
                    "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata
                }}],
            }),
        };
        out.extend_from_slice(b"{\"type\":\"BOOKMARK\",\"object\":");
        serde_json::to_writer(&mut *out, &object).expect("a Vec takes every byte");
        out.extend_from_slice(b"}\n");
    }
}
