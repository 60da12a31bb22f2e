//! Workflows in this process: the engine on its journal, the Step Functions API in front of it, and the controller that
//! represents workflows and executions as objects.
//!
//! The engine needs four things from outside, which are injected here: functions ([`functions`]: the gateway, in
//! process, with the same rules as a request from a socket), HTTP for `http:invoke` ([`web`]), files for the items and
//! results of distributed maps, time. [`listen`] contains the routes of the port.

mod functions;
mod invocations;
mod listen;
mod web;

use std::{os::unix::fs::DirBuilderExt as _, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use hyper_util::service::TowerToHyperService;
use mayfly_accept::AcceptPort;
use mayfly_api::{Function, Workflow, k8s::api::core::v1::Namespace, workflow::names};
use mayfly_gateway::Gateway;
use mayfly_informer::Informer;
use mayfly_workflows_api::{Api, Wire};
pub(crate) use mayfly_workflows_controller::jobs::JobsDeps;
use mayfly_workflows_controller::{
    buckets::Buckets,
    events,
    executions::Executions,
    invocations::Invocations,
    jobs::Jobs,
    objects::{Directory, WorkflowObjects},
    services::Services,
    triggers::{EventRules, Triggers},
};
use mayfly_workflows_engine::{
    catalog::Catalog,
    engine::{AwsEndpoints, Config, Engine, EngineDeps, EngineLimits, OsRandomness},
    service::WorkflowService,
    timers::SystemClock,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::{
    functions::{FunctionArns, GatewayFunctions},
    web::Web,
};

/// The largest response of a function or of `http:invoke` that is read, in bytes; the limit of a payload is smaller,
/// and is enforced by the execution.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// The time for requests in flight to finish at a stop. A worker's poll for work stays open for a minute, and is not
/// awaited.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// The settings of workflows.
pub(crate) struct WorkflowSettings {
    /// The endpoints of services that are not part of Mayfly.
    pub(crate) endpoints: AwsEndpoints,
    /// The time for which ended executions are kept.
    pub(crate) retention: Duration,
    /// The largest number of events of one execution's history; `None`: no limit.
    pub(crate) history_events_max: Option<u64>,
}

/// The workflow engine and its API, opened and not yet serving.
pub(crate) struct Workflows {
    engine: Engine,
    api: Api,
    catalog: Arc<Catalog>,
    jobs: Arc<Jobs>,
    executions: Executions,
    objects: WorkflowObjects,
    triggers: Triggers,
    events: EventRules,
    invocations: Arc<Invocations>,
}

/// The dependencies of workflows as Kubernetes objects.
pub(crate) struct WorkflowObjectDeps {
    pub(crate) client: kube::Client,
    pub(crate) workflows: Informer<Workflow>,
    /// Used for their asynchronous invocations.
    pub(crate) functions: Informer<Function>,
    pub(crate) namespaces: Informer<Namespace>,
}

impl Workflows {
    /// Opens the journal, the catalog and the files below `folder`. Returns the gateway with the queue of asynchronous
    /// invocations, which calls functions by a handle of the gateway without one.
    pub(crate) async fn create(
        folder: PathBuf,
        gateway: Gateway,
        settings: WorkflowSettings,
        object_deps: WorkflowObjectDeps,
        jobs: JobsDeps,
    ) -> anyhow::Result<(Self, Gateway)> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let catalog = folder.join("catalog.db");
        let catalog = Catalog::open(Some(&catalog)).context("cannot open the catalog of state machines")?;
        let catalog = Arc::new(catalog);
        let WorkflowSettings { endpoints, retention, history_events_max } = settings;
        let mut limits = EngineLimits { retention, ..EngineLimits::default() };
        limits.execution.history_events_max = history_events_max;
        let config = Config {
            data_dir: Some(folder.clone()),
            region: names::REGION.to_owned(),
            account: names::ACCOUNT.to_owned(),
            endpoints,
            limits,
            ..Config::default()
        };
        let caller = Arc::new(GatewayFunctions::new(gateway.handle(), FunctionArns::new(&config)));
        let deps = EngineDeps {
            http: Arc::new(Web::new()),
            objects: Arc::new(Buckets::new(folder.join("buckets"), jobs.artifacts.clone())),
            clock: Arc::new(SystemClock),
            randomness: Arc::new(OsRandomness),
            catalog: catalog.clone(),
            wire: Arc::new(Wire),
            activities: catalog.clone(),
            supports_integration: Services::supports,
            mocks: None,
        };
        let opened = Engine::open(config, deps).await?;
        let engine = opened.engine().clone();
        let jobs = Arc::new(Jobs::new(jobs));
        let service = WorkflowService::new(engine.clone());
        let WorkflowObjectDeps { client, workflows, functions: objects, namespaces } = object_deps;
        let invocations = Arc::new(Invocations::new(engine.clone(), objects.clone(), caller.clone()));
        let gateway = gateway.with_invocations(Arc::new(invocations::DurableQueue(invocations.clone())));
        let triggers = Triggers::new(
            service.clone(),
            invocations.clone(),
            engine.clone(),
            client.clone(),
            workflows.clone(),
            objects,
        );
        let events = triggers.events();
        let services = Services {
            jobs: jobs.clone(),
            events: events::PutEvents(events.clone()),
            invocations: invocations.clone(),
        };
        let functions = Arc::new(caller.through(gateway.handle()));
        let engine = opened.start(functions, Arc::new(services));
        let directory = Directory::new(workflows, namespaces);
        let executions = Executions::new(engine.clone(), directory.clone());
        let objects = WorkflowObjects::new(service.clone(), client, directory);
        let workflows = Self {
            engine,
            api: Api::new(service),
            catalog,
            jobs,
            executions,
            objects,
            triggers,
            events,
            invocations,
        };
        Ok((workflows, gateway))
    }

    /// The view of executions in the Kubernetes API.
    pub(crate) fn executions(&self) -> Executions {
        self.executions.clone()
    }

    /// The engine itself.
    pub(crate) fn engine(&self) -> Engine {
        self.engine.clone()
    }

    /// The catalog of state machines.
    pub(crate) fn catalog(&self) -> Arc<Catalog> {
        self.catalog.clone()
    }

    /// Resumes open executions and serves the API until `stop`; unfinished ones are resumed at the next start.
    pub(crate) async fn serve(
        self,
        port: AcceptPort,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let (changes, of_invocations) = (self.engine.changes(), self.engine.changes());
        let open = self.engine.begin_resume().await.context("cannot resume executions")?;
        if open > 0 {
            tracing::info!(executions = open, "resuming executions");
        }
        let (engine, invocations) = (self.engine, self.invocations.clone());
        let resuming = async {
            if let Err(error) = engine.finish_resume().await {
                tracing::error!(%error, "cannot resume executions");
            }
        };
        let beside = async {
            tokio::join!(
                self.executions.follow(changes, stop.clone()),
                invocations.follow(of_invocations, stop.clone()),
                self.objects.run(stop.clone()),
                self.triggers.run(stop.clone()),
                self.jobs.delete_orphans(engine.clone(), stop.clone()),
            );
        };
        let interrupted = async {
            stop.cancelled().await;
            engine.begin_shutdown();
        };
        let routes = listen::routes(self.api, self.events, self.invocations);
        let serving = port.serve(listener, None, TowerToHyperService::new(routes), stop.clone());
        Box::pin(async { tokio::join!(serving, beside, interrupted, resuming) }).await;
        // Jobs continue without the server; their tasks attach to them again.
        self.jobs.stop();
        engine.shutdown().await;
        Ok(())
    }
}
