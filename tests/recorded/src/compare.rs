//! Compares a response with the recorded one, strictly or leniently (the README of the recordings lists the ignored
//! parts).

use serde_json::{Map, Value};

use crate::placeholders::Bound;

pub(crate) struct Received {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) warnings: Vec<String>,
    pub(crate) body: Value,
}

pub(crate) fn agrees(
    expected: &Value,
    answer: &Received,
    bound: &mut Bound,
    strict: bool,
    notes: &mut Vec<String>,
) -> bool {
    notes.clear();
    let status = expected["status"].as_u64().unwrap_or(0);
    if status != u64::from(answer.status) {
        notes.push(format!("status {status}, found {}: {}", answer.status, short(&answer.body)));
        notes.push(format!("expected body {}", short(&expected["body"])));
    }
    let content_type = expected["headers"]["content-type"].as_str().unwrap_or("");
    if content_type != answer.content_type {
        notes.push(format!("content-type {content_type:?}, found {:?}", answer.content_type));
    }
    let warnings: Vec<_> = match &expected["headers"]["warning"] {
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        Value::String(text) => vec![text.as_str()],
        _ => Vec::new(),
    };
    let same = warnings.len() == answer.warnings.len()
        && (!strict || warnings.iter().zip(&answer.warnings).all(|(e, f)| bound.matches(e, f)));
    if !same {
        notes.push(format!("warnings {warnings:?}, found {:?}", answer.warnings));
    }
    if notes.is_empty() || status == u64::from(answer.status) {
        let lenient_400 = !strict && status == 400;
        let mut compare = Comparison { bound, strict, lenient_400, notes };
        compare.value("", &expected["body"], &answer.body);
    }
    notes.is_empty()
}

fn short(value: &Value) -> String {
    value.to_string().chars().take(900).collect()
}

struct Comparison<'a> {
    bound: &'a mut Bound,
    strict: bool,
    lenient_400: bool,
    notes: &'a mut Vec<String>,
}

impl Comparison<'_> {
    fn differ(&mut self, path: &str, expected: &Value, found: &Value) {
        self.notes.push(format!("{path}: {} ≠ {}", short(expected), short(found)));
    }

    fn is_set_aside(&self, path: &str, key: &str) -> bool {
        !self.strict
            && match key {
                "managedFields" => true,
                "message" => {
                    (path.ends_with(']') && path.contains("status.conditions["))
                        || (self.lenient_400 && path.is_empty())
                }
                "description" => path.contains("columnDefinitions["),
                _ => false,
            }
    }

    fn value(&mut self, path: &str, expected: &Value, found: &Value) {
        match (expected, found) {
            (Value::Object(expected), Value::Object(found)) => self.object(path, expected, found),
            (Value::Array(one), Value::Array(other)) => {
                if path.ends_with("managedFields") {
                    return self.unordered(path, one, other);
                }
                if one.len() != other.len() {
                    return self.differ(path, expected, found);
                }
                for (at, (one, other)) in one.iter().zip(other).enumerate() {
                    self.value(&format!("{path}[{at}]"), one, other);
                }
            }
            (Value::String(text), Value::String(other)) => {
                if !self.bound.matches(text, other) {
                    self.differ(path, expected, found);
                }
            }
            (Value::String(text), Value::Number(number)) if text.starts_with("<port:") => {
                if !self.bound.matches(text, &number.to_string()) {
                    self.differ(path, expected, found);
                }
            }
            (Value::Number(one), Value::Number(other)) if one.as_f64() == other.as_f64() => {}
            (one, other) if one == other => {}
            _ => self.differ(path, expected, found),
        }
    }

    fn object(&mut self, path: &str, expected: &Map<String, Value>, found: &Map<String, Value>) {
        let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let mut seen = Vec::new();
        for (key, value) in expected {
            if self.is_set_aside(path, key) {
                seen.push(key.clone());
                continue;
            }
            let other =
                found.iter().find(|(other, _)| *other == key || self.bound.clone().matches(key, other));
            match other {
                Some((other, found)) => {
                    self.bound.matches(key, other);
                    seen.push(other.clone());
                    self.value(&below(key), value, found);
                }
                None => self.notes.push(format!("{}: {} is missing", below(key), short(value))),
            }
        }
        for (key, value) in found {
            if !seen.contains(key) && !self.is_set_aside(path, key) {
                self.notes.push(format!("{}: {} is too much", below(key), short(value)));
            }
        }
    }

    fn unordered(&mut self, path: &str, expected: &[Value], found: &[Value]) {
        let mut rest: Vec<&Value> = found.iter().collect();
        for one in expected {
            let fits = rest.iter().position(|other| {
                let (mut notes, mut bound) = (Vec::new(), self.bound.clone());
                let mut compare = Comparison {
                    bound: &mut bound,
                    strict: self.strict,
                    lenient_400: false,
                    notes: &mut notes,
                };
                compare.value("", one, other);
                notes.is_empty()
            });
            match fits {
                Some(at) => _ = rest.remove(at),
                None => self.notes.push(format!("{path}: {} is missing", short(one))),
            }
        }
        for one in rest {
            self.notes.push(format!("{path}: {} is too much", short(one)));
        }
    }
}
