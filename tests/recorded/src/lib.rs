//! Replays exchanges recorded from kube-apiserver 1.28 (the folder `kubernetes/recorded` of the test data, whose README
//! explains the form) against any server, and counts how many answers agree.
//!
//! What belongs here: reading scenarios, binding placeholders, sending the requests in order, comparing the answers,
//! the report. Not here: any server. A test implements [`ReplayTarget`] for its own and asserts its own floors. Start
//! reading at [`run`].
//!
//! `MAYFLY_RECORDED_CASE` selects the scenarios whose id contains it; `MAYFLY_RECORDED_DIFFERENCES` is the path of a
//! file that gets a line for each cause of lenient differences, followed by all differences.

#![warn(missing_debug_implementations)]

mod causes;
mod compare;
mod placeholders;

use std::{fmt::Write as _, path::PathBuf, time::Duration};

use bytes::Bytes;
use futures::StreamExt;
use http::{Request, Response, header};
use serde_json::{Value, json};

use crate::{
    compare::{Received, agrees},
    placeholders::Bound,
};

/// The server under test.
pub trait ReplayTarget {
    /// Whether controllers run, so that some requests must wait until objects settle.
    const CONTROLLERS: bool;

    /// Sends a request, as the administrator unless it has `Authorization`.
    fn send(&self, request: Request<Bytes>) -> impl Future<Output = Response<Bytes>>;

    /// Creates a namespace with its ServiceAccount `default` and its ConfigMap `kube-root-ca.crt`.
    fn open_namespace(&self, name: &str) -> impl Future<Output = ()>;
}

/// The number of exchanges of a replay that agree.
#[derive(Debug, Default)]
pub struct ReplayCount {
    pub all: usize,
    pub strict: usize,
    pub lenient: usize,
}

impl ReplayCount {
    fn add(&mut self, other: &Self) {
        self.all += other.all;
        self.strict += other.strict;
        self.lenient += other.lenient;
    }
}

