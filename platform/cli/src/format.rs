//! Readable numbers and times.

use jiff::Timestamp;

/// Kubernetes' short form of a duration: two units at most, fewer for long durations (`HumanDuration`).
pub(crate) fn age_of_seconds(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    let two = |large: i64, large_unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{large}{large_unit}"),
        small => format!("{large}{large_unit}{small}{small_unit}"),
    };
    match seconds {
        ..0 => "0s".into(),
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        _ => two(days / 365, "y", days % 365, "d"),
    }
}

/// The age of an RFC 3339 time, or `<unknown>`.
pub(crate) fn age(time: Option<&str>, now: Timestamp) -> String {
    match time.and_then(|text| text.parse::<Timestamp>().ok()) {
        Some(time) => age_of_seconds(now.as_second() - time.as_second()),
        None => "<unknown>".into(),
    }
}

/// `12 B`, `1.5 KiB`, `64 MiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = format!("{value:.1}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

/// Seconds as `850us`, `1.2ms`, `3.4s`.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.001 => format!("{:.0}us", s * 1e6),
        s if s < 1.0 => format!("{:.1}ms", s * 1e3),
        s => format!("{s:.1}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_as_kubectl_prints_them() {
        for (seconds, expected) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (150, "2m30s"),
            (601, "10m"),
            (3 * 3600 + 60, "3h1m"),
            (9 * 3600, "9h"),
            (2 * 86400 + 3600, "2d1h"),
            (30 * 86400, "30d"),
            (731 * 86400, "2y1d"),
        ] {
            assert_eq!(age_of_seconds(seconds), expected);
        }
        let now = "2026-01-02T00:00:10Z".parse().unwrap();
        assert_eq!(age(Some("2026-01-02T00:00:00Z"), now), "10s");
        assert_eq!(age(Some("x"), now), "<unknown>");
    }

    #[test]
    fn sizes_and_spans() {
        assert_eq!(bytes(12), "12 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(64 << 20), "64 MiB");
        assert_eq!(bytes((1 << 20) - 1), "1 MiB");
        assert_eq!(seconds(0.00085), "850us");
        assert_eq!(seconds(0.0012), "1.2ms");
        assert_eq!(seconds(3.42), "3.4s");
    }
}
