//! Group commit: the number of writes that share a commit, and the time for which a commit waits for them.

use std::time::Duration;

/// The time for which a group of writes waits for more before it is committed.
///
/// A commit costs about the same for one write as for fifty. Clients that were just answered tend to write again at
/// once, and others have queued up meanwhile: their sum is the number of writes to expect. A single writer never
/// waits. The waiting itself is done by the writer thread, which owns the queue.
#[derive(Debug)]
pub struct GroupCommitPolicy {
    group_max: usize,
    share: u32,
    wait_max: Duration,
    /// Writes of the last group, and in the queue when it was done.
    expected: usize,
    /// The duration of the last commit.
    commit: Duration,
}

impl GroupCommitPolicy {
    /// For groups of at most `group_max` writes, which wait for one `share`-th of the last commit's time, and never
    /// longer than `wait_max`. `share` is not 0.
    #[must_use]
    pub const fn new(group_max: usize, share: u32, wait_max: Duration) -> Self {
        Self { group_max, share, wait_max, expected: 0, commit: Duration::ZERO }
    }

    /// Records the duration of a commit.
    pub const fn committed(&mut self, took: Duration) {
        self.commit = took;
    }

    /// Records the size of a group, and the number of writes that queued up meanwhile.
    pub const fn done(&mut self, group: usize, queued: usize) {
        self.expected = group + queued;
    }

    /// The number of writes for which the next group waits.
    #[must_use]
    pub fn expected(&self) -> usize {
        self.expected.min(self.group_max)
    }

    /// The longest time for which the next group waits.
    #[must_use]
    pub fn wait_max(&self) -> Duration {
        (self.commit / self.share).min(self.wait_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_waits_for_as_many_as_were_there() {
        let millis = Duration::from_millis;
        let mut gathering = GroupCommitPolicy::new(8, 4, millis(1));
        assert_eq!((gathering.expected(), gathering.wait_max()), (0, Duration::ZERO));
        gathering.committed(millis(2));
        gathering.done(3, 2);
        assert_eq!((gathering.expected(), gathering.wait_max()), (5, Duration::from_micros(500)));
        gathering.committed(millis(40));
        gathering.done(8, 9);
        assert_eq!((gathering.expected(), gathering.wait_max()), (8, millis(1)));
    }
}
