//! Compiles components at low priority.
//!
//! The compiler takes hundreds of megabytes of memory and processes untrusted input. The server runs it in a separate
//! process for each component: its memory returns to the system when it ends, and a crash affects only that component.
//! [`queue`] decides which component is next.

use std::{
    fmt,
    path::PathBuf,
    sync::{
        OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::{Notify, oneshot};
use wasmtime::Engine;

use crate::{CompileIn, Config, engine::AsyncModel};

mod bulk;
mod estimate;
mod queue;
mod worker;

use self::{estimate::CompileSpeed, queue::CompileQueue, worker::CompilerProcess};
pub use worker::run_worker;

/// The niceness of the compiler: it runs on idle processor time that calls leave.
const NICENESS: i32 = 10;

/// The component compiler and its queue.
pub(crate) struct ComponentCompiler {
    queue_max: usize,
    queue: Mutex<CompileQueue>,
    /// Notified when the queue changes.
    changed: Notify,
    speed: Mutex<CompileSpeed>,
    /// Keeps the speed over a restart.
    speed_file: Option<PathBuf>,
    backend: Backend,
}

enum Backend {
    Threads {
        count: usize,
        /// Created for the first component.
        pool: OnceLock<ThreadPool>,
    },
    Process(CompilerProcess),
}

/// Why a component was not compiled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    #[error("too many components wait to be compiled")]
    Full,
    /// The component is invalid: a retry fails in the same way.
    #[error("{0}")]
    Invalid(String),
    /// A retry may succeed.
    #[error("compilation failed without a result: {0}")]
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
        let (queue, changed, speed_file) =
            (Mutex::default(), Notify::new(), config.compile_speed_file.clone());
        let speed = Mutex::new(speed_file.as_deref().and_then(CompileSpeed::load).unwrap_or_default());
        Self { queue_max: config.compile_queue_max, queue, changed, speed, speed_file, backend }
    }

    /// Compiles a component when it is its turn. Dropping the future ends its compiler process.
    pub(crate) async fn compile(
        &self,
        namespace: &str,
        ticket: &Ticket,
        engine: &Engine,
        model: AsyncModel,
        wasm: Vec<u8>,
    ) -> Result<Compiled, CompileError> {
        let turn = self.enter(namespace, wasm.len())?;
        let code_bytes = estimate::code_bytes(&wasm);
        ticket.code_bytes.store(code_bytes, Ordering::Relaxed);
        ticket.number.store(turn.number, Ordering::Relaxed);
        turn.begin().await;
        let compiled = match &self.backend {
            Backend::Threads { count, pool } => on_threads(pool, *count, engine.clone(), wasm).await?,
            Backend::Process(worker) => {
                let started = Instant::now();
                let machine_code = worker.compile(model, &wasm).await?;
                Compiled { machine_code, took: started.elapsed() }
            }
        };
        self.measured(code_bytes, compiled.took);
        Ok(compiled)
    }

    /// Takes the speed of a compilation, and writes it to its file in the background.
    fn measured(&self, code_bytes: usize, took: Duration) {
        let speed = {
            let mut speed = self.speed.lock();
            if !speed.measured(code_bytes, took) {
                return;
            }
            *speed
        };
        if let Some(file) = self.speed_file.clone() {
            tokio::task::spawn_blocking(move || {
                if let Err(error) = speed.save(&file) {
                    tracing::warn!(path = %file.display(), %error, "cannot keep the speed of compilation");
                }
            });
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
        // Two concurrent callers may both have created a pool.
        pool.set(made).ok();
    }
    let Some(pool) = pool.get() else { return Err(CompileError::Lost("no threads".into())) };
    let (done, compiled) = oneshot::channel();
    pool.spawn(move || {
        let started = Instant::now();
        let result = machine_code(&engine, &wasm)
            .map(|machine_code| Compiled { machine_code, took: started.elapsed() })
            .map_err(|error| CompileError::Invalid(format!("{error:#}")));
        // Fails only when the receiver was dropped.
        done.send(result).ok();
    });
    compiled.await.map_err(|_| CompileError::Lost("the compiler panicked".into()))?
}

/// Compiles a component so that its instances can be interrupted at any point.
fn machine_code(engine: &Engine, wasm: &[u8]) -> wasmtime::Result<Vec<u8>> {
    engine.precompile_component(&bulk::split_bulk_ops(wasm)?)
}

/// The threads that compile.
fn threads(count: usize) -> Result<ThreadPool, rayon::ThreadPoolBuildError> {
    ThreadPoolBuilder::new()
        .num_threads(count)
        .thread_name(|index| format!("wasm-compile-{index}"))
        .start_handler(|_| {
            // `None` is the calling thread. On failure the compiler only has a higher priority.
            rustix::process::setpriority_process(None, NICENESS).ok();
        })
        .build()
}

/// The place of a component in the queue, by which its progress is read.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    /// 0 before it is queued.
    number: AtomicU64,
    /// The bytes of its code.
    code_bytes: AtomicUsize,
}

