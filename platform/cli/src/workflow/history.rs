//! The events of an execution, each assigned to its state.
//!
//! An event refers to the previous event of its branch. A state begins at its `…StateEntered`; the events after it
//! belong to the state until `…StateExited`, later ones to the enclosing scope: the execution, a branch of a Parallel
//! state, or an iteration of a Map state.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{client::Client, ordered};

/// One event.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EventRow {
    pub(super) id: u64,
    previous: u64,
    /// Seconds since 1970.
    pub(super) time: f64,
    /// Such as `TaskStateEntered`.
    pub(super) kind: String,
    details: Value,
}

impl EventRow {
    pub(super) fn parse(event: &Value) -> Self {
        let details = event.as_object().and_then(|event| {
            event.iter().find(|(name, _)| name.ends_with("EventDetails")).map(|(_, details)| details.clone())
        });
        Self {
            id: event["id"].as_u64().unwrap_or(0),
            previous: event["previousEventId"].as_u64().unwrap_or(0),
            time: event["timestamp"].as_f64().unwrap_or(0.0),
            kind: event["type"].as_str().unwrap_or("").to_owned(),
            details: details.unwrap_or(Value::Null),
        }
    }

    pub(super) fn text(&self, field: &str) -> &str {
        self.details[field].as_str().unwrap_or("")
    }

    /// The state type, such as `Wait` for `WaitStateEntered`.
    pub(super) fn entered(&self) -> Option<&str> {
        self.kind.strip_suffix("StateEntered")
    }

    /// Whether nothing follows this event.
    pub(super) fn is_last(&self) -> bool {
        let what = self.kind.strip_prefix("Execution");
        what.is_some_and(|what| ["Succeeded", "Failed", "TimedOut", "Aborted"].contains(&what))
    }

    /// Whether the event reports a failure.
    pub(super) fn is_failure(&self) -> bool {
        ["Failed", "TimedOut", "Aborted"].iter().any(|end| self.kind.ends_with(end))
    }

    /// `Error: cause`, as far as present.
    pub(super) fn error(&self) -> String {
        error(self.text("error"), self.text("cause"))
    }

    /// A short summary of the event's details.
    pub(super) fn summary(&self) -> String {
        let details = &self.details;
        if self.is_failure() {
            return self.error();
        }
        if let Some(length) = details["length"].as_u64() {
            return format!("{length} items");
        }
        if let Some(index) = details["index"].as_u64() {
            return format!("item {index}");
        }
        let mut words = Vec::new();
        match (self.text("resourceType"), self.text("resource")) {
            (_, "") => {}
            ("", resource) => words.push(resource.to_owned()),
            (kind, resource) => words.push(format!("{kind}:{resource}")),
        }
        let payloads = ["input", "output", "parameters"];
        let payload = payloads.iter().find(|field| details[**field].is_string());
        words.extend(payload.map(|field| format!("{field} {}", self.text(field))));
        words.join(" ")
    }
}

/// `Error: cause`, as far as present.
pub(super) fn error(error: &str, cause: &str) -> String {
    match (error, cause) {
        ("", cause) => cause.to_owned(),
        (error, "") => error.to_owned(),
        (error, cause) => format!("{error}: {cause}"),
    }
}

/// One line of at most `letters` characters.
pub(super) fn cut(text: &str, letters: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(letters) {
        Some(_) => line.chars().take(letters - 1).chain(['…']).collect(),
        None => line,
    }
}

/// A state that was entered, or one iteration of a Map state.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StateScope {
    /// `Name`, or `Name [3]` within iteration 3 and for the iteration itself.
    pub(super) label: String,
    /// The state type, such as `Task`; empty for an iteration.
    pub(super) kind: String,
    pub(super) since: f64,
    /// The number of attempts.
    pub(super) attempts: u32,
    /// The number of enclosing states and iterations.
    pub(super) depth: usize,
    name: String,
    item: Option<u64>,
    around: Option<usize>,
}

/// The events of an execution so far.
#[derive(Debug, Default)]
pub(super) struct Trace {
    scopes: Vec<StateScope>,
    /// The scope of the events that follow an event, by the event's id.
    after: HashMap<u64, Option<usize>>,
    /// The time of the first event.
    started: Option<f64>,
}

