//! The gangs that hold nodes: a plain struct, no locks, no async; time comes in as an argument.
//!
//! A gang is planned as one decision (`state.rs`), so that no plan leaves a part of it. A part can still hold nodes
//! when a binding fails or a pod is lost later: a gang that stays incomplete for its timeout while another pod of it
//! waits gives its nodes back, so that two such gangs cannot block each other for ever.
//!
//! ```text
//!   absent ──(plan of all members)──▶ complete ◀──────────────┐ a pod is placed again
//!                                        │ a pod is lost       │
//!                                        ▼                     │
//!                                    incomplete ───────────────┘
//!                                        │ timeout, and a pod waits
//!                                        ▼
//!                                     released (its pods are removed; their controller makes new ones)
//! ```

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use mayfly_api::{
    ObjectKey,
    gang::{Gang, GangKey},
    k8s::api::core::v1::Pod,
};
use tokio::time::Instant;

use crate::request::is_finished;

#[derive(Debug, Default)]
pub struct Gangs {
    placed: HashMap<GangKey, PlacedGang>,
    gang_of: HashMap<ObjectKey, GangKey>,
}

#[derive(Debug)]
struct PlacedGang {
    size: usize,
    timeout: Duration,
    members: BTreeMap<ObjectKey, GangMember>,
    incomplete_since: Option<Instant>,
}

/// A pod that has a node, or had one until it succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GangMember {
    pub uid: String,
    /// Whether it has succeeded, and holds its node no more.
    pub succeeded: bool,
}

impl Gangs {
    /// Records the state of a pod in the API; `None` if it was removed.
    pub fn set_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>, now: Instant) {
        let placed = pod.and_then(|pod| {
            let node = pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty());
            let succeeded =
                pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Succeeded");
            let counts = node.is_some() && pod.metadata.deletion_timestamp.is_none();
            let gang = Gang::of(pod).ok().flatten().filter(|_| counts && (succeeded || !is_finished(pod)))?;
            Some((gang, GangMember { uid: pod.metadata.uid.clone().unwrap_or_default(), succeeded }))
        });
        match placed {
            Some((gang, member)) => self.place(&gang, key, member, now),
            None => self.remove(key, now),
        }
    }

    /// Records that a pod of the gang has a node.
    pub fn place(&mut self, gang: &Gang, key: &ObjectKey, member: GangMember, now: Instant) {
        if self.gang_of.get(key).is_some_and(|known| *known != gang.key) {
            self.remove(key, now);
        }
        self.gang_of.insert(key.clone(), gang.key.clone());
        let placed = self.placed.entry(gang.key.clone()).or_insert_with(|| PlacedGang {
            size: 0,
            timeout: gang.timeout,
            members: BTreeMap::new(),
            incomplete_since: None,
        });
        (placed.size, placed.timeout) = (usize::try_from(gang.size).unwrap_or(usize::MAX), gang.timeout);
        placed.members.insert(key.clone(), member);
        placed.judge(now);
    }

    /// Records that a pod of a gang lost its node.
    pub fn remove(&mut self, key: &ObjectKey, now: Instant) {
        let Some(gang) = self.gang_of.remove(key) else { return };
        let Some(placed) = self.placed.get_mut(&gang) else { return };
        placed.members.remove(key);
        placed.judge(now);
        if placed.members.is_empty() {
            self.placed.remove(&gang);
        }
    }

    /// The number of the gang's pods that have a node.
    pub fn count(&self, gang: &GangKey) -> usize {
        self.placed.get(gang).map_or(0, |placed| placed.members.len())
    }

    /// The time at which a gang will have been incomplete for its timeout.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.placed.values().filter_map(PlacedGang::deadline).min()
    }

    /// The pods that hold nodes of gangs whose timeout is over; `waits` returns whether a pod of the gang waits for a
    /// node. The timeout of each of these gangs starts again.
    pub fn overdue(&mut self, now: Instant, waits: impl Fn(&GangKey) -> bool) -> Vec<(ObjectKey, String)> {
        let mut released = Vec::new();
        for (key, gang) in &mut self.placed {
            if gang.deadline().is_none_or(|deadline| deadline > now) {
                continue;
            }
            gang.incomplete_since = Some(now);
            if waits(key) {
                let holding = gang.members.iter().filter(|(_, member)| !member.succeeded);
                released.extend(holding.map(|(key, member)| (key.clone(), member.uid.clone())));
            }
        }
        released.sort();
        released
    }
}

impl PlacedGang {
    fn judge(&mut self, now: Instant) {
        if self.members.len() >= self.size {
            self.incomplete_since = None;
        } else {
            self.incomplete_since.get_or_insert(now);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.incomplete_since?.checked_add(self.timeout)
    }
}
