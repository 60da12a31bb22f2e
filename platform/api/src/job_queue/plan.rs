//! Decides which Jobs of a queue start now, and the reasons why the others wait: pure.
//!
//! Jobs are ordered by priority, then by age. The first one that does not fit is the *head*; a Job behind it may
//! start (backfill) only if that cannot delay the head, which is the case if
//!
//! - beside it there is still room for the head in every resource that both request, or
//! - it ends by its own deadline before the time at which the running Jobs have made room for the head by theirs, or
//!   leaves room for the head at that time.
//!
//! A Job that waits for its namespace's quota alone does not hold up other namespaces: it is a head for the resources
//! of its namespace only; likewise a Job that waits for a flavor holds up other flavors only by what both need. A Job
//! that can never fit holds up nobody.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    fmt,
};

use crate::{
    job_queue::{
        JobQueueSpec, QueuedJob, QueuedJobState, canonical,
        flavors::{FlavorId, JobFlavors},
    },
    k8s::{apimachinery::pkg::api::resource::Quantity, jiff::Timestamp},
    names::ObjectKey,
    resources::Amounts,
    selector::Selector,
};

/// The decision about all Jobs of a queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueuePlan {
    /// The Jobs to start, in order.
    pub start: Vec<ObjectKey>,
    /// The positions of the flavors of the Jobs to start; of those that get one.
    pub flavors: BTreeMap<ObjectKey, usize>,
    /// The reason of each Job that waits, in the order of their turns.
    pub waiting: Vec<(ObjectKey, QueueReason)>,
    /// The amounts of running Jobs, without those to start.
    pub used: Amounts,
    /// The amounts of running Jobs in each flavor, in the queue's order.
    pub used_by_flavor: Vec<Amounts>,
    pub running: usize,
}

/// The reason why a Job waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueReason {
    /// A resource has too little left.
    NoRoom {
        resource: String,
        needs: u64,
        free: u64,
        quota: u64,
        namespace: bool,
        flavor: Option<String>,
    },
    /// It would fit, but could delay a Job that is before it.
    Behind(ObjectKey),
    /// It can never fit.
    TooLarge {
        resource: String,
        needs: u64,
        quota: u64,
        namespace: bool,
        flavor: Option<String>,
    },
    /// Its node selector or affinity excludes the nodes of all flavors.
    NoFlavor,
    /// The queue is not for its namespace.
    NotAllowed,
    Paused,
}

impl fmt::Display for QueueReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = |namespace: &bool, flavor: &Option<String>| match (namespace, flavor) {
            (true, None) => "the namespace's quota".to_owned(),
            (true, Some(flavor)) => format!("the namespace's quota of flavor {flavor}"),
            (false, None) => "the queue's quota".to_owned(),
            (false, Some(flavor)) => format!("the quota of flavor {flavor}"),
        };
        match self {
            Self::NoRoom { resource, needs, free, quota, namespace, flavor } => write!(
                f,
                "needs {} of {resource}, and {} of {} in {} are free",
                shown(resource, *needs),
                shown(resource, *free),
                shown(resource, *quota),
                whose(namespace, flavor)
            ),
            Self::Behind(head) => write!(f, "could delay job {head}, which is before it"),
            Self::TooLarge { resource, needs, quota, namespace, flavor } => write!(
                f,
                "needs {} of {resource}, more than the {} of {}: it never starts",
                shown(resource, *needs),
                shown(resource, *quota),
                whose(namespace, flavor)
            ),
            Self::NoFlavor => f.write_str(
                "its node selector or affinity excludes the nodes of all flavors of the queue: it never starts",
            ),
            Self::NotAllowed => f.write_str("the queue is not for the job's namespace"),
            Self::Paused => f.write_str("the queue is paused"),
        }
    }
}

/// An amount as a quantity.
pub fn shown(resource: &str, amount: u64) -> String {
    match resource {
        "cpu" if !amount.is_multiple_of(1000) => format!("{amount}m"),
        "cpu" => (amount / 1000).to_string(),
        "memory" => {
            let units = [("Gi", 30), ("Mi", 20), ("Ki", 10)];
            let unit = units.iter().find(|(_, power)| amount > 0 && amount.trailing_zeros() >= *power);
            unit.map_or_else(|| amount.to_string(), |(unit, power)| format!("{}{unit}", amount >> power))
        }
        _ => amount.to_string(),
    }
}

