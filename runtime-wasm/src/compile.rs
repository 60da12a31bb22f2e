//! Compiling components, on threads of its own that yield to everything else.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::oneshot;
use wasmtime::Engine;

use crate::Config;

/// The threads' niceness: they get what serving leaves.
const NICENESS: i32 = 10;

/// The compile threads. Made when the first component comes.
pub(crate) struct Compiler {
    threads: usize,
    queue_max: usize,
    waiting: Arc<AtomicUsize>,
    pool: OnceLock<ThreadPool>,
}

/// Why a component was not compiled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    #[error("too many components wait to be compiled")]
    Full,
    #[error("{0}")]
    Invalid(String),
    #[error("compiling ended without a result")]
    Lost,
}

/// What compiling made.
pub(crate) struct Compiled {
    pub(crate) machine_code: Vec<u8>,
    pub(crate) took: Duration,
}

impl Compiler {
    pub(crate) fn new(config: &Config) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            threads: config.compile_threads.unwrap_or(cores / 2).max(1),
            queue_max: config.compile_queue_max,
            waiting: Arc::default(),
            pool: OnceLock::new(),
        }
    }

    fn pool(&self) -> Result<&ThreadPool, CompileError> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(self.threads)
            .thread_name(|index| format!("wasm-compile-{index}"))
            .start_handler(|_| {
                // 0 is the calling thread. Without it compiling is only less polite.
                rustix::process::setpriority_process(None, NICENESS).ok();
            })
            .build()
            .map_err(|error| CompileError::Invalid(error.to_string()))?;
        Ok(self.pool.get_or_init(|| pool))
    }

    /// Compiles a component. Dropping the future does not end the work, only its result is lost: the cache does
    /// not drop it.
    pub(crate) async fn compile(&self, engine: &Engine, wasm: Vec<u8>) -> Result<Compiled, CompileError> {
        let pool = self.pool()?;
        let turn = Turn(self.waiting.clone());
        if turn.0.fetch_add(1, Ordering::Relaxed) >= self.queue_max {
            return Err(CompileError::Full);
        }
        let (done, compiled) = oneshot::channel();
        let engine = engine.clone();
        pool.spawn(move || {
            let started = Instant::now();
            let result = engine.precompile_component(&wasm);
            drop(turn);
            let result = result
                .map(|machine_code| Compiled { machine_code, took: started.elapsed() })
                .map_err(|error| CompileError::Invalid(format!("{error:#}")));
            // Nobody waits any more if this fails.
            done.send(result).ok();
        });
        compiled.await.map_err(|_| CompileError::Lost)?
    }
}

/// One place in the queue.
struct Turn(Arc<AtomicUsize>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
