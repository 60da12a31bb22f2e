//! Decides which nodes are silent, their conditions, and the pods that they or their NoExecute taints evict. Pure: the
//! time is an argument.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::{
        api::{
            coordination::v1::{Lease, LeaseSpec},
            core::v1::{Node, Pod, Taint},
        },
        apimachinery::pkg::apis::meta::v1::MicroTime,
    },
    node_fit::tolerates,
};
use tokio::time::Instant;

use super::{
    Config,
    eviction_rate::{EvictionLimits, ZoneCount, ZoneKey, is_excluded, zone_of},
};
use crate::pods::{is_active, is_ready};

pub(super) const NOT_READY: &str = "node.kubernetes.io/not-ready";
pub(super) const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const NO_EXECUTE: &str = "NoExecute";

/// The time of each node's last lease renewal, and since when it has been unhealthy.
#[derive(Default)]
pub(super) struct Health {
    nodes: HashMap<String, NodeHealth>,
    limits: EvictionLimits,
}

struct NodeHealth {
    renewed: Option<MicroTime>,
    heard: Instant,
    unwell: Option<Instant>,
    /// Since when this controller has had the node tainted with NoExecute.
    executes: Option<Instant>,
    /// The NoExecute taints that this controller does not set itself, and when each was first seen.
    taints: Vec<(Taint, Instant)>,
}

impl NodeHealth {
    fn observe_taints(&mut self, node: &Node, now: Instant) {
        let known = std::mem::take(&mut self.taints);
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).into_iter().flatten();
        let foreign = taints.filter(|taint| taint.effect == NO_EXECUTE && !is_own(taint));
        let since = |taint: &Taint| {
            let same = |(other, _): &&(Taint, Instant)| other.key == taint.key && other.value == taint.value;
            known.iter().find(same).map_or(now, |(_, since)| *since)
        };
        self.taints = foreign.map(|taint| (taint.clone(), since(taint))).collect();
    }

    /// Whether one of those taints evicts a pod now.
    fn evicts(&self, pod: &Pod, now: Instant) -> bool {
        is_active(pod)
            && self.taints.iter().any(|(taint, since)| !is_tolerated(pod, taint, now.duration_since(*since)))
    }
}

/// Whether a pod tolerates a NoExecute taint that the node has had for this time.
fn is_tolerated(pod: &Pod, taint: &Taint, tainted: Duration) -> bool {
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_ref()).into_iter().flatten();
    // As upstream, the first toleration that fits counts.
    let first = tolerations.into_iter().find(|toleration| tolerates(toleration, taint));
    first.is_some_and(|toleration| {
        let limit = toleration.toleration_seconds;
        limit.is_none_or(|seconds| tainted < Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
    })
}

/// Whether this controller sets and removes the taint.
pub(super) fn is_own(taint: &Taint) -> bool {
    taint.key == NOT_READY || taint.key == UNREACHABLE
}

