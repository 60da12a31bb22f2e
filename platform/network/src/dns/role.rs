//! Updates the zone from Services and EndpointSlices, and publishes the name server.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::api::{core::v1::Service, discovery::v1::EndpointSlice},
};
use mayfly_informer::{Index, Informer, Informers};
use parking_lot::RwLock;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    forward::Forwarder,
    records::ServiceRecords,
    server::{self, NameServer},
    zone::{HostAddresses, Zone},
};
use crate::{
    plan::{NodeListeners, SERVICE_NAME_LABEL, TransportProtocol},
    slices,
};

/// The Service through which pods reach the name server, as in every Kubernetes cluster.
const SERVICE_NAMESPACE: &str = "kube-system";
const SERVICE: &str = "kube-dns";
const FIELD_MANAGER: &str = "mayfly-dns";
/// The pause before publishing is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The zone of this cluster, updated from its objects. Cheap to clone.
#[derive(Clone)]
pub struct ClusterNames {
    zone: Arc<RwLock<Zone>>,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    slices_by_service: Index<EndpointSlice>,
    /// The node that resolves the names.
    node: Option<Arc<str>>,
    is_complete: watch::Sender<bool>,
}

impl std::fmt::Debug for ClusterNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterNames").finish_non_exhaustive()
    }
}

/// The addresses of the name server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsConfig {
    /// The cluster IP of the Service `kube-dns`, used in pods' `resolv.conf`.
    pub cluster_ip: IpAddr,
    /// The address of the node on which the server listens, at any free port; the endpoint of the Service.
    pub listen: IpAddr,
    /// The file that lists the host's own name servers.
    pub resolv_conf: PathBuf,
}

/// The name server for pods.
pub struct ClusterDns {
    config: DnsConfig,
    names: ClusterNames,
    /// `None`: the Service is not published.
    client: Option<kube::Client>,
    listeners: watch::Sender<Arc<NodeListeners>>,
}

impl std::fmt::Debug for ClusterDns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterDns").finish_non_exhaustive()
    }
}

impl ClusterNames {
    /// Creates an empty zone below `domain`; [`ClusterNames::follow`] fills it.
    #[must_use]
    pub fn create(domain: &str, informers: &Informers) -> Self {
        let slices = informers.of();
        let slices_by_service = slices::by_service(&slices);
        let zone = Arc::new(RwLock::new(Zone::new(domain)));
        let is_complete = watch::Sender::new(false);
        Self { zone, services: informers.of(), slices, slices_by_service, node: None, is_complete }
    }

    /// Resolves names for the node called `node`: loopback addresses of endpoints on other nodes are left out.
    #[must_use]
    pub fn of_node(self, node: &str) -> Self {
        Self { node: Some(node.into()), ..self }
    }

    /// Resolves a host name, see [`Zone::resolve`].
    #[must_use]
    pub fn resolve(&self, host: &str) -> Option<HostAddresses> {
        self.zone.read().resolve(host)
    }

    /// Keeps the zone up to date until `stop`.
    pub async fn follow(self, stop: CancellationToken) {
        let (mut services, mut slices) = (self.services.subscribe(), self.slices.subscribe());
        // A deleted slice is not available any more to look up its Service.
        let mut service_of_slice: HashMap<ObjectKey, ObjectKey> = HashMap::new();
        let following = async {
            tokio::join!(self.services.synced(), self.slices.synced());
            self.update_all();
            loop {
                let changed = tokio::select! {
                    keys = services.next() => keys,
                    keys = slices.next() => {
                        let of = |key: ObjectKey| {
                            let now = self.slices.get(&key).and_then(|slice| slices::service_of(&slice));
                            let before = match &now {
                                Some(now) => service_of_slice.insert(key, now.clone()),
                                None => service_of_slice.remove(&key),
                            };
                            [before, now].into_iter().flatten()
                        };
                        keys.into_iter().flat_map(of).collect()
                    }
                };
                for key in changed {
                    self.update(&key);
                }
            }
        };
        let _: Option<()> = stop.run_until_cancelled(following).await;
    }

    /// Sets the records of all Services, and declares the zone complete. Changes since then, and the Services of slices,
    /// are still in the subscriptions.
    fn update_all(&self) {
        for key in self.services.keys() {
            self.update(&key);
        }
        self.zone.write().complete();
        self.is_complete.send_replace(true);
    }

