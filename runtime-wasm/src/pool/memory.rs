//! Linear memories: slots of address space, each followed by a guard, so that compiled code needs no bounds checks.
//!
//! ```text
//! slot:  │ accessible, all zero while free │ inaccessible up to reservation and guard │
//! ```
//! **Invariant:** every byte of a free slot's accessible part is zero. A memory is wiped when its instance is dropped,
//! before its slot becomes free.

#![expect(
    unsafe_code,
    reason = "memory for compiled code is made of raw mappings; each use has a SAFETY comment"
)]

use std::{
    ffi::c_void,
    io,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use super::{FreeLists, kept::KeptBudget, pagemap::PageMap};
use crate::config::Wipe;

const PAGE_BYTES: usize = 4096;
/// The limit of touched bytes that are overwritten and kept (see [`super::kept`]; the rest returns to the kernel) when the kernel cannot report which pages were touched, so that all have to be overwritten.
const KEPT_BLIND_BYTES_MAX: usize = 64 << 10;
/// The time between two looks for unused slots.
const RELEASE_LOOK: Duration = Duration::from_secs(1);
/// The smallest usable number of slots when the address space is limited (`ulimit -v`).
const SLOTS_MIN: usize = 16;

/// The memory slots of one host, for all its engines. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct MemoryPool(Arc<Slots>);

#[derive(Debug)]
struct Slots {
    base: NonNull<c_void>,
    reserved_bytes: usize,
    guard_bytes: usize,
    count: usize,
    /// The index of the first slot that was never used.
    unused_from: AtomicUsize,
    free: FreeLists<Slot>,
    pagemap: Option<PageMap>,
    kept: KeptBudget,
}

// SAFETY: the base is an address that never changes; access to the range behind it is governed by `Slot`s, of which
// there is one per part.
unsafe impl Send for Slots {}
// SAFETY: as above; all other fields are synchronised.
unsafe impl Sync for Slots {}

/// Exclusive ownership of one slot.
#[derive(Debug)]
struct Slot {
    index: usize,
    /// Bytes from its start that can be read and written.
    accessible: usize,
    /// The part of its kept memory that counts against the budget, in bytes.
    counted: usize,
    /// The time of its return.
    freed_at: Instant,
}

impl MemoryPool {
    /// Reserves address space for `count` memories, or for as many as fit. Allocates no memory. `kept_bytes_max`: what
    /// free slots together may keep beyond the minimum of each.
    pub(crate) fn new(
        count: usize,
        (reserved_bytes, guard_bytes): (usize, usize),
        wipe: Wipe,
        kept_bytes_max: usize,
    ) -> io::Result<Self> {
        let pagemap = match wipe {
            Wipe::Auto => PageMap::open(),
            Wipe::Plain => None,
        };
        if wipe == Wipe::Auto && pagemap.is_none() {
            tracing::info!("instances start slower: this kernel cannot report touched pages (needs 6.7)");
        }
        let slot_bytes = reserved_bytes + guard_bytes;
        let mut count = count;
        let base = loop {
            match reserve(count.saturating_mul(slot_bytes)) {
                Ok(base) => break base,
                Err(error) if count <= SLOTS_MIN => return Err(error),
                Err(_) => count /= 2,
            }
        };
        Ok(Self(Arc::new(Slots {
            base,
            reserved_bytes,
            guard_bytes,
            count,
            unused_from: AtomicUsize::new(0),
            free: FreeLists::new(),
            pagemap,
            kept: KeptBudget::new(kept_bytes_max),
        })))
    }

    /// The number of slots.
    pub(crate) fn count(&self) -> usize {
        self.0.count
    }

    /// Starts a thread that returns the memory of free slots after this time without use. It is not the thread that
    /// interrupts guests, which must not wait while the kernel takes pages back. It ends with the pool.
    pub(crate) fn release_after(&self, unused_for: Duration) -> io::Result<()> {
        let slots = Arc::downgrade(&self.0);
        std::thread::Builder::new().name("wasm-memory".into()).spawn(move || {
            while let Some(slots) = slots.upgrade() {
                Self(slots).release_unused(unused_for);
                std::thread::sleep(RELEASE_LOOK);
            }
        })?;
        Ok(())
    }

    /// Returns the memory of free slots that were not used for this time to the kernel, except the minimum of each.
    fn release_unused(&self, unused_for: Duration) {
        if self.0.kept.is_unused() {
            return;
        }
        for mut slot in self.0.free.extract(|slot| slot.counted > 0 && slot.freed_at.elapsed() >= unused_for)
        {
            let whole = slot.accessible;
            // A locked range stays as it is: zeros.
            self.0.discard(&slot, 0, whole).ok();
            self.0.kept.release(std::mem::take(&mut slot.counted));
            self.0.free.put(slot);
        }
    }

    fn memory(&self, minimum: usize) -> Result<PooledMemory, String> {
        let slots = &self.0;
        if minimum > slots.reserved_bytes {
            return Err(format!("a linear memory has at most {} bytes here", slots.reserved_bytes));
        }
        let slot = slots.take().ok_or("all linear memories of this host are in use")?;
        // From here on, dropping `memory` releases the slot.
        let mut memory = PooledMemory { slots: slots.clone(), slot, bytes: minimum };
        memory.expose(minimum).map_err(|error| format!("no memory for an instance: {error}"))?;
        Ok(memory)
    }
}

/// Reserves address space without allocating memory.
fn reserve(bytes: usize) -> io::Result<NonNull<c_void>> {
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe {
        mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    }?;
    NonNull::new(base).ok_or_else(|| io::Error::other("a mapping at address 0"))
}

impl Slots {
    fn take(&self) -> Option<Slot> {
        self.free.take().or_else(|| {
            let next = |from: usize| (from < self.count).then_some(from + 1);
            let index = self.unused_from.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
            Some(Slot { index, accessible: 0, counted: 0, freed_at: Instant::now() })
        })
    }

    fn start(&self, slot: &Slot) -> *mut u8 {
        let offset = slot.index * (self.reserved_bytes + self.guard_bytes);
        self.base.as_ptr().cast::<u8>().wrapping_add(offset)
    }

    /// Zeroes all bytes of a slot.
    fn wipe(&self, slot: &mut Slot) {
        self.kept.release(std::mem::take(&mut slot.counted));
        let (start, end) = (self.start(slot).addr(), self.start(slot).addr() + slot.accessible);
        let dropped_from = match self.overwrite(slot) {
            Some(until) => until,
            None => {
                let kept = slot.accessible.min(KEPT_BLIND_BYTES_MAX);
                self.zero(slot, 0, kept);
                start + kept
            }
        };
        if dropped_from < end && self.discard(slot, dropped_from - start, end - dropped_from).is_err() {
            // The kernel rejects only locked memory; then the range is overwritten with zeros.
            self.zero(slot, dropped_from - start, end - dropped_from);
        }
    }

    /// Overwrites the touched pages that are kept; returns the address up to which everything is zero, or `None` if the
    /// kernel does not support the request.
    fn overwrite(&self, slot: &mut Slot) -> Option<usize> {
        let start = self.start(slot).addr();
        let pages_max = self.kept.allowance() / PAGE_BYTES;
        let touched = self.pagemap.as_ref()?.touched(start, slot.accessible, pages_max).ok()?;
        for range in touched.ranges() {
            self.zero(slot, range.start - start, range.len());
        }
        slot.counted = self.kept.keep(touched.ranges().map(|range| range.len()).sum());
        Some(touched.looked_until)
    }

    fn zero(&self, slot: &Slot, offset: usize, bytes: usize) {
        assert!(offset + bytes <= slot.accessible, "outside the slot");
        // SAFETY: the range lies in the slot's accessible part (asserted), which belongs to `slot` alone: its instance
        // has been dropped, and the slot is not free yet.
        unsafe { ptr::write_bytes(self.start(slot).wrapping_add(offset), 0, bytes) }
    }

    fn discard(&self, slot: &Slot, offset: usize, bytes: usize) -> io::Result<()> {
        assert!(offset + bytes <= slot.accessible, "outside the slot");
        let at = self.start(slot).wrapping_add(offset).cast();
        // SAFETY: as in `zero`. The mapping is private and anonymous, so that released pages read as zeros.
        Ok(unsafe { madvise(at, bytes, Advice::LinuxDontNeed) }?)
    }

    /// Sets the size of a slot's accessible part.
    fn protect(&self, slot: &mut Slot, accessible: usize) -> io::Result<()> {
        let accessible = accessible.next_multiple_of(PAGE_BYTES).min(self.reserved_bytes);
        let (from, to, flags) = if accessible > slot.accessible {
            (slot.accessible, accessible, MprotectFlags::READ | MprotectFlags::WRITE)
        } else {
            (accessible, slot.accessible, MprotectFlags::empty())
        };
        if from < to {
            let at = self.start(slot).wrapping_add(from).cast();
            // SAFETY: the range lies within the slot, which is not shared.
            unsafe { mprotect(at, to - from, flags) }?;
            slot.accessible = accessible;
        }
        Ok(())
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let bytes = self.count * (self.reserved_bytes + self.guard_bytes);
        // SAFETY: every memory holds a reference to the slots, so none exists any more. On an error the reservation
        // stays.
        unsafe { munmap(self.base.as_ptr(), bytes) }.ok();
    }
}

// SAFETY: memories are zero (the invariant above), have the requested reservation and guard (checked), and never move.
unsafe impl MemoryCreator for MemoryPool {
    fn new_memory(
        &self,
        ty: MemoryType,
        minimum: usize,
        _: Option<usize>,
        reserved_size_in_bytes: Option<usize>,
        guard_size_in_bytes: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        if ty.is_shared() {
            return Err("memories shared between threads are not supported here".into());
        }
        if reserved_size_in_bytes.is_some_and(|bytes| bytes > self.0.reserved_bytes)
            || guard_size_in_bytes > self.0.guard_bytes
        {
            return Err("the engine requests larger memories than the slots".into());
        }
        Ok(Box::new(self.memory(minimum)?))
    }
}

/// One memory in use.
struct PooledMemory {
    slots: Arc<Slots>,
    slot: Slot,
    bytes: usize,
}

impl PooledMemory {
    /// Makes exactly this many bytes accessible: an earlier use of the slot may have had more.
    fn expose(&mut self, bytes: usize) -> io::Result<()> {
        self.slots.protect(&mut self.slot, bytes)
    }
}

impl Drop for PooledMemory {
    fn drop(&mut self) {
        let Slot { index, accessible, counted, .. } = self.slot;
        let mut slot = Slot { index, accessible, counted, freed_at: Instant::now() };
        self.slots.wipe(&mut slot);
        self.slots.free.put(slot);
    }
}

// SAFETY: the pointer is the slot's start, which never changes; the range of `byte_size` is accessible, and the rest up
// to the guard's end is not.
unsafe impl LinearMemory for PooledMemory {
    fn byte_size(&self) -> usize {
        self.bytes
    }

    fn byte_capacity(&self) -> usize {
        self.slots.reserved_bytes
    }

    fn grow_to(&mut self, new_size: usize) -> wasmtime::Result<()> {
        if new_size > self.slots.reserved_bytes {
            return Err(wasmtime::format_err!(
                "a linear memory has at most {} bytes here",
                self.byte_capacity()
            ));
        }
        self.expose(new_size)?;
        self.bytes = new_size;
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.slots.start(&self.slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESERVED: usize = 64 << 20;

    fn pool(wipe: Wipe) -> MemoryPool {
        MemoryPool::new(2, (RESERVED, 1 << 20), wipe, 48 << 20).unwrap()
    }

    fn bytes(memory: &mut PooledMemory) -> &mut [u8] {
        // SAFETY: the range is accessible, and borrowed from its only owner.
        unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), memory.bytes) }
    }

    /// A new memory is zero for all patterns of earlier writes.
    #[test]
    fn a_memory_starts_with_zeros() {
        for wipe in [Wipe::Auto, Wipe::Plain] {
            let pool = pool(wipe);
            let sizes = [1 << 16, 3 << 16, 1 << 20, 40 << 20, 1 << 16, 5 << 20, 40 << 20];
            for (round, size) in sizes.into_iter().enumerate() {
                let mut memory = pool.memory(size).unwrap();
                assert!(bytes(&mut memory).iter().all(|byte| *byte == 0), "{wipe:?}, round {round}");
                // All of it, every other page (more ranges than fit), a few pages far apart, its ends.
                match round % 4 {
                    0 => bytes(&mut memory).fill(0xa5),
                    1 => bytes(&mut memory).iter_mut().step_by(8192).for_each(|byte| *byte = 1),
                    2 => bytes(&mut memory).iter_mut().step_by(1 << 19).for_each(|byte| *byte = 1),
                    _ => {
                        bytes(&mut memory)[0] = 1;
                        bytes(&mut memory)[size - 1] = 1;
                    }
                }
            }
        }
    }

    #[test]
    fn a_free_slot_keeps_much_memory_until_it_is_unused() {
        let pool = pool(Wipe::Auto);
        if pool.0.pagemap.is_none() {
            eprintln!(
                "SKIPPED a_free_slot_keeps_much_memory_until_it_is_unused: this kernel cannot report touched pages \
                 (needs Linux 6.7)"
            );
            return;
        }
        let resident = |pool: &MemoryPool| {
            let pagemap = pool.0.pagemap.as_ref().unwrap();
            let touched = pagemap.touched(pool.0.base.as_ptr().addr(), RESERVED, usize::MAX / PAGE_BYTES);
            touched.unwrap().ranges().map(|range| range.len()).sum::<usize>()
        };
        let mut memory = pool.memory(20 << 20).unwrap();
        bytes(&mut memory).fill(1);
        drop(memory);
        assert_eq!(resident(&pool), 20 << 20);
        pool.release_unused(Duration::from_secs(3600));
        assert_eq!(resident(&pool), 20 << 20);
        let mut memory = pool.memory(20 << 20).unwrap();
        assert!(bytes(&mut memory).iter().all(|byte| *byte == 0));
        bytes(&mut memory).fill(1);
        drop(memory);
        pool.release_unused(Duration::ZERO);
        assert_eq!(resident(&pool), 0);
        assert!(pool.0.kept.is_unused());
        assert!(bytes(&mut pool.memory(20 << 20).unwrap()).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn memories_grow_in_place_up_to_their_reservation() {
        let pool = pool(Wipe::Auto);
        let mut memory = pool.memory(1 << 16).unwrap();
        let start = memory.as_ptr();
        memory.grow_to(RESERVED).unwrap();
        assert_eq!(memory.as_ptr(), start);
        bytes(&mut memory)[RESERVED - 1] = 7;
        assert!(memory.grow_to(RESERVED + 1).is_err());
        drop(memory);
        let again = pool.memory(1 << 16).unwrap();
        assert_eq!(again.as_ptr(), start, "the slot used last comes first");
        assert_eq!(again.slot.accessible, 1 << 16, "what the one before had is out of reach");
    }

    #[test]
    fn slots_run_out_and_come_back() {
        let pool = pool(Wipe::Auto);
        let (one, two) = (pool.memory(1).unwrap(), pool.memory(1).unwrap());
        assert_ne!(one.as_ptr(), two.as_ptr());
        assert!(pool.memory(1).is_err());
        drop(one);
        assert!(pool.memory(RESERVED + 1).is_err());
        pool.memory(1).unwrap();
    }

    #[test]
    fn touched_pages_are_found_and_the_page_of_zeros_is_not() {
        let pool = pool(Wipe::Auto);
        let Some(pagemap) = &pool.0.pagemap else {
            eprintln!(
                "SKIPPED touched_pages_are_found_and_the_page_of_zeros_is_not: this kernel cannot report touched \
                 pages (needs Linux 6.7)"
            );
            return;
        };
        let mut memory = pool.memory(16 * PAGE_BYTES).unwrap();
        assert_eq!(bytes(&mut memory)[3 * PAGE_BYTES], 0, "a page that was only read");
        bytes(&mut memory)[5 * PAGE_BYTES] = 1;
        bytes(&mut memory)[6 * PAGE_BYTES + 9] = 1;
        let start = memory.as_ptr().addr();
        let touched = pagemap.touched(start, 16 * PAGE_BYTES, 100).unwrap();
        let ranges: Vec<_> = touched.ranges().map(|range| (range.start - start, range.end - start)).collect();
        assert_eq!(ranges, [(5 * PAGE_BYTES, 7 * PAGE_BYTES)]);
        assert_eq!(touched.looked_until, start + 16 * PAGE_BYTES);
    }
}
