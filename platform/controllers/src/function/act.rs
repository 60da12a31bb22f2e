//! Reads the snapshot, carries out the steps of [`plan`], writes the status.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    Function, FunctionStatus, ObjectKey, Revision, RevisionStatus, env,
    k8s::{
        api::{apps::v1::ReplicaSet, core::v1::Pod},
        jiff::Timestamp,
    },
    revision_name, revision_number, wellknown,
};
use mayfly_informer::{
    Change, EnvObject, EnvObjects, EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    Config, Routes, function_key,
    oci::OciSources,
    plan::{self, FunctionSnapshot, LostHost, Readiness, RevisionState, Step},
    presence::{Presence, PresenceError},
    status,
};
use crate::metadata::{BY_CONTROLLER, by_controller, is_gone, only, status_patch, uid, with_explicit_nulls};

/// The pause before another check for a component that is not uploaded yet, and for the collector's work.
const COMPONENT_RECHECK: Duration = Duration::from_secs(2);
/// The pause before a component is requested again from a registry.
const SOURCE_RECHECK: Duration = Duration::from_secs(10);
const COLLECTOR_RECHECK: Duration = Duration::from_millis(100);
/// The time for which a ready function may lack its route before the status reports it, and the pause before the next
/// check.
const ROUTE_WAIT: Duration = Duration::from_millis(200);
const ROUTE_RECHECK: Duration = Duration::from_millis(100);

/// An index of functions by the hosts that their tags ask for: `namespace/label`.
const BY_TAG_HOST: &str = "tag host";
/// An index of revisions by the function they are of: `namespace/function`.
const BY_FUNCTION: &str = "function";
/// An index of revisions by what their environment is made from: `secret/namespace/name`.
const BY_ENV_SOURCE: &str = "environment source";
/// An index by the label that names the revision: `namespace/revision`.
const BY_REVISION: &str = "revision";

/// Keeps the revisions and ReplicaSets of functions in step with their specs.
pub(crate) struct FunctionController {
    config: Config,
    queue: WorkQueue<ObjectKey>,
    reconciler: Arc<Reconciler>,
    client: Client,
}

struct Reconciler {
    config: Config,
    client: Client,
    functions: Informer<Function>,
    functions_by_tag_host: Index<Function>,
    revisions: Informer<Revision>,
    revisions_by_owner: Index<Revision>,
    revisions_by_function: Index<Revision>,
    revisions_by_env_source: Index<Revision>,
    sources: EnvObjects,
    replica_sets: Informer<ReplicaSet>,
    pods: Informer<Pod>,
    pods_by_revision: Index<Pod>,
    presence: Presence,
    oci: OciSources,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Presence(#[from] PresenceError),
}

impl FunctionController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let revisions = informers.of::<Revision>();
        let pods = informers.of::<Pod>();
        let functions = informers.of::<Function>();
        let reconciler = Reconciler {
            config: config.clone(),
            client: client.clone(),
            functions_by_tag_host: functions.index(BY_TAG_HOST, claimed_hosts),
            functions,
            revisions_by_owner: revisions.index(BY_CONTROLLER, by_controller),
            revisions_by_function: revisions.index(BY_FUNCTION, function_of_revision),
            revisions_by_env_source: revisions.index(BY_ENV_SOURCE, env_sources),
            sources: EnvObjects::create(informers),
            revisions,
            replica_sets: informers.of(),
            pods_by_revision: pods.index(BY_REVISION, pod_revision),
            pods,
            presence: Presence::new(client.clone()),
            oci: OciSources::new(client.clone(), config.registries.clone()),
        };
        Self { config, queue: WorkQueue::default(), reconciler: Arc::new(reconciler), client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let reconciler = self.reconciler;
        let events = EventRecorder::start(self.client, "function-controller", None, stop.clone());
        let ready = async {
            reconciler.functions.synced().await;
            reconciler.revisions.synced().await;
            reconciler.replica_sets.synced().await;
            reconciler.pods.synced().await;
        };
        if stop.run_until_cancelled(ready).await.is_none() {
            return;
        }
        let (queue, other_claimants) = (self.queue.clone(), reconciler.functions_by_tag_host.clone());
        reconciler.functions.handle(move |change| {
            let key = ObjectKey::of(&**change.latest());
            // Functions that claim its host, or the hosts of its tags, may lose or get it now.
            for object in change.states() {
                for host in claimed_hosts(object).into_iter().chain([key.to_string()]) {
                    other_claimants
                        .get(&host)
                        .iter()
                        .for_each(|function| queue.add(ObjectKey::of(&**function)));
                }
            }
            queue.add(key);
        });
        let (queue, users) = (self.queue.clone(), reconciler.revisions_by_env_source.clone());
        reconciler.sources.listen(move |source| {
            for revision in users.get(&indexed(source)) {
                queue.add(ObjectKey::new(&source.key().namespace, &revision.spec.function));
            }
        });
        wake_on(&reconciler.revisions, &self.queue);
        wake_on(&reconciler.replica_sets, &self.queue);
        wake_on(&reconciler.pods, &self.queue);
        reconcile::run("function", self.queue, self.config.workers_max, stop, move |key| {
            let (reconciler, events) = (reconciler.clone(), events.clone());
            async move { reconciler.reconcile(key, &events).await }
        })
        .await;
    }
}

