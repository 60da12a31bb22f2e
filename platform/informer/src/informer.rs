//! The objects of one kind, kept up to date by list and watch.
//!
//! ```text
//!            list                  watch event
//!   Empty ─────────▶ Synced ◀──────────────────┐
//!                      │  └────────────────────┘
//!                      │ 410, lost watch
//!                      ▼
//!                   Relisting (readers keep the old copy) ──list──▶ Synced
//! ```
//!
//! A task of its own applies the watch's events to the copy, and then calls the handlers. Handlers run in that task:
//! they only record work (an entry in a work queue, a mark in a cache) and return.

use std::{collections::BTreeMap, fmt, sync::Arc};

use kube::{Api, Resource, runtime::watcher::Event};
use mayfly_api::ObjectKey;
use parking_lot::{Mutex, RwLock};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    WatchConfig,
    changes::{Changes, Dirty},
    follow::follow,
    objects::Objects,
};

/// One kind's objects, shared by all readers in the process. Cheap to clone.
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
}

impl<K> std::fmt::Debug for Informer<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informer").finish_non_exhaustive()
    }
}

/// A change of an object. A deletion carries the last observed state.
#[derive(Debug)]
pub enum Change<'a, K> {
    Added(&'a Arc<K>),
    Updated { old: &'a Arc<K>, new: &'a Arc<K> },
    Deleted(&'a Arc<K>),
}

/// A secondary index of an [`Informer`].
pub struct Index<K> {
    shared: Arc<Shared<K>>,
    slot: usize,
}

impl<K> std::fmt::Debug for Index<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("slot", &self.slot).finish_non_exhaustive()
    }
}

type Handler<K> = Box<dyn Fn(Change<'_, K>) + Send>;

struct Shared<K> {
    objects: RwLock<Objects<K>>,
    /// Locked before `objects` and over the whole of a change, so that a handler that joins sees each
    /// object once: in its first round, or as a change.
    handlers: Mutex<Vec<Handler<K>>>,
    synced: watch::Sender<bool>,
}

impl<K> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<K> Clone for Index<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), slot: self.slot }
    }
}

impl<'a, K> Change<'a, K> {
    /// The newest state that is known: of a deleted object, its last.
    pub fn latest(&self) -> &'a Arc<K> {
        match self {
            Self::Added(object) | Self::Updated { new: object, .. } | Self::Deleted(object) => object,
        }
    }

    /// The states before and after, if they exist.
    pub fn states(&self) -> impl Iterator<Item = &'a Arc<K>> {
        let (old, new) = match self {
            Self::Added(new) => (None, Some(*new)),
            Self::Updated { old, new } => (Some(*old), Some(*new)),
            Self::Deleted(old) => (Some(*old), None),
        };
        old.into_iter().chain(new)
    }
}

impl<K> Informer<K>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static,
{
    /// Starts listing and watching the objects that `config` selects, until `stop`. Must be called inside a tokio
    /// runtime. Managed fields are dropped, since no component reads them.
    pub fn start(api: Api<K>, config: WatchConfig, stop: CancellationToken) -> Self {
        let informer = Self { shared: Arc::new(Shared::default()) };
        tokio::spawn(keep(informer.shared.clone(), api, config, stop));
        informer
    }
}

