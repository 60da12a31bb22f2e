//! Keeps the Ingress table up to date with the objects, and writes each Ingress's address to its status. One task.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::api::{core::v1::Service, discovery::v1::EndpointSlice, networking::v1::Ingress},
};
use mayfly_informer::{Index, Informer};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::plan::{self, IngressObjects, IngressTable};

/// Changes within this time are applied together: endpoints change in bursts during a rollout.
const GATHER: Duration = Duration::from_millis(5);
/// The pause before a failed status write is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// The only writer of the Ingress table.
pub(crate) struct IngressOwner {
    ingresses: Informer<Ingress>,
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    slices_by_service: Index<EndpointSlice>,
    table: Arc<ArcSwap<IngressTable>>,
    /// `None`: statuses are not written, because another gateway does.
    client: Option<Client>,
    /// The address in an Ingress's status.
    address: SocketAddr,
}

impl IngressOwner {
    pub(crate) fn new(
        ingresses: Informer<Ingress>,
        services: Informer<Service>,
        slices: Informer<EndpointSlice>,
        table: Arc<ArcSwap<IngressTable>>,
        client: Option<Client>,
        address: SocketAddr,
    ) -> Self {
        let slices_by_service = slices.index("gateway/service", |slice: &EndpointSlice| {
            let service = slice.metadata.labels.as_ref().and_then(|labels| labels.get(SERVICE_NAME_LABEL));
            let namespace = slice.metadata.namespace.as_deref().unwrap_or_default();
            service.map(|name| ObjectKey::new(namespace, name).to_string()).into_iter().collect()
        });
        Self { ingresses, services, slices, slices_by_service, table, client, address }
    }

    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let keeping = async {
            tokio::join!(self.ingresses.synced(), self.services.synced(), self.slices.synced());
            let mut ingresses = self.ingresses.subscribe();
            let (mut services, mut slices) = (self.services.subscribe(), self.slices.subscribe());
            let mut used = BTreeSet::new();
            let mut unwritten = self.ingresses.keys().into_iter().collect::<BTreeSet<_>>();
            used.extend(self.update());
            loop {
                unwritten = self.write_statuses(unwritten).await;
                let is_for_table = tokio::select! {
                    keys = ingresses.next() => {
                        unwritten.extend(keys);
                        true
                    }
                    keys = services.next() => keys.iter().any(|key| used.contains(key)),
                    // A deleted slice is not available any more to look up its Service.
                    _ = slices.next() => !used.is_empty(),
                    () = tokio::time::sleep(RETRY_PAUSE), if !unwritten.is_empty() => false,
                };
                if is_for_table {
                    tokio::time::sleep(GATHER).await;
                    unwritten.extend(ingresses.take());
                    services.take();
                    slices.take();
                    used = self.update();
                }
            }
        };
        let _: Option<()> = stop.run_until_cancelled(keeping).await;
    }

    /// Rebuilds the table; returns the Services that it depends on.
    fn update(&self) -> BTreeSet<ObjectKey> {
        let ingresses = self.ingresses.list();
        let (table, used) = plan::plan(&IngressObjects {
            ingresses: ingresses.iter().map(|ingress| &**ingress).collect(),
            service: &|key| self.services.get(key),
            slices: &|key| self.slices_by_service.get(&key.to_string()),
            turn: rand::random::<u16>().into(),
        });
        self.table.store(Arc::new(table));
        used
    }

    /// Returns the Ingresses whose status could not be written.
    async fn write_statuses(&self, keys: BTreeSet<ObjectKey>) -> BTreeSet<ObjectKey> {
        let mut failed = BTreeSet::new();
        let Some(client) = &self.client else { return failed };
        for key in keys {
            let Some(ingress) = self.ingresses.get(&key).filter(|ingress| plan::is_served(ingress)) else {
                continue;
            };
            let wanted = status(self.address);
            let known = serde_json::to_value(
                ingress.status.as_ref().and_then(|status| status.load_balancer.as_ref()),
            );
            if known.is_ok_and(|known| known == wanted) {
                continue;
            }
            let api: Api<Ingress> = Api::namespaced(client.clone(), &key.namespace);
            let patch = Patch::Merge(json!({"status": {"loadBalancer": wanted}}));
            match api.patch_status(&key.name, &PatchParams::default(), &patch).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => {
                    tracing::warn!(%error, ingress = %key, "cannot write an Ingress's status; will try again");
                    failed.insert(key);
                }
            }
        }
        failed
    }
}

/// The status of Ingresses at this address. A gateway that listens on all addresses is reached by the host name
/// `localhost`.
fn status(address: SocketAddr) -> Value {
    match address.ip() {
        ip if ip.is_unspecified() => json!({"ingress": [{"hostname": "localhost"}]}),
        ip => json!({"ingress": [{"ip": ip.to_string()}]}),
    }
}
