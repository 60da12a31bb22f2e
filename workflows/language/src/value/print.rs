//! Compact JSON text, as Jackson writes it: no spaces, `"`, `\` and control characters escaped, all other characters
//! unchanged.

use std::fmt::{self, Write as _};

use super::Value;

impl Value {
    /// The compact JSON text.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        self.write_text(&mut text);
        text
    }

    /// Appends the compact JSON text.
    pub fn write_text(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(true) => out.push_str("true"),
            Self::Bool(false) => out.push_str("false"),
            Self::Number(number) => {
                // Writing to a String cannot fail.
                let _ = write!(out, "{number}");
            }
            Self::String(text) => write_string(out, text),
            Self::Array(items) => {
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    item.write_text(out);
                }
                out.push(']');
            }
            Self::Object(map) => {
                out.push('{');
                for (at, (key, value)) in map.iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    write_string(out, key);
                    out.push(':');
                    value.write_text(out);
                }
                out.push('}');
            }
        }
    }

    /// The size of the compact text in UTF-8 bytes, computed without writing it. AWS's payload limits use this size.
    pub fn text_len(&self) -> usize {
        match self {
            Self::Null | Self::Bool(true) => 4,
            Self::Bool(false) => 5,
            Self::Number(number) => number_len(number),
            Self::String(text) => string_len(text),
            Self::Array(items) => 1 + items.len().max(1) + items.iter().map(Value::text_len).sum::<usize>(),
            Self::Object(map) => {
                let members = map.iter().map(|(key, value)| string_len(key) + 1 + value.text_len());
                1 + map.len().max(1) + members.sum::<usize>()
            }
        }
    }
}

fn number_len(number: &super::Number) -> usize {
    struct Count(usize);
    impl fmt::Write for Count {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0 += text.len();
            Ok(())
        }
    }
    let mut count = Count(0);
    // Counting cannot fail.
    let _ = write!(count, "{number}");
    count.0
}

/// The escape of a byte that a JSON string must escape: its letter, or `u` for the long form.
const fn escape(byte: u8) -> Option<u8> {
    match byte {
        b'"' => Some(b'"'),
        b'\\' => Some(b'\\'),
        b'\n' => Some(b'n'),
        b'\r' => Some(b'r'),
        b'\t' => Some(b't'),
        0x08 => Some(b'b'),
        0x0c => Some(b'f'),
        0..=0x1f => Some(b'u'),
        _ => None,
    }
}

fn string_len(text: &str) -> usize {
    let extra = text.bytes().map(|byte| match escape(byte) {
        None => 0,
        Some(b'u') => 5,
        Some(_) => 1,
    });
    text.len() + 2 + extra.sum::<usize>()
}

/// Appends `text` as a JSON string.
pub(crate) fn write_string(out: &mut String, text: &str) {
    out.push('"');
    let mut plain_from = 0;
    for (at, byte) in text.bytes().enumerate() {
        let Some(letter) = escape(byte) else { continue };
        out.push_str(&text[plain_from..at]);
        plain_from = at + 1;
        out.push('\\');
        if letter == b'u' {
            // Writing to a String cannot fail.
            let _ = write!(out, "u{byte:04X}");
        } else {
            out.push(char::from(letter));
        }
    }
    out.push_str(&text[plain_from..]);
    out.push('"');
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_its_length_agree() {
        for text in [
            "null",
            "[]",
            "{}",
            "[true,false,null]",
            r#"{"a":"\"\\\n\r\t\b\f\u0001é😀","b":[1,-2.5,1.0E10,123456789012345678901234567890]}"#,
        ] {
            let value = Value::parse(text).expect("valid");
            assert_eq!(value.to_text(), text);
            assert_eq!(value.text_len(), text.len(), "{text}");
        }
    }
}
