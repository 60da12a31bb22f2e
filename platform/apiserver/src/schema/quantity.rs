//! Quantities as upstream reads and writes them: `0.5` becomes `500m`, `1024Mi` becomes `1Gi`.
//! (Source: `apimachinery/pkg/api/resource`, `ParseQuantity` and `CanonicalizeBytes`.)
//!
//! Upstream keeps the text of some quantities whose form it takes for the canonical one, such as `+1` and `1.250`.

/// Decimal units by their power of ten.
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
/// Binary units by their power of two.
const BINARY: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];
/// The number of digits that upstream computes with in 64 bits.
const SHORT_DIGITS: usize = 18;
/// The power of ten of the smallest amount.
const NANO: i32 = -9;

/// The kind of units of a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Units {
    Decimal,
    /// `1e3`
    Exponent,
    Binary,
}

/// The reason why a text is not a quantity, with upstream's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QuantityError {
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    #[error("unable to parse numeric part of quantity")]
    Number,
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

/// The smallest amount that is distinguished; smaller ones are rounded away from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    Nano,
    Milli,
}

/// A quantity: its digits times a power of ten.
#[derive(Clone, Debug)]
pub(crate) struct ParsedQuantity {
    negative: bool,
    /// Decimal digits, the most significant first.
    digits: Vec<u8>,
    exponent: i32,
    units: Units,
    /// Upstream takes the text for the canonical form.
    keeps_text: bool,
}

/// The canonical form of a quantity in a JSON text, or in the text of a JSON number.
pub(super) fn canonical(text: &str, precision: Precision) -> Result<String, QuantityError> {
    // Go trims the encoded text, in which control characters are escaped.
    let text = text.trim_matches(|c: char| c.is_whitespace() && !c.is_control());
    let mut quantity = ParsedQuantity::parse(text)?;
    if precision == Precision::Milli && quantity.exponent < -3 {
        quantity.round_up(-3);
        quantity.keeps_text = false;
    }
    Ok(if quantity.keeps_text { text.to_owned() } else { quantity.written() })
}

/// The parts of a text that may be a quantity.
struct QuantityParts<'a> {
    /// The sign, the digits and the point.
    number: &'a str,
    /// The digits before the point, without leading zeros.
    whole: &'a str,
    fraction: &'a str,
    suffix: &'a str,
}

impl<'a> QuantityParts<'a> {
    fn split(text: &'a str) -> Result<Self, QuantityError> {
        let digits =
            |text: &'a str| text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let (whole, rest) = digits(unsigned.trim_start_matches('0'));
        let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), digits);
        let exponent = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        if text.is_empty() || !exponent.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(QuantityError::Format);
        }
        let whole = if whole.is_empty() { "0" } else { whole };
        Ok(Self { number: &text[..text.len() - suffix.len()], whole, fraction, suffix })
    }

    /// Whether upstream computes the amount in 64 bits.
    fn is_short(&self, units: Units, power: i32) -> bool {
        match units {
            Units::Binary => {
                self.fraction.is_empty() && self.whole.len() as i64 + i64::from(power * 3 / 10) <= 14
            }
            _ => {
                self.whole.len() + self.fraction.len() <= SHORT_DIGITS
                    && i64::from(power) - self.fraction.len() as i64 >= i64::from(NANO)
            }
        }
    }
}

impl ParsedQuantity {
    pub(crate) fn parse(text: &str) -> Result<Self, QuantityError> {
        let parts = QuantityParts::split(text)?;
        let (units, power) = unit(parts.suffix).ok_or(QuantityError::Suffix)?;
        let is_short = parts.is_short(units, power);
        // Upstream reads a short number without digits, such as `m`, as zero.
        if !is_short && !parts.number.contains(|c: char| c.is_ascii_digit()) {
            return Err(QuantityError::Number);
        }
        let digits: Vec<u8> =
            parts.whole.bytes().chain(parts.fraction.bytes()).map(|byte| byte - b'0').collect();
        let places = i32::try_from(parts.fraction.len()).map_err(|_| QuantityError::Number)?;
        let shift = if units == Units::Binary { 0 } else { power };
        let exponent = shift.checked_sub(places).ok_or(QuantityError::Number)?;
        let keeps_text = is_short
            && match units {
                Units::Binary => {
                    digits.iter().rev().zip([1, 10, 100]).map(|(d, p)| u32::from(*d) * p).sum::<u32>() % 8
                        != 0
                }
                _ => exponent % 3 == 0 && digits[0] != 0 && !digits.ends_with(&[0, 0, 0]),
            };
        let negative = text.starts_with('-');
        let mut quantity = Self { negative, digits, exponent, units, keeps_text };
        if units == Units::Binary {
            quantity.multiply(1 << power);
        }
        quantity.round_up(NANO);
        if units == Units::Binary {
            quantity.cap();
        }
        Ok(quantity)
    }

