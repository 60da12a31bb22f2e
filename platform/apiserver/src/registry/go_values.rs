//! Values as Go prints them in upstream's field errors (`%#v`).

use serde_json::Value;

use super::rules::items;

/// An address, which stands for the pointers within a struct.
pub(super) const GO_ADDRESS: &str = "0xc000000000";

/// Powers of the units of a quantity: 10 to this in decimal ones, 1024 to this in binary ones.
const DECIMAL_UNITS: [(&str, i32); 9] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY_UNITS: [(&str, u32); 6] = [("Ki", 1), ("Mi", 2), ("Gi", 3), ("Ti", 4), ("Pi", 5), ("Ei", 6)];

/// A quantity. A number with a fraction has no cached text.
pub(super) fn go_quantity(text: &str) -> String {
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+'))).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let mut value: i128 = format!("{whole}{fraction}").parse().unwrap_or(0);
    let mut scale = -i32::try_from(fraction.len()).unwrap_or(0);
    let mut format = "DecimalSI";
    if let Some((_, power)) = BINARY_UNITS.iter().find(|(name, _)| *name == unit) {
        format = "BinarySI";
        value = value.saturating_mul(1024_i128.pow(*power));
    } else if let Some((_, power)) = DECIMAL_UNITS.iter().find(|(name, _)| *name == unit) {
        scale += power;
    } else if let Some(exponent) = unit.strip_prefix(['e', 'E']) {
        format = "DecimalExponent";
        scale += exponent.parse::<i32>().unwrap_or(0);
    }
    let cached = if fraction.is_empty() { text } else { "" };
    format!(
        "resource.Quantity{{i:resource.int64Amount{{value:{value}, scale:{scale}}}, \
         d:resource.infDecAmount{{Dec:(*inf.Dec)(nil)}}, s:{cached:?}, Format:{format:?}}}"
    )
}

/// A map of quantities of the type `core.ResourceList`, in the order of its names.
pub(super) fn go_resource_list(list: &Value) -> String {
    let mut amounts: Vec<_> = list
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, amount)| format!("{name:?}:{}", go_quantity(amount.as_str().unwrap_or(""))))
        .collect();
    amounts.sort();
    match amounts.is_empty() {
        true => "core.ResourceList(nil)".into(),
        false => format!("core.ResourceList{{{}}}", amounts.join(", ")),
    }
}

/// A list of texts, of the named type.
pub(super) fn go_texts(of: &str, list: &Value) -> String {
    let texts: Vec<_> = items(list).map(|(_, text)| text.to_string()).collect();
    match texts.is_empty() {
        true => format!("[]{of}(nil)"),
        false => format!("[]{of}{{{}}}", texts.join(", ")),
    }
}

/// Bytes.
pub(super) fn go_bytes(bytes: &[u8]) -> String {
    let shown: Vec<_> = bytes.iter().map(|byte| format!("0x{byte:x}")).collect();
    match shown.is_empty() {
        true => "[]byte(nil)".into(),
        false => format!("[]byte{{{}}}", shown.join(", ")),
    }
}

/// A pointer to a value of the named type, or nil.
pub(super) fn go_pointer(of: &str, value: &Value) -> String {
    format!("(*{of})({})", if value.is_null() { "nil" } else { GO_ADDRESS })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The texts are recorded from kube-apiserver.
    #[test]
    fn quantities_are_shown_as_go_shows_them() {
        let nothing = "d:resource.infDecAmount{Dec:(*inf.Dec)(nil)}";
        for (text, amount, rest) in [
            ("2", "{value:2, scale:0}", "s:\"2\", Format:\"DecimalSI\""),
            ("1.5", "{value:15, scale:-1}", "s:\"\", Format:\"DecimalSI\""),
            ("1Mi", "{value:1048576, scale:0}", "s:\"1Mi\", Format:\"BinarySI\""),
            ("500m", "{value:500, scale:-3}", "s:\"500m\", Format:\"DecimalSI\""),
        ] {
            let expected = format!("resource.Quantity{{i:resource.int64Amount{amount}, {nothing}, {rest}}}");
            assert_eq!(go_quantity(text), expected);
        }
        assert_eq!(go_bytes(b"no"), "[]byte{0x6e, 0x6f}");
        assert_eq!(go_texts("string", &json!(["a", "b"])), "[]string{\"a\", \"b\"}");
        assert_eq!(go_resource_list(&Value::Null), "core.ResourceList(nil)");
    }
}
