//! Instance slots: the limit of concurrent instances, and its shares per function.
//!
//! A slot is taken without a lock while enough are free. No function can take all of them: it may hold as many as are
//! still free, and its namespace twice as many. So one function gets at most half of all slots, the next one half of
//! the rest, and a slot for another function is always free. A few slots may be taken beyond the share while they are
//! free ([`FLOOR`]).
//!
//! If functions wait for slots, the next free one goes to the function that holds the fewest.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

/// Instance slots that a function or a namespace may hold beyond its share while they are free.
const FLOOR: usize = 8;
/// The share of a namespace, as a multiple of a function's share.
const NAMESPACE_FACTOR: usize = 2;

/// All slots of a host.
pub(crate) struct InstanceSlots {
    max: AtomicUsize,
    free: AtomicUsize,
    /// The maximum per function; `None`: as many as are free.
    function_max: Option<usize>,
    namespaces: Mutex<HashMap<String, Weak<Namespace>>>,
    functions: Mutex<HashMap<(String, String), Weak<SlotShare>>>,
    waiting: Mutex<Vec<Arc<SlotShare>>>,
    waiters: AtomicUsize,
}

struct Namespace {
    held: AtomicUsize,
}

/// The slots that one function holds, over all its revisions.
pub(crate) struct SlotShare {
    slots: Arc<InstanceSlots>,
    key: (String, String),
    namespace: Arc<Namespace>,
    held: AtomicUsize,
    freed: Notify,
}

/// A slot for one instance, released on drop.
pub(crate) struct InstanceSlot(Arc<SlotShare>);

/// Whether a function may take one more slot; `free` includes that slot.
fn may_take(held: usize, namespace_held: usize, free: usize, function_max: Option<usize>) -> bool {
    let function_max = function_max.unwrap_or(free.max(FLOOR));
    let namespace_max = free.saturating_mul(NAMESPACE_FACTOR).max(FLOOR);
    free > 0 && held < function_max && namespace_held < namespace_max
}

impl InstanceSlots {
    pub(crate) fn new(max: usize, function_max: Option<usize>) -> Arc<Self> {
        Arc::new(Self {
            max: max.into(),
            free: max.into(),
            function_max,
            namespaces: Mutex::default(),
            functions: Mutex::default(),
            waiting: Mutex::default(),
            waiters: AtomicUsize::new(0),
        })
    }

    pub(crate) fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// Number of taken slots.
    pub(crate) fn held(&self) -> usize {
        self.max().saturating_sub(self.free.load(Ordering::Relaxed))
    }

    /// Reduces the number of slots. Only allowed before the first one is taken.
    pub(crate) fn shrink(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
        self.free.store(max, Ordering::Relaxed);
    }

    /// The share of a function.
    pub(crate) fn share(self: &Arc<Self>, namespace: &str, function: &str) -> Arc<SlotShare> {
        let key = (namespace.to_owned(), function.to_owned());
        let mut functions = self.functions.lock();
        if let Some(share) = functions.get(&key).and_then(Weak::upgrade) {
            return share;
        }
        let namespace = self.namespace(namespace);
        let (held, freed) = (AtomicUsize::new(0), Notify::new());
        let share = Arc::new(SlotShare { slots: self.clone(), key: key.clone(), namespace, held, freed });
        functions.insert(key, Arc::downgrade(&share));
        share
    }

    fn namespace(&self, name: &str) -> Arc<Namespace> {
        let mut namespaces = self.namespaces.lock();
        if let Some(namespace) = namespaces.get(name).and_then(Weak::upgrade) {
            return namespace;
        }
        let namespace = Arc::new(Namespace { held: AtomicUsize::new(0) });
        namespaces.insert(name.to_owned(), Arc::downgrade(&namespace));
        namespace
    }

    /// Whether a function waits for a slot.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.waiters.load(Ordering::SeqCst) > 0
    }

    /// Wakes a waiter of the function that holds the fewest slots, among those that may take one now.
    fn wake_next(&self) {
        if !self.is_waited_for() {
            return;
        }
        let waiting = self.waiting.lock();
        let ready = waiting.iter().filter(|share| share.may_take());
        if let Some(share) = ready.min_by_key(|share| share.held.load(Ordering::Relaxed)) {
            share.freed.notify_one();
        }
    }
}

impl SlotShare {
    fn may_take(&self) -> bool {
        let [held, namespace_held, free] =
            [&self.held, &self.namespace.held, &self.slots.free].map(|count| count.load(Ordering::SeqCst));
        may_take(held, namespace_held, free, self.slots.function_max)
    }

    /// Number of slots that the function holds.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    pub(crate) fn slots(&self) -> &Arc<InstanceSlots> {
        &self.slots
    }

    /// Takes a slot, if one is free within the function's share. Two concurrent calls may exceed the share by one.
    pub(crate) fn try_take(self: &Arc<Self>) -> Option<InstanceSlot> {
        if !self.may_take() {
            return None;
        }
        let less = |free: usize| free.checked_sub(1);
        self.slots.free.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).ok()?;
        self.held.fetch_add(1, Ordering::SeqCst);
        self.namespace.held.fetch_add(1, Ordering::SeqCst);
        Some(InstanceSlot(self.clone()))
    }

    /// Registers a waiter: from now on instances that end are not kept idle, and freed slots wake it.
    pub(crate) fn wait(self: &Arc<Self>) -> SlotWait<'_> {
        self.slots.waiters.fetch_add(1, Ordering::SeqCst);
        self.slots.waiting.lock().push(self.clone());
        SlotWait(self)
    }
}

