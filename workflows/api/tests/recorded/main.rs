//! What AWS answered, and what we answer: every recorded case is replayed through the router and compared
//! in every field. Prints how many agree, and writes what differs first in each of the others to
//! `target/recorded-differences.txt`. The test data is not part of the project (see [`case`]).

mod case;
mod compare;
mod held_clock;
mod replay;
#[path = "../stand_ins/mod.rs"]
mod stand_ins;

use std::fmt::Write as _;

use serde_json::{Value, json};

use case::Case;
use compare::{Bindings, difference};
use replay::{Reply, as_seen};

/// How many cases agreed when this was last raised; fewer is a step back.
const AGREEING_MIN: usize = 182;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_cases_agree_in_every_field() {
    let Some(cases) = case::load() else {
        eprintln!("skipped: no recordings (set MAYFLY_TESTDATA to the folder that has aws-recorded)");
        return;
    };
    let only = std::env::var("MAYFLY_RECORDED_CASE").ok();
    let chosen = |case: &&Case| only.as_ref().is_none_or(|only| case.name.contains(only.as_str()));
    let mut report = String::new();
    let mut agreeing = 0;
    let mut total = 0;
    for case in cases.iter().filter(chosen) {
        total += 1;
        let replies = replay::replay(case).await;
        match first_difference(case, &replies) {
            None => agreeing += 1,
            Some(found) => writeln!(report, "{}\n    {found}", case.name).expect("text"),
        }
    }
    eprintln!("{agreeing} of {total} recorded cases agree in every field\n{report}");
    if only.is_none() {
        let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("../recorded-differences.txt");
        std::fs::write(&target, format!("{agreeing} of {total} agree\n{report}"))
            .expect("the report is written");
        assert!(agreeing >= AGREEING_MIN, "{agreeing} agree, {AGREEING_MIN} did before:\n{report}");
    }
}

/// Recorded steps have names of their own, calls have none, and repeated calls are one. So each step is
/// looked for among the replies from the one that the step before was found in; a step that none of them
/// equals is told with the reply that comes closest.
fn first_difference(case: &Case, replies: &[Reply]) -> Option<String> {
    let mut bound = Bindings::new();
    bound.insert("<partition>".into(), "aws".into());
    bound.insert("<region>".into(), "us-east-1".into());
    bound.insert("111111111111".into(), "000000000000".into());
    let mut from = 0;
    for (step, expected) in &case.expected {
        if is_client_side(expected) {
            continue;
        }
        let order = (from..replies.len()).chain(0..from);
        let mut closest: Option<(usize, String)> = None;
        let mut found = None;
        let candidates =
            order.flat_map(|at| shaped(expected, replies, at).into_iter().map(move |form| (at, form)));
        for (at, actual) in candidates {
            let mut trial = bound.clone();
            match difference(expected, &actual, step, &mut trial) {
                None => {
                    found = Some((at, trial));
                    break;
                }
                Some(told) => {
                    let likeness = likeness(expected, &actual);
                    if closest.as_ref().is_none_or(|(best, _)| likeness > *best) {
                        closest = Some((likeness, told));
                    }
                }
            }
        }
        match found {
            Some((at, trial)) => (from, bound) = (at, trial),
            None => {
                return Some(
                    closest.map_or_else(|| format!("{step}: no reply of that form"), |(_, told)| told),
                );
            }
        }
    }
    None
}

/// A refusal that a client made itself, before it sent anything.
fn is_client_side(expected: &Value) -> bool {
    let text = match expected {
        Value::String(text) => Some(text.as_str()),
        Value::Object(fields) => fields.get("exception_value").and_then(Value::as_str),
        _ => None,
    };
    text.is_some_and(|text| text.starts_with("Parameter validation failed"))
}

/// The reply at `at` in the forms that this step may have been recorded in; a list may be several pages.
fn shaped(expected: &Value, replies: &[Reply], at: usize) -> Vec<Value> {
    const PAGES_MAX: usize = 3;
    match expected {
        Value::Array(items) if !items.iter().any(|item| item.get("input").is_some()) => {
            let same = replies[at..].iter().take_while(|reply| reply.operation == replies[at].operation);
            let mut pages = Vec::new();
            let mut forms = Vec::new();
            for reply in same.take(PAGES_MAX) {
                let Some(page) = listed(reply) else { break };
                pages.extend(page.iter().cloned());
                forms.push(Value::Array(pages.clone()));
            }
            forms
        }
        _ => single(expected, replies, at).into_iter().collect(),
    }
}

fn listed(reply: &Reply) -> Option<&Vec<Value>> {
    reply.body.as_object()?.values().find_map(Value::as_array)
}

fn single(expected: &Value, replies: &[Reply], at: usize) -> Option<Value> {
    let reply = &replies[at];
    match expected {
        Value::Object(fields) if fields.contains_key("exception_value") => {
            let seen = as_seen(reply);
            let error = seen.get("Error")?;
            let (code, message) = (error["Code"].as_str()?, error["Message"].as_str().unwrap_or_default());
            let told = format!(
                "An error occurred ({code}) when calling the {} operation: {message}",
                reply.operation
            );
            Some(json!({"exception_typename": code, "exception_value": told}))
        }
        Value::Array(_) => Some(runs(replies)),
        _ => Some(as_seen(reply)),
    }
}

/// Input and output of every execution in order: the form of the Choice operators' recordings.
fn runs(replies: &[Reply]) -> Value {
    let histories = replies.iter().filter_map(|reply| reply.body.get("events")?.as_array());
    let run = |events: &Vec<Value>| {
        let parse =
            |value: &Value| serde_json::from_str(value.as_str().unwrap_or_default()).unwrap_or(Value::Null);
        let first = events.first().map(|event| parse(&event["executionStartedEventDetails"]["input"]));
        let last = events.last().map(|event| parse(&event["executionSucceededEventDetails"]["output"]));
        json!({"input": first, "output": last})
    };
    histories.map(run).collect()
}

/// How much of a step's form a reply has: fields in common, then the same kind of outcome.
fn likeness(expected: &Value, actual: &Value) -> usize {
    let (Some(wanted), Some(got)) = (expected.as_object(), actual.as_object()) else { return 1 };
    let common = wanted.keys().filter(|key| got.contains_key(*key)).count();
    let events = |fields: &serde_json::Map<String, Value>| {
        fields.get("events").and_then(Value::as_array).map(Vec::len)
    };
    common * 4 + usize::from(wanted.len() == got.len()) + 2 * usize::from(events(wanted) == events(got))
}
