//! Components in memory. Each is compiled once, stored on disk by digest and engine version, mapped when a call or a
//! pod needs it, and released with its last reference.
//!
//! ```text
//! absent ──(first holder)──▶ loading ──▶ loaded ──(last holder)──▶ absent
//!                              │ mapped if a compiled file exists; otherwise fetched if the artifact store is a
//!                              │ cache that lacks it, compiled, stored, mapped
//! ```
//! Loading is single-flight: concurrent callers wait for the same result. Compilation runs in its own task: it outlives
//! the caller that started it, and is cancelled after [`ABANDONED_AFTER`] without a waiting caller.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher as _},
    io,
    path::Path,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use mayfly_api::Digest;
use mayfly_artifacts::{ArtifactPin, Artifacts, EngineHash};
use mayfly_runtime::CallError;
use parking_lot::Mutex;
use tokio::sync::{Notify, OnceCell};
use wasmtime::component::{Component, InstancePre};
use wasmtime_wasi_http::{p2, p3};

use crate::{
    ComponentReport, ComponentWorld,
    compile::{CompileError, CompileProgress, ComponentCompiler, Ticket},
    engine::{AsyncModel, Engines, Host, MEMORIES_PER_INSTANCE},
    failure,
    guest::StoreData,
    inspect,
    metrics::HostMetrics,
    slots::InstanceSlots,
};

mod file;

/// How long a compilation continues without a waiting caller. A caller may retry within this time; the callers of a
/// deleted function do not.
const ABANDONED_AFTER: Duration = Duration::from_secs(3);

/// Compiled files larger than this, in bytes, are verified and mapped on a blocking thread, so that other requests do
/// not wait.
const MAP_INLINE_BYTES_MAX: u64 = 4 << 20;

/// All components of this host.
pub(crate) struct ComponentCache {
    artifacts: Artifacts,
    engines: Engines,
    compiler: ComponentCompiler,
    metrics: Arc<HostMetrics>,
    known: Mutex<HashMap<Digest, Weak<CacheEntry>>>,
    bytes: Arc<AtomicU64>,
    /// Whether the files of other engine versions were removed.
    swept: AtomicBool,
}

/// One component. It stays in memory while an entry is held.
pub(crate) struct CacheEntry {
    digest: Digest,
    /// On a node whose artifact store is a cache: the component, compiled or not, stays in it.
    _pin: ArtifactPin,
    cache: Weak<ComponentCache>,
    loaded: OnceCell<LoadedComponent>,
    /// Its position in the compilation queue.
    ticket: Ticket,
    /// The number of callers that wait for the compilation.
    interested: AtomicUsize,
    /// Notified when the last waiting caller leaves.
    no_waiters: Notify,
}

/// Registers a waiting caller for as long as it is held.
struct WaiterGuard(Arc<CacheEntry>);

impl WaiterGuard {
    fn in_entry(entry: &Arc<CacheEntry>) -> Self {
        entry.interested.fetch_add(1, Ordering::SeqCst);
        Self(entry.clone())
    }
}

impl Drop for WaiterGuard {
    fn drop(&mut self) {
        if self.0.interested.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.no_waiters.notify_waiters();
        }
    }
}

/// A component that is in memory.
pub(crate) struct LoadedComponent {
    pub(crate) host: Arc<Host>,
    pub(crate) pre: Pre,
    bytes: u64,
    total: Arc<AtomicU64>,
}

/// A component ready to be instantiated, by its world.
pub(crate) enum Pre {
    HttpWasi0_2(p2::bindings::ProxyPre<StoreData>),
    HttpWasi0_3(p3::bindings::ServicePre<StoreData>),
    CommandWasi0_2(wasmtime_wasi::p2::bindings::CommandPre<StoreData>),
    CommandWasi0_3(wasmtime_wasi::p3::bindings::CommandPre<StoreData>),
}

/// Why a compiled file was not mapped.
enum NotMapped {
    /// Nothing usable is on disk: the component must be compiled.
    NotCompiled,
    /// The file exists and may be valid, but memory or file descriptors are exhausted.
    Short(io::Error),
}

/// Why a compiled file cannot be used.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is undamaged, but the engine rejects it.
    #[error("{0}")]
    Engine(CallError),
}

impl CacheEntry {
    /// Completes once there has been no waiting caller for [`ABANDONED_AFTER`].
    async fn abandoned(&self) {
        loop {
            let mut no_waiters = std::pin::pin!(self.no_waiters.notified());
            // Registered before the check, so that no change is missed.
            no_waiters.as_mut().enable();
            if self.interested.load(Ordering::SeqCst) > 0 {
                no_waiters.await;
            }
            tokio::time::sleep(ABANDONED_AFTER).await;
            if self.interested.load(Ordering::SeqCst) == 0 {
                return;
            }
        }
    }

