//! The host: the state shared by all functions and pods, and the registry of functions.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use mayfly_api::{Digest, ObjectKey, egress::EgressRule};
use mayfly_artifacts::Artifacts;
use mayfly_runtime::{
    CallError, ClusterHosts, ConnectionPolicy, FunctionHost, HostedFunction, HostedSpec,
    logs::{LogLayout, LogWriter},
};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::{
    ComponentWorld, Config,
    cache::ComponentCache,
    capability::{
        egress::Egress,
        lookup::HostLookups,
        output::ProgramLog,
        policy::{HostPolicies, PodPolicies},
    },
    compile::{CompileProgress, ComponentCompiler},
    cpu::{EpochClock, FairPool, Lane},
    engine::Engines,
    function::{Function, Handle, millis},
    guest::{GuestProgram, MemoryBudget},
    machine,
    metrics::HostMetrics,
    pods::Pods,
    slots::{InstanceSlot, SlotShare},
};

/// Runs components: functions that the gateway calls, and pods that the kubelet starts.
#[derive(Clone)]
pub struct WasmHost {
    shared: Arc<HostContext>,
    pub(crate) pods: Arc<Pods>,
}

impl std::fmt::Debug for WasmHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WasmHost").finish_non_exhaustive()
    }
}

/// Why a host cannot be created.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HostCreateError {
    #[error("the wasm host's setting {setting} cannot be {value}: {why}")]
    Setting { setting: &'static str, value: String, why: &'static str },
}

/// The state that functions and pods share.
pub(crate) struct HostContext {
    pub(crate) config: Arc<Config>,
    pub(crate) cache: Arc<ComponentCache>,
    pub(crate) metrics: Arc<HostMetrics>,
    pub(crate) logs: LogWriter,
    pub(crate) layout: LogLayout,
    pub(crate) budget: Arc<MemoryBudget>,
    pub(crate) cpu: Arc<FairPool>,
    lookups: HostLookups,
    pub(crate) policies: HostPolicies,
    started: Instant,
    stopping: AtomicBool,
    functions: Mutex<HashMap<ObjectKey, Arc<Handle>>>,
    /// Functions in memory; may contain some that were unloaded recently.
    loaded: Mutex<Vec<Weak<Function>>>,
}

impl WasmHost {
    /// Creates the host. Fast: engines, pools and compilers are created when they are first needed.
    pub fn create(
        config: Config,
        artifacts: Artifacts,
        logs: LogWriter,
        layout: LogLayout,
        registry: &mut Registry,
    ) -> Result<Self, HostCreateError> {
        config.check().map_err(|(setting, value, why)| HostCreateError::Setting { setting, value, why })?;
        let config = Arc::new(config);
        let memory_bytes = machine::memory_bytes();
        let metrics = HostMetrics::register(registry);
        let clock = EpochClock::new(config.tick);
        let cpu = Arc::new(FairPool::new(config.long_call_threads(), clock.clone()));
        let engines = Engines::new(config.clone(), memory_bytes, clock);
        let compiler = ComponentCompiler::new(&config, memory_bytes);
        let cache = Arc::new(ComponentCache::new(artifacts, engines, compiler, metrics.clone()));
        let budget = Arc::new(MemoryBudget::new(config.memory_bytes_max.unwrap_or(memory_bytes / 2)));
        let shared = Arc::new(HostContext {
            config,
            cache,
            metrics,
            logs,
            layout,
            budget,
            cpu,
            lookups: HostLookups::default(),
            policies: HostPolicies::default(),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
            functions: Mutex::default(),
            loaded: Mutex::default(),
        });
        crate::metrics::register_gauges(registry, &shared);
        let pods = Arc::new(Pods::new(shared.clone()));
        Ok(Self { shared, pods })
    }

    /// Compiles a component ahead of its first call, for a namespace, and returns its world.
    pub async fn precompile(&self, digest: &Digest, namespace: &str) -> Result<ComponentWorld, CallError> {
        self.shared.cache.precompile(*digest, namespace).await
    }

