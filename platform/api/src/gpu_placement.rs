//! The placement of containers on the GPUs of a node. The scheduler predicts with it, the node's GPU plugin allocates
//! with it, and `mayfly why` explains with it. Pure.
//!
//! Shares of a GPU are packed: among the GPUs that fit, the one with the least free time is chosen, then the one with
//! the least free memory (gpu-manager's `share`). Whole GPUs are chosen by the links between them ([`whole()`]).
//!
//! A node publishes its GPUs and their users in the annotation [`ANNOTATION_GPUS`]. A pod that is bound to the node and
//! has no GPU there yet is placed in the copy of the scheduler as the node will place it.

mod links;
mod whole;

use std::{collections::BTreeMap, fmt};

pub use links::{GpuLink, LinkMatrix, LinkMatrixError, parse_matrix};
use serde::{Deserialize, Serialize};
pub use whole::whole;

use crate::{
    k8s::api::core::v1::{Container, Node, PodSpec},
    quantity,
};

/// A whole GPU.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
/// A hundredth of a GPU's time.
pub const RESOURCE_CORE: &str = "mayfly.dev/vcuda-core";
/// [`MEMORY_UNIT_BYTES`] of a GPU's memory.
pub const RESOURCE_MEMORY: &str = "mayfly.dev/vcuda-memory";
/// The cores of a whole GPU.
pub const CORES_PER_GPU: u32 = 100;
/// One unit of `vcuda-memory` (as in gpu-manager).
pub const MEMORY_UNIT_BYTES: u64 = 256 << 20;
/// On a node: its GPUs and their users, as a JSON list of [`NodeGpu`].
pub const ANNOTATION_GPUS: &str = "mayfly.dev/gpus";

/// A GPU of a node, as the node publishes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpu {
    /// Its UUID.
    pub id: String,
    /// The position in the driver's list.
    pub index: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<i64>,
    /// The links to the other GPUs, by their indices. Without a link, the NUMA nodes decide.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub links: BTreeMap<u32, GpuLink>,
    /// Its memory, in units of `vcuda-memory`.
    pub memory: u32,
    /// Whether it is not offered because of a fault.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub broken: bool,
    /// By pod (uid).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub users: BTreeMap<String, GpuLoad>,
}

/// The GPUs that a node publishes; empty if it publishes none.
pub fn gpus_of(node: &Node) -> Vec<NodeGpu> {
    let text = node.metadata.annotations.as_ref().and_then(|annotations| annotations.get(ANNOTATION_GPUS));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// The usage of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLoad {
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
    #[serde(default)]
    pub cores: u32,
    #[serde(default)]
    pub memory_units: u32,
}

impl GpuLoad {
    pub fn is_free(&self) -> bool {
        *self == Self::default()
    }

    fn add(&mut self, other: Self) {
        self.whole |= other.whole;
        self.cores = self.cores.saturating_add(other.cores);
        self.memory_units = self.memory_units.saturating_add(other.memory_units);
    }
}

/// The request of a container: a share of one GPU, or a multiple of [`CORES_PER_GPU`] for whole ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuShare {
    pub cores: u32,
    pub memory_units: u32,
}

/// Such as `50 % and 8 GiB of memory`.
impl fmt::Display for GpuShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = gib(self.memory_units);
        match (self.cores / CORES_PER_GPU, self.memory_units) {
            (0, _) => write!(f, "{} % and {memory} of memory", self.cores),
            (_, 0) => f.write_str("100 %"),
            (count, memory_units) => write!(f, "100 % and {} of memory", gib(memory_units.div_ceil(count))),
        }
    }
}

/// Units of memory in GiB.
fn gib(units: u32) -> String {
    format!("{} GiB", f64::from(units) / 4.0)
}

/// The reason why shares cannot be allocated.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlacementError {
    #[error("a container with {RESOURCE_CORE} below {CORES_PER_GPU} needs {RESOURCE_MEMORY}, too")]
    NoMemory,
    #[error("a container with {RESOURCE_MEMORY} needs {RESOURCE_CORE}, too")]
    NoCores,
    #[error("{RESOURCE_CORE} is {0}: more than one GPU must be a multiple of {CORES_PER_GPU}")]
    NotWhole(u32),
    #[error(
        "no GPU has {} cores and {} units of 256 MiB of memory free{}", .0.cores, .0.memory_units,
        if .0.cores > CORES_PER_GPU { " for each of several GPUs" } else { "" }
    )]
    NoGpu(GpuShare),
}

/// What is free of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRoom {
    /// Its UUID.
    pub id: String,
    /// The position in the driver's list.
    pub index: u32,
    pub numa: Option<i64>,
    /// The links to the other GPUs, by their indices.
    pub links: BTreeMap<u32, GpuLink>,
    /// All of its memory, in units of `vcuda-memory`.
    pub memory_units: u32,
    /// Whether it is not offered because of a fault.
    pub is_broken: bool,
    pub load: GpuLoad,
}

impl GpuRoom {
    /// The free cores and units of memory for shares.
    fn free(&self) -> (u32, u32) {
        if self.load.whole || self.is_broken {
            return (0, 0);
        }
        let cores = CORES_PER_GPU.saturating_sub(self.load.cores);
        (cores, self.memory_units.saturating_sub(self.load.memory_units))
    }

    fn is_free(&self) -> bool {
        !self.is_broken && self.load.is_free()
    }
}

/// Such as `1: 20 % and 3 GiB`.
impl fmt::Display for GpuRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cores, memory) = self.free();
        match (self.is_broken, self.load.whole) {
            (true, _) => write!(f, "{}: broken", self.index),
            (_, true) => write!(f, "{}: in use as a whole", self.index),
            _ => write!(f, "{}: {cores} % and {}", self.index, gib(memory)),
        }
    }
}

