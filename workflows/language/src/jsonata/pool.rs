//! Threads for evaluations that may take long.
//!
//! `jsonata-core` looks at the time between the nodes of an expression, so one step on large data can run past any
//! limit. Such evaluations run here: their caller waits until the limit and a grace, then gives up. The thread it
//! gave up on ends when its step does; meanwhile another takes its place, up to a bound. When that is reached too,
//! evaluations are refused, not queued without end.
//!
//! The pool is the process's own, like its memory: threads are what it bounds.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use super::limits::{GRACE_MILLIS, MAX_LOST_THREADS, MAX_MILLIS, MAX_QUEUED, THREADS};

type Work = Box<dyn FnOnce() + Send>;

static POOL: LazyLock<Pool> = LazyLock::new(Pool::start);

struct Pool {
    work: SyncSender<Work>,
    /// Shared by the threads: whoever is free takes the next.
    queue: Arc<Mutex<Receiver<Work>>>,
    /// Threads whose caller gave up and which have not come back.
    lost: Arc<AtomicUsize>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// It took too long.
    Late,
    /// Too many evaluations are under way.
    Busy,
    /// The evaluation panicked.
    Broken,
}

impl Pool {
    fn start() -> Self {
        let (work, queue) = sync_channel::<Work>(MAX_QUEUED);
        let pool = Self { work, queue: Arc::new(Mutex::new(queue)), lost: Arc::new(AtomicUsize::new(0)) };
        for _ in 0..THREADS {
            pool.spawn();
        }
        pool
    }

    fn spawn(&self) {
        let queue = Arc::clone(&self.queue);
        let lost = Arc::clone(&self.lost);
        // Without a thread the work stays queued and its caller gives up in time.
        let _ = std::thread::Builder::new().name("jsonata".to_owned()).spawn(move || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(work) = next else { return };
                work();
                // One that was given up on has been replaced: there must not be more and more.
                if take_one(&lost) {
                    return;
                }
            }
        });
    }
}

/// Counts down, unless at zero.
fn take_one(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1)).is_ok()
}

/// Runs `evaluate` on a thread of the pool and waits for its answer, at most as long as an evaluation may take.
pub(super) fn run<T: Send + 'static>(evaluate: impl FnOnce() -> T + Send + 'static) -> Result<T, Gone> {
    run_within(Duration::from_millis(MAX_MILLIS + GRACE_MILLIS), evaluate)
}

fn run_within<T: Send + 'static>(
    limit: Duration,
    evaluate: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Gone> {
    let pool = &*POOL;
    let (answer, answered) = sync_channel(1);
    let started = Arc::new(AtomicUsize::new(0));
    let starting = Arc::clone(&started);
    let work = Box::new(move || {
        // One whose caller went away while it was queued is not begun.
        if starting.swap(1, Ordering::AcqRel) == 0
            && let Ok(value) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(evaluate))
        {
            // The caller may have given up.
            let _ = answer.send(value);
        }
    });
    match pool.work.try_send(work) {
        Ok(()) => {}
        Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => return Err(Gone::Busy),
    }
    match answered.recv_timeout(limit) {
        Ok(value) => Ok(value),
        Err(RecvTimeoutError::Disconnected) => Err(Gone::Broken),
        Err(RecvTimeoutError::Timeout) => {
            if started.swap(1, Ordering::AcqRel) == 0 {
                return Err(Gone::Busy);
            }
            let replace = |lost: usize| (lost < MAX_LOST_THREADS).then_some(lost + 1);
            if pool.lost.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace).is_ok() {
                pool.spawn();
            }
            Err(Gone::Late)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_panics_and_giving_up() {
        assert_eq!(run(|| 7), Ok(7));
        assert_eq!(run(|| -> u8 { panic!("on purpose") }), Err(Gone::Broken));
        let late = || std::thread::sleep(Duration::from_millis(300));
        for _ in 0..THREADS + 1 {
            assert_eq!(run_within(Duration::from_millis(20), late), Err(Gone::Late));
        }
        // Others have taken the place of those that are lost.
        assert_eq!(run(|| 8), Ok(8));
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(POOL.lost.load(Ordering::Acquire), 0);
        assert_eq!(run(|| 9), Ok(9));
    }
}
