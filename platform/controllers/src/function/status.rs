//! The statuses of a function and its revisions. Pure.

use mayfly_api::{
    FunctionStatus, RevisionStatus,
    function::TrafficTarget,
    k8s::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp},
};

use super::{
    Config,
    plan::{self, FunctionSnapshot, LostHost, Readiness, RevisionState},
};
use crate::metadata::condition;

pub(super) const READY: &str = "Ready";
pub(super) const ACTIVE: &str = "Active";
/// The reason why a function with a ready revision is not ready until the gateway has its route.
pub(super) const ROUTE_PENDING: &str = "RoutePending";
/// Whether the hosts of a function's tags belong to it. Present only for functions with tags.
pub(super) const TAG_HOSTS: &str = "TagHosts";

/// The reason why something is not ready: a reason for programs, a message for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NotReady {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl Readiness {
    pub(super) fn not_ready(&self) -> Option<NotReady> {
        let (reason, message) = match self {
            Self::Ready => return None,
            Self::RuntimeMissing { source: "image" } => (
                "RuntimeMissing",
                "this server runs no containers, which spec.source.image needs: `mayfly up --containers on` says \
                 what is missing"
                    .to_owned(),
            ),
            Self::RuntimeMissing { source } => (
                "RuntimeMissing",
                format!(
                    "the revision was made before spec.source.{source} could be pulled and names no component: \
                     change the function, and a new revision pulls it"
                ),
            ),
            Self::ComponentMissing { digest } => (
                "ComponentMissing",
                format!(
                    "component {digest} is not in the artifact store: upload it with `mayfly deploy`, or PUT \
                     it to /artifacts/{digest}"
                ),
            ),
            Self::Compiling { message } => {
                let message = message.clone();
                ("Compiling", message.unwrap_or_else(|| "the component is being compiled".to_owned()))
            }
            Self::EnvironmentMissing { message } => {
                ("EnvironmentMissing", format!("{message}: create it, or take it out of spec.env"))
            }
            Self::ComponentInvalid { message } => ("ComponentInvalid", message.clone()),
        };
        Some(NotReady { reason, message })
    }
}

/// The status of a function.
pub(super) fn function(snapshot: &FunctionSnapshot, config: &Config, now: Timestamp) -> FunctionStatus {
    let function = &snapshot.function;
    let old = function.status.clone().unwrap_or_default();
    let generation = function.metadata.generation;
    let namespace = function.metadata.namespace.as_deref().unwrap_or_default();
    let not_ready = not_ready(snapshot);
    let ready = match &not_ready {
        None => condition(&old.conditions, READY, true, "Ready", String::new(), generation, now),
        Some(NotReady { reason, message }) => {
            condition(&old.conditions, READY, false, reason, message.clone(), generation, now)
        }
    };
    FunctionStatus {
        url: function
            .spec
            .visibility
            .is_public()
            .then(|| format!("{}/fn/{namespace}/{}/", config.gateway_url, snapshot.name())),
        latest_revision: snapshot.latest().map(|state| state.name().to_owned()),
        latest_ready_revision: snapshot.latest_ready().map(|state| state.name().to_owned()),
        ready_replicas: snapshot.revisions.values().map(RevisionState::ready_replicas).sum(),
        observed_generation: generation,
        conditions: [Some(ready), tag_hosts(snapshot, &old.conditions, now)].into_iter().flatten().collect(),
        triggers: old.triggers,
    }
}

/// Whether a status becomes Ready for a revision for which the previous one was not: then requests must be routed to
/// it too.
pub(super) fn becomes_ready(before: Option<&FunctionStatus>, wanted: &FunctionStatus) -> bool {
    let is_ready = |status: &FunctionStatus| {
        status.conditions.iter().any(|known| known.type_ == READY && known.status == "True")
    };
    let same = |before: &FunctionStatus| {
        is_ready(before)
            && before.observed_generation == wanted.observed_generation
            && before.latest_ready_revision == wanted.latest_ready_revision
    };
    is_ready(wanted) && !before.is_some_and(same)
}

