//! A subscriber's own set of keys that changed since it last looked.

use std::{collections::BTreeSet, sync::Arc};

use mayfly_api::ObjectKey;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The keys of objects that were added, changed or deleted since the last [`Changes::next`]. Keys are
/// deduplicated, so the set never holds more than the objects there are, plus those deleted unseen.
pub struct Changes<T = ObjectKey> {
    dirty: Arc<Dirty<T>>,
}

impl<T> std::fmt::Debug for Changes<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Changes").finish_non_exhaustive()
    }
}

/// The informer's end of [`Changes`].
pub(crate) struct Dirty<T = ObjectKey> {
    keys: Mutex<BTreeSet<T>>,
    notify: Notify,
}

impl<T> Default for Dirty<T> {
    fn default() -> Self {
        Self { keys: Mutex::default(), notify: Notify::default() }
    }
}

impl<T: Ord> Dirty<T> {
    pub(crate) fn mark(&self, key: T) {
        self.keys.lock().insert(key);
        self.notify.notify_one();
    }
}

impl<T> Changes<T> {
    pub(crate) fn of(dirty: Arc<Dirty<T>>) -> Self {
        Self { dirty }
    }

    /// Waits until something changed, and takes all of it. Cancel-safe. Never resolves once the informer
    /// was stopped and everything was taken.
    pub async fn next(&mut self) -> BTreeSet<T> {
        loop {
            let keys = self.take();
            if !keys.is_empty() {
                return keys;
            }
            self.dirty.notify.notified().await;
        }
    }

    /// Takes what changed, without waiting. May be empty.
    pub fn take(&mut self) -> BTreeSet<T> {
        std::mem::take(&mut *self.dirty.keys.lock())
    }
}
