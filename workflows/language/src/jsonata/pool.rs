//! Threads for evaluations that may take long.
//!
//! `jsonata-core` checks the time between the nodes of an expression, so one step on large data can exceed any limit.
//! Such evaluations run here: the caller waits for a thread, then for the limit and a grace period, then abandons the
//! thread. An abandoned thread ends after its step; meanwhile another one replaces it, up to a bound. The wait for a
//! thread has no limit: the load of the process must not decide the outcome of a workflow. State machines take turns, so
//! that the evaluations of one wait at most for one evaluation of each other, however many those have.
//!
//! There is one pool per process, because threads are a resource of the process.

mod turns;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::limits::{LOST_THREADS_MAX, THREADS};
use crate::arn::StateMachineArn;
use turns::TurnQueue;

type Work = Box<dyn FnOnce() + Send>;

/// The state machine that an evaluation belongs to; evaluations without one take turns as if they had the same.
type TurnOwner = Option<StateMachineArn>;

static POOL: LazyLock<Pool> = LazyLock::new(Pool::start);

/// The interval at which waiting callers check that the pool has threads.
const THREADS_CHECK: Duration = Duration::from_secs(1);

/// Its threads end when it is dropped.
struct Pool(Arc<PoolState>);

struct PoolState {
    queue: Mutex<PoolQueue>,
    /// Notified for each item that is added, and when the pool is dropped.
    changed: Condvar,
    threads: AtomicUsize,
    /// Abandoned threads that have not finished.
    lost: AtomicUsize,
}

/// Each waiting caller has one item in the queue, so the number of callers bounds it.
struct PoolQueue {
    work: TurnQueue<TurnOwner, Work>,
    closed: bool,
}

