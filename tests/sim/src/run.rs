//! One run: setup, storms with operations and restarts, calm phases with rollouts, the end.

use std::{str::FromStr, sync::Arc, time::Duration};

use anyhow::{Result, bail};
use mayfly_apiserver::User;
use tokio_util::sync::CancellationToken;

use crate::{
    control_plane::{ControlPlane, ControlPlanePart, NODES, PARTS},
    faults::FaultRates,
    operations::Operations,
    oracle::STALENESS_MAX,
    os,
    random::Random,
    saboteur,
    simulation_state::SimulationState,
    trace::TraceDigest,
    user::UserClient,
    wire::SimulatedWire,
    workloads::USER_FINALIZER,
};

/// Storms, each followed by a calm phase.
const ROUNDS: u32 = 3;
const OPERATIONS_PER_STORM: u32 = 14;
const ROLLOUTS_PER_CALM: u32 = 3;
/// The longest time from the last fault until the cluster is as it should be.
const CONVERGENCE_MAX: Duration = Duration::from_secs(1800);
/// For so long nothing may change once all is as it should be.
const REST: Duration = Duration::from_secs(400);

/// Deliberate damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A controller that creates too many pods.
    ExtraPod,
    /// A garbage collector that deletes objects with live owners.
    EagerCollector,
    /// Watches that lose events without an end.
    SilentWatch,
    /// A CronJob controller that makes a second Job for a time.
    DoubleSchedule,
    /// A volume controller that gives away a bound volume.
    StolenVolume,
}

impl FromStr for Broken {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "extra-pod" => Ok(Self::ExtraPod),
            "eager-collector" => Ok(Self::EagerCollector),
            "silent-watch" => Ok(Self::SilentWatch),
            "double-schedule" => Ok(Self::DoubleSchedule),
            "stolen-volume" => Ok(Self::StolenVolume),
            other => Err(format!(
                "{other} is none of extra-pod, eager-collector, silent-watch, double-schedule, stolen-volume"
            )),
        }
    }
}

/// The settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct SimulationOptions {
    pub seed: u64,
    pub broken: Option<Broken>,
    pub is_trace_printed: bool,
}

/// The result of a run.
#[derive(Debug)]
pub struct Report {
    pub digest: TraceDigest,
    /// Empty when every rule held.
    pub violations: Vec<String>,
    pub last_lines: Vec<String>,
    pub virtual_time: Duration,
}

