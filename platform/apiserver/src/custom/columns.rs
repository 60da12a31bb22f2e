//! Printer columns: Kubernetes' dialect of JSONPath, and the cells that it finds.

use jiff::Timestamp;
use serde_json::Value;

use crate::{object::Object, registry::print};

/// An entry of `additionalPrinterColumns`.
#[derive(Debug)]
pub(super) struct PrinterColumn {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) format: String,
    pub(super) description: String,
    pub(super) priority: u8,
    path: JsonPath,
}

impl PrinterColumn {
    pub(super) fn parse(column: &Value) -> Option<Self> {
        let text = |field: &str| column[field].as_str().unwrap_or("").to_owned();
        Some(Self {
            name: text("name"),
            kind: text("type"),
            format: text("format"),
            description: match text("description") {
                none if none.is_empty() => {
                    let path = column["jsonPath"].as_str().unwrap_or("");
                    format!("Custom resource definition column (in JSONPath format): {path}")
                }
                given => given,
            },
            priority: u8::from(column["priority"].as_i64().unwrap_or(0) > 0),
            path: JsonPath::parse(column["jsonPath"].as_str()?)?,
        })
    }

    /// The column of definitions that name none.
    pub(super) fn age() -> Self {
        Self {
            name: "Age".into(),
            kind: "date".into(),
            format: String::new(),
            description:
                "CreationTimestamp is a timestamp representing the server time when this object was created."
                    .into(),
            priority: 0,
            path: JsonPath::parse(".metadata.creationTimestamp").expect("the path is well-formed"),
        }
    }

    pub(super) fn cell(&self, object: &Object, now: Timestamp) -> Value {
        let root = Value::Object(object.0.clone());
        let found = self.path.find(&root);
        let Some(first) = found.first().filter(|value| !value.is_null()) else { return Value::Null };
        match (self.kind.as_str(), first) {
            ("date", Value::String(time)) => print::since(time, now).into(),
            ("integer" | "number", Value::Number(_)) | ("boolean", Value::Bool(_)) => (*first).clone(),
            ("string", _) if found.len() > 1 => {
                found.iter().map(|value| plain(value)).collect::<Vec<_>>().join(",").into()
            }
            ("string", value) => plain(value).into(),
            _ => Value::Null,
        }
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A path such as `.status.conditions[?(@.type=="Ready")].status`.
#[derive(Debug)]
pub(super) struct JsonPath(Vec<Segment>);

#[derive(Debug, PartialEq, Eq)]
enum Segment {
    Field(String),
    Index(i64),
    All,
    /// The items whose field at the path has this text.
    Filter(Vec<String>, String),
}

impl JsonPath {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut rest = text.strip_prefix('$').unwrap_or(text);
        let mut segments = Vec::new();
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('[') {
                let end = bracket_end(after)?;
                segments.push(bracket(after[..end].trim())?);
                rest = &after[end + 1..];
                continue;
            }
            rest = rest.strip_prefix('.').or_else(|| segments.is_empty().then_some(rest))?;
            let (field, after) = field(rest);
            rest = after;
            segments.push(if field == "*" { Segment::All } else { Segment::Field(field) });
        }
        let empty = |segment: &Segment| matches!(segment, Segment::Field(name) if name.is_empty());
        (!segments.is_empty() && !segments.iter().any(empty)).then_some(Self(segments))
    }

    fn find<'a>(&self, root: &'a Value) -> Vec<&'a Value> {
        self.0.iter().fold(vec![root], |found, segment| {
            found.into_iter().flat_map(|value| segment.of(value)).collect()
        })
    }
}

/// A name up to the next dot or bracket; `\.` is a dot of the name.
fn field(text: &str) -> (String, &str) {
    let mut name = String::new();
    let mut characters = text.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        match character {
            '.' | '[' => return (name, &text[at..]),
            '\\' => name.extend(characters.next().map(|(_, escaped)| escaped)),
            other => name.push(other),
        }
    }
    (name, "")
}

/// The index of the closing bracket, with quotes respected.
fn bracket_end(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, character) in text.char_indices() {
        match (quote, character) {
            (None, ']') => return Some(at),
            (None, '"' | '\'') => quote = Some(character),
            (Some(open), close) if open == close => quote = None,
            _ => {}
        }
    }
    None
}

fn bracket(text: &str) -> Option<Segment> {
    let unquoted = |text: &str| {
        let inner = text.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
        inner.or_else(|| text.strip_prefix('"')?.strip_suffix('"')).map(str::to_owned)
    };
    if text == "*" {
        return Some(Segment::All);
    }
    if let Ok(index) = text.parse() {
        return Some(Segment::Index(index));
    }
    if let Some(filter) = text.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        let (path, wanted) = filter.split_once("==")?;
        let path = path.trim().strip_prefix("@.")?.split('.').map(str::to_owned).collect();
        let wanted = wanted.trim();
        return Some(Segment::Filter(path, unquoted(wanted).unwrap_or_else(|| wanted.to_owned())));
    }
    unquoted(text).map(Segment::Field)
}

impl Segment {
    fn of<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        let items = || value.as_array().map_or(&[][..], Vec::as_slice);
        match self {
            Self::Field(name) => value.get(name).into_iter().collect(),
            Self::Index(at) => {
                let length = i64::try_from(items().len()).unwrap_or(i64::MAX);
                let at = if *at < 0 { length + at } else { *at };
                usize::try_from(at).ok().and_then(|at| items().get(at)).into_iter().collect()
            }
            Self::All => match value {
                Value::Object(map) => map.values().collect(),
                _ => items().iter().collect(),
            },
            Self::Filter(path, wanted) => {
                let has = |item: &&Value| {
                    let field = path.iter().try_fold(*item, |value, name| value.get(name));
                    field.is_some_and(|field| plain(field) == *wanted)
                };
                items().iter().filter(has).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_find_fields_items_and_conditions() {
        let value = json!({"spec": {"a.b": 1, "list": [{"n": "x"}, {"n": "y"}]},
                           "status": {"conditions": [{"type": "Synced", "status": "False"},
                                                     {"type": "Ready", "status": "True"}]}});
        let find =
            |path: &str| JsonPath::parse(path).unwrap().find(&value).into_iter().cloned().collect::<Vec<_>>();
        assert_eq!(find(r".spec.a\.b"), [json!(1)]);
        assert_eq!(find(".spec['a.b']"), [json!(1)]);
        assert_eq!(find(".spec.list[*].n"), [json!("x"), json!("y")]);
        assert_eq!(find(".spec.list[-1].n"), [json!("y")]);
        assert_eq!(find(r#".status.conditions[?(@.type=="Ready")].status"#), [json!("True")]);
        assert_eq!(find(".spec.absent"), Vec::<Value>::new());
        for bad in ["", ".", ".a..b", ".a[", ".a[?(@.b)]"] {
            assert!(JsonPath::parse(bad).is_none(), "{bad}");
        }
    }
}