    /// The quantity as a number and a power of ten; `None` for one with too many digits.
    pub(crate) fn scaled(&self) -> Option<(i128, i32)> {
        let number = self.integer()?;
        Some((if self.negative { -number } else { number }, self.exponent))
    }

    /// The digits as a number.
    fn integer(&self) -> Option<i128> {
        self.digits
            .iter()
            .try_fold(0_i128, |number, digit| number.checked_mul(10)?.checked_add(i128::from(*digit)))
    }

    fn is_zero(&self) -> bool {
        self.digits.iter().all(|digit| *digit == 0)
    }

    fn multiply(&mut self, factor: u64) {
        let mut carry = 0_u128;
        let mut product = Vec::with_capacity(self.digits.len() + 20);
        let mut rest = self.digits.iter().rev();
        loop {
            let digit = rest.next();
            if digit.is_none() && carry == 0 {
                break;
            }
            carry += u128::from(digit.copied().unwrap_or(0)) * u128::from(factor);
            product.push(u8::try_from(carry % 10).expect("a digit"));
            carry /= 10;
        }
        product.reverse();
        self.digits = product;
    }

    /// Rounds away from zero to a multiple of 10^`exponent`.
    fn round_up(&mut self, exponent: i32) {
        let Some(dropped) = exponent.checked_sub(self.exponent).and_then(|count| usize::try_from(count).ok())
        else {
            return;
        };
        if dropped == 0 {
            return;
        }
        let kept = self.digits.len().saturating_sub(dropped);
        let is_exact = self.digits[kept..].iter().all(|digit| *digit == 0);
        self.digits.truncate(kept);
        self.exponent = exponent;
        if is_exact {
            return;
        }
        for digit in self.digits.iter_mut().rev() {
            if *digit < 9 {
                *digit += 1;
                return;
            }
            *digit = 0;
        }
        self.digits.insert(0, 1);
    }

    /// Limits the amount to the largest signed number of 64 bits.
    fn cap(&mut self) {
        let most = i128::from(i64::MAX);
        let places = u32::try_from(-self.exponent).unwrap_or(0);
        let limit = 10_i128.checked_pow(places).and_then(|power| most.checked_mul(power));
        if self.integer().zip(limit).is_none_or(|(number, limit)| number > limit) {
            self.digits = most.to_string().bytes().map(|byte| byte - b'0').collect();
            self.exponent = 0;
        }
    }

    /// The canonical form.
    fn written(&self) -> String {
        let sign = if self.negative { "-" } else { "" };
        if self.is_zero() {
            return "0".into();
        }
        if self.units == Units::Binary
            && let Some(written) = self.in_binary_units()
        {
            return format!("{sign}{written}");
        }
        let mut text: String = self.digits.iter().map(|digit| char::from(digit + b'0')).collect();
        let mut exponent = self.exponent;
        while text.ends_with('0') {
            text.pop();
            exponent += 1;
        }
        while exponent.rem_euclid(3) != 0 {
            text.push('0');
            exponent -= 1;
        }
        let text = text.trim_start_matches('0');
        let unit = DECIMAL.iter().find(|(_, power)| *power == exponent);
        match unit {
            Some((suffix, _)) if self.units != Units::Exponent || exponent == 0 => {
                format!("{sign}{text}{suffix}")
            }
            _ => format!("{sign}{text}e{exponent}"),
        }
    }

    /// The text in binary units, if the number is a whole one of at least 1024.
    fn in_binary_units(&self) -> Option<String> {
        let places = 10_i128.checked_pow(u32::try_from(-self.exponent).ok()?)?;
        let number = self.integer()?;
        if number % places != 0 || number / places < 1024 {
            return None;
        }
        let (mut number, mut power) = (number / places, 0);
        while number % 1024 == 0 && power < BINARY.len() {
            number /= 1024;
            power += 1;
        }
        let suffix = if power == 0 { "" } else { BINARY[power - 1].0 };
        Some(format!("{number}{suffix}"))
    }
}

