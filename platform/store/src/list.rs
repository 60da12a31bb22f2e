//! Lists: what is asked, what is answered, and how a past revision is put together.

use std::sync::Arc;

use crate::object::{Entry, Key, Revision};

/// How much to list, and from where.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    /// At most so many entries; `None`: all.
    pub limit: Option<usize>,
    /// Only keys after this one: the `next` of the page before.
    pub after: Option<Key>,
    /// As it was at this revision, for as long as the history holds it; `None`: as it is now.
    /// A page that continues another passes the first page's revision.
    pub at: Option<Revision>,
}

/// One page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The revision that the entries are consistent with; a watch continues after it.
    pub revision: Revision,
    /// In the order of their keys.
    pub entries: Vec<Arc<Entry>>,
    /// How many entries of the range come after this page.
    pub remaining: usize,
    /// Where the next page goes on; `None`: this was the last one.
    pub next: Option<Key>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    #[error("the revision is no longer in the history; the oldest is {oldest}: list again from the start")]
    Expired { oldest: Revision },
    #[error("the revision is in the future: the store is at {current}")]
    Future { current: Revision },
}
