//! Launches: delayed while the container has used more GPU time than its quota.
//!
//! The cost of a launch is measured with a pair of events around it, for the first launches of a function and then for
//! some; the others cost the average of the last measurements. The estimate is spent at the launch, and the difference
//! when the events have completed, which later launches check without waiting. Launches into a stream that is being
//! captured run nothing and cost nothing; the launch of the graph does.
//!
//! While other containers use the device, their time slices lengthen some of the measurements, on an H200 by several
//! times the time of a kernel. Then the longest quarter of the measurements is left out, and a launch costs the
//! estimate even if it is measured.
//!
//! Costs on an H200, driver 580: 1.2 µs of processor time to record an event, 0.3 to 0.5 µs to query one; a pair of
//! events occupies the GPU for 4.5 µs, and measures 2.2 µs more than the kernel takes among others.
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name. Events are created by the shim.

use std::{
    collections::{HashMap, VecDeque},
    ffi::{c_int, c_uint, c_void},
    hash::{BuildHasherDefault, Hasher},
    sync::{MutexGuard, PoisonError, atomic::Ordering::Relaxed},
    thread,
    time::Duration,
};

use mayfly_gpu_proto::process::monotonic_ns;

use crate::{
    DriverCode, SUCCESS,
    account::{Account, ProcessLimits, limits},
    graph, hooks, imports, view,
};

/// The number of first launches of a function that are all measured, for a first estimate.
const MEASURED_FIRST: u64 = 8;
/// The GPU time of a function's launches between two measurements, so that these cost half a percent of it.
const MEASURED_EVERY_NS: i64 = 900_000;
/// The bounds of the number of launches between two measurements.
const MEASURED_EVERY: [i64; 2] = [4, 256];
/// The number of measurements from which the estimate is made.
const RECENT: usize = 8;
/// The surplus of a measurement.
const EVENTS_NS: i64 = 2_000;
/// The time between two queries for completed measurements.
const SETTLED_EVERY_NS: u64 = 200_000;
/// The number of pending measurements of a process; beyond it, launches are not measured.
const PENDING_MAX: usize = 64;
/// The number of functions with an estimate; a program with more starts with none again.
const FUNCTIONS_MAX: usize = 4096;
/// The longest wait of a function's launches for the measurement of its first ones.
const FIRST_WAIT_NS_MAX: u64 = 1_000_000_000;

#[derive(Default)]
pub(crate) struct Launches {
    functions: HashMap<LaunchKey, LaunchCost, BuildHasherDefault<HandleHasher>>,
    pending: VecDeque<Pending>,
    settled_at: u64,
    /// Event pairs for reuse, with their context.
    spare: Vec<(u64, u64, u64)>,
}

/// The key of launches with the same cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LaunchKey {
    handle: u64,
    blocks: u64,
}

/// A fast hash: handles are addresses chosen by the driver, and each launch looks one up.
#[derive(Default)]
struct HandleHasher(u64);

