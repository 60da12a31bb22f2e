//! Numbers that may be percentages, such as `maxUnavailable`.

use mayfly_api::k8s::apimachinery::pkg::util::intstr::IntOrString;

/// A number or a percentage of `total`; 25 % if absent.
pub(crate) fn resolve(value: Option<&IntOrString>, total: i32, round_up: bool) -> i32 {
    let percent = match value {
        Some(IntOrString::Int(number)) => return (*number).max(0),
        Some(IntOrString::String(text)) => text.trim_end_matches('%').parse().unwrap_or(0),
        None => 25_i64,
    };
    let product = percent.max(0).saturating_mul(total.into());
    let rounded = if round_up { product.saturating_add(99) / 100 } else { product / 100 };
    i32::try_from(rounded).unwrap_or(i32::MAX)
}