impl<K> Informer<K> {
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        self.shared.objects.read().get(key).cloned()
    }

    /// All objects, in the order of their keys.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.objects.read().values().cloned().collect()
    }

    /// The objects of one namespace, in the order of their names.
    pub fn list_namespace(&self, namespace: &str) -> Vec<Arc<K>> {
        self.shared.objects.read().in_namespace(namespace).cloned().collect()
    }

    /// The keys of all objects, in order.
    pub fn keys(&self) -> Vec<ObjectKey> {
        self.shared.objects.read().keys().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.shared.objects.read().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the first list is complete. Stays true afterwards, also while the API is unreachable.
    pub fn is_synced(&self) -> bool {
        *self.shared.synced.borrow()
    }

    /// Waits for the first list.
    pub async fn synced(&self) {
        let mut synced = self.shared.synced.subscribe();
        // The sender lives in `self`, so this cannot fail while we wait.
        let _ = synced.wait_for(|synced| *synced).await;
    }

    /// A new subscription, which starts with the keys of all objects.
    pub fn subscribe(&self) -> Changes
    where
        K: Resource + 'static,
    {
        let dirty = Arc::new(Dirty::default());
        let weak = Arc::downgrade(&dirty);
        self.handle(move |change| {
            if let Some(dirty) = weak.upgrade() {
                dirty.mark(ObjectKey::of(&**change.latest()));
            }
        });
        Changes::of(dirty)
    }

    /// Calls `handler` with `Added` for every existing object, then with every change, in order. It runs in the
    /// informer's task: it must not block, and must not call `handle`.
    pub fn handle(&self, handler: impl Fn(Change<'_, K>) + Send + 'static) {
        let mut handlers = self.shared.handlers.lock();
        let objects = self.list();
        for object in &objects {
            handler(Change::Added(object));
        }
        handlers.push(Box::new(handler));
    }

    /// The index called `name`, built at the first call. All callers for one name must pass the same function.
    pub fn index(
        &self,
        name: &'static str,
        values_of: impl Fn(&K) -> Vec<String> + Send + Sync + 'static,
    ) -> Index<K> {
        let slot = self.shared.objects.write().index(name, Arc::new(values_of));
        Index { shared: self.shared.clone(), slot }
    }
}

impl<K> Index<K> {
    /// The objects with this index value, in the order of their keys.
    pub fn get(&self, value: &str) -> Vec<Arc<K>> {
        self.shared.objects.read().indexed(self.slot, value).cloned().collect()
    }

    pub fn count(&self, value: &str) -> usize {
        self.shared.objects.read().indexed(self.slot, value).count()
    }
}

impl<K> Default for Shared<K> {
    fn default() -> Self {
        Self { objects: RwLock::default(), handlers: Mutex::default(), synced: watch::Sender::new(false) }
    }
}

impl<K: Resource> Shared<K> {
    fn apply(&self, object: K) {
        let (key, new) = (ObjectKey::of(&object), Arc::new(object));
        let handlers = self.handlers.lock();
        let old = self.objects.write().insert(key, new.clone());
        match &old {
            Some(old) => tell(&handlers, || Change::Updated { old, new: &new }),
            None => tell(&handlers, || Change::Added(&new)),
        }
    }

    fn delete(&self, object: K) {
        let handlers = self.handlers.lock();
        let removed = self.objects.write().remove(&ObjectKey::of(&object));
        // The event's own state is newer than the copy's: it carries the deletion's time and revision.
        if removed.is_some() {
            let last = Arc::new(object);
            tell(&handlers, || Change::Deleted(&last));
        }
    }

    /// Makes the copy equal to a complete list. Unchanged objects are not reported again.
    fn replace(&self, listed: BTreeMap<ObjectKey, Arc<K>>) {
        let handlers = self.handlers.lock();
        let gone: Vec<_> =
            self.objects.read().keys().filter(|key| !listed.contains_key(key)).cloned().collect();
        for key in gone {
            if let Some(old) = self.objects.write().remove(&key) {
                tell(&handlers, || Change::Deleted(&old));
            }
        }
        for (key, new) in listed {
            let known = self.objects.read().get(&key).cloned();
            match known {
                Some(old) if same_version(&*old, &*new) => {}
                Some(old) => {
                    self.objects.write().insert(key, new.clone());
                    tell(&handlers, || Change::Updated { old: &old, new: &new });
                }
                None => {
                    self.objects.write().insert(key, new.clone());
                    tell(&handlers, || Change::Added(&new));
                }
            }
        }
        drop(handlers);
        self.synced.send_replace(true);
    }
}

fn tell<'a, K: 'a>(handlers: &[Handler<K>], change: impl Fn() -> Change<'a, K>) {
    for handler in handlers {
        handler(change());
    }
}

fn same_version<K: Resource>(one: &K, other: &K) -> bool {
    let (one, other) = (one.meta(), other.meta());
    one.uid == other.uid && one.resource_version.is_some() && one.resource_version == other.resource_version
}

/// The informer's task.
async fn keep<K>(shared: Arc<Shared<K>>, api: Api<K>, config: WatchConfig, stop: CancellationToken)
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static,
{
    let mut listed = BTreeMap::new();
    follow(api, config, stop, |event| match event.modify(|object| object.meta_mut().managed_fields = None) {
        Event::Init => listed.clear(),
        Event::InitApply(object) => {
            listed.insert(ObjectKey::of(&object), Arc::new(object));
        }
        Event::InitDone => shared.replace(std::mem::take(&mut listed)),
        Event::Apply(object) => shared.apply(object),
        Event::Delete(object) => shared.delete(object),
    })
    .await;
}
