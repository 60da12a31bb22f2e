//! Durations as people write them in manifests: `30s`, `1m30s`, `500ms`, `2h` (Go's format).

use std::{fmt, str::FromStr, time::Duration};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A span of time in a manifest. Never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// The reason why a text is not a [`Span`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a duration: write a number and a unit (ns, us, ms, s, m, h), such as 30s or 1m30s")]
pub struct InvalidSpan {
    text: String,
}

impl Span {
    pub const fn from_secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    pub const fn from_millis(milliseconds: u64) -> Self {
        Self(Duration::from_millis(milliseconds))
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        span.0
    }
}

impl FromStr for Span {
    type Err = InvalidSpan;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidSpan { text: text.chars().take(100).collect() };
        let mut rest = text;
        let mut total = Duration::ZERO;
        if rest.is_empty() {
            return Err(invalid());
        }
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(invalid)?;
            let number: f64 = rest[..digits].parse().map_err(|_| invalid())?;
            rest = &rest[digits..];
            let unit_bytes = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
            let seconds = match &rest[..unit_bytes] {
                "ns" => 1e-9,
                "us" | "µs" => 1e-6,
                "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return Err(invalid()),
            };
            rest = &rest[unit_bytes..];
            let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| invalid())?;
            total = total.checked_add(part).ok_or_else(invalid)?;
        }
        Ok(Self(total))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.0.as_secs(), self.0.subsec_nanos());
        match (seconds, nanos) {
            (0, 0) => f.write_str("0s"),
            (_, 0) => {
                let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
                for (number, unit) in [(hours, "h"), (minutes, "m"), (seconds, "s")] {
                    if number > 0 {
                        write!(f, "{number}{unit}")?;
                    }
                }
                Ok(())
            }
            (_, nanos) if nanos % 1_000_000 == 0 => write!(f, "{}ms", self.0.as_millis()),
            (_, nanos) if nanos % 1_000 == 0 => write!(f, "{}us", self.0.as_micros()),
            _ => write!(f, "{}ns", self.0.as_nanos()),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl JsonSchema for Span {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Span".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "description": "A duration such as 500ms, 30s or 1m30s."})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_and_print() {
        for (text, milliseconds, printed) in [
            ("30s", 30_000, "30s"),
            ("1m30s", 90_000, "1m30s"),
            ("500ms", 500, "500ms"),
            ("1.5s", 1500, "1500ms"),
            ("2h", 7_200_000, "2h"),
            ("0s", 0, "0s"),
        ] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span, Span::from_millis(milliseconds), "{text}");
            assert_eq!(span.to_string(), printed);
        }
        for bad in ["", "30", "s", "-1s", "1x", "1s2", "1e400s", "1..2s"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }
}
