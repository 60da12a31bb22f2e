//! Comparing an answer with a recorded one, field by field.
//!
//! A recording has placeholders where AWS's value differs from run to run. A placeholder stands for any
//! text, but for the same text wherever it appears in a case; a date's placeholder for any date.

use std::collections::BTreeMap;

use serde_json::Value;

/// What each placeholder stands for so far.
pub(crate) type Bindings = BTreeMap<String, String>;

/// Words that stand for a date wherever they are a whole value.
const DATES: [&str; 9] = [
    "datetime",
    "timestamp",
    "date",
    "creation-date",
    "start-date",
    "stop-date",
    "start-time",
    "entered-time",
    "update-date",
];
/// Words that stand for a name or an ARN, also inside a longer text.
const WORDS: [&str; 10] = [
    "state_machine_alias_name",
    "ssm_nonexistent_arn",
    "activity_arn",
    "activity_name",
    "snf_role_arn",
    "sfn_role_arn",
    "generated-uuid",
    "sfn_role_name",
    "task_token",
    "111111111111",
];

/// The first field that differs, or none.
pub(crate) fn difference(expected: &Value, actual: &Value, at: &str, bound: &mut Bindings) -> Option<String> {
    let differs = |what: &str| Some(format!("{at}: {what}: expected {}, got {}", cut(expected), cut(actual)));
    match (expected, actual) {
        (Value::Object(wanted), Value::Object(got)) => {
            if let Some(events) = wanted.get("events").and_then(Value::as_array)
                && let Some(found) = got.get("events").and_then(Value::as_array)
                && events.iter().any(is_unordered)
            {
                return events_difference(events, &as_recorded(found), at, bound);
            }
            for (key, value) in wanted {
                let at = format!("{at}.{key}");
                match got.get(key) {
                    Some(found) => {
                        if let Some(found) = difference(value, found, &at, bound) {
                            return Some(found);
                        }
                    }
                    None => return Some(format!("{at}: missing: expected {}", cut(value))),
                }
            }
            let extra = got.iter().find(|(key, _)| !wanted.contains_key(*key))?;
            Some(format!("{at}.{}: not expected: {}", extra.0, cut(extra.1)))
        }
        (Value::Array(wanted), Value::Array(got)) => {
            for (index, (value, found)) in wanted.iter().zip(got).enumerate() {
                if let Some(found) = difference(value, found, &format!("{at}[{index}]"), bound) {
                    return Some(found);
                }
            }
            if wanted.len() == got.len() { None } else { differs("another length") }
        }
        (Value::Object(_) | Value::Array(_), Value::String(text)) => match serde_json::from_str(text) {
            Ok(parsed) => difference(expected, &parsed, at, bound),
            Err(_) => differs("no JSON text"),
        },
        (Value::String(word), found) if DATES.contains(&word.as_str()) => {
            if is_date(found) {
                None
            } else {
                differs("no date")
            }
        }
        (Value::String(pattern), Value::String(text)) => {
            if matches(pattern, text, bound) {
                None
            } else {
                differs("another text")
            }
        }
        (Value::Number(a), Value::Number(b)) if a.as_f64() == b.as_f64() => None,
        (a, b) if a == b => None,
        _ => differs("another value"),
    }
}

/// Ids zeroed: AWS's order is not fixed there.
fn is_unordered(event: &Value) -> bool {
    matches!(event.get("id"), Some(Value::Array(_))) || event.get("id") == Some(&Value::from(0))
}

/// A history as the recorder left it: it sorts the events inside a Parallel state, and where the state
/// both succeeded and was left it puts the sorted events over the first of the two.
fn as_recorded(events: &[Value]) -> Vec<Value> {
    let mut kept: Vec<Value> = Vec::new();
    let mut inside: Option<(usize, Vec<Value>)> = None;
    let mut open = false;
    for event in events {
        match event.get("type").and_then(Value::as_str).unwrap_or_default() {
            "ParallelStateSucceeded"
            | "ParallelStateAborted"
            | "ParallelStateExited"
            | "ParallelStateFailed" => {
                if let Some((start, sublist)) = &inside {
                    kept.truncate(*start);
                    kept.extend(sublist.iter().cloned());
                }
                open = false;
            }
            "ParallelStateStarted" => {
                inside = Some((kept.len() + 1, Vec::new()));
                open = true;
            }
            _ => {
                if let Some((_, sublist)) = inside.as_mut().filter(|_| open) {
                    sublist.push(event.clone());
                }
            }
        }
        kept.push(event.clone());
    }
    kept
}

/// Runs of events without a fixed order are compared as sets, everything else in order.
fn events_difference(wanted: &[Value], got: &[Value], at: &str, bound: &mut Bindings) -> Option<String> {
    let mut used = vec![false; got.len()];
    for (index, event) in wanted.iter().enumerate().filter(|(_, event)| !is_unordered(event)) {
        let Some(found) = got.get(index) else {
            return Some(format!("{at}[{index}]: missing: {}", cut(event)));
        };
        used[index] = true;
        if let Some(found) = difference(event, found, &format!("{at}[{index}]"), bound) {
            return Some(found);
        }
    }
    for (index, event) in wanted.iter().enumerate().filter(|(_, event)| is_unordered(event)) {
        let place = got.iter().enumerate().find_map(|(place, found)| {
            let mut found = found.clone();
            found["id"] = event["id"].clone();
            found["previousEventId"] = event["previousEventId"].clone();
            let mut trial = bound.clone();
            let same = !used[place] && difference(event, &found, "", &mut trial).is_none();
            same.then_some((place, trial))
        });
        match place {
            Some((place, trial)) => {
                used[place] = true;
                *bound = trial;
            }
            None => return Some(format!("{at}[{index}]: no such event: {}", cut(event))),
        }
    }
    let extra = used.iter().position(|used| !used)?;
    Some(format!("{at}[{extra}]: not expected: {}", cut(&got[extra])))
}

