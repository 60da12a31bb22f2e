//! The next actions of a schedule. Pure.
//!
//! ```text
//!  decided ──▶ the first time after it ──┬─ not yet ─────────────────▶ Wait
//!                                        ├─ past its deadline ───────▶ Skip, up to the deadline
//!                                        ├─ late, and enough newer ──▶ Skip, up to the newest `catch_up`
//!                                        ├─ an earlier one is running: Forbid ─▶ Skip · Replace ─▶ Start, stopping it
//!                                        └───────────────────────────▶ Start
//! ```
//! Each step moves `decided` forward, so that asking again comes to an end at Wait.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use mayfly_api::workflow::{Overlap, schedule::Times};
use sha2::{Digest as _, Sha256};

/// The greatest delay of a start that counts as on time, not as missed.
pub(super) const ON_TIME: SignedDuration = SignedDuration::from_secs(10);

/// A schedule, compiled.
#[derive(Clone, Debug)]
pub(super) struct ScheduleRule {
    pub(super) times: Times,
    pub(super) overlap: Overlap,
    pub(super) catch_up: u32,
    pub(super) deadline: Option<SignedDuration>,
    pub(super) jitter: Duration,
    /// Tells the jitter of one trigger from another's.
    pub(super) seed: String,
}

/// The next thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing before this moment; `None`: never again.
    Wait(Option<Timestamp>),
    /// Start the execution of this time; with `replace`, after the active ones are stopped.
    Start { scheduled: Timestamp, replace: bool },
    /// Start nothing for the times up to and with this one.
    Skip { through: Timestamp, why: Why },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    TooLate,
    Missed,
    Overlap,
}

impl Why {
    pub(super) fn message(self) -> &'static str {
        match self {
            Self::TooLate => "not started: its startingDeadline had passed",
            Self::Missed => {
                "not started: it was missed while the server was down, and catchUp makes up for no more"
            }
            Self::Overlap => "not started: an earlier execution is still running (overlap: Forbid)",
        }
    }
}

impl ScheduleRule {
    /// By how much the start of a time is put off: always the same for the same time.
    pub(super) fn delay(&self, scheduled: Timestamp) -> SignedDuration {
        let most = self.jitter.as_millis();
        if most == 0 {
            return SignedDuration::ZERO;
        }
        let digest = Sha256::digest(format!("{}/{}", self.seed, scheduled.as_second()));
        let draw = u128::from(u64::from_be_bytes(digest[..8].try_into().unwrap_or_default())) % most;
        SignedDuration::from_millis(i64::try_from(draw).unwrap_or(0))
    }
}

/// The next step at `now`, when all times up to `decided` are decided; `active`: whether an execution of this trigger
/// is running.
pub(super) fn plan(rule: &ScheduleRule, decided: Timestamp, active: bool, now: Timestamp) -> Step {
    let Some(first) = rule.times.after(decided) else { return Step::Wait(None) };
    let due = first.checked_add(rule.delay(first)).unwrap_or(Timestamp::MAX);
    if due > now {
        return Step::Wait(Some(due));
    }
    if let Some(deadline) = rule.deadline
        && now.duration_since(due) > deadline
    {
        // A time older than the deadline, without jitter, is too late.
        let before = now.checked_sub(deadline + rule.delay_max()).unwrap_or(Timestamp::MIN);
        let through = rule.times.before(before).map_or(first, |last| last.max(first));
        return Step::Skip { through, why: Why::TooLate };
    }
    if now.duration_since(due) > ON_TIME
        && let Some(through) = missed(rule, first, now)
    {
        return Step::Skip { through, why: Why::Missed };
    }
    match rule.overlap {
        Overlap::Forbid if active => Step::Skip { through: first, why: Why::Overlap },
        Overlap::Replace if active => Step::Start { scheduled: first, replace: true },
        _ => Step::Start { scheduled: first, replace: false },
    }
}

