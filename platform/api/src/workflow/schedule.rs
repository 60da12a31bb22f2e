//! Times of a schedule: a cron expression in a time zone.
//!
//! At changes of the clock the rules are those of Vixie cron and of the crate `croner`: a schedule at fixed times (`30
//! 2 * * *`) whose time does not exist on that day starts at the first moment after the gap, and one whose time occurs
//! twice starts at the first occurrence; a schedule at intervals (`*/10 * * * *`) skips the gap and starts in both
//! passes of a repeated hour.

use croner::{
    Cron,
    parser::{CronParser, Year},
};
use jiff::{Timestamp, tz::TimeZone};

/// A cron expression in a time zone, parsed.
#[derive(Clone, Debug)]
pub struct Times {
    cron: Cron,
    zone: TimeZone,
}

/// The reason why a schedule is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSchedule {
    /// Not a cron expression.
    #[error("{0}; a schedule has five fields (minute hour day month weekday), or six with seconds in front")]
    Cron(String),
    /// A time zone that is not in this machine's database.
    #[error("this machine knows no such time zone; write it like Europe/Berlin (from /usr/share/zoneinfo)")]
    TimeZone,
    /// A date that never occurs, such as the 30th of February.
    #[error("no time in the next years fits it")]
    Never,
}

impl Times {
    /// Parses an expression of five fields, or six with seconds in front, and an IANA time zone; `None` is UTC.
    ///
    /// # Errors
    /// The expression or the time zone is invalid, or no time after `now` matches.
    pub fn parse(cron: &str, zone: Option<&str>, now: Timestamp) -> Result<Self, InvalidSchedule> {
        let parser = CronParser::builder().year(Year::Disallowed).build();
        let cron = parser.parse(cron).map_err(|error| InvalidSchedule::Cron(error.to_string()))?;
        let zone = match zone {
            None => TimeZone::UTC,
            Some(name) => TimeZone::get(name).map_err(|_| InvalidSchedule::TimeZone)?,
        };
        let times = Self { cron, zone };
        times.after(now).ok_or(InvalidSchedule::Never)?;
        Ok(times)
    }

    /// The first time after `instant`, to the second; `None` when none comes.
    pub fn after(&self, instant: Timestamp) -> Option<Timestamp> {
        let zoned = instant.to_zoned(self.zone.clone());
        let found = self.cron.find_next_occurrence(&zoned, false).ok()?.timestamp();
        // Fractions of a second belong to the second before.
        let whole = Timestamp::from_second(found.as_second()).ok()?;
        (whole > instant).then_some(whole)
    }

    /// The last time before `instant`, to the second; `None` when there was none.
    pub fn before(&self, instant: Timestamp) -> Option<Timestamp> {
        let zoned = instant.to_zoned(self.zone.clone());
        let found = self.cron.find_previous_occurrence(&zoned, false).ok()?.timestamp();
        let whole = Timestamp::from_second(found.as_second()).ok()?;
        (whole < instant).then_some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    /// The first times after an instant.
    fn times(cron: &str, zone: &str, after: &str, count: usize) -> Vec<String> {
        let times = Times::parse(cron, Some(zone), at(after)).unwrap();
        let next = |instant: &Timestamp| times.after(*instant);
        std::iter::successors(next(&at(after)), next).take(count).map(|time| time.to_string()).collect()
    }

    #[test]
    fn five_fields_and_six() {
        assert_eq!(
            times("*/15 * * * *", "UTC", "2026-11-21T10:07:30Z", 2),
            ["2026-11-21T10:15:00Z", "2026-11-21T10:30:00Z"]
        );
        assert_eq!(
            times("*/10 * * * * *", "UTC", "2026-11-21T10:07:30.5Z", 3),
            ["2026-11-21T10:07:40Z", "2026-11-21T10:07:50Z", "2026-11-21T10:08:00Z"]
        );
        assert_eq!(times("@daily", "Europe/Berlin", "2026-11-21T10:00:00Z", 1), ["2026-11-21T23:00:00Z"]);
        assert_eq!(times("0 9 * * MON-FRI", "UTC", "2026-11-20T10:00:00Z", 1), ["2026-11-23T09:00:00Z"]);
    }

    #[test]
    fn a_time_that_does_not_exist_comes_after_the_gap() {
        // Berlin, 29 March 2026: 2:00 becomes 3:00 at 01:00Z.
        assert_eq!(
            times("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", 2),
            ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]
        );
        assert_eq!(
            times("*/30 * * * *", "Europe/Berlin", "2026-03-29T00:15:00Z", 3),
            ["2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"]
        );
    }

    #[test]
    fn a_time_that_comes_twice_counts_once_unless_it_is_an_interval() {
        // Berlin, 25 October 2026: 3:00 becomes 2:00 at 01:00Z.
        assert_eq!(
            times("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 2),
            ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]
        );
        assert_eq!(
            times("*/30 * * * *", "Europe/Berlin", "2026-10-25T00:15:00Z", 3),
            ["2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z"]
        );
    }

    #[test]
    fn what_is_no_schedule_is_told() {
        let parse = |cron: &str, zone| Times::parse(cron, zone, at("2026-11-21T10:00:00Z")).map(drop);
        for cron in ["", "* * *", "61 * * * *", "* * * * * * *", "a * * * *"] {
            assert!(matches!(parse(cron, None), Err(InvalidSchedule::Cron(_))), "{cron}");
        }
        assert_eq!(parse("* * * * *", Some("Europe/Atlantis")), Err(InvalidSchedule::TimeZone));
        assert_eq!(parse("0 0 30 2 *", None), Err(InvalidSchedule::Never));
    }
}