impl Hasher for HandleHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, value: u64) {
        // The map uses both the upper and the lower bits.
        let mixed = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

/// What is known of a function's launches.
#[derive(Debug, Clone, Copy, Default)]
struct LaunchCost {
    launches: u64,
    /// The number of the next launch to be measured.
    next: u64,
    measured: usize,
    recent: [i64; RECENT],
    /// The estimate in ns.
    ns: i64,
}

struct Pending {
    function: LaunchKey,
    context: u64,
    begin: u64,
    end: u64,
    estimate: i64,
    device: usize,
}

fn lock(account: &'static Account) -> MutexGuard<'static, Launches> {
    account.launches.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Launches {
    /// Settles completed measurements, until it has found `unfinished_max` incomplete ones.
    fn settle(&mut self, account: &Account, unfinished_max: usize) {
        let mut unfinished = 0;
        for _ in 0..self.pending.len() {
            if unfinished >= unfinished_max {
                return;
            }
            let Some(measurement) = self.pending.pop_front() else { return };
            let mut ms = 0_f32;
            // SAFETY: events of ours; those of a destroyed context are refused by the driver.
            match unsafe { driver::cuEventElapsedTime(&raw mut ms, measurement.begin, measurement.end) } {
                // CUDA_ERROR_NOT_READY. Another one is checked first next time, since streams are independent.
                600 => {
                    unfinished += 1;
                    self.pending.push_back(measurement);
                }
                SUCCESS => {
                    let ns = i64::try_from(Duration::from_secs_f32((ms / 1000.0).max(0.0)).as_nanos())
                        .map_or(0, |ns| (ns - EVENTS_NS).max(0));
                    let record = account.record(measurement.device);
                    let contended = record.contended.load(Relaxed) != 0;
                    let known = self.functions.get_mut(&measurement.function);
                    let cost = known.map_or(ns, |cost| cost.add(ns, contended));
                    record.spend(cost - measurement.estimate);
                    self.spare.push((measurement.context, measurement.begin, measurement.end));
                }
                _ => {}
            }
        }
    }

    /// Counts a launch; returns its estimate and whether it is to be measured.
    fn plan(&mut self, function: LaunchKey) -> (i64, bool) {
        if self.functions.len() >= FUNCTIONS_MAX && !self.functions.contains_key(&function) {
            self.functions.clear();
        }
        let cost = self.functions.entry(function).or_default();
        cost.launches += 1;
        let measure = cost.launches >= cost.next && self.pending.len() < PENDING_MAX;
        if measure && cost.launches > MEASURED_FIRST {
            let [least, most] = MEASURED_EVERY;
            let pause = (MEASURED_EVERY_NS / cost.ns.max(1)).clamp(least, most);
            cost.next = cost.launches.saturating_add_signed(pause);
        }
        (cost.ns, measure)
    }

    /// Whether the function's cost is unknown while its first launches run.
    fn unknown(&self, function: LaunchKey) -> bool {
        self.functions.get(&function).is_some_and(|cost| cost.measured == 0)
            && self.pending.iter().any(|pending| pending.function == function)
    }

    fn events(&mut self, context: u64) -> Option<(u64, u64)> {
        if let Some(index) = self.spare.iter().position(|spare| spare.0 == context) {
            let (_, begin, end) = self.spare.swap_remove(index);
            return Some((begin, end));
        }
        let (mut begin, mut end) = (0, 0);
        // SAFETY: out-parameters of ours.
        let made = unsafe {
            driver::cuEventCreate(&raw mut begin, 0) == SUCCESS
                && driver::cuEventCreate(&raw mut end, 0) == SUCCESS
        };
        made.then_some((begin, end))
    }
}

impl LaunchCost {
    /// Adds a measurement; returns what the measured launch costs.
    fn add(&mut self, ns: i64, contended: bool) -> i64 {
        self.recent[self.measured % RECENT] = ns;
        self.measured += 1;
        let mut known = self.recent;
        let mut known = &mut known[..self.measured.min(RECENT)];
        if contended && known.len() == RECENT {
            known.sort_unstable();
            known = &mut known[..RECENT - RECENT / 4];
        }
        let count = i64::try_from(known.len()).unwrap_or(1);
        self.ns = known.iter().sum::<i64>() / count;
        if contended && self.measured > RECENT { self.ns } else { ns }
    }
}

/// Whether a stream records launches. An error counts: the default stream cannot be asked while another one is
/// captured.
pub(crate) fn capturing(stream: u64) -> bool {
    let mut status: c_int = 0;
    // SAFETY: an out-parameter of ours.
    let code = unsafe { driver::cuStreamIsCapturing(stream, &raw mut status) };
    code != SUCCESS || status != 0
}

/// Waits until the container has GPU time, and until the cost of a new function is known.
fn wait(account: &'static Account, device: usize, function: LaunchKey) -> MutexGuard<'static, Launches> {
    let record = account.record(device);
    let mut throttled = false;
    let mut now = monotonic_ns();
    while let Some(ns) = record.delay(now) {
        if !throttled {
            throttled = true;
            record.throttled.fetch_add(1, Relaxed);
        }
        thread::sleep(Duration::from_nanos(ns));
        lock(account).settle(account, usize::MAX);
        now = monotonic_ns();
    }
    let mut launches = lock(account);
    if now.saturating_sub(launches.settled_at) > SETTLED_EVERY_NS {
        launches.settled_at = now;
        launches.settle(account, 1);
    }
    let mut until = 0;
    while launches.unknown(function) {
        let now = monotonic_ns();
        if until == 0 {
            until = now + FIRST_WAIT_NS_MAX;
        }
        if now > until {
            break;
        }
        drop(launches);
        thread::sleep(Duration::from_micros(20));
        launches = lock(account);
        launches.settle(account, usize::MAX);
    }
    launches
}

/// The stream that a handle names: 0 is the thread's default stream (`CU_STREAM_PER_THREAD`) in some functions.
pub(crate) fn resolved(stream: u64, per_thread: bool) -> u64 {
    if per_thread && stream == 0 { 2 } else { stream }
}

/// Executes a launch under the quota of the current device. `per_thread`: stream 0 is the thread's default stream.
fn throttled(
    function: LaunchKey,
    stream: u64,
    per_thread: bool,
    call: impl FnOnce() -> DriverCode,
) -> DriverCode {
    let ProcessLimits::Account(account) = limits() else { return call() };
    if !account.has_quota() {
        return call();
    }
    let device = view::current_ordinal().and_then(|ordinal| account.device(ordinal));
    let Some(device) = device.filter(|device| account.record(*device).share().is_some()) else {
        return call();
    };
    let stream = resolved(stream, per_thread);
    if capturing(stream) {
        return call();
    }
    account.record(device).launches.fetch_add(1, Relaxed);
    let mut launches = wait(account, device, function);
    let (estimate, measure) = launches.plan(function);
    let mut context = 0;
    let events = if measure {
        // SAFETY: an out-parameter of ours.
        unsafe { driver::cuCtxGetCurrent(&raw mut context) };
        launches.events(context)
    } else {
        None
    };
    drop(launches);
    if let Some((begin, _)) = events {
        // SAFETY: an event of ours in the caller's stream.
        unsafe { driver::cuEventRecord(begin, stream) };
    }
    let code = call();
    if code == SUCCESS {
        account.record(device).spend(estimate);
    }
    if let Some((begin, end)) = events {
        // SAFETY: an event of ours in the caller's stream.
        let recorded = unsafe { driver::cuEventRecord(end, stream) } == SUCCESS && code == SUCCESS;
        let mut launches = lock(account);
        if recorded {
            launches.pending.push_back(Pending { function, context, begin, end, estimate, device });
        } else {
            launches.spare.push((context, begin, end));
        }
    }
    code
}

fn blocks(x: c_uint, y: c_uint, z: c_uint) -> u64 {
    u64::from(x).wrapping_mul(u64::from(y)).wrapping_mul(u64::from(z))
}

/// The first fields of `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: u64,
}

fn configured(
    config: *const LaunchConfig,
    handle: u64,
    per_thread: bool,
    call: impl FnOnce() -> DriverCode,
) -> DriverCode {
    // SAFETY: the caller's structure, or NULL, which the driver refuses.
    let Some(known) = (unsafe { config.as_ref() }) else { return call() };
    let [x, y, z] = known.grid;
    throttled(LaunchKey { handle, blocks: blocks(x, y, z) }, known.stream, per_thread, call)
}

imports! {
    fn cuEventCreate(event: *mut u64, flags: c_uint);
    fn cuEventRecord(event: u64, stream: u64);
    fn cuEventElapsedTime(milliseconds: *mut f32, begin: u64, end: u64);
    fn cuStreamIsCapturing(stream: u64, status: *mut c_int);
    fn cuCtxGetCurrent(context: *mut u64);
}

hooks! {
    fn cuLaunchKernel(
        f: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        throttled(LaunchKey { handle: f, blocks: blocks(gx, gy, gz) }, stream, false, || {
            // SAFETY: see the module.
            unsafe { real::cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) }
        })
    }
    fn cuLaunchKernel_ptsz(
        f: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        throttled(LaunchKey { handle: f, blocks: blocks(gx, gy, gz) }, stream, true, || {
            // SAFETY: see the module.
            unsafe { real::cuLaunchKernel_ptsz(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) }
        })
    }
    fn cuLaunchCooperativeKernel(
        f: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, parameters: *mut *mut c_void,
    ) {
        throttled(LaunchKey { handle: f, blocks: blocks(gx, gy, gz) }, stream, false, || {
            // SAFETY: see the module.
            unsafe { real::cuLaunchCooperativeKernel(f, gx, gy, gz, bx, by, bz, shared, stream, parameters) }
        })
    }
    fn cuLaunchCooperativeKernel_ptsz(
        f: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, parameters: *mut *mut c_void,
    ) {
        throttled(LaunchKey { handle: f, blocks: blocks(gx, gy, gz) }, stream, true, || {
            // SAFETY: see the module.
            unsafe { real::cuLaunchCooperativeKernel_ptsz(f, gx, gy, gz, bx, by, bz, shared, stream, parameters) }
        })
    }
    fn cuLaunchKernelEx(config: *const LaunchConfig, f: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void) {
        // SAFETY: see the module.
        configured(config, f, false, || unsafe { real::cuLaunchKernelEx(config, f, parameters, extra) })
    }
    fn cuLaunchKernelEx_ptsz(
        config: *const LaunchConfig, f: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        // SAFETY: see the module.
        configured(config, f, true, || unsafe { real::cuLaunchKernelEx_ptsz(config, f, parameters, extra) })
    }
    fn cuGraphLaunch(graph: u64, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuGraphLaunch(graph, stream) };
        throttled(LaunchKey { handle: graph, blocks: 0 }, stream, false, || graph::launch(call))
    }
    fn cuGraphLaunch_ptsz(graph: u64, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuGraphLaunch_ptsz(graph, stream) };
        throttled(LaunchKey { handle: graph, blocks: 0 }, stream, true, || graph::launch(call))
    }
    fn cuLaunch(f: u64) {
        // SAFETY: see the module.
        throttled(LaunchKey { handle: f, blocks: 0 }, 0, false, || unsafe { real::cuLaunch(f) })
    }
    fn cuLaunchGrid(f: u64, width: c_int, height: c_int) {
        let blocks = u64::from(width.unsigned_abs()) * u64::from(height.unsigned_abs());
        // SAFETY: see the module.
        throttled(LaunchKey { handle: f, blocks }, 0, false, || unsafe { real::cuLaunchGrid(f, width, height) })
    }
    fn cuLaunchGridAsync(f: u64, width: c_int, height: c_int, stream: u64) {
        let blocks = u64::from(width.unsigned_abs()) * u64::from(height.unsigned_abs());
        // SAFETY: see the module.
        throttled(LaunchKey { handle: f, blocks }, stream, false, || unsafe {
            real::cuLaunchGridAsync(f, width, height, stream)
        })
    }
}
