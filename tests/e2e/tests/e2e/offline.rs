//! `mayfly workflow test`: runs definitions offline with the real binary, without a server.

use std::{path::Path, process::Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

/// The result of a run: exit code, stdout, stderr.
struct Tested(Option<i32>, String, String);

/// Runs `mayfly workflow test …` in a folder, with an empty data directory.
async fn test(folder: &Path, arguments: &[&str]) -> Result<Tested> {
    let mut command = Command::new(mayfly_e2e::binary()?);
    command.args(["workflow", "test"]).args(arguments).current_dir(folder);
    command.env("MAYFLY_DATA_DIR", folder.join("no-server")).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(std::time::Duration::from_secs(60), command.output()).await??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Tested(output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// The order's definition and its tests.
fn order() -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("order.yaml"), include_str!("offline/order.yaml"))?;
    std::fs::write(folder.path().join("order.test.yaml"), include_str!("offline/order.test.yaml"))?;
    Ok(folder)
}

/// One test file for the order's definition.
async fn with_cases(text: &str) -> Result<Tested> {
    let folder = order()?;
    std::fs::remove_file(folder.path().join("order.test.yaml"))?;
    std::fs::create_dir(folder.path().join("deeper"))?;
    std::fs::write(folder.path().join("deeper/x.test.yml"), format!("definition: ../order.yaml\n{text}"))?;
    test(folder.path(), &[]).await
}

#[tokio::test]
async fn months_of_waiting_pass_in_a_moment() -> Result<()> {
    let folder = order()?;
    let begun = tokio::time::Instant::now();
    let Tested(code, out, err) = test(folder.path(), &[]).await?;
    ensure!(code == Some(0), "{out}{err}");
    ensure!(out.contains("5 passed, 0 failed"), "{out}");
    // Time and retries are exact: 2 s of backoff, 5 s of a slow bank, 2 h for Ada, 1 min to ship.
    ensure!(out.contains("pays at the second try (8 states, 1 retry, 300d 2h 1m 7s elapsed)"), "{out}");
    ensure!(out.contains("states 8/9 (not reached: SoldOut)"), "{out}");
    ensure!(out.contains("choice branches 1/2 (not reached: Route → SoldOut)"), "{out}");
    ensure!(out.contains("catchers 1/1"), "{out}");
    ensure!(begun.elapsed().as_secs() < 30, "it took {:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn express_executions_end_after_five_minutes() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let waits = r#"{"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 600, "End": true}}}"#;
    std::fs::write(folder.path().join("waits.json"), waits)?;
    for (kind, status, elapsed) in
        [("EXPRESS", "TIMED_OUT", "5m elapsed"), ("STANDARD", "SUCCEEDED", "10m elapsed")]
    {
        let cases = format!(
            "definition: waits.json\ntype: {kind}\ncases:\n  - name: waits\n    expect: {{status: {status}}}\n"
        );
        std::fs::write(folder.path().join("waits.test.yaml"), cases)?;
        let Tested(code, out, err) = test(folder.path(), &[]).await?;
        ensure!(code == Some(0) && out.contains(elapsed), "{kind}: {out}{err}");
    }
    Ok(())
}

#[tokio::test]
async fn what_differs_is_shown_at_its_place() -> Result<()> {
    let cases = r#"
mocks: {Reserve: {payload: {ok: false}}}
cases:
  - name: hopes too much
    expect:
      output: {a: 1}
      path: [Reserve, Route, Charge]
  - name: knows
    expect: {status: FAILED, error: SoldOut, causeIncludes: none}
"#;
    let Tested(code, out, _) = with_cases(cases).await?;
    ensure!(code == Some(1), "{out}");
    for line in [
        "FAIL  hopes too much",
        "- expected SUCCEEDED",
        "+      got FAILED",
        "- expected Reserve → Route → Charge",
        "+      got Reserve → Route → SoldOut",
        "- expected {\"a\":1}",
        "+      got nothing",
        "it failed with SoldOut: none left",
        "ok    knows",
        "1 passed, 1 failed",
    ] {
        ensure!(out.contains(line), "{line:?} is missing in\n{out}");
    }
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_with_a_test_file_is_said() -> Result<()> {
    for (cases, sentence) in [
        (
            "cases: [{name: a}]",
            "Reserve has no mock (arn:aws:states:::lambda:invoke): add `Reserve: {result: …}`",
        ),
        ("mocks: {reserve: {result: 1}}\ncases: [{name: a}]", "did you mean Reserve?"),
        (
            "mocks: {Route: {result: 1}}\ncases: [{name: a}]",
            "Route is a Choice state, and only tasks are mocked",
        ),
        ("mocks: {Charge: {payload: 1}}\ncases: [{name: a}]", "its resource is not lambda:invoke"),
        (
            "mocks: {Charge: {result: 1, never: true}}\ncases: [{name: a}]",
            "one of result, payload, error, never",
        ),
        ("cases: [{name: a, expect: {path: [Nowhere]}}]", "there is no such state"),
        ("cases: [{name: a, expect: {statsu: FAILED}}]", "statsu"),
        ("cases: [{name: a, expect: {status: DONE}}]", "SUCCEEDED, FAILED, TIMED_OUT, ABORTED"),
        ("mocks: {}", "has no cases"),
        (
            "mocks: {Reserve: [{payload: {ok: true}}], Charge: {result: 1}, Approve: {result: 1}, Ship: {never: true}}\n\
          cases: [{name: a, input: {items: [1]}}]",
            "a mock never answers, and its state has no TimeoutSeconds",
        ),
        (
            "mocks: {Reserve: {payload: {ok: true}}, Charge: [{error: BankSlow}]}\ncases: [{name: a}]",
            "the mock of Charge has no answer for call 2",
        ),
    ] {
        let Tested(code, out, err) = with_cases(cases).await?;
        ensure!(code == Some(1) && out.contains(sentence), "{cases}\n{sentence:?} is missing in\n{out}{err}");
    }
    Ok(())
}

#[tokio::test]
async fn one_run_needs_no_file() -> Result<()> {
    let folder = order()?;
    let arguments = [
        "--definition",
        "order.yaml",
        "--input",
        r#"{"items":[]}"#,
        "--mock",
        r#"Reserve={"Payload":{"ok":true}}"#,
    ];
    let fails =
        [&arguments[..], &["--mock-error", "Charge=CardDeclined:no money", "--output", "json"]].concat();
    let Tested(code, out, err) = test(folder.path(), &fails).await?;
    let told: Value = serde_json::from_str(&out).with_context(|| format!("{out}{err}"))?;
    ensure!(code == Some(0) && told["output"] == json!({"refunded": true}), "{out}");
    ensure!(told["path"] == json!(["Reserve", "Route", "Charge", "Refund"]), "{out}");
    let broken = [&arguments[..], &["--mock-error", "Charge=Broken:twice"]].concat();
    let Tested(code, out, _) = test(folder.path(), &broken).await?;
    ensure!(
        code == Some(1) && out.contains("FAILED after 0s") && out.contains("error: Broken: twice"),
        "{out}"
    );
    let Tested(code, _, err) =
        test(folder.path(), &["--definition", "order.yaml", "--mock", "Charge"]).await?;
    ensure!(code == Some(2) && err.contains("STATE=VALUE"), "{err}");
    let empty = tempfile::tempdir()?;
    let Tested(code, _, err) = test(empty.path(), &[]).await?;
    ensure!(code == Some(1) && err.contains("there are no test files here"), "{err}");
    Ok(())
}

#[tokio::test]
async fn distributed_maps_read_files_and_their_children_count() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let definition = json!({"StartAt": "All", "States": {"All": {"Type": "Map", "End": true,
        "ItemReader": {"Resource": "arn:aws:states:::s3:getObject",
            "ReaderConfig": {"InputType": "CSV", "CSVHeaderLocation": "FIRST_ROW"},
            "Parameters": {"Bucket": "in", "Key": "people.csv"}},
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "Greet", "States": {"Greet": {"Type": "Task",
                "Resource": "arn:aws:states:::lambda:invoke", "OutputPath": "$.Payload",
                "Parameters": {"FunctionName": "greet", "Payload.$": "$.name"}, "End": true}}}}}});
    std::fs::write(folder.path().join("people.asl.json"), definition.to_string())?;
    let cases = json!({"files": {"in/people.csv": "name,age\nAda,36\nGrace,85\n"}, "cases": [{"name": "greets",
        "mocks": {"arn:aws:states:::lambda:invoke": [
            {"when": {"Payload": "Ada"}, "payload": "hello, Ada"}, {"payload": "hello", "times": 5}]},
        "expect": {"output": ["hello, Ada", "hello"], "path": ["All"], "calls": {"Greet": 2}}}]});
    std::fs::write(folder.path().join("people.test.json"), cases.to_string())?;
    let Tested(code, out, err) = test(folder.path(), &["people.test.json", "--output", "json"]).await?;
    ensure!(code == Some(0), "{out}{err}");
    let told: Value = serde_json::from_str(&out)?;
    ensure!(
        told["files"][0]["coverage"]["states"] == json!({"total": 2, "reached": 2, "missing": []}),
        "{out}"
    );
    Ok(())
}

#[tokio::test]
async fn a_loop_of_mocks_ends_and_names_its_states() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let task = "arn:aws:states:::lambda:invoke";
    let definition = json!({"StartAt": "Begin", "States": {
        "Begin": {"Type": "Pass", "Next": "Poll"},
        "Poll": {"Type": "Task", "Resource": task, "Parameters": {"FunctionName": "f"}, "Next": "Ready"},
        "Ready": {"Type": "Choice", "Default": "Poll",
            "Choices": [{"Variable": "$.done", "IsPresent": true, "Next": "Done"}]},
        "Done": {"Type": "Succeed"}}});
    std::fs::write(folder.path().join("poll.json"), definition.to_string())?;
    let Tested(code, out, err) =
        test(folder.path(), &["--definition", "poll.json", "--mock", r#"Poll={"Payload":{}}"#]).await?;
    ensure!(code == Some(1) && out.contains("it does not end: after 2500"), "{out}{err}");
    let states = out.split("between ").nth(1).and_then(|rest| rest.split(';').next()).unwrap_or_default();
    ensure!(states.contains("Poll") && states.contains("Ready") && !states.contains("Begin"), "{out}");
    ensure!(out.len() < 4_000, "the path is cut: {} bytes", out.len());
    Ok(())
}