/// Runs one seed. The calling thread's clock and randomness are replaced for good: call it once in a process.
///
/// # Errors
/// The runtime or a part cannot be started.
pub fn run(options: SimulationOptions) -> Result<Report> {
    os::simulate(options.seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    let report = runtime.block_on(async {
        os::follow_paused_clock();
        let mut random = Random::new(options.seed.wrapping_add(1));
        let simulation = SimulationState::new(random.fork(), options.is_trace_printed, options.broken);
        let mut run = Run::create(simulation.clone(), random).await?;
        if let Err(problem) = run.all().await {
            simulation.oracle.lock().violate(problem.to_string());
        }
        let (oracle, trace) = (simulation.oracle.lock(), simulation.trace.lock());
        Ok(Report {
            digest: trace.digest(),
            violations: oracle.violations().to_vec(),
            last_lines: trace.last().cloned().collect(),
            virtual_time: simulation.now(),
        })
    });
    runtime.shutdown_background();
    report
}

struct Run {
    simulation: Arc<SimulationState>,
    cluster: ControlPlane,
    operations: Operations,
    random: Random,
}

impl Run {
    async fn create(simulation: Arc<SimulationState>, mut random: Random) -> Result<Self> {
        let mut cluster = ControlPlane::create(simulation.clone()).await?;
        PARTS.into_iter().for_each(|part| cluster.start(part));
        let wire = |name: &str, part: &'static str| SimulatedWire {
            simulation: simulation.clone(),
            part,
            user: User::in_process(name),
            crashed: CancellationToken::new(),
            is_faultless: true,
        };
        if let Some(broken) = simulation.broken {
            let client = UserClient::new(wire("saboteur", "saboteur").client());
            tokio::spawn(saboteur::run(broken, simulation.clone(), client));
        }
        let user = UserClient::new(wire("kubernetes-admin", "user").client());
        let operations = Operations::new(simulation.clone(), user, random.fork());
        Ok(Self { simulation, cluster, operations, random })
    }

    async fn all(&mut self) -> Result<()> {
        self.operations.prepare().await;
        while self.simulation.oracle.lock().model.of("nodes").count() < usize::try_from(NODES)? {
            self.pause(Duration::from_secs(1)).await?;
        }
        for _ in 0..ROUNDS {
            self.storm().await?;
            self.calm().await?;
        }
        self.end().await
    }

    /// Time passes; a violation meanwhile ends the run.
    async fn pause(&self, length: Duration) -> Result<()> {
        tokio::time::sleep(length).await;
        match self.simulation.oracle.lock().violations() {
            [] => Ok(()),
            _ => bail!("the run ends here"),
        }
    }

    async fn storm(&mut self) -> Result<()> {
        let rates = FaultRates::storm(&mut self.random);
        self.simulation.trace(format_args!("storm: {rates:?}"));
        self.simulation.set_rates(rates, true);
        for _ in 0..OPERATIONS_PER_STORM {
            let length = match self.random.below(0..3) {
                0 => Duration::ZERO..Duration::from_millis(100),
                1 => Duration::ZERO..Duration::from_secs(3),
                _ => Duration::ZERO..Duration::from_secs(20),
            };
            let length = self.random.duration(length);
            self.pause(length).await?;
            if self.random.chance(0.2) {
                self.restart().await?;
            }
            self.operations.next().await;
        }
        let length = self.random.duration(Duration::ZERO..Duration::from_secs(60));
        self.pause(length).await
    }

    /// A part or the server ends and comes back.
    async fn restart(&mut self) -> Result<()> {
        let away = self.random.duration(Duration::ZERO..Duration::from_secs(10));
        match self.random.below(0..4) {
            0 => {
                self.cluster.crash_server();
                self.pause(away).await?;
                self.cluster.start_server().await?;
            }
            at => {
                let part =
                    [ControlPlanePart::Controllers, ControlPlanePart::Scheduler, ControlPlanePart::Nodes]
                        [usize::try_from(at - 1)?];
                if self.random.chance(0.7) {
                    self.cluster.crash(part);
                } else {
                    self.cluster.stop(part).await;
                }
                self.pause(away).await?;
                self.cluster.start(part);
            }
        }
        Ok(())
    }

    /// Faults end; after some time, rollouts with nothing else.
    async fn calm(&mut self) -> Result<()> {
        self.simulation.trace("calm");
        self.operations.return_nodes().await;
        self.simulation.set_rates(FaultRates::calm(), false);
        self.restart_nodes();
        self.pause(2 * STALENESS_MAX).await?;
        for _ in 0..ROLLOUTS_PER_CALM {
            self.operations.roll_out().await;
            self.pause(Duration::from_secs(60)).await?;
        }
        Ok(())
    }

    /// Simulated nodes report that they are ready when they start: those that were lost or deleted come back.
    fn restart_nodes(&mut self) {
        self.cluster.crash(ControlPlanePart::Nodes);
        self.cluster.start(ControlPlanePart::Nodes);
    }

    /// The cluster comes to the desired state, and to rest.
    async fn end(&mut self) -> Result<()> {
        self.operations.clean_up().await;
        self.restart_nodes();
        self.simulation.trace("the end begins");
        let deadline = self.simulation.now() + CONVERGENCE_MAX;
        loop {
            self.pause(Duration::from_secs(30)).await?;
            self.operations.clean_up().await;
            let problems = self.simulation.oracle.lock().unconverged(|name| name == USER_FINALIZER);
            if problems.is_empty() {
                break;
            }
            if self.simulation.now() > deadline {
                bail!("not as it should be after {CONVERGENCE_MAX:?}: {problems:#?}");
            }
        }
        self.simulation.trace("all is as it should be");
        self.pause(Duration::from_secs(60)).await?;
        let quiet = self.simulation.quiet_for();
        self.pause(REST).await?;
        if self.simulation.quiet_for() < quiet.max(REST) {
            bail!("the cluster does not come to rest");
        }
        Ok(())
    }
}
