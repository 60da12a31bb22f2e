//! The host's state of one instance: its limits, its handles and its capabilities.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use mayfly_artifacts::PinnedPath;
use mayfly_runtime::{CallError, ContainerFiles, Mount, component::TABLE_ELEMENTS_MAX, logs::Stream};
use tokio::sync::watch;
use wasmtime::ResourceLimiter;
use wasmtime_wasi::{FsPerms, ResourceTable, WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView, cli::InputFile};
use wasmtime_wasi_config::WasiConfigVariables;
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpView};

use crate::{
    capability::{
        egress::{Egress, Outbound},
        output::{GuestOutput, ProgramLog},
        random,
    },
    cpu::Lane,
    engine::MEMORIES_PER_INSTANCE,
    record::Recording,
};

mod host_memory;

pub(crate) use host_memory::{BODY_CHUNK_BYTES_MAX, CONCURRENT_MAX};

/// The size of a table's element.
const TABLE_ELEMENT_BYTES: usize = 8;
/// The bytes that the host holds for each guest free of charge: a few messages with their bodies, and an eighth
/// of the expected use of an instance.
const HELD_BYTES_FREE: u64 = 1 << 20;
/// Core instances and tables that one component may have.
const CORE_INSTANCES_MAX: usize = 200;
const TABLES_MAX: usize = 200;

/// Everything that all instances of one revision (or container) share.
pub(crate) struct GuestProgram {
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) memory_bytes_max: u64,
    pub(crate) log: ProgramLog,
    pub(crate) egress: Arc<Egress>,
    /// Its processor share.
    pub(crate) lane: Arc<Lane>,
    budget: Arc<MemoryBudget>,
    /// Bytes of memory used by all its instances.
    memory_bytes: AtomicU64,
    /// Set when the pod has ended, which ends its guests.
    over: watch::Sender<bool>,
    /// The folders of its pod's volumes.
    volumes: Vec<Mount>,
    /// The folders and the stdin of a job.
    files: Option<ContainerFiles>,
    /// The folder with the function's files, which guests see as `/`. Set before the first call.
    root: OnceLock<PinnedPath>,
    /// The environment as `wasi:config`. Created at its first use.
    config: OnceLock<WasiConfigVariables>,
}

impl GuestProgram {
    pub(crate) fn new(
        args: Vec<String>,
        env: Vec<(String, String)>,
        memory_bytes_max: u64,
        log: ProgramLog,
        egress: Arc<Egress>,
        lane: Arc<Lane>,
        budget: Arc<MemoryBudget>,
    ) -> Self {
        let (memory_bytes, config) = (AtomicU64::new(0), OnceLock::new());
        let (volumes, files) = (Vec::new(), None);
        let (over, root) = (watch::Sender::new(false), OnceLock::new());
        Self {
            args,
            env,
            memory_bytes_max,
            log,
            egress,
            lane,
            budget,
            memory_bytes,
            over,
            volumes,
            files,
            root,
            config,
        }
    }

    /// Adds the folders of a pod's volumes, and the folders and the input of a job.
    pub(crate) fn with_files(self, volumes: Vec<Mount>, files: Option<ContainerFiles>) -> Self {
        Self { volumes, files, ..self }
    }

    pub(crate) fn root(&self) -> Option<&PinnedPath> {
        self.root.get()
    }

    /// Sets the folder of the function's files, once: an archive has one folder.
    pub(crate) fn set_root(&self, folder: PinnedPath) {
        let _ = self.root.set(folder);
    }

