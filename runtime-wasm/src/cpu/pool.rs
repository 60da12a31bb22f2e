//! The threads on which guests continue after their first slice.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_task::{Builder, Runnable, Task};
use parking_lot::{Condvar, Mutex};
use prometheus_client::metrics::counter::Counter;
use tokio::runtime::Handle;

use super::{
    run_queue::{RunQueue, ShareKey},
    slice::{self, EpochClock},
    thread_time,
};

/// The niceness of the pool's threads relative to the process: they get about a sixth of a core under contention with
/// serving threads, and all idle time. The control plane, at 5, comes first.
const NICENESS: i32 = 8;
/// The kernel's largest nice value.
const NICENESS_MAX: i32 = 19;

/// A task in the pool; dropping it cancels its future, which is then dropped on a thread of the pool.
pub(crate) type PoolTask<T> = Task<T>;

/// Runs futures by fair turns of their shares. Its threads are created at the first use.
pub(crate) struct FairPool {
    state: Arc<State>,
    clock: EpochClock,
    threads: usize,
    started: Mutex<bool>,
    /// Number of futures given to the pool.
    pub(crate) spawned: Counter,
}

struct State {
    ready: Mutex<Ready>,
    changed: Condvar,
    /// The expected duration of a turn.
    slice: Duration,
}

struct Ready {
    queue: RunQueue<Runnable>,
    closed: bool,
}

impl FairPool {
    /// `threads`: the number of guests that run at the same time.
    pub(crate) fn new(threads: usize, clock: EpochClock) -> Self {
        let ready = Mutex::new(Ready { queue: RunQueue::new(), closed: false });
        let state = Arc::new(State { ready, changed: Condvar::new(), slice: clock.tick() * 2 });
        let (started, spawned) = (Mutex::new(false), Counter::default());
        Self { state, clock, threads: threads.max(1), started, spawned }
    }

    pub(super) fn clock(&self) -> &EpochClock {
        &self.clock
    }

    /// Timers and sockets of the future belong to the caller's tokio runtime.
    pub(super) fn spawn<F>(&self, key: &ShareKey, future: F) -> PoolTask<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.start();
        self.spawned.inc();
        let (state, key) = (self.state.clone(), key.clone());
        let schedule = move |runnable| state.push(&key, runnable);
        let future = InRuntime {
            future: Some(Box::pin(future)),
            runtime: Handle::current(),
            clock: self.clock.clone(),
        };
        let (runnable, task) = Builder::new().propagate_panic(true).spawn(|()| future, schedule);
        runnable.schedule();
        task
    }

    fn start(&self) {
        let mut started = self.started.lock();
        if std::mem::replace(&mut *started, true) {
            return;
        }
        let mut running = 0;
        for index in 0..self.threads {
            match self.start_thread(index) {
                Ok(()) => running += 1,
                Err(error) => tracing::error!(%error, "cannot start a thread for long calls"),
            }
        }
        // Without any thread the next call tries again; this call times out at its deadline.
        *started = running > 0;
    }

    fn start_thread(&self, index: usize) -> io::Result<()> {
        let state = self.state.clone();
        let worker = move || {
            // A thread inherits the niceness of its creator, which may differ from the process's own.
            let own = process_niceness();
            // Without the permission, these threads have the same priority as the others.
            rustix::process::setpriority_process(None, own.saturating_add(NICENESS).min(NICENESS_MAX)).ok();
            state.work();
        };
        std::thread::Builder::new().name(format!("guest-{index}")).spawn(worker).map(drop)
    }
}

impl Drop for FairPool {
    /// Ends the threads and cancels the ready tasks.
    fn drop(&mut self) {
        let left = {
            let mut ready = self.state.ready.lock();
            ready.closed = true;
            ready.queue.drain()
        };
        self.state.changed.notify_all();
        drop(left);
    }
}

/// The niceness that the process was started with, which its first thread keeps.
fn process_niceness() -> i32 {
    let process = rustix::process::getpid();
    rustix::process::getpriority_process(Some(process)).unwrap_or(0)
}

impl State {
    fn push(&self, key: &ShareKey, runnable: Runnable) {
        let mut ready = self.ready.lock();
        if ready.closed {
            drop(ready);
            // Drops the future.
            drop(runnable);
            return;
        }
        ready.queue.push(key, runnable);
        drop(ready);
        self.changed.notify_one();
    }

