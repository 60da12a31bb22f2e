//! The engines: one for components of the asynchronous component model (0.3), and a faster one for all others. Each is
//! created for the first component of its kind, so that an idle server has none.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use wasmtime::{Engine, EngineWeak, InstanceAllocationStrategy, OptLevel, component::Linker};

use crate::{
    Config, capability, config,
    cpu::EpochClock,
    guest::StoreData,
    pool::{MemoryPool, StackPool},
    slots::InstanceSlots,
};

/// Native stack of one call in bytes, for the guest and the host functions that it calls.
const STACK_BYTES: usize = 1 << 20;
const GUEST_STACK_BYTES: usize = 512 << 10;
/// Inaccessible address space after each memory, in bytes, which lets compiled code omit bounds checks.
const GUARD_BYTES: u64 = 32 << 20;
/// Linear memories that one instance may have. Most components have one or two; composed ones have one for each part.
/// Every instance slot reserves address space for this many, so that no instance uses that of another.
pub(crate) const MEMORIES_PER_INSTANCE: usize = 4;

/// The part of the machine's memory that free slots may keep: an interpreter's instances start three times as fast in a
/// slot that an earlier one used.
const KEPT_DIVISOR: u64 = 16;
/// The time after which a free slot returns its memory.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// The form of the component model that an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum AsyncModel {
    /// Up to 0.2: calls are synchronous on their own stack, and a store needs no task tables.
    Sync,
    /// 0.3: async functions, streams, futures.
    Async,
}

impl AsyncModel {
    const ALL: [Self; 2] = [Self::Sync, Self::Async];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Async => "async",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name() == name)
    }
}

/// An engine and the state shared by all its components.
pub(crate) struct Host {
    pub(crate) engine: Engine,
    pub(crate) linker: Linker<StoreData>,
}

/// Both engines, and the slots of their instances.
pub(crate) struct Engines {
    config: Arc<Config>,
    /// Shared by the instances of both engines.
    slots: Arc<InstanceSlots>,
    pools: OnceLock<(MemoryPool, StackPool)>,
    sync: OnceLock<Arc<Host>>,
    concurrent: OnceLock<Arc<Host>>,
    ticker: OnceLock<Ticker>,
    clock: EpochClock,
    making: Mutex<()>,
    /// The memory that free slots may keep.
    kept_bytes_max: u64,
}

impl Engines {
    pub(crate) fn new(config: Arc<Config>, memory_bytes: u64, clock: EpochClock) -> Self {
        let slots_max = config.instances_max.unwrap_or_else(|| instances_fitting(memory_bytes)) as usize;
        let function_max = config.function_instances_max.map(|max| max as usize);
        Self {
            config,
            slots: InstanceSlots::new(slots_max, function_max),
            pools: OnceLock::new(),
            sync: OnceLock::new(),
            concurrent: OnceLock::new(),
            ticker: OnceLock::new(),
            clock,
            making: Mutex::new(()),
            kept_bytes_max: memory_bytes / KEPT_DIVISOR,
        }
    }

    /// Number of existing instances, of both engines.
    pub(crate) fn instances(&self) -> u64 {
        self.slots.held() as u64
    }

    pub(crate) fn slots(&self) -> &Arc<InstanceSlots> {
        &self.slots
    }

    /// The engine of a model. The first call creates it, which takes a few milliseconds.
    pub(crate) fn get(&self, model: AsyncModel) -> wasmtime::Result<Arc<Host>> {
        let cell = match model {
            AsyncModel::Sync => &self.sync,
            AsyncModel::Async => &self.concurrent,
        };
        if let Some(host) = cell.get() {
            return Ok(host.clone());
        }
        let _one_at_a_time = self.making.lock();
        if let Some(host) = cell.get() {
            return Ok(host.clone());
        }
        let host = Arc::new(self.make(model)?);
        self.ticker()?.add(&host.engine);
        Ok(cell.get_or_init(|| host).clone())
    }

    fn ticker(&self) -> wasmtime::Result<&Ticker> {
        if let Some(ticker) = self.ticker.get() {
            return Ok(ticker);
        }
        let ticker = Ticker::start(self.clock.clone())?;
        Ok(self.ticker.get_or_init(|| ticker))
    }

