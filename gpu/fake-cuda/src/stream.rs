//! Streams, events, launches and graphs on the clock of the simulated device.
//!
//! A command starts when its stream and its device are free; a device executes the commands of all processes in the
//! order of submission. An event's time is when the device reaches it.
//!
//! Safety: see [`crate::state`].

use std::{
    cell::Cell,
    ffi::{c_int, c_uint, c_void},
    fmt, thread,
    time::Duration,
};

use mayfly_gpu_proto::process::monotonic_ns;

use crate::{
    CudaResult, INVALID_HANDLE, INVALID_VALUE, NOT_READY, STREAM_CAPTURE_INVALIDATED, SUCCESS, check,
    driver_functions, out,
    state::{CudaState, CudaTables, current_context, new_handle, state},
};

/// The work that a stream accepts ahead of its execution, in ns; a launch blocks beyond it, as with the real driver's
/// full queue.
const QUEUED_NS_MAX: u64 = 20_000_000;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;
/// The captured time of a capture that must fail.
const INVALIDATED: u64 = u64::MAX;

thread_local! {
    /// `CUstreamCaptureMode`.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

/// The surplus of a measurement by two events (on an H200).
const EVENTS_NS: u64 = 2_000;

#[derive(Debug, Clone, Copy, Default)]
pub struct SimStream {
    /// The end of the last command.
    tail: u64,
    /// GPU time of the launches recorded since the capture began.
    captured: Option<u64>,
}

/// Ends the captures of all streams, as calls do that are not allowed beside one; returns whether there was any.
/// Nothing happens in the relaxed capture mode of the thread.
pub fn end_captures(tables: &mut CudaTables) -> bool {
    if CAPTURE_MODE.get() == RELAXED {
        return false;
    }
    let captures = tables.streams.values_mut().filter_map(|stream| stream.captured.as_mut());
    captures.map(|captured| *captured = INVALIDATED).count() > 0
}

/// Streams 0, 1 and 2 are the default streams of the current context.
fn stream_key(stream: u64) -> u64 {
    if stream <= 2 { current_context().unwrap_or(0) << 32 | 1 << 60 } else { stream }
}

fn stream_of(state: &CudaState, stream: u64) -> Result<SimStream, CudaResult> {
    match state.tables().streams.get(&stream_key(stream)) {
        Some(known) => Ok(*known),
        None if stream <= 2 => Ok(SimStream::default()),
        None => Err(INVALID_HANDLE),
    }
}

fn sleep_until(moment: u64) {
    let wait = moment.saturating_sub(monotonic_ns());
    if wait > 0 {
        thread::sleep(Duration::from_nanos(wait));
    }
}

/// Enqueues a command of `ns` into a stream; returns its start and end.
fn enqueue(state: &CudaState, stream: u64, ns: u64) -> Result<(u64, u64), CudaResult> {
    let device = state.current()?;
    let known = stream_of(state, stream)?;
    if known.tail > monotonic_ns() + QUEUED_NS_MAX {
        sleep_until(known.tail - QUEUED_NS_MAX);
    }
    let (begin, end) = state.sim.submit_of(state.slot, device, known.tail.max(monotonic_ns()), ns);
    state.tables().streams.entry(stream_key(stream)).or_default().tail = end;
    Ok((begin, end))
}

fn launch(function: u64, stream: u64) -> CudaResult {
    let state = check!(state());
    check!(state.current());
    let Some(ns) = state.tables().durations.get(&function).copied() else { return INVALID_HANDLE };
    let key = stream_key(stream);
    if let Some(captured) = state.tables().streams.get_mut(&key).and_then(|stream| stream.captured.as_mut()) {
        *captured = captured.saturating_add(ns);
        return SUCCESS;
    }
    check!(enqueue(state, stream, ns));
    SUCCESS
}

/// The stream of a `CUlaunchConfig`: six sizes, shared memory, then the stream.
#[repr(C)]
pub struct FakeLaunchConfig {
    sizes: [c_uint; 7],
    stream: u64,
    attributes: *const c_void,
    attribute_count: c_uint,
}

impl fmt::Debug for FakeLaunchConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeLaunchConfig")
            .field("sizes", &self.sizes)
            .field("stream", &self.stream)
            .field("attribute_count", &self.attribute_count)
            .finish_non_exhaustive()
    }
}

fn launch_ex(config: *const FakeLaunchConfig, function: u64) -> CudaResult {
    // SAFETY: the caller's structure, or NULL.
    let Some(config) = (unsafe { config.as_ref() }) else { return INVALID_VALUE };
    launch(function, config.stream)
}

fn graph_launch(graph: u64, stream: u64) -> CudaResult {
    let state = check!(state());
    let Some(ns) = state.tables().durations.get(&graph).copied() else { return INVALID_HANDLE };
    check!(enqueue(state, stream, ns));
    SUCCESS
}

