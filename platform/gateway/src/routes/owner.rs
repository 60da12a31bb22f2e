//! Keeps the table up to date with the objects. One task, woken by changed keys.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
};

use mayfly_api::{Function, ObjectKey, Revision, env, k8s::api::core::v1::Pod};
use mayfly_informer::{Changes, EnvObject, EnvObjects, Index, Informer};
use mayfly_runtime::FunctionHost;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    FunctionRoute, RouteTable,
    plan::{self, HostedSpecError, PlannedTarget},
    pods::PodRoutes,
    route::RouteTarget,
    table::{RouteChanges, TagHost},
};
use crate::{
    metrics::GatewayCounts,
    nodes::PeerNodes,
    target::{DemandSignal, RevisionTarget, Targets, Upstream},
};

/// The informers of the objects that routes are made from.
#[derive(Clone)]
pub(crate) struct RouteSources {
    pub(crate) functions: Informer<Function>,
    pub(crate) revisions: Informer<Revision>,
    pub(crate) pods: Informer<Pod>,
    pub(crate) env: EnvObjects,
}

/// The only writer of the table.
pub(crate) struct Owner {
    objects: RouteSources,
    of_function: Index<Revision>,
    pods: PodRoutes,
    changes: Subscriptions,
    host: Arc<dyn FunctionHost>,
    table: Arc<RouteTable>,
    targets: Arc<Targets>,
    demand: Arc<DemandSignal>,
    counts: Arc<GatewayCounts>,
    queue_max: u32,
    tracking: Option<ReplicaTracking>,
    /// Counts the changes of the table and of replicas.
    applied: watch::Sender<u64>,
    /// The known revisions by key, with their function and identity.
    known: HashMap<ObjectKey, Known>,
    /// The revisions that use a ConfigMap or Secret.
    users: HashMap<EnvObject, HashSet<ObjectKey>>,
    /// The functions whose tags claim a host, by `<namespace>/<label>`; the first claim wins.
    claims: HashMap<Arc<str>, BTreeSet<(Arc<str>, Arc<str>)>>,
    /// The hosts that each function's tags claim.
    claimed: HashMap<Arc<str>, BTreeMap<Arc<str>, Arc<str>>>,
    /// The revisions in the last route of each function.
    routed: HashMap<Arc<str>, Vec<Arc<RevisionTarget>>>,
}

struct Subscriptions {
    functions: Changes,
    revisions: Changes,
    pods: Changes,
    env: Changes<EnvObject>,
}

struct Known {
    function: ObjectKey,
    uid: String,
    sources: Vec<EnvObject>,
}

/// The dependencies of the owner, passed by the gateway.
pub(crate) struct OwnerDeps {
    pub(crate) host: Arc<dyn FunctionHost>,
    pub(crate) table: Arc<RouteTable>,
    pub(crate) targets: Arc<Targets>,
    pub(crate) demand: Arc<DemandSignal>,
    pub(crate) counts: Arc<GatewayCounts>,
    pub(crate) queue_max: u32,
    /// `None`: this is the only node.
    pub(crate) tracking: Option<ReplicaTracking>,
    pub(crate) applied: watch::Sender<u64>,
}

/// Counts the replicas of revisions on each node.
pub(crate) struct ReplicaTracking {
    pub(crate) this_node: Arc<str>,
    pub(crate) peers: Arc<PeerNodes>,
    /// Whether a component is dropped from memory when this node has no pod of its revision. The leader's autoscaler
    /// does that itself.
    pub(crate) unloads: bool,
}

impl Owner {
    pub(crate) fn new(objects: RouteSources, parts: OwnerDeps) -> Self {
        let changes = Subscriptions {
            functions: objects.functions.subscribe(),
            revisions: objects.revisions.subscribe(),
            pods: objects.pods.subscribe(),
            env: objects.env.subscribe(),
        };
        let of_function =
            objects.revisions.index("gateway/function", |revision| vec![function_of(revision).to_string()]);
        let pods = PodRoutes::new(objects.pods.clone());
        let OwnerDeps { host, table, targets, demand, counts, queue_max, tracking, applied } = parts;
        Self {
            objects,
            of_function,
            pods,
            changes,
            host,
            table,
            targets,
            demand,
            counts,
            queue_max,
            tracking,
            applied,
            known: HashMap::new(),
            users: HashMap::new(),
            claims: HashMap::new(),
            claimed: HashMap::new(),
            routed: HashMap::new(),
        }
    }

