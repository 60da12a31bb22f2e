//! Watches: every event of a range, in order, exactly once, or an error that some were missed.

use std::{collections::VecDeque, fmt, sync::Arc};

use crate::{
    object::{Range, Revision, WriteEvent},
    store::StoreContext,
};

/// A cursor into the shared history. It costs nothing between calls.
pub struct Watch {
    shared: Arc<StoreContext>,
    range: Range,
    /// The revision up to which events were scanned, never within a batch; those in range that were not returned yet
    /// are in `found`.
    cursor: Revision,
    /// The revision up to which every event of the range was returned.
    delivered: Revision,
    found: VecDeque<Arc<WriteEvent>>,
    signal: tokio::sync::watch::Receiver<Revision>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// `oldest` is the smallest revision a watch of this resource can still start after.
    #[error("revision too old: the history of this resource starts after {oldest}")]
    TooOld { oldest: Revision },
    #[error("revision in the future: the store is at {current}")]
    Future { current: Revision },
}

/// The reason why a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchClosed {
    /// `oldest` is the smallest revision a watch of this resource can still start after.
    #[error("the watch fell behind the bounded history, which starts after {oldest}: list again")]
    Lagged { oldest: Revision },
    #[error("the store is closed")]
    Closed,
}

/// Events scanned under the lock at a time, without the rest of a batch: a watch that has fallen far behind does not
/// hold up the writer.
const SCAN_MAX: usize = 256;

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, cursor, .. } = self;
        f.debug_struct("Watch").field("range", range).field("cursor", cursor).finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn start(
        shared: Arc<StoreContext>,
        range: Range,
        after: Revision,
    ) -> Result<Self, WatchError> {
        let signal = {
            let mut state = shared.state.upgradable_read();
            if state.history(&range.resource).is_none() {
                state.with_upgraded(|state| state.add_resource(&range.resource));
            }
            if after > state.revision() {
                return Err(WatchError::Future { current: state.revision() });
            }
            let history = state.history(&range.resource).expect("added above");
            if after < history.floor() {
                return Err(WatchError::TooOld { oldest: history.floor() });
            }
            history.signal().subscribe()
        };
        Ok(Self { shared, range, cursor: after, delivered: after, found: VecDeque::new(), signal })
    }

    /// The next event of the range. The events of a batch come one after the other; [`Self::progress`] is the
    /// revision at which another watch continues without a loss. May be dropped while it waits without losing one.
    pub async fn next(&mut self) -> Result<Arc<WriteEvent>, WatchClosed> {
        loop {
            if let Some(event) = self.found.pop_front() {
                // Not in the middle of a batch: a watch that resumed there would miss the rest.
                if self.found.front().is_none_or(|next| next.revision > event.revision) {
                    self.delivered = event.revision;
                }
                return Ok(event);
            }
            // Marked before the scan, so that an event in between wakes the wait below.
            self.signal.mark_unchanged();
            let closed = *self.shared.closed.borrow();
            let more = self.scan()?;
            if !self.found.is_empty() || more {
                continue;
            }
            if closed {
                return Err(WatchClosed::Closed);
            }
            // The sender lives as long as the store's state, which `shared` keeps.
            self.signal.changed().await.map_err(|_| WatchClosed::Closed)?;
        }
    }

    /// The revision up to which every event of the range was returned, for bookmarks. It advances while other objects
    /// change and this range is quiet.
    pub fn progress(&mut self) -> Revision {
        while self.found.is_empty() {
            match self.scan() {
                Ok(true) => {}
                Ok(false) => break,
                // `next` will report that the watch has lagged; until then only returned events count.
                Err(_) => return self.delivered,
            }
        }
        if self.found.is_empty() { self.cursor } else { self.delivered }
    }

    /// Scans the next few events; returns whether there are more to scan.
    fn scan(&mut self) -> Result<bool, WatchClosed> {
        let state = self.shared.state.read();
        let Some(history) = state.history(&self.range.resource) else { return Ok(false) };
        let newer = history.after(self.cursor).ok_or(WatchClosed::Lagged { oldest: history.floor() })?;
        for (scanned, event) in newer.enumerate() {
            // The events of a revision are scanned together, because the next scan begins after the cursor.
            if scanned >= SCAN_MAX && event.revision > self.cursor {
                return Ok(true);
            }
            self.cursor = event.revision;
            if self.range.contains(&event.entry.key) {
                self.found.push_back(Arc::clone(event));
            }
        }
        self.cursor = state.revision();
        Ok(false)
    }
}