/// The progress of compiling a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompileProgress {
    /// Other components are compiled first; the number of waiting components, including this one.
    Waiting { waiting: usize },
    Compiling {
        since: Duration,
        /// The expected duration in all: an estimate by the last compilation on this machine.
        expected: Duration,
    },
}

impl fmt::Display for CompileProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compiling { since, expected } => {
                let (since_s, expected_s) = (since.as_secs(), expected.as_millis().div_ceil(1000));
                match since <= expected {
                    true => write!(f, "Compiling {since_s} s of about {expected_s} s"),
                    false => {
                        write!(f, "Compiling {since_s} s, which is more than the expected {expected_s} s")
                    }
                }
            }
            Self::Waiting { waiting } => write!(
                f,
                "the component waits to be compiled: {waiting} in the queue, small ones and those of other namespaces first"
            ),
        }
    }
}

/// A component's entry in the queue, removed on drop.
struct QueueEntry<'a> {
    compiler: &'a ComponentCompiler,
    number: u64,
}

impl ComponentCompiler {
    fn enter(&self, namespace: &str, bytes: usize) -> Result<QueueEntry<'_>, CompileError> {
        let mut queue = self.queue.lock();
        if queue.waiting() >= self.queue_max {
            return Err(CompileError::Full);
        }
        let number = queue.enter(namespace, bytes, tokio::time::Instant::now());
        Ok(QueueEntry { compiler: self, number })
    }

    /// The progress of a component that is compiled or queued.
    pub(crate) fn progress(&self, ticket: &Ticket) -> CompileProgress {
        let expected = self.speed.lock().expected(ticket.code_bytes.load(Ordering::Relaxed));
        let queue = self.queue.lock();
        match queue.running_for(ticket.number.load(Ordering::Relaxed), tokio::time::Instant::now()) {
            Some(since) => CompileProgress::Compiling { since, expected },
            None => CompileProgress::Waiting { waiting: queue.waiting() },
        }
    }
}

impl QueueEntry<'_> {
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
                // On either event, check again.
                Err(Some(until)) => drop(tokio::time::timeout_at(until, changed).await),
            }
        }
        self.compiler.changed.notify_waiters();
    }
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        self.compiler.queue.lock().leave(self.number, tokio::time::Instant::now());
        self.compiler.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_states_the_time_so_far_and_the_expected_time() {
        let message = |since_ms, expected_ms| {
            let [since, expected] = [since_ms, expected_ms].map(Duration::from_millis);
            CompileProgress::Compiling { since, expected }.to_string()
        };
        assert_eq!(message(12_900, 19_100), "Compiling 12 s of about 20 s");
        assert_eq!(message(25_000, 19_100), "Compiling 25 s, which is more than the expected 20 s");
    }
}