driver_functions! {
    fn cuStreamCreate(stream: *mut u64, _flags: c_uint) {
        let state = check!(state());
        check!(state.current());
        let handle = new_handle();
        state.tables().streams.insert(handle, SimStream::default());
        out!(stream, handle);
        SUCCESS
    }
    fn cuStreamCreateWithPriority(stream: *mut u64, flags: c_uint, _priority: c_int) {
        // SAFETY: the same contract.
        unsafe { cuStreamCreate(stream, flags) }
    }
    fn cuStreamDestroy_v2(stream: u64) {
        if check!(state()).tables().streams.remove(&stream).is_some() { SUCCESS } else { INVALID_HANDLE }
    }
    fn cuStreamSynchronize(stream: u64) {
        let state = check!(state());
        sleep_until(check!(stream_of(state, stream)).tail);
        crate::pool::synchronised(state);
        SUCCESS
    }
    fn cuStreamQuery(stream: u64) {
        let tail = check!(stream_of(check!(state()), stream)).tail;
        if tail <= monotonic_ns() { SUCCESS } else { NOT_READY }
    }
    fn cuStreamIsCapturing(stream: u64, status: *mut c_int) {
        out!(status, c_int::from(check!(stream_of(check!(state()), stream)).captured.is_some()));
        SUCCESS
    }
    fn cuStreamBeginCapture_v2(stream: u64, _mode: c_int) {
        let state = check!(state());
        check!(stream_of(state, stream));
        state.tables().streams.entry(stream_key(stream)).or_default().captured = Some(0);
        SUCCESS
    }
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) {
        let state = check!(state());
        let mut tables = state.tables();
        let Some(ns) = tables.streams.get_mut(&stream_key(stream)).and_then(|known| known.captured.take()) else {
            return INVALID_HANDLE;
        };
        if ns == INVALIDATED {
            return STREAM_CAPTURE_INVALIDATED;
        }
        let handle = new_handle();
        tables.durations.insert(handle, ns);
        out!(graph, handle);
        SUCCESS
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        // SAFETY: a parameter of the caller, or NULL.
        let Some(mode) = (unsafe { mode.as_mut() }) else { return INVALID_VALUE };
        *mode = CAPTURE_MODE.replace(*mode);
        SUCCESS
    }
    /// Simulated graphs allocate nothing.
    fn cuDeviceGetGraphMemAttribute(device: c_int, _attribute: c_int, value: *mut c_void) {
        check!(check!(state()).ordinal(device));
        out!(value.cast::<u64>(), 0);
        SUCCESS
    }
    fn cuDeviceGraphMemTrim(device: c_int) {
        check!(check!(state()).ordinal(device));
        SUCCESS
    }
    fn cuGraphInstantiateWithFlags(executable: *mut u64, graph: u64, _flags: u64) {
        let state = check!(state());
        let mut tables = state.tables();
        let Some(ns) = tables.durations.get(&graph).copied() else { return INVALID_HANDLE };
        let handle = new_handle();
        tables.durations.insert(handle, ns);
        out!(executable, handle);
        SUCCESS
    }
    fn cuGraphLaunch(graph: u64, stream: u64) {
        graph_launch(graph, stream)
    }
    fn cuGraphLaunch_ptsz(graph: u64, stream: u64) {
        graph_launch(graph, stream)
    }
    fn cuGraphDestroy(graph: u64) {
        if check!(state()).tables().durations.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE }
    }
    fn cuGraphExecDestroy(graph: u64) {
        if check!(state()).tables().durations.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE }
    }
    fn cuLaunchKernel(
        function: u64, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, stream: u64, _parameters: *mut *mut c_void, _extra: *mut *mut c_void,
    ) {
        launch(function, stream)
    }
    fn cuLaunchKernel_ptsz(
        function: u64, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, stream: u64, _parameters: *mut *mut c_void, _extra: *mut *mut c_void,
    ) {
        launch(function, stream)
    }
    fn cuLaunchCooperativeKernel(
        function: u64, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, stream: u64, _parameters: *mut *mut c_void,
    ) {
        launch(function, stream)
    }
    fn cuLaunchKernelEx(config: *const FakeLaunchConfig, function: u64, _p: *mut *mut c_void, _e: *mut *mut c_void) {
        launch_ex(config, function)
    }
    fn cuLaunchKernelEx_ptsz(config: *const FakeLaunchConfig, function: u64, _p: *mut *mut c_void, _e: *mut *mut c_void) {
        launch_ex(config, function)
    }
    fn cuCtxSynchronize() {
        let state = check!(state());
        check!(state.current());
        let tail = state.tables().streams.values().map(|stream| stream.tail).max().unwrap_or(0);
        sleep_until(tail);
        crate::pool::synchronised(state);
        SUCCESS
    }
    fn cuEventCreate(event: *mut u64, _flags: c_uint) {
        let state = check!(state());
        check!(state.current());
        let handle = new_handle();
        state.tables().events.insert(handle, None);
        out!(event, handle);
        SUCCESS
    }
    fn cuEventDestroy_v2(event: u64) {
        if check!(state()).tables().events.remove(&event).is_some() { SUCCESS } else { INVALID_HANDLE }
    }
    fn cuEventRecord(event: u64, stream: u64) {
        let state = check!(state());
        let (begin, _) = check!(enqueue(state, stream, 0));
        let mut tables = state.tables();
        let Some(known) = tables.events.get_mut(&event) else { return INVALID_HANDLE };
        *known = Some(begin);
        SUCCESS
    }
    fn cuEventQuery(event: u64) {
        match check!(state()).tables().events.get(&event) {
            None => INVALID_HANDLE,
            Some(Some(moment)) if *moment > monotonic_ns() => NOT_READY,
            Some(_) => SUCCESS,
        }
    }
    fn cuEventSynchronize(event: u64) {
        let state = check!(state());
        let Some(moment) = state.tables().events.get(&event).copied() else { return INVALID_HANDLE };
        sleep_until(moment.unwrap_or(0));
        SUCCESS
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, begin: u64, end: u64) {
        let state = check!(state());
        let tables = state.tables();
        let moment = |event: u64| tables.events.get(&event).copied().flatten();
        let (Some(begin), Some(end)) = (moment(begin), moment(end)) else { return INVALID_HANDLE };
        if end.max(begin) > monotonic_ns() {
            return NOT_READY;
        }
        // A pair of real events measures more than the command between them.
        let span = Duration::from_nanos(end.saturating_sub(begin) + EVENTS_NS);
        out!(milliseconds, span.as_secs_f32() * 1000.0);
        SUCCESS
    }
}
