//! The service proxy of a node: plans rules from Services and EndpointSlices and applies them.

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mayfly_accept::AcceptPort;
use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Node, Pod, Service},
        discovery::v1::EndpointSlice,
    },
};
use mayfly_informer::{Changes, Informer, Informers};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    demand::demand,
    health::HealthCheckServer,
    nftables::NftablesProxy,
    plan,
    plan::{NodeListeners, ProxyNode, RuleSet},
    route,
    userspace::{FrontendError, UserspaceProxy},
    withdrawal::{AppliedEndpoints, LiveEndpoints, live_endpoints},
};

/// Changes within this time are applied together: endpoints change in bursts during a rollout.
const GATHER: Duration = Duration::from_millis(5);
/// The interval at which failed rules are retried and the kernel's tables are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The proxy for Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxyMode {
    /// In the kernel, with root, in tables with this name. `bridged_pods`: see [`NftablesProxy::masquerading_bridge`].
    /// `pods`: see [`NftablesProxy::with_pods`]. `network_v6`: the network of the Services' IPv6 addresses, if there are
    /// any.
    Nftables {
        table: String,
        activation: Activation,
        bridged_pods: Option<Ipv4Net>,
        pods: Vec<IpNet>,
        network_v6: Option<Ipv6Net>,
    },
    /// Listeners of this process; node ports listen on this address.
    Userspace(IpAddr),
}

impl ProxyMode {
    /// The address for node ports; the unspecified address stands for all.
    fn node_address(&self) -> IpAddr {
        match self {
            Self::Nftables { .. } => Ipv4Addr::UNSPECIFIED.into(),
            Self::Userspace(address) => *address,
        }
    }
}

/// When the kernel's tables are first written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Activation {
    AtStart,
    /// When the node needs them ([`demand`](crate::demand)). The marker file exists while tables may be in the kernel:
    /// a server that finds it follows a crash, and writes the tables at once.
    OnDemand {
        marker: PathBuf,
    },
}

/// The proxy, created and not yet running. [`ServiceProxy::rules`] returns a handle to its rules.
pub struct ServiceProxy {
    mode: ProxyMode,
    node: String,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    listeners: Vec<watch::Receiver<Arc<NodeListeners>>>,
    rules: watch::Sender<Arc<RuleSet>>,
    live: watch::Sender<LiveEndpoints>,
    is_programmed: watch::Sender<bool>,
    health_port: AcceptPort,
}

impl std::fmt::Debug for ServiceProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceProxy").field("node", &self.node).finish_non_exhaustive()
    }
}

enum Proxy {
    Nftables(NftablesProxy),
    Userspace {
        proxy: UserspaceProxy,
        /// The number of frontends whose addresses this machine does not have.
        foreign: usize,
    },
}

impl ServiceProxy {
    /// `is_programmed` becomes true when rules have been applied for the first time. `health_port` holds the limits of
    /// the ports for load balancers' health checks.
    #[must_use]
    pub fn create(
        mode: ProxyMode,
        node: &str,
        informers: &Informers,
        is_programmed: watch::Sender<bool>,
        health_port: AcceptPort,
    ) -> Self {
        Self {
            mode,
            node: node.to_owned(),
            services: informers.of(),
            slices: informers.of(),
            pods: informers.of(),
            nodes: informers.of(),
            listeners: Vec::new(),
            rules: watch::Sender::new(Arc::new(RuleSet::default())),
            live: watch::Sender::new(LiveEndpoints::default()),
            is_programmed,
            health_port,
        }
    }

    /// Serves Services by listeners of this node's process, in place of the endpoints in EndpointSlices: those of the
    /// name server, or of the gateway. May be called for each source of listeners.
    #[must_use]
    pub fn with_listeners(mut self, listeners: watch::Receiver<Arc<NodeListeners>>) -> Self {
        self.listeners.push(listeners);
        self
    }

    /// The latest planned rules.
    #[must_use]
    pub fn rules(&self) -> watch::Receiver<Arc<RuleSet>> {
        self.rules.subscribe()
    }

