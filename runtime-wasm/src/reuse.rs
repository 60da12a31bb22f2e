//! Instances, and the idle ones that a function with `isolation: reuse` keeps.

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

/// Bytes that a guest may hand to its host in one call: copying them is not interrupted. Streams take 64 KiB at a time.
const HOST_CALL_BYTES_MAX: usize = 8 << 20;

pub(crate) type Store = wasmtime::Store<StoreData>;

/// A component's instance, and all that belongs to it.
pub(crate) struct Instance<E> {
    pub(crate) store: Store,
    pub(crate) exports: E,
    calls: u32,
    born: Instant,
    /// Dropped after the store, so that the slot is free only when the instance is gone.
    _slot: InstanceSlot,
}

impl<E> Instance<E> {
    pub(crate) fn new(store: Store, exports: E, slot: InstanceSlot) -> Self {
        Self { store, exports, calls: 0, born: Instant::now(), _slot: slot }
    }

    /// From now on it is for this call, which neither waits for it nor has it made.
    pub(crate) fn record(&mut self, recording: &Recording) {
        recording.record(|call| call.instantiated = call.loaded);
        self.store.data_mut().memory.record(recording);
    }
}

/// A store with this host's rules: limits, and giving the thread back at the end of each time slice.
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

/// Idle instances of one revision, the last used first.
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

    /// The instance used last, and how many expired ones were dropped on the way to it.
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

    /// So that an instance is not dropped with the lock held.
    fn pop(&self) -> Option<Instance<E>> {
        self.instances.lock().pop()
    }

    /// Takes an instance back after a call that went well; `false` if it was at its end.
    pub(crate) fn put(&self, mut instance: Instance<E>) -> bool {
        instance.calls += 1;
        if instance.calls >= self.calls_max {
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

    /// Drops the instance not used for longest, and so releases its slot; returns whether there was one.
    pub(crate) fn drop_one(&self) -> bool {
        let mut instances = self.instances.lock();
        let dropped = if instances.is_empty() { None } else { Some(instances.remove(0)) };
        drop(instances);
        dropped.is_some()
    }

    /// Drops all of them.
    pub(crate) fn clear(&self) {
        let instances = std::mem::take(&mut *self.instances.lock());
        drop(instances);
    }
}