/// The newest of the late times that are not made up for; `None`: `first` is made up for.
fn missed(rule: &ScheduleRule, first: Timestamp, now: Timestamp) -> Option<Timestamp> {
    let mut end = now.checked_sub(ON_TIME + rule.delay_max()).ok()?;
    for _ in 0..rule.catch_up {
        end = rule.times.before(end).filter(|time| *time > first)?;
    }
    // Without jitter the first is late itself; with it, it may be the only one.
    Some(rule.times.before(end).map_or(first, |time| time.max(first)))
}

impl ScheduleRule {
    fn delay_max(&self) -> SignedDuration {
        SignedDuration::try_from(self.jitter).unwrap_or(SignedDuration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn rule(cron: &str) -> ScheduleRule {
        let times = Times::parse(cron, None, at("2026-01-01T00:00:00Z")).unwrap();
        ScheduleRule {
            times,
            overlap: Overlap::Allow,
            catch_up: 1,
            deadline: None,
            jitter: Duration::ZERO,
            seed: "s".into(),
        }
    }

    /// Everything that is decided at one moment; how it ends.
    fn decide(
        rule: &ScheduleRule,
        mut decided: Timestamp,
        active: bool,
        now: Timestamp,
    ) -> (Vec<Step>, Timestamp) {
        let mut steps = Vec::new();
        loop {
            let step = plan(rule, decided, active, now);
            match step {
                Step::Wait(_) => return (steps, decided),
                Step::Start { scheduled: through, .. } | Step::Skip { through, .. } => {
                    assert!(through > decided, "{step:?} does not move on from {decided}");
                    assert!(through <= now, "{step:?} decides on what is to come");
                    decided = through;
                }
            }
            steps.push(step);
            assert!(steps.len() < 5_000, "no end");
        }
    }

    fn starts(steps: &[Step]) -> Vec<String> {
        let times = steps.iter().filter_map(|step| match step {
            Step::Start { scheduled, .. } => Some(scheduled.to_string()),
            _ => None,
        });
        times.collect()
    }

    #[test]
    fn a_time_is_waited_for_and_started_once() {
        let rule = rule("0 * * * *");
        let before = at("2026-11-21T10:00:00Z");
        assert_eq!(
            plan(&rule, before, false, at("2026-11-21T10:59:59Z")),
            Step::Wait(Some(at("2026-11-21T11:00:00Z")))
        );
        let (steps, decided) = decide(&rule, before, false, at("2026-11-21T11:00:00.004Z"));
        assert_eq!(starts(&steps), ["2026-11-21T11:00:00Z"]);
        assert_eq!(decide(&rule, decided, false, at("2026-11-21T11:00:01Z")).0, []);
    }

    #[test]
    fn what_was_missed_is_made_up_for_as_far_as_is_asked() {
        let (down, up) = (at("2026-11-21T10:00:00Z"), at("2026-11-21T14:30:00Z"));
        for (catch_up, expected) in [
            (0, &[][..]),
            (1, &["2026-11-21T14:00:00Z"]),
            (2, &["2026-11-21T13:00:00Z", "2026-11-21T14:00:00Z"]),
            (
                9,
                &[
                    "2026-11-21T11:00:00Z",
                    "2026-11-21T12:00:00Z",
                    "2026-11-21T13:00:00Z",
                    "2026-11-21T14:00:00Z",
                ],
            ),
        ] {
            let rule = ScheduleRule { catch_up, ..rule("0 * * * *") };
            assert_eq!(starts(&decide(&rule, down, false, up).0), expected, "catchUp {catch_up}");
        }
        // A start that is on time is not a missed one.
        let rule = ScheduleRule { catch_up: 0, ..rule("0 * * * *") };
        assert_eq!(
            starts(&decide(&rule, down, false, at("2026-11-21T14:00:03Z")).0),
            ["2026-11-21T14:00:00Z"]
        );
        // A year of seconds is skipped in a few steps.
        let rule = ScheduleRule { catch_up: 3, ..super::tests::rule("* * * * * *") };
        let (steps, _) = decide(&rule, at("2025-11-21T10:00:00Z"), false, up);
        assert!(steps.len() < 20, "{}", steps.len());
    }

    #[test]
    fn a_deadline_is_kept() {
        let rule = ScheduleRule {
            catch_up: 9,
            deadline: Some(SignedDuration::from_secs(5_400)),
            ..rule("0 * * * *")
        };
        let (steps, _) = decide(&rule, at("2026-11-21T10:00:00Z"), false, at("2026-11-21T14:10:00Z"));
        assert_eq!(starts(&steps), ["2026-11-21T13:00:00Z", "2026-11-21T14:00:00Z"]);
    }

    #[test]
    fn overlaps() {
        let (before, now, time) =
            (at("2026-11-21T10:00:00Z"), at("2026-11-21T11:00:00Z"), at("2026-11-21T11:00:00Z"));
        for (overlap, active, expected) in [
            (Overlap::Allow, true, Step::Start { scheduled: time, replace: false }),
            (Overlap::Forbid, true, Step::Skip { through: time, why: Why::Overlap }),
            (Overlap::Forbid, false, Step::Start { scheduled: time, replace: false }),
            (Overlap::Replace, true, Step::Start { scheduled: time, replace: true }),
        ] {
            let rule = ScheduleRule { overlap, ..rule("0 * * * *") };
            assert_eq!(plan(&rule, before, active, now), expected, "{overlap:?}");
        }
    }

    proptest! {
        /// However the clock jumps, and whenever it stops: no time is started twice or out of order, none that is
        /// still to come, never more of the missed than asked for, and none of what was on time is left out.
        #[test]
        fn schedules_hold(
            jumps in proptest::collection::vec(1u32..40_000, 1..40),
            catch_up in 0u32..4,
            jitter_s in prop_oneof![Just(0u64), 1u64..300],
            deadline in proptest::option::of(1i64..20_000),
            every in prop_oneof![Just("*/7 * * * *"), Just("0 * * * *"), Just("*/20 * * * * *")],
        ) {
            let deadline = deadline.map(SignedDuration::from_secs);
            let rule = ScheduleRule { catch_up, deadline, jitter: Duration::from_secs(jitter_s), ..rule(every) };
            let begin = at("2026-11-21T10:00:00Z");
            let (mut now, mut decided, mut last) = (begin, begin, begin);
            for jump in jumps {
                now = now.checked_add(SignedDuration::from_secs(i64::from(jump))).unwrap();
                let (steps, after) = decide(&rule, decided, false, now);
                let mut late = 0;
                for step in &steps {
                    if let Step::Start { scheduled, .. } = step {
                        prop_assert!(*scheduled > last && *scheduled <= now);
                        last = *scheduled;
                        let due = *scheduled + rule.delay(*scheduled);
                        prop_assert!(due <= now);
                        let lateness = now.duration_since(due);
                        if let Some(deadline) = deadline {
                            prop_assert!(lateness <= deadline, "{lateness:?} late");
                        }
                        late += u32::from(now.duration_since(*scheduled) > ON_TIME + rule.delay_max());
                    }
                }
                prop_assert!(late <= catch_up, "{late} missed starts were made up for");
                decided = after;
            }
        }

        /// With a clock that is looked at often, every time is started.
        #[test]
        fn nothing_is_left_out(looks in proptest::collection::vec(1u32..5, 100..400), jitter_s in 0u64..10) {
            let rule = ScheduleRule { catch_up: 0, jitter: Duration::from_secs(jitter_s), ..rule("*/15 * * * * *") };
            let begin = at("2026-11-21T10:00:00Z");
            let (mut now, mut decided, mut started) = (begin, begin, 0);
            for look in looks {
                now = now.checked_add(SignedDuration::from_secs(i64::from(look))).unwrap();
                let (steps, after) = decide(&rule, decided, false, now);
                started += starts(&steps).len();
                prop_assert_eq!(starts(&steps).len(), steps.len());
                decided = after;
            }
            let passed = usize::try_from(decided.duration_since(begin).as_secs() / 15).unwrap();
            prop_assert_eq!(started, passed);
        }
    }
}