    /// The main loop of a thread.
    fn work(&self) {
        while let Some((key, runnable)) = self.next() {
            let before = thread_time();
            // The task's owner receives the panic.
            runnable.run();
            let took = thread_time().saturating_sub(before);
            self.ready.lock().queue.settle(&key, self.slice, took);
        }
    }

    fn next(&self) -> Option<(ShareKey, Runnable)> {
        let mut ready = self.ready.lock();
        loop {
            if ready.closed {
                return None;
            }
            if let Some(next) = ready.queue.pop(self.slice) {
                return Some(next);
            }
            self.changed.wait(&mut ready);
        }
    }
}

/// Polls and drops a future in the context of the tokio runtime that its timers and sockets belong to.
struct InRuntime<F> {
    future: Option<Pin<Box<F>>>,
    runtime: Handle,
    clock: EpochClock,
}

impl<F: Future> Future for InRuntime<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let _entered = this.runtime.enter();
        let Some(future) = &mut this.future else { return Poll::Pending };
        let polled = slice::run(&this.clock, || future.as_mut().poll(context)).output;
        if polled.is_ready() {
            this.future = None;
        }
        polled
    }
}

impl<F> Drop for InRuntime<F> {
    fn drop(&mut self) {
        let _entered = self.runtime.enter();
        self.future = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn key(function: &str) -> ShareKey {
        ShareKey { namespace: "n".into(), function: function.into() }
    }

    fn pool(threads: usize) -> FairPool {
        FairPool::new(threads, EpochClock::new(Duration::from_millis(2)))
    }

    /// Yields `turns` times, calling `note` before each.
    async fn turns(turns: u32, note: impl Fn()) {
        for _ in 0..turns {
            note();
            let mut yielded = false;
            std::future::poll_fn(|cx| {
                if std::mem::replace(&mut yielded, true) {
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        }
    }

    #[tokio::test]
    async fn futures_run_to_their_results_with_the_timers_of_their_runtime() {
        let pool = pool(2);
        let task = pool.spawn(&key("f"), async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            turns(10, || ()).await;
            std::thread::current().name().map(str::to_owned)
        });
        assert!(task.await.unwrap().starts_with("guest-"));
        assert_eq!(pool.spawned.get(), 1);
    }

    #[tokio::test]
    async fn threads_of_the_pool_are_nicer_than_the_process() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let own = process_niceness();
        let found = pool(1).spawn(&key("f"), async move { niceness() }).await;
        assert_eq!(found, (own + NICENESS).min(NICENESS_MAX));
    }

    #[tokio::test]
    async fn a_dropped_task_drops_its_future_also_when_the_pool_is_gone() {
        let held = Arc::new(());
        let hold = |held: &Arc<()>| {
            let held = held.clone();
            async move {
                std::future::pending::<()>().await;
                drop(held);
            }
        };
        let first = pool(1);
        let tasks = [(); 2].map(|()| first.spawn(&key("f"), hold(&held)));
        let [one, other] = tasks;
        drop(one);
        while Arc::strong_count(&held) > 2 {
            tokio::task::yield_now().await;
        }
        drop(first);
        drop(other);
        while Arc::strong_count(&held) > 1 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_panic_reaches_the_owner_and_the_threads_stay() {
        let pool = pool(1);
        let broken = pool.spawn(&key("f"), async { panic!("broken") });
        assert!(tokio::spawn(broken).await.unwrap_err().is_panic());
        assert_eq!(pool.spawn(&key("f"), async { 7 }).await, 7);
    }

    /// With one thread, a share with one task does not wait for all tasks of a share with many.
    #[tokio::test]
    async fn shares_take_turns() {
        let pool = pool(1);
        let done = Arc::new(AtomicU32::new(0));
        let spin = || {
            let until = thread_time() + Duration::from_millis(1);
            while thread_time() < until {}
        };
        let many: Vec<_> = (0..20)
            .map(|_| {
                let done = done.clone();
                pool.spawn(&key("many"), async move {
                    turns(10, spin).await;
                    done.fetch_add(1, Ordering::SeqCst);
                })
            })
            .collect();
        let seen = done.clone();
        let one = pool.spawn(&key("one"), async move {
            turns(10, spin).await;
            seen.load(Ordering::SeqCst)
        });
        assert!(one.await <= 2, "the 200 turns of the others came first");
        for task in many {
            task.await;
        }
    }
}
