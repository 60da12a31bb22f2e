//! The published state: the index and the history of every resource, at one revision.
//!
//! Written by the writer only, after a commit; read under a lock that is held for as long as it takes to copy a
//! pointer or look up a key.

use std::{collections::HashMap, sync::Arc};

use tokio::sync::watch;

use crate::{
    backend::StoredObjects,
    by_name::ByName,
    history::WatchHistory,
    list::ListError,
    object::{Entry, EventKind, Key, Range, Revision, WriteEvent},
    table::ResourceTable,
};

pub(crate) struct StoreState {
    revision: Revision,
    /// The revision from which on this process has events.
    opened: Revision,
    resources: HashMap<Arc<str>, Resource>,
    limits: HistoryLimits,
    /// The sum of the bytes of all histories.
    history_bytes: usize,
}

struct Resource {
    table: ResourceTable,
    /// The same entries, for the lookup of one.
    by_name: ByName,
    history: WatchHistory,
}

#[derive(Clone, Copy)]
pub(crate) struct HistoryLimits {
    /// For each resource.
    pub(crate) events: usize,
    /// For all resources together.
    pub(crate) bytes: usize,
}

/// The work after the lock is released: waking watches, dropping forgotten events.
#[must_use]
pub(crate) struct Published {
    signals: Vec<Arc<watch::Sender<Revision>>>,
    revision: Revision,
    _forgotten: Vec<Arc<WriteEvent>>,
}

impl Published {
    pub(crate) fn wake(self) {
        for signal in self.signals {
            signal.send_replace(self.revision);
        }
    }
}

impl StoreState {
    pub(crate) fn new(loaded: StoredObjects, limits: HistoryLimits) -> Self {
        let mut state = Self {
            revision: loaded.revision,
            opened: loaded.revision,
            resources: HashMap::new(),
            limits,
            history_bytes: 0,
        };
        for entry in loaded.entries {
            state.resource(&entry.key.resource).insert(entry);
        }
        state
    }

    pub(crate) fn revision(&self) -> Revision {
        self.revision
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Arc<Entry>> {
        self.resources.get(&key.resource)?.by_name.get(&key.namespace, &key.name).cloned()
    }

    /// Makes committed events visible, all at once. They are in the order of their revisions, with all events of each.
    pub(crate) fn publish(&mut self, events: &[Arc<WriteEvent>]) -> Published {
        let mut signals: Vec<Arc<watch::Sender<Revision>>> = Vec::new();
        let mut forgotten = Vec::new();
        for event in events {
            self.revision = event.revision;
            let events_max = self.limits.events;
            let resource = self.resource(&event.entry.key.resource);
            match event.kind {
                EventKind::Created | EventKind::Modified => resource.insert(Arc::clone(&event.entry)),
                EventKind::Deleted => resource.remove(&event.entry.key),
            }
            let bytes_before = resource.history.bytes();
            resource.history.push(Arc::clone(event));
            if resource.history.len() > events_max {
                resource.history.forget(&mut forgotten);
            }
            let bytes_after = resource.history.bytes();
            if !signals.iter().any(|signal| Arc::ptr_eq(signal, resource.history.signal())) {
                signals.push(Arc::clone(resource.history.signal()));
            }
            self.history_bytes = self.history_bytes - bytes_before + bytes_after;
        }
        self.trim_bytes(&mut forgotten);
        Published { signals, revision: self.revision, _forgotten: forgotten }
    }

    /// Drops events of the largest history first, so that a busy resource does not evict the history of a quiet one.
    fn trim_bytes(&mut self, forgotten: &mut Vec<Arc<WriteEvent>>) {
        while self.history_bytes > self.limits.bytes {
            let largest = self.resources.values_mut().max_by_key(|resource| resource.history.bytes());
            let Some(history) = largest.map(|resource| &mut resource.history) else { return };
            self.history_bytes -= history.bytes();
            history.forget(forgotten);
            self.history_bytes += history.bytes();
        }
    }

    /// The data of a list, for use without the lock: the requested revision, the current table, and the events
    /// between them.
    pub(crate) fn snapshot(
        &self,
        range: &Range,
        at: Option<Revision>,
    ) -> Result<(Revision, ResourceTable, Vec<Arc<WriteEvent>>), ListError> {
        let revision = at.unwrap_or(self.revision);
        if revision > self.revision {
            return Err(ListError::Future { current: self.revision });
        }
        let Some(resource) = self.resources.get(&range.resource) else {
            return match revision < self.opened {
                true => Err(ListError::Expired { oldest: self.opened }),
                false => Ok((revision, ResourceTable::default(), Vec::new())),
            };
        };
        match resource.history.after(revision) {
            Some(newer) => Ok((revision, resource.table.clone(), newer.cloned().collect())),
            None => Err(ListError::Expired { oldest: resource.history.floor() }),
        }
    }

    /// The history of a resource, if it has one.
    pub(crate) fn history(&self, resource: &str) -> Option<&WatchHistory> {
        Some(&self.resources.get(resource)?.history)
    }

    /// Adds a resource without events, for a watch that waits for its first one.
    pub(crate) fn add_resource(&mut self, resource: &Arc<str>) {
        self.resource(resource);
    }

    pub(crate) fn objects(&self) -> usize {
        self.resources.values().map(|resource| resource.table.len()).sum()
    }

    pub(crate) fn history_events(&self) -> usize {
        self.resources.values().map(|resource| resource.history.len()).sum()
    }

    pub(crate) fn history_bytes(&self) -> usize {
        self.history_bytes
    }

    /// The signals of all watches, to end them.
    pub(crate) fn signals(&self) -> Vec<Arc<watch::Sender<Revision>>> {
        self.resources.values().map(|resource| Arc::clone(resource.history.signal())).collect()
    }

    fn resource(&mut self, name: &Arc<str>) -> &mut Resource {
        if !self.resources.contains_key(name) {
            // Its changes before this process are not known; since the start there are none.
            let history = WatchHistory::new(self.opened);
            self.resources.insert(
                Arc::clone(name),
                Resource { table: ResourceTable::default(), by_name: ByName::default(), history },
            );
        }
        self.resources.get_mut(name).expect("inserted above")
    }
}

impl Resource {
    fn insert(&mut self, entry: Arc<Entry>) {
        self.by_name.insert(Arc::clone(&entry));
        self.table.insert(entry);
    }

    fn remove(&mut self, key: &Key) {
        self.by_name.remove(&key.namespace, &key.name);
        self.table.remove(&key.namespace, &key.name);
    }
}
