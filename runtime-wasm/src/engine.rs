//! The engines: one for components of the asynchronous component model (0.3), one, faster, for all others.
//! Both are made when the first component of their kind comes, so that an idle server holds neither.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use wasmtime::{
    Engine, EngineWeak, InstanceAllocationStrategy, OptLevel, PoolingAllocationConfig, component::Linker,
};

use crate::{Config, capability, config, guest::Guest};

/// Native stack of one call, in bytes: what the guest may use, and what host functions called from it need.
const STACK_BYTES: usize = 1 << 20;
const GUEST_STACK_BYTES: usize = 512 << 10;

/// Which form of the component model an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Flavour {
    /// Up to 0.2: calls are synchronous on their own stack, and a store needs no task tables.
    Sync,
    /// 0.3: async functions, streams, futures.
    Async,
}

/// An engine and what all its components share.
pub(crate) struct Host {
    pub(crate) engine: Engine,
    pub(crate) linker: Linker<Guest>,
    /// One permit is one instance.
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) slots_max: u32,
}

impl Host {
    fn instances(&self) -> u64 {
        u64::from(self.slots_max).saturating_sub(self.slots.available_permits() as u64)
    }
}

/// Both engines.
pub(crate) struct Engines {
    config: Arc<Config>,
    memory_bytes: u64,
    sync: OnceLock<Arc<Host>>,
    concurrent: OnceLock<Arc<Host>>,
    ticker: Ticker,
}

impl Engines {
    pub(crate) fn new(config: Arc<Config>, memory_bytes: u64) -> std::io::Result<Self> {
        let ticker = Ticker::start(config.tick)?;
        Ok(Self { config, memory_bytes, sync: OnceLock::new(), concurrent: OnceLock::new(), ticker })
    }

    /// The engine of a flavour. The first call makes it, which takes a few milliseconds.
    pub(crate) fn get(&self, flavour: Flavour) -> wasmtime::Result<Arc<Host>> {
        let cell = match flavour {
            Flavour::Sync => &self.sync,
            Flavour::Async => &self.concurrent,
        };
        if let Some(host) = cell.get() {
            return Ok(host.clone());
        }
        let host = Arc::new(self.make(flavour)?);
        let kept = cell.get_or_init(|| host.clone());
        if Arc::ptr_eq(kept, &host) {
            self.ticker.add(&host.engine);
        }
        Ok(kept.clone())
    }

    /// Instances that exist, of both engines.
    pub(crate) fn instances(&self) -> u64 {
        let hosts = [self.sync.get(), self.concurrent.get()];
        hosts.into_iter().flatten().map(|host| host.instances()).sum()
    }

    fn make(&self, flavour: Flavour) -> wasmtime::Result<Host> {
        let slots_max = self.config.instances_max.unwrap_or_else(|| {
            let fitting = self.memory_bytes / config::INSTANCE_BYTES_EXPECTED;
            u32::try_from(fitting)
                .unwrap_or(config::INSTANCES_MAX)
                .clamp(config::INSTANCES_MIN, config::INSTANCES_MAX)
        });
        let mut settings = wasmtime::Config::new();
        settings
            .epoch_interruption(true)
            .cranelift_opt_level(OptLevel::Speed)
            .max_wasm_stack(GUEST_STACK_BYTES)
            .async_stack_size(STACK_BYTES)
            .wasm_component_model_async(flavour == Flavour::Async)
            .concurrency_support(flavour == Flavour::Async)
            .allocation_strategy(InstanceAllocationStrategy::Pooling(pool(slots_max, &self.config)));
        let engine = Engine::new(&settings)?;
        let linker = capability::linker(&engine, flavour)?;
        let slots = Arc::new(Semaphore::new(slots_max as usize));
        Ok(Host { engine, linker, slots, slots_max })
    }
}

fn pool(slots: u32, config: &Config) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::default();
    let memory = usize::try_from(config.linear_memory_bytes_max).unwrap_or(usize::MAX);
    pool.total_component_instances(slots)
        .total_core_instances(slots.saturating_mul(4))
        .total_memories(slots)
        .total_tables(slots.saturating_mul(4))
        .total_stacks(slots)
        .max_memory_size(memory)
        .linear_memory_keep_resident(2 << 20)
        .table_keep_resident(256 << 10)
        .async_stack_keep_resident(64 << 10)
        .max_component_instance_size(4 << 20)
        .max_core_instance_size(2 << 20)
        .pagemap_scan(wasmtime::Enabled::Auto);
    pool
}

/// Ticks the engines' epochs from a thread of its own, so that a guest is interrupted even when it holds
/// every worker thread.
struct Ticker {
    engines: Arc<Mutex<Vec<EngineWeak>>>,
    stop: Arc<AtomicBool>,
}

impl Ticker {
    fn start(tick: Duration) -> std::io::Result<Self> {
        let engines: Arc<Mutex<Vec<EngineWeak>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (ticking, stopped) = (engines.clone(), stop.clone());
        std::thread::Builder::new().name("wasm-ticker".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(tick);
                for engine in ticking.lock().iter() {
                    if let Some(engine) = engine.upgrade() {
                        engine.increment_epoch();
                    }
                }
            }
        })?;
        Ok(Self { engines, stop })
    }

    fn add(&self, engine: &Engine) {
        self.engines.lock().push(engine.weak());
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
