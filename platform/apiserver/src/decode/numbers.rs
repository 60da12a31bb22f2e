//! The texts of numbers in JSON. A parser keeps only their values, but upstream keeps the text of a quantity: `1e3` is
//! another form of the amount than `1000`.

use serde_json::{Map, Value};

use crate::{
    registry::Kind,
    schema::{Node, NodeId, Schemas, schemas},
};

/// A longer integer may not fit into the parser's types.
const PLAIN_BYTES_MAX: usize = 18;

/// A number's text, and the steps to it: names of fields and indexes of lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NumberText {
    path: Vec<String>,
    text: String,
}

impl NumberText {
    /// The steps to the number: names of fields and indexes of lists.
    pub(crate) fn path(&self) -> &[String] {
        &self.path
    }

    /// The same text at another place.
    pub(crate) fn at(&self, path: Vec<String>) -> Self {
        Self { path, text: self.text.clone() }
    }
}

/// The numbers other than short integers in a valid JSON text.
pub(super) fn texts(json: &[u8]) -> Vec<NumberText> {
    let mut scan = Scan { json, at: 0, path: Vec::new(), found: Vec::new() };
    // Most bodies have none, and need no paths.
    if scan.has_any() {
        scan.at = 0;
        scan.value();
    }
    scan.found
}

/// Replaces the quantities of a built-in kind that were numbers by their texts.
pub(crate) fn restore(kind: &Kind, object: &mut Map<String, Value>, numbers: &[NumberText]) {
    if numbers.is_empty() || kind.custom {
        return;
    }
    let mut value = Value::Object(std::mem::take(object));
    for number in numbers {
        let quantity = quantity(schemas(), schemas().root(kind), &mut value, &number.path);
        // A later operation of a patch may have written another number.
        if let Some(quantity) = quantity.filter(|quantity| quantity.as_f64() == number.text.parse().ok()) {
            *quantity = Value::String(number.text.clone());
        }
    }
    if let Value::Object(map) = value {
        *object = map;
    }
}

/// The value at a path, if it is a number and a quantity.
fn quantity<'v>(
    schemas: &Schemas,
    mut node: NodeId,
    mut value: &'v mut Value,
    path: &[String],
) -> Option<&'v mut Value> {
    for step in path {
        (node, value) = match (schemas.node(node), value) {
            (Node::Struct(_), Value::Object(map)) => (schemas.field(node, step)?.node, map.get_mut(step)?),
            (Node::Map(values), Value::Object(map)) => (*values, map.get_mut(step)?),
            (Node::List(items), Value::Array(list)) => (*items, list.get_mut(step.parse::<usize>().ok()?)?),
            _ => return None,
        };
    }
    (matches!(schemas.node(node), Node::Quantity) && value.is_number()).then_some(value)
}

/// A pass over a valid JSON text.
struct Scan<'a> {
    json: &'a [u8],
    at: usize,
    path: Vec<String>,
    found: Vec<NumberText>,
}

impl<'a> Scan<'a> {
    fn peek(&self) -> u8 {
        self.json.get(self.at).copied().unwrap_or_default()
    }

    fn has_any(&mut self) -> bool {
        while self.at < self.json.len() {
            match self.peek() {
                b'"' => _ = self.string(),
                b'-' | b'0'..=b'9' if !is_plain(self.number()) => return true,
                b'-' | b'0'..=b'9' => {}
                _ => self.at += 1,
            }
        }
        false
    }

    fn value(&mut self) {
        self.skip_blanks();
        match self.peek() {
            b'{' => self.object(),
            b'[' => self.array(),
            b'"' => _ = self.string(),
            b'-' | b'0'..=b'9' => {
                let text = self.number();
                if !is_plain(text) {
                    let text = String::from_utf8_lossy(text).into_owned();
                    self.found.push(NumberText { path: self.path.clone(), text });
                }
            }
            _ => self.skip_while(|byte| byte.is_ascii_alphabetic()),
        }
        self.skip_blanks();
    }

    fn object(&mut self) {
        self.at += 1;
        self.skip_blanks();
        while self.peek() == b'"' {
            let name = serde_json::from_slice(self.string()).unwrap_or_default();
            self.path.push(name);
            self.skip_while(|byte| byte.is_ascii_whitespace() || byte == b':');
            self.value();
            self.path.pop();
            self.skip_while(|byte| byte.is_ascii_whitespace() || byte == b',');
        }
        self.at += 1;
    }

    fn array(&mut self) {
        self.at += 1;
        self.skip_blanks();
        let mut index = 0_usize;
        while !matches!(self.peek(), b']' | 0) {
            self.path.push(index.to_string());
            self.value();
            self.path.pop();
            self.skip_while(|byte| byte.is_ascii_whitespace() || byte == b',');
            index += 1;
        }
        self.at += 1;
    }

    /// Passes a string; returns it with its quotes.
    fn string(&mut self) -> &'a [u8] {
        let start = self.at;
        self.at += 1;
        while !matches!(self.peek(), b'"' | 0) {
            self.at += if self.peek() == b'\\' { 2 } else { 1 };
        }
        self.at = (self.at + 1).min(self.json.len());
        &self.json[start..self.at]
    }

    fn number(&mut self) -> &'a [u8] {
        let start = self.at;
        self.skip_while(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
        &self.json[start..self.at]
    }

    fn skip_blanks(&mut self) {
        self.skip_while(|byte| byte.is_ascii_whitespace());
    }

    fn skip_while(&mut self, skipped: impl Fn(u8) -> bool) {
        while self.at < self.json.len() && skipped(self.peek()) {
            self.at += 1;
        }
    }
}

/// Whether the value of a number has only this text.
fn is_plain(text: &[u8]) -> bool {
    text.len() <= PLAIN_BYTES_MAX && !text.iter().any(|byte| b".eE".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_at_their_places() {
        let found = |json: &str| -> Vec<(String, String)> {
            let texts = texts(json.as_bytes()).into_iter();
            texts.map(|number| (number.path.join("/"), number.text)).collect()
        };
        let own = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
        };
        assert_eq!(found(r#"{"a": 1, "b": [true, null, "1e3", -5], "c": {}}"#), own(&[]));
        assert_eq!(
            found(
                r#" { "a" : [ {"b\"\u0041": 1e3}, [ ] , 0.50 ], "\\": "x\\", "d":{"e":-1.5E-2,"f":12345678901234567890} } "#
            ),
            own(&[("a/0/b\"A", "1e3"), ("a/2", "0.50"), ("d/e", "-1.5E-2"), ("d/f", "12345678901234567890")])
        );
        assert_eq!(found("1.0"), own(&[("", "1.0")]));
    }
}
