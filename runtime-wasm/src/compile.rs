//! Compiling components, beside everything else and yielding to it.
//!
//! A compiler takes memory by the hundred megabytes, and reads what strangers wrote. The server has it in a process
//! of its own, one component at a time: what it took goes back to the system when it ends, and a component that
//! breaks it breaks nothing else.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::{Semaphore, oneshot};
use wasmtime::Engine;

use crate::{CompileIn, Config, engine::AsyncModel};

mod worker;

use worker::Worker;
pub use worker::run_worker;

/// The niceness of compiling: it gets what serving leaves.
const NICENESS: i32 = 10;

/// Where components are compiled, and those that wait for it.
pub(crate) struct Compiler {
    queue_max: usize,
    waiting: Arc<AtomicUsize>,
    place: Backend,
}

enum Backend {
    Threads {
        count: usize,
        /// Made when the first component comes.
        pool: OnceLock<ThreadPool>,
    },
    Process {
        worker: Worker,
        one_at_a_time: Semaphore,
    },
}

/// Why a component was not compiled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    #[error("too many components wait to be compiled")]
    Full,
    /// The component's fault: another try comes to the same.
    #[error("{0}")]
    Invalid(String),
    /// Another try may do better.
    #[error("compiling ended without a result: {0}")]
    Lost(String),
}

/// What compiling made.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) machine_code: Vec<u8>,
    pub(crate) took: Duration,
}

impl Compiler {
    pub(crate) fn new(config: &Config, machine_memory_bytes: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = config.compile_threads.unwrap_or(cores / 2).max(1);
        let place = match &config.compile_in {
            CompileIn::ThisProcess => Backend::Threads { count: threads, pool: OnceLock::new() },
            CompileIn::Process(program) => Backend::Process {
                worker: Worker {
                    program: program.clone(),
                    threads,
                    memory_bytes_max: config.compile_memory_bytes_max.unwrap_or(machine_memory_bytes / 2),
                    linear_memory_bytes_max: config.linear_memory_bytes_max,
                    timeout: config.compile_timeout,
                },
                one_at_a_time: Semaphore::new(1),
            },
        };
        Self { queue_max: config.compile_queue_max, waiting: Arc::default(), place }
    }

    /// Compiles a component. Its caller must wait for it in a task that is not dropped: the cache does.
    pub(crate) async fn compile(
        &self,
        engine: &Engine,
        model: AsyncModel,
        wasm: Vec<u8>,
    ) -> Result<Compiled, CompileError> {
        let turn = Turn(self.waiting.clone());
        if turn.0.fetch_add(1, Ordering::Relaxed) >= self.queue_max {
            return Err(CompileError::Full);
        }
        match &self.place {
            Backend::Threads { count, pool } => on_threads(pool, *count, engine.clone(), wasm).await,
            Backend::Process { worker, one_at_a_time } => {
                let closed = |_| CompileError::Lost("the host is gone".into());
                let _one = one_at_a_time.acquire().await.map_err(closed)?;
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
        // Two may come first at the same time.
        pool.set(made).ok();
    }
    let Some(pool) = pool.get() else { return Err(CompileError::Lost("no threads".into())) };
    let (done, compiled) = oneshot::channel();
    pool.spawn(move || {
        let started = Instant::now();
        let result = engine
            .precompile_component(&wasm)
            .map(|machine_code| Compiled { machine_code, took: started.elapsed() })
            .map_err(|error| CompileError::Invalid(format!("{error:#}")));
        // Nobody waits any more if this fails.
        done.send(result).ok();
    });
    compiled.await.map_err(|_| CompileError::Lost("the compiler panicked".into()))?
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

/// One place in the queue.
struct Turn(Arc<AtomicUsize>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
