//! `mayfly node`: the parts of a machine that joins a server: its node, its gateway, its part of the network.
//!
//! It needs the server to start. While it runs and the server cannot be reached, everything that runs continues:
//! functions with replicas here answer, containers run, statuses are reported later.

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use mayfly_artifacts::{Artifacts, CacheConfig};
use mayfly_cli::data_dir::{DataDir, Endpoints};
use mayfly_csi::CsiDrivers;
use mayfly_distribution::RegistryClient;
use mayfly_gateway::{Gateway, GatewayRole};
use mayfly_informer::Informers;
use mayfly_join::{JoinConfig, JoinToken, NodeCredentials, rotating_client};
use mayfly_kubelet::ApiArtifacts;
use mayfly_node_link::{AllowedClients, LinkAuthorities, LinkCertificate, LinkServer, NodeLink};
use mayfly_runtime_oci::OciRuntime;
use mayfly_runtime_wasm::WasmHost;
use prometheus_client::registry::Registry;
use tokio::{net::TcpListener, runtime::Handle, sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    agent::{ClusterMember, NodeAgent, NodeAgentDeps},
    agent_port,
    cluster::{self, MemberAddress},
    data_files::remove_stale,
    functions,
    listeners::{Ports, gateway_refused, listen},
    network::ServiceNetworking,
    node_admin::NodeAdmin,
    open_files::{self, Connections},
    part_configs::gateway_config,
    runtimes::{Handles, Runtimes},
    signals::StopSignals,
    tasks::Tasks,
};
use crate::{config::JoinSettings, logging};

/// The pause between attempts to join while the server cannot be reached.
const JOIN_AGAIN: Duration = Duration::from_secs(2);
/// The time for the kubelet to stop; unfinished work is done at the next start.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// Longer than the gateway's own drain timeout, which takes effect first.
const GATEWAY_STOP_DEADLINE: Duration =
    mayfly_gateway::Config::DRAIN_TIMEOUT_DEFAULT.saturating_add(STOP_DEADLINE);

/// Runs until SIGINT or SIGTERM.
pub(crate) fn run(config: JoinSettings, data_dir: DataDir) -> anyhow::Result<ExitCode> {
    let data_dir = data_dir.unless_configured(config.data_dir.clone());
    logging::start(&config.node.log, config.node.log_format)?;
    if let Some(warning) = config.node.warning() {
        tracing::warn!("{warning}");
    }
    let connections = open_files::connections();
    let runtimes = Runtimes::create()?;
    let handles = runtimes.handles();
    let result = runtimes.run(async {
        let mut stopping = StopSignals::listen()?;
        let created = tokio::select! {
            created = Box::pin(JoinedNode::create(config, data_dir, connections, &handles)) => Some(created?),
            () = stopping.received() => None,
        };
        match created {
            Some(node) => Box::pin(node.run(stopping)).await,
            None => Ok(()),
        }
    });
    result.map(|()| ExitCode::SUCCESS)
}

/// All parts, created and not yet running.
struct JoinedNode {
    data_dir: DataDir,
    join: JoinConfig,
    credentials: watch::Sender<NodeCredentials>,
    serving: LinkCertificate,
    calling: LinkCertificate,
    agent_listener: TcpListener,
    agent_server: LinkServer,
    admin_listener: TcpListener,
    ports: Ports,
    gateway: Gateway,
    gateway_stop: CancellationToken,
    informers_stop: CancellationToken,
    agent: NodeAgent,
    networking: ServiceNetworking,
    host: Arc<WasmHost>,
    metrics: Registry,
    endpoints: Endpoints,
}