/// The status of a function that can answer, and to which requests are not routed yet.
pub(super) fn without_route(mut wanted: FunctionStatus, old: &[Condition], now: Timestamp) -> FunctionStatus {
    let generation = wanted.observed_generation;
    for ready in wanted.conditions.iter_mut().filter(|known| known.type_ == READY) {
        let message = "the gateway has not taken the route yet".to_owned();
        *ready = condition(old, READY, false, ROUTE_PENDING, message, generation, now);
    }
    wanted
}

fn tag_hosts(snapshot: &FunctionSnapshot, old: &[Condition], now: Timestamp) -> Option<Condition> {
    plan::tag_hosts(&snapshot.function).next()?;
    let generation = snapshot.function.metadata.generation;
    if snapshot.lost_hosts.is_empty() {
        return Some(condition(old, TAG_HOSTS, true, "Claimed", String::new(), generation, now));
    }
    let lost = snapshot.lost_hosts.iter().map(|LostHost { tag, label, holder }| {
        format!("{holder} has the host {label}, which tag {tag} asks for: reach the tag by the header mayfly-tag, or rename it")
    });
    let message = lost.collect::<Vec<_>>().join("; ");
    Some(condition(old, TAG_HOSTS, false, "RouteConflict", message, generation, now))
}

/// The first obstacle that keeps a target of the traffic from answering.
fn not_ready(snapshot: &FunctionSnapshot) -> Option<NotReady> {
    if snapshot.needs_revision() {
        if let Some(Err(message)) = &snapshot.fetched {
            return Some(NotReady { reason: "SourceUnavailable", message: message.clone() });
        }
        let message = "the revision of this spec is being made".into();
        return Some(NotReady { reason: "RevisionPending", message });
    }
    snapshot.targets().iter().find_map(|target| target_not_ready(snapshot, target))
}

fn target_not_ready(snapshot: &FunctionSnapshot, target: &TrafficTarget) -> Option<NotReady> {
    if let Some(name) = &target.revision {
        let Some(state) = snapshot.revision(name) else {
            let known: Vec<_> = snapshot.revisions.values().map(RevisionState::name).collect();
            let message = format!(
                "traffic names revision {name}, which does not exist (until it does, requests go where they went \
                 before, or to the latest revision); there is: {}",
                if known.is_empty() { "none".to_owned() } else { known.join(", ") }
            );
            return Some(NotReady { reason: "RevisionMissing", message });
        };
        return state.readiness.not_ready();
    }
    let mut not_ready = snapshot.latest()?.readiness.not_ready()?;
    if let Some(ready) = snapshot.latest_ready() {
        let with = match snapshot.latest().is_some_and(|latest| latest.name() == ready.name()) {
            true => " with the values it had, as long as this server runs",
            false => "",
        };
        not_ready.message =
            format!("{}; until then revision {} answers{with}", not_ready.message, ready.name());
    }
    Some(not_ready)
}

/// The status of one of its revisions.
pub(super) fn revision(state: &RevisionState, now: Timestamp) -> RevisionStatus {
    let revision = &state.revision;
    let old = revision.status.clone().unwrap_or_default();
    let generation = revision.metadata.generation;
    let ready = match state.readiness.not_ready() {
        None => condition(&old.conditions, READY, true, "Ready", String::new(), generation, now),
        Some(NotReady { reason, message }) => {
            condition(&old.conditions, READY, false, reason, message, generation, now)
        }
    };
    let replicas = state.replica_set.as_ref().and_then(|set| set.spec.as_ref()?.replicas).unwrap_or(0);
    let (active, reason) = if replicas > 0 { (true, "Scaled") } else { (false, "ScaledToZero") };
    let active = condition(&old.conditions, ACTIVE, active, reason, String::new(), generation, now);
    RevisionStatus {
        ready_replicas: state.ready_replicas(),
        observed_generation: generation,
        component: old.component,
        conditions: vec![ready, active],
    }
}
