//! Instances, and the idle ones of a function with `isolation: reuse`.

use std::{sync::Arc, time::Duration};

use crate::{
    Config,
    cpu::slice,
    engine::Host,
    guest::{CONCURRENT_MAX, GuestProgram, StoreData},
    record::Recording,
    slots::InstanceSlot,
};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Bytes that a guest may pass to the host in one call: copying them cannot be interrupted. Streams pass 64 KiB at a
/// time.
const HOST_CALL_BYTES_MAX: usize = 8 << 20;
/// The number of calls between two checks of what an instance's calls have left behind.
const CALLS_PER_CHECK: u32 = 64;

pub(crate) type Store = wasmtime::Store<StoreData>;

/// A component's instance with its store and its slot.
pub(crate) struct Instance<E> {
    pub(crate) store: Store,
    pub(crate) exports: E,
    calls: u32,
    born: Instant,
    /// Dropped after the store, so that the slot becomes free after the instance.
    _slot: InstanceSlot,
}

impl<E> Instance<E> {
    pub(crate) fn new(store: Store, exports: E, slot: InstanceSlot) -> Self {
        Self { store, exports, calls: 0, born: Instant::now(), _slot: slot }
    }

    /// Assigns a reused instance to a call, which skips the phases of waiting for a slot and instantiation.
    pub(crate) fn record(&mut self, recording: &Recording) {
        recording.record(|call| call.instantiated = call.loaded);
        self.store.data_mut().memory.record(recording);
    }

    /// Whether calls have left so many handles or so much memory on the host that a later call could exceed the limit
    /// of either. Guests with a garbage collector drop handles late: JavaScript leaves three for each request.
    fn retains_much(&mut self) -> bool {
        let concurrent = self.store.concurrent_resource_table();
        let concurrent = concurrent.map_or(0, |table| table.iter_mut().count());
        concurrent > CONCURRENT_MAX / 2 || self.store.data_mut().retains_much()
    }
}

/// A store with this host's rules: limits, and yielding at the end of each time slice.
pub(crate) fn store(host: &Host, program: Arc<GuestProgram>) -> Store {
    let mut store = Store::new(&host.engine, StoreData::new(program));
    store.limiter(|guest| &mut guest.memory);
    store.epoch_deadline_callback(|mut store| {
        let guest = store.data_mut();
        guest.tick()?;
        Ok(slice::at_tick(guest.program.lane.clock()))
    });
    store.set_epoch_deadline(1);
    store.set_hostcall_fuel(HOST_CALL_BYTES_MAX);
    if let Some(concurrent) = store.concurrent_resource_table() {
        concurrent.set_max_capacity(CONCURRENT_MAX);
    }
    store
}

/// Idle instances of one revision, most recently used first.
pub(crate) struct Idle<E> {
    instances: Mutex<Vec<Instance<E>>>,
    calls_max: u32,
    age_max: Duration,
    idle_max: usize,
}

impl<E> Idle<E> {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            instances: Mutex::default(),
            calls_max: config.reuse_calls_max,
            age_max: config.reuse_age_max,
            idle_max: config.reuse_idle_max,
        }
    }

    /// Takes the most recently used instance; also returns the number of expired ones that were dropped.
    pub(crate) fn take(&self, now: Instant) -> (Option<Instance<E>>, u64) {
        let mut too_old = 0;
        while let Some(instance) = self.pop() {
            if now.saturating_duration_since(instance.born) < self.age_max {
                return (Some(instance), too_old);
            }
            too_old += 1;
        }
        (None, too_old)
    }

    /// Ensures that no instance is dropped while the lock is held.
    fn pop(&self) -> Option<Instance<E>> {
        self.instances.lock().pop()
    }

    /// Puts an instance back after a successful call; `false` if it has reached its limit of calls, retains much on the
    /// host, or enough others are idle.
    pub(crate) fn put(&self, mut instance: Instance<E>) -> bool {
        instance.calls += 1;
        let is_checked = instance.calls.is_multiple_of(CALLS_PER_CHECK);
        if instance.calls >= self.calls_max || is_checked && instance.retains_much() {
            return false;
        }
        let mut instances = self.instances.lock();
        if instances.len() >= self.idle_max {
            return false;
        }
        instances.push(instance);
        true
    }

    pub(crate) fn len(&self) -> usize {
        self.instances.lock().len()
    }

    /// Drops the least recently used instance, which releases its slot; returns whether there was one.
    pub(crate) fn drop_one(&self) -> bool {
        let mut instances = self.instances.lock();
        let dropped = if instances.is_empty() { None } else { Some(instances.remove(0)) };
        drop(instances);
        dropped.is_some()
    }

    /// Drops all idle instances.
    pub(crate) fn clear(&self) {
        let instances = std::mem::take(&mut *self.instances.lock());
        drop(instances);
    }
}
