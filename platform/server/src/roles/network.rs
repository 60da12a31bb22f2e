//! Chooses how this node serves Services and DNS names, and the network of cluster IPs.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::{linux::net::SocketAddrExt as _, unix::net},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use async_trait::async_trait;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mayfly_accept::AcceptPort;
use mayfly_apiserver::ServiceNetworks;
use mayfly_cli::data_dir::DataDir;
use mayfly_informer::Informers;
use mayfly_kubelet::{ClusterDnsServer, ServedEndpoints};
use mayfly_network::{
    Activation, AppliedEndpoints, ClusterDns, ClusterFacts, ClusterNames, DnsConfig, HostAddresses,
    InProcessPolicies, NodeRoutes, OverlayConfig, PodRouting, PolicyEnforcer, PolicyMode, ProxyMode,
    RouteOwner, ServiceProxy, facts,
};
use mayfly_runtime::{ClusterHost, ClusterHosts, ConnectionPolicy};
use mayfly_runtime_oci::availability::find_program;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::{containers, tasks::Tasks};
use crate::config::{NetworkMode, NodeConfig, UpConfig};

/// The network of cluster IPs for the userspace proxy: loopback addresses beside those of pods, so that no root is
/// needed.
const LOOPBACK_SERVICE_NETWORK: &str = "127.96.0.0/12";
/// Cluster IPs for nftables come from 10.96.0.0/12, in 64 networks of 16,382 addresses: servers on one host must not
/// share a network.
const SERVICE_NETWORKS: u32 = u32::from_be_bytes([10, 96, 0, 0]);
const SERVICE_NETWORK_BITS: u8 = 18;
const SERVICE_NETWORK_COUNT: u32 = 64;
/// Their IPv6 networks, unique local addresses (RFC 4193); those of pods are adjacent (`runtime-oci`).
const SERVICE_NETWORKS_V6: Ipv6Addr = Ipv6Addr::new(0xfd6d, 0x6179, 0x666c, 0, 0, 0, 0, 0);
const SERVICE_NETWORK_V6_BITS: u8 = 112;
const POD_NETWORKS_V6_BITS: u8 = 48;
const IPV6_DISABLED: &str = "/proc/sys/net/ipv6/conf/all/disable_ipv6";
/// The name server has the tenth address of the network, as in every Kubernetes cluster.
const DNS_OFFSET: u32 = 10;
/// The node's address on which the name server listens: the last one that endpoints may have, never assigned to a pod.
const DNS_LISTEN: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 95, 255, 255));
/// Whether rules see packets between the ports of a bridge; the file exists if the module `br_netfilter` is loaded.
const BRIDGE_FILTER: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";
/// The network from which the bridges of containers take their ranges.
const POD_NETWORK: &str = "10.212.0.0/16";
const CLUSTER_DOMAIN: &str = "cluster.local";

/// The implementation of Services on this node.
pub(super) struct ServiceNetworking {
    pub(super) proxy: ProxyMode,
    /// The network of cluster IPs.
    network: String,
    /// The network of their IPv6 addresses.
    network_v6: Option<Ipv6Net>,
    /// The name server for pods, if they can reach one.
    pub(super) dns: Option<DnsConfig>,
    /// Whether another node, the server's, publishes the Service of the name server.
    joined: bool,
    /// Reserves the network among the servers of this host while this process runs.
    _reservation: Option<net::UnixListener>,
}

