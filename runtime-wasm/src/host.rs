//! The host itself: what all functions and pods share, and which functions there are.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use mayfly_api::{Digest, ObjectKey, egress::EgressRule};
use mayfly_artifacts::Artifacts;
use mayfly_runtime::{
    CallError, FunctionHost, HostedFunction, HostedSpec,
    logs::{LogLayout, LogWriter},
};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::{
    Config, World,
    cache::Cache,
    capability::{egress::Egress, lookup::HostLookups, output::ProgramLog},
    compile::Compiler,
    engine::Engines,
    function::{Function, Handle, LoadedFunction, millis},
    guest::{MemoryBudget, Program},
    machine,
    metrics::HostMetrics,
    pods::Pods,
};

/// Runs components: functions that the gateway calls, and pods that the kubelet starts.
#[derive(Clone)]
pub struct WasmHost {
    shared: Arc<Shared>,
    pub(crate) pods: Arc<Pods>,
}

/// Why there is no host.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CreateError {
    #[error("the wasm host's setting {setting} cannot be {value}: {why}")]
    Setting { setting: &'static str, value: String, why: &'static str },
}

/// What functions and pods share.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) metrics: Arc<HostMetrics>,
    pub(crate) logs: LogWriter,
    pub(crate) layout: LogLayout,
    pub(crate) budget: Arc<MemoryBudget>,
    lookups: HostLookups,
    started: Instant,
    stopping: AtomicBool,
    functions: Mutex<HashMap<ObjectKey, Arc<Handle>>>,
    /// Functions that are in memory, or were a moment ago.
    loaded: Mutex<Vec<LoadedFunction>>,
    /// Those who wait for an instance slot.
    slots_wanted: AtomicUsize,
}

impl WasmHost {
    /// Makes the host. Quick: engines, pools and compilers are made when they are first needed.
    pub fn create(
        config: Config,
        artifacts: Artifacts,
        logs: LogWriter,
        layout: LogLayout,
        registry: &mut Registry,
    ) -> Result<Self, CreateError> {
        config.check().map_err(|(setting, value, why)| CreateError::Setting { setting, value, why })?;
        let config = Arc::new(config);
        let memory_bytes = machine::memory_bytes();
        let metrics = HostMetrics::register(registry);
        let engines = Engines::new(config.clone(), memory_bytes);
        let compiler = Compiler::new(&config, memory_bytes);
        let cache = Arc::new(Cache::new(artifacts, engines, compiler, metrics.clone()));
        let budget = Arc::new(MemoryBudget::new(config.memory_bytes_max.unwrap_or(memory_bytes / 2)));
        let shared = Arc::new(Shared {
            config,
            cache,
            metrics,
            logs,
            layout,
            budget,
            lookups: HostLookups::default(),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
            functions: Mutex::default(),
            loaded: Mutex::default(),
            slots_wanted: AtomicUsize::new(0),
        });
        crate::metrics::register_gauges(registry, &shared);
        let pods = Arc::new(Pods::new(shared.clone()));
        Ok(Self { shared, pods })
    }

    /// Compiles a component ahead of its first call, and says how it is called.
    pub async fn precompile(&self, digest: &Digest) -> Result<World, CallError> {
        self.shared.cache.precompile(*digest).await
    }

    /// From now on every call is refused. Calls in flight go on until their end or their deadline.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.reclaim_idle();
    }
}

impl FunctionHost for WasmHost {
    fn prepare(&self, spec: HostedSpec) -> Arc<dyn HostedFunction> {
        self.shared.prepare(spec)
    }

    fn forget(&self, revision: &ObjectKey) {
        if let Some(function) = self.shared.functions.lock().remove(revision) {
            function.unload();
        }
    }
}

impl Shared {
    fn prepare(self: &Arc<Self>, spec: HostedSpec) -> Arc<Handle> {
        let mut functions = self.functions.lock();
        if let Some(handle) = functions.get(&spec.revision)
            && handle.0.spec == spec
        {
            return handle.clone();
        }
        let function = Function::new(spec.clone(), self.clone(), self.program_of(&spec));
        let handle = Arc::new(Handle(function));
        let before = functions.insert(spec.revision, handle.clone());
        drop(functions);
        if let Some(before) = before {
            handle.0.succeed(&before.0);
        }
        handle
    }