/// Reconciles a function when an object with its label changes.
fn wake_on<K: kube::Resource + 'static>(informer: &Informer<K>, queue: &WorkQueue<ObjectKey>) {
    let queue = queue.clone();
    informer.handle(move |change: Change<'_, K>| {
        for object in change.states() {
            if let Some(key) = function_key(&**object) {
                queue.add(key);
            }
        }
    });
}

/// The hosts that a function's tags ask for, as keys of the index: `namespace/label`, which is also the key of the
/// function that has that host by its name alone.
fn claimed_hosts(function: &Function) -> Vec<String> {
    let namespace = function.metadata.namespace.as_deref().unwrap_or_default();
    plan::tag_hosts(function).map(|(_, label)| ObjectKey::new(namespace, label).to_string()).collect()
}

fn function_of_revision(revision: &Revision) -> Vec<String> {
    vec![ObjectKey::new(revision.namespace().unwrap_or_default(), &revision.spec.function).to_string()]
}

fn env_sources(revision: &Revision) -> Vec<String> {
    let namespace = revision.namespace().unwrap_or_default();
    let named = |reference| indexed(&EnvObject::named(reference, &namespace));
    env::references(&revision.spec.env).map(named).collect()
}

/// The index key of an environment source.
fn indexed(source: &EnvObject) -> String {
    match source {
        EnvObject::ConfigMap(key) => format!("ConfigMap/{key}"),
        EnvObject::Secret(key) => format!("Secret/{key}"),
    }
}

fn pod_revision(pod: &Pod) -> Vec<String> {
    let revision = crate::metadata::label(pod, wellknown::LABEL_REVISION);
    revision
        .map(|revision| format!("{}/{revision}", pod.namespace().unwrap_or_default()))
        .into_iter()
        .collect()
}

