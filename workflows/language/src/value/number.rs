//! Numbers with Jackson's types and format.

use std::cmp::Ordering;
use std::fmt::{self, Write as _};
use std::sync::Arc;

/// A JSON number.
#[derive(Clone, Debug)]
pub enum Number {
    /// An integer without fraction or exponent in its text.
    Int(i64),
    /// An integer beyond 64 bits: its digits, with the sign and without leading zeros.
    Big(Arc<str>),
    /// Any number with a fraction or an exponent; always finite.
    Float(f64),
}

impl Number {
    /// The nearest double.
    #[expect(clippy::cast_precision_loss, reason = "the nearest double is what is asked for")]
    pub fn to_f64(&self) -> f64 {
        match self {
            Self::Int(whole) => *whole as f64,
            Self::Big(digits) => digits.parse().unwrap_or(f64::NAN),
            Self::Float(double) => *double,
        }
    }

    /// The equal integer (`2.0` is 2), if there is one that fits.
    #[expect(clippy::cast_possible_truncation, reason = "the range is checked first")]
    pub fn to_i64(&self) -> Option<i64> {
        match self {
            Self::Int(whole) => Some(*whole),
            Self::Float(double) if double.fract() == 0.0 && double.abs() < 9.2e18 => Some(*double as i64),
            _ => None,
        }
    }

    /// Whether the number's text has neither fraction nor exponent.
    pub fn is_integer(&self) -> bool {
        !matches!(self, Self::Float(_))
    }

    /// Converts a number from JSONata as AWS does: integral doubles within 64 bits become integers, the others have
    /// Java's format. (The Java engine in LocalStack behaves like this; JavaScript would write more digits.)
    #[expect(clippy::cast_possible_truncation, reason = "the range is checked first")]
    pub fn from_jsonata(double: f64) -> Option<Self> {
        const PAST_LONG: f64 = 9_223_372_036_854_775_808.0;
        if !double.is_finite() {
            return None;
        }
        let whole = double.fract() == 0.0 && (-PAST_LONG..PAST_LONG).contains(&double);
        Some(if whole { Self::Int(double as i64) } else { Self::Float(double) })
    }
}

impl From<i64> for Number {
    fn from(whole: i64) -> Self {
        Self::Int(whole)
    }
}

impl From<u64> for Number {
    fn from(whole: u64) -> Self {
        i64::try_from(whole).map_or_else(|_| Self::Big(whole.to_string().into()), Self::Int)
    }
}

/// Compares by value: integers exactly, an integer and a double as doubles.
impl PartialEq for Number {
    fn eq(&self, other: &Self) -> bool {
        self.partial_cmp(other) == Some(Ordering::Equal)
    }
}

impl PartialOrd for Number {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => Some(a.cmp(b)),
            (Self::Big(a), Self::Big(b)) => Some(compare_digits(a, b)),
            _ => self.to_f64().partial_cmp(&other.to_f64()),
        }
    }
}

fn compare_digits(a: &str, b: &str) -> Ordering {
    match (a.strip_prefix('-'), b.strip_prefix('-')) {
        (None, None) => a.len().cmp(&b.len()).then_with(|| a.cmp(b)),
        (Some(a), Some(b)) => b.len().cmp(&a.len()).then_with(|| b.cmp(a)),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(whole) => write!(f, "{whole}"),
            Self::Big(digits) => f.write_str(digits),
            Self::Float(double) => write_double(f, *double),
        }
    }
}

/// Java's `Double.toString`: decimal from 0.001 to below ten million, otherwise `d.dddE±n`; always with a digit after
/// the point.
fn write_double(f: &mut fmt::Formatter<'_>, double: f64) -> fmt::Result {
    let size = double.abs();
    if size == 0.0 {
        return f.write_str(if double.is_sign_negative() { "-0.0" } else { "0.0" });
    }
    if (1e-3..1e7).contains(&size) {
        return write!(f, "{double:?}");
    }
    let text = format!("{double:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    f.write_str(digits)?;
    if !digits.contains('.') {
        f.write_str(".0")?;
    }
    f.write_char('E')?;
    f.write_str(exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_print_as_in_java() {
        for (double, text) in [
            (1.0, "1.0"),
            (-1.5, "-1.5"),
            (0.001, "0.001"),
            (0.0001, "1.0E-4"),
            (1e7, "1.0E7"),
            (9_999_999.5, "9999999.5"),
            (1e10, "1.0E10"),
            (1.25e-9, "1.25E-9"),
            (1.797_693_134_862_315_7e308, "1.7976931348623157E308"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(Number::Float(double).to_string(), text);
        }
    }

    #[test]
    fn javascript_numbers_lose_an_empty_fraction() {
        for (double, text) in [(1.0, "1"), (2.5, "2.5"), (9.3e18, "9.3E18"), (-0.0, "0"), (1e21, "1.0E21")] {
            assert_eq!(Number::from_jsonata(double).expect("finite").to_string(), text);
        }
        assert!(Number::from_jsonata(f64::NAN).is_none());
    }

    #[test]
    fn numbers_compare_by_value() {
        let big = |digits: &str| Number::Big(digits.into());
        assert_eq!(Number::Int(1), Number::Float(1.0));
        assert!(Number::Int(i64::MAX) > Number::Int(i64::MAX - 1));
        assert!(big("100000000000000000000") > big("99999999999999999999"));
        assert!(big("-100000000000000000000") < big("-99999999999999999999"));
        assert!(big("-100000000000000000000") < Number::Int(0));
        assert_eq!(Number::Float(2.0).to_i64(), Some(2));
        assert_eq!(Number::Float(2.5).to_i64(), None);
        assert_eq!(Number::from(u64::MAX).to_string(), "18446744073709551615");
    }
}
