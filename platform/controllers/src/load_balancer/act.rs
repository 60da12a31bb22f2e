//! Watches Services, and carries out the steps of [`super::plan`].

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ipnet::Ipv4Net;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{ObjectKey, k8s::api::core::v1::Service};
use mayfly_informer::{
    EventRecorder, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    plan::{Step, plan},
};
use crate::metadata::is_gone;

/// Allocates the addresses of Services of the type LoadBalancer.
pub(crate) struct LoadBalancerController {
    config: Config,
    client: Client,
    services: Informer<Service>,
    /// The last event about each Service, so that each notice is recorded once.
    noticed: Mutex<HashMap<ObjectKey, String>>,
}

impl LoadBalancerController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self { config, client, services: informers.of(), noticed: Mutex::default() }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let Some(pool) = self.config.pool else { return };
        if stop.run_until_cancelled(self.services.synced()).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "service-controller", None, stop.clone());
        // The queue has one key, because addresses are planned over all Services at once.
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.services.handle(move |_| changed.add(()));
        queue.add(());
        let controller = Arc::new(self);
        reconcile::run("load balancer", queue, 1, stop, move |()| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(pool, &events).await }
        })
        .await;
    }

    async fn reconcile(&self, pool: Ipv4Net, events: &EventRecorder) -> Result<Outcome, kube::Error> {
        let services = self.services.list();
        let mut refused = HashSet::new();
        // A failed write of one Service's status does not delay the addresses of others.
        let mut failure = None;
        for step in plan(services.iter().map(|service| &**service), pool) {
            match step {
                Step::Assign { key, address } => {
                    let ingress = json!([{"ip": address.to_string(), "ipMode": "VIP"}]);
                    failure = self.write(&key, ingress).await.err().or(failure);
                }
                Step::Release { key } => failure = self.write(&key, Value::Null).await.err().or(failure),
                Step::Exhausted { key } => {
                    let message = format!("All addresses of the pool {pool} are used (--load-balancer-pool)");
                    self.notice(&key, message, events);
                    refused.insert(key);
                }
                Step::Unavailable { key, wanted } => {
                    let message =
                        format!("The address {wanted} is not of the pool {pool}, or another Service has it");
                    self.notice(&key, message, events);
                    refused.insert(key);
                }
            }
        }
        self.noticed.lock().retain(|key, _| refused.contains(key));
        failure.map_or(Ok(Outcome::Done), Err)
    }

    /// Writes the addresses of a Service, conditional on the version in the informer: a newer version is planned
    /// again.
    async fn write(&self, key: &ObjectKey, ingress: Value) -> Result<(), kube::Error> {
        let Some(service) = self.services.get(key) else { return Ok(()) };
        let status = json!({
            "metadata": {"resourceVersion": service.metadata.resource_version},
            "status": {"loadBalancer": {"ingress": ingress}},
        });
        let services: Api<Service> = Api::namespaced(self.client.clone(), &key.namespace);
        let written = services.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(status)).await;
        if is_gone(&written) { Ok(()) } else { written.map(|_| ()) }
    }

    fn notice(&self, key: &ObjectKey, message: String, events: &EventRecorder) {
        let before = self.noticed.lock().insert(key.clone(), message.clone());
        if before.as_ref() != Some(&message)
            && let Some(service) = self.services.get(key)
        {
            events.warning(&*service, "AllocationFailed", message);
        }
    }
}
