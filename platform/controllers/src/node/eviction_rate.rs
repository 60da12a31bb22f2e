//! How fast nodes that are not ready may be tainted with NoExecute, by zone: when many nodes seem to be lost at the same
//! time, the network between them and the API is a more likely cause than the nodes. Pure: the time is an argument.
//!
//! ```text
//!   zone      ready nodes                     a node is tainted every
//!   normal    most                            1 / `rate`
//!   partial   `unhealthy_zone` are not        1 / `secondary_rate`; never in a zone of up to `large_zone` nodes
//!   full      none                            1 / `rate`; never while all zones are so, and existing taints go
//! ```
//!
//! (Behaviour: upstream's `handleDisruption` and `RateLimitedTimedQueue` in `pkg/controller/nodelifecycle`.)

use std::{collections::HashMap, time::Duration};

use kube::ResourceExt as _;
use mayfly_api::k8s::api::core::v1::Node;
use tokio::time::Instant;

/// The limits of tainting nodes with NoExecute. The default values are upstream's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvictionRates {
    /// Nodes a second in a zone whose nodes are mostly ready.
    pub rate: f64,
    /// Nodes a second in a large zone of which `unhealthy_zone` is not ready.
    pub secondary_rate: f64,
    /// The part of a zone's nodes, from 0 to 1, that makes the zone unhealthy when it is not ready.
    pub unhealthy_zone: f64,
    /// An unhealthy zone of up to so many nodes gets no taints at all.
    pub large_zone: usize,
}

impl Default for EvictionRates {
    fn default() -> Self {
        Self { rate: 0.1, secondary_rate: 0.01, unhealthy_zone: 0.55, large_zone: 50 }
    }
}

/// The label of nodes that are not counted in the state of their zone.
const EXCLUDED: &str = "node.kubernetes.io/exclude-disruption";
const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
/// A zone with fewer nodes that are not ready is normal, whatever their part is.
const UNREADY_MIN: usize = 3;

/// A zone: region and zone labels. Nodes without the labels share one.
pub(super) type ZoneKey = (String, String);

pub(super) fn zone_of(node: &Node) -> ZoneKey {
    let label = |name: &str| node.labels().get(name).cloned().unwrap_or_default();
    (label(REGION), label(ZONE))
}

pub(super) fn is_excluded(node: &Node) -> bool {
    node.labels().contains_key(EXCLUDED)
}

/// The nodes of a zone.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ZoneCount {
    pub(super) ready: usize,
    pub(super) unready: usize,
}

impl ZoneCount {
    fn state(self, rates: &EvictionRates) -> ZoneState {
        let number = |nodes: usize| f64::from(u32::try_from(nodes).unwrap_or(u32::MAX));
        let part = number(self.unready) / number(self.unready + self.ready).max(1.0);
        if self.ready == 0 && self.unready > 0 {
            ZoneState::Full
        } else if self.unready >= UNREADY_MIN && part >= rates.unhealthy_zone {
            ZoneState::Partial
        } else {
            ZoneState::Normal
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZoneState {
    Normal,
    Partial,
    Full,
}

/// Whether and how fast nodes may be tainted.
#[derive(Debug, Default)]
pub(super) struct EvictionLimits {
    zones: HashMap<ZoneKey, Limiter>,
    is_stopped: bool,
}

impl EvictionLimits {
    /// Sets the rate of each zone by its nodes.
    pub(super) fn observe(
        &mut self,
        counts: &HashMap<ZoneKey, ZoneCount>,
        rates: &EvictionRates,
        now: Instant,
    ) {
        self.zones.retain(|zone, _| counts.contains_key(zone));
        let states = counts.iter().map(|(zone, count)| (zone, *count, count.state(rates)));
        self.is_stopped = !counts.is_empty() && states.clone().all(|(_, _, state)| state == ZoneState::Full);
        for (zone, count, state) in states {
            let rate = match state {
                _ if self.is_stopped => 0.0,
                ZoneState::Normal | ZoneState::Full => rates.rate,
                ZoneState::Partial if count.ready + count.unready > rates.large_zone => rates.secondary_rate,
                ZoneState::Partial => 0.0,
            };
            let known = self.zones.entry(zone.clone());
            known.or_insert_with(|| Limiter::full(rates.rate, now)).set_rate(rate, now);
        }
    }

    /// Whether no node of any zone is ready: no node keeps a NoExecute taint for that.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Takes the permit for tainting one node of the zone, if there is one.
    pub(super) fn try_take(&mut self, zone: &ZoneKey, now: Instant) -> bool {
        // A zone without counted nodes has no state.
        self.zones.get_mut(zone).is_none_or(|limiter| limiter.try_take(now))
    }
}

/// A bucket for one permit.
#[derive(Debug)]
struct Limiter {
    /// Permits a second; 0: none.
    rate: f64,
    /// The bucket has its permit from this moment on.
    full_at: Instant,
}

impl Limiter {
    fn full(rate: f64, now: Instant) -> Self {
        Self { rate, full_at: now }
    }

    /// A changed rate starts with a permit if there is one now, otherwise without any.
    fn set_rate(&mut self, rate: f64, now: Instant) {
        if (rate - self.rate).abs() < f64::EPSILON {
            return;
        }
        let had_permit = self.try_take(now);
        *self = Self::full(rate, now);
        if !had_permit {
            self.full_at = now + self.pause();
        }
    }

    fn try_take(&mut self, now: Instant) -> bool {
        let has_permit = self.rate > 0.0 && now >= self.full_at;
        if has_permit {
            self.full_at = now + self.pause();
        }
        has_permit
    }

    /// The time in which a permit is refilled.
    fn pause(&self) -> Duration {
        if self.rate > 0.0 {
            Duration::try_from_secs_f64(1.0 / self.rate).unwrap_or(PAUSE_MAX)
        } else {
            PAUSE_MAX
        }
    }
}

/// A bound for very small rates.
const PAUSE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
