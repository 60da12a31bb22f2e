//! Time slices: the maximum duration of one poll of a guest.
//!
//! A guest checks its engine's epoch in loops and at function entries. A thread records the epoch's tick when it begins
//! to poll a guest, so that time in which the guest slept is not counted.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use wasmtime::UpdateDeadline;

/// A slice ends at the second tick after the beginning of a poll: it lasts between one and two ticks.
const SLICE_TICKS: u64 = 2;

/// Counts the ticks of the engines' epochs.
#[derive(Clone)]
pub(crate) struct EpochClock {
    ticks: Arc<AtomicU64>,
    tick: Duration,
}

impl EpochClock {
    pub(crate) fn new(tick: Duration) -> Self {
        Self { ticks: Arc::default(), tick }
    }

    pub(crate) fn tick(&self) -> Duration {
        self.tick
    }

    pub(crate) fn advance(&self) {
        self.ticks.fetch_add(1, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// The duration of a number of ticks.
    pub(crate) fn time(&self, ticks: u64) -> Duration {
        self.tick.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
    }
}

/// The slice of the poll on the current thread.
#[derive(Clone, Copy)]
struct Slice {
    started: u64,
    used_up: bool,
}

thread_local! {
    static SLICE: Cell<Option<Slice>> = const { Cell::new(None) };
}

/// The result of a poll.
pub(super) struct Polled<T> {
    pub(super) output: T,
    /// Ticks of the epoch during the poll.
    pub(super) ticks: u64,
    /// Whether the guest was interrupted.
    pub(super) used_up: bool,
}

/// Polls a guest, which is interrupted at the end of its slice.
pub(super) fn run<T>(clock: &EpochClock, poll: impl FnOnce() -> T) -> Polled<T> {
    let started = clock.now();
    let outer = SLICE.replace(Some(Slice { started, used_up: false }));
    let output = poll();
    let slice = SLICE.replace(outer);
    let used_up = slice.is_some_and(|slice| slice.used_up);
    Polled { output, ticks: clock.now().saturating_sub(started), used_up }
}

/// Decides at a tick whether the running guest continues.
pub(crate) fn at_tick(clock: &EpochClock) -> UpdateDeadline {
    let Some(mut slice) = SLICE.get() else { return UpdateDeadline::Yield(1) };
    if clock.now().saturating_sub(slice.started) < SLICE_TICKS {
        return UpdateDeadline::Continue(1);
    }
    slice.used_up = true;
    SLICE.set(Some(slice));
    UpdateDeadline::Yield(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_ends_at_its_second_tick() {
        let clock = EpochClock::new(Duration::from_millis(2));
        // Ticks before the poll, while the guest slept, do not count for the slice.
        (0..10).for_each(|_| clock.advance());
        let polled = run(&clock, || {
            assert!(matches!(at_tick(&clock), UpdateDeadline::Continue(1)));
            clock.advance();
            assert!(matches!(at_tick(&clock), UpdateDeadline::Continue(1)));
            clock.advance();
            assert!(matches!(at_tick(&clock), UpdateDeadline::Yield(1)));
        });
        assert_eq!((polled.ticks, polled.used_up), (2, true));
        let polled = run(&clock, || clock.advance());
        assert_eq!((polled.ticks, polled.used_up), (1, false), "the next poll has a slice of its own");
        assert!(
            matches!(at_tick(&clock), UpdateDeadline::Yield(1)),
            "without a slice every tick is the last"
        );
    }
}