/// Decides about a queue. `namespaces`: the labels of each namespace.
pub fn plan(
    spec: &JobQueueSpec,
    jobs: &[QueuedJob],
    namespaces: &BTreeMap<String, BTreeMap<String, String>>,
    now: Timestamp,
) -> QueuePlan {
    let mut pools = Pools::new(spec, namespaces);
    let mut planned =
        QueuePlan { used_by_flavor: vec![Amounts::default(); spec.flavors.len()], ..QueuePlan::default() };
    let mut waiting: Vec<&QueuedJob> = Vec::new();
    for job in jobs {
        match job.state {
            QueuedJobState::Waiting => waiting.push(job),
            QueuedJobState::Running { until } => {
                planned.running += 1;
                add(&mut planned.used, spec.quota.keys(), &job.request);
                let flavor = JobFlavors::of_running(spec, job);
                if let Some(id) = flavor {
                    add(&mut planned.used_by_flavor[id], spec.flavors[id].quota.keys(), &job.request);
                }
                let needs = pools.needs(job, flavor);
                pools.hold(needs, until);
            }
        }
    }
    // Resources that no Job uses are shown, too.
    add(&mut planned.used, spec.quota.keys(), &Amounts::default());
    for (used, flavor) in planned.used_by_flavor.iter_mut().zip(&spec.flavors) {
        add(used, flavor.quota.keys(), &Amounts::default());
    }
    waiting.sort_by_key(|job| (Reverse(job.priority), job.created, &job.key));
    let mut heads: Vec<QueueHead> = Vec::new();
    for job in waiting {
        match pools.decide(job, &mut heads, now) {
            Ok(flavor) => {
                planned.start.push(job.key.clone());
                planned.flavors.extend(flavor.map(|id| (job.key.clone(), id)));
            }
            Err(reason) => planned.waiting.push((job.key.clone(), reason)),
        }
    }
    planned
}

/// Adds the amounts of these resources, under the names that the quota gives them.
fn add<'n>(used: &mut Amounts, names: impl Iterator<Item = &'n String>, request: &Amounts) {
    for name in names {
        let sum = used.0.entry(name.clone()).or_default();
        *sum = sum.saturating_add(request.get(&canonical(name)));
    }
}

/// The place of a quota of one resource: of the queue, or of one namespace, and of all flavors, or of one.
type QuotaId = usize;
type Needs = Vec<(QuotaId, u64)>;

/// The scope of a quota.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct QuotaScope {
    /// `None`: the whole queue.
    namespace: Option<String>,
    /// `None`: all Jobs.
    flavor: Option<FlavorId>,
}

/// One resource of a quota.
#[derive(Clone, Debug)]
struct Pool {
    resource: String,
    scope: QuotaScope,
    quota: u64,
    used: u64,
}

/// A Job that waits for room, and the amounts that are protected for it.
struct QueueHead {
    key: ObjectKey,
    flavor: Option<FlavorId>,
    protected: Needs,
    /// These amounts, less those that are released in any case before it can start.
    unreleased: Needs,
    /// The time at which the running Jobs have made room for it.
    reserved_at: Option<Timestamp>,
    of_queue: bool,
}

/// A flavor in which a Job does not start.
struct FlavorRefusal {
    reason: QueueReason,
    /// The quota that the Job waits for, unless it could never start or is behind another Job.
    awaited: Option<AwaitedQuota>,
}

/// The needs of a Job for which there is no room.
struct AwaitedQuota {
    flavor: Option<FlavorId>,
    needs: Needs,
    /// Whether a quota of the queue has no room, and not only one of the Job's namespace.
    of_queue: bool,
}

/// A quota of namespaces.
struct NamespaceRule {
    selector: Selector,
    flavor: Option<FlavorId>,
    quota: Amounts,
}