/// The annotation of nodes for how long a kubelet may cache Secrets and ConfigMaps (upstream's TTL controller). Ours
/// watches them.
pub(super) const ANNOTATION_TTL: &str = "node.alpha.kubernetes.io/ttl";
pub(super) const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// A new or cordoned node: its annotation, and the taint that cordoning it calls for.
    Mark {
        node: String,
        resource_version: Option<String>,
        /// `None`: the taints need no change.
        taints: Option<Vec<Taint>>,
    },
    /// The kubelet stopped renewing its lease: the conditions become Unknown.
    MarkUnknown {
        node: String,
    },
    /// A pod of such a node is not ready any more: Services send it no more requests.
    MarkPodNotReady {
        pod: Arc<Pod>,
    },
    /// Replaces the node's taints.
    SetTaints {
        node: String,
        resource_version: Option<String>,
        taints: Vec<Taint>,
    },
    Evict {
        pod: Arc<Pod>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeState {
    Ready,
    NotReady,
    Silent,
}

impl Health {
    pub(super) fn plan(
        &mut self,
        nodes: &[Arc<Node>],
        leases: &HashMap<String, Arc<Lease>>,
        pods_of: impl Fn(&str) -> Vec<Arc<Pod>>,
        config: &Config,
        now: Instant,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        let names: HashSet<_> = nodes.iter().filter_map(|node| node.metadata.name.as_deref()).collect();
        self.nodes.retain(|name, _| names.contains(name.as_str()));
        let mut states = Vec::with_capacity(nodes.len());
        for node in nodes {
            let name = node.name_any();
            let state =
                self.observe(node, leases.get(&name).and_then(|lease| lease.spec.as_ref()), config, now);
            if state == NodeState::Silent && ready_status(node) != Some("Unknown") {
                steps.push(Step::MarkUnknown { node: name.clone() });
                let ready = pods_of(&name).into_iter().filter(|pod| is_active(pod) && is_ready(pod));
                steps.extend(ready.map(|pod| Step::MarkPodNotReady { pod }));
            }
            states.push((node, name, state));
        }
        self.limit(&states, config, now);
        for (node, name, state) in states {
            let Some(health) = self.nodes.get_mut(&name) else { continue };
            steps.extend(taint_step(node, state, health.executes.is_some()));
            health.observe_taints(node, now);
            if health.executes.is_none() && health.taints.is_empty() {
                continue;
            }
            let tainted = health.executes.map(|since| now.duration_since(since));
            let evicted = pods_of(&name).into_iter().filter(|pod| {
                tainted.is_some_and(|tainted| must_go(pod, state, tainted, config)) || health.evicts(pod, now)
            });
            steps.extend(evicted.map(|pod| Step::Evict { pod }));
        }
        steps
    }

    /// Records a node's lease and state.
    fn observe(
        &mut self,
        node: &Node,
        lease: Option<&LeaseSpec>,
        config: &Config,
        now: Instant,
    ) -> NodeState {
        let renewed = lease.and_then(|lease| lease.renew_time.clone());
        // A node whose lease has a longer duration is not silent before that.
        let duration = lease.and_then(|lease| u64::try_from(lease.lease_duration_seconds?).ok());
        let grace = config.grace.max(Duration::from_secs(duration.unwrap_or(0)));
        let health = self.nodes.entry(node.name_any()).or_insert_with(|| NodeHealth {
            renewed: renewed.clone(),
            heard: now,
            unwell: None,
            executes: None,
            taints: Vec::new(),
        });
        if health.renewed != renewed {
            (health.renewed, health.heard) = (renewed, now);
        }
        let state = if now.duration_since(health.heard) > grace { NodeState::Silent } else { reported(node) };
        if state == NodeState::Ready {
            (health.unwell, health.executes) = (None, None);
        } else {
            health.unwell.get_or_insert(now);
        }
        state
    }

    /// Decides which of the nodes that are not ready have a NoExecute taint: those that have it keep it, the others get
    /// it at the rate of their zone, the one first that has been unhealthy for longest.
    fn limit(&mut self, states: &[(&Arc<Node>, String, NodeState)], config: &Config, now: Instant) {
        let mut counts: HashMap<ZoneKey, ZoneCount> = HashMap::new();
        for (node, _, state) in states.iter().filter(|(node, ..)| !is_excluded(node)) {
            let count = counts.entry(zone_of(node)).or_default();
            *(if *state == NodeState::Ready { &mut count.ready } else { &mut count.unready }) += 1;
        }
        self.limits.observe(&counts, &config.eviction_rates, now);
        let mut waiting = Vec::new();
        for (node, name, state) in states {
            let Some(health) = self.nodes.get_mut(name) else { continue };
            if self.limits.is_stopped() {
                health.executes = None;
            } else if *state != NodeState::Ready && health.executes.is_none() {
                match has_own_execute_taint(node) {
                    true => health.executes = Some(now),
                    false => waiting.push((health.unwell, node, name)),
                }
            }
        }
        waiting.sort_by_key(|(unwell, _, name)| (*unwell, *name));
        for (_, node, name) in waiting {
            if self.limits.try_take(&zone_of(node), now)
                && let Some(health) = self.nodes.get_mut(name)
            {
                health.executes = Some(now);
            }
        }
    }
}

/// Whether the node has a NoExecute taint that this controller sets.
fn has_own_execute_taint(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).into_iter().flatten();
    taints.into_iter().any(|taint| taint.effect == NO_EXECUTE && is_own(taint))
}

