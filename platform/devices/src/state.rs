//! The devices of a node and their allocations to containers. No locks, no clock, no calls.
//!
//! ```text
//!            connect            first list             stream ends            grace period over
//! (unknown) ─────────► connected ─────────► serving ─────────────────► stopped ─────────────► (removed)
//!                          ▲                   │ another socket serves        │
//!                          └───────────────────┴──────── connect ◄────────────┘
//! ```
//!
//! A resource may be served by several sockets: the last one connected is active, and another takes its place when its
//! connection ends. Each connection has a generation; a message of an older connection of the same socket is ignored.

mod alignment;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use mayfly_runtime::{DeviceAllocation, DeviceCounts, DeviceHealth, DeviceInUse, PodUid};

/// The time for which a resource without a plugin stays in the node's capacity (upstream's
/// `endpointStopGracePeriod`).
pub const STOP_GRACE: Duration = Duration::from_secs(300);

/// A device as reported by its plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceState {
    pub healthy: bool,
    /// The NUMA nodes near to it.
    pub numa: BTreeSet<i64>,
}

/// Identifies a connection of a plugin; increases with each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

/// The options of a plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointOptions {
    pub pre_start_required: bool,
    pub preferred_allocation: bool,
}

#[derive(Clone, Debug)]
struct Endpoint {
    socket: String,
    generation: Generation,
    options: EndpointOptions,
    /// `None` before its first list.
    devices: Option<BTreeMap<String, DeviceState>>,
    /// The end of its suspension, relative to the manager's start.
    suspended_until: Option<Duration>,
}

#[derive(Clone, Debug, Default)]
struct Resource {
    /// In the order of connection; the last one is active.
    endpoints: Vec<Endpoint>,
    /// The devices of the active endpoint; all are unhealthy without one.
    devices: BTreeMap<String, DeviceState>,
    /// The options of the last plugin that registered; unknown after a restart.
    options: Option<EndpointOptions>,
    /// When the last endpoint disconnected, relative to the manager's start.
    stopped: Option<Duration>,
}

/// The allocation of one resource to one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationEntry {
    /// Device ids by NUMA node; -1 for devices without topology.
    pub devices: BTreeMap<i64, BTreeSet<String>>,
    /// The plugin's encoded `ContainerAllocateResponse`; empty while the allocation is in progress.
    pub response: Vec<u8>,
}

impl AllocationEntry {
    pub fn ids(&self) -> BTreeSet<String> {
        self.devices.values().flatten().cloned().collect()
    }
}

/// Pod, container, resource.
pub type EntryKey = (PodUid, String, String);

/// The choice of a container's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The container already has them.
    Kept(BTreeSet<String>),
    /// The candidates, and those among them that must be chosen.
    From { available: BTreeSet<String>, must_include: BTreeSet<String>, count: usize },
}

/// The reason why no device can be chosen, in upstream's words where there are any.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ChoiceError {
    #[error(
        "changed request for resource {resource} of container {container}: it has {has} devices and asks for {asks}"
    )]
    Changed { resource: String, container: String, has: usize, asks: usize },
    #[error("cannot allocate unregistered device {0}: its plugin has not registered")]
    Unregistered(String),
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    Unhealthy(String),
    #[error("previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}")]
    NoLongerHealthy(String),
    #[error(
        "requested number of devices unavailable for {resource}: requested {asks}, available {available}"
    )]
    Unavailable { resource: String, asks: usize, available: usize },
}

impl ChoiceError {
    /// Whether the error is temporary, until the plugin is available again.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unregistered(_) | Self::Unhealthy(_))
    }
}

/// The devices of a node.
#[derive(Clone, Debug, Default)]
pub struct DeviceLedger {
    resources: BTreeMap<String, Resource>,
    removed: BTreeSet<String>,
    entries: BTreeMap<EntryKey, AllocationEntry>,
    generations: u64,
}

impl DeviceLedger {
    /// Numbers a connection before it is made: of two connections to one socket, the one that began later counts.
    pub fn begin_connection(&mut self) -> Generation {
        self.generations += 1;
        Generation(self.generations)
    }