impl JoinedNode {
    async fn create(
        config: JoinSettings,
        data_dir: DataDir,
        connections: Connections,
        handles: &Handles,
    ) -> anyhow::Result<Self> {
        let mut metrics = Registry::default();
        data_dir.make().with_context(|| {
            format!(
                "cannot make the data directory {}; choose another with --data-dir",
                data_dir.path().display()
            )
        })?;
        remove_stale(&data_dir.endpoints())?;
        let agent_listener = listen(config.machine.agent_listen, "agent-listen").await?;
        let admin_listener = listen(config.node.admin_listen, "admin-listen").await?;
        let member = MemberAddress::new(&config.machine, &agent_listener)?;

        let mut join = JoinConfig::new(&config.server, &config.node.name, data_dir.pki());
        join.token = config.token.as_deref().map(str::parse::<JoinToken>).transpose().context("--token")?;
        join.addresses = vec![config.machine.node_ip];
        let credentials = joined(&join).await?;
        let serving =
            LinkCertificate::from_pem(credentials.serving_certificate_pem(), credentials.serving_key_pem())?;
        let calling =
            LinkCertificate::from_pem(credentials.client_certificate_pem(), credentials.client_key_pem())?;
        let authorities = LinkAuthorities::from_pem(credentials.ca_pem())?;
        let credentials = watch::Sender::new(credentials);
        let client = rotating_client(credentials.subscribe())?;
        let facts = cluster::facts(&client).await;

        let artifacts = Artifacts::open_cache(
            data_dir.artifacts(),
            Arc::new(ApiArtifacts::new(client.clone())),
            CacheConfig::default(),
        )
        .context("cannot open the cache of artifacts")?;
        let host = functions::create_host(&config.node, &artifacts, &data_dir, &mut metrics)?;
        let ports = Ports::create(connections, &mut metrics);
        let networking = ServiceNetworking::join(&config.node, &data_dir, &facts)?;

        let informers_stop = CancellationToken::new();
        let stop_informers = informers_stop.clone().drop_guard();
        let informers = Informers::create(client.clone(), informers_stop.clone());
        let link = NodeLink::new(mayfly_node_link::LinkConfig::default(), &calling, &authorities)?;
        let gateway_stop = CancellationToken::new();
        let role = GatewayRole::Follower {
            node: config.node.name.clone(),
            leader: cluster::leader_caller(link, informers.of()),
        };
        let deps = functions::gateway_deps(
            &informers,
            host.clone(),
            client.clone(),
            handles,
            None,
            role,
            &gateway_stop,
        );
        let gateway = Gateway::create(gateway_config(&config.node, connections), deps, &mut metrics)
            .map_err(|error| gateway_refused(&error))?;

        let registries = RegistryClient::new(config.node.images.registries()?);
        let agent = NodeAgentDeps {
            config: &config.node,
            data_dir: &data_dir,
            informers: &informers,
            client: client.clone(),
            network_client: client,
            networking: &networking,
            dual_stack: false,
            artifacts,
            registries,
            host: host.clone(),
            csi_drivers: Arc::<CsiDrivers>::default(),
            ports: &ports,
            member: Some(ClusterMember { address: member, facts }),
        };
        let agent = NodeAgent::create(agent, &mut metrics).await?;
        let agent_server = LinkServer::new(
            &serving,
            &authorities,
            AllowedClients::default(),
            LinkServer::limits_default(),
            &ports.metrics,
        )?;
        let endpoints = Endpoints {
            api: config.server.clone(),
            http: format!("http://{}", gateway.address()),
            https: None,
            workflows: None,
            admin: Some(format!("http://{}", admin_listener.local_addr()?)),
        };
        stop_informers.disarm();
        Ok(Self {
            data_dir,
            join,
            credentials,
            serving,
            calling,
            agent_listener,
            agent_server,
            admin_listener,
            ports,
            gateway,
            gateway_stop,
            informers_stop,
            agent,
            networking,
            host,
            metrics,
            endpoints,
        })
    }

