//! Signals all connections to drain or to close, at almost no cost before that.
//!
//! A connection reads its own atomic each time it is polled. (A cancellation token polled by all connections is one
//! lock that all cores take, several times for each request.)

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Waker},
};

use futures::task::AtomicWaker;
use parking_lot::Mutex;

/// The requested state of connections, in increasing order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Signal {
    #[default]
    Serve,
    /// Accept no new requests; close after those in flight are answered.
    Drain,
    /// Close now.
    Cut,
}

/// The sender of the signal.
#[derive(Default)]
pub(super) struct Signals(Mutex<Registry>);

#[derive(Default)]
struct Registry {
    said: Signal,
    next: u64,
    listeners: HashMap<u64, Arc<Ear>>,
}

#[derive(Default)]
struct Ear {
    heard: AtomicU8,
    waker: AtomicWaker,
}

/// A connection's receiver of signals. Unregistered when dropped.
pub(super) struct Listener<'a> {
    signals: &'a Signals,
    number: u64,
    ear: Arc<Ear>,
    /// The waker of the connection's task.
    waker: Option<Waker>,
}

impl Signals {
    pub(super) fn say(&self, signal: Signal) {
        let mut registry = self.0.lock();
        registry.said = registry.said.max(signal);
        for ear in registry.listeners.values() {
            ear.heard.store(registry.said as u8, Ordering::Release);
            ear.waker.wake();
        }
    }

    pub(super) fn listen(&self) -> Listener<'_> {
        let mut registry = self.0.lock();
        let ear = Arc::new(Ear { heard: AtomicU8::new(registry.said as u8), waker: AtomicWaker::new() });
        let number = registry.next;
        registry.next += 1;
        registry.listeners.insert(number, ear.clone());
        Listener { signals: self, number, ear, waker: None }
    }
}

impl Listener<'_> {
    /// The last signal. Registers the task to be woken by the next one.
    pub(super) fn poll(&mut self, context: &Context<'_>) -> Signal {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            self.ear.waker.register(context.waker());
            self.waker = Some(context.waker().clone());
        }
        match self.ear.heard.load(Ordering::Acquire) {
            heard if heard == Signal::Serve as u8 => Signal::Serve,
            heard if heard == Signal::Drain as u8 => Signal::Drain,
            _ => Signal::Cut,
        }
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.signals.0.lock().listeners.remove(&self.number);
    }
}
