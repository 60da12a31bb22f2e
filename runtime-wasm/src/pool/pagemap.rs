//! Queries the touched pages of a range from the kernel (`PAGEMAP_SCAN`, since Linux 6.7).

#![expect(unsafe_code, reason = "an ioctl takes pointers; each use has a SAFETY comment")]

use std::{ffi::c_void, fs::File, io, ops::Range, ptr};

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// The number of ranges that one query can return; the remainder behind them is discarded as a whole.
const RANGES_MAX: usize = 48;

/// Categories of a page, as in the kernel's `include/uapi/linux/fs.h`.
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO: u64 = 1 << 5;

/// The page map of this process.
#[derive(Debug)]
pub(super) struct PageMap(File);

/// `struct pm_scan_arg`.
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    ranges: u64,
    ranges_len: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRange {
    start: u64,
    end: u64,
    categories: u64,
}

/// Touched pages of a range.
pub(super) struct Touched {
    ranges: [PageRange; RANGES_MAX],
    count: usize,
    /// The end of the scanned range.
    pub(super) looked_until: usize,
}

impl Touched {
    /// Addresses.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let address = |address| usize::try_from(address).unwrap_or(usize::MAX);
        self.ranges[..self.count].iter().map(move |range| address(range.start)..address(range.end))
    }
}

impl PageMap {
    /// `None` if this kernel does not support the request.
    pub(super) fn open() -> Option<Self> {
        let map = Self(File::open("/proc/self/pagemap").ok()?);
        let here = &raw const map;
        map.touched(here.addr() & !4095, 4096, 1).ok()?;
        Some(map)
    }

    /// The pages of a range that may hold anything but zeros: present, swapped out, or being moved or swapped, except
    /// the kernel's zero page. At most `pages_max` of them.
    pub(super) fn touched(&self, start: usize, bytes: usize, pages_max: usize) -> io::Result<Touched> {
        let mut touched =
            Touched { ranges: [PageRange::default(); RANGES_MAX], count: 0, looked_until: start };
        let scan = Scan {
            size: size_of::<Scan>() as u64,
            flags: 0,
            start: start as u64,
            end: (start + bytes) as u64,
            walk_end: 0,
            ranges: ptr::from_mut(&mut touched.ranges).addr() as u64,
            ranges_len: RANGES_MAX as u64,
            pages_max: pages_max as u64,
            inverted: ZERO,
            all_of: ZERO,
            any_of: PRESENT | SWAPPED,
            returned: 0,
        };
        // SAFETY: the structure is what this ioctl takes; `ranges` outlives the call and is as long as
        // `ranges_len` says. The kernel reads page tables and writes nothing else.
        let (count, looked_until) = unsafe { ioctl(&self.0, ScanCall(scan)) }?;
        touched.count = count.min(RANGES_MAX);
        touched.looked_until = looked_until;
        Ok(touched)
    }
}

struct ScanCall(Scan);

// SAFETY: the opcode is `_IOWR('f', 16, struct pm_scan_arg)`, and the pointer given is to that structure,
// which the kernel writes back into.
unsafe impl Ioctl for ScanCall {
    type Output = (usize, usize);

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<Scan>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, scan: *mut c_void) -> rustix::io::Result<Self::Output> {
        // SAFETY: the pointer is what `as_ptr` gave.
        let walk_end = unsafe { (*scan.cast::<Scan>()).walk_end };
        let count = usize::try_from(output).map_err(|_| rustix::io::Errno::INVAL)?;
        Ok((count, usize::try_from(walk_end).map_err(|_| rustix::io::Errno::INVAL)?))
    }
}
