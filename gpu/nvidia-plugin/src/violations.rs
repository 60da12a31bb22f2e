//! The violations of limits that were found, for the kubelet and for metrics.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use mayfly_runtime::PodUid;
use tokio::sync::watch;

/// Messages by pod.
pub(crate) type PodMessages = BTreeMap<PodUid, String>;

/// A kind of violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViolationKind {
    /// More memory than the limit; the pod is evicted.
    Memory,
    /// Memory that the limiting library does not know.
    UnbookedMemory,
    /// A process of no container with a share of the GPU.
    UnknownProcess,
    /// More GPU time than the share.
    Time,
}

impl ViolationKind {
    pub const ALL: [Self; 4] = [Self::Memory, Self::UnbookedMemory, Self::UnknownProcess, Self::Time];

    /// For the label of a metric.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::UnbookedMemory => "unbooked_memory",
            Self::UnknownProcess => "unknown_process",
            Self::Time => "time",
        }
    }
}

/// The numbers of violations since the start.
#[derive(Clone, Debug, Default)]
pub struct ViolationCounts(Arc<[AtomicU64; ViolationKind::ALL.len()]>);

impl ViolationCounts {
    pub fn get(&self, kind: ViolationKind) -> u64 {
        self.0[kind as usize].load(Relaxed)
    }

    pub(crate) fn add(&self, kind: ViolationKind, count: usize) {
        self.0[kind as usize].fetch_add(u64::try_from(count).unwrap_or(u64::MAX), Relaxed);
    }
}

/// The writing side.
#[derive(Debug, Default)]
pub(crate) struct ViolationLog {
    /// The pods that use more GPU memory than they may, with the messages of their evictions.
    pub(crate) evictions: watch::Sender<PodMessages>,
    /// The last warning about each pod.
    pub(crate) warnings: watch::Sender<PodMessages>,
    pub(crate) counts: ViolationCounts,
}

impl ViolationLog {
    /// Replaces the pods to evict. Each counts once while it is among them.
    pub(crate) fn evict(&self, pods: PodMessages) {
        self.evictions.send_if_modified(|known| {
            let new = pods.keys().filter(|pod| !known.contains_key(*pod)).count();
            self.counts.add(ViolationKind::Memory, new);
            let is_news = *known != pods;
            *known = pods;
            is_news
        });
    }

    /// Warns about pods, and forgets the warnings about pods without shares of GPUs.
    pub(crate) fn warn(&self, new: PodMessages, is_known: impl Fn(&PodUid) -> bool) {
        self.warnings.send_if_modified(|warnings| {
            warnings.retain(|pod, _| is_known(pod));
            let is_news = !new.is_empty();
            warnings.extend(new);
            is_news
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_counts_once_while_it_lasts() {
        let log = ViolationLog::default();
        let pods =
            |names: &[&str]| names.iter().map(|name| (PodUid((*name).into()), String::new())).collect();
        for (names, count) in [(&["a"][..], 1), (&["a"], 1), (&["a", "b"], 2), (&[], 2), (&["a"], 3)] {
            log.evict(pods(names));
            assert_eq!(log.counts.get(ViolationKind::Memory), count, "{names:?}");
        }
        assert_eq!(log.counts.get(ViolationKind::Time), 0);
    }

    #[test]
    fn warnings_stay_as_long_as_their_pods() {
        let log = ViolationLog::default();
        let mut warnings = log.warnings.subscribe();
        let pod = |name: &str| PodUid(name.into());
        log.warn([(pod("a"), "1".into()), (pod("b"), "1".into())].into(), |_| true);
        assert!(warnings.has_changed().unwrap());
        log.warn([(pod("a"), "2".into())].into(), |known| *known == pod("a"));
        assert_eq!(*warnings.borrow_and_update(), [(pod("a"), "2".to_owned())].into());
        log.warn(PodMessages::new(), |_| false);
        assert!(!warnings.has_changed().unwrap() && warnings.borrow().is_empty());
    }
}