struct Pools<'a> {
    spec: &'a JobQueueSpec,
    namespaces: &'a BTreeMap<String, BTreeMap<String, String>>,
    allowed: Option<Selector>,
    rules: Vec<NamespaceRule>,
    pools: Vec<Pool>,
    ids: HashMap<(QuotaScope, String), QuotaId>,
    held: Vec<(Needs, Option<Timestamp>)>,
}

impl<'a> Pools<'a> {
    fn new(spec: &'a JobQueueSpec, namespaces: &'a BTreeMap<String, BTreeMap<String, String>>) -> Self {
        // Validation refuses a selector that cannot be parsed; if one is stored nevertheless, it selects nothing.
        let selector = |selector| Selector::from_object(selector).ok();
        let rules = spec.namespace_quotas.iter().filter_map(|rule| {
            let flavor = match &rule.flavor {
                None => None,
                Some(name) => Some(spec.flavors.iter().position(|flavor| flavor.name == *name)?),
            };
            let selector = selector(&rule.namespace_selector)?;
            Some(NamespaceRule { selector, flavor, quota: amounts(&rule.quota) })
        });
        let mut pools = Self {
            spec,
            namespaces,
            allowed: spec.namespace_selector.as_ref().map(|one| selector(one).unwrap_or_else(nothing)),
            rules: rules.collect(),
            pools: Vec::new(),
            ids: HashMap::new(),
            held: Vec::new(),
        };
        let of_queue = std::iter::once((None, &spec.quota));
        let of_flavors = spec.flavors.iter().enumerate().map(|(id, flavor)| (Some(id), &flavor.quota));
        for (flavor, quota) in of_queue.chain(of_flavors) {
            for (resource, quota) in amounts(quota).0 {
                pools.pool(QuotaScope { namespace: None, flavor }, resource, quota);
            }
        }
        pools
    }

    fn pool(&mut self, scope: QuotaScope, resource: String, quota: u64) -> QuotaId {
        let key = (scope.clone(), resource.clone());
        if let Some(id) = self.ids.get(&key) {
            // If several quotas apply to one namespace, the smallest counts.
            self.pools[*id].quota = self.pools[*id].quota.min(quota);
            return *id;
        }
        self.pools.push(Pool { resource, scope, quota, used: 0 });
        self.ids.insert(key, self.pools.len() - 1);
        self.pools.len() - 1
    }

    fn labels(&self, namespace: &str) -> BTreeMap<String, String> {
        self.namespaces.get(namespace).cloned().unwrap_or_default()
    }

    /// The amounts that the Job needs of each quota, in a flavor.
    fn needs(&mut self, job: &QueuedJob, flavor: Option<FlavorId>) -> Needs {
        let namespace = &job.key.namespace;
        let labels = self.labels(namespace);
        let rules: Vec<_> = self
            .rules
            .iter()
            .filter(|rule| rule.selector.matches(&labels))
            .flat_map(|rule| rule.quota.0.iter().map(|(name, quota)| (rule.flavor, name.clone(), *quota)))
            .collect();
        for (flavor, resource, quota) in rules {
            self.pool(QuotaScope { namespace: Some(namespace.clone()), flavor }, resource, quota);
        }
        let applies = |scope: &QuotaScope| {
            scope.namespace.as_ref().is_none_or(|of| of == namespace)
                && (scope.flavor.is_none() || scope.flavor == flavor)
        };
        let own = self.pools.iter().enumerate().filter(|(_, pool)| applies(&pool.scope));
        let needs = own.map(|(id, pool)| (id, job.request.get(&pool.resource)));
        needs.filter(|(_, amount)| *amount > 0).collect()
    }

    fn hold(&mut self, needs: Needs, until: Option<Timestamp>) {
        for (id, amount) in &needs {
            self.pools[*id].used = self.pools[*id].used.saturating_add(*amount);
        }
        self.held.push((needs, until));
    }

