//! Parses timestamps as AWS does: Java's `ISO_OFFSET_DATE_TIME`, such as `2016-03-14T01:59:00Z`.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::Offset;

/// The instant; `None` if the text does not have the form `YYYY-MM-DDThh:mm[:ss[.fraction]](Z|±hh:mm[:ss])`.
pub fn parse(text: &str) -> Option<Timestamp> {
    let (date, time) = text.split_at_checked(10)?;
    let mut parts = date.split('-');
    let (year, month, day) =
        (digits(parts.next()?, 4)?, digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    if parts.next().is_some() {
        return None;
    }
    let time = time.strip_prefix(['T', 't'])?;
    let zone_at = time.find(['Z', 'z', '+', '-'])?;
    let (clock, zone) = time.split_at(zone_at);
    let (clock, nanos) = match clock.split_once('.') {
        // Only seconds can have a fraction.
        Some((clock, fraction)) if clock.len() == 8 => (clock, fraction_nanos(fraction)?),
        Some(_) => return None,
        None => (clock, 0),
    };
    let (hour, minute, second) = clock_parts(clock)?;
    let civil = DateTime::new(
        i16::try_from(year).ok()?,
        i8::try_from(month).ok()?,
        i8::try_from(day).ok()?,
        i8::try_from(hour).ok()?,
        i8::try_from(minute).ok()?,
        i8::try_from(second).ok()?,
        nanos,
    )
    .ok()?;
    offset(zone)?.to_timestamp(civil).ok()
}

fn digits(text: &str, len: usize) -> Option<i32> {
    (text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// `hh:mm` or `hh:mm:ss`.
fn clock_parts(text: &str) -> Option<(i32, i32, i32)> {
    let mut parts = text.split(':');
    let (hour, minute) = (digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    let second = parts.next().map_or(Some(0), |second| digits(second, 2))?;
    parts.next().is_none().then_some((hour, minute, second))
}

fn fraction_nanos(text: &str) -> Option<i32> {
    if text.is_empty() || text.len() > 9 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    format!("{text:0<9}").parse().ok()
}

fn offset(text: &str) -> Option<Offset> {
    if matches!(text, "Z" | "z") {
        return Some(Offset::UTC);
    }
    let (sign, rest) = text.split_at_checked(1)?;
    let (hours, minutes, seconds) = clock_parts(rest)?;
    if minutes > 59 || seconds > 59 {
        return None;
    }
    let total = hours * 3600 + minutes * 60 + seconds;
    // Java allows offsets of at most 18 hours.
    (total <= 18 * 3600)
        .then(|| Offset::from_seconds(if sign == "-" { -total } else { total }).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_timestamps_are_parsed() {
        let at = |text: &str| parse(text).unwrap_or_else(|| panic!("{text}")).to_string();
        assert_eq!(at("2016-03-14T01:59:00Z"), "2016-03-14T01:59:00Z");
        assert_eq!(at("2016-03-14T01:59Z"), "2016-03-14T01:59:00Z");
        assert_eq!(at("2016-03-14t01:59:00.5z"), "2016-03-14T01:59:00.5Z");
        assert_eq!(at("2016-03-14T01:59:00.123456789Z"), "2016-03-14T01:59:00.123456789Z");
        assert_eq!(at("2016-03-14T01:59:00+02:00"), "2016-03-13T23:59:00Z");
        assert_eq!(at("2016-03-14T01:59:00-18:00"), "2016-03-14T19:59:00Z");
    }

    #[test]
    fn invalid_timestamps_are_refused() {
        for text in [
            "",
            "x",
            "2016-03-14",
            "2016-13-05T21:29:29Z",
            "2016-12-05 21:29:29Z",
            "2016-02-30T00:00:00Z",
            "2016-03-14T01:59:00",
            "2016-03-14T25:59:00Z",
            "2016-03-14T01:59:00.Z",
            "2016-03-14T01:59:00.1234567890Z",
            "2016-03-14T01:59.5Z",
            "2016-3-14T01:59:00Z",
            "2016-03-14T01:59:00+0200",
            "2016-03-14T01:59:00+19:00",
            "2016-03-14T01:59:00Z ",
            "２016-03-14T01:59:00Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
