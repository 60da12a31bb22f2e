//! Nodes that run nothing, for tests and capacity planning: `mayfly up --simulated-nodes N`.
//!
//! **Belongs here:** the objects and leases of simulated nodes, and the life of the pods that are bound to them: when
//! they start, become ready, end and are removed, by annotations of the pod ([`behavior`]).
//!
//! **Does not belong here:** placing pods (the scheduler), real containers (the kubelet and its runtimes), simulated
//! GPUs
//! (`gpu/`).
//!
//! One task owns all pods of all nodes: a queue of pods ordered by when their next step is due, and one informer. A pod
//! costs an entry in that queue, a node costs an object and a lease. The step is planned from the pod's object alone
//! ([`plan`]), so that a restart continues where the objects are. Start reading at [`SimulatedNodes`].

#![warn(missing_debug_implementations)]

pub mod behavior;
mod nodes;
pub mod plan;
mod pods;

use kube::Client;
use mayfly_informer::Informers;
use tokio_util::sync::CancellationToken;

/// The configuration of the simulated nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub count: u32,
    pub cpu_millis: u64,
    pub memory_bytes: u64,
    pub pods_max: u32,
    /// The version that the nodes report.
    pub version: String,
    /// The maximum number of concurrent writes to the API.
    pub writes_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            count: 0,
            cpu_millis: 32_000,
            memory_bytes: 256 << 30,
            pods_max: 110,
            version: String::new(),
            writes_max: 256,
        }
    }
}

/// All simulated nodes of this process.
pub struct SimulatedNodes {
    config: Config,
    client: Client,
    pods: pods::SimulatedPods,
}

impl std::fmt::Debug for SimulatedNodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedNodes").finish_non_exhaustive()
    }
}

impl SimulatedNodes {
    /// Starts the informer it needs. Must be called inside a tokio runtime.
    pub fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = pods::SimulatedPods::create(&config, client.clone(), informers);
        Self { config, client, pods }
    }

    /// Registers the nodes, removes surplus ones of an earlier run, and simulates pods until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        tokio::join!(nodes::keep(&self.config, &self.client, &stop), self.pods.run(&stop));
    }
}