    /// The component. Entries are handed out only after loading.
    pub(crate) fn loaded(&self) -> &LoadedComponent {
        self.loaded.get().unwrap_or_else(|| unreachable!("an entry is given out when it is loaded"))
    }
}

impl Drop for CacheEntry {
    fn drop(&mut self) {
        let Some(cache) = self.cache.upgrade() else { return };
        let mut known = cache.known.lock();
        // A new entry may have replaced this one.
        if known.get(&self.digest).is_some_and(|entry| entry.strong_count() == 0) {
            known.remove(&self.digest);
        }
    }
}

impl Drop for LoadedComponent {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl ComponentCache {
    pub(crate) fn new(
        artifacts: Artifacts,
        engines: Engines,
        compiler: ComponentCompiler,
        metrics: Arc<HostMetrics>,
    ) -> Self {
        let (known, bytes, swept) = (Mutex::default(), Arc::default(), AtomicBool::new(false));
        Self { artifacts, engines, compiler, metrics, known, bytes, swept }
    }

    /// Bytes of mapped machine code.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Number of components in memory.
    pub(crate) fn len(&self) -> usize {
        self.known.lock().len()
    }

    pub(crate) fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    pub(crate) fn slots(&self) -> &Arc<InstanceSlots> {
        self.engines.slots()
    }

    /// Number of existing instances.
    pub(crate) fn instances(&self) -> u64 {
        self.engines.instances()
    }

    /// Returns the component, loaded. An already compiled file is mapped inline, which is fast. Compilation time is
    /// charged to `namespace`.
    pub(crate) async fn get(
        self: &Arc<Self>,
        digest: Digest,
        namespace: &str,
    ) -> Result<Arc<CacheEntry>, CallError> {
        let entry = self.entry(digest);
        if entry.loaded.initialized() {
            return Ok(entry);
        }
        let engine = self.engine_hash()?;
        let mapped = entry.loaded.get_or_try_init(|| self.map_compiled(&digest, &engine)).await;
        match mapped.map(drop) {
            Ok(()) => return Ok(entry),
            Err(NotMapped::NotCompiled) => {}
            Err(NotMapped::Short(error)) => {
                tracing::warn!(%digest, %error, "cannot map the compiled file");
                return Err(overloaded());
            }
        }
        // Compilation may outlast a caller. In the caller's own future, each retry would start it again.
        let (cache, loading, namespace) = (self.clone(), entry.clone(), namespace.to_owned());
        let _waiter = WaiterGuard::in_entry(&entry);
        let loaded = tokio::spawn(async move {
            let load = || cache.load(&digest, &namespace, &loading.ticket, &engine);
            tokio::select! {
                loaded = loading.loaded.get_or_try_init(load) => loaded.map(drop),
                () = loading.abandoned() => {
                    tracing::info!(%digest, "compilation cancelled: no caller waits for the component any more");
                    Err(CallError::Internal(format!("compilation of {digest} was cancelled")))
                }
            }
        });
        loaded.await.map_err(|error| CallError::Internal(format!("cannot load {digest}: {error}")))??;
        Ok(entry)
    }

    /// The shared entry of a component.
    fn entry(self: &Arc<Self>, digest: Digest) -> Arc<CacheEntry> {
        let mut known = self.known.lock();
        if let Some(entry) = known.get(&digest).and_then(Weak::upgrade) {
            return entry;
        }
        let entry = Arc::new(CacheEntry {
            digest,
            _pin: self.artifacts.pin(&digest),
            cache: Arc::downgrade(self),
            loaded: OnceCell::new(),
            ticket: Ticket::default(),
            interested: AtomicUsize::new(0),
            no_waiters: Notify::new(),
        });
        known.insert(digest, Arc::downgrade(&entry));
        entry
    }

    /// Compiles a component unless a compiled file exists, and returns its world. Concurrent calls wait for the same
    /// compilation.
    pub(crate) async fn precompile(
        self: &Arc<Self>,
        digest: Digest,
        namespace: &str,
    ) -> Result<ComponentWorld, CallError> {
        let entry = self.get(digest, namespace).await?;
        let loaded = entry.loaded.get().ok_or_else(|| CallError::Internal("loaded, and not there".into()))?;
        Ok(loaded.pre.world())
    }

    /// The progress of a running compilation.
    pub(crate) fn compile_progress(&self, digest: &Digest) -> Option<CompileProgress> {
        let entry = self.known.lock().get(digest).and_then(Weak::upgrade)?;
        let compiling = !entry.loaded.initialized() && entry.interested.load(Ordering::SeqCst) > 0;
        compiling.then(|| self.compiler.progress(&entry.ticket))
    }

