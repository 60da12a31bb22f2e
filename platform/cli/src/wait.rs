//! Waits until a function can answer.

use std::time::Duration;

use futures::{StreamExt as _, pin_mut};
use indicatif::{ProgressBar, ProgressStyle};
use kube::runtime::{WatchStreamExt as _, watcher::watch_object};
use mayfly_api::{Function, k8s::apimachinery::pkg::apis::meta::v1::Condition};
use tokio::time::{Instant, timeout_at};

use super::{
    failure::{ErrorCode, Failure},
    server::Server,
};

/// The state of a function relative to its newest spec.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ReadyState {
    Ready,
    Failed {
        reason: String,
        message: String,
    },
    /// The reason; empty if unknown.
    Pending(String),
}

/// Practically unlimited.
const PATIENCE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The interval in which the line that shows the state is drawn again.
const REDRAW: Duration = Duration::from_millis(120);

/// Waits until every traffic target of the function's newest spec can answer. A terminal shows meanwhile why it cannot:
/// how long its component has been compiling, for example.
pub(crate) async fn ready(
    server: &Server,
    namespace: &str,
    name: &str,
    patience: Duration,
) -> anyhow::Result<Function> {
    // Drawn on stderr, and only if that is a terminal.
    let line = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
        line.set_style(style);
    }
    line.enable_steady_tick(REDRAW);
    let result = until_ready(server, namespace, name, patience, &line).await;
    line.finish_and_clear();
    result
}

async fn until_ready(
    server: &Server,
    namespace: &str,
    name: &str,
    patience: Duration,
    line: &ProgressBar,
) -> anyhow::Result<Function> {
    let api: kube::Api<Function> = kube::Api::namespaced(server.client().clone(), namespace);
    let deadline = Instant::now() + patience.min(PATIENCE_MAX);
    let states = watch_object(api, name).default_backoff();
    pin_mut!(states);
    let mut last = String::new();
    let mut is_compiling = false;
    let describe = format!("see why: mayfly describe function {name} -n {namespace}");
    loop {
        match timeout_at(deadline, states.next()).await {
            Err(_) => {
                let what = format!("function {name} is not ready after {}s{last}", patience.as_secs());
                let todo = match is_compiling {
                    true => format!("the server goes on; wait longer with --wait-timeout, or {describe}"),
                    false => describe,
                };
                return Err(Failure::new(ErrorCode::TimedOut, what, todo).into());
            }
            Ok(None) => anyhow::bail!("the watch of function {name} ended"),
            Ok(Some(Err(error))) => last = format!(" ({error})"),
            Ok(Some(Ok(None))) => {
                let what = format!("function {name} was deleted while it was waited for");
                return Err(Failure::error(ErrorCode::NotFound, what, "deploy it again"));
            }
            Ok(Some(Ok(Some(function)))) => match ready_state(&function) {
                ReadyState::Ready => return Ok(function),
                ReadyState::Failed { reason, message } => {
                    let what = format!("function {name} cannot run: {message} ({reason})");
                    return Err(Failure::new(ErrorCode::NotReady, what, describe).into());
                }
                ReadyState::Pending(why) => {
                    is_compiling =
                        ready_condition(&function).is_some_and(|ready| ready.reason == "Compiling");
                    let state = if why.is_empty() { "waiting for its status" } else { why.as_str() };
                    line.set_message(format!("{name}: {state}"));
                    last = if why.is_empty() { String::new() } else { format!(": {why}") };
                }
            },
        }
    }
}

/// Reasons of `Ready: False` that do not resolve by waiting.
const REASONS_FINAL: [&str; 3] = ["ComponentInvalid", "RuntimeMissing", "RevisionMissing"];

fn ready_state(function: &Function) -> ReadyState {
    let Some(status) = &function.status else { return ReadyState::Pending(String::new()) };
    if status.observed_generation < function.metadata.generation {
        return ReadyState::Pending(String::new());
    }
    match ready_condition(function) {
        Some(condition) if condition.status == "True" => ReadyState::Ready,
        Some(condition) if REASONS_FINAL.contains(&condition.reason.as_str()) => {
            ReadyState::Failed { reason: condition.reason.clone(), message: condition.message.clone() }
        }
        Some(condition) => ReadyState::Pending(condition.message.clone()),
        None => ReadyState::Pending(String::new()),
    }
}

fn ready_condition(function: &Function) -> Option<&Condition> {
    function.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == "Ready")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judged(generation: i64, observed: i64, ready: Option<(&str, &str)>) -> ReadyState {
        let conditions: Vec<_> = ready
            .iter()
            .map(|(status, reason)| {
                json!({"type": "Ready", "status": status, "reason": reason, "message": "m",
                       "lastTransitionTime": "2026-01-02T00:00:00Z"})
            })
            .collect();
        let function = json!({
            "apiVersion": "mayfly.dev/v1", "kind": "Function",
            "metadata": {"name": "f", "generation": generation}, "spec": {"source": {}},
            "status": {"observedGeneration": observed, "conditions": conditions}
        });
        ready_state(&serde_json::from_value(function).unwrap())
    }

    #[test]
    fn only_the_newest_spec_counts() {
        assert_eq!(judged(2, 1, Some(("True", "Ready"))), ReadyState::Pending(String::new()));
        assert_eq!(judged(2, 2, Some(("True", "Ready"))), ReadyState::Ready);
        assert_eq!(judged(2, 2, None), ReadyState::Pending(String::new()));
    }

    #[test]
    fn only_what_time_does_not_heal_is_a_failure() {
        for reason in ["RevisionPending", "ComponentMissing"] {
            assert_eq!(judged(2, 2, Some(("False", reason))), ReadyState::Pending("m".into()));
        }
        let failed = ReadyState::Failed { reason: "ComponentInvalid".into(), message: "m".into() };
        assert_eq!(judged(2, 2, Some(("False", "ComponentInvalid"))), failed);
    }
}
