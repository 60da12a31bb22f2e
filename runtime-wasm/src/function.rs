//! One revision on this host, from a request to its response.

mod calls;

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use futures::future::BoxFuture;
use http::Request;
use mayfly_runtime::{Answer, Body, CallError, HostedFunction, HostedSpec};
use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;
use wasmtime_wasi_http::{p2::bindings::Proxy, p3::bindings::Service};

use crate::{
    cache::CacheEntry,
    failure,
    guest::GuestProgram,
    host::HostContext,
    metrics::{CallOutcome, FunctionCalls},
    reuse::Idle,
    slots::SlotShare,
};

/// A revision, as the handle that the gateway keeps; takes little memory until the first call.
pub(crate) struct Function {
    pub(crate) spec: HostedSpec,
    host: Arc<HostContext>,
    program: Arc<GuestProgram>,
    calls: Arc<FunctionCalls>,
    share: Arc<SlotShare>,
    component: ArcSwapOption<CacheEntry>,
    /// The last use, in milliseconds after the host's start.
    used: AtomicU64,
    warm: OnceLock<Warm>,
}

/// The state that a revision gets at its first call.
struct Warm {
    answered: Counter,
    idle_0_2: Idle<Proxy>,
    idle_0_3: Idle<Service>,
}

impl Function {
    pub(crate) fn new(spec: HostedSpec, host: Arc<HostContext>, program: GuestProgram) -> Arc<Self> {
        let calls = host.metrics.function(&spec.revision.namespace, &spec.function);
        let share = host.cache.slots().share(&spec.revision.namespace, &spec.function);
        Arc::new(Self {
            spec,
            host,
            program: Arc::new(program),
            calls,
            share,
            component: ArcSwapOption::empty(),
            used: AtomicU64::new(0),
            warm: OnceLock::new(),
        })
    }

    fn warm(&self) -> &Warm {
        self.warm.get_or_init(|| Warm {
            answered: self.counter(CallOutcome::Answered),
            idle_0_2: Idle::new(&self.host.config),
            idle_0_3: Idle::new(&self.host.config),
        })
    }

    fn counter(&self, outcome: CallOutcome) -> Counter {
        self.calls.counter(outcome)
    }

    /// The component; loads it if necessary.
    pub(crate) async fn component(self: &Arc<Self>) -> Result<Arc<CacheEntry>, CallError> {
        if let Some(entry) = self.component.load_full() {
            return Ok(entry);
        }
        let entry = self.host.cache.get(self.spec.component, &self.spec.revision.namespace).await?;
        if let Some(files) = &self.spec.files
            && self.program.root().is_none()
        {
            let folder = self.host.cache.artifacts().unpacked(files).await;
            self.program.set_root(folder.map_err(|error| failure::unpack_error(&error))?);
        }
        if self.component.swap(Some(entry.clone())).is_none() {
            self.host.loaded(self);
        }
        Ok(entry)
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.component.load().is_some()
    }

    /// Whether no other holder (a pod or a running call) references the component.
    pub(crate) fn holds_alone(&self) -> bool {
        self.component.load().as_ref().is_some_and(|entry| Arc::strong_count(entry) == 1)
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Drops the component, and the idle instances with it.
    pub(crate) fn drop_component(&self) {
        self.component.store(None);
        self.drop_idle();
    }

    /// Drops the idle instances, which releases their slots.
    pub(crate) fn drop_idle(&self) {
        if let Some(warm) = self.warm.get() {
            warm.idle_0_2.clear();
            warm.idle_0_3.clear();
        }
    }

    /// Bytes of linear memory used by its instances.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.program.memory_bytes()
    }

    pub(crate) fn program(&self) -> &Arc<GuestProgram> {
        &self.program
    }

    /// Number of idle instances.
    pub(crate) fn idle(&self) -> usize {
        self.warm.get().map_or(0, |warm| warm.idle_0_2.len() + warm.idle_0_3.len())
    }

    /// Drops one idle instance; returns whether there was one.
    pub(crate) fn drop_one_idle(&self) -> bool {
        self.warm.get().is_some_and(|warm| warm.idle_0_2.drop_one() || warm.idle_0_3.drop_one())
    }

    /// Takes over the loaded component of `before`, the revision with an earlier spec, if component and files are
    /// unchanged; drops it in `before`.
    pub(crate) fn take_over(self: &Arc<Self>, before: &Function) {
        if before.spec.component == self.spec.component
            && before.spec.files == self.spec.files
            && let Some(entry) = before.component.load_full()
        {
            if let Some(folder) = before.program.root() {
                self.program.set_root(folder.clone());
            }
            self.component.store(Some(entry));
            self.host.loaded(self);
        }
        before.drop_component();
        self.host.unloaded(before);
    }
}

/// The gateway's handle of a function.
pub(crate) struct Handle(pub(crate) Arc<Function>);

impl HostedFunction for Handle {
    fn call(
        &self,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, CallError>> {
        self.0.clone().call(request, deadline)
    }

    fn load(&self) -> BoxFuture<'static, Result<(), CallError>> {
        let function = self.0.clone();
        Box::pin(async move { function.component().await.map(|_| ()) })
    }

    fn is_loaded(&self) -> bool {
        self.0.is_loaded()
    }

    fn unload(&self) {
        self.0.drop_component();
        self.0.host.unloaded(&self.0);
    }
}

/// A duration in whole milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
