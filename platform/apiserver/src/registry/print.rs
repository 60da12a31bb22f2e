//! Helpers for the cells of printed tables. The formats are upstream's (`kubernetes/pkg/printers`,
//! `apimachinery/pkg/util/duration`).

use jiff::Timestamp;
use serde_json::Value;

use crate::object::Object;

/// The time since the creation, for a column `Age`.
pub(crate) fn age(object: &Object, now: Timestamp) -> Value {
    since(object.meta_str("creationTimestamp"), now).into()
}

/// `3m20s` since a timestamp; `<unknown>` when it is absent.
pub(crate) fn since(timestamp: &str, now: Timestamp) -> String {
    match timestamp.parse::<Timestamp>() {
        Ok(then) => human_duration(now.duration_since(then).as_secs()),
        Err(_) => "<unknown>".into(),
    }
}

/// Upstream's `HumanDuration`: two units at most, fewer as it grows.
pub(crate) fn human_duration(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let pair = |big: i64, big_unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{big_unit}"),
        _ => format!("{big}{big_unit}{small}{small_unit}"),
    };
    match seconds {
        ..-1 => "<invalid>".into(),
        -1 => "0s".into(),
        s if s < 2 * MINUTE => format!("{s}s"),
        s if s < 10 * MINUTE => pair(s / MINUTE, "m", s % MINUTE, "s"),
        s if s < 3 * HOUR => format!("{}m", s / MINUTE),
        s if s < 8 * HOUR => pair(s / HOUR, "h", s % HOUR / MINUTE, "m"),
        s if s < 2 * DAY => format!("{}h", s / HOUR),
        s if s < 8 * DAY => pair(s / DAY, "d", s % DAY / HOUR, "h"),
        s if s < 2 * YEAR => format!("{}d", s / DAY),
        s if s < 8 * YEAR => pair(s / YEAR, "y", s % YEAR / DAY, "d"),
        s => format!("{}y", s / YEAR),
    }
}

/// The items of a list at a path.
pub(crate) fn items<'a>(object: &'a Object, path: &[&str]) -> impl Iterator<Item = &'a Value> {
    object.at(path).and_then(Value::as_array).into_iter().flatten()
}

/// The status of a condition: `True`, `False`, `Unknown`; and its reason.
pub(crate) fn condition<'a>(object: &'a Object, name: &str) -> Option<(&'a str, &'a str)> {
    let found = items(object, &["status", "conditions"]).find(|c| c["type"] == name)?;
    Some((found["status"].as_str()?, found["reason"].as_str().unwrap_or("")))
}

/// The text, or `<none>` for an empty one, as in kubectl's tables.
pub(crate) fn or_none(text: &str) -> Value {
    if text.is_empty() { "<none>".into() } else { text.into() }
}

/// The number of entries of top-level maps.
pub(crate) fn count(object: &Object, fields: &[&str]) -> Value {
    let sizes = fields.iter().filter_map(|field| object.0.get(*field)?.as_object());
    sizes.map(serde_json::Map::len).sum::<usize>().into()
}

/// A number at a path; 0 when absent.
pub(crate) fn number(object: &Object, path: &[&str]) -> Value {
    object.at(path).filter(|value| value.is_number()).cloned().unwrap_or(0.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_as_upstream_prints_them() {
        const HOUR: i64 = 3600;
        const DAY: i64 = 24 * HOUR;
        for (seconds, expected) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (121, "2m1s"),
            (599, "9m59s"),
            (600, "10m"),
            (3 * HOUR - 1, "179m"),
            (3 * HOUR, "3h"),
            (3 * HOUR + 60, "3h1m"),
            (8 * HOUR + 60, "8h"),
            (47 * HOUR, "47h"),
            (2 * DAY + HOUR, "2d1h"),
            (8 * DAY + HOUR, "8d"),
            (729 * DAY, "729d"),
            (731 * DAY, "2y1d"),
            (3000 * DAY, "8y"),
        ] {
            assert_eq!(human_duration(seconds), expected, "{seconds}");
        }
    }
}