    /// Starts the Job, in the returned flavor, or records why it waits.
    fn decide(
        &mut self,
        job: &QueuedJob,
        heads: &mut Vec<QueueHead>,
        now: Timestamp,
    ) -> Result<Option<FlavorId>, QueueReason> {
        let labels = self.labels(&job.key.namespace);
        if self.allowed.as_ref().is_some_and(|selector| !selector.matches(&labels)) {
            return Err(QueueReason::NotAllowed);
        }
        let flavors: Vec<_> = match JobFlavors::of_waiting(self.spec, job) {
            JobFlavors::NotConcerned => vec![None],
            JobFlavors::AnyOf(flavors) => flavors.into_iter().map(Some).collect(),
        };
        let until = job.deadline.and_then(|span| now.checked_add(span).ok());
        let mut refusals = Vec::new();
        for flavor in flavors {
            let needs = self.needs(job, flavor);
            match self.refusal(&needs, flavor, until, heads) {
                None => {
                    self.hold(needs, until);
                    return Ok(flavor);
                }
                Some(refusal) => refusals.push(refusal),
            }
        }
        // It waits for the first flavor that can ever hold it.
        let can_start = |one: &FlavorRefusal| !matches!(one.reason, QueueReason::TooLarge { .. });
        let chosen = refusals.iter().position(can_start).unwrap_or(0);
        if refusals.is_empty() {
            return Err(QueueReason::NoFlavor);
        }
        let FlavorRefusal { reason, awaited } = refusals.swap_remove(chosen);
        if let Some(awaited) = awaited {
            self.add_head(job, awaited, heads);
        }
        Err(reason)
    }

    /// The reason why a Job with these needs does not start in a flavor; `None`: it does.
    fn refusal(
        &self,
        needs: &Needs,
        flavor: Option<FlavorId>,
        until: Option<Timestamp>,
        heads: &[QueueHead],
    ) -> Option<FlavorRefusal> {
        let refused = |reason| Some(FlavorRefusal { reason, awaited: None });
        let pool = |id: QuotaId| &self.pools[id];
        if let Some((id, amount)) = needs.iter().find(|(id, amount)| *amount > pool(*id).quota) {
            let Pool { resource, scope, quota, .. } = pool(*id).clone();
            return refused(QueueReason::TooLarge {
                resource,
                needs: *amount,
                quota,
                namespace: scope.namespace.is_some(),
                flavor: self.name_of(&scope),
            });
        }
        if self.spec.paused {
            return refused(QueueReason::Paused);
        }
        let lacks = |(id, amount): &&(QuotaId, u64)| pool(*id).used.saturating_add(*amount) > pool(*id).quota;
        // Room in the queue would not help while the namespace has none.
        let missing = needs.iter().filter(lacks).max_by_key(|(id, _)| pool(*id).scope.namespace.is_some());
        if let Some((id, amount)) = missing.copied() {
            let Pool { resource, scope, quota, used } = pool(id).clone();
            let of_queue = scope.namespace.is_none();
            let reason = QueueReason::NoRoom {
                resource,
                needs: amount,
                free: quota.saturating_sub(used),
                quota,
                namespace: !of_queue,
                flavor: self.name_of(&scope),
            };
            let awaited = AwaitedQuota { flavor, needs: needs.clone(), of_queue };
            return Some(FlavorRefusal { reason, awaited: Some(awaited) });
        }
        let is_held_up = |head: &&QueueHead| {
            (head.of_queue && !self.spec.backfill) || !self.leaves_room(head, needs, until)
        };
        let head = heads.iter().find(is_held_up)?;
        refused(QueueReason::Behind(head.key.clone()))
    }

    fn name_of(&self, scope: &QuotaScope) -> Option<String> {
        scope.flavor.map(|id| self.spec.flavors[id].name.clone())
    }

    /// Adds a Job as a head: at most one of the queue, and one of each namespace that waits for its own quota; for each
    /// flavor.
    fn add_head(&self, job: &QueuedJob, awaited: AwaitedQuota, heads: &mut Vec<QueueHead>) {
        let AwaitedQuota { flavor, needs, of_queue } = awaited;
        let is_same = |head: &QueueHead| {
            let of_namespace = !head.of_queue && head.key.namespace == job.key.namespace;
            head.flavor == flavor && if of_queue { head.of_queue } else { of_namespace }
        };
        if heads.iter().any(is_same) {
            return;
        }
        let is_protected = |(id, _): &&(QuotaId, u64)| of_queue || self.pools[*id].scope.namespace.is_some();
        let protected: Needs = needs.iter().filter(is_protected).copied().collect();
        let (unreleased, reserved_at) = (self.unreleased(&protected), self.room_at(&protected));
        heads.push(QueueHead { key: job.key.clone(), flavor, protected, unreleased, reserved_at, of_queue });
    }

