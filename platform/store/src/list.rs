//! Lists: their options, their results, and the reconstruction of a past revision.

use std::{cmp::Ordering, collections::BTreeMap, ops::Bound, sync::Arc};

use crate::{
    object::{Entry, Key, Range, Revision, WriteEvent},
    table::{Position, ResourceTable},
};

/// The size and the start of a list.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    /// The maximum number of entries; `None`: all.
    pub limit: Option<usize>,
    /// Only keys after this one: the `next` of the previous page.
    pub after: Option<Key>,
    /// The revision to list at, for as long as the history has it; `None`: the current one. A page that continues
    /// another passes the first page's revision.
    pub at: Option<Revision>,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The revision that the entries are consistent with; a watch continues after it.
    pub revision: Revision,
    /// The entries, in the order of their keys.
    pub entries: Vec<Arc<Entry>>,
    /// The number of entries of the range after this page.
    pub remaining: usize,
    /// The start of the next page; `None` on the last page.
    pub next: Option<Key>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    #[error("the revision is no longer in the history; the oldest is {oldest}: list again from the start")]
    Expired { oldest: Revision },
    #[error("the revision is in the future: the store is at {current}")]
    Future { current: Revision },
}

/// A resource at one revision: its current table, and the later changes to undo in it.
pub(crate) struct ListView {
    revision: Revision,
    table: ResourceTable,
    /// For each key that changed after `revision`, its entry at `revision`.
    then: BTreeMap<Key, Option<Arc<Entry>>>,
}

impl ListView {
    /// `newer`: the resource's events after `revision`, oldest first.
    pub(crate) fn new(revision: Revision, table: ResourceTable, newer: &[Arc<WriteEvent>]) -> Self {
        let mut then = BTreeMap::new();
        for event in newer {
            // The first change after the revision has the state at the revision as its previous one.
            then.entry(event.entry.key.clone()).or_insert_with(|| event.previous.clone());
        }
        Self { revision, table, then }
    }

    pub(crate) fn page(&self, range: &Range, options: &ListOptions) -> Listing {
        let after = options.after.as_ref();
        let start = self.start(range, after);
        let end = self.table.position(|key| range.scope.place(key) != Ordering::Greater);
        let limit = options.limit.unwrap_or(usize::MAX);
        let mut entries: Vec<Arc<Entry>> = Vec::with_capacity(limit.min(self.table.count(start, end)));
        let mut merged = self.merged(range, after, start, end);
        entries.extend(merged.by_ref().take(limit).cloned());
        let last = entries.last().map(|entry| &entry.key).or(after);
        let remaining = self.remaining(range, last, end);
        let next = entries.last().filter(|_| remaining > 0).map(|entry| entry.key.clone());
        Listing { revision: self.revision, entries, remaining, next }
    }

    /// The entries of the view in key order: those of the table for unchanged keys, else those of `then`.
    fn merged<'a>(
        &'a self,
        range: &'a Range,
        after: Option<&'a Key>,
        start: Position,
        end: Position,
    ) -> impl Iterator<Item = &'a Arc<Entry>> {
        let now = self.table.from(start).take(self.table.count(start, end));
        let mut now =
            now.filter(|entry| self.then.is_empty() || !self.then.contains_key(&entry.key)).peekable();
        let mut then = self.then_after(range, after).filter_map(|(_, entry)| entry.as_ref()).peekable();
        std::iter::from_fn(move || match (now.peek(), then.peek()) {
            (Some(a), Some(b)) if a.key < b.key => now.next(),
            (_, Some(_)) => then.next(),
            (_, None) => now.next(),
        })
    }

    fn start(&self, range: &Range, after: Option<&Key>) -> Position {
        self.table.position(|key| {
            range.scope.place(key) == Ordering::Less || after.is_some_and(|after| key <= after)
        })
    }

    fn then_after<'a>(
        &'a self,
        range: &'a Range,
        after: Option<&'a Key>,
    ) -> impl Iterator<Item = (&'a Key, &'a Option<Arc<Entry>>)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.then.range::<Key, _>((from, Bound::Unbounded)).filter(|(key, _)| range.contains(key))
    }

    /// Counted without iterating: the table's number of entries, corrected by the keys that changed.
    fn remaining(&self, range: &Range, after: Option<&Key>, end: Position) -> usize {
        let mut count = self.table.count(self.start(range, after), end);
        for (key, then) in self.then_after(range, after) {
            let now = self.table.get(&key.namespace, &key.name).is_some();
            count = count + usize::from(then.is_some()) - usize::from(now);
        }
        count
    }
}
