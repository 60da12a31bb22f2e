//! The parts of the control plane, each with its own connection: started, crashed and started again.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::future::BoxFuture;
use mayfly_api::k8s::jiff::Timestamp;
use mayfly_apiserver::{ApiServer, ApiServerDeps, User};
use mayfly_artifacts::Artifacts;
use mayfly_controllers::Controllers;
use mayfly_informer::Informers;
use mayfly_scheduler::Scheduler;
use mayfly_simulated::SimulatedNodes;
use mayfly_store::{SteppedWriter, Store};
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{simulation_state::SimulationState, wire::SimulatedWire};

pub const NODES: u32 = 6;
/// Room for all workloads of a run, not much more: see `workloads.rs`.
const NODE_CPU_MILLIS: u64 = 3_500;
const NODE_PODS_MAX: u32 = 25;
/// The history of a resource: short, so that watchers fall behind it.
const HISTORY_EVENTS_MAX: usize = 300;
const NODE_EVICTION_AFTER: Duration = Duration::from_secs(30);

/// A process of the control plane beside the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ControlPlanePart {
    Controllers,
    Scheduler,
    Nodes,
}

pub const PARTS: [ControlPlanePart; 3] =
    [ControlPlanePart::Controllers, ControlPlanePart::Scheduler, ControlPlanePart::Nodes];

struct RunningPart {
    crashed: CancellationToken,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// All parts over one store.
pub struct ControlPlane {
    pub simulation: Arc<SimulationState>,
    store: Store,
    artifacts: Artifacts,
    _folder: TempDir,
    parts: BTreeMap<ControlPlanePart, RunningPart>,
}

impl std::fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlPlane").finish_non_exhaustive()
    }
}

impl ControlPlanePart {
    pub fn name(self) -> &'static str {
        match self {
            Self::Controllers => "controllers",
            Self::Scheduler => "scheduler",
            Self::Nodes => "nodes",
        }
    }

    fn user(self) -> User {
        User::component(match self {
            Self::Controllers => "system:mayfly:controllers",
            Self::Scheduler => "system:kube-scheduler",
            Self::Nodes => "system:node:simulated",
        })
    }
}

impl ControlPlane {
    /// The store and the API server; no part runs yet.
    pub async fn create(simulation: Arc<SimulationState>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let artifacts = Artifacts::open(folder.path().join("artifacts"))?;
        let mut config = mayfly_store::Config::new(":memory:");
        config.history_events_max = HISTORY_EVENTS_MAX;
        let (store, writer) = Store::in_memory_stepped(config);
        tokio::spawn(write(simulation.clone(), writer));
        let mut cluster = Self { simulation, store, artifacts, _folder: folder, parts: BTreeMap::new() };
        cluster.start_server().await?;
        Ok(cluster)
    }

    pub async fn start_server(&mut self) -> Result<()> {
        let deps = ApiServerDeps {
            store: self.store.clone(),
            artifacts: self.artifacts.clone(),
            clock: Arc::new(Timestamp::now),
            nodes: Arc::new(|node, _| Box::pin(async move { Err(format!("no way to {node}").into()) })),
            inspector: Arc::new(|_| Ok(Value::Null)),
        };
        let mut metrics = prometheus_client::registry::Registry::default();
        let config = mayfly_apiserver::Config::new("token");
        let server = ApiServer::create(config, deps, &mut metrics).await.context("the API server")?;
        self.simulation.set_server(server);
        self.simulation.trace("the API server starts");
        Ok(())
    }

    /// Ends the server with all its requests: those that reached the store may still be written.
    pub fn crash_server(&mut self) {
        if let Some(server) = self.simulation.take_server() {
            self.simulation.trace("the API server crashes");
            server.crashed.cancel();
            server.api.shut_down();
        }
    }

    pub fn start(&mut self, part: ControlPlanePart) {
        let (crashed, stop) = (CancellationToken::new(), CancellationToken::new());
        let wire = SimulatedWire {
            simulation: self.simulation.clone(),
            part: part.name(),
            user: part.user(),
            crashed: crashed.clone(),
            is_faultless: false,
        };
        let task = tokio::spawn(run_part(part, wire, stop.clone()));
        self.simulation.trace(format_args!("{} starts", part.name()));
        self.parts.insert(part, RunningPart { crashed, stop, task });
    }

    /// Ends a part at once: its requests under way reach the server or not, and it learns of none.
    pub fn crash(&mut self, part: ControlPlanePart) {
        if let Some(running) = self.parts.remove(&part) {
            self.simulation.trace(format_args!("{} crashes", part.name()));
            running.crashed.cancel();
            running.stop.cancel();
            running.task.abort();
        }
    }

    /// Ends a part as an operator does: it finishes what is under way.
    pub async fn stop(&mut self, part: ControlPlanePart) {
        if let Some(running) = self.parts.remove(&part) {
            running.stop.cancel();
            let _ = running.task.await;
            running.crashed.cancel();
            self.simulation.trace(format_args!("{} has stopped", part.name()));
        }
    }
}

fn run_part(part: ControlPlanePart, wire: SimulatedWire, stop: CancellationToken) -> BoxFuture<'static, ()> {
    let client = wire.client();
    let informers = Informers::create(client.clone(), stop.clone());
    match part {
        ControlPlanePart::Controllers => {
            let controllers = Controllers::create(controllers(), client, &informers);
            Box::pin(controllers.run(stop))
        }
        ControlPlanePart::Scheduler => {
            let scheduler = Scheduler::create(Default::default(), client, &informers);
            Box::pin(scheduler.run(stop))
        }
        ControlPlanePart::Nodes => {
            let config = mayfly_simulated::Config {
                count: NODES,
                cpu_millis: NODE_CPU_MILLIS,
                pods_max: NODE_PODS_MAX,
                version: "v1.33.0".into(),
                ..Default::default()
            };
            let nodes = SimulatedNodes::create(config, client, &informers);
            Box::pin(nodes.run(stop))
        }
    }
}

fn controllers() -> mayfly_controllers::Config {
    let mut config = mayfly_controllers::Config::default();
    config.garbage.rediscover_every = Duration::from_secs(300);
    config.node.eviction_after = NODE_EVICTION_AFTER;
    config
}

/// The store's writer: commits what is queued after the latency of the moment.
async fn write(simulation: Arc<SimulationState>, mut writer: SteppedWriter) {
    while writer.queued().await {
        simulation.commit_latency().await;
        for event in writer.commit() {
            simulation.observe(&event);
        }
    }
}
