//! The decision: demand and time in, replicas out. No clock, no lock, no IO.
//!
//! ```text
//!             demand of the panic window ≥ threshold
//!   stable ──────────────────────────────────────────▶ panic: the larger of both windows, never down
//!      ▲                                                 │
//!      └───── a whole stable window below threshold ─────┘
//! ```
//!
//! The semantics and the order of steps are those of Knative's pod autoscaler (`pkg/autoscaler/scaling/autoscaler.go`).
//! Differences: demand is exact rather than scraped, and the last replica is removed after the function's `idleAfter`,
//! rather than after a window and a grace period.

use std::time::Duration;

use mayfly_api::function::Scaling;

use super::window::{GRANULARITY, Maximum, RequestTimeCurve};

/// The largest factor by which replicas grow in one step (Knative's `max-scale-up-rate`).
const SCALE_UP_RATE_MAX: f64 = 1000.0;
/// The largest factor by which replicas shrink in one step (Knative's `max-scale-down-rate`).
const SCALE_DOWN_RATE_MAX: f64 = 2.0;

/// The state of a revision at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observation {
    /// The time since a fixed moment.
    pub(crate) at: Duration,
    /// The total time that requests spent running or waiting since that moment.
    pub(crate) spent: Duration,
    /// The number of running and waiting requests.
    pub(crate) requests: u32,
    /// The number of running replicas.
    pub(crate) ready: u32,
    /// Whether any route leads to the revision.
    pub(crate) routed: bool,
    /// Whether its component is missing, so that no replica can start.
    pub(crate) lacks_component: bool,
}

/// The desired state of a revision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleDecision {
    pub(crate) replicas: u32,
    pub(crate) panicking: bool,
    /// Whether the decision cannot change without a new request: the replicas are at their minimum, and past demand has
    /// no effect any more.
    pub(crate) at_rest: bool,
}

/// Decides about one revision, and holds the state for that.
#[derive(Debug)]
pub(crate) struct Policy {
    scaling: Scaling,
    demand: RequestTimeCurve,
    delay: Maximum,
    panic: Option<Panic>,
    /// The time of the last request.
    busy_at: Duration,
    spent: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Panic {
    /// The last time that demand was above the panic threshold.
    over_at: Duration,
    replicas_most: u32,
}

impl Policy {
    /// Starts deciding. A revision that already has replicas keeps them for a window, since past demand is unknown
    /// (Knative starts in panic mode, too).
    pub(crate) fn new(scaling: &Scaling, start: &Observation) -> Self {
        let mut demand = RequestTimeCurve::new(scaling.window.0);
        demand.record(start.at, start.spent);
        let panic = (start.ready > 1).then_some(Panic { over_at: start.at, replicas_most: start.ready });
        Self {
            scaling: scaling.clone(),
            demand,
            delay: Maximum::new(scaling.scale_down_delay.0),
            panic,
            busy_at: start.at,
            spent: start.spent,
        }
    }

    pub(crate) fn decide(&mut self, seen: &Observation) -> ScaleDecision {
        self.demand.record(seen.at, seen.spent);
        if seen.requests > 0 || seen.spent > self.spent {
            self.busy_at = seen.at;
        }
        self.spent = seen.spent;

        let quiet = seen.at - self.busy_at;
        // `idleAfter` serves the next request; a revision without a route gets none.
        let idle = seen.requests == 0 && (quiet >= self.scaling.idle_after.0 || !seen.routed);
        let wanted = if idle || seen.lacks_component {
            self.panic = None;
            0
        } else if seen.routed {
            self.wanted(seen).max(1)
        } else {
            self.wanted(seen).max(u32::from(seen.requests > 0))
        };
        let fewest = if seen.routed { self.scaling.min } else { 0 };
        let bounded = wanted.clamp(fewest.min(self.scaling.max), self.scaling.max);
        let delayed = self.delay.record(seen.at, bounded);
        let replicas = if idle && !seen.routed { 0 } else { delayed };
        let forgotten = if fewest == 0 { idle } else { quiet >= self.scaling.window.0 };
        ScaleDecision {
            replicas,
            panicking: self.panic.is_some(),
            at_rest: forgotten && seen.requests == 0 && replicas == fewest,
        }
    }

    /// The replicas for the current demand.
    fn wanted(&mut self, seen: &Observation) -> u32 {
        let window = self.scaling.window.0;
        let panic_window = (window * self.scaling.panic_window_percent / 100).max(GRANULARITY);
        let target = f64::from(self.scaling.target.max(1));
        let ready = f64::from(seen.ready.max(1));
        let up_most = (ready * SCALE_UP_RATE_MAX).ceil();
        let down_most = if seen.routed { (ready / SCALE_DOWN_RATE_MAX).floor() } else { 0.0 };
        let limited = |replicas: f64| whole(replicas.max(down_most).min(up_most));

        let for_stable = (self.demand.average(window) / target).ceil();
        let for_panic = (self.demand.average(panic_window) / target).ceil();
        let over = for_panic / ready >= f64::from(self.scaling.panic_threshold_percent) / 100.0;
        self.panic = match self.panic {
            Some(panic) if over => Some(Panic { over_at: seen.at, ..panic }),
            Some(panic) if seen.at - panic.over_at > window => None,
            None if over => Some(Panic { over_at: seen.at, replicas_most: 0 }),
            unchanged => unchanged,
        };
        let stable = limited(for_stable);
        match &mut self.panic {
            None => stable,
            Some(panic) => {
                panic.replicas_most = panic.replicas_most.max(stable).max(limited(for_panic));
                panic.replicas_most
            }
        }
    }
}

fn whole(replicas: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
    let whole = replicas.clamp(0.0, f64::from(u32::MAX)) as u32;
    whole
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
