//! Golden scripts (demand over time in, decisions out) and properties.

use std::fmt::Write as _;

use mayfly_api::duration::Span;
use proptest::prelude::*;

use super::*;

/// A revision whose replicas follow the decision after a delay; the policy is called once a second.
struct Run {
    policy: Policy,
    at_s: u64,
    spent: Duration,
    load: u32,
    ready: u32,
    routed: bool,
    lacks_component: bool,
    /// Seconds until a decided replica is running.
    lag_s: u64,
    decided: Vec<u32>,
}

impl Run {
    fn new(scaling: &Scaling, ready: u32, lag_s: u64) -> Self {
        let start = Observation {
            at: Duration::ZERO,
            spent: Duration::ZERO,
            requests: 0,
            ready,
            routed: true,
            lacks_component: false,
        };
        Self {
            policy: Policy::new(scaling, &start),
            at_s: 0,
            spent: Duration::ZERO,
            load: 0,
            ready,
            routed: true,
            lacks_component: false,
            lag_s,
            decided: Vec::new(),
        }
    }

    fn observation(&self) -> Observation {
        Observation {
            at: Duration::from_secs(self.at_s),
            spent: self.spent,
            requests: self.load,
            ready: self.ready,
            routed: self.routed,
            lacks_component: self.lacks_component,
        }
    }

    /// Advances by one second.
    fn tick(&mut self) -> ScaleDecision {
        self.at_s += 1;
        self.spent += Duration::from_secs(u64::from(self.load));
        let decision = self.policy.decide(&self.observation());
        self.decided.push(decision.replicas);
        if let Some(past) = self.decided.len().checked_sub(usize::try_from(self.lag_s).unwrap() + 1) {
            self.ready = self.decided[past];
        }
        decision
    }
}

fn scaling(change: serde_json::Value) -> Scaling {
    serde_json::from_value(change).unwrap()
}

/// `script`: pairs of a second and the number of requests from then on. Compares each change of the decision as
/// `second:replicas`, with a `!` in panic mode.
fn check(scaling: &Scaling, start: (u32, u64), script: &[(u64, u32)], end_s: u64, expected: &str) {
    let mut run = Run::new(scaling, start.0, start.1);
    let mut shown = String::new();
    let mut last = None;
    for second in 0..end_s {
        if let Some((_, load)) = script.iter().find(|(at, _)| *at == second) {
            run.load = *load;
        }
        let decision = run.tick();
        let now = (decision.replicas, decision.panicking);
        if last != Some(now) {
            let panic = if decision.panicking { "!" } else { "" };
            write!(shown, " {}:{}{panic}", second + 1, decision.replicas).unwrap();
            last = Some(now);
        }
    }
    assert_eq!(shown.trim(), expected);
}

#[test]
fn one_request_wakes_and_idleness_ends() {
    // One request of two seconds: one replica, removed 60 s after the request ended.
    let scaling = scaling(serde_json::json!({"target": 10}));
    check(&scaling, (0, 1), &[(0, 1), (2, 0)], 100, "1:1 62:0");
}

#[test]
fn idle_after_is_each_functions_own() {
    let quick = scaling(serde_json::json!({"target": 10, "idleAfter": "5s"}));
    check(&quick, (0, 1), &[(0, 1), (2, 0)], 100, "1:1 7:0");
    let slow = scaling(serde_json::json!({"target": 10, "idleAfter": "3m"}));
    check(&slow, (0, 1), &[(0, 1), (2, 0)], 300, "1:1 182:0");
}

#[test]
fn steady_load_divides_by_the_target() {
    // 75 requests at a target of 10: the panic window reacts first (one second of 75 is 8 replicas, eight times the
    // capacity), and panic mode ends one stable window after demand fell below twice the capacity. 75 for 60 s then
    // still need 8.
    let scaling = scaling(serde_json::json!({"target": 10}));
    check(&scaling, (0, 1), &[(0, 75)], 200, "1:8! 63:8");
}

#[test]
fn growth_below_the_threshold_does_not_panic() {
    // It starts in panic mode, since it finds two replicas, and leaves it after one window. From 20 to 30 requests: the
    // stable average exceeds the capacity of two replicas at once.
    let scaling = scaling(serde_json::json!({"target": 10, "window": "10s"}));
    check(&scaling, (2, 0), &[(0, 20), (30, 30)], 60, "1:2! 11:2 31:3");
}

#[test]
fn panic_never_goes_down_and_lasts_a_window() {
    // A burst of 5 s: scaled up in panic mode at once. Demand is twice the capacity until second 23, so panic mode
    // lasts until 60 s after that. Then one request is left, but each step at most halves the running replicas.
    let scaling = scaling(serde_json::json!({"target": 10, "idleAfter": "10m"}));
    check(
        &scaling,
        (0, 1),
        &[(0, 1), (20, 400), (25, 1)],
        200,
        "1:1 21:7! 22:14! 23:21! 24:27! 25:34! 84:17 86:8 88:4 90:2 92:1",
    );
}

