//! Watches: every event of a range, in order, exactly once, or the word that some were missed.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    object::{Event, Range, Revision},
    store::Shared,
};

/// A cursor into the shared history. It costs nothing while nobody asks for the next event.
pub struct Watch {
    shared: Arc<Shared>,
    range: Range,
    /// Everything up to here has been looked at; what of it is in range but not handed out yet is
    /// in `found`.
    cursor: Revision,
    delivered: Revision,
    found: VecDeque<Arc<Event>>,
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

/// Why a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchClosed {
    #[error("the watch fell behind the bounded history: list again")]
    Lagged,
    #[error("the store is closed")]
    Closed,
}