/// The units of a suffix, and its power of ten or, of binary units, of two.
fn unit(suffix: &str) -> Option<(Units, i32)> {
    if let Some((_, power)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        return Some((Units::Decimal, *power));
    }
    if let Some((_, power)) = BINARY.iter().find(|(name, _)| *name == suffix) {
        return Some((Units::Binary, i32::try_from(*power).ok()?));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    Some((Units::Exponent, exponent.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_as_upstream_does() {
        for (text, expected) in [
            ("0.5", "500m"),
            ("1.5", "1500m"),
            ("1000m", "1"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("100000", "100k"),
            ("0", "0"),
            ("64Mi", "64Mi"),
            ("0.1Ki", "102400m"),
            ("1.1Ki", "1126400m"),
            ("1023Ki", "1023Ki"),
            ("1500", "1500"),
            ("-1", "-1"),
            ("-0.5", "-500m"),
            ("1e3", "1e3"),
            ("1e4", "10e3"),
            ("1.5e3", "1500"),
            ("1000e3", "1e6"),
            ("12E", "12E"),
            ("1025", "1025"),
            ("2.0", "2"),
            (".5", "500m"),
            ("0.0000000001", "1n"),
            ("-0.0000000001", "-1n"),
            ("1e-10", "1e-9"),
            ("99.9999999999", "100"),
            ("8Ei", "9223372036854775807"),
            ("-8Ei", "-9223372036854775807"),
            ("16000Pi", "9223372036854775807"),
            (
                "123456789012345678901234567890123456789012345",
                "123456789012345678901234567890123456789012345",
            ),
            ("1000000000000000000000", "1e21"),
            ("0.5Mi", "512Ki"),
            ("0.5Ki", "512"),
        ] {
            assert_eq!(canonical(text, Precision::Nano).as_deref(), Ok(expected), "{text}");
            assert_eq!(
                canonical(expected, Precision::Nano).as_deref(),
                Ok(expected),
                "{expected} is canonical"
            );
        }
    }

    #[test]
    fn some_texts_are_kept() {
        for text in ["+1", "007", "1.", "1.250", "10e3", "1E3", "+3Gi", "1E"] {
            assert_eq!(canonical(text, Precision::Nano).as_deref(), Ok(text));
        }
        assert_eq!(canonical(" 3 ", Precision::Nano).as_deref(), Ok("3"));
    }

    /// Forms that upstream reads as zero, although its regular expression does not match them.
    #[test]
    fn numbers_without_digits_are_zero() {
        for text in ["m", "Mi", "Ti", ".", "-", "+", "-0", "00", ".k", "0E", "e3"] {
            assert_eq!(canonical(text, Precision::Nano).as_deref(), Ok("0"), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_with_upstreams_reason() {
        for (text, error) in [
            ("", QuantityError::Format),
            (" ", QuantityError::Format),
            ("x", QuantityError::Format),
            ("1x", QuantityError::Format),
            ("1.2.3", QuantityError::Format),
            ("--1", QuantityError::Suffix),
            ("1 Gi", QuantityError::Format),
            ("1\n", QuantityError::Format),
            ("1Gi5x", QuantityError::Format),
            ("1K", QuantityError::Suffix),
            ("1mi", QuantityError::Suffix),
            ("1e", QuantityError::Suffix),
            ("1ee3", QuantityError::Suffix),
            ("1Ki5", QuantityError::Suffix),
            ("1-5", QuantityError::Suffix),
            ("5+", QuantityError::Suffix),
            ("Ei", QuantityError::Number),
            (".e-20", QuantityError::Number),
        ] {
            assert_eq!(canonical(text, Precision::Nano), Err(error), "{text:?}");
        }
    }

    #[test]
    fn amounts_of_resources_are_rounded_up_to_thousandths() {
        for (text, expected) in
            [("100u", "1m"), ("1.0001", "1001m"), ("0.5", "500m"), ("1Gi", "1Gi"), ("1.250", "1.250")]
        {
            assert_eq!(canonical(text, Precision::Milli).as_deref(), Ok(expected), "{text}");
        }
    }
}
