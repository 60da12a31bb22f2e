//! The lookup of functions by programs (`dlsym`, `cuGetProcAddress`), and of the driver's functions by the shim.
//!
//! `dlsym` is a naked function that jumps to the real one for all names without a hook: `RTLD_NEXT` and `RTLD_DEFAULT`
//! depend on the return address of the caller, which a wrapper would hide. `cuGetProcAddress` calls the driver and
//! replaces the returned pointer, so versions and flags are handled by the driver; the name decides only for pointers
//! that `dlsym` does not return.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr::NonNull,
    sync::atomic::{
        AtomicPtr,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use crate::{DriverCode, DriverHook, SUCCESS, graph, hooks, launch, memory, pool, view, vmm};

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Symbol versions of `dlsym` in glibc: old ones of x86-64 and aarch64, and the one since 2.34.
const DLSYM_VERSIONS: [&CStr; 3] = [c"GLIBC_2.2.5", c"GLIBC_2.17", c"GLIBC_2.34"];

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

fn real_dlsym() -> Option<Dlsym> {
    let mut found = REAL_DLSYM.load(Acquire);
    for version in DLSYM_VERSIONS {
        if !found.is_null() {
            break;
        }
        // SAFETY: two C strings; the call only looks a symbol up.
        found = unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        REAL_DLSYM.store(found, Release);
    }
    if found.is_null() {
        return None;
    }
    // SAFETY: `dlsym` has this signature.
    Some(unsafe { std::mem::transmute::<*mut c_void, Dlsym>(found) })
}

fn tables() -> [&'static [&'static DriverHook]; 7] {
    [HOOKS, memory::HOOKS, pool::HOOKS, graph::HOOKS, vmm::HOOKS, launch::HOOKS, view::HOOKS]
}

fn hook_named(name: &CStr) -> Option<&'static DriverHook> {
    if !name.to_bytes().starts_with(b"cu") && !name.to_bytes().starts_with(b"nvml") {
        return None;
    }
    tables().into_iter().flatten().copied().find(|hook| hook.name == name)
}

/// The driver's function: the next one after the shim among the linked libraries, or that of the loaded driver (which a
/// program may have opened with `RTLD_LOCAL`).
pub(crate) fn real(hook: &DriverHook) -> Option<NonNull<()>> {
    if let Some(known) = NonNull::new(hook.real.load(Acquire)) {
        return Some(known);
    }
    let dlsym = real_dlsym()?;
    // SAFETY: a C string; the call only looks a symbol up.
    let mut found = unsafe { dlsym(libc::RTLD_NEXT, hook.name.as_ptr()) };
    if found.is_null() {
        let library =
            if hook.name.to_bytes().starts_with(b"nvml") { c"libnvidia-ml.so.1" } else { c"libcuda.so.1" };
        // SAFETY: a C string; only a library that the program loaded is opened again.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: as above. The handle is kept: the function must stay loaded.
        found = unsafe { dlsym(handle, hook.name.as_ptr()) };
    }
    if !std::ptr::eq(found.cast(), hook.own) {
        hook.real.store(found.cast(), Release);
    }
    NonNull::new(found.cast())
}

/// The result of `dlsym` for a hooked name, or NULL if the real `dlsym` is to be called.
unsafe extern "C" fn hooked(handle: *mut c_void, name: *const c_char) -> *const c_void {
    let Some(dlsym) = real_dlsym() else { return std::ptr::null() };
    if name.is_null() {
        return std::ptr::null();
    }
    // SAFETY: a C string of the caller.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(hook) = hook_named(name) else { return std::ptr::null() };
    let default = handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT;
    let handle = if default { libc::RTLD_NEXT } else { handle };
    // SAFETY: the caller's handle and a C string.
    let found: *mut () = unsafe { dlsym(handle, name.as_ptr()) }.cast();
    if found.is_null() {
        return std::ptr::null();
    }
    if !std::ptr::eq(found, hook.own) {
        let _ = hook.real.compare_exchange(std::ptr::null_mut(), found, Release, Relaxed);
    }
    hook.own.cast()
}