fn is_date(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|seconds| seconds > 0.0),
        Value::String(text) => text.len() >= 10,
        // A header's one value.
        Value::Array(values) => matches!(&values[..], [value] if is_date(value)),
        _ => false,
    }
}

enum Piece<'a> {
    Text(&'a str),
    Hole(&'a str),
}

/// Whether `text` is `pattern` with its placeholders filled consistently.
pub(crate) fn matches(pattern: &str, text: &str, bound: &mut Bindings) -> bool {
    if pattern == text {
        return true;
    }
    let pieces = pieces(pattern);
    let mut trial = bound.clone();
    let same = fill(&pieces, text, &mut trial);
    if same {
        *bound = trial;
    }
    same
}

fn pieces(pattern: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = pattern;
    let mut plain = 0;
    while plain < rest.len() {
        let tail = &rest[plain..];
        let length = hole(tail);
        match length {
            Some(length) => {
                if plain > 0 {
                    pieces.push(Piece::Text(&rest[..plain]));
                }
                pieces.push(Piece::Hole(&tail[..length]));
                rest = &tail[length..];
                plain = 0;
            }
            None => plain += tail.chars().next().map_or(1, char::len_utf8),
        }
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest));
    }
    pieces
}

/// The length of the placeholder that `tail` begins with.
fn hole(tail: &str) -> Option<usize> {
    if let Some(inner) = tail.strip_prefix('<') {
        let end = inner.find('>')?;
        let named = |c: char| c.is_ascii_alphanumeric() || "_-:".contains(c);
        return (end > 0 && inner[..end].chars().all(named)).then_some(end + 2);
    }
    let word = WORDS.iter().find(|word| tail.starts_with(**word))?;
    let numbered = tail[word.len()..].strip_prefix('_').map_or(0, |rest| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        if digits > 0 { digits + 1 } else { 0 }
    });
    Some(word.len() + numbered)
}

fn fill(pieces: &[Piece<'_>], text: &str, bound: &mut Bindings) -> bool {
    match pieces {
        [] => text.is_empty(),
        [Piece::Text(wanted), rest @ ..] => {
            text.strip_prefix(wanted).is_some_and(|text| fill(rest, text, bound))
        }
        [Piece::Hole(name), rest @ ..] => {
            if let Some(value) = bound.get(*name).cloned() {
                return text.strip_prefix(value.as_str()).is_some_and(|text| fill(rest, text, bound));
            }
            let ends = text.char_indices().map(|(at, _)| at).skip(1).chain([text.len()]);
            let taken = |value: &str| {
                bound.iter().any(|(other, bound)| bound == value && class(other) == class(name))
            };
            for end in ends.filter(|end| *end > 0) {
                if taken(&text[..end]) {
                    continue;
                }
                let mut trial = bound.clone();
                trial.insert((*name).to_owned(), text[..end].to_owned());
                if fill(rest, &text[end..], &mut trial) {
                    *bound = trial;
                    return true;
                }
            }
            false
        }
    }
}

/// A placeholder without its numbers: two of one class stand for different texts.
fn class(name: &str) -> String {
    name.chars().filter(|c| !c.is_ascii_digit()).collect()
}

fn cut(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(600) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn same(expected: Value, actual: Value) -> bool {
        difference(&expected, &actual, "", &mut Bindings::new()).is_none()
    }

    #[test]
    fn a_placeholder_stands_for_one_text_in_a_case() {
        assert!(same(json!(["<uuid:1>", "<uuid:1>"]), json!(["a", "a"])));
        assert!(!same(json!(["<uuid:1>", "<uuid:1>"]), json!(["a", "b"])));
        assert!(same(json!("arn:<partition>:x:<ArnPart_0idx>:1"), json!("arn:aws:x:name:1")));
        assert!(!same(json!("arn:<partition>:x:<ArnPart_0idx>:1"), json!("arn:aws:x:name:2")));
        assert!(same(json!("The activity activity_arn is not"), json!("The activity arn:x is not")));
        assert!(!same(json!(["<uuid:1>", "<uuid:2>"]), json!(["a", "a"])));
    }

    #[test]
    fn every_field_counts() {
        assert!(!same(json!({"a": 1}), json!({"a": 1, "b": 2})));
        assert!(!same(json!({"a": 1, "b": 2}), json!({"a": 1})));
        assert!(!same(json!({"a": {"b": [1]}}), json!({"a": {"b": [1, 2]}})));
        assert!(same(json!({"input": {"a": 1}}), json!({"input": "{\"a\": 1}"})));
        assert!(!same(json!({"input": "[1, 2]"}), json!({"input": "[1,2]"})));
        assert!(!same(json!({"at": "timestamp"}), json!({"at": true})));
    }
}
