//! Threads for evaluations that may take long.
//!
//! `jsonata-core` checks the time between the nodes of an expression, so one step on large data can exceed any limit.
//! Such evaluations run here: the caller waits for a thread, then for the limit and a grace period, then abandons the
//! thread. An abandoned thread ends after its step; meanwhile another one replaces it, up to a bound. The wait for a
//! thread has no limit: the load of the process must not decide the outcome of a workflow.
//!
//! There is one pool per process, because threads are a resource of the process.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use super::limits::{LOST_THREADS_MAX, QUEUED_MAX, THREADS};

type Work = Box<dyn FnOnce() + Send>;

static POOL: LazyLock<Pool> = LazyLock::new(Pool::start);

/// The interval at which waiting callers check that the pool has threads.
const THREADS_CHECK: Duration = Duration::from_secs(1);

struct Pool {
    work: SyncSender<Work>,
    /// Shared by the threads: the next free one takes an item.
    queue: Arc<Mutex<Receiver<Work>>>,
    counts: Arc<PoolStats>,
}

#[derive(Default)]
struct PoolStats {
    threads: AtomicUsize,
    /// Abandoned threads that have not finished.
    lost: AtomicUsize,
}

/// Why an evaluation has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvalError {
    /// The evaluation exceeded its limit.
    TimedOut,
    /// The evaluation panicked.
    Panicked,
}

/// A message from a thread to the caller.
enum WorkerReply<T> {
    Begun,
    Ended(T),
}

impl Pool {
    fn start() -> Self {
        let (work, queue) = sync_channel::<Work>(QUEUED_MAX);
        let pool = Self { work, queue: Arc::new(Mutex::new(queue)), counts: Arc::default() };
        for _ in 0..THREADS {
            pool.spawn();
        }
        pool
    }

    fn spawn(&self) {
        let (queue, counts) = (Arc::clone(&self.queue), Arc::clone(&self.counts));
        self.counts.threads.fetch_add(1, Ordering::AcqRel);
        let spawned = std::thread::Builder::new().name("jsonata".to_owned()).spawn(move || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(work) = next else { break };
                work();
                // An abandoned thread has been replaced, so it ends here to keep the number of threads constant.
                if take_one(&counts.lost) {
                    break;
                }
            }
            counts.threads.fetch_sub(1, Ordering::AcqRel);
        });
        if spawned.is_err() {
            // Waiting callers start a new thread.
            self.counts.threads.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Runs `evaluate` on a thread and waits for its result, for at most `limit` from its start.
    fn run<T: Send + 'static>(
        &self,
        limit: Option<Duration>,
        evaluate: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, EvalError> {
        let (tells, told) = sync_channel(2);
        let work = Box::new(move || {
            // The caller waits for this message, and may have given up by the end.
            let _ = tells.send(WorkerReply::Begun);
            if let Ok(value) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(evaluate)) {
                let _ = tells.send(WorkerReply::Ended(value));
            }
        });
        self.work.send(work).map_err(|_| EvalError::Panicked)?;
        loop {
            match told.recv_timeout(THREADS_CHECK) {
                Ok(WorkerReply::Begun) => break,
                Ok(WorkerReply::Ended(value)) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => return Err(EvalError::Panicked),
                Err(RecvTimeoutError::Timeout) => {
                    if self.counts.threads.load(Ordering::Acquire) < THREADS {
                        self.spawn();
                    }
                }
            }
        }
        let ended = match limit {
            Some(limit) => told.recv_timeout(limit),
            None => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match ended {
            Ok(WorkerReply::Ended(value)) => Ok(value),
            Ok(WorkerReply::Begun) | Err(RecvTimeoutError::Disconnected) => Err(EvalError::Panicked),
            Err(RecvTimeoutError::Timeout) => {
                let replace = |lost: usize| (lost < LOST_THREADS_MAX).then_some(lost + 1);
                let lost = &self.counts.lost;
                if lost.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace).is_ok() {
                    self.spawn();
                }
                Err(EvalError::TimedOut)
            }
        }
    }
}

/// Decrements the counter, unless it is zero.
fn take_one(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1)).is_ok()
}

/// Runs `evaluate` on a thread of the pool and waits for its result, for at most `limit` from its start.
pub(super) fn run<T: Send + 'static>(
    limit: Option<Duration>,
    evaluate: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EvalError> {
    POOL.run(limit, evaluate)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn answers_panics_and_giving_up() {
        let pool = Pool::start();
        assert_eq!(pool.run(Some(LONG), || 7), Ok(7));
        assert_eq!(pool.run(Some(LONG), || -> u8 { panic!("on purpose") }), Err(EvalError::Panicked));
        let (holds, held) = (Arc::new(Mutex::new(())), Duration::from_millis(20));
        let guard = holds.lock().expect("whole");
        for _ in 0..THREADS + 1 {
            let holds = Arc::clone(&holds);
            let late = move || drop(holds.lock());
            assert_eq!(pool.run(Some(held), late), Err(EvalError::TimedOut));
        }
        // New threads replaced the abandoned ones.
        assert_eq!(pool.run(Some(LONG), || 8), Ok(8));
        drop(guard);
        let begun = std::time::Instant::now();
        while pool.counts.lost.load(Ordering::Acquire) != 0 {
            assert!(begun.elapsed() < LONG, "those that are lost do not come back");
            std::thread::yield_now();
        }
        assert_eq!(pool.run(None, || 9), Ok(9));
    }

    #[test]
    fn waiting_for_a_thread_does_not_count_towards_the_time_limit() {
        let pool = Arc::new(Pool::start());
        let holds = Arc::new(Mutex::new(()));
        let guard = holds.lock().expect("whole");
        let run = |limit, work: Box<dyn FnOnce() -> u8 + Send>| {
            let (pool, (tells, told)) = (Arc::clone(&pool), sync_channel(1));
            std::thread::spawn(move || tells.send(pool.run(limit, work)));
            told
        };
        let (begins, begun) = sync_channel(THREADS);
        let busy: Vec<_> = std::iter::repeat_with(|| {
            let (holds, begins) = (Arc::clone(&holds), begins.clone());
            let work = move || {
                begins.send(()).expect("the test waits");
                drop(holds.lock());
                1
            };
            run(None, Box::new(work))
        })
        .take(THREADS)
        .collect();
        (0..THREADS).for_each(|_| begun.recv_timeout(LONG).expect("they begin"));
        let limit = Duration::from_secs(1);
        let waits = run(Some(limit), Box::new(|| 2));
        // No thread is free to take it: this test takes it from the queue, and puts it back.
        let queued = pool.queue.lock().expect("whole").recv_timeout(LONG).expect("it stands in line");
        pool.work.send(queued).expect("there is room");
        assert_eq!(
            waits.recv_timeout(limit),
            Err(RecvTimeoutError::Timeout),
            "it waits longer than its limit"
        );
        drop(guard);
        assert_eq!(waits.recv_timeout(LONG), Ok(Ok(2)));
        assert!(busy.into_iter().all(|busy| busy.recv_timeout(LONG) == Ok(Ok(1))));
    }
}