impl Drop for SlotShare {
    fn drop(&mut self) {
        let mut functions = self.slots.functions.lock();
        // A new share may have replaced this one.
        if functions.get(&self.key).is_some_and(|share| share.strong_count() == 0) {
            functions.remove(&self.key);
        }
        drop(functions);
        let mut namespaces = self.slots.namespaces.lock();
        // The reference of this share is the last one.
        if Arc::strong_count(&self.namespace) == 1 {
            namespaces.remove(&self.key.0);
        }
    }
}

impl Drop for InstanceSlot {
    fn drop(&mut self) {
        let share = &self.0;
        share.held.fetch_sub(1, Ordering::SeqCst);
        share.namespace.held.fetch_sub(1, Ordering::SeqCst);
        share.slots.free.fetch_add(1, Ordering::SeqCst);
        share.slots.wake_next();
    }
}

/// One call that waits for a slot.
pub(crate) struct SlotWait<'a>(&'a Arc<SlotShare>);

impl SlotWait<'_> {
    /// Waits for a slot; `None` if there was none by `until`.
    pub(crate) async fn slot(self, until: Instant) -> Option<InstanceSlot> {
        loop {
            let mut freed = std::pin::pin!(self.0.freed.notified());
            // Registered before the check, so that a slot freed in between wakes this task.
            freed.as_mut().enable();
            if let Some(slot) = self.0.try_take() {
                return Some(slot);
            }
            tokio::time::timeout_at(until, freed).await.ok()?;
        }
    }
}

impl Drop for SlotWait<'_> {
    /// Wakes the next waiter, for a wake-up that was not used or for further free slots.
    fn drop(&mut self) {
        let slots = &self.0.slots;
        slots.waiters.fetch_sub(1, Ordering::SeqCst);
        let mut waiting = slots.waiting.lock();
        if let Some(at) = waiting.iter().position(|share| Arc::ptr_eq(share, self.0)) {
            waiting.swap_remove(at);
        }
        drop(waiting);
        slots.wake_next();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn take_all(share: &Arc<SlotShare>) -> Vec<InstanceSlot> {
        std::iter::from_fn(|| share.try_take()).collect()
    }

    #[test]
    fn no_function_takes_all_slots() {
        let slots = InstanceSlots::new(2000, None);
        let greedy = take_all(&slots.share("a", "greedy"));
        assert_eq!(greedy.len(), 1000);
        let second = take_all(&slots.share("a", "second"));
        assert_eq!(second.len(), 334, "two thirds are the namespace's share");
        let other = take_all(&slots.share("b", "other"));
        assert_eq!(other.len(), 333, "half of what was left");
        assert!(slots.share("c", "late").try_take().is_some());
        drop((greedy, second, other));
        assert_eq!(slots.held(), 0);
        assert_eq!(take_all(&slots.share("a", "greedy")).len(), 1000);
    }

    #[test]
    fn a_small_host_gives_all_slots_to_the_first_function() {
        for max in [1, 3, FLOOR] {
            let slots = InstanceSlots::new(max, None);
            assert_eq!(take_all(&slots.share("a", "f")).len(), max);
        }
    }

    #[test]
    fn configured_function_max_limits_slots() {
        let slots = InstanceSlots::new(100, Some(3));
        assert_eq!(take_all(&slots.share("a", "f")).len(), 3);
        let slots = InstanceSlots::new(100, Some(90));
        assert_eq!(take_all(&slots.share("a", "f")).len(), 67, "the namespace's share stays");
    }

    #[test]
    fn revisions_of_a_function_share() {
        let slots = InstanceSlots::new(100, None);
        let old = take_all(&slots.share("a", "f"));
        assert!(!old.is_empty() && slots.share("a", "f").try_take().is_none());
        drop(old);
        assert!(slots.functions.lock().is_empty() && slots.namespaces.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_function_that_holds_fewest_gets_the_next_slot() {
        let slots = InstanceSlots::new(3, None);
        let (rich, poor) = (slots.share("a", "rich"), slots.share("b", "poor"));
        let mut held = take_all(&rich);
        let until = Instant::now() + Duration::from_secs(60);
        let wait = |share: &Arc<SlotShare>| {
            let share = share.clone();
            tokio::spawn(async move { share.wait().slot(until).await.map(|slot| (Instant::now(), slot)) })
        };
        let first = wait(&rich);
        tokio::task::yield_now().await;
        let second = wait(&poor);
        tokio::task::yield_now().await;
        assert!(slots.is_waited_for());
        held.pop();
        let poor_slot = second.await.unwrap();
        assert!(poor_slot.is_some() && !first.is_finished());
        held.pop();
        assert!(first.await.unwrap().is_some());
        assert!(!slots.is_waited_for());
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_waiter_passes_on_its_wakeup() {
        let slots = InstanceSlots::new(1, None);
        let share = slots.share("a", "f");
        let held = share.try_take();
        let soon = Instant::now() + Duration::from_millis(1);
        assert!(share.wait().slot(soon).await.is_none());
        let other = slots.share("b", "g");
        let waiting =
            tokio::spawn(async move { other.wait().slot(soon + Duration::from_secs(1)).await.is_some() });
        let gives_up = share.wait();
        tokio::task::yield_now().await;
        drop(held);
        drop(gives_up);
        assert!(waiting.await.unwrap());
    }
}