/// The facts that determine the proxy.
#[derive(Clone, Copy, Debug)]
struct NetworkFacts {
    is_root: bool,
    has_nft: bool,
    containers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProxyChoice {
    Userspace,
    /// Whether the tables are written only with the first pod of containers or Service.
    Nftables {
        on_demand: bool,
    },
}

/// The proxy for a mode on this machine, and the reason.
fn choose(mode: NetworkMode, facts: NetworkFacts) -> Result<(ProxyChoice, &'static str), &'static str> {
    match mode {
        NetworkMode::Loopback => Ok((ProxyChoice::Userspace, "--network loopback")),
        NetworkMode::Bridge if !facts.is_root => Err("it needs root"),
        NetworkMode::Bridge if !facts.has_nft => Err("the program nft is not installed"),
        NetworkMode::Bridge => Ok((ProxyChoice::Nftables { on_demand: false }, "--network bridge")),
        NetworkMode::Auto if !facts.containers => {
            Ok((ProxyChoice::Userspace, "this node runs no containers"))
        }
        NetworkMode::Auto if !facts.has_nft => {
            Ok((ProxyChoice::Userspace, "the program nft is not installed: containers do not reach Services"))
        }
        NetworkMode::Auto => Ok((ProxyChoice::Nftables { on_demand: true }, "this node runs containers")),
    }
}

impl ServiceNetworking {
    pub(super) fn create(config: &UpConfig, data_dir: &DataDir) -> anyhow::Result<Self> {
        let facts = NetworkFacts {
            is_root: rustix::process::geteuid().is_root(),
            has_nft: find_program("nft").is_some(),
            containers: containers::is_enabled(&config.node),
        };
        let (choice, reason) = choose(config.node.network, facts)
            .map_err(|why| anyhow!("--network bridge: {why}; use --network auto"))?;
        if config.dual_stack {
            has_ipv6(choice, reason).map_err(|why| anyhow!("--dual-stack: {why}"))?;
        }
        let on_demand = match choice {
            ProxyChoice::Userspace => {
                tracing::info!(reason, "Services are served by listeners of this process");
                return Ok(Self {
                    // Node ports are served on the same address as functions, which clients of this machine use.
                    proxy: ProxyMode::Userspace(config.node.http_listen.ip()),
                    network: LOOPBACK_SERVICE_NETWORK.to_owned(),
                    network_v6: None,
                    dns: None,
                    joined: false,
                    _reservation: None,
                });
            }
            ProxyChoice::Nftables { on_demand } => on_demand,
        };
        let folder = data_dir.path().join("network");
        let (base, reservation) = reserve(&folder)?;
        let network = format!("{}/{SERVICE_NETWORK_BITS}", Ipv4Addr::from(base));
        let network_v6 = config.dual_stack.then(|| network_v6(base));
        let when = if on_demand { "with the first pod of containers or Service" } else { "now" };
        tracing::info!(reason, when, network, "Services are served by nftables");
        let activation = match on_demand {
            true => Activation::OnDemand { marker: folder.join("rules-written") },
            false => Activation::AtStart,
        };
        Ok(Self {
            proxy: ProxyMode::Nftables {
                table: table(base),
                activation,
                bridged_pods: bridged_pods()?,
                pods: pod_networks()?,
                network_v6,
            },
            network,
            network_v6,
            dns: Some(DnsConfig {
                cluster_ip: Ipv4Addr::from(base + DNS_OFFSET).into(),
                listen: DNS_LISTEN,
                resolv_conf: PathBuf::from("/etc/resolv.conf"),
            }),
            joined: false,
            _reservation: Some(reservation),
        })
    }

    /// The implementation on a machine that joins a cluster with these facts.
    pub(super) fn join(
        config: &NodeConfig,
        data_dir: &DataDir,
        facts: &ClusterFacts,
    ) -> anyhow::Result<Self> {
        let can_write_rules = rustix::process::geteuid().is_root() && find_program("nft").is_some();
        let network = facts.service_network.to_string();
        let network_v6 = facts.service_network_v6;
        if facts.has_loopback_services() || config.network == NetworkMode::Loopback || !can_write_rules {
            anyhow::ensure!(
                config.network != NetworkMode::Bridge,
                "--network bridge: this needs root and the program nft here, and a server with both; use --network auto"
            );
            tracing::info!(network, "Services are served by listeners of this process");
            return Ok(Self {
                proxy: ProxyMode::Userspace(config.http_listen.ip()),
                network,
                network_v6,
                dns: None,
                joined: true,
                _reservation: None,
            });
        }
        let folder = data_dir.path().join("network");
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let activation = match config.network {
            NetworkMode::Bridge => Activation::AtStart,
            NetworkMode::Auto | NetworkMode::Loopback => {
                Activation::OnDemand { marker: folder.join("rules-written") }
            }
        };
        tracing::info!(network, "Services are served by nftables");
        Ok(Self {
            proxy: ProxyMode::Nftables {
                table: facts::joined_tables(&config.name, data_dir.path()).0,
                activation,
                bridged_pods: bridged_pods()?,
                pods: facts.pod_networks(),
                network_v6,
            },
            network,
            network_v6,
            dns: facts.dns_address.map(|cluster_ip| DnsConfig {
                cluster_ip,
                listen: DNS_LISTEN,
                resolv_conf: PathBuf::from("/etc/resolv.conf"),
            }),
            joined: true,
            _reservation: None,
        })
    }

    /// The facts of this server's cluster, for machines that join it.
    pub(super) fn facts(&self) -> anyhow::Result<ClusterFacts> {
        let service_network: Ipv4Net = self.network.parse().context("the network of Services")?;
        Ok(ClusterFacts {
            service_network,
            service_network_v6: self.network_v6,
            pod_network: cluster_pods()?,
            dns_address: self.dns.as_ref().map(|dns| dns.cluster_ip),
            domain: CLUSTER_DOMAIN.to_owned(),
            routing: PodRouting::Auto,
            vxlan: facts::vxlan_of(service_network.network()),
        })
    }

    /// The name of this node's tables in the kernel; `None`: it has none.
    fn table(&self) -> Option<&str> {
        match &self.proxy {
            ProxyMode::Nftables { table, .. } => Some(table),
            ProxyMode::Userspace(_) => None,
        }
    }

    /// The networks of cluster IPs, for the API server.
    pub(super) fn networks(&self) -> anyhow::Result<ServiceNetworks> {
        let secondary = self.network_v6.map(|network| network.to_string().parse()).transpose();
        Ok(ServiceNetworks {
            primary: self.network.parse().context("the network of Services")?,
            secondary: secondary.context("the IPv6 network of Services")?,
        })
    }

    /// Whether pods of containers have addresses that the kernel's rules forward to.
    pub(super) fn has_kernel_rules(&self) -> bool {
        matches!(self.proxy, ProxyMode::Nftables { .. })
    }

    /// Whether this is the server's node, which publishes the Service of the name server.
    pub(super) fn publishes_names(&self) -> bool {
        !self.joined
    }

    /// How NetworkPolicies are enforced; `programmed` becomes true when the rules for Services are written.
    fn policy_mode(&self, programmed: watch::Receiver<bool>) -> PolicyMode {
        match &self.proxy {
            ProxyMode::Nftables { table, bridged_pods, .. } => PolicyMode::Nftables {
                table: format!("{table}-policy"),
                bridge: bridged_pods.is_some(),
                programmed,
            },
            ProxyMode::Userspace(_) => PolicyMode::Unenforced,
        }
    }

    /// The name server in pods' `resolv.conf`.
    pub(super) fn dns_server(&self) -> Option<ClusterDnsServer> {
        let address = self.dns.as_ref()?.cluster_ip;
        Some(ClusterDnsServer { address, domain: CLUSTER_DOMAIN.to_owned() })
    }
}

/// The network of all pods on bridges.
pub(super) fn cluster_pods() -> anyhow::Result<Ipv4Net> {
    POD_NETWORK.parse().context("the network of pods")
}

/// The networks from which the bridges of containers take their ranges; the IPv6 ranges are beside those of Services.
fn pod_networks() -> anyhow::Result<Vec<IpNet>> {
    Ok(vec![cluster_pods()?.into(), Ipv6Net::new_assert(SERVICE_NETWORKS_V6, POD_NETWORKS_V6_BITS).into()])
}

/// The pods on bridges that the kernel does not filter: all of them, unless `br_netfilter` is loaded.
fn bridged_pods() -> anyhow::Result<Option<Ipv4Net>> {
    let filters = std::fs::read_to_string(BRIDGE_FILTER).is_ok_and(|value| value.trim() == "1");
    Ok(if filters { None } else { Some(cluster_pods()?) })
}

/// Whether Services and pods can have IPv6 addresses here; the error is the reason why not.
fn has_ipv6(choice: ProxyChoice, reason: &str) -> Result<(), String> {
    if choice == ProxyChoice::Userspace {
        return Err(format!(
            "Services are served in userspace ({reason}), at loopback addresses, of which IPv6 has one"
        ));
    }
    let is_disabled = std::fs::read_to_string(IPV6_DISABLED);
    match is_disabled.as_deref().map(str::trim) {
        Ok("0") => Ok(()),
        Ok(_) => Err(format!("{IPV6_DISABLED} turns IPv6 off")),
        Err(_) => Err("the kernel has no IPv6".to_owned()),
    }
}

/// The IPv6 network that corresponds to an IPv4 one: `fd6d:6179:666c:NUMBER::/112`.
fn network_v6(base: u32) -> Ipv6Net {
    let number = base.wrapping_sub(SERVICE_NETWORKS) >> (32 - SERVICE_NETWORK_BITS);
    let mut segments = SERVICE_NETWORKS_V6.segments();
    segments[3] = u16::try_from(number).unwrap_or_default();
    Ipv6Net::new_assert(segments.into(), SERVICE_NETWORK_V6_BITS)
}

/// The table's name depends on the network, so that a restart finds the tables of a crashed process.
fn table(base: u32) -> String {
    format!("mayfly-{}", base.wrapping_sub(SERVICE_NETWORKS) >> (32 - SERVICE_NETWORK_BITS))
}

/// The first address of this data directory's network: the one used before, otherwise one that no other server of this
/// host uses. It is reserved by an abstract socket, which belongs to the network namespace, like the rules, and ends
/// with the process.
fn reserve(folder: &Path) -> anyhow::Result<(u32, net::UnixListener)> {
    let file = folder.join("service-network");
    let known = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<Ipv4Addr>().ok());
    if let Some(known) = known {
        let reserved = reserve_network(known.into());
        let reserved =
            reserved.with_context(|| format!("another server uses the network of Services at {known}"))?;
        return Ok((known.into(), reserved));
    }
    let first = u32::from(Sha256::digest(folder.as_os_str().as_encoded_bytes())[0]);
    for step in 0..SERVICE_NETWORK_COUNT {
        let number = (first + step) % SERVICE_NETWORK_COUNT;
        let base = SERVICE_NETWORKS + (number << (32 - SERVICE_NETWORK_BITS));
        let Ok(reserved) = reserve_network(base) else { continue };
        let written = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&file, Ipv4Addr::from(base).to_string()));
        written.with_context(|| format!("cannot write {}", file.display()))?;
        return Ok((base, reserved));
    }
    bail!(
        "all {SERVICE_NETWORK_COUNT} networks for Services are used by other servers of this host; use --network loopback"
    )
}

