//! The log record of each call, if the log filter enables it.

use anyhow::{Context, Result, ensure};
use http::Method;
use mayfly_e2e::{Start, Up, full, guest_or_skip, wait};
use serde_json::Value;

/// The target of the records in the log filter.
const CALLS: &str = "mayfly_runtime_wasm::calls";

/// A server that logs a record of each call, as lines of JSON.
async fn recording() -> Result<Up> {
    let filter = format!("warn,mayfly=info,{CALLS}=debug");
    Start::default().environment("MAYFLY_LOG", &filter).with(&["--log-format", "json"]).ready().await
}

/// Calls a function with a request id; returns the response's status, and the call's record once it is written.
async fn call(up: &Up, path: &str, id: &str) -> Result<(u16, Value)> {
    let http = up.http();
    let request = http.request(Method::GET, &format!("/fn/default/{path}")).header("x-request-id", id);
    let answer = http.call(request, full("")).await?;
    ensure!(answer.header("x-request-id") == id, "{answer:?}");
    // Written when the guest has ended, which may be after its response.
    let record =
        wait::until(&format!("the record of {id}"), || async { Ok(records_of(up, id).pop()) }).await?;
    Ok((answer.status.as_u16(), record))
}

/// All records of a request.
fn records_of(up: &Up, id: &str) -> Vec<Value> {
    let log = up.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == CALLS && line["request_id"] == id).collect()
}

fn number(record: &Value, field: &str) -> Result<u64> {
    record[field].as_u64().with_context(|| format!("{field} is no number in {record}"))
}

/// Checks the outcome, whether the call was cold, and the common fields: revision, times, and memory of an instance.
fn check(record: &Value, revision: &str, cold: bool, outcome: &str) -> Result<()> {
    ensure!(record["level"] == "DEBUG" && record["revision"] == revision, "{record}");
    ensure!(record["cold"] == cold && record["outcome"] == outcome, "{record}");
    for field in ["queue_us", "load_us", "instantiate_us", "run_us"] {
        number(record, field)?;
    }
    ensure!(cold || number(record, "load_us")? == 0, "{record}");
    ensure!(number(record, "memory_peak_bytes")? > 0, "{record}");
    ensure!(record["error"].is_string() == (outcome != "answered"), "{record}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_leaves_one_record_of_its_times_its_memory_and_its_end() -> Result<()> {
    guest_or_skip!("hello");
    guest_or_skip!("panic");
    let up = recording().await?;
    up.deploy("hello", "hello", &[]).await?;
    up.deploy("panic", "panic", &[]).await?;

    let (status, cold) = call(&up, "hello/", "the-first").await?;
    ensure!(status == 200);
    check(&cold, "default/hello-00001", true, "answered")?;
    ensure!(number(&cold, "instantiate_us")? > 0, "{cold}");
    let (status, warm) = call(&up, "hello/", "the-second").await?;
    ensure!(status == 200);
    check(&warm, "default/hello-00001", false, "answered")?;

    let (status, trapped) = call(&up, "panic/", "the-one-that-traps").await?;
    ensure!(status == 502);
    check(&trapped, "default/panic-00001", true, "trapped")?;
    ensure!(trapped["error"].as_str().is_some_and(|error| error.contains("trapped")), "{trapped}");

    for id in ["the-first", "the-second", "the-one-that-traps"] {
        let records = records_of(&up, id);
        ensure!(records.len() == 1, "{id}: {records:?}");
    }
    Ok(())
}

/// The instance of a guest that does not end is dropped; its usage is still recorded.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_ended_at_its_timeout_has_a_record_too() -> Result<()> {
    guest_or_skip!("sleep");
    let up = recording().await?;
    up.deploy("sleep", "sleep", &["--timeout", "500ms"]).await?;
    let (status, record) = call(&up, "sleep/?ms=600000", "the-late").await?;
    ensure!(status == 504);
    check(&record, "default/sleep-00001", true, "timed_out")?;
    // Most of the time was spent in the guest.
    ensure!(number(&record, "run_us")? > 100_000, "{record}");
    Ok(())
}

/// The record is written when the guest has ended, not with the head of its response.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_client_leaves_in_the_middle_of_the_answer_is_told_as_cancelled() -> Result<()> {
    guest_or_skip!("stream");
    let up = recording().await?;
    up.deploy("stream", "stream", &[]).await?;
    let http = up.http();
    // One chunk at once; the next one would be sent after the end of this test.
    let request = http.request(Method::GET, "/fn/default/stream/?chunks=2&ms=600000");
    let response = http.open(request.header("x-request-id", "the-impatient"), full("")).await?;
    ensure!(response.status() == 200, "{response:?}");
    ensure!(records_of(&up, "the-impatient").is_empty(), "its guest is still at work");
    drop((response, http));
    let record = wait::until("the record of a call that nobody waits for", || async {
        Ok(records_of(&up, "the-impatient").pop())
    })
    .await?;
    ensure!(record["outcome"] == "cancelled" && number(&record, "memory_peak_bytes")? > 0, "{record}");
    Ok(())
}
