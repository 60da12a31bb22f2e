//! `mayfly up`: all components in one process.
//!
//! Created bottom up: files, listeners (so that a port in use is reported before anything runs), the API, the host,
//! then the components that react to objects. Stopped from the outside in: workflows first, so that they do not call a
//! closed gateway; then the gateway drains, so that running requests are answered; the API is stopped last, except for
//! the store.

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use mayfly_api::Revision;
use mayfly_apiserver::{ApiServer, Identity, User};
use mayfly_artifacts::Artifacts;
use mayfly_cli::data_dir::{DataDir, Endpoints};
use mayfly_controllers::Controllers;
use mayfly_csi::CsiDrivers;
use mayfly_gateway::Gateway;
use mayfly_informer::{EnvObjects, Informer, Informers};
use mayfly_kubelet::{CsiConfig, JobFiles, Kubelet};
use mayfly_registry::RegistryServer;
use mayfly_runtime::{
    NodeGpus, Runtime,
    logs::{LogLayout, LogWriter},
};
use mayfly_runtime_oci::OciRuntime;
use mayfly_runtime_wasm::{CompileIn, WasmHost};
use mayfly_scheduler::Scheduler;
use mayfly_simulated::SimulatedNodes;
use mayfly_store::Store;
use prometheus_client::registry::Registry;
use tokio::{runtime::Handle, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{
    admin::Admin,
    banner, components, containers,
    data_files::remove_stale,
    devices::Devices,
    function_calls,
    gpu_metrics::GpuMetrics,
    image_registry,
    listeners::{Listeners, Ports, gateway_refused},
    metrics::ServerCounts,
    network::{NodeNetwork, ServiceNetworking},
    nodes::LocalNodes,
    open_files::{self, Connections},
    part_configs::{
        KUBERNETES_VERSION, api_config, audit, controllers_config, gateway_config, kubelet_config,
        kubelet_folder, local_volumes,
    },
    runtimes::{Handles, Runtimes},
    signals::StopSignals,
    slurm::{self, SlurmDeps},
    start_pages,
    tasks::Tasks,
    workflows::{JobsDeps, WorkflowObjectDeps, WorkflowSettings, Workflows},
};
use crate::{
    config::{UpArgs, UpConfig},
    logging,
};

/// The time for the controllers and the kubelet to stop; unfinished work is done at the next start.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// Longer than the gateway's own drain timeout, which takes effect first.
const GATEWAY_STOP_DEADLINE: Duration =
    mayfly_gateway::Config::DRAIN_TIMEOUT_DEFAULT.saturating_add(STOP_DEADLINE);

/// Runs until SIGINT or SIGTERM.
pub(crate) fn run(args: UpArgs, data_dir: DataDir) -> anyhow::Result<ExitCode> {
    let config = args.resolve()?;
    let data_dir = data_dir.unless_configured(config.data_dir.clone());
    logging::start(&config.log, config.log_format)?;
    if let Some(warning) = config.warning() {
        tracing::warn!("{warning}");
    }
    let connections = open_files::connections();
    let runtimes = Runtimes::create()?;
    let handles = runtimes.handles();
    let result = runtimes.run(async {
        let up = Box::pin(Up::create(config, data_dir, connections, &handles)).await?;
        Box::pin(up.run(handles.serving)).await
    });
    result.map(|()| ExitCode::SUCCESS)
}

/// All components, created and not yet running.
struct Up {
    data_dir: DataDir,
    store: Store,
    identity: Identity,
    api: ApiServer,
    listeners: Listeners,
    ports: Ports,
    workflows: Workflows,
    gateway: Gateway,
    gateway_stop: CancellationToken,
    informers_stop: CancellationToken,
    controllers: Controllers,
    scheduler: Scheduler,
    kubelet: Kubelet,
    /// The kubelet of the node that represents a Slurm cluster.
    slurm: Option<Kubelet>,
    simulated: Option<SimulatedNodes>,
    network: NodeNetwork,
    /// Reserves the network of Services.
    networking: ServiceNetworking,
    devices: Option<Devices>,
    containers: Option<Arc<OciRuntime>>,
    host: Arc<WasmHost>,
    revisions: Informer<Revision>,
    compile_client: kube::Client,
    metrics: Registry,
    registry: RegistryServer,
    endpoints: Endpoints,
}

impl Up {
    async fn create(
        config: UpConfig,
        data_dir: DataDir,
        connections: Connections,
        handles: &Handles,
    ) -> anyhow::Result<Self> {
        let mut metrics = Registry::default();
        let Files { store, artifacts, identity } = Files::open(&config, &data_dir)?;
        let listeners = Listeners::bind(&config, handles).await?;
        let (registry, registries) = image_registry::create(
            &config.images,
            &data_dir,
            listeners.admin.local_addr()?,
            identity.token(),
        )?;
        let logs = LogLayout::new(data_dir.logs());
        let host = create_host(&config, &artifacts, &data_dir, &mut metrics)?;
        let nodes = LocalNodes::default();
        let ports = Ports::create(connections, &mut metrics);
        let networking = ServiceNetworking::create(&config, &data_dir)?;
        let mut api_config = api_config(&config, &ports, &identity);
        api_config.service_networks = networking.networks()?;
        api_config.audit = audit(&config, &data_dir)?;
        let api = create_api(api_config, &store, &artifacts, &nodes, &mut metrics).await?;
        // The userspace proxy could not listen on the Service's port, 443, without root.
        if networking.has_kernel_rules() {
            let address = listeners.api.local_addr()?;
            api.publish_endpoint(address).await.context("the endpoint of Service default/kubernetes")?;
        }
        let client = |user: &str| api.client(User::component(user));

        let informers_stop = CancellationToken::new();
        // After an error below, the informers are stopped, so that they do not log that the server is unreachable.
        let stop_informers = informers_stop.clone().drop_guard();
        let informers = Informers::create(client("system:mayfly:informers"), informers_stop.clone());
        let gateway_stop = CancellationToken::new();
        let gateway = Gateway::create(
            gateway_config(&config, connections),
            mayfly_gateway::GatewayDeps {
                functions: informers.of(),
                revisions: informers.of(),
                role: mayfly_gateway::GatewayRole::Single,
                pods: informers.of(),
                services: informers.of(),
                slices: informers.of(),
                ingresses: informers.of(),
                https: config.https_listen.map(|listen| mayfly_gateway::HttpsDeps {
                    listen,
                    secrets: informers.of(),
                    fallback: identity.tls().cert_resolver.clone(),
                }),
                env: EnvObjects::create(&informers),
                host: host.clone(),
                client: client("system:mayfly:gateway"),
                requests: handles.requests.clone(),
                stop: gateway_stop.clone(),
            },
            &mut metrics,
        )
        .map_err(|error| gateway_refused(&error))?;
        let workflows_client = client("system:mayfly:workflows");
        let (workflows, gateway) =
            create_workflows(&config, &data_dir, gateway, workflows_client, &informers, &artifacts, handles)
                .await?;
        api.attach_functions(function_calls::connector(gateway.handle()));
        metrics.register_collector(Box::new(ServerCounts::new(store.clone(), workflows.engine())));
        api.attach_view("executions.mayfly.dev", Arc::new(workflows.executions()));

        let endpoints = listeners.endpoints(&gateway)?;
        let mut controllers = controllers_config(
            &endpoints,
            &identity,
            gateway.handle(),
            registries.clone(),
            containers::is_enabled(&config),
        );
        controllers.load_balancer.pool = config.load_balancer_pool;
        controllers.persistent_volume.local = Some(local_volumes(&config, &data_dir)?);
        let csi_drivers: Arc<CsiDrivers> = Arc::default();
        controllers.csi.drivers = csi_drivers.clone();
        let controllers = Controllers::create(controllers, client("system:mayfly:controllers"), &informers);
        let scheduler = Scheduler::create(Default::default(), client("system:kube-scheduler"), &informers);
        let node = format!("system:node:{}", config.node_name);
        let mut jobs = JobFiles::new(artifacts.clone(), data_dir.jobs());
        jobs.git_protocols = config.git_protocols.clone();
        let (node_client, compile_client) = (client(&node), client(&node));
        let (rules_written, service_rules) = watch::channel(false);
        let service_rules = networking.has_kernel_rules().then_some(service_rules);
        let containers = containers::create(&config, &data_dir, registries, service_rules).await?;
        let runtimes = std::iter::once(host.clone() as Arc<dyn Runtime>)
            .chain(containers.clone().map(|containers| containers as Arc<dyn Runtime>))
            .collect();
        let devices = Devices::create(&config, &data_dir)?;
        let meter = devices.as_ref().and_then(Devices::gpu_meter);
        let node_gpus = meter.clone().map(|meter| Arc::new(meter) as Arc<dyn NodeGpus>);
        if let Some(meter) = meter {
            metrics.register_collector(Box::new(GpuMetrics::new(&config.node_name, meter, informers.of())));
        }
        let network_client = client("system:mayfly:controllers");
        let network = NodeNetwork::create(
            &networking,
            &config.node_name,
            &informers,
            network_client,
            rules_written,
            ports.health_checks(),
        );
        let mut kubelet_config = kubelet_config(&config, &data_dir, logs, jobs);
        kubelet_config.devices = devices.as_ref().map(Devices::of_node);
        kubelet_config.gpus = node_gpus;
        kubelet_config.labels = Devices::labels(devices.as_ref());
        kubelet_config.label_prefixes = Devices::label_prefixes();
        kubelet_config.annotations = Devices::annotations(devices.as_ref());
        kubelet_config.csi =
            Some(CsiConfig { folder: kubelet_folder(&config, &data_dir)?, drivers: csi_drivers });
        kubelet_config.cluster_dns = networking.dns_server();
        kubelet_config.served_endpoints = Some(network.served_endpoints());
        let kubelet = Kubelet::create(kubelet_config, node_client, &informers, runtimes);
        nodes.attach(&config.node_name, kubelet.router());
        let slurm = match &config.slurm {
            Some(settings) => {
                anyhow::ensure!(
                    config.node_name != slurm::NODE,
                    "--node-name slurm is the name of Slurm's node"
                );
                let deps = SlurmDeps {
                    data_dir: &data_dir,
                    artifacts: artifacts.clone(),
                    client: client(&format!("system:node:{}", slurm::NODE)),
                    informers: &informers,
                    nodes: &nodes,
                    version: KUBERNETES_VERSION,
                };
                Some(slurm::create(settings, deps).await?)
            }
            None => None,
        };
        let simulated = config.simulated_nodes.map(|nodes| {
            let nodes = mayfly_simulated::Config { version: KUBERNETES_VERSION.into(), ..nodes };
            SimulatedNodes::create(nodes, client("system:node:simulated"), &informers)
        });
        host.attach_names(network.guest_names());
        host.attach_policies(network.connection_policy());
        stop_informers.disarm();
        Ok(Self {
            data_dir,
            store,
            identity,
            api,
            listeners,
            ports,
            workflows,
            gateway,
            gateway_stop,
            informers_stop,
            controllers,
            scheduler,
            kubelet,
            slurm,
            simulated,
            network,
            networking,
            devices,
            containers,
            host,
            revisions: informers.of(),
            compile_client,
            metrics,
            registry,
            endpoints,
        })
    }

    /// Starts everything, publishes the addresses, and runs until a signal or a failure.
    async fn run(self, serving: Handle) -> anyhow::Result<()> {
        let Self { data_dir, store, identity, api, endpoints, .. } = self;
        let (ready, is_ready) = watch::channel(false);
        let gateway_handle = self.gateway.handle();

        let mut outside = Tasks::new("api", &serving);
        let (stop, listener, server, tls) =
            (outside.token(), self.listeners.api, api.clone(), identity.tls());
        outside.run("api", async move { server.serve(listener, tls, stop).await });
        let metrics = Arc::new(self.metrics);
        api.attach_metrics(Arc::clone(&metrics));
        let admin = Admin {
            ready: is_ready,
            metrics: Arc::clone(&metrics),
            store: store.clone(),
            workflows: self.workflows.engine(),
            catalog: self.workflows.catalog(),
            registry: self.registry,
        };
        let (port, listener) = (self.ports.admin(), self.listeners.admin);
        outside.run("admin", admin.serve(port, listener, outside.token()));

        let here = Handle::current();
        let mut inside = Tasks::new("control plane", &here);
        let (stop, controllers) = (inside.token(), self.controllers);
        inside.run("controllers", Box::pin(controllers.run(stop)));
        let (stop, scheduler) = (inside.token(), self.scheduler);
        inside.run("scheduler", scheduler.run(stop));
        let (stop, kubelet) = (inside.token(), self.kubelet);
        inside.run("kubelet", kubelet.run(stop));
        if let Some(kubelet) = self.slurm {
            let stop = inside.token();
            inside.run("kubelet of Slurm's node", kubelet.run(stop));
        }
        if let Some(simulated) = self.simulated {
            let stop = inside.token();
            inside.run("simulated nodes", simulated.run(stop));
        }

        self.network.run_in(&mut inside);
        if let Some(devices) = self.devices {
            let stop = inside.token();
            inside.run("devices", devices.run(stop));
        }

        let (stop, host, revisions) = (inside.token(), self.host.clone(), self.revisions);
        let client = self.compile_client;
        inside.run("compile ahead", components::compile_ahead(host, revisions, client, stop));

        inside.run("start-up pages", start_pages::release(ready.subscribe(), inside.token()));

        let mut calling = Tasks::new("workflows", &serving);
        let (stop, port, listener) = (calling.token(), self.ports.workflows(), self.listeners.workflows);
        calling.spawn("workflows", self.workflows.serve(port, listener, stop));

        let mut front = Tasks::new("gateway", &here);
        let gateway = self.gateway;
        front.run("gateway", async move {
            let _ = gateway.run().await;
        });

        let mut stopping = StopSignals::listen()?;
        let unannounced = async {
            match banner::announce(&data_dir, &identity, &endpoints, &gateway_handle, &ready).await {
                Ok(()) => std::future::pending().await,
                Err(error) => error,
            }
        };
        let failure = tokio::select! {
            () = stopping.received() => None,
            error = failed(&mut outside, &mut inside, &mut calling, &mut front) => Some(error),
            error = unannounced => Some(error),
        };
        ready.send_replace(false);
        let mut signals = Tasks::new("signals", &here);
        signals.run("second signal", stopping.exit_on_the_next());
        let _ = std::fs::remove_file(data_dir.endpoints());
        tracing::info!("stopping; send the signal again to stop at once");
        // Running executions resume at the next start; workflows are stopped first, so that they do not call a closed
        // gateway.
        calling.stop(STOP_DEADLINE).await;
        self.gateway_stop.cancel();
        front.stop(GATEWAY_STOP_DEADLINE).await;
        self.host.stop();
        inside.stop(STOP_DEADLINE).await;
        if let Some(containers) = &self.containers {
            containers.stop().await;
        }
        self.informers_stop.cancel();
        api.shut_down();
        outside.stop(STOP_DEADLINE).await;
        store.close().await;
        drop(self.networking);
        tracing::info!("stopped");
        failure.map_or(Ok(()), Err)
    }
}

async fn failed(
    outside: &mut Tasks,
    inside: &mut Tasks,
    calling: &mut Tasks,
    front: &mut Tasks,
) -> anyhow::Error {
    tokio::select! {
        error = calling.failed() => error,
        error = outside.failed() => error,
        error = inside.failed() => error,
        error = front.failed() => error,
    }
}

/// The files of the data directory that are opened before any listener.
struct Files {
    store: Store,
    artifacts: Artifacts,
    identity: Identity,
}

impl Files {
    fn open(config: &UpConfig, data_dir: &DataDir) -> anyhow::Result<Self> {
        data_dir.make().with_context(|| {
            format!(
                "cannot make the data directory {}; choose another with --data-dir",
                data_dir.path().display()
            )
        })?;
        let store = Store::open(mayfly_store::Config::new(data_dir.database()))?;
        // Clients must not find the addresses of an earlier run.
        remove_stale(&data_dir.endpoints())?;
        let artifacts = Artifacts::open(data_dir.artifacts()).context("cannot open the artifact store")?;
        let names = std::slice::from_ref(&config.node_name);
        let identity = Identity::load_or_create(&data_dir.pki(), names, jiff::Timestamp::now())
            .context("cannot make or read the server's certificates")?;
        Ok(Self { store, artifacts, identity })
    }
}

fn create_host(
    config: &UpConfig,
    artifacts: &Artifacts,
    data_dir: &DataDir,
    metrics: &mut Registry,
) -> anyhow::Result<Arc<WasmHost>> {
    let writer = LogWriter::start().context("cannot start the log writer")?;
    let host_config = mayfly_runtime_wasm::Config {
        memory_bytes_max: config.function_memory_bytes,
        instances_max: config.instances_max,
        function_instances_max: config.function_instances_max,
        // The running program, even if its file was replaced meanwhile.
        compile_in: CompileIn::Process("/proc/self/exe".into()),
        compile_speed_file: Some(data_dir.compile_speed()),
        ..Default::default()
    };
    let host =
        WasmHost::create(host_config, artifacts.clone(), writer, LogLayout::new(data_dir.logs()), metrics);
    host.map(Arc::new).context("cannot start the wasm host")
}

async fn create_workflows(
    config: &UpConfig,
    data_dir: &DataDir,
    gateway: Gateway,
    client: kube::Client,
    informers: &Informers,
    artifacts: &Artifacts,
    handles: &Handles,
) -> anyhow::Result<(Workflows, Gateway)> {
    let jobs = JobsDeps {
        client: client.clone(),
        jobs: informers.of(),
        artifacts: artifacts.clone(),
        answers_http: components::answers_http,
    };
    let object_deps = WorkflowObjectDeps {
        client,
        workflows: informers.of(),
        functions: informers.of(),
        namespaces: informers.of(),
    };
    let settings = WorkflowSettings {
        endpoints: config.task_endpoints.clone(),
        retention: config.workflow_retention,
        history_events_max: config.workflow_history_events,
    };
    let workflows = Workflows::create(data_dir.workflows(), gateway, settings, object_deps, jobs);
    // The engine runs executions in the Tokio runtime that created it.
    handles.serving.spawn(workflows).await.context("workflows cannot be made")?
}

async fn create_api(
    config: mayfly_apiserver::Config,
    store: &Store,
    artifacts: &Artifacts,
    nodes: &LocalNodes,
    metrics: &mut Registry,
) -> anyhow::Result<ApiServer> {
    let deps = mayfly_apiserver::ApiServerDeps {
        store: store.clone(),
        artifacts: artifacts.clone(),
        clock: Arc::new(jiff::Timestamp::now),
        nodes: nodes.connector(),
        inspector: Arc::new(components::inspect),
    };
    Ok(ApiServer::create(config, deps, metrics).await?)
}
