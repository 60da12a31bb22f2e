//! Driving the router through the calls of a case.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Request;
use http_body_util::BodyExt;
use mayfly_workflows_api::router;
use serde_json::{Map, Value, json};
use tower::ServiceExt;

use crate::case::Case;
use crate::{held_clock::HeldClock, stand_ins};

/// What came back for one call.
pub(crate) struct Reply {
    pub(crate) operation: String,
    pub(crate) params: Value,
    pub(crate) status: u16,
    pub(crate) body: Value,
}

/// How long an execution may take in real time before the replay looks at what is there.
const PATIENCE: Duration = Duration::from_secs(8);
/// How long nothing has to happen before the clock is let go.
const SETTLE: Duration = Duration::from_millis(100);
/// How often that has to be seen: each time the engine has its turn, also where this process had none for a while.
const LOOKS_MIN: u32 = 30;

pub(crate) struct Replay {
    router: Router,
    clock: Arc<HeldClock>,
    replies: Vec<Reply>,
    /// Recorded name of an execution to the one it has in this run.
    renamed: BTreeMap<String, String>,
    /// Executions started without a name, by state machine, oldest first; those not yet matched.
    unmatched: Vec<(String, String)>,
}

/// Replays a case and gives back the replies in order.
pub(crate) async fn replay(case: &Case) -> Vec<Reply> {
    let clock = Arc::new(HeldClock::new());
    let (engine, _, api) = stand_ins::engine(None, clock.clone()).await;
    let mut replay = Replay {
        router: router(api),
        clock,
        replies: Vec::new(),
        renamed: BTreeMap::new(),
        unmatched: Vec::new(),
    };
    for (index, call) in case.calls.iter().enumerate() {
        let params = replay.renamed_params(&call.operation, &call.params);
        let stops_later = case.calls[index..].iter().any(|call| call.operation == "StopExecution");
        let reply = match call.operation.as_str() {
            "GetExecutionHistory" => replay.poll(&call.operation, params, !stops_later).await,
            operation => replay.send(operation, params).await,
        };
        replay.note_execution(&reply);
        replay.replies.push(reply);
    }
    engine.shutdown().await;
    replay.replies
}

impl Replay {
    async fn send(&self, operation: &str, params: Value) -> Reply {
        let request = Request::post("/")
            .header("x-amz-target", format!("AWSStepFunctions.{operation}"))
            .header("content-type", "application/x-amz-json-1.0")
            .body(Body::from(params.to_string()))
            .expect("a request");
        let response = self.router.clone().oneshot(request).await.expect("the router answers");
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        let body = serde_json::from_slice(&body).expect("a JSON body");
        Reply { operation: operation.to_owned(), params, status, body }
    }

    /// Asks until the execution has ended; lets time pass where the case does not interfere and nothing
    /// has happened for a while.
    async fn poll(&self, operation: &str, params: Value, may_jump: bool) -> Reply {
        let started = std::time::Instant::now();
        let (mut quiet_since, mut seen, mut looks) = (started, 0, 0);
        self.clock.hold(true);
        loop {
            let reply = self.send(operation, params.clone()).await;
            let events = reply.body.get("events").and_then(Value::as_array).map_or(0, Vec::len);
            if events != seen {
                (quiet_since, seen, looks) = (std::time::Instant::now(), events, 0);
            }
            looks += 1;
            let quiet = looks > LOOKS_MIN && quiet_since.elapsed() > SETTLE;
            if ended(&reply) || (quiet && !may_jump) || started.elapsed() > PATIENCE {
                self.clock.hold(true);
                return reply;
            }
            if quiet {
                self.clock.hold(false);
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }

    fn note_execution(&mut self, reply: &Reply) {
        let Some(arn) = reply.body.get("executionArn").and_then(Value::as_str) else { return };
        let named = reply.params.get("name").is_some();
        if reply.operation == "StartExecution"
            && !named
            && let Some((machine, name)) = execution(arn)
        {
            self.unmatched.push((machine.to_owned(), name.to_owned()));
        }
    }

    /// The parameters with names of this run: executions' names are random, page tokens and revision
    /// ids are ours.
    fn renamed_params(&mut self, operation: &str, params: &Value) -> Value {
        match params {
            Value::String(text) => Value::String(self.renamed_text(text)),
            Value::Object(fields) => {
                let mut renamed = Map::new();
                for (name, value) in fields {
                    let value = match name.as_str() {
                        "nextToken" | "revisionId" | "taskToken" => self.given(operation, name, value),
                        "definition" => value.clone(),
                        _ => self.renamed_params(operation, value),
                    };
                    renamed.insert(name.clone(), value);
                }
                Value::Object(renamed)
            }
            other => other.clone(),
        }
    }

    fn given(&self, operation: &str, name: &str, recorded: &Value) -> Value {
        let made_up = recorded.as_str().is_some_and(|text| text.is_empty() || text.len() > 900);
        let replies = self.replies.iter().rev();
        let mut same = replies.filter(|reply| name != "nextToken" || reply.operation == operation);
        let given = same.find_map(|reply| reply.body.get(name)).cloned();
        if made_up { recorded.clone() } else { given.unwrap_or_else(|| recorded.clone()) }
    }

    fn renamed_text(&mut self, text: &str) -> String {
        let Some((machine, name)) = execution(text) else { return text.to_owned() };
        let (machine, name) = (machine.to_owned(), name.to_owned());
        let is_uuid = name.len() == 36 && name.matches('-').count() == 4;
        if !is_uuid {
            return text.to_owned();
        }
        if !self.renamed.contains_key(&name)
            && let Some(at) = self.unmatched.iter().position(|(of, _)| *of == machine)
        {
            let (_, ours) = self.unmatched.remove(at);
            self.renamed.insert(name.clone(), ours);
        }
        match self.renamed.get(&name) {
            Some(ours) => text.replace(&name, ours),
            None => text.to_owned(),
        }
    }
}

/// Machine and name in an execution's ARN.
fn execution(arn: &str) -> Option<(&str, &str)> {
    let (_, rest) = arn.split_once(":execution:")?;
    let (machine, name) = rest.split_once(':')?;
    Some((machine, name.split(':').next()?))
}

fn ended(reply: &Reply) -> bool {
    let events = reply.body.get("events").and_then(Value::as_array);
    let Some(events) = events else { return true };
    let over = |event: &Value| {
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
        ["ExecutionSucceeded", "ExecutionFailed", "ExecutionAborted", "ExecutionTimedOut"].contains(&kind)
    };
    events.last().is_some_and(over) || events.first().is_some_and(over)
}

/// A reply in the form that an SDK gives it to its caller, and a recording shows it.
pub(crate) fn as_seen(reply: &Reply) -> Value {
    let mut seen = reply.body.as_object().cloned().unwrap_or_default();
    if let Some(kind) = seen.remove("__type") {
        let kind = kind.as_str().unwrap_or_default();
        let code = kind.rsplit('#').next().unwrap_or_default().to_owned();
        let message = seen.get("message").cloned().unwrap_or_default();
        seen.insert("Error".into(), json!({"Code": code, "Message": message}));
    }
    seen.insert("ResponseMetadata".into(), json!({"HTTPHeaders": {}, "HTTPStatusCode": reply.status}));
    Value::Object(seen)
}
