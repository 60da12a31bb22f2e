//! A distributed Map's items from files, and its results into files.

use std::sync::Arc;

use mayfly_workflows_language::definition::{ItemReader, Kind, StateId};
use mayfly_workflows_language::value::{Map, Value};

use crate::engine::{Reporter, Status};
use crate::journal::Payload;
use crate::machine::{ChildResult, Event, time_text};

/// The event that tells how reading or writing came out.
pub(crate) fn event(n: u32, outcome: Result<Value, String>, error: &str) -> Event {
    match outcome {
        Ok(value) => Event::Succeeded { n, output: Payload::Here(value.to_text().into()) },
        Err(cause) => Event::Failed { n, error: Some(error.to_owned()), cause: Some(cause) },
    }
}

/// Reads the items a Map's `ItemReader` names: an array.
pub(crate) async fn read_items(
    reporter: &Reporter,
    state: StateId,
    arguments: &Value,
    max_items: Option<u64>,
) -> Result<Value, String> {
    let definition = reporter.state_machine().definition.clone();
    let Kind::Map(map) = &definition.state(state).kind else { return Ok(Value::from(Vec::new())) };
    let Some(reader) = &map.item_reader else { return Ok(Value::from(Vec::new())) };
    let objects = &reporter.inner.deps.objects;
    let bucket = argument(arguments, "Bucket")?;
    let limit = max_items
        .filter(|limit| *limit > 0)
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    if reader.resource.contains("listObjects") {
        let prefix = arguments.get("Prefix").and_then(Value::as_str).unwrap_or_default();
        let entries = objects.list(bucket, prefix).await?;
        let item = |entry: &crate::engine::ObjectEntry| {
            Value::object([
                ("Etag", Value::from(entry.etag.as_str())),
                ("Key", Value::from(entry.key.as_str())),
                ("LastModified", Value::from(entry.last_modified.as_second())),
                ("Size", Value::from(entry.size)),
                ("StorageClass", Value::from("STANDARD")),
            ])
        };
        return Ok(entries.iter().take(limit).map(item).collect());
    }
    let key = argument(arguments, "Key")?;
    let body = objects.get(bucket, key).await?;
    let text = std::str::from_utf8(&body).map_err(|_| format!("The file {key} is not UTF-8 text"))?;
    let mut items = parse(reader, key, text)?;
    if reader.input_type.as_deref() == Some("MANIFEST") {
        items = follow_manifest(reporter, reader, items).await?;
    }
    items.truncate(limit);
    Ok(Value::from(items))
}

fn argument<'a>(arguments: &'a Value, name: &str) -> Result<&'a str, String> {
    arguments
        .get(name)
        .and_then(Value::as_str)
        .ok_or_else(|| format!("The field '{name}' is required but was missing"))
}

fn parse(reader: &ItemReader, key: &str, text: &str) -> Result<Vec<Value>, String> {
    match reader.input_type.as_deref().unwrap_or("JSON") {
        "JSONL" => text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| {
                Value::parse(line)
                    .map_err(|error| format!("Attempting to parse {key} as JSONL failed: {error}"))
            })
            .collect(),
        "CSV" => csv(reader, text),
        "JSON" | "MANIFEST" => {
            let mut value = Value::parse(text)
                .map_err(|error| format!("Attempting to parse {key} as JSON failed: {error}"))?;
            if let Some(pointer) = &reader.items_pointer {
                value = at_pointer(&value, pointer)
                    .ok_or_else(|| format!("ItemsPointer {pointer} points to nothing in {key}"))?;
            }
            match items_in(&value) {
                Some(items) => Ok(items),
                None if reader.input_type.as_deref() == Some("MANIFEST") => Ok(vec![value]),
                None => Err("Attempting to map over non-iterable node.".to_owned()),
            }
        }
        other => Err(format!("InputType {other} is not read here; use JSON, JSONL, CSV or MANIFEST")),
    }
}

