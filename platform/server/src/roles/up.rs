//! `mayfly up`: all components in one process; and `mayfly server`, which other machines can join.
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
use mayfly_controllers::{Controllers, NodeApproval, NodeIpam};
use mayfly_csi::CsiDrivers;
use mayfly_gateway::{Gateway, GatewayRole};
use mayfly_informer::{Informer, Informers};
use mayfly_kubelet::Kubelet;
use mayfly_registry::RegistryServer;
use mayfly_runtime_wasm::WasmHost;
use mayfly_scheduler::Scheduler;
use mayfly_simulated::SimulatedNodes;
use mayfly_store::Store;
use prometheus_client::registry::Registry;
use tokio::{runtime::Handle, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{
    admin::Admin,
    agent::{ClusterMember, NodeAgent, NodeAgentDeps},
    agent_port, banner,
    cluster::{Cluster, Invitation},
    components, containers,
    data_files::remove_stale,
    function_calls, functions, image_registry,
    listeners::{Listeners, Ports, gateway_refused},
    metrics::ServerCounts,
    network::{self, ServiceNetworking},
    nodes::LocalNodes,
    open_files::{self, Connections},
    part_configs::{
        KUBERNETES_VERSION, api_config, audit, controllers_config, gateway_config, local_volumes,
    },
    runtimes::{Handles, Runtimes},
    signals::StopSignals,
    slurm::{self, SlurmDeps},
    start_pages,
    tasks::Tasks,
    workflows::{JobsDeps, WorkflowObjectDeps, WorkflowSettings, Workflows},
};
use crate::{config::UpConfig, logging};

/// The time for the controllers and the kubelet to stop; unfinished work is done at the next start.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// The prefix length of the range of one node's pods: 254 pods with addresses of their own.
const POD_RANGE_BITS: u8 = 24;
/// Longer than the gateway's own drain timeout, which takes effect first.
const GATEWAY_STOP_DEADLINE: Duration =
    mayfly_gateway::Config::DRAIN_TIMEOUT_DEFAULT.saturating_add(STOP_DEADLINE);

/// Runs until SIGINT or SIGTERM.
pub(crate) fn run(config: UpConfig, data_dir: DataDir) -> anyhow::Result<ExitCode> {
    let data_dir = data_dir.unless_configured(config.data_dir.clone());
    logging::start(&config.node.log, config.node.log_format)?;
    if let Some(warning) = config.node.warning() {
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
    agent: NodeAgent,
    /// The connections with other machines; `None`: none can join.
    cluster: Option<Cluster>,
    /// What machines need to join.
    invitation: Option<Invitation>,
    /// The kubelet of the node that represents a Slurm cluster.
    slurm: Option<Kubelet>,
    simulated: Option<SimulatedNodes>,
    /// Reserves the network of Services.
    networking: ServiceNetworking,
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
            &config.node.images,
            &data_dir,
            listeners.admin.local_addr()?,
            identity.token(),
        )?;
        let host = functions::create_host(&config.node, &artifacts, &data_dir, &mut metrics)?;
        let nodes = LocalNodes::default();
        let ports = Ports::create(connections, &mut metrics);
        let networking = ServiceNetworking::create(&config, &data_dir)?;
        let mut api_config = api_config(&config, &ports, &identity);
        api_config.service_networks = networking.networks()?;
        api_config.audit = audit(&config, &data_dir)?;
        let api = create_api(api_config, &store, &artifacts, &nodes, &mut metrics).await?;
        // The userspace proxy could not listen on the Service's port, 443, without root.
        if networking.has_kernel_rules() {
            let mut address = listeners.api.local_addr()?;
            if let Some(machine) = &config.machine {
                address.set_ip(machine.node_ip);
            }
            api.publish_endpoint(address).await.context("the endpoint of Service default/kubernetes")?;
        }
        let client = |user: &str| api.client(User::component(user));

        let informers_stop = CancellationToken::new();
        // After an error below, the informers are stopped, so that they do not log that the server is unreachable.
        let stop_informers = informers_stop.clone().drop_guard();
        let informers = Informers::create(client("system:mayfly:informers"), informers_stop.clone());
        let gateway_stop = CancellationToken::new();
        let https = config.node.https_listen.map(|listen| mayfly_gateway::HttpsDeps {
            listen,
            secrets: informers.of(),
            fallback: identity.tls().cert_resolver.clone(),
        });
        let cluster = match &config.machine {
            Some(machine) => Some(Cluster::create(machine, &identity, &ports, &informers).await?),
            None => None,
        };
        if let Some(cluster) = &cluster {
            nodes.attach_others(cluster.connector());
        }
        let role =
            cluster.as_ref().map_or(GatewayRole::Single, |cluster| cluster.gateway_role(&config.node.name));
        let gateway = functions::gateway_deps(
            &informers,
            host.clone(),
            client("system:mayfly:gateway"),
            handles,
            https,
            role,
            &gateway_stop,
        );
        let gateway = Gateway::create(gateway_config(&config.node, connections), gateway, &mut metrics)
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
            containers::is_enabled(&config.node),
        );
        controllers.load_balancer.pool = config.load_balancer_pool;
        controllers.persistent_volume.local = Some(local_volumes(&config.node, &data_dir)?);
        if let Some(machine) = &config.machine {
            let pods = network::cluster_pods()?;
            controllers.node_ipam = Some(NodeIpam { network: pods, prefix: POD_RANGE_BITS });
            let reserved_names = vec![config.node.name.clone(), machine.node_ip.to_string()];
            controllers.node_approval = Some(NodeApproval { reserved_names });
        }
        let csi_drivers: Arc<CsiDrivers> = Arc::default();
        controllers.csi.drivers = csi_drivers.clone();
        let controllers = Controllers::create(controllers, client("system:mayfly:controllers"), &informers);
        let scheduler = Scheduler::create(Default::default(), client("system:kube-scheduler"), &informers);
        let node = format!("system:node:{}", config.node.name);
        let invitation = match &config.machine {
            Some(machine) => Some(Invitation {
                client: client("system:mayfly:controllers"),
                facts: networking.facts()?,
                server: (machine.node_ip, listeners.api.local_addr()?.port()).into(),
            }),
            None => None,
        };
        let agent = NodeAgentDeps {
            config: &config.node,
            data_dir: &data_dir,
            informers: &informers,
            client: client(&node),
            network_client: client("system:mayfly:controllers"),
            networking: &networking,
            dual_stack: config.dual_stack,
            artifacts: artifacts.clone(),
            registries,
            host: host.clone(),
            csi_drivers,
            ports: &ports,
            member: match &cluster {
                Some(cluster) => Some(ClusterMember { address: cluster.member, facts: networking.facts()? }),
                None => None,
            },
        };
        let agent = NodeAgent::create(agent, &mut metrics).await?;
        let compile_client = client(&node);
        nodes.attach(&config.node.name, agent.kubelet.router());
        let slurm = match &config.slurm {
            Some(settings) => {
                anyhow::ensure!(
                    config.node.name != slurm::NODE,
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
            agent,
            cluster,
            invitation,
            slurm,
            simulated,
            networking,
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
        let containers = self.agent.containers.clone();
        if let Some(cluster) = self.cluster {
            // Nodes may not use the kubelet of another one.
            let router = agent_port::router(axum::Router::new(), gateway_handle.node_requests());
            inside.run("agent", cluster.serve(router, inside.token()));
        }
        self.agent.run_in(&mut inside);
        if let Some(kubelet) = self.slurm {
            let stop = inside.token();
            inside.run("kubelet of Slurm's node", kubelet.run(stop));
        }
        if let Some(simulated) = self.simulated {
            let stop = inside.token();
            inside.run("simulated nodes", simulated.run(stop));
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
            let announced = async {
                let join_command = match &self.invitation {
                    Some(invitation) => Some(invitation.publish(&data_dir, &identity).await?),
                    None => None,
                };
                gateway_handle.ready().await;
                banner::announce(&data_dir, &identity, &endpoints, join_command.as_deref(), &ready)
            };
            match announced.await {
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
        if let Some(containers) = &containers {
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
        let mut names = vec![config.node.name.clone()];
        names.extend(config.machine.map(|machine| machine.node_ip.to_string()));
        let identity = Identity::load_or_create(&data_dir.pki(), &names, jiff::Timestamp::now())
            .context("cannot make or read the server's certificates")?;
        Ok(Self { store, artifacts, identity })
    }
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