    fn update(&self, key: &ObjectKey) {
        let records = self.services.get(key).and_then(|service| {
            let slices = self.slices_by_service.get(&slices::index_value(key));
            ServiceRecords::of(&service, slices.iter().map(|slice| &**slice), self.node.as_deref())
        });
        self.zone.write().set(key, records);
    }
}

impl ClusterDns {
    /// The name server that also publishes the Service `kube-dns`: one in a cluster.
    #[must_use]
    pub fn create(config: DnsConfig, names: ClusterNames, client: kube::Client) -> Self {
        Self { config, names, client: Some(client), listeners: watch::Sender::default() }
    }

    /// The name server of a node of a cluster whose Service `kube-dns` another node publishes. The node's proxy must get
    /// [`ClusterDns::listeners`]: it connects the Service's address to this server.
    #[must_use]
    pub fn local(config: DnsConfig, names: ClusterNames) -> Self {
        Self { config, names, client: None, listeners: watch::Sender::default() }
    }

    /// The addresses on which this server serves the Service, for
    /// [`ServiceProxy::with_listeners`](crate::ServiceProxy::with_listeners).
    #[must_use]
    pub fn listeners(&self) -> watch::Receiver<Arc<NodeListeners>> {
        self.listeners.subscribe()
    }

    /// Serves pods until `stop`. Failures are retried, since pods can still use addresses meanwhile.
    pub async fn run(self, stop: CancellationToken) {
        let listen = SocketAddr::new(self.config.listen, 0);
        let sockets = loop {
            match server::bind(listen).await {
                Ok(sockets) => break sockets,
                Err(error) => {
                    tracing::warn!(%error, %listen, "the cluster's name server cannot listen; will try again")
                }
            }
            if stop.run_until_cancelled(tokio::time::sleep(RETRY_PAUSE)).await.is_none() {
                return;
            }
        };
        let (udp, tcp) = sockets;
        let ports = udp.local_addr().and_then(|udp| Ok((udp.port(), tcp.local_addr()?.port())));
        let Ok(ports) = ports else {
            tracing::error!("the sockets of the cluster's name server have no addresses");
            return stop.cancelled().await;
        };
        let names = NameServer::new(self.names.zone.clone(), Forwarder::new(&self.config.resolv_conf))
            .after(self.names.is_complete.subscribe());
        self.listeners.send_replace(Arc::new(NodeListeners::from(
            [(TransportProtocol::Udp, ports.0), (TransportProtocol::Tcp, ports.1)].map(|(protocol, port)| {
                let service = ObjectKey::new(SERVICE_NAMESPACE, SERVICE);
                ((service, protocol), SocketAddr::new(self.config.listen, port))
            }),
        )));
        let publishing = async {
            let Some(client) = &self.client else { return };
            while let Err(error) = self.publish(client, ports).await {
                tracing::warn!(%error, "cannot write the Service kube-dns; will try again");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        };
        tokio::join!(names.serve(udp, tcp, stop.clone()), stop.run_until_cancelled(publishing));
    }

    /// Writes the Service and its EndpointSlice.
    async fn publish(&self, client: &kube::Client, (udp, tcp): (u16, u16)) -> Result<(), kube::Error> {
        let services: Api<Service> = Api::namespaced(client.clone(), SERVICE_NAMESPACE);
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), SERVICE_NAMESPACE);
        let address = self.config.cluster_ip.to_string();
        let known = services.get_opt(SERVICE).await?.and_then(|service| service.spec?.cluster_ip);
        if known.is_some_and(|known| known != address) {
            // A cluster IP is immutable, but the Services' network has changed: create the Service again.
            services.delete(SERVICE, &DeleteParams::default()).await?;
        }
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": SERVICE, "namespace": SERVICE_NAMESPACE, "labels": {
                "k8s-app": SERVICE, "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"}},
            "spec": {"clusterIP": address, "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": udp},
                {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": tcp}]},
        });
        services.patch(SERVICE, &parameters, &Patch::Apply(&service)).await?;
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": SERVICE, "namespace": SERVICE_NAMESPACE,
                "labels": {SERVICE_NAME_LABEL: SERVICE, "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER}},
            "ports": [{"name": "dns", "port": udp, "protocol": "UDP"}, {"name": "dns-tcp", "port": tcp, "protocol": "TCP"}],
            "endpoints": [{"addresses": [self.config.listen.to_string()], "conditions": {"ready": true}}],
        });
        slices.patch(SERVICE, &parameters, &Patch::Apply(&slice)).await?;
        Ok(())
    }
}