    /// The endpoints that the proxy uses.
    #[must_use]
    pub fn endpoints(&self) -> AppliedEndpoints {
        AppliedEndpoints(self.live.subscribe())
    }

    /// Runs until `stop`; then closes the listeners, or removes the kernel's tables.
    pub async fn run(self, stop: CancellationToken) {
        let synced = async {
            tokio::join!(
                self.services.synced(),
                self.slices.synced(),
                self.pods.synced(),
                self.nodes.synced()
            )
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let mut proxy = match &self.mode {
            ProxyMode::Nftables { table, activation, bridged_pods, pods, network_v6 } => {
                if let Activation::OnDemand { marker } = activation
                    && stop.run_until_cancelled(self.demanded(marker)).await.is_none()
                {
                    return;
                }
                if let Some(network) = network_v6 {
                    route::add(*network).await;
                }
                let proxy = NftablesProxy::new(table).masquerading_bridge(*bridged_pods);
                Proxy::Nftables(proxy.with_pods(pods.clone()))
            }
            ProxyMode::Userspace(address) => {
                Proxy::Userspace { proxy: UserspaceProxy::new(*address), foreign: 0 }
            }
        };
        let mut health = HealthCheckServer::new(self.mode.node_address(), self.health_port.clone());
        let mut services = self.services.subscribe();
        let mut slices = self.slices.subscribe();
        let mut nodes = self.nodes.subscribe();
        let mut failing = false;
        loop {
            let node = self.proxy_node();
            let (rules, live) = self.plan(&node);
            let rules = Arc::new(rules);
            let failure = proxy.apply(&rules).await;
            let unhealthy = health.apply(&rules.health_checks, failure.is_none());
            let failure = failure.or_else(|| in_words(&unhealthy));
            match &failure {
                Some(failure) if !failing => {
                    tracing::warn!(failure, "cannot serve all services; will try again")
                }
                None if failing => tracing::info!("all services are served again"),
                _ => {}
            }
            failing = failure.is_some();
            self.is_programmed.send_if_modified(|is| !failing && !std::mem::replace(is, true));
            self.rules.send_replace(rules);
            self.live.send_replace(live);
            let changed = async {
                tokio::select! {
                    () = changed(&mut services, &mut slices) => {}
                    () = self.moved(&node, &mut nodes) => {}
                }
            };
            if stop.run_until_cancelled(changed).await.is_none() {
                break;
            }
        }
        if let ProxyMode::Nftables { network_v6: Some(network), .. } = &self.mode {
            route::remove(*network).await;
        }
        if let Proxy::Nftables(proxy) = &mut proxy {
            match (proxy.remove().await, &self.mode) {
                (Ok(()), ProxyMode::Nftables { activation: Activation::OnDemand { marker }, .. }) => {
                    // A marker that is left behind only makes the next start write the tables at once.
                    let _ = std::fs::remove_file(marker);
                }
                (Ok(()), _) => {}
                (Err(error), _) => {
                    tracing::warn!(%error, "cannot remove the service rules from the kernel");
                }
            }
        }
    }

    /// Waits until the node needs rules in the kernel, and creates the marker file.
    async fn demanded(&self, marker: &std::path::Path) {
        let (mut services, mut pods) = (self.services.subscribe(), self.pods.subscribe());
        let reason = loop {
            if marker.exists() {
                break "rules of an earlier run may be in the kernel".to_owned();
            }
            let (all_pods, all_services) = (self.pods.list(), self.services.list());
            let all_pods = all_pods.iter().map(|pod| &**pod);
            if let Some(demand) = demand(all_pods, all_services.iter().map(|service| &**service), &self.node)
            {
                break demand.to_string();
            }
            tokio::select! {
                _ = services.next() => {}
                _ = pods.next() => {}
            }
        };
        tracing::info!(reason, "serving Services by the kernel's packet filter");
        let written = marker.parent().map_or(Ok(()), std::fs::create_dir_all);
        if let Err(error) = written.and_then(|()| std::fs::write(marker, "")) {
            tracing::warn!(%error, marker = %marker.display(), "cannot write the marker: service rules would stay in the kernel after a crash");
        }
    }

    fn proxy_node(&self) -> ProxyNode {
        let node = ProxyNode::of(&self.node, self.nodes.get(&ObjectKey::cluster(&*self.node)).as_deref());
        node.with_listeners(merged(&self.listeners))
    }

    /// Waits until the node is not as planned for. Most changes of Nodes are heartbeats.
    async fn moved(&self, planned: &ProxyNode, nodes: &mut Changes) {
        let mut listeners = self.listeners.clone();
        while self.proxy_node() == *planned {
            tokio::select! {
                _ = nodes.next() => {}
                () = any_changed(&mut listeners) => {}
            }
        }
    }

    fn plan(&self, node: &ProxyNode) -> (RuleSet, LiveEndpoints) {
        let (services, slices) = (self.services.list(), self.slices.list());
        let (services, slices) =
            (services.iter().map(|service| &**service), slices.iter().map(|slice| &**slice));
        (plan::plan(services, slices.clone(), node), live_endpoints(slices, &self.node))
    }
}

/// The listeners of all sources.
pub(crate) fn merged(sources: &[watch::Receiver<Arc<NodeListeners>>]) -> Arc<NodeListeners> {
    match sources {
        [] => Arc::default(),
        [source] => source.borrow().clone(),
        sources => {
            let all = sources.iter().map(|source| source.borrow().clone());
            Arc::new(all.flat_map(|of| NodeListeners::clone(&of)).collect())
        }
    }
}

/// Waits until one of the sources changes; one that has ended does not change any more.
async fn any_changed(sources: &mut [watch::Receiver<Arc<NodeListeners>>]) {
    let mut all: Vec<_> = sources
        .iter_mut()
        .map(|source| {
            Box::pin(async move {
                if source.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            })
        })
        .collect();
    std::future::poll_fn(|context| {
        let is_ready = all.iter_mut().any(|of| of.as_mut().poll(context).is_ready());
        if is_ready { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Waits for changes, or for the next periodic check.
async fn changed(services: &mut Changes, slices: &mut Changes) {
    let check = Instant::now() + CHECK_INTERVAL;
    tokio::select! {
        _ = services.next() => {}
        _ = slices.next() => {}
        () = tokio::time::sleep_until(check) => return,
    }
    tokio::time::sleep(GATHER).await;
    services.take();
    slices.take();
}

impl Proxy {
    /// Applies rules; returns a message about failures.
    async fn apply(&mut self, rules: &Arc<RuleSet>) -> Option<String> {
        match self {
            Self::Nftables(proxy) => {
                match proxy.apply(rules).await {
                    Ok(true) => {
                        tracing::warn!(
                            "restored service rules in the kernel that another program had changed"
                        );
                    }
                    Ok(false) => {}
                    Err(error) => return Some(error.to_string()),
                }
                None
            }
            Self::Userspace { proxy, foreign } => {
                // Cluster IPs outside of the loopback network, on a node that joined the cluster of a server with root:
                // no retry can help.
                let is_foreign =
                    |failed: &FrontendError| failed.source.kind() == io::ErrorKind::AddrNotAvailable;
                let (elsewhere, failed): (Vec<_>, Vec<_>) =
                    proxy.apply(rules).await.into_iter().partition(is_foreign);
                if let Some(first) = elsewhere.first().filter(|_| elsewhere.len() > *foreign) {
                    let count = elsewhere.len();
                    tracing::warn!(%first, count, "programs on this machine do not reach Services at addresses that it does not have");
                }
                *foreign = elsewhere.len();
                in_words(&failed)
            }
        }
    }
}

/// A message with the first failed frontend and the number of others.
fn in_words(failed: &[FrontendError]) -> Option<String> {
    let first = failed.first()?;
    Some(match failed.len() {
        1 => first.to_string(),
        count => format!("{first} (and {} more)", count - 1),
    })
}
