//! Native stacks of calls. Stacks are not wiped between calls: compiled code cannot read stack memory that it has not
//! written, and a guest's own stack is in its linear memory.

#![expect(unsafe_code, reason = "stacks are raw mappings; each use has a SAFETY comment")]

use std::{
    ffi::c_void,
    io,
    ops::Range,
    ptr::{self, NonNull},
    sync::Arc,
};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use wasmtime::{StackCreator, StackMemory};

use super::FreeLists;

const PAGE_BYTES: usize = 4096;

/// The free stacks; at most as many as the peak number of concurrent calls.
#[derive(Clone, Debug)]
pub(crate) struct StackPool(Arc<FreeLists<Mapping>>);

impl StackPool {
    pub(crate) fn new() -> Self {
        Self(Arc::new(FreeLists::new()))
    }
}

/// One stack and the guard page below it.
#[derive(Debug)]
struct Mapping {
    base: NonNull<c_void>,
    /// Size without the guard page.
    bytes: usize,
}

// SAFETY: this value is the only owner of the mapping.
unsafe impl Send for Mapping {}
// SAFETY: shared references are only used to compute addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes + PAGE_BYTES, access, flags) }?;
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
        let mapping = Self { base, bytes };
        // SAFETY: the range is the first page of the new mapping.
        unsafe { mprotect(base.as_ptr(), PAGE_BYTES, MprotectFlags::empty()) }?;
        Ok(mapping)
    }

    fn bottom(&self) -> *mut u8 {
        self.base.as_ptr().cast::<u8>().wrapping_add(PAGE_BYTES)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was created in `new` with this size, and is not shared. On an error it stays.
        unsafe { munmap(self.base.as_ptr(), self.bytes + PAGE_BYTES) }.ok();
    }
}

// SAFETY: stacks have at least the requested size, are page-aligned, guarded below, and used by one call at a time.
unsafe impl StackCreator for StackPool {
    fn new_stack(&self, size: usize, _: bool) -> wasmtime::Result<Box<dyn StackMemory>> {
        let pooled = self.0.take().filter(|mapping| mapping.bytes >= size);
        let mapping = match pooled {
            Some(mapping) => mapping,
            None => Mapping::new(size)?,
        };
        Ok(Box::new(PooledStack { pool: self.clone(), mapping: Some(mapping) }))
    }
}

struct PooledStack {
    pool: StackPool,
    /// `None` only during drop.
    mapping: Option<Mapping>,
}

impl PooledStack {
    fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().unwrap_or_else(|| unreachable!("taken only when dropped"))
    }
}

impl Drop for PooledStack {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.take() {
            self.pool.0.put(mapping);
        }
    }
}

// SAFETY: the addresses are those of the mapping, which `self` owns.
unsafe impl StackMemory for PooledStack {
    fn top(&self) -> *mut u8 {
        self.mapping().bottom().wrapping_add(self.mapping().bytes)
    }

    fn range(&self) -> Range<usize> {
        let bottom = self.mapping().bottom().addr();
        bottom..bottom + self.mapping().bytes
    }

    fn guard_range(&self) -> Range<*mut u8> {
        let guard = self.mapping().base.as_ptr().cast::<u8>();
        guard..guard.wrapping_add(PAGE_BYTES)
    }
}