    /// Opens the folders and the input. They exist when the program is started; if one cannot be opened, an error is
    /// logged and the guest runs without it.
    fn open_files(&self, builder: &mut WasiCtxBuilder) {
        if let Some(folder) = self.root.get()
            && let Err(error) = builder.preopened_dir(folder, "/", FsPerms::ReadOnly)
        {
            self.log.log_host_message(&format!("cannot open the function's files: {error}"));
        }
        let of_job = self.files.iter().flat_map(|files| &files.mounts);
        for mount in of_job.chain(&self.volumes) {
            let perms = if mount.read_only { FsPerms::ReadOnly } else { FsPerms::ReadWrite };
            if let Err(error) = builder.preopened_dir(&mount.host, &mount.guest, perms) {
                self.log.log_host_message(&format!("cannot open {}: {error}", mount.guest));
            }
        }
        let Some(files) = &self.files else { return };
        match std::fs::File::open(&files.stdin) {
            Ok(file) => drop(builder.stdin(InputFile::new(file))),
            Err(error) => self.log.log_host_message(&format!("cannot open the standard input: {error}")),
        }
    }

    /// Bytes of memory that its instances currently use.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    /// Ends guests that continue after their answers.
    pub(crate) fn end(&self) {
        self.over.send_replace(true);
    }

    /// A receiver that becomes true when its guests must end.
    pub(crate) fn over(&self) -> watch::Receiver<bool> {
        self.over.subscribe()
    }

    pub(crate) fn config(&self) -> &WasiConfigVariables {
        self.config.get_or_init(|| self.env.iter().cloned().collect())
    }
}

/// The data of a store.
pub(crate) struct StoreData {
    pub(crate) memory: MemoryUse,
    pub(crate) program: Arc<GuestProgram>,
    table: ResourceTable,
    /// Created at its first use; many guests never use it.
    wasi: Option<Box<Wasi>>,
    http: WasiHttpCtx,
    outbound: Outbound,
}

struct Wasi {
    ctx: WasiCtx,
    /// Its stdout and stderr.
    outputs: [GuestOutput; 2],
}

impl StoreData {
    /// Ends the output of a request before the next one, which may be of another caller.
    pub(crate) fn end_outputs(&self) {
        self.wasi.iter().flat_map(|wasi| &wasi.outputs).for_each(GuestOutput::end_request);
    }

    /// Called when a running guest yields its thread: charges the bytes that the host holds for it like memory. An
    /// error ends the guest.
    pub(crate) fn tick(&mut self) -> wasmtime::Result<()> {
        if self.memory.hold(host_memory::bytes(&mut self.table)) {
            return Ok(());
        }
        Err(wasmtime::format_err!("the host holds too much memory for it: headers, bodies, handles"))
    }

    /// Whether the handles that the guest still has between two calls are half of the allowed ones, or hold a quarter
    /// of its memory on the host.
    pub(crate) fn retains_much(&mut self) -> bool {
        self.table.iter_mut().count() > host_memory::HANDLES_MAX / 2
            || host_memory::bytes(&mut self.table) > self.memory.max() / 4
    }

    pub(crate) fn new(program: Arc<GuestProgram>) -> Self {
        let mut table = ResourceTable::new();
        table.set_max_capacity(host_memory::HANDLES_MAX);
        let mut http = WasiHttpCtx::new();
        http.set_field_size_limit(host_memory::FIELD_BYTES_MAX);
        Self {
            memory: MemoryUse::new(program.clone()),
            table,
            wasi: None,
            http,
            outbound: Outbound::new(program.clone()),
            program,
        }
    }
}

impl WasiView for StoreData {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let program = &self.program;
        let wasi = self.wasi.get_or_insert_with(|| {
            let mut builder = WasiCtx::builder();
            builder.args(&program.args).envs(&program.env).max_random_size(random::PIECE_BYTES);
            // No address is reachable, but an unconnected socket would still use a file descriptor of the host.
            builder.allow_tcp(false).allow_udp(false);
            let outputs = [Stream::Stdout, Stream::Stderr].map(|stream| program.log.output(stream));
            builder.stdout(outputs[0].clone()).stderr(outputs[1].clone());
            program.open_files(&mut builder);
            Box::new(Wasi { ctx: builder.build(), outputs })
        });
        WasiCtxView { ctx: &mut wasi.ctx, table: &mut self.table }
    }
}

impl WasiHttpView for StoreData {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView { hooks: &mut self.outbound, table: &mut self.table, ctx: &mut self.http }
    }
}