impl std::fmt::Display for ReplayCount {
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

/// Whether the environment selects a part of the scenarios, to which minimum counts do not apply.
pub fn is_partial() -> bool {
    std::env::var_os("MAYFLY_RECORDED_CASE").is_some()
}

/// Replays all scenarios, prints the counts of each file, and returns their sum; `None` without test data.
/// `replay_one` calls [`replay`] with a number that no other scenario has.
#[expect(
    clippy::print_stdout,
    reason = "the runner counts skipped tests, and the counts are what one reads here"
)]
pub async fn run<F>(test: &str, replay_one: impl Fn(Value, usize) -> F) -> Option<ReplayCount>
where
    F: Future<Output = (ReplayCount, String)>,
{
    let Some(folder) = folder() else {
        println!("SKIPPED {test}: no test data (MAYFLY_TESTDATA)");
        return None;
    };
    let only = std::env::var("MAYFLY_RECORDED_CASE").ok();
    let (mut total, mut report, mut number) = (ReplayCount::default(), String::new(), 0);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files.into_iter().filter(|path| path.extension().is_some_and(|e| e == "json")) {
        let mut scenarios: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        scenarios.retain(|scenario| {
            let id = scenario["id"].as_str().unwrap();
            only.as_deref().is_none_or(|only| id.contains(only))
        });
        let (alone, together): (Vec<_>, Vec<_>) =
            scenarios.into_iter().partition(|scenario| scenario["alone"] == true);
        let mut count = ReplayCount::default();
        for (scenarios, at_once) in [(together, SCENARIOS_AT_ONCE), (alone, 1)] {
            let replays = scenarios.into_iter().map(|scenario| {
                number += 1;
                replay_one(scenario, number)
            });
            let counts: Vec<_> = futures::stream::iter(replays).buffered(at_once).collect().await;
            for (one, differences) in &counts {
                count.add(one);
                report.push_str(differences);
            }
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
    Some(total)
}

fn folder() -> Option<PathBuf> {
    let data = match std::env::var("MAYFLY_TESTDATA") {
        Ok(path) => PathBuf::from(path),
        Err(_) => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/testdata"),
    };
    Some(data.join("kubernetes/recorded")).filter(|folder| folder.is_dir())
}

/// Replays one scenario. Returns the count and a description of every difference.
pub async fn replay<T: ReplayTarget>(target: &T, scenario: &Value, at: usize) -> (ReplayCount, String) {
    let mut report = String::new();
    let mut bound = Bound::default();
    for (number, placeholder) in names(scenario, "namespaces").into_iter().enumerate() {
        let name = format!("rec-{at}-{number}");
        target.open_namespace(&name).await;
        bound.0.insert(placeholder, name);
    }
    for (number, placeholder) in names(scenario, "names").into_iter().enumerate() {
        bound.0.insert(placeholder, format!("nm-{at}-{number}"));
    }
    let mut count = ReplayCount::default();
    for (number, exchange) in scenario["exchanges"].as_array().unwrap().iter().enumerate() {
        count.all += 1;
        if T::CONTROLLERS {
            settle(target, exchange, &bound).await;
        }
        let answer = send(target, exchange, &bound).await;
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
    if T::CONTROLLERS {
        for path in names(scenario, "cleanup") {
            let path = escape(&bound.fill(&path));
            let request = Request::delete(path).body(Bytes::new()).expect("a path of the recording");
            target.send(request).await;
        }
    }
    (count, report)
}

fn names(scenario: &Value, field: &str) -> Vec<String> {
    let list = scenario[field].as_array().into_iter().flatten();
    list.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// The timeout of a response: a recorded watch ends by its own `timeoutSeconds`.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The time for which an object must be unchanged to count as settled, and the timeout for this.
const SETTLED_AFTER: Duration = Duration::from_millis(500);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);
const SETTLE_INTERVAL: Duration = Duration::from_millis(100);

/// Waits until the objects of the exchange are settled.
async fn settle<T: ReplayTarget>(target: &T, exchange: &Value, bound: &Bound) {
    let paths = names(exchange, "settle");
    let (mut last, mut same_for, mut waited) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    while !paths.is_empty() && same_for < SETTLED_AFTER && waited < SETTLE_TIMEOUT {
        let mut versions = Vec::new();
        for path in &paths {
            let request = Request::get(escape(&bound.fill(path))).body(Bytes::new());
            let answer = target.send(request.expect("a path of the recording")).await;
            let object: Value = serde_json::from_slice(answer.body()).unwrap_or(Value::Null);
            versions.push(object["metadata"]["resourceVersion"].clone());
        }
        same_for = if versions == last { same_for + SETTLE_INTERVAL } else { Duration::ZERO };
        last = versions;
        waited += SETTLE_INTERVAL;
        tokio::time::sleep(SETTLE_INTERVAL).await;
    }
}

async fn send<T: ReplayTarget>(target: &T, exchange: &Value, bound: &Bound) -> Received {
    let path = escape(&bound.fill(exchange["path"].as_str().unwrap()));
    let mut builder = Request::builder()
        .method(exchange["method"].as_str().unwrap())
        .uri(path)
        .header("user-agent", "rec/1.0");
    let headers = exchange["headers"].as_object().cloned().unwrap_or_default();
    if !headers.keys().any(|key| key.eq_ignore_ascii_case("accept")) {
        builder = builder.header("accept", "application/json");
    }
    for (name, value) in &headers {
        builder = builder.header(name, bound.fill(value.as_str().unwrap_or("")));
    }
    let body = match (&exchange["body"], &exchange["rawBody"]) {
        (Value::Null, Value::Null) => Bytes::new(),
        (Value::Null, raw) => Bytes::from(bound.fill(raw.as_str().unwrap_or(""))),
        (body, _) => Bytes::from(bound.fill_value(body).to_string()),
    };
    let work = target.send(builder.body(body).unwrap());
    let (parts, bytes) =
        tokio::time::timeout(ANSWER_TIMEOUT, work).await.expect("an answer in time").into_parts();
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
    Received { status: parts.status.as_u16(), content_type, warnings, body }
}

/// Escapes the characters that are not allowed in a path or a query.
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