    /// Records a registered plugin. A connected one with the same socket is replaced: the plugin restarted before the
    /// end of its old connection was noticed. Returns false, and changes nothing, if a connection to the socket that began
    /// later is known: this one may lead to the process before a restart.
    pub fn connect(
        &mut self,
        generation: Generation,
        resource: &str,
        socket: &str,
        options: EndpointOptions,
    ) -> bool {
        let known = self.resources.entry(resource.to_owned()).or_default();
        if known.endpoints.iter().any(|one| one.socket == socket && one.generation > generation) {
            return false;
        }
        known.endpoints.retain(|endpoint| endpoint.socket != socket);
        known.endpoints.push(Endpoint {
            socket: socket.to_owned(),
            generation,
            options,
            devices: None,
            suspended_until: None,
        });
        known.options = Some(options);
        known.stopped = None;
        self.removed.remove(resource);
        true
    }

    /// Applies a plugin's complete list. Returns whether anything changed.
    pub fn update(
        &mut self,
        resource: &str,
        generation: Generation,
        devices: BTreeMap<String, DeviceState>,
    ) -> bool {
        let Some(known) = self.resources.get_mut(resource) else { return false };
        let last = known.endpoints.last().map(|endpoint| endpoint.generation);
        let endpoint = known.endpoints.iter_mut().find(|endpoint| endpoint.generation == generation);
        let Some(endpoint) = endpoint else { return false };
        endpoint.devices = Some(devices.clone());
        let counts = last == Some(generation);
        let changed = counts && known.devices != devices;
        if counts {
            known.devices = devices;
        }
        changed
    }

    /// Records the end of a plugin's connection. Returns whether anything changed.
    pub fn disconnect(&mut self, resource: &str, generation: Generation, now: Duration) -> bool {
        let Some(known) = self.resources.get_mut(resource) else { return false };
        let before = known.endpoints.len();
        known.endpoints.retain(|endpoint| endpoint.generation != generation);
        if known.endpoints.len() == before {
            return false;
        }
        match known.endpoints.last() {
            Some(Endpoint { devices: Some(devices), .. }) => known.devices = devices.clone(),
            Some(Endpoint { devices: None, .. }) | None => {
                known.devices.values_mut().for_each(|device| device.healthy = false);
            }
        }
        if known.endpoints.is_empty() {
            known.stopped = Some(now);
        }
        true
    }

    /// Removes resources whose plugin has been unavailable for too long. Returns whether there were any.
    pub fn expire(&mut self, now: Duration) -> bool {
        let expired = |resource: &Resource| {
            resource.stopped.is_some_and(|stopped| now.saturating_sub(stopped) >= STOP_GRACE)
        };
        let gone: Vec<String> = self
            .resources
            .iter()
            .filter(|(_, resource)| expired(resource))
            .map(|(name, _)| name.clone())
            .collect();
        for name in &gone {
            self.resources.remove(name);
            self.removed.insert(name.clone());
        }
        !gone.is_empty()
    }

    pub fn counts(&self) -> DeviceCounts {
        let mut counts = DeviceCounts::default();
        for (name, resource) in &self.resources {
            let healthy = resource.devices.values().filter(|device| device.healthy).count();
            counts.capacity.insert(name.clone(), resource.devices.len() as u64);
            counts.allocatable.insert(name.clone(), healthy as u64);
        }
        for name in &self.removed {
            counts.capacity.insert(name.clone(), 0);
            counts.allocatable.insert(name.clone(), 0);
        }
        counts
    }

    /// The socket, generation and options of the plugin that serves the resource.
    pub fn endpoint(&self, resource: &str) -> Option<(Generation, EndpointOptions)> {
        let endpoint = self.resources.get(resource)?.endpoints.last()?;
        Some((endpoint.generation, endpoint.options))
    }

    /// The connection of the plugin with this socket.
    pub fn generation(&self, resource: &str, socket: &str) -> Option<Generation> {
        let endpoints = &self.resources.get(resource)?.endpoints;
        endpoints.iter().find(|endpoint| endpoint.socket == socket).map(|endpoint| endpoint.generation)
    }

    /// Records that a plugin's connection did not answer: it is not asked for allocations until `until`.
    pub fn suspend(&mut self, resource: &str, generation: Generation, until: Duration) {
        let endpoints = self.resources.get_mut(resource).into_iter().flat_map(|known| &mut known.endpoints);
        for endpoint in endpoints.filter(|endpoint| endpoint.generation == generation) {
            endpoint.suspended_until = Some(until);
        }
    }

