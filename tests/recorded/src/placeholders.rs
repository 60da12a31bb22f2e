//! Placeholders of the recordings, and their values within a scenario.

use std::collections::BTreeMap;

use serde_json::Value;

/// The values of placeholders with numbers.
#[derive(Clone, Default)]
pub(crate) struct Bound(pub(crate) BTreeMap<String, String>);

impl Bound {
    pub(crate) fn fill(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (placeholder, value) in &self.0 {
            if text.contains(placeholder.as_str()) {
                text = text.replace(placeholder.as_str(), value);
            }
        }
        text
    }

    pub(crate) fn fill_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => {
                let filled = self.fill(text);
                match filled.parse::<i64>() {
                    Ok(number) if text.starts_with("<port:") => number.into(),
                    _ => filled.into(),
                }
            }
            Value::Array(list) => list.iter().map(|item| self.fill_value(item)).collect(),
            Value::Object(map) => {
                map.iter().map(|(key, value)| (self.fill(key), self.fill_value(value))).collect()
            }
            other => other.clone(),
        }
    }

    /// Matches a text with placeholders, and binds unbound ones.
    pub(crate) fn matches(&mut self, expected: &str, found: &str) -> bool {
        let mut trial = self.clone();
        if trial.step(expected, found) {
            *self = trial;
            return true;
        }
        false
    }

    fn step(&mut self, expected: &str, found: &str) -> bool {
        let Some((open, close)) = placeholder(expected) else { return expected == found };
        let (before, name, after) = (&expected[..open], &expected[open..close], &expected[close..]);
        let Some(found) = found.strip_prefix(before) else { return false };
        if let Some(value) = self.0.get(name).cloned() {
            return found.strip_prefix(value.as_str()).is_some_and(|rest| self.step(after, rest));
        }
        let (kind, numbered) = match name.trim_matches(['<', '>']).split_once(':') {
            Some((kind, _)) => (kind, true),
            None => (name.trim_matches(['<', '>']), false),
        };
        let most = found.char_indices().find(|(_, c)| !fits(kind, *c)).map_or(found.len(), |(at, _)| at);
        let least = usize::from(kind != "text");
        for end in (least..=most).rev().filter(|end| found.is_char_boundary(*end)) {
            let mut trial = self.clone();
            if numbered {
                trial.0.insert(name.to_owned(), found[..end].to_owned());
            }
            if trial.step(after, &found[end..]) {
                *self = trial;
                return true;
            }
        }
        false
    }
}

fn fits(kind: &str, character: char) -> bool {
    match kind {
        "uid" => character.is_ascii_hexdigit() || character == '-',
        "rv" | "port" => character.is_ascii_digit(),
        "time" => character.is_ascii_digit() || "TZ:.-+".contains(character),
        "age" => character.is_ascii_alphanumeric() || "<>".contains(character),
        "ip" => character.is_ascii_hexdigit() || ".:".contains(character),
        "rand" | "hash" => character.is_ascii_alphanumeric(),
        "text" => true,
        _ => !character.is_whitespace() && character != '"',
    }
}

/// The range of the first placeholder of a text.
fn placeholder(text: &str) -> Option<(usize, usize)> {
    const KINDS: [&str; 13] =
        ["ns", "uid", "rv", "time", "age", "rand", "ip", "port", "hash", "text", "token", "continue", "name"];
    let mut from = 0;
    while let Some(open) = text[from..].find('<').map(|at| at + from) {
        if let Some(close) = text[open..].find('>').map(|at| at + open + 1) {
            let kind = text[open + 1..close - 1].split(':').next().unwrap_or("");
            if KINDS.contains(&kind) {
                return Some((open, close));
            }
        }
        from = open + 1;
    }
    None
}