/// Chooses the GPUs for shares: one GPU, or several whole ones. Returns their ids.
///
/// # Errors
/// The amounts are inconsistent, or no GPU has them free.
pub fn place(gpus: &[GpuRoom], share: GpuShare) -> Result<Vec<String>, PlacementError> {
    match share {
        GpuShare { cores: 0, .. } => Err(PlacementError::NoCores),
        GpuShare { cores, memory_units: 0 } if cores < CORES_PER_GPU => Err(PlacementError::NoMemory),
        GpuShare { cores, memory_units } if cores < CORES_PER_GPU => {
            let fitting = gpus.iter().map(|gpu| (gpu.free(), &gpu.id));
            let fitting = fitting.filter(|((free, memory), _)| *free >= cores && *memory >= memory_units);
            let best = fitting.min();
            best.map(|(_, id)| vec![id.clone()]).ok_or(PlacementError::NoGpu(share))
        }
        GpuShare { cores, .. } if !cores.is_multiple_of(CORES_PER_GPU) => {
            Err(PlacementError::NotWhole(cores))
        }
        GpuShare { cores, memory_units } => {
            let count = cores / CORES_PER_GPU;
            let free = gpus.iter().filter(|gpu| gpu.is_free());
            let free = free.filter(|gpu| gpu.memory_units.saturating_mul(count) >= memory_units);
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            let chosen = whole(&free.collect::<Vec<_>>(), &[], count);
            if chosen.len() == count { Ok(chosen) } else { Err(PlacementError::NoGpu(share)) }
        }
    }
}

/// The GPUs that a pod requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuNeeds {
    /// Of the init containers that end before the next container starts. Each may use what later ones get.
    init: Vec<GpuShare>,
    /// Of the containers that run at the same time.
    containers: Vec<GpuShare>,
}

impl GpuNeeds {
    pub fn of(spec: &PodSpec) -> Self {
        let mut needs = Self::default();
        for container in spec.init_containers.iter().flatten() {
            let is_sidecar = container.restart_policy.as_deref() == Some("Always");
            let list = if is_sidecar { &mut needs.containers } else { &mut needs.init };
            list.extend(shares(container));
        }
        needs.containers.extend(spec.containers.iter().flat_map(shares));
        needs
    }

    pub fn is_empty(&self) -> bool {
        self.init.is_empty() && self.containers.is_empty()
    }

    /// The first share for which no GPU has room. Inconsistent amounts are left to the node, which refuses them.
    pub fn misfit(&self, gpus: &[GpuRoom]) -> Option<GpuShare> {
        let has_none = |gpus: &[GpuRoom], share| matches!(place(gpus, share), Err(PlacementError::NoGpu(_)));
        if let Some(share) = self.init.iter().find(|share| has_none(gpus, **share)) {
            return Some(*share);
        }
        let mut gpus = gpus.to_vec();
        self.containers.iter().copied().find(|share| {
            let misfits = has_none(&gpus, *share);
            take(&mut gpus, *share);
            misfits
        })
    }
}

fn shares(container: &Container) -> impl Iterator<Item = GpuShare> {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let of = |name: &str| {
        let amount =
            limits.and_then(|limits| limits.get(name)).and_then(|amount| quantity::whole(amount).ok());
        amount.map_or(0, |amount| u32::try_from(amount).unwrap_or(u32::MAX))
    };
    let whole = GpuShare { cores: of(RESOURCE_GPU).saturating_mul(CORES_PER_GPU), memory_units: 0 };
    let share = GpuShare { cores: of(RESOURCE_CORE), memory_units: of(RESOURCE_MEMORY) };
    [whole, share].into_iter().filter(|share| share.cores + share.memory_units > 0)
}

/// Places a share, if there is room for it.
fn take(gpus: &mut [GpuRoom], share: GpuShare) {
    let chosen = place(gpus, share).unwrap_or_default();
    let count = u32::try_from(chosen.len()).unwrap_or(u32::MAX).max(1);
    let load = GpuLoad { whole: false, cores: share.cores / count, memory_units: share.memory_units / count };
    for gpu in gpus.iter_mut().filter(|gpu| chosen.contains(&gpu.id)) {
        gpu.load.add(load);
    }
}

/// What is free of a node's GPUs if exactly these pods (by uid) are bound to it. Users that are not among them are
/// ignored: they have ended, or are assumed to. Pods that have no GPU yet are placed.
pub fn rooms(gpus: &[NodeGpu], pods: &BTreeMap<String, GpuNeeds>) -> Vec<GpuRoom> {
    let room = |gpu: &NodeGpu| {
        let mut load = GpuLoad::default();
        let users = gpu.users.iter().filter(|(pod, _)| pods.contains_key(*pod));
        users.for_each(|(_, used)| load.add(*used));
        let NodeGpu { id, index, numa, links, memory, broken, .. } = gpu.clone();
        GpuRoom { id, index, numa, links, memory_units: memory, is_broken: broken, load }
    };
    let mut rooms: Vec<_> = gpus.iter().map(room).collect();
    let is_placed = |pod: &str| gpus.iter().any(|gpu| gpu.users.contains_key(pod));
    for (_, needs) in pods.iter().filter(|(pod, _)| !is_placed(pod)) {
        needs.containers.iter().for_each(|share| take(&mut rooms, *share));
    }
    rooms
}

#[cfg(test)]
#[path = "gpu_placement_tests.rs"]
mod tests;