    /// Starts everything, publishes the addresses, and runs until a signal or a failure.
    async fn run(self, mut stopping: StopSignals) -> anyhow::Result<()> {
        let here = Handle::current();
        let (ready, is_ready) = watch::channel(false);
        let gateway_handle = self.gateway.handle();
        let mut inside = Tasks::new("node", &here);

        let router = agent_port::router(self.agent.kubelet.router(), gateway_handle.node_requests());
        let (stop, listener, server) = (inside.token(), self.agent_listener, self.agent_server);
        inside.run("agent", async move { server.serve(listener, router, stop).await });
        let admin = NodeAdmin { ready: is_ready, metrics: Arc::new(self.metrics) };
        let (stop, port, listener) = (inside.token(), self.ports.admin(), self.admin_listener);
        inside.run("admin", admin.serve(port, listener, stop));
        let renewed = self.credentials.subscribe();
        inside.run("certificates", mayfly_join::renew(self.join, self.credentials, inside.token()));
        inside.run("renewed certificates", replace(self.serving, self.calling, renewed, inside.token()));
        let containers: Option<Arc<OciRuntime>> = self.agent.containers.clone();
        self.agent.run_in(&mut inside);

        let mut front = Tasks::new("gateway", &here);
        let gateway = self.gateway;
        front.run("gateway", async move {
            let _ = gateway.run().await;
        });

        let announced = async {
            gateway_handle.ready().await;
            if let Err(error) = self.endpoints.write(&self.data_dir.endpoints()) {
                return anyhow::Error::new(error).context("cannot write endpoints.json");
            }
            ready.send_replace(true);
            tracing::info!(
                server = self.endpoints.api,
                functions = self.endpoints.http,
                data = %self.data_dir.path().display(),
                "this node has joined"
            );
            std::future::pending().await
        };
        let failure = tokio::select! {
            () = stopping.received() => None,
            error = inside.failed() => Some(error),
            error = front.failed() => Some(error),
            error = announced => Some(error),
        };
        ready.send_replace(false);
        let mut signals = Tasks::new("signals", &here);
        signals.run("second signal", stopping.exit_on_the_next());
        let _ = std::fs::remove_file(self.data_dir.endpoints());
        tracing::info!("stopping; send the signal again to stop at once");
        self.gateway_stop.cancel();
        front.stop(GATEWAY_STOP_DEADLINE).await;
        self.host.stop();
        inside.stop(STOP_DEADLINE).await;
        if let Some(containers) = &containers {
            containers.stop().await;
        }
        self.informers_stop.cancel();
        drop(self.networking);
        tracing::info!("stopped");
        failure.map_or(Ok(()), Err)
    }
}

/// Joins, however long the server cannot be reached.
async fn joined(config: &JoinConfig) -> anyhow::Result<NodeCredentials> {
    let mut waits = false;
    loop {
        match mayfly_join::join(config).await {
            Ok(credentials) => return Ok(credentials),
            Err(error) if error.is_transient() => {
                // Once: the same every two seconds says no more.
                if !std::mem::replace(&mut waits, true) {
                    tracing::warn!(%error, "this node cannot join yet; it tries again");
                }
                sleep(JOIN_AGAIN).await;
            }
            Err(error) => return Err(anyhow::Error::new(error).context("this node cannot join")),
        }
    }
}

/// Uses renewed certificates for the connections of other machines (`serving`) and to them (`calling`).
async fn replace(
    serving: LinkCertificate,
    calling: LinkCertificate,
    mut credentials: watch::Receiver<NodeCredentials>,
    stop: CancellationToken,
) {
    while let Some(Ok(())) = stop.run_until_cancelled(credentials.changed()).await {
        let newest = credentials.borrow_and_update().clone();
        let replaced = serving
            .replace(newest.serving_certificate_pem(), newest.serving_key_pem())
            .and_then(|()| calling.replace(newest.client_certificate_pem(), newest.client_key_pem()));
        if let Err(error) = replaced {
            tracing::error!(%error, "the renewed certificates cannot be used");
        }
    }
    stop.cancelled().await;
}