impl Trace {
    /// Adds the next event; returns the scope to which it belongs.
    pub(super) fn take(&mut self, event: &EventRow) -> Option<&StateScope> {
        self.started.get_or_insert(event.time);
        let here = self.after.get(&event.previous).copied().flatten();
        let name = event.text("name");
        let (own, after) = if event.entered().is_some() {
            let own = self.enter(event, name, here);
            (Some(own), Some(own))
        } else if event.kind.ends_with("StateExited") {
            let own = self.up(here, |scope| scope.name == name && !scope.kind.is_empty());
            (own, own.and_then(|own| self.scopes[own].around))
        } else if let Some(what) = event.kind.strip_prefix("MapIteration") {
            self.iteration(event, what, here)
        } else {
            let around = ["Parallel", "Map"]
                .iter()
                .find(|kind| event.kind.strip_prefix(**kind).is_some_and(|rest| rest.starts_with("State")));
            let own = match around {
                // A failure of a scope is attributed to the state in which it began.
                Some(kind) => self.up(here, |scope| scope.kind == **kind),
                None if event.kind.starts_with("Execution") => None,
                None => here,
            };
            if let Some(own) = own
                && (event.kind.ends_with("Scheduled") || around.is_some() && event.kind.ends_with("Started"))
            {
                self.scopes[own].attempts += 1;
            }
            (own, own)
        };
        self.after.insert(event.id, after);
        own.map(|own| &self.scopes[own])
    }

    /// Seconds from the execution's first event.
    pub(super) fn since_start(&self, event: &EventRow) -> f64 {
        event.time - self.started.unwrap_or(event.time)
    }

    fn enter(&mut self, event: &EventRow, name: &str, around: Option<usize>) -> usize {
        let outer = around.map(|around| &self.scopes[around]);
        let (item, depth) = outer.map_or((None, 0), |outer| (outer.item, outer.depth + 1));
        self.push(StateScope {
            label: label(name, item),
            kind: event.entered().unwrap_or("").to_owned(),
            since: event.time,
            attempts: 0,
            depth,
            name: name.to_owned(),
            item,
            around,
        })
    }

    /// The scope of the iteration itself, and the scope after the event.
    fn iteration(
        &mut self,
        event: &EventRow,
        what: &str,
        here: Option<usize>,
    ) -> (Option<usize>, Option<usize>) {
        let name = event.text("name");
        if what == "Started" {
            let map = self.up(here, |scope| scope.kind == "Map" && scope.name == name);
            let item = event.details["index"].as_u64();
            let own = Some(self.push(StateScope {
                label: label(name, item),
                kind: String::new(),
                since: event.time,
                attempts: 0,
                depth: map.map_or(0, |map| self.scopes[map].depth + 1),
                name: name.to_owned(),
                item,
                around: map,
            }));
            return (own, own);
        }
        let own = self.up(here, |scope| scope.kind.is_empty() && scope.name == name);
        (own, own.and_then(|own| self.scopes[own].around))
    }

    fn push(&mut self, scope: StateScope) -> usize {
        self.scopes.push(scope);
        self.scopes.len() - 1
    }

    /// The nearest enclosing scope of `at` that satisfies the predicate.
    fn up(&self, mut at: Option<usize>, fits: impl Fn(&StateScope) -> bool) -> Option<usize> {
        while let Some(index) = at {
            if fits(&self.scopes[index]) {
                return at;
            }
            at = self.scopes[index].around;
        }
        None
    }
}

fn label(name: &str, item: Option<u64>) -> String {
    item.map_or_else(|| name.to_owned(), |item| format!("{name} [{item}]"))
}

/// The number of events per request; usually there are few new ones.
const PAGE_ITEMS: u64 = 200;

/// The events after `last`, oldest first; read from the newest backwards.
pub(super) async fn events_after(client: &Client, arn: &str, last: u64) -> anyhow::Result<Vec<EventRow>> {
    let mut params = json!({"executionArn": arn, "reverseOrder": true, "maxResults": PAGE_ITEMS});
    let mut events = Vec::new();
    loop {
        let mut answer = client.call("GetExecutionHistory", &params).await?;
        let page = answer["events"].as_array().map_or(&[][..], Vec::as_slice);
        let new = page.iter().map(EventRow::parse).take_while(|event| event.id > last);
        let before = events.len();
        events.extend(new);
        let is_whole = events.len() - before == page.len();
        match answer["nextToken"].take() {
            token @ Value::String(_) if is_whole => params["nextToken"] = token,
            _ => break,
        }
    }
    events.reverse();
    Ok(events)
}

