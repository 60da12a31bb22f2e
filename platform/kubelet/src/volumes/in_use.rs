//! The volumes in the node's `status.volumesInUse`: the attach controller does not detach these from this node.

use std::{collections::BTreeSet, time::Duration};

use parking_lot::Mutex;
use tokio::sync::watch;

/// The timeout for the node's status to be written.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// The attachable volumes that are mounted or being mounted on this node, by the names of `names::in_use`.
#[derive(Debug, Default)]
pub(crate) struct VolumesInUse {
    used: watch::Sender<BTreeSet<String>>,
    /// The volumes in the API's copy of the node.
    reported: watch::Sender<BTreeSet<String>>,
    updating: Mutex<()>,
}

impl VolumesInUse {
    /// Sets the volumes in use to the result of `read`. Updates are serialised: a slow one must not overwrite a later
    /// one.
    pub(crate) fn update(&self, read: impl FnOnce() -> BTreeSet<String>) {
        let _one = self.updating.lock();
        let used = read();
        self.used.send_if_modified(|known| {
            let is_new = *known != used;
            *known = used;
            is_new
        });
    }

    /// Follows the volumes in use.
    pub(crate) fn subscribe(&self) -> watch::Receiver<BTreeSet<String>> {
        self.used.subscribe()
    }

    /// Records that the node's status was written with these volumes.
    pub(crate) fn set_reported(&self, reported: BTreeSet<String>) {
        self.reported.send_replace(reported);
    }

    /// Waits until the node's status lists the volume; `false` after a timeout.
    pub(crate) async fn is_reported(&self, name: &str) -> bool {
        let mut reported = self.reported.subscribe();
        let shown = reported.wait_for(|names| names.contains(name));
        tokio::time::timeout(REPORT_TIMEOUT, shown).await.is_ok_and(|shown| shown.is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_volume_is_mounted_after_the_node_says_so() {
        let volumes = VolumesInUse::default();
        let mut used = volumes.subscribe();
        let names = BTreeSet::from(["a".to_owned()]);
        volumes.update(|| names.clone());
        assert!(used.has_changed().unwrap());
        used.mark_unchanged();
        volumes.update(|| names.clone());
        assert!(!used.has_changed().unwrap(), "the same volumes are no change");
        assert!(!volumes.is_reported("a").await);
        let (is_reported, ()) = tokio::join!(volumes.is_reported("a"), async { volumes.set_reported(names) });
        assert!(is_reported);
    }
}