    /// The function of a revision, if the gateway prepared it.
    pub(crate) fn function(&self, revision: &ObjectKey) -> Option<Arc<Function>> {
        self.functions.lock().get(revision).map(|handle| handle.0.clone())
    }

    fn program_of(&self, spec: &HostedSpec) -> Program {
        let path = self.layout.revision(&spec.revision.namespace, &spec.function, &spec.revision.name);
        Program::new(
            Vec::new(),
            spec.env.clone(),
            spec.memory_bytes_max,
            ProgramLog::new(&self.logs, path, self.config.log_bytes_per_second),
            Arc::new(self.egress(spec.egress.clone())),
            self.budget.clone(),
        )
    }

    /// A way out by these rules.
    pub(crate) fn egress(&self, rules: Vec<EgressRule>) -> Egress {
        Egress::new(rules, self.config.egress.clone(), self.lookups.clone())
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// A moment as functions remember it, in milliseconds.
    pub(crate) fn moment(&self, now: Instant) -> u64 {
        millis(now - self.started)
    }

    /// A function came into memory: if that is too much, those go that were not used for longest.
    pub(crate) fn loaded(&self, function: &Arc<Function>) {
        self.loaded.lock().push(Arc::downgrade(function));
        if self.cache.bytes() <= self.config.loaded_bytes_max {
            return;
        }
        let mut candidates = self.functions_loaded();
        candidates.retain(|other| other.holds_alone() && !Arc::ptr_eq(other, function));
        candidates.sort_by_key(|other| other.used());
        for other in candidates {
            if self.cache.bytes() <= self.config.loaded_bytes_max {
                break;
            }
            tracing::debug!(revision = %other.spec.revision, "component dropped: others were used later");
            other.drop_component();
        }
        self.loaded.lock().retain(|other| other.upgrade().is_some_and(|other| other.is_loaded()));
    }

    /// Those that are loaded now. What is dropped of them is dropped without the lock: wiping an instance's memory
    /// takes its time.
    fn functions_loaded(&self) -> Vec<Arc<Function>> {
        self.loaded.lock().iter().filter_map(LoadedFunction::upgrade).collect()
    }

    /// A function left memory.
    pub(crate) fn unloaded(&self, function: &Function) {
        self.loaded.lock().retain(|other| !std::ptr::eq(other.as_ptr(), function));
    }

    /// A place for one more instance when none is free: one that an idle instance gives up, or the next that
    /// comes free. `None` if that did not happen until then.
    pub(crate) async fn slot(&self, slots: &Arc<Semaphore>, until: Instant) -> Option<OwnedSemaphorePermit> {
        // Said before looking: an instance that ends after the look is not kept (`Function::keep`).
        let _wanted = Wanted::new(&self.slots_wanted);
        self.reclaim_slot(slots);
        tokio::time::timeout_at(until, slots.clone().acquire_owned()).await.ok()?.ok()
    }

    /// Whether somebody waits for an instance slot.
    pub(crate) fn slot_is_wanted(&self) -> bool {
        self.slots_wanted.load(Ordering::SeqCst) > 0
    }

    /// Instances that wait for their function's next call.
    pub(crate) fn instances_idle(&self) -> usize {
        self.functions_loaded().iter().map(|function| function.idle()).sum()
    }

    /// Gives back one of these slots, if an idle instance holds one: that of the function not used for longest.
    fn reclaim_slot(&self, slots: &Arc<Semaphore>) {
        let mut idle = self.functions_loaded();
        idle.retain(|function| function.idle() > 0);
        idle.sort_by_key(|function| function.used());
        idle.iter().any(|function| function.drop_one_idle(slots));
    }

    /// Gives back the slots that idle instances hold.
    fn reclaim_idle(&self) {
        for function in self.functions_loaded() {
            function.drop_idle();
        }
    }
}

/// One who waits for an instance slot.
struct Wanted<'a>(&'a AtomicUsize);

impl<'a> Wanted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
