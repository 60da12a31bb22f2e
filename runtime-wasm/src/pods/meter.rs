//! The usage of a container's task.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use mayfly_runtime::Usage;

use crate::{cpu::thread_time, guest::GuestProgram};

/// Read off at any moment.
#[derive(Clone)]
pub(super) struct Meter {
    program: Arc<GuestProgram>,
    /// Nanoseconds, if metered.
    cpu: Option<Arc<AtomicU64>>,
}

impl Meter {
    /// Of memory alone. Requests are not timed: the clock of a thread's processor time is a system call, and each
    /// poll of an instance would make two.
    pub(super) fn of_memory(program: Arc<GuestProgram>) -> Self {
        Self { program, cpu: None }
    }

    /// Of memory, and of the time of those futures that go through [`Self::timed`].
    pub(super) fn of_program(program: Arc<GuestProgram>) -> Self {
        Self { program, cpu: Some(Arc::default()) }
    }

    pub(super) fn usage(&self) -> Usage {
        let nanoseconds = self.cpu.as_ref().map(|cpu| cpu.load(Ordering::Relaxed));
        Usage { memory_bytes: self.program.memory_bytes(), cpu: nanoseconds.map(Duration::from_nanos) }
    }

    /// The future, with its processor time counted. A guest runs on the thread that polls it, and returns at every
    /// tick of the epoch.
    pub(super) fn timed<F: Future + Send>(
        &self,
        future: F,
    ) -> impl Future<Output = F::Output> + Send + use<F> {
        Timed { future: Box::pin(future), cpu: self.cpu.clone().unwrap_or_default() }
    }
}

struct Timed<F> {
    future: Pin<Box<F>>,
    cpu: Arc<AtomicU64>,
}

impl<F: Future> Future for Timed<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let before = thread_time();
        let polled = self.future.as_mut().poll(context);
        let took = thread_time().saturating_sub(before);
        self.cpu.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        polled
    }
}
