//! The parts that run the pods of one node: the kubelet, its runtimes, its devices, and the node's part of the network.
//! `mayfly up` has them beside the control plane, `mayfly node` without one.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use mayfly_api::k8s::api::core::v1::Pod;
use mayfly_artifacts::Artifacts;
use mayfly_cli::data_dir::DataDir;
use mayfly_csi::CsiDrivers;
use mayfly_distribution::RegistryClient;
use mayfly_informer::{Informer, Informers};
use mayfly_kubelet::{CsiConfig, JobFiles, Kubelet};
use mayfly_network::{ClusterFacts, NodeRoutes};
use mayfly_runtime::{NodeGpus, Runtime, logs::LogLayout};
use mayfly_runtime_oci::{BridgeOptions, OciRuntime, PodRange};
use mayfly_runtime_wasm::WasmHost;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::{
    cluster::{LABEL_CONTROL_PLANE, MemberAddress},
    containers,
    devices::Devices,
    gpu_metrics::GpuMetrics,
    listeners::Ports,
    network::{self, NodeNetwork, ServiceNetworking},
    part_configs::{kubelet_config, kubelet_folder},
    pod_range::PodRangeFollower,
    tasks::Tasks,
};
use crate::config::NodeConfig;

/// What a node's parts are made from.
pub(super) struct NodeAgentDeps<'a> {
    pub(super) config: &'a NodeConfig,
    pub(super) data_dir: &'a DataDir,
    pub(super) informers: &'a Informers,
    /// The client with the node's identity.
    pub(super) client: kube::Client,
    /// The client that publishes addresses and policies' states.
    pub(super) network_client: kube::Client,
    pub(super) networking: &'a ServiceNetworking,
    pub(super) dual_stack: bool,
    pub(super) artifacts: Artifacts,
    pub(super) registries: RegistryClient,
    pub(super) host: Arc<WasmHost>,
    pub(super) csi_drivers: Arc<CsiDrivers>,
    pub(super) ports: &'a Ports,
    /// The machine's place in its cluster; `None`: it is alone.
    pub(super) member: Option<ClusterMember>,
}

/// A machine's place in its cluster.
pub(super) struct ClusterMember {
    pub(super) address: MemberAddress,
    pub(super) facts: ClusterFacts,
}

/// The parts of a node, created and not yet running.
pub(super) struct NodeAgent {
    pub(super) kubelet: Kubelet,
    network: NodeNetwork,
    /// The routes to the pods of other nodes.
    routes: Option<NodeRoutes>,
    /// Follows the range of this node's pods; `None`: the node chooses it.
    pod_range: Option<PodRangeFollower>,
    devices: Option<Devices>,
    pub(super) containers: Option<Arc<OciRuntime>>,
}

impl NodeAgent {
    /// Creates the parts and attaches the network to the wasm host. They have no effects until [`Self::run_in`], except
    /// that containers of an earlier run are taken over.
    pub(super) async fn create(deps: NodeAgentDeps<'_>, metrics: &mut Registry) -> anyhow::Result<Self> {
        let NodeAgentDeps { config, data_dir, informers, networking, host, .. } = deps;
        let mut jobs = JobFiles::new(deps.artifacts, data_dir.jobs());
        jobs.git_protocols.clone_from(&config.git_protocols);
        let (rules_written, service_rules) = watch::channel(false);
        let service_rules = networking.has_kernel_rules().then_some(service_rules);
        let routes = deps.member.as_ref().and_then(|member| {
            network::routes(networking, &config.name, &member.facts, informers, deps.client.clone())
        });
        let (pod_range, bridge) = match &deps.member {
            None => (None, BridgeOptions::default()),
            Some(member) => {
                let (follower, range) = PodRangeFollower::new(&config.name, informers.of());
                let mtu = routes.as_ref().map(NodeRoutes::pod_mtu);
                let cluster_pods = member.facts.pod_network;
                (Some(follower), BridgeOptions { range: PodRange::Assigned(range), cluster_pods, mtu })
            }
        };
        let host_address =
            deps.member.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |member| member.address.ip);
        let containers = containers::create(
            config,
            deps.dual_stack,
            data_dir,
            deps.registries,
            service_rules,
            bridge,
            host_address,
        )
        .await?;
        let runtimes = std::iter::once(host.clone() as Arc<dyn Runtime>)
            .chain(containers.clone().map(|containers| containers as Arc<dyn Runtime>))
            .collect();
        let devices = Devices::create(config, data_dir)?;
        let meter = devices.as_ref().and_then(Devices::gpu_meter);
        let node_gpus = meter.clone().map(|meter| Arc::new(meter) as Arc<dyn NodeGpus>);
        if let Some(meter) = meter {
            let pods: Informer<Pod> = informers.of();
            metrics.register_collector(Box::new(GpuMetrics::new(&config.name, meter, pods)));
        }
        let health_checks = deps.ports.health_checks();
        let network = NodeNetwork::create(
            networking,
            &config.name,
            informers,
            deps.network_client,
            rules_written,
            health_checks,
        );
        let mut kubelet = kubelet_config(config, data_dir, LogLayout::new(data_dir.logs()), jobs);
        kubelet.devices = devices.as_ref().map(Devices::of_node);
        kubelet.gpus = node_gpus;
        kubelet.labels = Devices::labels(devices.as_ref());
        kubelet.label_prefixes = Devices::label_prefixes();
        kubelet.annotations = Devices::annotations(devices.as_ref());
        kubelet.csi =
            Some(CsiConfig { folder: kubelet_folder(config, data_dir)?, drivers: deps.csi_drivers });
        kubelet.cluster_dns = networking.dns_server();
        kubelet.served_endpoints = Some(network.served_endpoints());
        if let Some(ClusterMember { address, .. }) = &deps.member {
            kubelet.address = address.ip;
            kubelet.agent_port = Some(address.agent_port);
            if networking.publishes_names() {
                kubelet.labels.insert(LABEL_CONTROL_PLANE.into(), Some(String::new()));
            }
        }
        let kubelet = Kubelet::create(kubelet, deps.client, informers, runtimes);
        host.attach_names(network.guest_names());
        host.attach_policies(network.connection_policy());
        Ok(Self { kubelet, network, routes, pod_range, devices, containers })
    }

    /// Runs the parts until the tasks are stopped.
    pub(super) fn run_in(self, tasks: &mut Tasks) {
        let (stop, kubelet) = (tasks.token(), self.kubelet);
        tasks.run("kubelet", kubelet.run(stop));
        self.network.run_in(tasks);
        if let Some(routes) = self.routes {
            tasks.run("routes to pods", routes.run(tasks.token()));
        }
        if let Some(range) = self.pod_range {
            tasks.run("range of pods", range.run(tasks.token()));
        }
        if let Some(devices) = self.devices {
            let stop = tasks.token();
            tasks.run("devices", devices.run(stop));
        }
    }
}