impl Reconciler {
    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(function) = self.functions.get(&key) else { return Ok(Outcome::Done) };
        let snapshot = self.snapshot(&key, function).await?;
        let mut awaits_collector = false;
        for step in plan::plan(&snapshot, self.config.history_max) {
            awaits_collector |= step == Step::AwaitCollector;
            self.act(&key, &snapshot, step, events).await?;
        }
        if snapshot.function.metadata.deletion_timestamp.is_none() {
            let routed = self.write_status(&key, &snapshot, events).await?;
            if !routed {
                return Ok(Outcome::RequeueAfter(ROUTE_RECHECK));
            }
        }
        if awaits_collector {
            return Ok(Outcome::RequeueAfter(COLLECTOR_RECHECK));
        }
        if matches!(snapshot.fetched, Some(Err(_))) {
            return Ok(Outcome::RequeueAfter(SOURCE_RECHECK));
        }
        let missing = |state: &RevisionState| matches!(state.readiness, Readiness::ComponentMissing { .. });
        Ok(if snapshot.revisions.values().any(missing) {
            Outcome::RequeueAfter(COMPONENT_RECHECK)
        } else {
            Outcome::Done
        })
    }

    async fn snapshot(&self, key: &ObjectKey, function: Arc<Function>) -> Result<FunctionSnapshot, Error> {
        let mut revisions = BTreeMap::new();
        for revision in self.revisions_by_owner.get(uid(&*function)) {
            if let Some(number) = revision_number(&key.name, &revision.name_any()) {
                revisions.insert(number, self.revision_state(revision).await?);
            }
        }
        let same_name = self.revisions_by_function.get(&key.to_string());
        let orphans = same_name.into_iter().filter(|other| plan::is_orphan_of(other, &key.name)).collect();
        let lost_hosts = self.lost_hosts(key, &function);
        let mut snapshot =
            FunctionSnapshot { function, revisions, orphans, name_taken: false, lost_hosts, fetched: None };
        // An allocated number whose revision is not observed: it was just created, or is deleted.
        let taken = snapshot.number_taken();
        if snapshot.needs_revision() && taken > snapshot.newest_number() {
            let live = self.revision_api(key).get_opt(&revision_name(&key.name, taken)).await?;
            if let Some(revision) = live.filter(|live| plan::owned_by(live, &snapshot.function)) {
                let state = self.revision_state(Arc::new(revision)).await?;
                snapshot.revisions.insert(taken, state);
            }
        }
        if snapshot.needs_revision()
            && let Some(reference) = snapshot.function.spec.source.oci.clone()
        {
            snapshot.fetched = Some(self.oci.fetch(&reference, &self.presence).await);
        }
        let next = ObjectKey::new(&key.namespace, revision_name(&key.name, snapshot.next_number()));
        snapshot.name_taken =
            self.revisions.get(&next).is_some_and(|other| !plan::owned_by(&other, &snapshot.function));
        Ok(snapshot)
    }

    /// The hosts of the function's tags that other functions have.
    fn lost_hosts(&self, key: &ObjectKey, function: &Function) -> Vec<LostHost> {
        let lost = plan::tag_hosts(function).filter_map(|(tag, label)| {
            let host = ObjectKey::new(&key.namespace, &label);
            let claimants = self.functions_by_tag_host.get(&host.to_string());
            let same_name = self.functions.get(&host).is_some();
            let holder = plan::host_holder(function, tag, &label, same_name, &claimants)?;
            Some(LostHost { tag: tag.to_owned(), label, holder })
        });
        lost.collect()
    }

    async fn revision_state(&self, revision: Arc<Revision>) -> Result<RevisionState, Error> {
        let key = ObjectKey::of(&*revision);
        let present = match revision.spec.source.component {
            Some(component) => self.presence.has(component).await?,
            None => self.config.containers,
        };
        let missing_files = match revision.spec.files {
            Some(files) if !self.presence.has(files).await? => Some(files),
            _ => None,
        };
        let pods = self.pods_by_revision.get(&key.to_string());
        let replica_set = self.replica_sets.get(&key).filter(|set| {
            crate::metadata::controller_of(&**set).is_some_and(|owner| owner.uid == uid(&*revision))
        });
        if env::references(&revision.spec.env).next().is_some() {
            self.sources.follow().await;
        }
        let environment = env::resolve(&key.namespace, &revision.spec.env, &[], &self.sources).map(drop);
        let readiness = plan::readiness(&revision, present, missing_files, environment, &pods);
        Ok(RevisionState { revision, replica_set, readiness })
    }

    fn revision_api(&self, key: &ObjectKey) -> Api<Revision> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }

    async fn act(
        &self,
        key: &ObjectKey,
        snapshot: &FunctionSnapshot,
        step: Step,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &key.namespace);
        match step {
            Step::AwaitCollector => {}
            Step::TakeNumber(number) => {
                let functions: Api<Function> = Api::namespaced(self.client.clone(), &key.namespace);
                // Conditional on resourceVersion, so that two controllers cannot allocate the same revision number.
                let patch = json!({"metadata": {
                    "resourceVersion": snapshot.function.metadata.resource_version,
                    "annotations": {wellknown::ANNOTATION_GENERATION: number.to_string()}}});
                functions.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            }
            Step::CreateRevision(revision) => {
                self.revision_api(key).create(&PostParams::default(), &revision).await?;
                let message = format!("Created revision {}", revision.name_any());
                events.normal(&*snapshot.function, "RevisionCreated", message);
            }
            Step::AdoptRevision(orphan) => {
                let owner = snapshot.function.controller_owner_ref(&()).into_iter().collect::<Vec<_>>();
                // Conditional on the version that was read: the revision was not adopted by another controller since.
                let patch = json!({"metadata": {
                    "resourceVersion": orphan.resource_version(), "ownerReferences": owner}});
                let (name, patch) = (orphan.name_any(), Patch::Merge(patch));
                self.revision_api(key).patch(&name, &PatchParams::default(), &patch).await?;
                events.normal(&*snapshot.function, "RevisionAdopted", format!("Adopted revision {name}"));
            }
            Step::CreateReplicaSet(set) => match sets.create(&PostParams::default(), &set).await {
                // Created here while the informer is behind, or by another controller: the next round decides.
                Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                result => drop(result?),
            },
            Step::RaiseReplicas { replica_set, replicas } => {
                let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
                sets.patch(&replica_set, &PatchParams::default(), &patch).await?;
            }
            Step::DeleteRevision { name, uid } => {
                let result = self.revision_api(key).delete(&name, &only(&uid)).await;
                if !is_gone(&result) {
                    result?;
                }
                events.normal(&*snapshot.function, "RevisionRemoved", format!("Removed old revision {name}"));
            }
        }
        Ok(())
    }

    /// Whether requests are routed by the function's traffic, as far as a gateway reports it.
    async fn is_routed(&self, function: &Function, latest: Option<&str>) -> bool {
        let Some(Routes { follow, mut changes }) = self.config.routes.clone() else { return true };
        let routed = async {
            loop {
                changes.mark_unchanged();
                // When the gateway has stopped, routes do not change any more.
                if follow(function, latest) || changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(ROUTE_WAIT, routed).await.is_ok()
    }

    /// Returns `false` if the function must be checked again, because the gateway has no route yet.
    async fn write_status(
        &self,
        key: &ObjectKey,
        snapshot: &FunctionSnapshot,
        events: &EventRecorder,
    ) -> Result<bool, Error> {
        let now = Timestamp::now();
        for state in snapshot.revisions.values() {
            let wanted = status::revision(state, now);
            if state.revision.status.as_ref() != Some(&wanted) {
                // Owned by the kubelet; this copy may be stale, so do not write it back.
                let own = RevisionStatus { component: None, ..wanted };
                let own = with_explicit_nulls(&own, &["observedGeneration"]);
                let patch = Patch::Merge(status_patch(&*state.revision, own));
                let revisions = self.revision_api(key);
                let result = revisions.patch_status(state.name(), &PatchParams::default(), &patch).await;
                if !is_gone(&result) {
                    result?;
                }
            }
        }
        let mut wanted = status::function(snapshot, &self.config, now);
        let before = snapshot.function.status.as_ref();
        let mut routed = true;
        if status::becomes_ready(before, &wanted) {
            routed = self.is_routed(&snapshot.function, wanted.latest_ready_revision.as_deref()).await;
        }
        if !routed {
            let old = before.map_or(&[][..], |status| &status.conditions);
            wanted = status::without_route(wanted, old, now);
        }
        if before == Some(&wanted) {
            return Ok(routed);
        }
        let optional = ["url", "latestRevision", "latestReadyRevision", "observedGeneration"];
        // Owned by the controller of triggers; this copy may be stale, so do not write it back.
        let own = FunctionStatus { triggers: Vec::new(), ..wanted.clone() };
        let patch = Patch::Merge(status_patch(&*snapshot.function, with_explicit_nulls(&own, &optional)));
        let functions: Api<Function> = Api::namespaced(self.client.clone(), &key.namespace);
        let result = functions.patch_status(&key.name, &PatchParams::default(), &patch).await;
        if !is_gone(&result) {
            result?;
        }
        self.record_transition(snapshot, &wanted, events);
        Ok(routed)
    }

    /// Records an event when readiness or its obstacle changed.
    fn record_transition(
        &self,
        snapshot: &FunctionSnapshot,
        wanted: &FunctionStatus,
        events: &EventRecorder,
    ) {
        let before = snapshot.function.status.as_ref().map_or(&[][..], |status| &status.conditions);
        let lost =
            wanted.conditions.iter().find(|new| new.type_ == status::TAG_HOSTS && new.status == "False");
        if let Some(lost) = lost.filter(|lost| !before.iter().any(|old| old.message == lost.message)) {
            events.warning(&*snapshot.function, "RouteConflict", &lost.message);
        }
        let old = before.first();
        let Some(new) = wanted.conditions.first() else { return };
        if old.is_some_and(|old| old.reason == new.reason && old.message == new.message) {
            return;
        }
        match new.reason.as_str() {
            "RevisionPending" | "Compiling" | status::ROUTE_PENDING => {}
            "Ready" => {
                let revision = wanted.latest_ready_revision.as_deref().unwrap_or_default();
                events.normal(&*snapshot.function, "Ready", format!("Revision {revision} can answer"));
            }
            "ComponentMissing" => events.warning(&*snapshot.function, "ComponentMissing", &new.message),
            "ComponentInvalid" => events.warning(&*snapshot.function, "ComponentInvalid", &new.message),
            "EnvironmentMissing" => events.warning(&*snapshot.function, "EnvironmentMissing", &new.message),
            "RuntimeMissing" => events.warning(&*snapshot.function, "RuntimeMissing", &new.message),
            _ => events.warning(&*snapshot.function, "NotReady", &new.message),
        }
    }
}
