//! A distributed Map's results into files.

use mayfly_workflows_language::arn::MapRunArn;
use mayfly_workflows_language::execution::RunStatus;
use std::sync::Arc;

use mayfly_workflows_language::definition::{StateId, StateKind};
use mayfly_workflows_language::value::Value;

use crate::engine::{ObjectError, Reporter};
use mayfly_workflows_machine::{ChildResult, time_text};

/// Bytes of a result file, but for its last result: what follows goes into another one, so that no more than this is
/// in memory beside the results themselves. AWS begins another file at 5 GB.
const FILE_BYTES: usize = 64 << 20;

/// Writes a Map's results: a manifest, and files for each outcome.
pub(crate) async fn write_results(
    reporter: &Reporter,
    state: StateId,
    arguments: &Value,
    run_arn: &MapRunArn,
    results: &Arc<Vec<ChildResult>>,
) -> Result<Value, String> {
    let definition = reporter.state_machine().definition.clone();
    let StateKind::Map(map) = &definition.state(state).kind else { return Ok(Value::Null) };
    let lines = map.result_writer.as_ref().and_then(|writer| writer.output_type.as_deref()) == Some("JSONL");
    let bare = map
        .result_writer
        .as_ref()
        .and_then(|writer| writer.transformation.as_deref())
        .is_some_and(|transformation| transformation != "NONE");
    let Some(bucket) = arguments.get("Bucket").and_then(Value::as_str) else {
        // Without a bucket the results are shaped and stay in the output.
        return Ok(results.iter().filter_map(|result| shaped(result, bare)).collect());
    };
    let prefix = arguments.get("Prefix").and_then(Value::as_str).unwrap_or_default();
    let run = run_arn.last_field();
    let folder =
        if prefix.is_empty() { run.to_owned() } else { format!("{}/{run}", prefix.trim_end_matches('/')) };
    let objects = &reporter.inner.deps.objects;
    let mut files = Vec::new();
    for (name, status) in
        [("FAILED", RunStatus::Failed), ("PENDING", RunStatus::Running), ("SUCCEEDED", RunStatus::Succeeded)]
    {
        let of = results.iter().filter(|result| group(result.outcome.status) == status);
        let mut written = Vec::new();
        for (n, body) in bodies(of.filter_map(|result| shaped(result, bare)), lines, FILE_BYTES).enumerate() {
            let key = format!("{folder}/{name}_{n}.{}", if lines { "jsonl" } else { "json" });
            written
                .push(Value::object([("Key", Value::from(key.as_str())), ("Size", Value::from(body.len()))]));
            objects.put(bucket, &key, body.into()).await.map_err(ObjectError::for_map)?;
        }
        files.push((name, Value::from(written)));
    }
    let manifest = Value::object([
        ("DestinationBucket", Value::from(bucket)),
        ("MapRunArn", Value::String(run_arn.clone().into())),
        ("ResultFiles", Value::object(files)),
    ]);
    let key = format!("{folder}/manifest.json");
    objects.put(bucket, &key, manifest.to_text().into()).await.map_err(ObjectError::for_map)?;
    Ok(Value::object([
        ("MapRunArn", Value::String(run_arn.clone().into())),
        ("ResultWriterDetails", Value::object([("Bucket", Value::from(bucket)), ("Key", Value::from(key))])),
    ]))
}

/// The texts of result files: lists in JSON, or a line for each result.
fn bodies(
    mut results: impl Iterator<Item = Value>,
    lines: bool,
    bytes_max: usize,
) -> impl Iterator<Item = String> {
    let (begin, between, end) = if lines { ("", "\n", "\n") } else { ("[", ",", "]") };
    std::iter::from_fn(move || {
        let mut body = begin.to_owned() + &results.next()?.to_text();
        while body.len() < bytes_max
            && let Some(result) = results.next()
        {
            body.push_str(between);
            body.push_str(&result.to_text());
        }
        body.push_str(end);
        Some(body)
    })
}

fn group(status: RunStatus) -> RunStatus {
    match status {
        RunStatus::Succeeded => RunStatus::Succeeded,
        RunStatus::Running | RunStatus::PendingRedrive => RunStatus::Running,
        RunStatus::Failed | RunStatus::TimedOut | RunStatus::Aborted => RunStatus::Failed,
    }
}

/// A child in a result file: all about it, or its output alone.
fn shaped(result: &ChildResult, bare: bool) -> Option<Value> {
    let outcome = &result.outcome;
    if bare {
        return outcome.output.as_deref().map(|text| Value::parse(text).unwrap_or_default());
    }
    let text = |text: &Arc<str>| Value::String(text.clone());
    let included = || Value::object([("Included", Value::from(true))]);
    let name = result.arn.last_field();
    let machine_arn = result.arn.as_str().rsplit_once(':').map(|(head, _)| head).unwrap_or_default();
    let machine_arn =
        machine_arn.replace(":execution:", ":stateMachine:").replace(":express:", ":stateMachine:");
    let mut members = vec![
        ("ExecutionArn", Value::from(result.arn.as_str())),
        ("Input", text(&result.input)),
        ("InputDetails", included()),
    ];
    if let Some(cause) = &outcome.cause {
        members.push(("Cause", text(cause)));
    }
    if let Some(error) = &outcome.error {
        members.push(("Error", text(error)));
    }
    members.push(("Name", Value::from(name)));
    if let Some(output) = &outcome.output {
        members.push(("Output", text(output)));
        members.push(("OutputDetails", included()));
    }
    members.push(("StartDate", Value::from(time_text(result.start_ms))));
    members.push(("StateMachineArn", Value::from(machine_arn)));
    members.push(("Status", Value::from(outcome.status.as_str())));
    members.push(("StopDate", Value::from(time_text(result.stop_ms))));
    Some(Value::object(members))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_go_into_files_of_a_bounded_size() {
        let of = |count: i64, lines, bytes_max| {
            bodies((0..count).map(Value::from), lines, bytes_max).collect::<Vec<_>>()
        };
        assert!(of(0, false, 100).is_empty());
        assert_eq!(of(3, false, 100), ["[0,1,2]"]);
        assert_eq!(of(3, true, 100), ["0\n1\n2\n"]);
        assert_eq!(of(5, false, 4), ["[0,1]", "[2,3]", "[4]"]);
        assert_eq!(of(3, true, 1), ["0\n", "1\n", "2\n"]);
    }
}
