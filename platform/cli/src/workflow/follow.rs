//! `--follow`: prints a line for each state that a running execution enters or leaves.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    client::Client,
    history::{self, EventRow, Trace},
};
use crate::format;

/// The interval of polling for new events: short after an event, then increasing.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The length limit of an error within a line, in characters; the result shows it in full.
const ERROR_LETTERS_MAX: usize = 160;

/// Prints an execution's events until its end; returns the last answer of `DescribeExecution`.
pub(super) async fn follow(
    client: &Client,
    arn: &str,
    mut show: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Value> {
    let mut trace = Trace::default();
    let mut last = 0;
    let mut pause = PAUSE_MIN;
    loop {
        let events = history::events_after(client, arn, last).await?;
        pause = if events.is_empty() { (pause * 2).min(PAUSE_MAX) } else { PAUSE_MIN };
        for event in &events {
            if let Some(line) = line(&mut trace, event) {
                show(&line)?;
            }
            last = event.id;
        }
        if events.last().is_some_and(EventRow::is_last) {
            return client.call("DescribeExecution", &json!({"executionArn": arn})).await;
        }
        tokio::time::sleep(pause).await;
    }
}

/// The line for an event: the time since the start, the event, and its state.
fn line(trace: &mut Trace, event: &EventRow) -> Option<String> {
    let scope = trace.take(event).cloned();
    let text = match scope {
        None if event.kind == "ExecutionRedriven" => "redriven".to_owned(),
        None => return None,
        Some(scope) => {
            let took = || duration(event.time - scope.since);
            let (label, kind) = (&scope.label, event.kind.as_str());
            let what = if let Some(kind) = event.entered() {
                format!("> {label}  {kind}")
            } else if kind == "MapIterationStarted" {
                format!("> {label}")
            } else if kind.ends_with("StateExited") || kind == "MapIterationSucceeded" {
                format!("< {label}  {}", took())
            } else if event.is_failure() {
                let error = history::cut(&event.error(), ERROR_LETTERS_MAX);
                let error = if error.is_empty() { ending(kind).to_owned() } else { error };
                format!("! {label}  {error}")
            } else if scope.attempts > 1 && (kind.ends_with("Scheduled") || kind.ends_with("StateStarted")) {
                format!("~ {label}  retry {}", scope.attempts - 1)
            } else {
                return None;
            };
            format!("{}{what}", "  ".repeat(scope.depth))
        }
    };
    Some(format!("{:>9.3}s  {text}", trace.since_start(event)))
}

/// The duration between two events, rounded to milliseconds: the times are whole milliseconds, but the difference of
/// two floating point numbers is not.
pub(super) fn duration(seconds: f64) -> String {
    let milliseconds = (seconds * 1e3).round();
    if milliseconds < 1.0 { "0ms".into() } else { format::seconds(milliseconds / 1e3) }
}

/// The ending in words, such as `timed out` for `TaskTimedOut`.
fn ending(kind: &str) -> &'static str {
    match kind {
        kind if kind.ends_with("TimedOut") => "timed out",
        kind if kind.ends_with("Aborted") => "aborted",
        _ => "failed",
    }
}

/// The result of an execution: its status and duration, then its complete output or error.
pub(super) fn end(execution: &Value) -> String {
    let text = |field: &str| execution[field].as_str().unwrap_or("");
    let times = (execution["startDate"].as_f64(), execution["stopDate"].as_f64());
    let took = match times {
        (Some(start), Some(stop)) => format!(" after {}", duration(stop - start)),
        _ => String::new(),
    };
    let status = text("status").to_lowercase().replace('_', " ");
    let error = history::error(text("error"), text("cause"));
    match execution["output"].as_str() {
        Some(output) => format!("{status}{took}\n{}", history::payload(output, "")),
        None if error.is_empty() => format!("{status}{took}\n"),
        None => format!("{status}{took}: {error}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::history::tests::script, *};

    #[test]
    fn a_line_for_what_happens_to_a_state() {
        let events = script(
            "1 0 ExecutionStarted
            2 0 ParallelStateEntered P
            3 2 ParallelStateStarted
            4 3 TaskStateEntered Y
            5 4 TaskScheduled
            6 5 TaskStarted
            7 6 TaskFailed - E went  wrong
            8 7 TaskScheduled
            9 8 TaskTimedOut
            10 9 ParallelStateFailed
            11 10 ParallelStateExited P
            12 11 ExecutionFailed",
        );
        let mut trace = Trace::default();
        let lines: Vec<_> = events.iter().filter_map(|event| line(&mut trace, event)).collect();
        let expected = [
            "    0.250s  > P  Parallel",
            "    0.750s    > Y  Task",
            "    1.500s    ! Y  E: went wrong",
            "    1.750s    ~ Y  retry 1",
            "    2.000s    ! Y  timed out",
            "    2.250s  ! P  failed",
            "    2.500s  < P  2.2s",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_span_is_of_whole_milliseconds() {
        for (start, stop, expected) in [
            (1_795_318_938.846, 1_795_318_938.847, "1.0ms"),
            (1_795_318_938.846, 1_795_318_938.846, "0ms"),
            (1_795_318_938.0, 1_795_318_940.5, "2.5s"),
        ] {
            assert_eq!(duration(stop - start), expected);
        }
    }

    #[test]
    fn the_end_says_output_or_error() {
        let ended = |rest: Value| {
            let mut execution = json!({"startDate": 10.0, "stopDate": 12.5});
            execution.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            end(&execution)
        };
        let output = json!({"status": "SUCCEEDED", "output": "{\"b\":1,\"a\":2}"});
        assert_eq!(ended(output), "succeeded after 2.5s\n{\n  \"b\": 1,\n  \"a\": 2\n}\n");
        let error = json!({"status": "FAILED", "error": "E", "cause": "c"});
        assert_eq!(ended(error), "failed after 2.5s: E: c\n");
        assert_eq!(ended(json!({"status": "TIMED_OUT"})), "timed out after 2.5s\n");
    }
}