fn reserve_network(base: u32) -> std::io::Result<net::UnixListener> {
    let name = format!("mayfly-service-network-{}", Ipv4Addr::from(base));
    net::UnixListener::bind_addr(&net::SocketAddr::from_abstract_name(name)?)
}

/// The routes from this node to the pods of the other nodes; `None` if its pods have no addresses of their own.
pub(super) fn routes(
    networking: &ServiceNetworking,
    node: &str,
    facts: &ClusterFacts,
    informers: &Informers,
    client: kube::Client,
) -> Option<NodeRoutes> {
    let config = OverlayConfig {
        node: node.to_owned(),
        pods: facts.pod_network,
        routing: facts.routing,
        vxlan: facts.vxlan,
        owner: RouteOwner::of(networking.table()?),
    };
    Some(NodeRoutes::create(config, informers, client))
}

/// The components of a node for Services, names and policies.
pub(super) struct NodeNetwork {
    services: ServiceProxy,
    policies: PolicyEnforcer,
    connections: Arc<InProcessPolicies>,
    names: ClusterNames,
    dns: Option<ClusterDns>,
}

impl NodeNetwork {
    /// `rules_written` becomes true when the node's rules for Services are applied.
    pub(super) fn create(
        networking: &ServiceNetworking,
        node: &str,
        informers: &Informers,
        client: kube::Client,
        rules_written: watch::Sender<bool>,
        health_checks: AcceptPort,
    ) -> Self {
        let mode = networking.policy_mode(rules_written.subscribe());
        let names = ClusterNames::create(CLUSTER_DOMAIN, informers).of_node(node);
        let dns = networking.dns.clone().map(|dns| match networking.joined {
            true => ClusterDns::local(dns, names.clone()),
            false => ClusterDns::create(dns, names.clone(), client.clone()),
        });
        let mut services =
            ServiceProxy::create(networking.proxy.clone(), node, informers, rules_written, health_checks);
        let mut connections = InProcessPolicies::create(&networking.proxy, node, informers);
        // Each node answers at the name server's cluster IP itself.
        if let Some(dns) = &dns {
            services = services.with_listeners(dns.listeners());
            connections = connections.with_listeners(dns.listeners());
        }
        Self {
            policies: PolicyEnforcer::create(mode, node, informers, client),
            connections: Arc::new(connections),
            services,
            dns,
            names,
        }
    }