/// Replaces the C library's `dlsym`.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {hooked}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:",
        "jmp qword ptr [rip + {real}]",
        hooked = sym hooked,
        real = sym REAL_DLSYM,
    )
}

/// Replaces the C library's `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {hooked}",
        "mov x9, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbz x9, 2f",
        "mov x0, x9",
        "ret",
        "2:",
        "adrp x9, {real}",
        "ldr x9, [x9, #:lo12:{real}]",
        "br x9",
        hooked = sym hooked,
        real = sym REAL_DLSYM,
    )
}

/// Whether a pointer is that of an exported variant of a function.
fn is_exported(base: &str, found: *mut ()) -> bool {
    let Some(dlsym) = real_dlsym() else { return false };
    // SAFETY: a C string; only a library that the program loaded is opened again.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return false;
    }
    let versions = ["", "_v2", "_v3", "_v4", "_v5"];
    let mut names = versions.iter().flat_map(|v| ["", "_ptsz", "_ptds"].map(|p| format!("{base}{v}{p}\0")));
    let exported = names.any(|name| {
        // SAFETY: the name ends with a zero; the call only looks a symbol up.
        let address = unsafe { dlsym(handle, name.as_ptr().cast()) };
        std::ptr::eq(address.cast(), found)
    });
    // SAFETY: the reference that was taken above.
    unsafe { libc::dlclose(handle) };
    exported
}

/// The hook that replaces a pointer returned by the driver.
fn exchange(found: *mut (), name: &CStr, version: c_int, flags: u64) -> *mut () {
    let by_pointer = tables()
        .into_iter()
        .flatten()
        .copied()
        .find(|hook| real(hook).is_some_and(|real| std::ptr::eq(real.as_ptr(), found)));
    if let Some(hook) = by_pointer {
        return hook.own.cast_mut();
    }
    let Ok(base) = name.to_str() else { return found };
    if is_exported(base, found) {
        // Another version of the function, perhaps with other parameters.
        return found;
    }
    // The driver does not export this entry point: the newest variant for the version is used.
    let suffixes: &[&str] = match (flags & 2 != 0, version >= 3020) {
        (true, _) => &["_ptsz", "_v2_ptsz", "_v2", ""],
        (false, true) => &["_v2", ""],
        (false, false) => &[""],
    };
    let named = |suffix: &&str| {
        let full = std::ffi::CString::new(format!("{base}{suffix}")).ok()?;
        hook_named(&full)
    };
    let Some(hook) = suffixes.iter().find_map(named) else { return found };
    if std::ptr::eq(found, hook.own) {
        return found;
    }
    hook.real.store(found, Release);
    hook.own.cast_mut()
}

hooks! {
    fn cuGetProcAddress(symbol: *const c_char, pointer: *mut *mut (), version: c_int, flags: u64) {
        // SAFETY: the caller's arguments.
        let code = unsafe { real::cuGetProcAddress(symbol, pointer, version, flags) };
        // SAFETY: as above.
        unsafe { exchanged(code, symbol, pointer, version, flags) }
    }
    fn cuGetProcAddress_v2(
        symbol: *const c_char, pointer: *mut *mut (), version: c_int, flags: u64, status: *mut c_int,
    ) {
        // SAFETY: the caller's arguments.
        let code = unsafe { real::cuGetProcAddress_v2(symbol, pointer, version, flags, status) };
        // SAFETY: as above.
        unsafe { exchanged(code, symbol, pointer, version, flags) }
    }
}

/// Replaces the pointer that a successful lookup wrote.
unsafe fn exchanged(
    code: DriverCode,
    symbol: *const c_char,
    pointer: *mut *mut (),
    version: c_int,
    flags: u64,
) -> DriverCode {
    if code == SUCCESS && !pointer.is_null() && !symbol.is_null() {
        // SAFETY: the driver took both pointers as valid and wrote to `pointer`.
        unsafe {
            let found = pointer.read();
            if !found.is_null() {
                pointer.write(exchange(found, CStr::from_ptr(symbol), version, flags));
            }
        }
    }
    code
}
