//! The memory of instances: linear memories and native stacks, reserved once, reused, and wiped between instances.
//!
//! wasmtime has a pooling allocator of its own. This host does not use it, for two reasons. To find the touched pages
//! of a memory it asks the kernel for those that are present, which misses a page that is swapped out or being moved;
//! and it keeps slots for tables and instances, which the process's allocator allocates faster. Here a page counts as
//! touched when the kernel has *any* record of it.

mod kept;
mod memory;
mod pagemap;
mod stack;

pub(crate) use memory::MemoryPool;
pub(crate) use stack::StackPool;

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Free lists, one per core, so that a thread usually uses its own: it takes the item that it used last and that is
/// still in its caches.
#[derive(Debug)]
struct FreeLists<T>(Box<[Padded<Mutex<Vec<T>>>]>);

/// Prevents false sharing of neighbouring lists.
#[derive(Debug)]
#[repr(align(128))]
struct Padded<T>(T);

impl<T> FreeLists<T> {
    fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self((0..cores).map(|_| Padded(Mutex::default())).collect())
    }

    /// The item that this thread freed last, or any other.
    fn take(&self) -> Option<T> {
        let own = shard() % self.0.len();
        (0..self.0.len()).find_map(|step| self.0[(own + step) % self.0.len()].0.lock().pop())
    }

    /// Removes the items that satisfy the condition.
    fn extract(&self, condition: impl Fn(&T) -> bool) -> Vec<T> {
        self.0
            .iter()
            .flat_map(|list| list.0.lock().extract_if(.., |item| condition(item)).collect::<Vec<_>>())
            .collect()
    }

    fn put(&self, place: T) {
        self.0[shard() % self.0.len()].0.lock().push(place);
    }
}

/// The list index of this thread.
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    OWN.with(|own| *own)
}
