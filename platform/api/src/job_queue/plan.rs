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
//! of its namespace only. A Job that can never fit holds up nobody.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    fmt,
};

use crate::{
    job_queue::{JobQueueSpec, QueuedJob, QueuedJobState},
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
    /// The reason of each Job that waits, in the order of their turns.
    pub waiting: Vec<(ObjectKey, QueueReason)>,
    /// The amounts of running Jobs, without those to start.
    pub used: Amounts,
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
    },
    /// It would fit, but could delay a Job that is before it.
    Behind(ObjectKey),
    /// It can never fit.
    TooLarge {
        resource: String,
        needs: u64,
        quota: u64,
        namespace: bool,
    },
    /// The queue is not for its namespace.
    NotAllowed,
    Paused,
}

impl fmt::Display for QueueReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = |namespace: &bool| if *namespace { "the namespace's quota" } else { "the queue's quota" };
        match self {
            Self::NoRoom { resource, needs, free, quota, namespace } => write!(
                f,
                "needs {} of {resource}, and {} of {} in {} are free",
                shown(resource, *needs),
                shown(resource, *free),
                shown(resource, *quota),
                whose(namespace)
            ),
            Self::Behind(head) => write!(f, "could delay job {head}, which is before it"),
            Self::TooLarge { resource, needs, quota, namespace } => write!(
                f,
                "needs {} of {resource}, more than the {} of {}: it never starts",
                shown(resource, *needs),
                shown(resource, *quota),
                whose(namespace)
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
    let mut planned = QueuePlan::default();
    let mut waiting: Vec<&QueuedJob> = Vec::new();
    for job in jobs {
        match job.state {
            QueuedJobState::Waiting => waiting.push(job),
            QueuedJobState::Running { until } => {
                planned.running += 1;
                for name in spec.quota.keys() {
                    *planned.used.0.entry(name.clone()).or_default() += job.request.get(name);
                }
                let needs = pools.needs(job);
                pools.hold(needs, until);
            }
        }
    }
    for name in spec.quota.keys() {
        planned.used.0.entry(name.clone()).or_default();
    }
    waiting.sort_by_key(|job| (Reverse(job.priority), job.created, &job.key));
    let mut heads: Vec<QueueHead> = Vec::new();
    for job in waiting {
        match pools.decide(job, spec, &mut heads, now) {
            Ok(()) => planned.start.push(job.key.clone()),
            Err(reason) => planned.waiting.push((job.key.clone(), reason)),
        }
    }
    planned
}

/// The place of a quota of one resource: of the queue, or of one namespace.
type QuotaId = usize;
type Needs = Vec<(QuotaId, u64)>;

/// One resource of the queue or of a namespace.
#[derive(Clone, Debug)]
struct Pool {
    resource: String,
    /// `None`: the whole queue.
    namespace: Option<String>,
    quota: u64,
    used: u64,
}

/// A Job that waits for room, and the amounts that are protected for it.
struct QueueHead {
    key: ObjectKey,
    protected: Needs,
    /// The time at which the running Jobs have made room for it.
    reserved_at: Option<Timestamp>,
    of_queue: bool,
}

struct Pools<'a> {
    namespaces: &'a BTreeMap<String, BTreeMap<String, String>>,
    allowed: Option<Selector>,
    rules: Vec<(Selector, Amounts)>,
    pools: Vec<Pool>,
    ids: HashMap<(Option<String>, String), QuotaId>,
    held: Vec<(Needs, Option<Timestamp>)>,
}

impl<'a> Pools<'a> {
    fn new(spec: &JobQueueSpec, namespaces: &'a BTreeMap<String, BTreeMap<String, String>>) -> Self {
        // Validation refuses a selector that cannot be parsed; if one is stored nevertheless, it selects nothing.
        let selector = |selector| Selector::from_object(selector).ok();
        let rules = spec.namespace_quotas.iter().filter_map(|rule| {
            Some((selector(&rule.namespace_selector)?, Amounts::from_quantities(&rule.quota)))
        });
        let mut pools = Self {
            namespaces,
            allowed: spec.namespace_selector.as_ref().map(|one| selector(one).unwrap_or_else(nothing)),
            rules: rules.collect(),
            pools: Vec::new(),
            ids: HashMap::new(),
            held: Vec::new(),
        };
        for (resource, quota) in Amounts::from_quantities(&spec.quota).0 {
            pools.pool(None, &resource, quota);
        }
        pools
    }

    fn pool(&mut self, namespace: Option<&str>, resource: &str, quota: u64) -> QuotaId {
        let key = (namespace.map(str::to_owned), resource.to_owned());
        if let Some(id) = self.ids.get(&key) {
            // If several quotas apply to one namespace, the smallest counts.
            self.pools[*id].quota = self.pools[*id].quota.min(quota);
            return *id;
        }
        let (namespace, resource) = key.clone();
        self.pools.push(Pool { resource, namespace, quota, used: 0 });
        self.ids.insert(key, self.pools.len() - 1);
        self.pools.len() - 1
    }

    fn labels(&self, namespace: &str) -> BTreeMap<String, String> {
        self.namespaces.get(namespace).cloned().unwrap_or_default()
    }

