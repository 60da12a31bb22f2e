//! Limits of the speed of scaling; pure. (Upstream: `horizontal.go`, the parts about `behavior`.)

use std::collections::VecDeque;

use mayfly_api::k8s::{
    api::autoscaling::v2::{HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscalerBehavior},
    jiff::{SignedDuration, Timestamp},
};

/// Entries of either history that are kept for one autoscaler: an hour, the longest window, at one evaluation
/// each second.
const HISTORY_MAX: usize = 3600;
/// Upstream's default of `scaleDown.stabilizationWindowSeconds`.
const DOWN_WINDOW_SECONDS: i32 = 300;
/// The number of replicas that an autoscaler without `behavior` may always scale up to. Upstream's
/// `scaleUpLimitMinimum`.
const UP_MIN: i32 = 4;

/// The recent recommendations and scale events of one autoscaler.
#[derive(Debug, Default)]
pub(super) struct ScalingHistory {
    recommendations: VecDeque<(Timestamp, i32)>,
    /// Changes of the number of replicas.
    changes: VecDeque<(Timestamp, i32)>,
}

/// The number after stabilisation and limits, and what limited it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Limited {
    pub(super) replicas: i32,
    /// Reason and message of the condition `AbleToScale`.
    pub(super) stabilized: (&'static str, &'static str),
    /// Reason and message of the condition `ScalingLimited`; none: not limited.
    pub(super) limited: Option<(&'static str, &'static str)>,
}

impl ScalingHistory {
    /// Records the number of replicas at the first evaluation, so that a restart of this process forgets no scale-up.
    pub(super) fn begin(&mut self, current: i32, now: Timestamp) {
        if self.recommendations.is_empty() {
            self.recommendations.push_back((now, current));
        }
    }

    /// Records that the target was scaled.
    pub(super) fn scaled(&mut self, before: i32, after: i32, now: Timestamp) {
        push(&mut self.changes, (now, after.saturating_sub(before)));
    }

    fn recommended(&self, window_seconds: i32, now: Timestamp) -> impl Iterator<Item = i32> + '_ {
        let since = before(now, window_seconds);
        self.recommendations.iter().filter(move |(at, _)| *at > since).map(|(_, replicas)| *replicas)
    }

    /// Replicas added and removed within a period.
    fn changed(&self, period_seconds: i32, now: Timestamp) -> (i32, i32) {
        let since = before(now, period_seconds);
        let recent = self.changes.iter().filter(|(at, _)| *at > since).map(|(_, change)| *change);
        recent.fold((0, 0), |(added, removed), change| {
            (added.saturating_add(change.max(0)), removed.saturating_sub(change.min(0)))
        })
    }
}

fn push(history: &mut VecDeque<(Timestamp, i32)>, entry: (Timestamp, i32)) {
    history.push_back(entry);
    while history.len() > HISTORY_MAX {
        history.pop_front();
    }
}

fn before(now: Timestamp, seconds: i32) -> Timestamp {
    now.checked_sub(SignedDuration::from_secs(seconds.into())).unwrap_or(Timestamp::MIN)
}

fn policy(type_: &str, value: i32, period_seconds: i32) -> HPAScalingPolicy {
    HPAScalingPolicy { type_: type_.into(), value, period_seconds }
}

/// Applies the behavior to a proposal between `min` and `max`.
pub(super) fn limit(
    behavior: Option<&HorizontalPodAutoscalerBehavior>,
    history: &mut ScalingHistory,
    (current, desired): (i32, i32),
    (min, max): (i32, i32),
    now: Timestamp,
) -> Limited {
    let up = behavior.and_then(|behavior| behavior.scale_up.clone()).unwrap_or_default();
    let down = behavior.and_then(|behavior| behavior.scale_down.clone()).unwrap_or_default();
    let up_window = up.stabilization_window_seconds.unwrap_or(0);
    let down_window = down.stabilization_window_seconds.unwrap_or(DOWN_WINDOW_SECONDS);
    let lowest = history.recommended(up_window, now).fold(desired, i32::min);
    let highest = history.recommended(down_window, now).fold(desired, i32::max);
    push(&mut history.recommendations, (now, desired));
    let stable = current.max(lowest).min(highest);
    let stabilized = match stable.cmp(&desired) {
        std::cmp::Ordering::Greater => (
            "ScaleDownStabilized",
            "recent recommendations were higher than current one, applying the highest recent recommendation",
        ),
        std::cmp::Ordering::Less => (
            "ScaleUpStabilized",
            "recent recommendations were lower than current one, applying the lowest recent recommendation",
        ),
        std::cmp::Ordering::Equal => ("ReadyForNewScale", "recommended size matches current size"),
    };
    let (replicas, limited) = match stable.cmp(&current) {
        std::cmp::Ordering::Greater => {
            // Without `behavior`, upstream has one fixed limit instead of the default policies.
            let limit = match behavior {
                Some(_) => rise_limit(&up, history, current, now),
                None => current.saturating_mul(2).max(UP_MIN),
            };
            rise(limit.max(current), stable, max)
        }
        std::cmp::Ordering::Less => fall(&down, history, current, stable, min, now),
        std::cmp::Ordering::Equal => within(stable, min, max),
    };
    Limited { replicas, stabilized, limited }
}