    fn pools(&self) -> wasmtime::Result<&(MemoryPool, StackPool)> {
        if let Some(pools) = self.pools.get() {
            return Ok(pools);
        }
        let slots_max = self.slots.max();
        let count = slots_max * MEMORIES_PER_INSTANCE;
        let reserved = usize::try_from(self.config.linear_memory_bytes_max)?;
        let sizes = (reserved, usize::try_from(GUARD_BYTES)?);
        let kept = usize::try_from(self.kept_bytes_max)?;
        let memories = MemoryPool::new(count, sizes, self.config.wipe, kept)?;
        memories.release_after(KEPT_FOR)?;
        let fitting = memories.count() / MEMORIES_PER_INSTANCE;
        if fitting < slots_max {
            // No slot is taken yet: instances need an engine, and engines need the pools.
            self.slots.shrink(fitting);
            tracing::warn!(
                instances_max = fitting,
                asked = slots_max,
                "fewer instances fit: this process's address space is limited (ulimit -v)"
            );
        }
        Ok(self.pools.get_or_init(|| (memories, StackPool::new())))
    }

    fn make(&self, model: AsyncModel) -> wasmtime::Result<Host> {
        let (memories, stacks) = self.pools()?.clone();
        let mut settings = settings(model, self.config.linear_memory_bytes_max);
        settings.with_host_memory(Arc::new(memories)).with_host_stack(Arc::new(stacks));
        let engine = Engine::new(&settings)?;
        let linker = capability::linker(&engine, model)?;
        Ok(Host { engine, linker })
    }
}

/// The default number of instance slots for a machine with this much memory.
fn instances_fitting(memory_bytes: u64) -> u32 {
    let fitting = memory_bytes / config::INSTANCE_BYTES_EXPECTED;
    // A number that does not fit is above the maximum.
    u32::try_from(fitting).unwrap_or(u32::MAX).clamp(config::INSTANCES_MIN, config::INSTANCES_MAX)
}

/// All settings that compiled code depends on: a compiler in another process must have those of the engine that runs
/// its output.
pub(crate) fn settings(model: AsyncModel, linear_memory_bytes_max: u64) -> wasmtime::Config {
    let mut settings = wasmtime::Config::new();
    settings
        .epoch_interruption(true)
        .cranelift_opt_level(OptLevel::Speed)
        .max_wasm_stack(GUEST_STACK_BYTES)
        .async_stack_size(STACK_BYTES)
        .wasm_component_model_async(model == AsyncModel::Async)
        .concurrency_support(model == AsyncModel::Async)
        .memory_reservation(linear_memory_bytes_max)
        .memory_guard_size(GUARD_BYTES)
        .memory_may_move(false)
        // Copy-on-write images need memory that wasmtime created itself.
        .memory_init_cow(false)
        .allocation_strategy(InstanceAllocationStrategy::OnDemand);
    settings
}

/// Advances the engines' epochs from its own thread, so that guests are interrupted even when they hold every worker
/// thread. Started with the first engine.
struct Ticker {
    engines: Arc<Mutex<Vec<EngineWeak>>>,
    stop: Arc<AtomicBool>,
}

impl Ticker {
    fn start(clock: EpochClock) -> std::io::Result<Self> {
        let engines: Arc<Mutex<Vec<EngineWeak>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (ticking, stopped) = (engines.clone(), stop.clone());
        std::thread::Builder::new().name("wasm-ticker".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(clock.tick());
                clock.advance();
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

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(2);

    #[test]
    fn slots_are_counted_by_memory_between_the_fewest_and_the_most() {
        for (memory_bytes, expect) in [
            (0, 64),
            (64 << 20, 64),
            // 8 MiB for each: the largest memory with the minimum number of slots, and the first above it.
            (512 << 20, 64),
            ((520 << 20) - 1, 64),
            (520 << 20, 65),
            (4 << 30, 512),
            (16_000 << 20, 2000),
            (16_008 << 20, 2000),
            (1 << 40, 2000),
            // This count would overflow 32 bits.
            (u64::MAX, 2000),
        ] {
            assert_eq!(instances_fitting(memory_bytes), expect, "{memory_bytes} bytes");
        }
    }

    #[test]
    fn configured_slot_count_overrides_memory() {
        for (instances_max, expect) in [(None, 512), (Some(3), 3), (Some(5000), 5000)] {
            let config = Config { instances_max, ..Config::default() };
            let engines = Engines::new(Arc::new(config), 4 << 30, EpochClock::new(TICK));
            assert_eq!(engines.slots().max(), expect);
            assert_eq!(engines.instances(), 0);
        }
    }
}
