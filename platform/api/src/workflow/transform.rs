//! Inputs made from events: EventBridge's input transformer.
//!
//! `<name>` in the template is replaced by the part of the event that `paths` assigns to the name, `<event>` by the
//! whole event. In a template that is an object, a string that consists of `<name>` alone becomes the part itself, and
//! a placeholder inside a string becomes the part's text. A template that is a string is JSON text with placeholders:
//! inside quotes they become text, elsewhere JSON. Source: Amazon EventBridge User Guide, "Input transformation".

use std::collections::BTreeMap;

use serde_json::Value;

use super::InputTransform;

/// The name of the whole event.
const EVENT: &str = "event";

/// Whether a text is a valid name of a placeholder: letters, digits, `_`, `-` and `.`.
pub fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.chars().all(plain)
}

/// `$.detail.items[0].name`, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventPath(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Member(String),
    Item(usize),
}

impl EventPath {
    /// Parses a path of members and items; `None` if the text is not one.
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix('$')?;
        let mut steps = Vec::new();
        if rest.is_empty() {
            return Some(Self(steps));
        }
        for part in rest.strip_prefix('.')?.split('.') {
            let (name, items) = part.split_at(part.find('[').unwrap_or(part.len()));
            if name.is_empty() {
                return None;
            }
            steps.push(Step::Member(name.to_owned()));
            let mut items = items;
            while !items.is_empty() {
                let (number, after) = items.strip_prefix('[')?.split_once(']')?;
                steps.push(Step::Item(number.parse().ok()?));
                items = after;
            }
        }
        Some(Self(steps))
    }

    fn of<'a>(&self, event: &'a Value) -> Option<&'a Value> {
        self.0.iter().try_fold(event, |value, step| match step {
            Step::Member(name) => value.get(name),
            Step::Item(at) => value.get(at),
        })
    }
}

impl InputTransform {
    /// The placeholders of the template without a value: the path of each in the template, and its name.
    pub fn unknown(&self) -> Vec<(String, String)> {
        let mut unknown = Vec::new();
        self.look(&self.template, String::new(), &mut unknown);
        unknown
    }