    /// Whether the plugin that serves the resource is suspended.
    pub fn is_suspended(&self, resource: &str, now: Duration) -> bool {
        let active = self.resources.get(resource).and_then(|known| known.endpoints.last());
        active.and_then(|endpoint| endpoint.suspended_until).is_some_and(|until| now < until)
    }

    /// Whether the plugin has to be called before a container with its devices starts. A plugin that is away needs the
    /// call as its last connection did, and an unknown one may need it.
    pub fn needs_pre_start(&self, resource: &str) -> bool {
        let Some(known) = self.resources.get(resource) else { return true };
        let active = known.endpoints.last().map(|endpoint| endpoint.options);
        active.or(known.options).is_none_or(|options| options.pre_start_required)
    }

    /// The devices that a container may get. `reusable`: those of init containers of its pod that have ended.
    ///
    /// # Errors
    /// There are too few devices.
    pub fn choose(
        &self,
        key: &EntryKey,
        asks: usize,
        reusable: &BTreeSet<String>,
    ) -> Result<DeviceChoice, ChoiceError> {
        let (_, container, resource) = key;
        let known = self.resources.get(resource);
        let healthy: BTreeSet<&String> = known
            .into_iter()
            .flat_map(|known| &known.devices)
            .filter(|(_, device)| device.healthy)
            .map(|(id, _)| id)
            .collect();
        if let Some(entry) = self.entries.get(key) {
            let has = entry.ids();
            return match has.len() == asks {
                true => Ok(DeviceChoice::Kept(has)),
                false => Err(ChoiceError::Changed {
                    resource: resource.clone(),
                    container: container.clone(),
                    has: has.len(),
                    asks,
                }),
            };
        }
        if known.is_none_or(|known| known.endpoints.is_empty()) {
            return Err(ChoiceError::Unregistered(resource.clone()));
        }
        if healthy.is_empty() {
            return Err(ChoiceError::Unhealthy(resource.clone()));
        }
        if !reusable.iter().all(|id| healthy.contains(id)) {
            return Err(ChoiceError::NoLongerHealthy(resource.clone()));
        }
        let used = self.used(resource);
        let mut available: BTreeSet<String> =
            healthy.into_iter().filter(|id| !used.contains(*id)).cloned().collect();
        available.extend(reusable.iter().cloned());
        if available.len() < asks {
            let resource = resource.clone();
            return Err(ChoiceError::Unavailable { resource, asks, available: available.len() });
        }
        let must_include = reusable.iter().take(asks).cloned().collect();
        Ok(DeviceChoice::From { available, must_include, count: asks })
    }

    /// The plugin's preference as far as it is valid, completed in the order of the ids.
    pub fn pick(
        available: &BTreeSet<String>,
        must_include: &BTreeSet<String>,
        count: usize,
        preferred: &[String],
    ) -> BTreeSet<String> {
        let mut picked: BTreeSet<String> = must_include.iter().take(count).cloned().collect();
        let preferred = preferred.iter().filter(|id| available.contains(*id));
        for id in preferred.chain(available) {
            if picked.len() == count {
                break;
            }
            picked.insert(id.clone());
        }
        picked
    }

    fn used(&self, resource: &str) -> HashSet<&String> {
        let of = self.entries.iter().filter(|((_, _, name), _)| name == resource);
        of.flat_map(|(_, entry)| entry.devices.values().flatten()).collect()
    }

    /// Reserves the devices for the container; the plugin's answer follows.
    pub fn reserve(&mut self, key: EntryKey, ids: &BTreeSet<String>) {
        let known = self.resources.get(&key.2);
        let mut devices: BTreeMap<i64, BTreeSet<String>> = BTreeMap::new();
        for id in ids {
            let numa = known.and_then(|known| known.devices.get(id)).map(|device| &device.numa);
            match numa.filter(|numa| !numa.is_empty()) {
                None => {
                    devices.entry(-1).or_default().insert(id.clone());
                }
                Some(nodes) => {
                    for node in nodes {
                        devices.entry(*node).or_default().insert(id.clone());
                    }
                }
            }
        }
        self.entries.insert(key, AllocationEntry { devices, response: Vec::new() });
    }

