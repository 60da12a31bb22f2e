//! Admits requests to a revision: run, wait or refuse. Each revision has one [`Gate`].
//!
//! ```text
//!            a free slot, an empty queue
//!   arrives ────────────────────▶ running ──answer ended or dropped──▶ ended
//!      │                            ▲
//!      │ no free slot               │ a slot is free: first come, first served
//!      ├──────────────▶ waiting ────┤
//!      │ queue full                 │ the deadline cannot be met, or the client left
//!      └──▶ refused                 └──▶ ended
//! ```
//!
//! A request that finds a free slot takes one atomic step and no lock. The lock guards only the queue, and is taken
//! only while requests wait.

mod queue;

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use self::queue::{RequestQueue, Waiter};
use crate::load::{COUNT_MAX, Reading, RequestLoad};

/// The concurrency limit of one revision, and the requests that wait for it.
pub(crate) struct Gate {
    running: RequestLoad,
    waiting: RequestLoad,
    /// The number of requests that may run at the same time.
    limit: AtomicU32,
    queue: Mutex<RequestQueue<oneshot::Sender<()>>>,
    queue_max: u32,
    /// The estimated duration of a fast response, in microseconds: see [`Gate::note_run`].
    quick_us: AtomicU64,
}

/// The result of an arrival.
pub(crate) enum Arrival {
    Running,
    Waiting(oneshot::Receiver<()>),
    /// The queue is full.
    Full,
}

/// A revision's demand, as read by the autoscaler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RevisionDemand {
    running: Reading,
    waiting: Reading,
}

impl Gate {
    pub(crate) fn new(now: Instant, limit: u32, queue_max: u32) -> Self {
        Self {
            running: RequestLoad::new(now),
            waiting: RequestLoad::new(now),
            limit: AtomicU32::new(limit.clamp(1, COUNT_MAX)),
            queue: Mutex::default(),
            queue_max: queue_max.min(COUNT_MAX),
            quick_us: AtomicU64::new(0),
        }
    }

    pub(crate) fn arrive(&self, now: Instant, deadline: Instant) -> Arrival {
        if self.waiting.count() == 0 && self.running.try_begin(now, self.limit()).is_ok() {
            return Arrival::Running;
        }
        let (sender, receiver) = oneshot::channel();
        let mut queue = self.queue.lock();
        if self.waiting.count() >= self.queue_max {
            return Arrival::Full;
        }
        self.waiting.begin(now);
        let live = self.waiting.count();
        queue.push(Waiter { deadline, token: sender }, live, |sender| sender.is_closed());
        // A slot may have been freed between the check and the insertion into the queue.
        self.admit_waiting(&mut queue, now);
        Arrival::Waiting(receiver)
    }

    /// A waiting request was admitted, or gives up. Every [`Arrival::Waiting`] ends with this call.
    pub(crate) fn stop_waiting(&self, now: Instant) {
        self.waiting.end(now);
    }

    /// A running request has ended.
    pub(crate) fn leave(&self, now: Instant) {
        self.running.end(now);
        if self.waiting.count() > 0 {
            self.admit_waiting(&mut self.queue.lock(), now);
        }
    }

    /// Gives free slots to waiting requests in order, and refuses those that cannot finish in time.
    fn admit_waiting(&self, queue: &mut RequestQueue<oneshot::Sender<()>>, now: Instant) {
        let quick = self.quick();
        while !queue.is_empty() && self.running.try_begin(now, self.limit()).is_ok() {
            loop {
                let Some(waiter) = queue.pop_in_time(now + quick) else {
                    self.running.end(now);
                    return;
                };
                if waiter.token.send(()).is_ok() {
                    break;
                }
            }
        }
    }

    /// Updates the estimated duration of a fast response: shorter durations replace it at once, longer ones shift it
    /// slowly. A request with less time left is refused instead of run.
    pub(crate) fn note_run(&self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let quick_us = self.quick_us.load(Ordering::Relaxed);
        let next_us = if quick_us == 0 || took_us <= quick_us {
            took_us
        } else {
            quick_us + ((took_us - quick_us) >> SLOWER_SHIFT)
        };
        if next_us != quick_us {
            self.quick_us.store(next_us, Ordering::Relaxed);
        }
    }

