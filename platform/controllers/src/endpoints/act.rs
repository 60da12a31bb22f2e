//! Writes the EndpointSlices and Endpoints of [`super::slices`] and [`super::legacy`].

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use kube::{Api, Client, ResourceExt as _, api::PostParams};
use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Endpoints, Node, Pod, Service},
        discovery::v1::EndpointSlice,
    },
};
use mayfly_informer::{
    Change, EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    addresses::{Grouped, families, from_legacy, from_pods, selects, selects_pods, serves_function},
    hints::{self, HintsMode, LABEL_ZONE},
    legacy,
    slices::{self, LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, MIRRORED_BY, SliceOwner, SlicePlan},
};
use crate::metadata::{is_gone, label, only, uid};

/// An index of EndpointSlices by the Service they belong to: `namespace/name`.
const BY_SERVICE: &str = "service";
/// The label of Endpoints that are not mirrored.
const LABEL_SKIP_MIRROR: &str = "endpointslice.kubernetes.io/skip-mirror";

/// Keeps every Service's EndpointSlices and Endpoints.
pub(crate) struct EndpointsController {
    config: Config,
    client: Client,
    services: Informer<Service>,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    slices: Informer<EndpointSlice>,
    slices_by_service: Index<EndpointSlice>,
    endpoints: Informer<Endpoints>,
    /// Services that were observed and are not removed yet.
    served: Mutex<HashSet<ObjectKey>>,
    /// The last event about the hints of a Service and address family.
    hint_events: Mutex<HashMap<(ObjectKey, &'static str), String>>,
}

fn service_of(slice: &EndpointSlice) -> Option<ObjectKey> {
    let name = label(slice, LABEL_SERVICE)?;
    Some(ObjectKey::new(slice.namespace().unwrap_or_default(), name))
}

impl EndpointsController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let slices = informers.of::<EndpointSlice>();
        Self {
            config,
            client,
            services: informers.of(),
            pods: informers.of(),
            nodes: informers.of(),
            slices_by_service: slices.index(BY_SERVICE, |slice: &EndpointSlice| {
                service_of(slice).map(|key| key.to_string()).into_iter().collect()
            }),
            slices,
            endpoints: informers.of(),
            served: Mutex::default(),
            hint_events: Mutex::default(),
        }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.services.synced().await;
            self.pods.synced().await;
            self.nodes.synced().await;
            self.slices.synced().await;
            self.endpoints.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let queue = WorkQueue::default();
        self.wake(&queue);
        let workers_max = self.config.workers_max;
        let events =
            EventRecorder::start(self.client.clone(), "endpoint-slice-controller", None, stop.clone());
        let controller = Arc::new(self);
        reconcile::run("endpoints", queue, workers_max, stop, move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        })
        .await;
    }

    fn wake(&self, queue: &WorkQueue<ObjectKey>) {
        let changed = queue.clone();
        self.services.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let changed = queue.clone();
        self.endpoints.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let changed = queue.clone();
        self.slices.handle(move |change| {
            change.states().filter_map(|slice| service_of(slice)).for_each(|key| changed.add(key))
        });
        let (changed, services) = (queue.clone(), self.services.clone());
        self.nodes.handle(move |change| {
            let facts = |node: &Node| (node.labels().get(LABEL_ZONE).cloned(), hints::capacity_of(node));
            if let Change::Updated { old, new } = &change
                && facts(old) == facts(new)
            {
                return;
            }
            let hinted =
                services.list().into_iter().filter(|service| hints::mode(service) != HintsMode::None);
            hinted.for_each(|service| changed.add(ObjectKey::of(&*service)));
        });
        let (changed, services) = (queue.clone(), self.services.clone());
        self.pods.handle(move |change| {
            for pod in change.states() {
                for service in services.list_namespace(&pod.namespace().unwrap_or_default()) {
                    if selects(&service, pod.labels()) {
                        changed.add(ObjectKey::of(&*service));
                    }
                }
            }
        });
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> kube::Result<Outcome> {
        let known = self.slices_by_service.get(&key.to_string());
        let Some(service) =
            self.services.get(&key).filter(|service| service.metadata.deletion_timestamp.is_none())
        else {
            self.forget(&key, known).await?;
            return Ok(Outcome::Done);
        };
        self.served.lock().insert(key.clone());
        let external =
            service.spec.as_ref().is_some_and(|spec| spec.type_.as_deref() == Some("ExternalName"));
        if serves_function(&service) || external {
            // For a function, the gateway answers, also while it has no replica, and writes the slice.
            let owner = SliceOwner::of_service(&service, false);
            self.write_slices(&key, &owner, &known, Grouped::new()).await?;
            self.delete_mirrored(&key, known).await?;
        } else if selects_pods(&service) {
            let mut pods = self.pods.list_namespace(&key.namespace);
            pods.retain(|pod| selects(&service, pod.labels()));
            let mut grouped = from_pods(&service, &pods, |node| self.zone(node));
            self.add_hints(&key, &service, &mut grouped, events);
            self.write_slices(&key, &SliceOwner::of_service(&service, true), &known, grouped).await?;
            self.delete_mirrored(&key, known).await?;
            self.write_endpoints(&key, &service, &pods).await?;
        } else {
            let endpoints = self.endpoints.get(&key).filter(|own| {
                label(&**own, LABEL_SKIP_MIRROR) != Some("true")
                    && label(&**own, legacy::LABEL_MANAGED_BY).is_none()
            });
            match endpoints {
                None => self.delete_mirrored(&key, known).await?,
                Some(endpoints) => {
                    let owner = SliceOwner::of_endpoints(&endpoints);
                    self.write_slices(&key, &owner, &known, from_legacy(&endpoints)).await?;
                }
            }
        }
        Ok(Outcome::Done)
    }

    /// Adds the topology hints to the endpoints; an event says when they begin and end.
    fn add_hints(&self, key: &ObjectKey, service: &Service, grouped: &mut Grouped, events: &EventRecorder) {
        let mode = hints::mode(service);
        let capacity = match mode {
            HintsMode::Proportional => hints::zone_capacity(&self.nodes.list()),
            HintsMode::None | HintsMode::OwnZone => hints::ZoneCapacity::default(),
        };
        for family in families(service) {
            let failed = hints::add_hints(grouped, family, mode, &capacity).err();
            let mut said = self.hint_events.lock();
            let last = (key.clone(), family.name());
            let is_enabled = mode == HintsMode::Proportional && failed.is_none();
            let message = match (mode, failed.as_deref()) {
                (HintsMode::Proportional, None) => "Topology Aware Hints has been enabled",
                (HintsMode::Proportional, Some(message)) => message,
                _ if said.remove(&last).is_some() => "Topology Aware Hints has been disabled",
                _ => continue,
            };
            let message = match message.contains("addressType") {
                true => message.to_owned(),
                false => format!("{message}, addressType: {}", family.name()),
            };
            if said.get(&last) == Some(&message) {
                continue;
            }
            match is_enabled {
                true => events.normal(service, "TopologyAwareHintsEnabled", &message),
                false => events.warning(service, "TopologyAwareHintsDisabled", &message),
            }
            if mode == HintsMode::Proportional {
                said.insert(last, message);
            }
        }
    }

    fn zone(&self, node: &str) -> Option<String> {
        self.nodes.get(&ObjectKey::cluster(node))?.labels().get(LABEL_ZONE).cloned()
    }

    /// The Service is removed: so are its EndpointSlices (by the garbage collector, too) and its Endpoints. Endpoints
    /// that never had a Service are a user's own and stay.
    async fn forget(&self, key: &ObjectKey, known: Vec<Arc<EndpointSlice>>) -> kube::Result<()> {
        let had_service = self.served.lock().remove(key);
        self.hint_events.lock().retain(|(service, _), _| service != key);
        let own = |slice: &Arc<EndpointSlice>| {
            matches!(label(&**slice, LABEL_MANAGED_BY), Some(MANAGED_BY | MIRRORED_BY))
        };
        let delete = known.into_iter().filter(own).collect();
        self.apply(key, SlicePlan { delete, ..SlicePlan::default() }).await?;
        let is_ours = |endpoints: &Endpoints| label(endpoints, legacy::LABEL_MANAGED_BY).is_some();
        if let Some(endpoints) = self.endpoints.get(key).filter(|own| had_service || is_ours(own)) {
            let api: Api<Endpoints> = Api::namespaced(self.client.clone(), &key.namespace);
            let result = api.delete(&key.name, &only(uid(&*endpoints))).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(())
    }

    async fn write_slices(
        &self,
        key: &ObjectKey,
        owner: &SliceOwner,
        known: &[Arc<EndpointSlice>],
        grouped: Grouped,
    ) -> kube::Result<()> {
        let own = |slice: &&Arc<EndpointSlice>| label(&***slice, LABEL_MANAGED_BY) == Some(owner.manager());
        let own: Vec<_> = known.iter().filter(own).cloned().collect();
        let plan = slices::plan(owner, &own, grouped, self.config.slice_endpoints_max);
        self.apply(key, plan).await
    }

    async fn delete_mirrored(&self, key: &ObjectKey, known: Vec<Arc<EndpointSlice>>) -> kube::Result<()> {
        let is_mirrored = |slice: &Arc<EndpointSlice>| label(&**slice, LABEL_MANAGED_BY) == Some(MIRRORED_BY);
        let delete = known.into_iter().filter(is_mirrored).collect();
        self.apply(key, SlicePlan { delete, ..SlicePlan::default() }).await
    }

    /// Creates first and deletes last, so that no endpoint is missing in between.
    async fn apply(&self, key: &ObjectKey, plan: SlicePlan) -> kube::Result<()> {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &key.namespace);
        for slice in &plan.create {
            api.create(&PostParams::default(), slice).await?;
        }
        for slice in &plan.update {
            api.replace(&slice.name_any(), &PostParams::default(), slice).await?;
        }
        for slice in &plan.delete {
            let result = api.delete(&slice.name_any(), &only(uid(&**slice))).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(())
    }

    async fn write_endpoints(
        &self,
        key: &ObjectKey,
        service: &Service,
        pods: &[Arc<Pod>],
    ) -> kube::Result<()> {
        let known = self.endpoints.get(key);
        let wanted = legacy::endpoints(service, pods, known.as_deref());
        let api: Api<Endpoints> = Api::namespaced(self.client.clone(), &key.namespace);
        match known {
            None => drop(api.create(&PostParams::default(), &wanted).await?),
            Some(known) if *known == wanted => {}
            Some(_) => drop(api.replace(&key.name, &PostParams::default(), &wanted).await?),
        }
        Ok(())
    }
}