#[test]
fn bounds_hold() {
    let scaling = scaling(serde_json::json!({"target": 10, "min": 2, "max": 5, "idleAfter": "5s"}));
    check(&scaling, (0, 1), &[(0, 1000), (10, 0)], 200, "1:5! 15:2");
}

#[test]
fn scale_down_delay_holds_the_most_of_its_time() {
    // Without the delay: 3 until second 11, then 2, 1 from second 14, none from second 16. Each step comes 30 s later.
    let scaling = scaling(serde_json::json!({"target": 10, "window": "6s", "idleAfter": "6s",
        "scaleDownDelay": "30s", "panicThresholdPercent": 1000}));
    check(&scaling, (0, 1), &[(0, 30), (10, 0)], 100, "1:3 42:2 44:1 46:0");
}

#[test]
fn a_restart_keeps_what_runs_for_a_window() {
    let scaling = scaling(serde_json::json!({"target": 10, "idleAfter": "2m"}));
    check(&scaling, (6, 1), &[(0, 5)], 100, "1:6! 61:3 63:1");
}

#[test]
fn a_retired_revision_goes_when_its_last_request_ends() {
    let scaling = scaling(serde_json::json!({"target": 1, "min": 3}));
    let mut run = Run::new(&scaling, 3, 1);
    run.load = 2;
    assert_eq!(run.tick().replicas, 3);
    run.routed = false;
    for _ in 0..200 {
        assert!(run.tick().replicas >= 1);
    }
    run.load = 0;
    // `idleAfter` is one minute, but without a route no request can arrive.
    assert_eq!(run.tick().replicas, 0);
    assert!(run.tick().at_rest);
}

#[test]
fn what_cannot_start_is_not_asked_for() {
    let mut run = Run::new(&scaling(serde_json::json!({"target": 10, "idleAfter": "5s"})), 0, 1);
    (run.load, run.lacks_component) = (50, true);
    for _ in 0..20 {
        assert_eq!(run.tick().replicas, 0);
    }
    // The component was uploaded: waiting requests count at once.
    run.lacks_component = false;
    assert_eq!(run.tick().replicas, 5);
    // The minimum is configured and independent of demand.
    let mut kept = Run::new(&scaling(serde_json::json!({"min": 2})), 0, 1);
    (kept.load, kept.lacks_component) = (500, true);
    assert_eq!(kept.tick().replicas, 2);
}

#[test]
fn at_rest_means_that_nothing_changes() {
    for min in [0, 2] {
        let scaling = scaling(serde_json::json!({"target": 5, "min": min}));
        let mut run = Run::new(&scaling, min, 1);
        run.load = 50;
        for _ in 0..20 {
            assert!(!run.tick().at_rest);
        }
        run.load = 0;
        let mut rested = 0;
        for _ in 0..600 {
            let decision = run.tick();
            assert!(!decision.at_rest || decision.replicas == min);
            rested += u32::from(decision.at_rest);
        }
        assert!(rested > 500, "{rested}");
    }
}

proptest! {
    /// Under any load: limits hold, work has at least one replica, panic mode never shrinks, and after the end of
    /// demand the revision reaches its minimum and is at rest.
    #[test]
    fn sane_under_any_load(
        min in 0u32..3,
        max in 3u32..50,
        target in 1u32..100,
        window in 6u64..120,
        idle_after in 0u64..120,
        delay in 0u64..60,
        lag_s in 0u64..10,
        loads in prop::collection::vec((1u64..40, 0u32..2000), 1..12),
    ) {
        let scaling = Scaling {
            min, max, target,
            window: Span::from_secs(window),
            idle_after: Span::from_secs(idle_after),
            scale_down_delay: Span::from_secs(delay),
            ..Scaling::default()
        };
        let mut run = Run::new(&scaling, 0, lag_s);
        let mut before: Option<ScaleDecision> = None;
        for (seconds, load) in loads {
            run.load = load;
            for _ in 0..seconds {
                let decision = run.tick();
                prop_assert!((min..=max).contains(&decision.replicas));
                if load > 0 {
                    prop_assert!(decision.replicas >= 1);
                    prop_assert!(!decision.at_rest);
                }
                // A delayed value from before the panic may expire during it.
                if let Some(before) = before && before.panicking && decision.panicking && delay == 0 {
                    prop_assert!(decision.replicas >= before.replicas);
                }
                before = Some(decision);
            }
        }
        run.load = 0;
        for _ in 0..idle_after + delay + window + 2 {
            run.tick();
        }
        let last = run.tick();
        prop_assert_eq!(last.replicas, min);
        prop_assert!(last.at_rest);
    }

    /// A steady load gets the replicas that it divides to.
    #[test]
    fn steady_load_converges(load in 1u32..3000, target in 1u32..100) {
        let scaling = Scaling { target, max: 10_000, ..Scaling::default() };
        let mut run = Run::new(&scaling, 0, 1);
        run.load = load;
        let last = (0..200).map(|_| run.tick()).last().unwrap();
        prop_assert_eq!(last.replicas, load.div_ceil(target));
        prop_assert!(!last.panicking);
    }
}