    pub(crate) fn quick(&self) -> Duration {
        Duration::from_micros(self.quick_us.load(Ordering::Relaxed))
    }

    /// The time after which a retry may succeed: a lower bound of the time for the waiting requests.
    pub(crate) fn retry_after(&self) -> Duration {
        let rounds = self.waiting.count() / self.limit() + 1;
        (self.quick() * rounds).clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }

    pub(crate) fn running(&self) -> u32 {
        self.running.count()
    }

    pub(crate) fn waiting(&self) -> u32 {
        self.waiting.count()
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    pub(crate) fn demand(&self, now: Instant) -> RevisionDemand {
        RevisionDemand { running: self.running.read(now), waiting: self.waiting.read(now) }
    }
}

/// The weight of longer durations in [`Gate::note_run`]: 1/64 of the difference.
const SLOWER_SHIFT: u32 = 6;
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

impl RevisionDemand {
    /// The running and waiting requests together.
    pub(crate) fn total(self) -> Reading {
        self.running.plus(self.waiting)
    }

    /// The number of running and waiting requests.
    pub(crate) fn count(self) -> u32 {
        self.running.count + self.waiting.count
    }

    /// The total time that all requests spent running or waiting since an earlier reading.
    pub(crate) fn spent_since(self, earlier: Self) -> Duration {
        self.running.spent_since(earlier.running) + self.waiting.spent_since(earlier.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon(now: Instant) -> Instant {
        now + Duration::from_secs(30)
    }

    fn waiting(arrival: Arrival) -> oneshot::Receiver<()> {
        match arrival {
            Arrival::Waiting(receiver) => receiver,
            Arrival::Running => panic!("runs"),
            Arrival::Full => panic!("full"),
        }
    }

    #[test]
    fn first_come_first_served_and_full() {
        let now = Instant::now();
        let gate = Gate::new(now, 1, 2);
        assert!(matches!(gate.arrive(now, soon(now)), Arrival::Running));
        let mut first = waiting(gate.arrive(now, soon(now)));
        let mut second = waiting(gate.arrive(now, soon(now)));
        assert!(matches!(gate.arrive(now, soon(now)), Arrival::Full));
        assert!(first.try_recv().is_err());
        gate.leave(now);
        assert_eq!(first.try_recv(), Ok(()));
        assert!(second.try_recv().is_err());
        gate.stop_waiting(now);
        assert_eq!((gate.running(), gate.waiting()), (1, 1));
        gate.leave(now);
        assert_eq!(second.try_recv(), Ok(()));
    }

    #[test]
    fn who_went_away_is_passed_over() {
        let now = Instant::now();
        let gate = Gate::new(now, 1, 10);
        assert!(matches!(gate.arrive(now, soon(now)), Arrival::Running));
        drop(waiting(gate.arrive(now, soon(now))));
        gate.stop_waiting(now);
        let mut second = waiting(gate.arrive(now, soon(now)));
        gate.leave(now);
        assert_eq!(second.try_recv(), Ok(()));
        assert_eq!(gate.running(), 1);
    }

    #[test]
    fn who_would_be_late_is_sent_away() {
        let now = Instant::now();
        let gate = Gate::new(now, 1, 10);
        gate.note_run(Duration::from_millis(100));
        assert!(matches!(gate.arrive(now, soon(now)), Arrival::Running));
        let mut late = waiting(gate.arrive(now, now + Duration::from_millis(150)));
        let mut in_time = waiting(gate.arrive(now, now + Duration::from_millis(250)));
        gate.leave(now + Duration::from_millis(100));
        assert_eq!(late.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        assert_eq!(in_time.try_recv(), Ok(()));
    }

    #[test]
    fn quick_is_learnt_at_once_and_forgotten_slowly() {
        let gate = Gate::new(Instant::now(), 1, 1);
        gate.note_run(Duration::from_millis(10));
        gate.note_run(Duration::from_millis(2));
        assert_eq!(gate.quick(), Duration::from_millis(2));
        gate.note_run(Duration::from_millis(66));
        assert_eq!(gate.quick(), Duration::from_millis(3));
    }
}