    /// The progress of compiling a component, if it is being compiled.
    pub fn compile_progress(&self, digest: &Digest) -> Option<CompileProgress> {
        self.shared.cache.compile_progress(digest)
    }

    /// Sets the names of Services for outbound requests. Called once.
    pub fn attach_names(&self, names: Arc<dyn ClusterHosts>) {
        self.shared.lookups.attach(names);
    }

    /// Makes the cluster's NetworkPolicies known to the connections of guests and of pods. Once.
    pub fn attach_policies(&self, policies: Arc<dyn ConnectionPolicy>) {
        self.shared.policies.attach(policies);
    }

    /// Refuses every later call. Calls in flight continue to their end or their deadline.
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

impl HostContext {
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
            handle.0.take_over(&before.0);
        }
        handle
    }

    /// The function of a revision, if the gateway prepared it.
    pub(crate) fn function(&self, revision: &ObjectKey) -> Option<Arc<Function>> {
        self.functions.lock().get(revision).map(|handle| handle.0.clone())
    }

    fn program_of(&self, spec: &HostedSpec) -> GuestProgram {
        let path = self.layout.revision(&spec.revision.namespace, &spec.function, &spec.revision.name);
        GuestProgram::new(
            Vec::new(),
            spec.env.clone(),
            spec.memory_bytes_max,
            ProgramLog::new(
                &self.logs,
                path,
                spec.log_bytes_per_second.unwrap_or(self.config.log_bytes_per_second),
                &self.metrics.log_lines_dropped,
            ),
            Arc::new(
                self.egress(spec.egress.clone(), self.policies.of_revision(&spec.revision, &spec.function)),
            ),
            self.lane(&spec.revision.namespace, &spec.function),
            self.budget.clone(),
        )
    }

    /// The processor share of a function or a pod.
    pub(crate) fn lane(&self, namespace: &str, function: &str) -> Arc<Lane> {
        Lane::new(self.cpu.clone(), namespace, function)
    }

    /// Outbound HTTP with these rules and policies.
    pub(crate) fn egress(&self, rules: Vec<EgressRule>, policies: PodPolicies) -> Egress {
        Egress::new(rules, self.config.egress.clone(), self.lookups.clone(), policies)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Converts a time to milliseconds after the host's start.
    pub(crate) fn millis_since_start(&self, now: Instant) -> u64 {
        millis(now - self.started)
    }

    /// Called when a function was loaded. Unloads the least recently used functions while the limit is exceeded.
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
            tracing::debug!(revision = %other.spec.revision, "component unloaded: least recently used");
            other.drop_component();
        }
        self.loaded.lock().retain(|other| other.upgrade().is_some_and(|other| other.is_loaded()));
    }

    /// The functions that are loaded now. The lock is released before they are dropped, because wiping an instance's
    /// memory takes time.
    fn functions_loaded(&self) -> Vec<Arc<Function>> {
        self.loaded.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Called when a function was unloaded.
    pub(crate) fn unloaded(&self, function: &Function) {
        self.loaded.lock().retain(|other| !std::ptr::eq(other.as_ptr(), function));
    }

    /// Waits for a slot when none is free: one released by an idle instance, or the next freed one. `None` if there was
    /// none by `until`.
    pub(crate) async fn slot(&self, share: &Arc<SlotShare>, until: Instant) -> Option<InstanceSlot> {
        // Registered before the check: an instance that ends after the check is not kept (`Function::keep`).
        let waiting = share.wait();
        self.reclaim_slot();
        waiting.slot(until).await
    }

    /// Number of idle instances.
    pub(crate) fn instances_idle(&self) -> usize {
        self.functions_loaded().iter().map(|function| function.idle()).sum()
    }

    /// Releases the slot of an idle instance, if there is one, of the least recently used function.
    fn reclaim_slot(&self) {
        let mut idle = self.functions_loaded();
        idle.retain(|function| function.idle() > 0);
        idle.sort_by_key(|function| function.used());
        idle.iter().any(|function| function.drop_one_idle());
    }

    /// Releases the slots of all idle instances.
    fn reclaim_idle(&self) {
        for function in self.functions_loaded() {
            function.drop_idle();
        }
    }
}