    /// Maps the compiled file, if it exists and is valid. Removes it only if it is damaged.
    async fn map_compiled(
        self: &Arc<Self>,
        digest: &Digest,
        engine: &EngineHash,
    ) -> Result<LoadedComponent, NotMapped> {
        let path = self.artifacts.derived_path(digest, engine).ok_or(NotMapped::NotCompiled)?;
        match self.map(&path).await {
            Ok(loaded) => return Ok(loaded),
            Err(FileError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                tracing::warn!(%digest, %error, "compiling again: the compiled file is corrupt");
                // Compilation may be queued: without the damaged file, further callers do not log this again.
                if let Err(error) = self.artifacts.forget_derived(digest, engine).await {
                    tracing::warn!(%digest, %error, "cannot remove the corrupt compiled file");
                }
            }
            Err(FileError::Io(error)) if file::is_shortage(&error) => return Err(NotMapped::Short(error)),
            Err(error) => {
                tracing::warn!(%digest, %error, "compiling again: cannot use the compiled file");
            }
        }
        Err(NotMapped::NotCompiled)
    }

    /// Compiles a component, stores the result, and maps it.
    async fn load(
        self: &Arc<Self>,
        digest: &Digest,
        namespace: &str,
        ticket: &Ticket,
        engine: &EngineHash,
    ) -> Result<LoadedComponent, CallError> {
        let (wasm, report) = self.read(digest).await?;
        let path = self.compile(digest, (namespace, ticket), engine, wasm, &report).await?;
        self.map(&path).await.map_err(|error| match error {
            FileError::Io(error) if file::is_shortage(&error) => overloaded(),
            FileError::Io(error) => CallError::Internal(error.to_string()),
            FileError::Engine(error) => error,
        })
    }

    async fn read(&self, digest: &Digest) -> Result<(Vec<u8>, ComponentReport), CallError> {
        let path = self.artifacts.get(digest).await.map_err(|error| failure::fetch_error(&error))?;
        let wasm = tokio::fs::read(&path).await.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CallError::ComponentMissing(*digest),
            _ => CallError::Internal(format!("cannot read component {digest}: {error}")),
        })?;
        let report = inspect(&wasm).map_err(|refused| CallError::ComponentInvalid(refused.to_string()))?;
        Ok((wasm, report))
    }

    async fn compile(
        &self,
        digest: &Digest,
        (namespace, ticket): (&str, &Ticket),
        engine: &EngineHash,
        wasm: Vec<u8>,
        report: &ComponentReport,
    ) -> Result<std::path::PathBuf, CallError> {
        let world = report.worlds[0];
        let model = model(world);
        let host = self.host(model)?;
        let compiled = self.compiler.compile(namespace, ticket, &host.engine, model, wasm).await;
        let compiled = compiled.map_err(|error| match error {
            CompileError::Full => overloaded(),
            CompileError::Invalid(why) => CallError::ComponentInvalid(why),
            CompileError::Lost(_) => CallError::Internal(error.to_string()),
        })?;
        self.metrics.compiled(compiled.took);
        let bytes = compiled.machine_code.len();
        let took_ms = crate::function::millis(compiled.took);
        tracing::info!(%digest, %world, bytes, took_ms, "component compiled");
        let content = file::append_trailer(compiled.machine_code, world);
        let put = self.artifacts.put_derived(digest, engine, content).await;
        self.forget_other_engines(engine).await;
        put.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CallError::ComponentMissing(*digest),
            _ => CallError::Internal(format!("cannot store the compiled file of {digest}: {error}")),
        })
    }

    /// Removes compiled files of other engine versions that no process maps any more. Runs once.
    async fn forget_other_engines(&self, engine: &EngineHash) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        match self.artifacts.remove_other_engines(engine).await {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "removed compiled files of other engine versions"),
            Err(error) => tracing::warn!(%error, "cannot remove compiled files of other engine versions"),
        }
    }

    /// Verifies a compiled file, maps it and links it.
    async fn map(self: &Arc<Self>, path: &Path) -> Result<LoadedComponent, FileError> {
        let opened = file::open(path)?;
        if opened.bytes() <= MAP_INLINE_BYTES_MAX {
            return self.map_opened(opened);
        }
        let cache = self.clone();
        let mapping = tokio::task::spawn_blocking(move || cache.map_opened(opened));
        mapping.await.map_err(|error| FileError::Engine(CallError::Internal(error.to_string())))?
    }

    fn map_opened(&self, opened: file::Opened) -> Result<LoadedComponent, FileError> {
        let checked = opened.check()?;
        let host = self.host(model(checked.world)).map_err(FileError::Engine)?;
        map(host, &checked, self.bytes.clone())
    }

    fn host(&self, model: AsyncModel) -> Result<Arc<Host>, CallError> {
        self.engines.get(model).map_err(|error| CallError::Internal(format!("no engine: {error:#}")))
    }

    /// Names the directory of compiled files of both engines: a component has one async model, which each file records.
    /// wasmtime itself rejects a file of an engine with other settings.
    fn engine_hash(&self) -> Result<EngineHash, CallError> {
        let host = self.host(AsyncModel::Sync)?;
        let mut hasher = DefaultHasher::new();
        file::VERSION.hash(&mut hasher);
        host.engine.precompile_compatibility_hash().hash(&mut hasher);
        Ok(hasher.finish().into())
    }
}