    /// The amounts that the Job needs of each quota.
    fn needs(&mut self, job: &QueuedJob) -> Needs {
        let namespace = &job.key.namespace;
        let labels = self.labels(namespace);
        let rules: Vec<(String, u64)> = self
            .rules
            .iter()
            .filter(|(selector, _)| selector.matches(&labels))
            .flat_map(|(_, quota)| quota.0.clone())
            .collect();
        for (resource, quota) in rules {
            self.pool(Some(namespace), &resource, quota);
        }
        let pools = self.pools.iter().enumerate();
        let own = pools.filter(|(_, pool)| pool.namespace.as_ref().is_none_or(|of| of == namespace));
        let needs = own.map(|(id, pool)| (id, job.request.get(&pool.resource)));
        needs.filter(|(_, amount)| *amount > 0).collect()
    }

    fn hold(&mut self, needs: Needs, until: Option<Timestamp>) {
        for (id, amount) in &needs {
            self.pools[*id].used = self.pools[*id].used.saturating_add(*amount);
        }
        self.held.push((needs, until));
    }

    /// Starts the Job, or records why it waits.
    fn decide(
        &mut self,
        job: &QueuedJob,
        spec: &JobQueueSpec,
        heads: &mut Vec<QueueHead>,
        now: Timestamp,
    ) -> Result<(), QueueReason> {
        let labels = self.labels(&job.key.namespace);
        if self.allowed.as_ref().is_some_and(|selector| !selector.matches(&labels)) {
            return Err(QueueReason::NotAllowed);
        }
        let needs = self.needs(job);
        let pool = |id: QuotaId| &self.pools[id];
        if let Some((id, amount)) = needs.iter().find(|(id, amount)| *amount > pool(*id).quota) {
            let Pool { resource, namespace, quota, .. } = pool(*id).clone();
            return Err(QueueReason::TooLarge {
                resource,
                needs: *amount,
                quota,
                namespace: namespace.is_some(),
            });
        }
        if spec.paused {
            return Err(QueueReason::Paused);
        }
        let lacks = |(id, amount): &&(QuotaId, u64)| pool(*id).used.saturating_add(*amount) > pool(*id).quota;
        // Room in the queue would not help while the namespace has none.
        let missing = needs.iter().filter(lacks).max_by_key(|(id, _)| pool(*id).namespace.is_some());
        if let Some((id, amount)) = missing.copied() {
            let Pool { resource, namespace, quota, used } = pool(id).clone();
            self.add_head(job, &needs, namespace.is_none(), heads);
            let free = quota.saturating_sub(used);
            return Err(QueueReason::NoRoom {
                resource,
                needs: amount,
                free,
                quota,
                namespace: namespace.is_some(),
            });
        }
        let until = job.deadline.and_then(|span| now.checked_add(span).ok());
        let is_held_up =
            |head: &&QueueHead| (head.of_queue && !spec.backfill) || !self.leaves_room(head, &needs, until);
        if let Some(head) = heads.iter().find(is_held_up) {
            return Err(QueueReason::Behind(head.key.clone()));
        }
        self.hold(needs, until);
        Ok(())
    }

    /// Adds a Job as a head: at most one of the queue, and one of each namespace that waits for its own quota.
    fn add_head(&self, job: &QueuedJob, needs: &Needs, of_queue: bool, heads: &mut Vec<QueueHead>) {
        let of_namespace = |head: &QueueHead| !head.of_queue && head.key.namespace == job.key.namespace;
        if heads.iter().any(|head| if of_queue { head.of_queue } else { of_namespace(head) }) {
            return;
        }
        let is_protected = |(id, _): &&(QuotaId, u64)| of_queue || self.pools[*id].namespace.is_some();
        let protected: Needs = needs.iter().filter(is_protected).copied().collect();
        let reserved_at = self.room_at(&protected);
        heads.push(QueueHead { key: job.key.clone(), protected, reserved_at, of_queue });
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
        let shared: Vec<(QuotaId, u64)> = head
            .protected
            .iter()
            .filter_map(|(id, amount)| {
                let (_, own) = needs.iter().find(|(of, _)| of == id)?;
                Some((*id, amount.saturating_add(*own)))
            })
            .collect();
        let fits = |used: &dyn Fn(QuotaId) -> u64| {
            shared.iter().all(|(id, both)| used(*id).saturating_add(*both) <= self.pools[*id].quota)
        };
        if fits(&|id| self.pools[id].used) {
            return true;
        }
        head.reserved_at
            .is_some_and(|at| until.is_some_and(|until| until <= at) || fits(&|id| self.used_at(id, at)))
    }
}

/// A selector that no namespace matches: every one has a name.
fn nothing() -> Selector {
    Selector::parse(&format!("!{}", crate::wellknown::LABEL_NAMESPACE_NAME)).unwrap_or_default()
}

/// The amounts as quantities, for a status.
pub fn quantities(amounts: &Amounts) -> BTreeMap<String, Quantity> {
    amounts.0.iter().map(|(name, amount)| (name.clone(), Quantity(shown(name, *amount)))).collect()
}