impl PoolState {
    fn lock(&self) -> MutexGuard<'_, PoolQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, owner: TurnOwner, work: Work) {
        self.lock().work.push(owner, work);
        self.changed.notify_one();
    }

    /// Waits for an item; `None` once the pool is dropped.
    fn take(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(work) = queue.work.pop() {
                return Some(work);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
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
        let queue = Mutex::new(PoolQueue { work: TurnQueue::new(), closed: false });
        let (threads, lost) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let pool = Self(Arc::new(PoolState { queue, changed: Condvar::new(), threads, lost }));
        for _ in 0..THREADS {
            pool.spawn();
        }
        pool
    }

    fn spawn(&self) {
        let state = Arc::clone(&self.0);
        self.0.threads.fetch_add(1, Ordering::AcqRel);
        let spawned = std::thread::Builder::new().name("jsonata".to_owned()).spawn(move || {
            while let Some(work) = state.take() {
                work();
                // An abandoned thread has been replaced, so it ends here to keep the number of threads constant.
                if take_one(&state.lost) {
                    break;
                }
            }
            state.threads.fetch_sub(1, Ordering::AcqRel);
        });
        if spawned.is_err() {
            // Waiting callers start a new thread.
            self.0.threads.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Runs `evaluate` on a thread when it is the owner's turn, and waits for its result, for at most `limit` from its
    /// start.
    fn run<T: Send + 'static>(
        &self,
        owner: TurnOwner,
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
        self.0.add(owner, work);
        loop {
            match told.recv_timeout(THREADS_CHECK) {
                Ok(WorkerReply::Begun) => break,
                Ok(WorkerReply::Ended(value)) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => return Err(EvalError::Panicked),
                Err(RecvTimeoutError::Timeout) => {
                    if self.0.threads.load(Ordering::Acquire) < THREADS {
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
                let lost = &self.0.lost;
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

/// Runs `evaluate` on a thread of the pool when it is the turn of the state machine `owner`, and waits for its result,
/// for at most `limit` from its start.
pub(super) fn run<T: Send + 'static>(
    owner: Option<StateMachineArn>,
    limit: Option<Duration>,
    evaluate: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EvalError> {
    POOL.run(owner, limit, evaluate)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn owner(name: &str) -> TurnOwner {
        Some(StateMachineArn::from_trusted(name))
    }

    /// Runs `work` for `owner` on the pool, from a thread of its own.
    fn run(
        pool: &Arc<Pool>,
        owner: TurnOwner,
        limit: Option<Duration>,
        work: impl FnOnce() -> u8 + Send + 'static,
    ) -> Receiver<Result<u8, EvalError>> {
        let (pool, (tells, told)) = (Arc::clone(pool), sync_channel(1));
        std::thread::spawn(move || tells.send(pool.run(owner, limit, work)));
        told
    }

    /// Occupies all threads until the lock is free.
    fn occupy(pool: &Arc<Pool>, holds: &Arc<Mutex<()>>) -> Vec<Receiver<Result<u8, EvalError>>> {
        let (begins, begun) = sync_channel(THREADS);
        let busy = std::iter::repeat_with(|| {
            let (holds, begins) = (Arc::clone(holds), begins.clone());
            run(pool, owner("busy"), None, move || {
                begins.send(()).expect("the test waits");
                drop(holds.lock());
                1
            })
        });
        let busy = busy.take(THREADS).collect();
        (0..THREADS).for_each(|_| begun.recv_timeout(LONG).expect("they begin"));
        busy
    }

    fn until(what: &str, holds: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !holds() {
            assert!(begun.elapsed() < LONG, "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn answers_panics_and_giving_up() {
        let pool = Pool::start();
        assert_eq!(pool.run(None, Some(LONG), || 7), Ok(7));
        assert_eq!(pool.run(None, Some(LONG), || -> u8 { panic!("on purpose") }), Err(EvalError::Panicked));
        let (holds, held) = (Arc::new(Mutex::new(())), Duration::from_millis(20));
        let guard = holds.lock().expect("whole");
        for _ in 0..THREADS + 1 {
            let holds = Arc::clone(&holds);
            let late = move || drop(holds.lock());
            assert_eq!(pool.run(None, Some(held), late), Err(EvalError::TimedOut));
        }
        // New threads replaced the abandoned ones.
        assert_eq!(pool.run(None, Some(LONG), || 8), Ok(8));
        drop(guard);
        until("those that are lost come back", || pool.0.lost.load(Ordering::Acquire) == 0);
        assert_eq!(pool.run(None, None, || 9), Ok(9));
        let state = Arc::clone(&pool.0);
        drop(pool);
        until("the threads end", || state.threads.load(Ordering::Acquire) == 0);
    }

    #[test]
    fn waiting_for_a_thread_does_not_count_towards_the_time_limit() {
        let pool = Arc::new(Pool::start());
        let holds = Arc::new(Mutex::new(()));
        let guard = holds.lock().expect("whole");
        let busy = occupy(&pool, &holds);
        let limit = Duration::from_secs(1);
        let waits = run(&pool, None, Some(limit), || 2);
        until("it stands in line", || pool.0.lock().work.len() == 1);
        assert_eq!(
            waits.recv_timeout(limit),
            Err(RecvTimeoutError::Timeout),
            "it waits longer than its limit"
        );
        drop(guard);
        assert_eq!(waits.recv_timeout(LONG), Ok(Ok(2)));
        assert!(busy.into_iter().all(|busy| busy.recv_timeout(LONG) == Ok(Ok(1))));
    }

    #[test]
    fn another_state_machine_does_not_wait_for_all_evaluations_of_the_first() {
        let pool = Arc::new(Pool::start());
        let holds = Arc::new(Mutex::new(()));
        let guard = holds.lock().expect("whole");
        let busy = occupy(&pool, &holds);
        // More of the first state machine than there are threads, each of which ends after the other's evaluation.
        let other_ran: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let mut waiting = Vec::new();
        for n in 0..2 * THREADS {
            let ran = Arc::clone(&other_ran);
            waiting.push(run(&pool, owner("busy"), None, move || {
                let (ran, changed) = (ran.0.lock().expect("whole"), &ran.1);
                let (ran, _) = changed.wait_timeout_while(ran, LONG, |ran| !*ran).expect("whole");
                u8::from(*ran)
            }));
            until("it stands in line", || pool.0.lock().work.len() == n + 1);
        }
        let ran = Arc::clone(&other_ran);
        let other = run(&pool, owner("other"), None, move || {
            *ran.0.lock().expect("whole") = true;
            ran.1.notify_all();
            2
        });
        until("it stands in line", || pool.0.lock().work.len() == 2 * THREADS + 1);
        drop(guard);
        assert_eq!(other.recv_timeout(LONG), Ok(Ok(2)));
        assert!(waiting.into_iter().all(|waits| waits.recv_timeout(LONG) == Ok(Ok(1))));
        assert!(busy.into_iter().all(|busy| busy.recv_timeout(LONG) == Ok(Ok(1))));
    }
}