fn ready_status(node: &Node) -> Option<&str> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "Ready").map(|condition| condition.status.as_str())
}

fn reported(node: &Node) -> NodeState {
    match ready_status(node) {
        Some("True") => NodeState::Ready,
        // Marked by this controller: the node sends its lease again, and will update its condition.
        Some("Unknown") => NodeState::Silent,
        // The node has not reported yet, and is within its grace period.
        None => NodeState::Ready,
        _ => NodeState::NotReady,
    }
}

/// The annotation and taints that a node lacks by its object alone.
pub(super) fn mark(node: &Node) -> Option<Step> {
    let spec = node.spec.as_ref();
    let is_cordoned = spec.and_then(|spec| spec.unschedulable).unwrap_or(false);
    let mut taints = spec.and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let is_ours = |taint: &Taint| taint.key == UNSCHEDULABLE && taint.effect == "NoSchedule";
    let is_tainted = taints.iter().any(is_ours);
    let is_premature = |taint: &Taint| {
        taint.key == NOT_READY && ready_status(node).is_none() && taint.effect == "NoSchedule"
    };
    let changes = is_tainted != is_cordoned || taints.iter().any(is_premature);
    // The API taints a new node as not ready, but without a condition the node is neither ready nor not ready.
    taints.retain(|taint| !is_premature(taint));
    if is_cordoned && !is_tainted {
        let effect = "NoSchedule".into();
        taints.push(Taint { key: UNSCHEDULABLE.into(), effect, value: None, time_added: None });
    } else if !is_cordoned {
        taints.retain(|taint| !is_ours(taint));
    }
    let is_annotated = node.annotations().contains_key(ANNOTATION_TTL);
    (changes || !is_annotated).then(|| Step::Mark {
        node: node.name_any(),
        resource_version: node.metadata.resource_version.clone(),
        taints: changes.then_some(taints),
    })
}

/// The taints that a state requires, if the node has others. Taints of other components are kept. `executes`: the node
/// may have a NoExecute taint.
fn taint_step(node: &Node, state: NodeState, executes: bool) -> Option<Step> {
    let key = match state {
        NodeState::Ready => None,
        NodeState::NotReady => Some(NOT_READY),
        NodeState::Silent => Some(UNREACHABLE),
    };
    let effects: &[&str] = if executes { &["NoSchedule", NO_EXECUTE] } else { &["NoSchedule"] };
    let is_kept = |taint: &&Taint| {
        !is_own(taint) || (Some(taint.key.as_str()) == key && effects.contains(&taint.effect.as_str()))
    };
    let old = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let mut taints: Vec<_> = old.iter().filter(is_kept).cloned().collect();
    for effect in effects {
        if let Some(key) = key
            && !taints.iter().any(|taint| taint.key == key && taint.effect == *effect)
        {
            let effect = (*effect).to_owned();
            taints.push(Taint { key: key.into(), effect, value: None, time_added: None });
        }
    }
    let resource_version = node.metadata.resource_version.clone();
    (taints != old).then(|| Step::SetTaints { node: node.name_any(), resource_version, taints })
}

fn must_go(pod: &Pod, state: NodeState, tainted: Duration, config: &Config) -> bool {
    let key = match state {
        NodeState::Ready => return false,
        NodeState::NotReady => NOT_READY,
        NodeState::Silent => UNREACHABLE,
    };
    is_active(pod) && tolerated_for(pod, key, config).is_some_and(|limit| tainted >= limit)
}

/// The time for which a pod tolerates a NoExecute taint; `None`: without limit.
fn tolerated_for(pod: &Pod, key: &str, config: &Config) -> Option<Duration> {
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_ref());
    let mut matching = tolerations.into_iter().flatten().filter(|toleration| {
        let key_matches = match toleration.key.as_deref() {
            Some("") | None => toleration.operator.as_deref() == Some("Exists"),
            Some(known) => known == key,
        };
        key_matches && toleration.effect.as_deref().is_none_or(|e| e.is_empty() || e == NO_EXECUTE)
    });
    match matching.next() {
        None => Some(config.eviction_after),
        Some(first) => std::iter::once(first)
            .chain(matching)
            .filter_map(|toleration| toleration.toleration_seconds)
            .min()
            .map(|seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or(0))),
    }
}
