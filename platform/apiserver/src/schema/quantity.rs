//! Quantities as upstream writes them: `0.5` becomes `500m`, `1024Mi` becomes `1Gi`
//! (`apimachinery/pkg/api/resource`, `CanonicalizeBytes`).

/// Decimal units by their power of ten.
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
/// Binary units by their power of 1024.
const BINARY: [(&str, u32); 6] = [("Ki", 1), ("Mi", 2), ("Gi", 3), ("Ti", 4), ("Pi", 5), ("Ei", 6)];

/// The kind of units of a quantity.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Units {
    Decimal,
    /// `1e3`
    Exponent,
    Binary,
}

/// The canonical form of a quantity; `None` for an invalid one, and for numbers without an exact form.
pub(super) fn canonical(text: &str) -> Option<String> {
    let (negative, mut mantissa, mut exponent, units) = read(text)?;
    if mantissa == 0 {
        return Some("0".into());
    }
    while mantissa % 10 == 0 {
        mantissa /= 10;
        exponent += 1;
    }
    written(negative, mantissa, exponent, units)
}

/// A quantity as a number and a power of ten; `None` for an invalid one.
pub(crate) fn quantity_parts(text: &str) -> Option<(i128, i32)> {
    let (negative, mantissa, exponent, _) = read(text)?;
    Some((if negative { -mantissa } else { mantissa }, exponent))
}

/// Whether a quantity is negative, its number, a power of ten, and its units.
fn read(text: &str) -> Option<(bool, i128, i32, Units)> {
    let text = text.trim();
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let mantissa: i128 = format!("{whole}{fraction}").parse().ok()?;
    let (units, power, factor) = unit(suffix)?;
    let exponent = power.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    Some((negative, mantissa.checked_mul(factor)?, exponent, units))
}

fn written(negative: bool, mut mantissa: i128, mut exponent: i32, units: Units) -> Option<String> {
    let sign = if negative { "-" } else { "" };
    if units == Units::Binary
        && let Some(written) = binary(mantissa, exponent)
    {
        return Some(format!("{sign}{written}"));
    }
    while exponent.rem_euclid(3) != 0 {
        mantissa = mantissa.checked_mul(10)?;
        exponent -= 1;
    }
    if units == Units::Exponent {
        return Some(match exponent {
            0 => format!("{sign}{mantissa}"),
            _ => format!("{sign}{mantissa}e{exponent}"),
        });
    }
    let (suffix, _) = DECIMAL.iter().find(|(_, power)| *power == exponent)?;
    Some(format!("{sign}{mantissa}{suffix}"))
}

/// The units of a suffix, its power of ten, and its factor.
fn unit(suffix: &str) -> Option<(Units, i32, i128)> {
    if let Some((_, power)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        return Some((Units::Decimal, *power, 1));
    }
    if let Some((_, power)) = BINARY.iter().find(|(name, _)| *name == suffix) {
        return Some((Units::Binary, 0, 1024i128.pow(*power)));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    Some((Units::Exponent, exponent.parse().ok()?, 1))
}

/// The text in binary units, if the number is a whole one of at least 1024.
fn binary(mantissa: i128, exponent: i32) -> Option<String> {
    let mut number = mantissa.checked_mul(10i128.checked_pow(u32::try_from(exponent).ok()?)?)?;
    if number < 1024 {
        return None;
    }
    let mut power = 0;
    while number % 1024 == 0 && power < BINARY.len() {
        number /= 1024;
        power += 1;
    }
    let suffix = if power == 0 { "" } else { BINARY[power - 1].0 };
    Some(format!("{number}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn quantities_are_written_as_upstream_does() {
        for (text, expected) in [
            ("0.5", "500m"),
            ("1000m", "1"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("100000", "100k"),
            ("0", "0"),
            ("64Mi", "64Mi"),
            ("0.1Ki", "102400m"),
            ("1023Ki", "1023Ki"),
            ("1500", "1500"),
            ("-1", "-1"),
            ("1e3", "1e3"),
            ("12E", "12E"),
            ("1025", "1025"),
            ("2.0", "2"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(expected), "{text}");
            assert_eq!(canonical(expected).as_deref(), Some(expected), "{expected} is canonical");
        }
        for bad in ["", "x", "1x", "1.2.3", "."] {
            assert_eq!(canonical(bad), None, "{bad}");
        }
    }
}