fn overloaded() -> CallError {
    CallError::Overloaded { retry_after: failure::RETRY_AFTER }
}

fn model(world: ComponentWorld) -> AsyncModel {
    match world {
        ComponentWorld::HttpWasi0_2 | ComponentWorld::CommandWasi0_2 => AsyncModel::Sync,
        ComponentWorld::HttpWasi0_3 | ComponentWorld::CommandWasi0_3 => AsyncModel::Async,
    }
}

#[expect(
    unsafe_code,
    reason = "wasmtime cannot verify the origin of a compiled file; see the SAFETY comment"
)]
fn map(
    host: Arc<Host>,
    checked: &file::Checked,
    total: Arc<AtomicU64>,
) -> Result<LoadedComponent, FileError> {
    // SAFETY: the file must be the output of an engine's `precompile_component`, and must not change while it is
    // mapped. It lies in the artifact store's own directory, where only this host writes compiled files, each under a
    // name that it gets once complete and that is never reused; `Opened::check` verified the trailer that
    // `file::append_trailer` appended, with the checksum over the whole content; wasmtime also checks its own header
    // (version, settings, processor). Removing the file does not affect the mapping.
    let component = unsafe { Component::deserialize_file(&host.engine, &checked.path) };
    let component = component.map_err(|error| engine_error(&error))?;
    let invalid = |why: String| FileError::Engine(CallError::ComponentInvalid(why));
    // A component that imports modules cannot report its resources; its limits apply at instantiation instead.
    let memories = component.resources_required().map_or(0, |required| required.num_memories);
    if memories as usize > MEMORIES_PER_INSTANCE {
        return Err(invalid(format!(
            "it has {memories} linear memories; an instance has at most {MEMORIES_PER_INSTANCE} here"
        )));
    }
    let pre = host.linker.instantiate_pre(&component);
    let pre = pre.and_then(|pre| Pre::new(checked.world, pre));
    let pre = pre.map_err(|error| invalid(format!("{error:#}")))?;
    total.fetch_add(checked.bytes, Ordering::Relaxed);
    Ok(LoadedComponent { host, pre, bytes: checked.bytes, total })
}

/// An error of mapping a file: the system's error if that is the cause.
fn engine_error(error: &wasmtime::Error) -> FileError {
    let of_std = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    let errno =
        of_std.or_else(|| error.downcast_ref::<rustix::io::Errno>().map(|errno| errno.raw_os_error()));
    match errno {
        Some(errno) => FileError::Io(io::Error::from_raw_os_error(errno)),
        None => FileError::Engine(CallError::Internal(format!("{error:#}"))),
    }
}

impl Pre {
    fn world(&self) -> ComponentWorld {
        match self {
            Self::HttpWasi0_2(_) => ComponentWorld::HttpWasi0_2,
            Self::HttpWasi0_3(_) => ComponentWorld::HttpWasi0_3,
            Self::CommandWasi0_2(_) => ComponentWorld::CommandWasi0_2,
            Self::CommandWasi0_3(_) => ComponentWorld::CommandWasi0_3,
        }
    }

    fn new(world: ComponentWorld, pre: InstancePre<StoreData>) -> wasmtime::Result<Self> {
        Ok(match world {
            ComponentWorld::HttpWasi0_2 => Self::HttpWasi0_2(p2::bindings::ProxyPre::new(pre)?),
            ComponentWorld::HttpWasi0_3 => Self::HttpWasi0_3(p3::bindings::ServicePre::new(pre)?),
            ComponentWorld::CommandWasi0_2 => {
                Self::CommandWasi0_2(wasmtime_wasi::p2::bindings::CommandPre::new(pre)?)
            }
            ComponentWorld::CommandWasi0_3 => {
                Self::CommandWasi0_3(wasmtime_wasi::p3::bindings::CommandPre::new(pre)?)
            }
        })
    }
}