    /// Completes an allocation with the plugin's answer.
    pub fn complete(&mut self, key: &EntryKey, response: Vec<u8>) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.response = response;
        }
    }

    pub fn entry(&self, key: &EntryKey) -> Option<&AllocationEntry> {
        self.entries.get(key)
    }

    /// Cancels an allocation that the plugin refused.
    pub fn cancel(&mut self, key: &EntryKey) {
        self.entries.remove(key);
    }

    /// Releases the devices of a pod. Returns whether it had any.
    pub fn release(&mut self, pod: &PodUid) -> bool {
        let before = self.entries.len();
        self.entries.retain(|(uid, _, _), _| uid != pod);
        self.entries.len() != before
    }

    /// Releases the devices of all pods that are not in `pods`. Returns whether there were any.
    pub fn retain(&mut self, pods: &HashSet<String>) -> bool {
        let before = self.entries.len();
        self.entries.retain(|(uid, _, _), _| pods.contains(&uid.0));
        self.entries.len() != before
    }

    /// The devices of a pod. Several shares of a device (ids `DEVICE::SHARE`, as NVIDIA's plugin makes them) are one
    /// device, with the health of the worst.
    pub fn in_use(&self, pod: &PodUid) -> Vec<DeviceInUse> {
        let first = (pod.clone(), String::new(), String::new());
        let mut devices: BTreeMap<(&str, &str, &str), DeviceHealth> = BTreeMap::new();
        let entries = self.entries.range(first..).take_while(|((of, ..), _)| of == pod);
        for ((_, container, resource), entry) in entries {
            for id in entry.devices.values().flatten() {
                let device = id.split_once("::").map_or(id.as_str(), |(device, _)| device);
                let health = devices.entry((container, resource, device)).or_insert(DeviceHealth::Healthy);
                *health = (*health).max(self.health(resource, id));
            }
        }
        let in_use = devices.into_iter().map(|((container, resource, device), health)| DeviceInUse {
            container: container.to_owned(),
            resource: resource.to_owned(),
            device: device.to_owned(),
            health,
        });
        in_use.collect()
    }

    fn health(&self, resource: &str, id: &str) -> DeviceHealth {
        let Some(known) = self.resources.get(resource) else { return DeviceHealth::Unknown };
        match (known.endpoints.last(), known.devices.get(id)) {
            (None, _) | (_, None) => DeviceHealth::Unknown,
            (_, Some(device)) if device.healthy => DeviceHealth::Healthy,
            // Marked when the last connection ended; the new one has not reported its devices yet.
            (Some(Endpoint { devices: None, .. }), _) => DeviceHealth::Unknown,
            _ => DeviceHealth::Unhealthy,
        }
    }

    pub fn allocations(&self) -> Vec<DeviceAllocation> {
        let allocation =
            |((pod, container, resource), entry): (&EntryKey, &AllocationEntry)| DeviceAllocation {
                pod: pod.clone(),
                container: container.clone(),
                resource: resource.clone(),
                devices: entry.ids().into_iter().collect(),
            };
        self.entries.iter().map(allocation).collect()
    }

    /// The content of the checkpoint: complete allocations, and the healthy devices of each resource.
    pub fn snapshot(&self) -> (Vec<(&EntryKey, &AllocationEntry)>, BTreeMap<String, Vec<String>>) {
        let entries = self.entries.iter().filter(|(_, entry)| !entry.response.is_empty()).collect();
        let healthy = |resource: &Resource| {
            let devices = resource.devices.iter().filter(|(_, device)| device.healthy);
            devices.map(|(id, _)| id.clone()).collect()
        };
        (entries, self.resources.iter().map(|(name, resource)| (name.clone(), healthy(resource))).collect())
    }

    /// Restores the state after a restart: allocations are known, and each resource waits for its plugin.
    pub fn restore(
        entries: BTreeMap<EntryKey, AllocationEntry>,
        resources: &[String],
        now: Duration,
    ) -> Self {
        let stopped = |name: &String| (name.clone(), Resource { stopped: Some(now), ..Resource::default() });
        Self { entries, resources: resources.iter().map(stopped).collect(), ..Self::default() }
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
