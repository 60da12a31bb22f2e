//! The resource usage of a container's task.

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

/// Can be read at any time.
#[derive(Clone)]
pub(super) struct Meter {
    program: Arc<GuestProgram>,
    /// Nanoseconds of processor time, if measured.
    cpu: Option<Arc<AtomicU64>>,
}

impl Meter {
    /// Measures only memory. Timing requests would need two system calls per poll of an instance, because the clock of
    /// a thread's processor time is one.
    pub(super) fn of_memory(program: Arc<GuestProgram>) -> Self {
        Self { program, cpu: None }
    }

    /// Measures memory, and the processor time of futures wrapped by [`Self::timed`].
    pub(super) fn of_program(program: Arc<GuestProgram>) -> Self {
        Self { program, cpu: Some(Arc::default()) }
    }

    pub(super) fn usage(&self) -> Usage {
        let nanoseconds = self.cpu.as_ref().map(|cpu| cpu.load(Ordering::Relaxed));
        Usage { memory_bytes: self.program.memory_bytes(), cpu: nanoseconds.map(Duration::from_nanos) }
    }

    /// Wraps a future to count its processor time. A guest runs on the thread that polls it, and returns at every tick
    /// of the epoch.
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