    /// Resolves the cluster's names for guests.
    pub(super) fn guest_names(&self) -> Arc<dyn ClusterHosts> {
        Arc::new(GuestNames(self.names.clone()))
    }

    /// The endpoints that Services use, for the node's agent.
    pub(super) fn served_endpoints(&self) -> Arc<dyn ServedEndpoints> {
        Arc::new(ProxyEndpoints(self.services.endpoints()))
    }

    /// The NetworkPolicies for the connections of components.
    pub(super) fn connection_policy(&self) -> Arc<dyn ConnectionPolicy> {
        self.connections.clone()
    }

    /// Runs until the tasks are stopped.
    pub(super) fn run_in(self, tasks: &mut Tasks) {
        tasks.run("services", self.services.run(tasks.token()));
        tasks.run("network policies", self.policies.run(tasks.token()));
        tasks.run("cluster names", self.names.follow(tasks.token()));
        if let Some(dns) = self.dns {
            tasks.run("cluster dns", dns.run(tasks.token()));
        }
    }
}

/// The endpoints of the node's proxy.
#[derive(Debug)]
struct ProxyEndpoints(AppliedEndpoints);

#[async_trait]
impl ServedEndpoints for ProxyEndpoints {
    async fn withdrawn(&self, namespace: &str, addresses: &[IpAddr]) -> bool {
        self.0.withdrawn(namespace, addresses).await
    }
}

