//! Replays exchanges recorded from kube-apiserver 1.28 (the folder `kubernetes/recorded` of the test data, whose README
//! explains the form), prints how many agree per file, and asserts a floor.
//!
//! `MAYFLY_RECORDED_CASE` runs the scenarios whose id contains it; `MAYFLY_RECORDED_DIFFERENCES` names a file that gets
//! every difference, and before them a line for each cause of those that count leniently.

mod causes;

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf};

use axum::body::Body;
use futures::StreamExt;
use http::{Response, header};
use http_body_util::BodyExt;
use serde_json::{Map, Value, json};

use crate::support::{Fixture, request};

/// Exchanges that agree, at least: raised with what is implemented.
const STRICT_MIN: usize = 2955;
const LENIENT_MIN: usize = 3020;

#[tokio::test(flavor = "multi_thread")]
#[expect(
    clippy::print_stdout,
    reason = "the runner counts skipped tests, and the counts are what one reads here"
)]
async fn recorded_exchanges_agree() {
    let Some(folder) = folder() else {
        println!("SKIPPED recorded_exchanges_agree: no test data (MAYFLY_TESTDATA)");
        return;
    };
    let only = std::env::var("MAYFLY_RECORDED_CASE").ok();
    let (mut total, mut report) = (Count::default(), String::new());
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files.into_iter().filter(|path| path.extension().is_some_and(|e| e == "json")) {
        let scenarios: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let chosen = scenarios.iter().enumerate().filter(|(_, scenario)| {
            let id = scenario["id"].as_str().unwrap();
            only.as_deref().is_none_or(|only| id.contains(only))
        });
        let replays = futures::stream::iter(chosen.map(|(at, scenario)| replay(scenario, at)));
        let counts: Vec<_> = replays.buffered(SCENARIOS_AT_ONCE).collect().await;
        let mut count = Count::default();
        for (one, differences) in &counts {
            count.add(one);
            report.push_str(differences);
        }
        if count.all > 0 {
            println!("{:<28} {count}", path.file_stem().unwrap().to_string_lossy());
        }
        total.add(&count);
    }
    println!("{:<28} {total}", "all");
    if let Ok(file) = std::env::var("MAYFLY_RECORDED_DIFFERENCES") {
        std::fs::write(file, format!("{}\n{report}", causes::by_cause(&report))).unwrap();
    }
    if only.is_none() {
        assert!(total.strict >= STRICT_MIN, "{} agree strictly, {STRICT_MIN} did before", total.strict);
        assert!(total.lenient >= LENIENT_MIN, "{} agree, {LENIENT_MIN} did before", total.lenient);
    }
}

fn folder() -> Option<PathBuf> {
    let data = match std::env::var("MAYFLY_TESTDATA") {
        Ok(path) => PathBuf::from(path),
        Err(_) => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/testdata"),
    };
    Some(data.join("kubernetes/recorded")).filter(|folder| folder.is_dir())
}

#[derive(Default)]
struct Count {
    all: usize,
    strict: usize,
    lenient: usize,
}

impl Count {
    fn add(&mut self, other: &Self) {
        self.all += other.all;
        self.strict += other.strict;
        self.lenient += other.lenient;
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |part: usize| part * 100 / self.all.max(1);
        write!(
            f,
            "{:>5} exchanges, strict {:>5} ({}%), lenient {:>5} ({}%)",
            self.all,
            self.strict,
            percent(self.strict),
            self.lenient,
            percent(self.lenient)
        )
    }
}

/// Scenarios replayed at the same time: most of them wait for a watch to end.
const SCENARIOS_AT_ONCE: usize = 8;

/// Replays one scenario on a server of its own. Returns the count and a description of every difference.
async fn replay(scenario: &Value, at: usize) -> (Count, String) {
    let mut report = String::new();
    let with_accounts = |config: &mut mayfly_apiserver::Config| {
        config.service_accounts_required = true;
        config.service_account_token_volumes = true;
    };
    let fixture = Fixture::with(with_accounts, |_| {}).await;
    let mut bound = Bound::default();
    for (number, placeholder) in names(scenario, "namespaces").into_iter().enumerate() {
        let name = format!("rec-{at}-{number}");
        fixture.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": name}})).await;
        let path = format!("/api/v1/namespaces/{name}");
        fixture
            .call("POST", &format!("{path}/serviceaccounts"), json!({"metadata": {"name": "default"}}))
            .await;
        let certificate = json!({"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": "x"}});
        fixture.call("POST", &format!("{path}/configmaps"), certificate).await;
        bound.0.insert(placeholder, name);
    }
    for (number, placeholder) in names(scenario, "names").into_iter().enumerate() {
        bound.0.insert(placeholder, format!("nm-{at}-{number}"));
    }
    let mut count = Count::default();
    for (number, exchange) in scenario["exchanges"].as_array().unwrap().iter().enumerate() {
        count.all += 1;
        let answer = send(&fixture, exchange, &bound).await;
        let expected = &exchange["expected"];
        let mut differences = Vec::new();
        let strict = agrees(expected, &answer, &mut bound, true, &mut differences);
        let mut set_aside = Vec::new();
        let lenient = strict || agrees(expected, &answer, &mut bound, false, &mut set_aside);
        if !lenient {
            differences = set_aside;
        }
        count.strict += usize::from(strict);
        count.lenient += usize::from(lenient);
        if !strict {
            let _ = writeln!(
                report,
                "{} {} #{number} [{}] {} {}",
                if lenient { "STRICT " } else { "LENIENT" },
                scenario["id"].as_str().unwrap(),
                exchange["category"].as_str().unwrap_or(""),
                exchange["method"].as_str().unwrap_or(""),
                exchange["path"].as_str().unwrap_or(""),
            );
            for difference in differences {
                let _ = writeln!(report, "    {difference}");
            }
        }
    }
    (count, report)
}

