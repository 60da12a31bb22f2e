//! The state that all parts of a simulation share: faults, trace, checks, and the API server of the moment.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    sync::Arc,
    time::Duration,
};

use kube::Client;
use mayfly_apiserver::{ApiServer, User};
use mayfly_store::WriteEvent;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{faults::FaultRates, oracle::Oracle, random::Random, run::Broken, trace::RunTrace};

/// Resources whose objects change without a change of the cluster.
const RESTLESS: [&str; 2] = ["leases.coordination.k8s.io", "events"];

pub struct SimulationState {
    begin: Instant,
    pub oracle: Mutex<Oracle>,
    pub trace: Mutex<RunTrace>,
    faults: Mutex<Faults>,
    server: Mutex<Option<RunningServer>>,
    /// When the state of the cluster last changed.
    changed_at: Mutex<Duration>,
    pub broken: Option<Broken>,
}

impl std::fmt::Debug for SimulationState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulationState").finish_non_exhaustive()
    }
}

struct Faults {
    rates: FaultRates,
    random: Random,
    /// Nodes that reach the API no more.
    lost_nodes: BTreeSet<String>,
}

/// An API server until its crash.
pub struct RunningServer {
    pub api: ApiServer,
    pub crashed: CancellationToken,
    clients: BTreeMap<String, Client>,
}

impl std::fmt::Debug for RunningServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningServer").finish_non_exhaustive()
    }
}

impl SimulationState {
    pub fn new(random: Random, is_trace_printed: bool, broken: Option<Broken>) -> Arc<Self> {
        Arc::new(Self {
            begin: Instant::now(),
            oracle: Mutex::default(),
            trace: Mutex::new(RunTrace::new(is_trace_printed)),
            faults: Mutex::new(Faults { rates: FaultRates::calm(), random, lost_nodes: BTreeSet::new() }),
            server: Mutex::default(),
            changed_at: Mutex::default(),
            broken,
        })
    }

    /// Since the beginning of the run.
    pub fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    pub fn trace(&self, what: impl Display) {
        self.trace.lock().line(self.now(), what);
    }

    /// Follows one committed write.
    pub fn observe(&self, event: &WriteEvent) {
        let now = self.now();
        let step = self.oracle.lock().observe(now, event);
        let hash = crate::trace::hash(&event.entry.value);
        self.trace(format_args!("{} {:?} {} {hash:016x}", event.revision, event.kind, step.key));
        if !RESTLESS.contains(&step.resource()) {
            *self.changed_at.lock() = now;
        }
    }

    /// How long the state of the cluster has been as it is.
    pub fn quiet_for(&self) -> Duration {
        self.now().saturating_sub(*self.changed_at.lock())
    }

    /// Draws from the faults of the moment.
    pub fn draw<T>(&self, draw: impl FnOnce(&FaultRates, &mut Random) -> T) -> T {
        let faults = &mut *self.faults.lock();
        draw(&faults.rates, &mut faults.random)
    }

    pub async fn latency(&self) {
        let pause = self.draw(|rates, random| random.duration(rates.latency.clone()));
        tokio::time::sleep(pause).await;
    }

    pub async fn commit_latency(&self) {
        let pause = self.draw(|rates, random| random.duration(rates.commit_latency.clone()));
        tokio::time::sleep(pause).await;
    }

    pub fn set_rates(&self, rates: FaultRates, is_faulty: bool) {
        self.faults.lock().rates = rates;
        self.oracle.lock().hints.is_faulty = is_faulty;
        self.disturb();
    }

    /// Something happened to the cluster that is not its controllers' own work.
    pub fn disturb(&self) {
        self.oracle.lock().hints.disturbed_at = self.now();
    }

    pub fn set_lost(&self, node: &str, is_lost: bool) {
        let lost = &mut self.faults.lock().lost_nodes;
        if is_lost {
            lost.insert(node.into());
        } else {
            lost.remove(node);
        }
    }

    pub fn is_lost(&self, node: &str) -> bool {
        self.faults.lock().lost_nodes.contains(node)
    }

    pub fn lost_nodes(&self) -> Vec<String> {
        self.faults.lock().lost_nodes.iter().cloned().collect()
    }

    pub fn set_server(&self, api: ApiServer) {
        let server = RunningServer { api, crashed: CancellationToken::new(), clients: BTreeMap::new() };
        *self.server.lock() = Some(server);
    }

    pub fn take_server(&self) -> Option<RunningServer> {
        self.server.lock().take()
    }

    /// A client of the API server of the moment, and what ends with its crash; `None` while there is none.
    pub fn server(&self, user: &User) -> Option<(Client, CancellationToken)> {
        let mut server = self.server.lock();
        let RunningServer { api, crashed, clients } = server.as_mut()?;
        let client = clients.entry(user.name.clone()).or_insert_with(|| api.client(user.clone()));
        Some((client.clone(), crashed.clone()))
    }
}
