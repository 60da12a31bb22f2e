//! Locks by path: a volume that pods share is mounted or unmounted for one of them at a time.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// The locks in use. Paths contain the names of volumes, so unused locks are removed: the map has at most one of them.
#[derive(Debug, Default)]
pub(super) struct PathLocks {
    locks: Mutex<HashMap<PathBuf, Arc<tokio::sync::Mutex<()>>>>,
}

impl PathLocks {
    /// Waits for the lock of a path; it is released when the guard is dropped.
    pub(super) async fn lock(&self, path: &Path) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock();
            // Guards and waiters hold a reference of their own, and new ones need the map.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(path.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_path_has_one_lock_and_unused_locks_are_removed() {
        let locks = PathLocks::default();
        let held = locks.lock(Path::new("/held")).await;
        for index in 0..100 {
            drop(locks.lock(&PathBuf::from(format!("/{index}"))).await);
        }
        assert_eq!(locks.locks.lock().len(), 2, "the held one and the last one");
        let mut second = Box::pin(locks.lock(Path::new("/held")));
        assert!(futures::poll!(&mut second).is_pending());
        // A waiter keeps the lock in the map after its holder has released it.
        drop(held);
        drop(locks.lock(Path::new("/other")).await);
        let mut third = Box::pin(locks.lock(Path::new("/held")));
        let held = second.await;
        assert!(futures::poll!(&mut third).is_pending());
        drop(held);
        drop(third.await);
    }
}