/// The cluster's names for guests.
struct GuestNames(ClusterNames);

impl ClusterHosts for GuestNames {
    fn lookup(&self, host: &str) -> ClusterHost {
        match self.0.resolve(host) {
            None => ClusterHost::Unknown,
            Some(HostAddresses::Addresses(addresses)) => ClusterHost::Addresses(addresses),
            Some(HostAddresses::Alias(target)) => ClusterHost::Alias(target),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_serves_where_containers_run() {
        let facts = |is_root, has_nft, containers| NetworkFacts { is_root, has_nft, containers };
        let chosen = |mode, facts| choose(mode, facts).map(|(choice, _)| choice);
        let on_demand = ProxyChoice::Nftables { on_demand: true };
        let at_start = ProxyChoice::Nftables { on_demand: false };
        for (mode, facts, expected) in [
            (NetworkMode::Auto, facts(true, true, true), Ok(on_demand)),
            (NetworkMode::Auto, facts(true, false, true), Ok(ProxyChoice::Userspace)),
            (NetworkMode::Auto, facts(true, true, false), Ok(ProxyChoice::Userspace)),
            (NetworkMode::Loopback, facts(true, true, true), Ok(ProxyChoice::Userspace)),
            (NetworkMode::Bridge, facts(true, true, false), Ok(at_start)),
            (NetworkMode::Bridge, facts(false, true, false), Err("it needs root")),
            (NetworkMode::Bridge, facts(true, false, true), Err("the program nft is not installed")),
        ] {
            assert_eq!(chosen(mode, facts), expected, "{mode:?} {facts:?}");
        }
    }

    #[test]
    fn servers_of_one_host_have_networks_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let (first, reservation) = reserve(&one).unwrap();
        let (second, _second) = reserve(&other).unwrap();
        assert!(first != second && table(first) != table(second));
        assert_ne!(network_v6(first), network_v6(second));
        assert!(reserve(&one).is_err(), "it is in use");
        drop(reservation);
        assert_eq!(reserve(&one).unwrap().0, first, "a restart keeps its network");
    }
}
