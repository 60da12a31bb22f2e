//! Selects the retrier for an error, and its wait time. Pure.

use mayfly_workflows_language::definition::{Jitter, Retrier};

/// The decision of the retriers about an error.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RetryDecision {
    /// Try again after the wait.
    Retry {
        /// The index of the retrier.
        retrier: usize,
        /// The pause in milliseconds.
        wait_ms: i64,
    },
    /// No retrier matches, or the matching one has used up its attempts.
    GiveUp,
}

/// The error name that retriers and catchers may use for a missed heartbeat.
pub(super) const HEARTBEAT_TIMEOUT: &str = "States.HeartbeatTimeout";

/// Whether a list of `ErrorEquals` matches an error.
///
/// `States.ALL` matches every error except the two that AWS excludes from it; `States.TaskFailed` matches everything
/// except timeouts.
pub fn error_matches(error_equals: &[std::sync::Arc<str>], error: Option<&str>) -> bool {
    let error = error.unwrap_or_default();
    error_equals.iter().any(|name| match &**name {
        name if name == error => true,
        "States.ALL" => !matches!(error, "States.Runtime" | "States.DataLimitExceeded"),
        "States.TaskFailed" => !matches!(
            error,
            "States.Timeout" | HEARTBEAT_TIMEOUT | "States.Runtime" | "States.DataLimitExceeded"
        ),
        "States.Timeout" => error == HEARTBEAT_TIMEOUT,
        _ => false,
    })
}

/// Finds the first matching retrier. `attempts` counts the uses of each in this visit of the state; `matches` tells
/// whether a list of `ErrorEquals` matches the error; `roll` (0 to 1) is for `JitterStrategy: FULL`.
pub(crate) fn decide(
    retriers: &[Retrier],
    attempts: &[u32],
    matches: impl Fn(&[std::sync::Arc<str>]) -> bool,
    roll: impl FnOnce() -> f64,
) -> RetryDecision {
    let Some(index) = retriers.iter().position(|retrier| matches(&retrier.error_equals)) else {
        return RetryDecision::GiveUp;
    };
    let retrier = &retriers[index];
    let used = attempts.get(index).copied().unwrap_or(0);
    if u64::from(used) >= retrier.max_attempts {
        return RetryDecision::GiveUp;
    }
    let seconds = interval_seconds(retrier, used);
    let seconds = match retrier.jitter {
        Jitter::None => seconds,
        Jitter::Full => seconds * roll(),
    };
    #[expect(clippy::cast_possible_truncation, reason = "clamped to a century")]
    let wait_ms = (seconds * 1000.0).round().clamp(0.0, 3.2e12) as i64;
    RetryDecision::Retry { retrier: index, wait_ms }
}

/// The wait before attempt number `used + 1`, without jitter.
#[expect(clippy::cast_precision_loss, reason = "seconds are small")]
pub fn interval_seconds(retrier: &Retrier, used: u32) -> f64 {
    let grown =
        retrier.interval_seconds as f64 * retrier.backoff_rate.powi(i32::try_from(used).unwrap_or(i32::MAX));
    match retrier.max_delay_seconds {
        Some(max) => grown.min(max as f64),
        None => grown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retrier(names: &[&str]) -> Retrier {
        Retrier {
            error_equals: names.iter().map(|name| (*name).into()).collect(),
            interval_seconds: 2,
            max_attempts: 3,
            backoff_rate: 2.0,
            max_delay_seconds: None,
            jitter: Jitter::None,
            comment: None,
        }
    }

    #[test]
    fn waits_grow_up_to_the_delay() {
        let mut one = retrier(&["A"]);
        let wait = |one: &Retrier, used| decide(std::slice::from_ref(one), &[used], |_| true, || 0.5);
        assert_eq!(wait(&one, 0), RetryDecision::Retry { retrier: 0, wait_ms: 2_000 });
        assert_eq!(wait(&one, 2), RetryDecision::Retry { retrier: 0, wait_ms: 8_000 });
        assert_eq!(wait(&one, 3), RetryDecision::GiveUp);
        one.max_delay_seconds = Some(5);
        assert_eq!(wait(&one, 2), RetryDecision::Retry { retrier: 0, wait_ms: 5_000 });
        one.jitter = Jitter::Full;
        assert_eq!(wait(&one, 2), RetryDecision::Retry { retrier: 0, wait_ms: 2_500 });
    }

    #[test]
    fn the_first_that_takes_the_error_decides_alone() {
        let retriers = [retrier(&["A"]), retrier(&["States.ALL"])];
        let decide = |retriers: &[Retrier], attempts: &[u32], error| {
            decide(retriers, attempts, |error_equals| error_matches(error_equals, error), || 0.0)
        };
        assert_eq!(decide(&retriers, &[3, 0], Some("A")), RetryDecision::GiveUp);
        assert_eq!(
            decide(&retriers, &[3, 0], Some("B")),
            RetryDecision::Retry { retrier: 1, wait_ms: 2_000 }
        );
        assert_eq!(decide(&retriers[..1], &[], Some("B")), RetryDecision::GiveUp);
    }

    #[test]
    fn wild_cards_have_their_limits() {
        let matches = |name: &str, error: &str| super::error_matches(&[name.into()], Some(error));
        assert!(matches("States.ALL", "Anything"));
        assert!(matches("States.ALL", "States.Timeout"));
        assert!(!matches("States.ALL", "States.Runtime"));
        assert!(!matches("States.ALL", "States.DataLimitExceeded"));
        assert!(matches("States.Runtime", "States.Runtime"));
        assert!(matches("States.DataLimitExceeded", "States.DataLimitExceeded"));
        assert!(matches("States.TaskFailed", "Anything"));
        assert!(!matches("States.TaskFailed", "States.Timeout"));
        assert!(matches("States.Timeout", "States.HeartbeatTimeout"));
        assert!(!matches("State.ALL", "Anything"));
    }
}