/// Bytes of memory used by all instances of the host.
pub(crate) struct MemoryBudget {
    used: AtomicU64,
    max: u64,
}

impl MemoryBudget {
    pub(crate) fn new(max: u64) -> Self {
        Self { used: AtomicU64::new(0), max }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= self.max;
        if !fits {
            self.give(bytes);
        }
        fits
    }

    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The limit that denied a guest more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryRefusal {
    /// The guest's own limit.
    Limit,
    /// The host's limit.
    Host,
}

/// Bytes used by one instance, over all its memories and tables, including what the host holds for it.
pub(crate) struct MemoryUse {
    /// Bytes of linear memories and tables, which never shrink.
    used: u64,
    /// The charged bytes that the host holds for it.
    held: u64,
    refused: Option<MemoryRefusal>,
    program: Arc<GuestProgram>,
    /// The record of the current call.
    recording: Recording,
}

impl MemoryUse {
    fn new(program: Arc<GuestProgram>) -> Self {
        Self { used: 0, held: 0, refused: None, program, recording: Recording::default() }
    }

    /// Bytes of its memories and tables. They never shrink, so this is also the peak.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// The limit that denied the last failed growth, if any failed.
    pub(crate) fn refused(&self) -> Option<MemoryRefusal> {
        self.refused
    }

    /// Assigns the instance to a call, whose record gets the memory usage at the end, also if the instance is dropped
    /// before the guest ends.
    pub(crate) fn record(&mut self, recording: &Recording) {
        self.recording = recording.clone();
    }

    /// Begins a call: growth that failed in earlier calls does not explain its failure.
    pub(crate) fn begin_call(&mut self) {
        self.refused = None;
        self.recording.instantiated();
    }

    /// Ends a call. The instance may be reused for other calls.
    pub(crate) fn end_call(&mut self, called: &Result<(), CallError>) {
        let recording = std::mem::take(&mut self.recording);
        if let Err(error) = called {
            recording.failed(error);
        }
        recording.guest_ended(self.used, true);
    }

    pub(crate) fn max(&self) -> u64 {
        self.program.memory_bytes_max
    }

    /// Charges the program and the host; returns whether both allow it.
    fn take(&mut self, more: u64) -> bool {
        if self.used.saturating_add(self.held).saturating_add(more) > self.max() {
            self.refused = Some(MemoryRefusal::Limit);
            return false;
        }
        if !self.program.budget.take(more) {
            self.refused = Some(MemoryRefusal::Host);
            return false;
        }
        self.program.memory_bytes.fetch_add(more, Ordering::Relaxed);
        true
    }

    fn give(&self, bytes: u64) {
        self.program.budget.give(bytes);
        self.program.memory_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Sets the bytes that the host holds; returns whether the limits allow them.
    fn hold(&mut self, bytes: u64) -> bool {
        let charged = bytes.saturating_sub(HELD_BYTES_FREE);
        match charged.checked_sub(self.held) {
            None => self.give(self.held - charged),
            Some(0) => {}
            Some(more) if !self.take(more) => return false,
            Some(_) => {}
        }
        self.held = charged;
        true
    }
}

impl Drop for MemoryUse {
    fn drop(&mut self) {
        self.recording.guest_ended(self.used, false);
        self.give(self.used + self.held);
    }
}

impl ResourceLimiter for MemoryUse {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        // Growth beyond the memory's own maximum fails in any case, without a limit of the host.
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        let more = desired.saturating_sub(current) as u64;
        let allowed = self.take(more);
        self.used += if allowed { more } else { 0 };
        Ok(allowed)
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired > TABLE_ELEMENTS_MAX || maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        let more = (desired.saturating_sub(current) * TABLE_ELEMENT_BYTES) as u64;
        let allowed = self.take(more);
        self.used += if allowed { more } else { 0 };
        Ok(allowed)
    }

    fn instances(&self) -> usize {
        CORE_INSTANCES_MAX
    }

    fn memories(&self) -> usize {
        MEMORIES_PER_INSTANCE
    }

    fn tables(&self) -> usize {
        TABLES_MAX
    }
}
