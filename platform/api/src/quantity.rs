//! Kubernetes quantities (`64Mi`, `500m`, `2G`), read as numbers.

use crate::k8s::apimachinery::pkg::api::resource::Quantity;

/// The reason why a text is not a quantity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidQuantity {
    #[error("{0:?} is not a quantity: write a number and an optional unit (m, k, Ki, M, Mi, G, Gi, T, Ti)")]
    Syntax(String),
    #[error("{0:?} must not be negative")]
    Negative(String),
    #[error("{0:?} is larger than this machine can count")]
    TooLarge(String),
}

/// Reads a quantity in thousandths (`500m` → 500, `2` → 2,000), the unit in which CPU is counted.
/// Fractions of a thousandth round up, as upstream's `MilliValue` does.
pub fn millis(quantity: &Quantity) -> Result<u64, InvalidQuantity> {
    scaled(&quantity.0, 1000.0)
}

/// Reads a quantity as a whole number (`64Mi` → 67,108,864), the unit in which bytes and devices are
/// counted. Fractions round up, as upstream's `Value` does.
pub fn whole(quantity: &Quantity) -> Result<u64, InvalidQuantity> {
    scaled(&quantity.0, 1.0)
}

/// A number of bytes in the form of a manifest: `64Mi`, or `70000 bytes` if no unit divides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
        match units.iter().find(|(_, power)| self.0 > 0 && self.0.trailing_zeros() >= *power) {
            Some((unit, power)) => write!(f, "{}{unit}", self.0 >> power),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

fn scaled(text: &str, scale: f64) -> Result<u64, InvalidQuantity> {
    let syntax = || InvalidQuantity::Syntax(text.chars().take(100).collect());
    let text_trimmed = text.trim();
    let digits = text_trimmed
        .char_indices()
        .find(|(at, c)| !(c.is_ascii_digit() || *c == '.' || (*at == 0 && (*c == '-' || *c == '+'))))
        .map_or(text_trimmed.len(), |(at, _)| at);
    let (number, suffix) = text_trimmed.split_at(digits);
    let number: f64 = number.parse().map_err(|_| syntax())?;
    let multiplier = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        "Pi" => 1_125_899_906_842_624.0,
        "Ei" => 1_152_921_504_606_846_976.0,
        exponent if exponent.starts_with(['e', 'E']) => {
            10f64.powi(exponent[1..].parse().map_err(|_| syntax())?)
        }
        _ => return Err(syntax()),
    };
    let value = (number * multiplier * scale).ceil();
    if value < 0.0 {
        return Err(InvalidQuantity::Negative(text.into()));
    }
    if value >= 9.2e18 {
        return Err(InvalidQuantity::TooLarge(text.into()));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounds checked above")]
    Ok(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_said_as_manifests_say_them() {
        let cases =
            [(64 << 20, "64Mi"), (3 << 30, "3Gi"), (1536, "1536 bytes"), (2048, "2Ki"), (0, "0 bytes")];
        for (bytes, said) in cases {
            assert_eq!(Bytes(bytes).to_string(), said);
        }
    }

    #[test]
    fn reads_what_upstream_reads() {
        let quantity = |text: &str| Quantity(text.into());
        for (text, expected) in [("64Mi", 67_108_864), ("1e3", 1000), ("2", 2), ("0.5", 1), ("1500m", 2)] {
            assert_eq!(whole(&quantity(text)), Ok(expected), "{text}");
        }
        for (text, expected) in [("500m", 500), ("2", 2000), ("0.1", 100), ("1u", 1)] {
            assert_eq!(millis(&quantity(text)), Ok(expected), "{text}");
        }
        for bad in ["", "Mi", "1Xi", "1.2.3", "--1", "1e"] {
            assert!(matches!(whole(&quantity(bad)), Err(InvalidQuantity::Syntax(_))), "{bad}");
        }
        assert!(matches!(whole(&quantity("-1")), Err(InvalidQuantity::Negative(_))));
        assert!(matches!(whole(&quantity("100E")), Err(InvalidQuantity::TooLarge(_))));
    }
}