/// A formatted payload, each line preceded by `indent`.
pub(super) fn payload(text: &str, indent: &str) -> String {
    ordered::pretty(text).lines().map(|line| format!("{indent}{line}\n")).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Events from lines `id previous kind name`; a name with an index stands for an iteration.
    pub(in crate::workflow) fn script(text: &str) -> Vec<EventRow> {
        let event = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            let mut details = json!({"name": words.get(3)});
            if words[2].starts_with("MapIteration") {
                details["index"] = words[4].parse::<u64>().unwrap().into();
            } else if words.len() > 4 {
                details["error"] = words[4].into();
                details["cause"] = words[5..].join(" ").into();
            }
            let id: u64 = words[0].parse().unwrap();
            EventRow {
                id,
                previous: words[1].parse().unwrap(),
                #[expect(clippy::cast_precision_loss, reason = "a small number of a test")]
                time: 1000.0 + id as f64 / 4.0,
                kind: words[2].into(),
                details,
            }
        };
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(event).collect()
    }

    fn labels(text: &str) -> Vec<String> {
        let mut trace = Trace::default();
        let events = script(text);
        let scope = |event: &EventRow| {
            trace
                .take(event)
                .map_or("-".into(), |scope| format!("{}{}", ".".repeat(scope.depth), scope.label))
        };
        events.iter().map(scope).collect()
    }

    #[test]
    fn states_in_a_row_and_retries() {
        let text = "1 0 ExecutionStarted
            2 0 TaskStateEntered A
            3 2 TaskScheduled
            4 3 TaskFailed - E c
            5 4 TaskScheduled
            6 5 TaskSucceeded
            7 6 TaskStateExited A
            8 7 SucceedStateEntered B
            9 8 SucceedStateExited B
            10 9 ExecutionSucceeded";
        assert_eq!(labels(text), ["-", "A", "A", "A", "A", "A", "A", "B", "B", "-"]);
        let mut trace = Trace::default();
        let attempts: Vec<_> =
            script(text).iter().filter_map(|event| trace.take(event).map(|scope| scope.attempts)).collect();
        assert_eq!(attempts, [0, 1, 1, 2, 2, 2, 0, 0]);
    }

    #[test]
    fn branches_that_fail_and_are_caught() {
        let text = "1 0 ExecutionStarted
            2 0 ParallelStateEntered P
            3 2 ParallelStateStarted
            4 3 PassStateEntered X
            5 4 PassStateExited X
            6 3 TaskStateEntered Y
            7 6 TaskScheduled
            8 7 TaskFailed - E c
            9 8 ParallelStateFailed
            10 9 ParallelStateExited P
            11 10 PassStateEntered Z";
        assert_eq!(labels(text), ["-", "P", "P", ".X", ".X", ".Y", ".Y", ".Y", "P", "P", "Z"]);
    }

    #[test]
    fn iterations_between_each_other() {
        let text = "1 0 ExecutionStarted
            2 0 MapStateEntered M
            3 2 MapStateStarted
            4 3 MapIterationStarted M 0
            5 4 PassStateEntered X
            6 3 MapIterationStarted M 1
            7 6 PassStateEntered X
            8 5 PassStateExited X
            9 8 MapIterationSucceeded M 0
            10 7 PassStateExited X
            11 10 MapIterationSucceeded M 1
            12 11 MapStateSucceeded
            13 12 MapStateExited M";
        let expected = [
            "-", "M", "M", ".M [0]", "..X [0]", ".M [1]", "..X [1]", "..X [0]", ".M [0]", "..X [1]",
            ".M [1]", "M", "M",
        ];
        assert_eq!(labels(text), expected);
    }

    #[test]
    fn summaries() {
        for (event, expected) in [
            (json!({"type": "TaskFailed", "taskFailedEventDetails": {"error": "E", "cause": "c"}}), "E: c"),
            (json!({"type": "TaskTimedOut", "taskTimedOutEventDetails": {"error": "E"}}), "E"),
            (json!({"type": "MapStateStarted", "mapStateStartedEventDetails": {"length": 3}}), "3 items"),
            (
                json!({"type": "TaskScheduled", "taskScheduledEventDetails":
                    {"resourceType": "lambda", "resource": "invoke", "parameters": "{}"}}),
                "lambda:invoke parameters {}",
            ),
            (
                json!({"type": "PassStateExited", "stateExitedEventDetails": {"name": "A", "output": "1"}}),
                "output 1",
            ),
            (json!({"type": "ParallelStateStarted"}), ""),
        ] {
            assert_eq!(EventRow::parse(&event).summary(), expected);
        }
        assert_eq!(cut("a  b\nc", 10), "a b c");
        assert_eq!(cut("äöüß", 3), "äö…");
    }
}
