//! A subscriber's own set of keys that changed since it last looked.

use std::{collections::BTreeSet, sync::Arc};

use mayfly_api::ObjectKey;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The keys of objects that were added, changed or deleted since the last [`Changes::next`]. Keys are
/// deduplicated, so the set never holds more than the objects there are, plus those deleted unseen.
pub struct Changes {
    dirty: Arc<Dirty>,
}

/// The informer's end of [`Changes`].
#[derive(Default)]
pub(crate) struct Dirty {
    keys: Mutex<BTreeSet<ObjectKey>>,
    notify: Notify,
}

impl Dirty {
    pub(crate) fn mark(&self, key: ObjectKey) {
        self.keys.lock().insert(key);
        self.notify.notify_one();
    }
}

impl Changes {
    pub(crate) fn of(dirty: Arc<Dirty>) -> Self {
        Self { dirty }
    }

    /// Waits until something changed, and takes all of it. Cancel-safe. Never resolves once the informer
    /// was stopped and everything was taken.
    pub async fn next(&mut self) -> BTreeSet<ObjectKey> {
        loop {
            let keys = self.take();
            if !keys.is_empty() {
                return keys;
            }
            self.dirty.notify.notified().await;
        }
    }

    /// Takes what changed, without waiting. May be empty.
    pub fn take(&mut self) -> BTreeSet<ObjectKey> {
        std::mem::take(&mut *self.dirty.keys.lock())
    }
}
