//! All routes: read by every request, written by one task.
//!
//! The table is split into shards, each an immutable map behind one atomic pointer. A reader takes no lock and never
//! waits; a change copies the pointers of one shard, about forty at 10,000 functions, and touches no other route.

use std::{
    collections::{BTreeMap, HashMap, hash_map::RandomState},
    hash::BuildHasher as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use arc_swap::ArcSwap;

use super::{FunctionRoute, RoutePlace};
use crate::refusal::Refusal;

/// The number of shards; a power of two.
const SHARDS: usize = 256;

/// All routes.
pub(crate) struct RouteTable {
    hasher: RandomState,
    shards: Box<[ArcSwap<Shard>]>,
    /// Whether the first list of functions has been applied.
    complete: AtomicBool,
}

#[derive(Clone, Default)]
struct Shard {
    /// Routes by `<namespace>/<name>`.
    functions: HashMap<Arc<str>, Arc<FunctionRoute>>,
    /// Hosts of tags by `<namespace>/<tag>-<name>`.
    tag_hosts: HashMap<Arc<str>, TagHost>,
}

/// The target of a tag's own host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TagHost {
    /// `<namespace>/<name>`
    pub(crate) function: Arc<str>,
    pub(crate) tag: Arc<str>,
}

/// A request's route.
pub(crate) struct FoundRoute {
    pub(crate) route: Arc<FunctionRoute>,
    /// The tag in the host.
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) by_host: bool,
}

/// Changes to apply together. `None` removes.
#[derive(Default)]
pub(crate) struct RouteChanges {
    pub(crate) functions: BTreeMap<Arc<str>, Option<Arc<FunctionRoute>>>,
    pub(crate) tag_hosts: BTreeMap<Arc<str>, Option<TagHost>>,
}

impl RouteTable {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| ArcSwap::default()).collect();
        Self { hasher: RandomState::new(), shards, complete: AtomicBool::new(false) }
    }

    pub(crate) fn find(&self, place: &RoutePlace<'_>) -> Result<FoundRoute, Refusal> {
        match place {
            RoutePlace::Path { key } => match self.function(key) {
                Some(route) => Ok(FoundRoute { route, tag: None, by_host: false }),
                None => Err(self.nothing_at(key)),
            },
            RoutePlace::Host { key } => {
                if let Some(route) = self.function(key) {
                    return Ok(FoundRoute { route, tag: None, by_host: true });
                }
                let tag_host = self.shard(key).load().tag_hosts.get(key.as_str()).cloned();
                let found = tag_host.and_then(|host| Some((self.function(&host.function)?, host.tag)));
                match found {
                    Some((route, tag)) => Ok(FoundRoute { route, tag: Some(tag), by_host: true }),
                    None => Err(self.nothing_at(key)),
                }
            }
            RoutePlace::Nowhere => Err(Refusal::no_route()),
        }
    }

    /// The route of `<namespace>/<name>`.
    pub(crate) fn function(&self, key: &str) -> Option<Arc<FunctionRoute>> {
        self.shard(key).load().functions.get(key).cloned()
    }

    fn nothing_at(&self, key: &str) -> Refusal {
        if !self.complete.load(Ordering::Acquire) {
            return Refusal::starting();
        }
        let (namespace, name) = key.rsplit_once('/').unwrap_or(("", key));
        Refusal::no_function(namespace, name)
    }

    /// Marks the table as complete: all objects that existed at the start are in it.
    pub(crate) fn set_complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Applies changes, atomically for each shard. Only the owner calls this.
    pub(crate) fn apply(&self, batch: RouteChanges) {
        let mut touched: HashMap<usize, Shard> = HashMap::new();
        let copy = |at: usize| Shard::clone(&self.shards[at].load());
        for (key, route) in batch.functions {
            let at = self.shard_at(&key);
            let shard = touched.entry(at).or_insert_with(|| copy(at));
            match route {
                Some(route) => shard.functions.insert(key, route),
                None => shard.functions.remove(&key),
            };
        }
        for (key, host) in batch.tag_hosts {
            let at = self.shard_at(&key);
            let shard = touched.entry(at).or_insert_with(|| copy(at));
            match host {
                Some(host) => shard.tag_hosts.insert(key, host),
                None => shard.tag_hosts.remove(&key),
            };
        }
        for (at, shard) in touched {
            self.shards[at].store(Arc::new(shard));
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.load().functions.len()).sum()
    }

    fn shard(&self, key: &str) -> &ArcSwap<Shard> {
        &self.shards[self.shard_at(key)]
    }

    fn shard_at(&self, key: &str) -> usize {
        // The modulus fits into any `usize`.
        usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0)
    }
}