fn names(scenario: &Value, field: &str) -> Vec<String> {
    let list = scenario[field].as_array().into_iter().flatten();
    list.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

struct Answer {
    status: u16,
    content_type: String,
    warnings: Vec<String>,
    body: Value,
}

/// How long a watch of the recording may take: it ends by its own `timeoutSeconds`.
const ANSWER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(20);

async fn send(fixture: &Fixture, exchange: &Value, bound: &Bound) -> Answer {
    let path = escape(&bound.fill(exchange["path"].as_str().unwrap()));
    let mut builder = request(exchange["method"].as_str().unwrap(), &path).header("user-agent", "rec/1.0");
    let headers = exchange["headers"].as_object().cloned().unwrap_or_default();
    if !headers.keys().any(|key| key.eq_ignore_ascii_case("accept")) {
        builder = builder.header("accept", "application/json");
    }
    for (name, value) in &headers {
        if name.eq_ignore_ascii_case("authorization") {
            builder.headers_mut().unwrap().remove(header::AUTHORIZATION);
        }
        builder = builder.header(name, bound.fill(value.as_str().unwrap_or("")));
    }
    let body = match (&exchange["body"], &exchange["rawBody"]) {
        (Value::Null, Value::Null) => Body::empty(),
        (Value::Null, raw) => Body::from(bound.fill(raw.as_str().unwrap_or(""))),
        (body, _) => Body::from(bound.fill_value(body).to_string()),
    };
    let work = async {
        let response: Response<Body> = fixture.send(builder.body(body).unwrap()).await;
        let (parts, body) = response.into_parts();
        (parts, body.collect().await.map(|body| body.to_bytes()).unwrap_or_default())
    };
    let (parts, bytes) = tokio::time::timeout(ANSWER_TIMEOUT, work).await.expect("an answer in time");
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let content_type =
        content_type.unwrap_or("").replace("; charset=utf-8", "").replace(";charset=utf-8", "");
    let warnings = parts.headers.get_all(header::WARNING).iter();
    let warnings = warnings.filter_map(|value| value.to_str().ok().map(str::to_owned)).collect();
    let is_watch = exchange["expected"]["body"].get("stream").is_some();
    let body = match is_watch {
        true => {
            let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            json!({"stream": lines.filter_map(|line| serde_json::from_slice(line).ok()).collect::<Vec<Value>>()})
        }
        false => serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned())),
    };
    Answer { status: parts.status.as_u16(), content_type, warnings, body }
}

/// Escapes what may not stand in a path or a query.
fn escape(path: &str) -> String {
    let mut out = String::new();
    for character in path.chars() {
        match character {
            ' ' => out.push_str("%20"),
            '<' | '>' | '"' | '{' | '}' | '|' | '\\' | '^' | '`' => {
                let _ = write!(out, "%{:02X}", u32::from(character));
            }
            character if !character.is_ascii() => {
                let mut bytes = [0; 4];
                for byte in character.encode_utf8(&mut bytes).bytes() {
                    let _ = write!(out, "%{byte:02X}");
                }
            }
            other => out.push(other),
        }
    }
    out
}

/// What placeholders with numbers stand for.
#[derive(Clone, Default)]
struct Bound(BTreeMap<String, String>);

impl Bound {
    fn fill(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (placeholder, value) in &self.0 {
            if text.contains(placeholder.as_str()) {
                text = text.replace(placeholder.as_str(), value);
            }
        }
        text
    }

    fn fill_value(&self, value: &Value) -> Value {
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

    /// Matches a text with placeholders; binds those that are new.
    fn matches(&mut self, expected: &str, found: &str) -> bool {
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

/// The first placeholder of a text.
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

fn agrees(
    expected: &Value,
    answer: &Answer,
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
        let mut compare = Compare { bound, strict, lenient_400, notes };
        compare.value("", &expected["body"], &answer.body);
    }
    notes.is_empty()
}

fn short(value: &Value) -> String {
    value.to_string().chars().take(900).collect()
}

struct Compare<'a> {
    bound: &'a mut Bound,
    strict: bool,
    lenient_400: bool,
    notes: &'a mut Vec<String>,
}

impl Compare<'_> {
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
                let mut compare =
                    Compare { bound: &mut bound, strict: self.strict, lenient_400: false, notes: &mut notes };
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
