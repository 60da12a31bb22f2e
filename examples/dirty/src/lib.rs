//! A guest for the isolation test: `/fill` writes a pattern to all the memory that it can allocate; `/probe` allocates
//! all that it can and counts existing occurrences of the pattern, of which a new instance must have none.

use std::arch::wasm32::{memory_grow, memory_size};
use std::sync::atomic::{AtomicU64, Ordering};

use mayfly::{Request, Response};

const PAGE_BYTES: usize = 64 << 10;
/// One page less than the maximum of a 32-bit memory, so that its size in bytes fits a `usize`.
const PAGES_MAX: usize = (1 << 16) - 1;
const PATTERN: u64 = 0xD1_57_1E57_D1_57_1E57;
/// Memory reserved for the response, in bytes: growing the memory leaves the allocator none.
const RESERVE_BYTES: usize = 1 << 20;

/// A mark in a static.
static MARK: AtomicU64 = AtomicU64::new(0);

#[mayfly::http]
async fn dirty(request: Request) -> Response {
    let fill = request.path() == "/fill";
    drop(std::hint::black_box(vec![if fill { PATTERN } else { 0 }; RESERVE_BYTES / 8]));
    let start = memory_size(0) * PAGE_BYTES;
    while memory_size(0) < PAGES_MAX && memory_grow(0, 1) != usize::MAX {}
    let end = memory_size(0) * PAGE_BYTES;
    if fill {
        MARK.store(PATTERN, Ordering::Relaxed);
        write_pattern(start, end);
        return Response::text(format!("{{\"filledBytes\":{}}}\n", end - start));
    }
    let mark = u64::from(MARK.load(Ordering::Relaxed) == PATTERN);
    Response::text(format!("{{\"scannedBytes\":{end},\"hits\":{}}}\n", mark + count_pattern(end)))
}

fn write_pattern(start: usize, end: usize) {
    for address in (start..end).step_by(8) {
        // SAFETY: the address is within the memory, in pages that were just added and that nothing else uses.
        unsafe { std::ptr::with_exposed_provenance_mut::<u64>(address).write_volatile(PATTERN) };
    }
}

fn count_pattern(end: usize) -> u64 {
    let mut hits = 0;
    // Starts at 8, because Rust has no pointer to 0.
    for address in (8..end).step_by(8) {
        // SAFETY: the address is within the memory, all of which is readable.
        let word = unsafe { std::ptr::with_exposed_provenance::<u64>(address).read_volatile() };
        hits += u64::from(word == PATTERN);
    }
    hits
}