    /// The needs, less what running Jobs release before a Job with these needs can start: what its flavor lacks is
    /// released in the quota of all flavors at the same time.
    fn unreleased(&self, needs: &Needs) -> Needs {
        let lacks = |(id, amount): &(QuotaId, u64)| {
            let pool = &self.pools[*id];
            pool.used.saturating_add(*amount).saturating_sub(pool.quota)
        };
        let released = |of_all: &Pool| {
            let of_flavor = needs.iter().filter(|(id, _)| {
                let Pool { resource, scope, .. } = &self.pools[*id];
                let is_within = of_all.scope.namespace.is_none() || of_all.scope.namespace == scope.namespace;
                let is_flavor = of_all.scope.flavor.is_none() && scope.flavor.is_some();
                is_flavor && is_within && *resource == of_all.resource
            });
            of_flavor.map(lacks).max().unwrap_or(0)
        };
        let unreleased =
            needs.iter().map(|(id, amount)| (*id, amount.saturating_sub(released(&self.pools[*id]))));
        unreleased.collect()
    }

    /// The time at which the running Jobs have made room, by their deadlines.
    fn room_at(&self, needs: &Needs) -> Option<Timestamp> {
        let mut ends: Vec<Timestamp> = self.held.iter().filter_map(|(_, until)| *until).collect();
        ends.sort_unstable();
        ends.dedup();
        ends.into_iter().find(|at| {
            needs
                .iter()
                .all(|(id, amount)| self.used_at(*id, *at).saturating_add(*amount) <= self.pools[*id].quota)
        })
    }

    /// The amount of a quota that is in use after a time.
    fn used_at(&self, id: QuotaId, at: Timestamp) -> u64 {
        let lasting = self.held.iter().filter(|(_, until)| until.is_none_or(|until| until > at));
        let amounts = lasting.flat_map(|(needs, _)| needs).filter(|(of, _)| *of == id);
        amounts.map(|(_, amount)| amount).fold(0, |sum, amount| sum.saturating_add(*amount))
    }

    /// Whether a Job with these needs cannot delay the head.
    fn leaves_room(&self, head: &QueueHead, needs: &Needs, until: Option<Timestamp>) -> bool {
        let fits = |protected: &Needs, used: &dyn Fn(QuotaId) -> u64| {
            protected.iter().all(|(id, amount)| {
                let own = needs.iter().find(|(of, _)| of == id);
                own.is_none_or(|(_, own)| {
                    used(*id).saturating_add(*amount).saturating_add(*own) <= self.pools[*id].quota
                })
            })
        };
        if fits(&head.unreleased, &|id| self.pools[id].used) {
            return true;
        }
        head.reserved_at.is_some_and(|at| {
            until.is_some_and(|until| until <= at) || fits(&head.protected, &|id| self.used_at(id, at))
        })
    }
}

/// A selector that no namespace matches: every one has a name.
fn nothing() -> Selector {
    Selector::parse(&format!("!{}", crate::wellknown::LABEL_NAMESPACE_NAME)).unwrap_or_default()
}

/// The amounts of a quota, by the names that nodes offer.
fn amounts(quota: &BTreeMap<String, Quantity>) -> Amounts {
    let amounts = Amounts::from_quantities(quota).0.into_iter();
    Amounts(amounts.map(|(name, amount)| (canonical(&name), amount)).collect())
}

/// The amounts as quantities, for a status.
pub fn quantities(amounts: &Amounts) -> BTreeMap<String, Quantity> {
    amounts.0.iter().map(|(name, amount)| (name.clone(), Quantity(shown(name, *amount)))).collect()
}