type Clamped = (i32, Option<(&'static str, &'static str)>);

const TOO_MANY: (&str, &str) =
    ("TooManyReplicas", "the desired replica count is more than the maximum replica count");
const TOO_FEW: (&str, &str) =
    ("TooFewReplicas", "the desired replica count is less than the minimum replica count");

fn within(stable: i32, min: i32, max: i32) -> Clamped {
    if stable > max {
        (max, Some(TOO_MANY))
    } else if stable < min {
        (min, Some(TOO_FEW))
    } else {
        (stable, None)
    }
}

/// The highest number of replicas that the policies allow now.
fn rise_limit(rules: &HPAScalingRules, history: &ScalingHistory, current: i32, now: Timestamp) -> i32 {
    let default = [policy("Pods", 4, 15), policy("Percent", 100, 15)];
    let policies = rules.policies.as_deref().filter(|policies| !policies.is_empty()).unwrap_or(&default);
    let limits = policies.iter().map(|policy| {
        let (added, removed) = history.changed(policy.period_seconds, now);
        let start = current.saturating_sub(added).saturating_add(removed);
        match policy.type_.as_str() {
            "Percent" => percent(start, 100_i64.saturating_add(policy.value.into()), true),
            _ => start.saturating_add(policy.value),
        }
    });
    match rules.select_policy.as_deref() {
        Some("Disabled") => current,
        Some("Min") => limits.min().unwrap_or(current),
        _ => limits.max().unwrap_or(current),
    }
}

fn rise(limit: i32, stable: i32, max: i32) -> Clamped {
    if stable > max.min(limit) {
        let reason = if limit < max {
            ("ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate")
        } else {
            TOO_MANY
        };
        return (max.min(limit), Some(reason));
    }
    (stable, None)
}

fn fall(
    rules: &HPAScalingRules,
    history: &ScalingHistory,
    current: i32,
    stable: i32,
    min: i32,
    now: Timestamp,
) -> Clamped {
    let default = [policy("Percent", 100, 15)];
    let policies = rules.policies.as_deref().filter(|policies| !policies.is_empty()).unwrap_or(&default);
    let limits = policies.iter().map(|policy| {
        let (added, removed) = history.changed(policy.period_seconds, now);
        let start = current.saturating_sub(added).saturating_add(removed);
        match policy.type_.as_str() {
            "Percent" => percent(start, 100_i64.saturating_sub(policy.value.into()), false),
            _ => start.saturating_sub(policy.value),
        }
    });
    // The policy that changes least has the highest limit here.
    let limit = match rules.select_policy.as_deref() {
        Some("Disabled") => current,
        Some("Min") => limits.max().unwrap_or(current),
        _ => limits.min().unwrap_or(current),
    };
    let limit = limit.min(current);
    if stable < min.max(limit) {
        let reason = if limit > min {
            ("ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate")
        } else {
            TOO_FEW
        };
        return (min.max(limit), Some(reason));
    }
    (stable, None)
}

fn percent(number: i32, percent: i64, round_up: bool) -> i32 {
    let product = i64::from(number).saturating_mul(percent.max(0));
    let rounded = if round_up { product.saturating_add(99) / 100 } else { product / 100 };
    i32::try_from(rounded).unwrap_or(i32::MAX)
}
