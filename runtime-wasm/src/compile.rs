//! Compiling components, beside everything else and yielding to it.
//!
//! A compiler takes memory by the hundred megabytes, and reads what strangers wrote. The server has it in a process
//! of its own for each component: what it took goes back to the system when it ends, and a component that breaks it
//! breaks nothing else. [`queue`] says which component is next.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::{Notify, oneshot};
use wasmtime::Engine;

use crate::{CompileIn, Config, engine::AsyncModel};

mod bulk;
mod queue;
mod worker;

use self::{queue::CompileQueue, worker::CompilerProcess};
pub use worker::run_worker;

/// The niceness of compiling: it gets what serving leaves.
const NICENESS: i32 = 10;

/// The compiler of components, and the queue of those that wait for it.
pub(crate) struct ComponentCompiler {
    queue_max: usize,
    queue: Mutex<CompileQueue>,
    /// The queue changed.
    changed: Notify,
    backend: Backend,
}

enum Backend {
    Threads {
        count: usize,
        /// Made when the first component comes.
        pool: OnceLock<ThreadPool>,
    },
    Process(CompilerProcess),
}

/// Why a component was not compiled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    #[error("too many components wait to be compiled")]
    Full,
    /// The component's fault: another attempt fails in the same way.
    #[error("{0}")]
    Invalid(String),
    /// Another try may do better.
    #[error("compiling ended without a result: {0}")]
    Lost(String),
}

/// The result of compiling.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) machine_code: Vec<u8>,
    pub(crate) took: Duration,
}

impl ComponentCompiler {
    pub(crate) fn new(config: &Config, machine_memory_bytes: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = config.compile_threads.unwrap_or(cores / 2).max(1);
        let backend = match &config.compile_in {
            CompileIn::ThisProcess => Backend::Threads { count: threads, pool: OnceLock::new() },
            CompileIn::Process(program) => Backend::Process(CompilerProcess {
                program: program.clone(),
                threads,
                memory_bytes_max: config.compile_memory_bytes_max.unwrap_or(machine_memory_bytes / 2),
                linear_memory_bytes_max: config.linear_memory_bytes_max,
                timeout: config.compile_timeout,
            }),
        };
        let (queue, changed) = (Mutex::default(), Notify::new());
        Self { queue_max: config.compile_queue_max, queue, changed, backend }
    }

    /// Compiles a component, when it is its turn. A compiler process ends when this is dropped.
    pub(crate) async fn compile(
        &self,
        namespace: &str,
        ticket: &Ticket,
        engine: &Engine,
        model: AsyncModel,
        wasm: Vec<u8>,
    ) -> Result<Compiled, CompileError> {
        let turn = self.enter(namespace, wasm.len())?;
        ticket.0.store(turn.number, Ordering::Relaxed);
        turn.begin().await;
        match &self.backend {
            Backend::Threads { count, pool } => on_threads(pool, *count, engine.clone(), wasm).await,
            Backend::Process(worker) => {
                let started = Instant::now();
                let machine_code = worker.compile(model, &wasm).await?;
                Ok(Compiled { machine_code, took: started.elapsed() })
            }
        }
    }
}

async fn on_threads(
    pool: &OnceLock<ThreadPool>,
    count: usize,
    engine: Engine,
    wasm: Vec<u8>,
) -> Result<Compiled, CompileError> {
    if pool.get().is_none() {
        let made = threads(count).map_err(|error| CompileError::Lost(error.to_string()))?;
        // Two callers may be first at the same time.
        pool.set(made).ok();
    }
    let Some(pool) = pool.get() else { return Err(CompileError::Lost("no threads".into())) };
    let (done, compiled) = oneshot::channel();
    pool.spawn(move || {
        let started = Instant::now();
        let result = machine_code(&engine, &wasm)
            .map(|machine_code| Compiled { machine_code, took: started.elapsed() })
            .map_err(|error| CompileError::Invalid(format!("{error:#}")));
        // Fails only when the receiver is gone.
        done.send(result).ok();
    });
    compiled.await.map_err(|_| CompileError::Lost("the compiler panicked".into()))?
}

/// Compiles a component for instances that can be interrupted anywhere.
fn machine_code(engine: &Engine, wasm: &[u8]) -> wasmtime::Result<Vec<u8>> {
    engine.precompile_component(&bulk::in_pieces(wasm)?)
}

/// Threads to compile on.
fn threads(count: usize) -> Result<ThreadPool, rayon::ThreadPoolBuildError> {
    ThreadPoolBuilder::new()
        .num_threads(count)
        .thread_name(|index| format!("wasm-compile-{index}"))
        .start_handler(|_| {
            // None is the calling thread. Without it compiling is only less polite.
            rustix::process::setpriority_process(None, NICENESS).ok();
        })
        .build()
}

/// The number of a component in the queue, by which its progress is read; 0 before it has one.
#[derive(Debug, Default)]
pub(crate) struct Ticket(AtomicU64);

/// The progress of compiling a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompileProgress {
    /// Other components are compiled first. The number that wait, with this one.
    Waiting {
        waiting: usize,
    },
    Compiling {
        since: Duration,
    },
}

/// A component's place in the queue, given up when it is dropped.
struct Turn<'a> {
    compiler: &'a ComponentCompiler,
    number: u64,
}

impl ComponentCompiler {
    fn enter(&self, namespace: &str, bytes: usize) -> Result<Turn<'_>, CompileError> {
        let mut queue = self.queue.lock();
        if queue.waiting() >= self.queue_max {
            return Err(CompileError::Full);
        }
        let number = queue.enter(namespace, bytes, tokio::time::Instant::now());
        Ok(Turn { compiler: self, number })
    }

    /// The progress of a component that is being compiled, or waits for it.
    pub(crate) fn progress(&self, ticket: &Ticket) -> CompileProgress {
        let queue = self.queue.lock();
        match queue.running_for(ticket.0.load(Ordering::Relaxed), tokio::time::Instant::now()) {
            Some(since) => CompileProgress::Compiling { since },
            None => CompileProgress::Waiting { waiting: queue.waiting() },
        }
    }
}

impl Turn<'_> {
    /// Waits until the component is next.
    async fn begin(&self) {
        loop {
            let mut changed = std::pin::pin!(self.compiler.changed.notified());
            // Registered before the check, so that no change is missed.
            changed.as_mut().enable();
            let begun = self.compiler.queue.lock().try_begin(self.number, tokio::time::Instant::now());
            match begun {
                Ok(()) => break,
                Err(None) => changed.await,
                // After either, check again.
                Err(Some(until)) => drop(tokio::time::timeout_at(until, changed).await),
            }
        }
        self.compiler.changed.notify_waiters();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.compiler.queue.lock().leave(self.number, tokio::time::Instant::now());
        self.compiler.changed.notify_waiters();
    }
}
