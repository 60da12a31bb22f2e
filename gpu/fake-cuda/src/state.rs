//! The state of the process: the shared file, current contexts, allocations, injected faults.
//!
//! Safety: out-parameters and handles come from C. Handles are numbers looked up in tables, never dereferenced.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    path::Path,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use mayfly_gpu_proto::{
    process::ProcessIdentity,
    sim::{FAULTS_ENV, STATE_ENV, SimFile, VISIBLE_DEVICES_ENV},
};

use crate::{
    CudaResult, INVALID_CONTEXT, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, OUT_OF_MEMORY, UNKNOWN,
};

/// The address of a function.
#[derive(Clone, Copy)]
pub struct FunctionAddress(pub *const ());

// SAFETY: the address of a function is only read.
unsafe impl Sync for FunctionAddress {}

impl fmt::Debug for FunctionAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FunctionAddress")
    }
}

#[derive(Debug)]
pub struct CudaState {
    pub sim: SimFile,
    /// The device of each ordinal, from `CUDA_VISIBLE_DEVICES`.
    visible: Vec<usize>,
    pub identity: ProcessIdentity,
    pub slot: usize,
    pub tables: Mutex<CudaTables>,
}

#[derive(Debug, Default)]
pub struct CudaTables {
    /// The device of each context by handle.
    pub contexts: HashMap<u64, usize>,
    /// The device and size in bytes of each allocation by address or handle.
    pub allocations: HashMap<u64, (usize, u64)>,
    /// The size in bytes of memory of other processes by the address at which it is opened.
    pub opened: HashMap<u64, u64>,
    pub streams: HashMap<u64, crate::stream::SimStream>,
    pub events: HashMap<u64, Option<u64>>,
    /// The GPU time of functions and of captured graphs, in ns.
    pub durations: HashMap<u64, u64>,
    pub pools: HashMap<u64, crate::pool::SimPool>,
    pub physical: HashMap<u64, crate::vmm::Physical>,
}

static STATE: OnceLock<Result<CudaState, CudaResult>> = OnceLock::new();
/// Whether the process is a forked child of a process that had called `cuInit`.
static IS_CHILD: AtomicBool = AtomicBool::new(false);
static HANDLES: AtomicU64 = AtomicU64::new(0x10_0000);

thread_local! {
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

extern "C" fn forget_in_child() {
    IS_CHILD.store(true, Relaxed);
}

/// Opens the state file, for `cuInit`.
pub fn init() -> Result<&'static CudaState, CudaResult> {
    let opened = STATE.get_or_init(|| {
        let path = std::env::var_os(STATE_ENV).ok_or(NO_DEVICE)?;
        let sim = SimFile::open(Path::new(&path)).map_err(|_| NO_DEVICE)?;
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(forget_in_child)) };
        let identity = ProcessIdentity::current();
        let slot = sim.claim(&identity).ok_or(OUT_OF_MEMORY)?;
        let visible = sim.visible(std::env::var(VISIBLE_DEVICES_ENV).ok().as_deref());
        Ok(CudaState { sim, visible, identity, slot, tables: Mutex::default() })
    });
    opened.as_ref().map_err(|code| *code)
}

/// The state after `cuInit`. As with the real driver, a forked child cannot use its parent's initialisation.
pub fn state() -> Result<&'static CudaState, CudaResult> {
    let state = STATE.get().ok_or(NOT_INITIALIZED)?.as_ref().map_err(|code| *code)?;
    if IS_CHILD.load(Relaxed) { Err(NOT_INITIALIZED) } else { Ok(state) }
}

pub fn new_handle() -> u64 {
    HANDLES.fetch_add(0x10, Relaxed)
}

impl CudaState {
    pub fn tables(&self) -> MutexGuard<'_, CudaTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn device_count(&self) -> usize {
        self.visible.len()
    }

    /// A device by its ordinal.
    pub fn ordinal(&self, device: i32) -> Result<usize, CudaResult> {
        let ordinal = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        let index = self.visible.get(ordinal).copied().ok_or(INVALID_DEVICE)?;
        self.working(index)
    }

    /// The ordinal of a device.
    pub fn ordinal_of(&self, index: usize) -> i32 {
        let ordinal = self.visible.iter().position(|known| *known == index);
        ordinal.and_then(|ordinal| i32::try_from(ordinal).ok()).unwrap_or(0)
    }

    fn working(&self, index: usize) -> Result<usize, CudaResult> {
        if self.sim.lost(index).is_some() { Err(UNKNOWN) } else { Ok(index) }
    }

    pub fn current(&self) -> Result<usize, CudaResult> {
        let context = current_context().ok_or(INVALID_CONTEXT)?;
        let device = self.tables().contexts.get(&context).copied().ok_or(INVALID_CONTEXT)?;
        self.working(device)
    }

    pub fn charge(&self, device: usize, bytes: u64) -> Result<(), CudaResult> {
        let ledger = self.sim.ledger();
        if ledger.charge(&self.identity, self.slot, device, bytes).is_ok() {
            return Ok(());
        }
        self.sim.reap(Some(self.slot));
        ledger.charge(&self.identity, self.slot, device, bytes).map_err(|_| OUT_OF_MEMORY)
    }

    pub fn release(&self, device: usize, bytes: u64) {
        self.sim.ledger().release(self.slot, device, bytes);
    }
}

pub fn current_context() -> Option<u64> {
    CURRENT.with_borrow(|stack| stack.last().copied()).filter(|context| *context != 0)
}

pub fn set_current(context: u64) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.push(context);
    });
}

pub fn push_current(context: u64) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

pub fn pop_current() -> Option<u64> {
    CURRENT.with_borrow_mut(Vec::pop)
}

/// The error code injected into this call by the environment.
pub fn fault(name: &str, calls: &AtomicU64) -> Option<CudaResult> {
    static FAULTS: OnceLock<Vec<(String, CudaResult, u64)>> = OnceLock::new();
    let faults = FAULTS.get_or_init(|| parse_faults(&std::env::var(FAULTS_ENV).unwrap_or_default()));
    if faults.is_empty() {
        return None;
    }
    let call = calls.fetch_add(1, Relaxed) + 1;
    faults.iter().find(|(function, _, from)| function == name && call >= *from).map(|(_, code, _)| *code)
}

fn parse_faults(text: &str) -> Vec<(String, CudaResult, u64)> {
    let parse = |item: &str| {
        let (name, rest) = item.split_once('=')?;
        let (code, from) = rest.split_once(':').unwrap_or((rest, "1"));
        Some((name.to_owned(), code.parse().ok()?, from.parse().ok()?))
    };
    text.split(',').filter_map(parse).collect()
}