    fn look(&self, template: &Value, at: String, unknown: &mut Vec<(String, String)>) {
        match template {
            Value::Object(map) => {
                map.iter().for_each(|(name, value)| self.look(value, format!("{at}.{name}"), unknown));
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    self.look(value, format!("{at}[{index}]"), unknown);
                }
            }
            Value::String(text) => {
                let places = text.split('<').skip(1).filter_map(|rest| Some(rest.split_once('>')?.0));
                let names = places.filter(|name| is_name(name) && !self.is_known(name));
                unknown.extend(names.map(|name| (at.clone(), name.to_owned())));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn is_known(&self, name: &str) -> bool {
        name == EVENT || self.paths.contains_key(name)
    }

    /// The input for an event. Parts that the event does not have become null, and empty inside of a text.
    pub fn apply(&self, event: &Value) -> Value {
        let part = |path: &String| EventPath::parse(path)?.of(event).cloned();
        let mut parts: BTreeMap<&str, Value> =
            self.paths.iter().map(|(name, path)| (name.as_str(), part(path).unwrap_or_default())).collect();
        parts.entry(EVENT).or_insert_with(|| event.clone());
        match &self.template {
            Value::String(text) => {
                let filled = fill_json(text, &parts);
                serde_json::from_str(&filled).unwrap_or(Value::String(filled))
            }
            template => fill(template, &parts),
        }
    }
}

fn fill(template: &Value, parts: &BTreeMap<&str, Value>) -> Value {
    match template {
        Value::Object(map) => {
            Value::Object(map.iter().map(|(name, value)| (name.clone(), fill(value, parts))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(|item| fill(item, parts)).collect()),
        Value::String(text) => {
            let whole = text.strip_prefix('<').and_then(|text| text.strip_suffix('>'));
            if let Some(part) = whole.and_then(|name| parts.get(name)) {
                return part.clone();
            }
            Value::String(replace(text, parts, |part, _| plain(part)))
        }
        other => other.clone(),
    }
}

fn fill_json(template: &str, parts: &BTreeMap<&str, Value>) -> String {
    replace(template, parts, |part, before| match is_open(before) {
        // Inside quotes: the text, escaped for JSON.
        true => {
            let quoted = Value::String(plain(part)).to_string();
            quoted[1..quoted.len() - 1].to_owned()
        }
        false => part.to_string(),
    })
}

/// Whether a text of JSON ends inside quotes.
fn is_open(text: &str) -> bool {
    let (mut open, mut escaped) = (false, false);
    for character in text.chars() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => open = !open,
            _ => {}
        }
    }
    open
}

fn plain(part: &Value) -> String {
    match part {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Replaces placeholders by parts; unknown placeholders are kept. `shown` receives the text before the placeholder.
fn replace(template: &str, parts: &BTreeMap<&str, Value>, shown: impl Fn(&Value, &str) -> String) -> String {
    let (mut out, mut rest) = (String::new(), template);
    while let Some(start) = rest.find('<') {
        let (before, place) = rest.split_at(start);
        out.push_str(before);
        let named = place.find('>').and_then(|end| Some((parts.get(&place[1..end])?, end)));
        match named {
            Some((part, end)) => {
                let text = shown(part, &template[..template.len() - place.len()]);
                out.push_str(&text);
                rest = &place[end + 1..];
            }
            None => {
                out.push('<');
                rest = &place[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn transform(template: Value) -> Value {
        let event = json!({"id": "7", "detail": {"n": 3, "who": "A \"B\"", "items": [{"sku": "x"}]}});
        let paths =
            [("n", "$.detail.n"), ("who", "$.detail.who"), ("sku", "$.detail.items[0].sku"), ("none", "$.x")];
        let paths = paths.into_iter().map(|(name, path)| (name.to_owned(), path.to_owned())).collect();
        InputTransform { paths, template }.apply(&event)
    }

    #[test]
    fn templates() {
        for (template, expected) in [
            (json!({"a": "<n>", "b": "for <who>: <sku>"}), json!({"a": 3, "b": "for A \"B\": x"})),
            (json!({"a": ["<none>", "<<n>>", "<other>"]}), json!({"a": [null, "<3>", "<other>"]})),
            (json!("{\"a\": <n>, \"b\": \"for <who>\"}"), json!({"a": 3, "b": "for A \"B\""})),
            (json!("<who> has <n>"), json!("\"A \\\"B\\\"\" has 3")),
            (json!("<n>"), json!(3)),
        ] {
            assert_eq!(transform(template.clone()), expected, "{template}");
        }
        assert_eq!(transform(json!("<event>"))["id"], "7");
    }

    #[test]
    fn what_nothing_fills_is_found() {
        let unknown = |template: Value| {
            let paths = [("id".to_owned(), "$.id".to_owned())].into();
            InputTransform { paths, template }.unknown()
        };
        for filled in
            [json!("<id> of <event>"), json!({"a": ["<id>", 1, null]}), json!("1 < 2 > 0, <a b>, <>, <")]
        {
            assert_eq!(unknown(filled.clone()), [], "{filled}");
        }
        let found = |at: &str, name: &str| (at.to_owned(), name.to_owned());
        assert_eq!(unknown(json!("{\"a\": <nope>}")), [found("", "nope")]);
        let deep = json!({"<key>": "x", "order": ["<id>", {"n": "<<nope>> and <none>"}]});
        assert_eq!(unknown(deep), [found(".order[1].n", "nope"), found(".order[1].n", "none")]);
    }

    #[test]
    fn places() {
        for good in ["$", "$.a", "$.a.b[0][12].c"] {
            assert!(EventPath::parse(good).is_some(), "{good}");
        }
        for bad in ["", "a", "$a", "$.", "$..a", "$.a[", "$.a[x]", "$.a[0]b", "$.[0]"] {
            assert!(EventPath::parse(bad).is_none(), "{bad}");
        }
    }
}
