//! One future at a time, over WASI pollables.
//!
//! A component instance serves one request on one thread, so there is nothing to schedule: the executor polls the
//! future, and while it is pending, waits until one of the awaited pollables is ready. Combinators (`futures::join!`
//! and others) work, because each awaited pollable registers its own waker.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use wasip2::io::poll::{self, Pollable};

thread_local! {
    static WAITS: RefCell<Vec<Wait>> = const { RefCell::new(Vec::new()) };
    static NEXT_WAIT: Cell<u64> = const { Cell::new(0) };
    static TASKS: RefCell<Vec<Task>> = const { RefCell::new(Vec::new()) };
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// A pollable that a future awaits.
struct Wait {
    id: u64,
    pollable: Rc<Pollable>,
    waker: Waker,
}

/// Runs a future to completion on this thread.
///
/// Handlers need not call this; tests on the host do.
///
/// # Panics
/// If the future waits for something that can never happen (it awaits no WASI pollable, and was not woken).
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let flag = Arc::new(Flag(AtomicBool::new(false)));
    let waker = Waker::from(flag.clone());
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        let finished = run_tasks(&mut context);
        let woken = flag.0.swap(false, Ordering::Relaxed);
        if finished || woken {
            continue;
        }
        wait_for_one();
    }
}

/// Runs a future in parallel to the one given to [`block_on`], for as long as that one runs.
pub(crate) fn spawn(task: impl Future<Output = ()> + 'static) {
    TASKS.with_borrow_mut(|tasks| tasks.push(Box::pin(task)));
}

/// Waits until the pollable is ready.
pub(crate) async fn ready(pollable: Pollable) {
    Ready { pollable: Rc::new(pollable), id: None }.await
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Polls the background tasks once; true if one of them completed.
fn run_tasks(context: &mut Context<'_>) -> bool {
    // Removed from the list while they run, because a task may spawn another.
    let mut running = TASKS.take();
    let before = running.len();
    running.retain_mut(|task| task.as_mut().poll(context).is_pending());
    let finished = running.len() < before;
    TASKS.with_borrow_mut(|tasks| {
        running.append(tasks);
        *tasks = running;
    });
    finished
}

fn wait_for_one() {
    let waits: Vec<(Rc<Pollable>, Waker)> =
        WAITS.with_borrow(|waits| waits.iter().map(|w| (w.pollable.clone(), w.waker.clone())).collect());
    match waits.as_slice() {
        [] => panic!("this future can never complete: it awaits no WASI pollable"),
        [(pollable, waker)] => {
            pollable.block();
            waker.wake_by_ref();
        }
        many => {
            let pollables: Vec<&Pollable> = many.iter().map(|(pollable, _)| &**pollable).collect();
            for index in poll::poll(&pollables) {
                many[index as usize].1.wake_by_ref();
            }
        }
    }
}

struct Ready {
    pollable: Rc<Pollable>,
    id: Option<u64>,
}

impl Future for Ready {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.pollable.ready() {
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        WAITS.with_borrow_mut(|waits| match self.id {
            Some(id) => {
                if let Some(wait) = waits.iter_mut().find(|wait| wait.id == id) {
                    wait.waker = waker;
                }
            }
            None => {
                let id = NEXT_WAIT.replace(NEXT_WAIT.get() + 1);
                waits.push(Wait { id, pollable: self.pollable.clone(), waker });
                self.id = Some(id);
            }
        });
        Poll::Pending
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            WAITS.with_borrow_mut(|waits| waits.retain(|wait| wait.id != id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is pending once, after waking itself.
    struct Yield(bool);

    impl Future for Yield {
        type Output = ();
        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            if std::mem::replace(&mut self.0, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }
    }

    #[test]
    fn a_future_that_wakes_itself_goes_on() {
        let value = block_on(async {
            Yield(false).await;
            7
        });
        assert_eq!(value, 7);
    }

    #[test]
    fn tasks_run_beside() {
        let seen = Rc::new(Cell::new(false));
        let inside = seen.clone();
        block_on(async move {
            spawn(async move {
                Yield(false).await;
                inside.set(true);
            });
            for _ in 0..3 {
                Yield(false).await;
            }
        });
        assert!(seen.get());
    }

    #[test]
    #[should_panic(expected = "can never complete")]
    fn a_future_that_nothing_wakes_is_reported() {
        block_on(std::future::pending::<()>());
    }
}