/// The items of a list, or an object's members as items.
pub(crate) fn items_in(value: &Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items.to_vec()),
        Value::Object(members) => Some(
            members
                .iter()
                .map(|(key, value)| {
                    Value::object([("Key", Value::String(key.clone())), ("Value", value.clone())])
                })
                .collect(),
        ),
        _ => None,
    }
}

/// What a JSON pointer names.
pub(crate) fn at_pointer(value: &Value, pointer: &str) -> Option<Value> {
    let steps = pointer.strip_prefix('/')?;
    let mut here = value;
    for step in steps.split('/') {
        let step = step.replace("~1", "/").replace("~0", "~");
        here = match here {
            Value::Array(items) => items.get(step.parse::<usize>().ok()?)?,
            other => other.get(&step)?,
        };
    }
    Some(here.clone())
}

/// An inventory manifest names further files: each is read and its items follow.
async fn follow_manifest(
    reporter: &Reporter,
    reader: &ItemReader,
    items: Vec<Value>,
) -> Result<Vec<Value>, String> {
    let manifest: Map = items
        .iter()
        .filter_map(|item| Some((item.get("Key")?.as_str()?.into(), item.get("Value")?.clone())))
        .collect();
    let bucket = manifest
        .get("destinationBucket")
        .and_then(Value::as_str)
        .map(|arn| arn.rsplit(':').next().unwrap_or(arn).to_owned())
        .ok_or("The manifest names no destinationBucket")?;
    let headers = manifest.get("fileSchema").and_then(Value::as_str).unwrap_or_default();
    let headers: Vec<Arc<str>> = headers.split(',').map(|header| header.trim().into()).collect();
    let mut all = Vec::new();
    for file in manifest.get("files").and_then(Value::as_array).unwrap_or_default() {
        let key = argument(file, "key")?;
        let body = reporter.inner.deps.objects.get(&bucket, key).await?;
        let text = std::str::from_utf8(&body).map_err(|_| format!("The file {key} is not UTF-8 text"))?;
        let given = ItemReader {
            csv_header_location: Some("GIVEN".into()),
            csv_headers: headers.clone(),
            csv_delimiter: None,
            ..reader.clone()
        };
        all.extend(csv(&given, text)?);
    }
    Ok(all)
}

fn csv(reader: &ItemReader, text: &str) -> Result<Vec<Value>, String> {
    let delimiter = match reader.csv_delimiter.as_deref().unwrap_or("COMMA") {
        "PIPE" => '|',
        "SEMICOLON" => ';',
        "SPACE" => ' ',
        "TAB" => '\t',
        _ => ',',
    };
    let mut rows = csv_rows(text, delimiter).into_iter();
    let headers: Vec<Arc<str>> = match reader.csv_header_location.as_deref() {
        Some("GIVEN") => reader.csv_headers.clone(),
        _ => rows.next().ok_or("The CSV file is empty")?.into_iter().map(Into::into).collect(),
    };
    // LocalStack's sentence.
    if headers.iter().enumerate().any(|(at, header)| headers[..at].contains(header)) {
        return Err("CSV headers cannot contain duplicates.".to_owned());
    }
    Ok(rows
        .map(|row| {
            // Cells without a header are dropped, headers without a cell are empty.
            let mut cells = row.into_iter();
            Value::object(
                headers.iter().map(|header| (header.clone(), Value::from(cells.next().unwrap_or_default()))),
            )
        })
        .collect())
}

/// RFC 4180: quoted cells may hold delimiters, line ends and doubled quotes.
fn csv_rows(text: &str, delimiter: char) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut cell) = (Vec::new(), Vec::new(), String::new());
    let (mut quoted, mut any) = (false, false);
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        any = true;
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                letters.next();
                cell.push('"');
            }
            '"' => quoted = !quoted,
            '\r' if !quoted && letters.peek() == Some(&'\n') => {}
            '\n' if !quoted => {
                row.push(std::mem::take(&mut cell));
                rows.push(std::mem::take(&mut row));
                any = false;
            }
            letter if letter == delimiter && !quoted => row.push(std::mem::take(&mut cell)),
            letter => cell.push(letter),
        }
    }
    if any {
        row.push(cell);
        rows.push(row);
    }
    rows
}

