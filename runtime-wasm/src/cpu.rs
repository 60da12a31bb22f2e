//! How functions share the processor.
//!
//! ```text
//!               poll takes less than a slice
//! call ──▶ serving thread ─────────────────────────▶ answered
//!  │             │ slice used up, or too many ticks in total
//!  │ heavy       ▼
//!  └──────▶ run queue ──▶ pool thread ──▶ answered
//!                 ▲           │ slice used up, or woken again
//!                 └───────────┘
//! ```
//! A call starts on the thread that serves its connection, where a short one ends without being queued. A guest
//! that uses up its time slice there continues on a pool of threads with a lower priority. In the pool, namespaces
//! take turns by the processor time they consumed, functions by theirs within a namespace, and the calls of a function
//! in order: many calls of one function get no more than one call of another. A function whose calls are long on
//! average ([`CallWeight`]) starts in the pool, so that its first slices do not add up on the serving threads either.
//!
//! [`RunQueue`] decides (no locks, no clock); [`FairPool`] executes; [`slice`] measures; [`Scheduled`] is one call.

mod pool;
mod run_queue;
mod scheduled;
pub(crate) mod slice;
mod weight;

use std::{sync::Arc, time::Duration};

pub(crate) use self::{pool::FairPool, scheduled::Scheduled, slice::EpochClock};
use self::{pool::PoolTask, run_queue::ShareKey, weight::CallWeight};

/// The processor share of one function (or one pod), for one of its revisions.
pub(crate) struct Lane {
    key: ShareKey,
    pool: Arc<FairPool>,
    weight: CallWeight,
}

impl Lane {
    pub(crate) fn new(pool: Arc<FairPool>, namespace: &str, function: &str) -> Arc<Self> {
        let key = ShareKey { namespace: namespace.into(), function: function.into() };
        Arc::new(Self { key, pool, weight: CallWeight::default() })
    }

    pub(crate) fn clock(&self) -> &EpochClock {
        self.pool.clock()
    }

    /// Runs a future in the pool from its first poll on. Dropping the task cancels the future.
    pub(crate) fn spawn<F>(&self, future: F) -> PoolTask<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.pool.spawn(&self.key, future)
    }
}

/// Processor time of this thread since its start.
pub(crate) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanoseconds.unwrap_or(0))
}
