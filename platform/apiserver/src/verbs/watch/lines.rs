//! A running watch: the lines of its stream, and their timing.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, Stream, stream};
use mayfly_store::{Entry, EventKind, Revision, WriteEvent};
use rand::RngExt;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, Interval, interval_at},
};
use tokio_util::sync::CancellationToken;

use super::{Beginning, WatchEnded, WatchSource, writer::LineWriter};
use crate::{config::Clock, render::ObjectView, request::Query, selection::Selection, server::ServerState};

/// Lines are gathered into one frame up to about this many bytes while more events are waiting.
const FRAME_BYTES: usize = 64 << 10;
/// A last bookmark is sent this long before the end, so that the next watch starts close by.
const LAST_BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);

/// The maximum duration of a watch, whatever timeout its client requests.
const WATCH_MAX: Duration = Duration::from_secs(24 * 3600);

/// The times of a watch's bookmarks, and its end.
pub(super) struct WatchTimers {
    bookmarks: Option<Interval>,
    last_bookmark: Option<Instant>,
    deadline: Instant,
    /// Read when a line is written, for the ages in tables.
    clock: Clock,
    shutdown: CancellationToken,
}

/// The reason for which a watch was woken.
enum Wake<T> {
    Event(T),
    Bookmark,
    End,
}

pub(super) struct Lines {
    source: WatchSource,
    selection: Selection,
    writer: LineWriter,
    initial: std::vec::IntoIter<Arc<Entry>>,
    end_bookmark: Option<Revision>,
    timers: WatchTimers,
    ended: bool,
    _permit: Option<OwnedSemaphorePermit>,
}

impl ServerState {
    pub(super) fn timers(&self, query: &Query) -> WatchTimers {
        let now = Instant::now();
        let lasts = match query.timeout_seconds {
            Some(seconds) if seconds > 0 => Duration::from_secs(seconds).min(WATCH_MAX),
            _ => self.config.watch_timeout.mul_f64(1.0 + rand::rng().random::<f64>() / 2.0),
        };
        let interval = self.config.bookmark_interval;
        let bookmarks = query.allow_watch_bookmarks;
        WatchTimers {
            bookmarks: bookmarks.then(|| interval_at(now + interval, interval)),
            // As upstream, a watch shorter than that sends none.
            last_bookmark: lasts
                .checked_sub(LAST_BOOKMARK_BEFORE_END)
                .filter(|_| bookmarks)
                .map(|pause| now + pause),
            deadline: now + lasts,
            clock: Clock::clone(&self.clock),
            shutdown: self.shutdown.clone(),
        }
    }
}

impl WatchTimers {
    async fn wake<T>(&mut self, event: impl Future<Output = T>) -> Wake<T> {
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
            event = event => Wake::Event(event),
            () = last => { self.last_bookmark = None; Wake::Bookmark }
            () = tick => Wake::Bookmark,
        }
    }
}

impl Lines {
    pub(super) fn new(
        beginning: Beginning,
        end_bookmark: bool,
        selection: Selection,
        view: ObjectView,
        timers: WatchTimers,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self {
            source: beginning.source,
            selection,
            writer: LineWriter::new(view, Clock::clone(&timers.clock)),
            initial: beginning.initial.into_iter(),
            end_bookmark: end_bookmark.then_some(beginning.after),
            timers,
            ended: false,
            _permit: permit,
        }
    }

    pub(super) fn stream(self) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Send + use<> {
        stream::unfold(self, |mut lines| async move {
            let frame = lines.next_frame().await?;
            Some((Ok(frame), lines))
        })
    }

    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        if self.ended {
            return None;
        }
        self.initial_lines(&mut out);
        while out.is_empty() {
            match self.timers.wake(self.source.next()).await {
                Wake::Event(event) => {
                    self.event(&mut out, event);
                    while !self.ended && out.len() < FRAME_BYTES {
                        let Some(more) = self.source.next().now_or_never() else { break };
                        self.event(&mut out, more);
                    }
                    if self.ended {
                        break;
                    }
                }
                Wake::Bookmark => {
                    let revision = self.source.progress();
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

    fn event(&mut self, out: &mut Vec<u8>, event: Result<Arc<WriteEvent>, WatchEnded>) {
        let event = match event {
            Ok(event) => event,
            Err(ended) => {
                self.ended = true;
                if let WatchEnded::Failed(error) = ended {
                    LineWriter::error(out, &error);
                }
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
        // An object that leaves the selection is shown with its last selected state.
        let left = kind == "DELETED" && event.kind == EventKind::Modified;
        let shown = event.previous.as_ref().filter(|_| left).unwrap_or(&event.entry);
        self.writer.line(out, kind, &shown.value, event.revision);
    }

    /// The type of an event for a watch with a selection, which objects enter and leave.
    fn transition(&self, event: &WriteEvent) -> Option<&'static str> {
        let matches = |entry: &Entry| self.source.matches(&self.selection, entry);
        let before = event.previous.as_deref().is_some_and(matches);
        let after = event.kind != EventKind::Deleted && matches(&event.entry);
        match (before, after) {
            (false, true) => Some("ADDED"),
            (true, true) => Some("MODIFIED"),
            (true, false) => Some("DELETED"),
            (false, false) => None,
        }
    }
}