/// Writes a Map's results: a manifest and a file per outcome.
pub(crate) async fn write_results(
    reporter: &Reporter,
    state: StateId,
    arguments: &Value,
    run_arn: &Arc<str>,
    results: &Arc<Vec<ChildResult>>,
) -> Result<Value, String> {
    let definition = reporter.state_machine().definition.clone();
    let Kind::Map(map) = &definition.state(state).kind else { return Ok(Value::Null) };
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
    let run = run_arn.rsplit(':').next().unwrap_or_default();
    let folder =
        if prefix.is_empty() { run.to_owned() } else { format!("{}/{run}", prefix.trim_end_matches('/')) };
    let objects = &reporter.inner.deps.objects;
    let mut files = Vec::new();
    for (name, status) in
        [("FAILED", Status::Failed), ("PENDING", Status::Running), ("SUCCEEDED", Status::Succeeded)]
    {
        let of = results.iter().filter(|result| group(result.outcome.status) == status);
        let of: Vec<Value> = of.filter_map(|result| shaped(result, bare)).collect();
        let mut written = Vec::new();
        if !of.is_empty() {
            let key = format!("{folder}/{name}_0.{}", if lines { "jsonl" } else { "json" });
            let body = match lines {
                true => of.iter().map(|item| item.to_text() + "\n").collect(),
                false => Value::from(of).to_text(),
            };
            written
                .push(Value::object([("Key", Value::from(key.as_str())), ("Size", Value::from(body.len()))]));
            objects.put(bucket, &key, body.into()).await?;
        }
        files.push((name, Value::from(written)));
    }
    let manifest = Value::object([
        ("DestinationBucket", Value::from(bucket)),
        ("MapRunArn", Value::String(run_arn.clone())),
        ("ResultFiles", Value::object(files)),
    ]);
    let key = format!("{folder}/manifest.json");
    objects.put(bucket, &key, manifest.to_text().into()).await?;
    Ok(Value::object([
        ("MapRunArn", Value::String(run_arn.clone())),
        ("ResultWriterDetails", Value::object([("Bucket", Value::from(bucket)), ("Key", Value::from(key))])),
    ]))
}

fn group(status: Status) -> Status {
    match status {
        Status::Succeeded => Status::Succeeded,
        Status::Running | Status::PendingRedrive => Status::Running,
        Status::Failed | Status::TimedOut | Status::Aborted => Status::Failed,
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
    let name = result.arn.rsplit(':').next().unwrap_or_default();
    let machine_arn = result.arn.rsplit_once(':').map(|(head, _)| head).unwrap_or_default();
    let machine_arn =
        machine_arn.replace(":execution:", ":stateMachine:").replace(":express:", ":stateMachine:");
    let mut members = vec![
        ("ExecutionArn", text(&result.arn)),
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
    fn rows_with_quotes() {
        let rows = csv_rows("a,b\r\n\"x,\"\"y\"\"\n\",2\n", ',');
        assert_eq!(rows, [vec!["a", "b"], vec!["x,\"y\"\n", "2"]]);
        assert_eq!(csv_rows("", ','), Vec::<Vec<String>>::new());
        assert_eq!(csv_rows("a|", '|'), [vec!["a", ""]]);
    }

    #[test]
    fn pointers_reach_into_files() {
        let value = Value::parse(r#"{"a":{"b/c":[1,[2]]}}"#).expect("JSON");
        assert_eq!(at_pointer(&value, "/a/b~1c/1").map(|found| found.to_text()).as_deref(), Some("[2]"));
        assert_eq!(at_pointer(&value, "/a/x"), None);
    }
}