    /// Runs until `stop`. `ready` becomes true when all objects that existed at the start are in the table.
    pub(crate) async fn run(mut self, ready: watch::Sender<bool>, stop: CancellationToken) {
        let synced = async {
            self.objects.revisions.synced().await;
            self.objects.functions.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let mut dirty = self.changes.take();
        loop {
            if self.names_sources(&dirty)
                && stop.run_until_cancelled(self.objects.env.follow()).await.is_none()
            {
                return;
            }
            self.update(dirty);
            self.table.set_complete();
            ready.send_if_modified(|ready| !std::mem::replace(ready, true));
            dirty = match stop.run_until_cancelled(self.changes.next()).await {
                Some(dirty) => dirty,
                None => return,
            };
        }
    }

    /// Whether a changed revision uses a ConfigMap or Secret.
    fn names_sources(&self, dirty: &Dirty) -> bool {
        let revisions = dirty.revisions.iter().filter_map(|key| self.objects.revisions.get(key));
        revisions.into_iter().any(|revision| env::references(&revision.spec.env).next().is_some())
    }

    fn update(&mut self, dirty: Dirty) {
        let started = Instant::now();
        let mut functions = dirty.functions;
        let with_pods = self.pods.update(&dirty.pods);
        if self.tracking.is_some() && !with_pods.is_empty() {
            with_pods.iter().for_each(|revision| self.count_replicas_of(revision));
            self.applied.send_modify(|count| *count += 1);
        }
        if functions.is_empty() && dirty.revisions.is_empty() && dirty.sources.is_empty() {
            return;
        }
        for source in dirty.sources {
            for revision in self.users.get(&source).into_iter().flatten() {
                functions.extend(self.known.get(revision).map(|known| known.function.clone()));
            }
        }
        for revision in dirty.revisions {
            self.note_revision(&revision, &mut functions);
        }
        let mut batch = RouteChanges::default();
        for function in &functions {
            self.function(function, &mut batch);
        }
        let claims_changed = !batch.tag_hosts.is_empty()
            || batch.functions.keys().any(|function| self.claims.contains_key(function));
        if claims_changed {
            self.counts.conflicts.store(self.conflicts(), Ordering::Relaxed);
        }
        self.table.apply(batch);
        self.applied.send_modify(|count| *count += 1);
        self.counts.routes.store(self.table.len(), Ordering::Relaxed);
        self.counts.route_update.observe(started.elapsed());
        tracing::debug!(functions = functions.len(), took = ?started.elapsed(), "applied changes to the routes");
    }

    /// Updates the numbers of replicas of a revision whose pods changed.
    fn count_replicas_of(&self, revision: &ObjectKey) {
        let known = self.known.get(revision).and_then(|known| self.targets.get(&known.uid));
        let (Some(target), Some(tracking)) = (known, &self.tracking) else { return };
        self.count_replicas(&target);
        if tracking.unloads
            && !self.pods.is_on(revision, &tracking.this_node)
            && let Upstream::Local(function) = &**target.upstream.load()
            && function.is_loaded()
        {
            tracing::debug!(%revision, "no replica is left on this node: dropping the component");
            function.unload();
        }
    }

    fn count_replicas(&self, target: &RevisionTarget) {
        if let Some(ReplicaTracking { this_node, peers, .. }) = &self.tracking {
            target.replicas.set(self.pods.ready_by_node(&target.key), this_node, peers);
        }
    }

    /// Records a revision that was created, changed or removed.
    fn note_revision(&mut self, key: &ObjectKey, functions: &mut BTreeSet<ObjectKey>) {
        let now = self.objects.revisions.get(key);
        let uid = now.as_ref().and_then(|revision| revision.metadata.uid.clone()).unwrap_or_default();
        if let Some(before) = self.known.remove(key) {
            for source in &before.sources {
                if let Some(users) = self.users.get_mut(source) {
                    users.remove(key);
                    if users.is_empty() {
                        self.users.remove(source);
                    }
                }
            }
            if now.is_none() || before.uid != uid {
                self.forget(key, &before.uid);
            }
            functions.insert(before.function);
        }
        let Some(revision) = now else { return };
        let sources = sources_of(&revision, &key.namespace);
        for source in &sources {
            self.users.entry(source.clone()).or_default().insert(key.clone());
        }
        let function = function_of(&revision);
        functions.insert(function.clone());
        self.known.insert(key.clone(), Known { function, uid, sources });
    }

    fn forget(&mut self, key: &ObjectKey, uid: &str) {
        if let Some(target) = self.targets.remove(uid) {
            target.deleted.store(true, Ordering::Release);
            target.routed.store(false, Ordering::SeqCst);
            self.demand.raise(&target);
            self.demand.wake();
        }
        self.pods.forget(key, uid);
        self.host.forget(key);
    }

    /// Rebuilds one function's route.
    fn function(&mut self, key: &ObjectKey, batch: &mut RouteChanges) {
        let name: Arc<str> = format!("{}/{}", key.namespace, key.name).into();
        let revisions = self.of_function.get(&name);
        let function = self.objects.functions.get(key).filter(|f| f.metadata.deletion_timestamp.is_none());
        let Some(function) = function else {
            self.set_routed(&name, Vec::new());
            self.retire(&revisions);
            self.claim(&name, BTreeMap::new(), batch);
            batch.functions.insert(name, None);
            return;
        };
        let plan = plan::plan(&function, &revisions);
        let before = self.table.function(&name);
        let sticky = plan.sticky.clone();
        let kept = before.as_ref().filter(|_| plan.lacks_revision()).and_then(|before| before.working_ends());
        let ends = kept.unwrap_or_else(|| {
            plan.with_latest().targets.into_iter().map(|planned| self.end(planned)).collect()
        });
        self.set_routed(&name, ends.iter().filter_map(|end| end.to.clone().ok()).collect());
        self.retire(&revisions);
        if let (None, Some(claims)) = (&before, self.claims.get(&name)) {
            tracing::warn!(host = %name, ?claims, "a new function has a host that a tag had; header mayfly-tag reaches the tag");
        }
        let route = FunctionRoute::new(key.clone(), ends, sticky.as_ref());
        let route = route.made_from(function);
        let claims = route.tags().map(|tag| (tag_host(key, tag), Arc::from(tag))).collect();
        self.claim(&name, claims, batch);
        batch.functions.insert(name, Some(Arc::new(route)));
    }

    fn end(&mut self, planned: PlannedTarget) -> RouteTarget {
        let PlannedTarget { revision, identity, percent, tag } = planned;
        RouteTarget { to: revision.map(|revision| self.target(&revision)), identity, percent, tag }
    }

    /// The upstream of a revision, by the type of its source.
    fn hosted(&mut self, revision: &Revision) -> Result<Upstream, HostedSpecError> {
        if revision.spec.source.image.is_none() {
            let spec = plan::hosted_spec(revision, &self.objects.env)?;
            return Ok(Upstream::Local(self.host.prepare(spec)));
        }
        match plan::image_refusal(revision) {
            Some(refusal) => Err(refusal.into()),
            None => Ok(Upstream::Pod(self.pods.upstream(revision))),
        }
    }

    /// The single target of the revision, updated to its current state.
    fn target(&mut self, revision: &Revision) -> Arc<RevisionTarget> {
        let uid = revision.metadata.uid.clone().unwrap_or_default();
        let known = self.targets.get(&uid);
        let upstream = match (self.hosted(revision), &known) {
            (Ok(upstream), _) => Arc::new(upstream),
            // It keeps the values that it was prepared with, as a pod does.
            (Err(HostedSpecError::Environment(_)), Some(known)) if known.is_hosted() => {
                known.upstream.load_full()
            }
            (Err(HostedSpecError::Environment(refusal) | HostedSpecError::Revision(refusal)), _) => {
                Arc::new(Upstream::Unavailable(refusal))
            }
        };
        let target = match known {
            Some(target) => {
                target.upstream.store(upstream);
                target
            }
            None => {
                let key = ObjectKey::of(revision);
                let target =
                    Arc::new(RevisionTarget::new(uid, key, &revision.spec, upstream, self.queue_max));
                self.count_replicas(&target);
                self.targets.insert(target.clone());
                target
            }
        };
        let ready = revision.status.as_ref().map_or(0, |status| status.ready_replicas);
        let ready = u32::try_from(ready).unwrap_or(0);
        target.lacks_component.store(plan::lacks_component(revision), Ordering::Relaxed);
        let before = target.ready_replicas.swap(ready, Ordering::SeqCst);
        if ready != before || ready < target.scaling.min {
            self.demand.raise(&target);
            self.demand.wake();
        }
        target
    }

    /// Records the revisions in a function's route, and makes the autoscaler evaluate those that were removed from it.
    fn set_routed(&mut self, name: &Arc<str>, now: Vec<Arc<RevisionTarget>>) {
        let before = self.routed.remove(name).unwrap_or_default();
        for target in before.iter().filter(|before| !now.iter().any(|now| Arc::ptr_eq(before, now))) {
            // Ordered with `watched`: `DemandSignal::release` reads the other of the two.
            target.routed.store(false, Ordering::SeqCst);
            self.demand.raise(target);
            self.demand.wake();
        }
        for target in &now {
            target.routed.store(true, Ordering::SeqCst);
        }
        if !now.is_empty() {
            self.routed.insert(name.clone(), now);
        }
    }

    /// Makes the autoscaler remove the replicas of revisions without a route.
    fn retire(&mut self, revisions: &[Arc<Revision>]) {
        for revision in revisions {
            let running = revision.status.as_ref().is_some_and(|status| status.ready_replicas > 0);
            let uid = revision.metadata.uid.as_deref().unwrap_or_default();
            let routed = self.targets.get(uid).is_some_and(|t| t.routed.load(Ordering::Acquire));
            if running && !routed {
                self.target(revision);
            }
        }
    }

    /// Claims hosts for a function's tags, and releases its earlier claims.
    fn claim(&mut self, function: &Arc<str>, now: BTreeMap<Arc<str>, Arc<str>>, batch: &mut RouteChanges) {
        let before = self.claimed.remove(function).unwrap_or_default();
        if before == now {
            if !now.is_empty() {
                self.claimed.insert(function.clone(), now);
            }
            return;
        }
        for (host, tag) in &before {
            if let Some(claims) = self.claims.get_mut(host) {
                claims.remove(&(function.clone(), tag.clone()));
            }
        }
        for (host, tag) in &now {
            self.claims.entry(host.clone()).or_default().insert((function.clone(), tag.clone()));
        }
        for host in before.keys().chain(now.keys()) {
            let claims = self.claims.get(host);
            if let Some(claims) = claims.filter(|claims| claims.len() > 1) {
                tracing::warn!(%host, ?claims, "several tags claim one host; the first has it, header mayfly-tag reaches the others");
            }
            let winner = claims.and_then(BTreeSet::first).cloned();
            if winner.is_none() {
                self.claims.remove(host);
            } else if now.contains_key(host) && self.is_function(host) {
                tracing::warn!(%host, tag_of = %function, "a tag's host is also a function's, which has it; header mayfly-tag reaches the tag");
            }
            let winner = winner.map(|(function, tag)| TagHost { function, tag });
            batch.tag_hosts.insert(host.clone(), winner);
        }
        if !now.is_empty() {
            self.claimed.insert(function.clone(), now);
        }
    }

    fn is_function(&self, host: &str) -> bool {
        let key = host.split_once('/').map(|(namespace, name)| ObjectKey::new(namespace, name));
        key.is_some_and(|key| self.objects.functions.get(&key).is_some())
    }

    /// The number of tags whose host is claimed by another function.
    fn conflicts(&self) -> usize {
        let lost =
            |(host, claims): (&Arc<str>, &BTreeSet<_>)| claims.len() - usize::from(!self.is_function(host));
        self.claims.iter().map(lost).sum()
    }
}

/// The changed objects by kind.
#[derive(Default)]
struct Dirty {
    functions: BTreeSet<ObjectKey>,
    revisions: BTreeSet<ObjectKey>,
    pods: BTreeSet<ObjectKey>,
    sources: BTreeSet<EnvObject>,
}

impl Subscriptions {
    async fn next(&mut self) -> Dirty {
        let mut dirty = Dirty::default();
        tokio::select! {
            keys = self.functions.next() => dirty.functions = keys,
            keys = self.revisions.next() => dirty.revisions = keys,
            keys = self.pods.next() => dirty.pods = keys,
            objects = self.env.next() => dirty.sources = objects,
        }
        let rest = self.take();
        dirty.functions.extend(rest.functions);
        dirty.revisions.extend(rest.revisions);
        dirty.pods.extend(rest.pods);
        dirty.sources.extend(rest.sources);
        dirty
    }

    fn take(&mut self) -> Dirty {
        Dirty {
            sources: self.env.take(),
            pods: self.pods.take(),
            revisions: self.revisions.take(),
            functions: self.functions.take(),
        }
    }
}

fn function_of(revision: &Revision) -> ObjectKey {
    ObjectKey::new(revision.metadata.namespace.clone().unwrap_or_default(), &revision.spec.function)
}

fn tag_host(function: &ObjectKey, tag: &str) -> Arc<str> {
    format!("{}/{tag}-{}", function.namespace, function.name).into()
}

fn sources_of(revision: &Revision, namespace: &str) -> Vec<EnvObject> {
    env::references(&revision.spec.env).map(|reference| EnvObject::named(reference, namespace)).collect()
}
