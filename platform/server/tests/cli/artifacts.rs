//! `mayfly artifact`: the requests sent, and the output.

use serde_json::{Value, json};

use crate::fake::{Fake, answer, ok, status};

#[tokio::test]
async fn an_empty_file_is_data() {
    let fake = Fake::start(|seen| match (seen.method.as_str(), seen.content_type.as_str()) {
        ("PUT", "application/octet-stream") => Some(answer(201, &json!({}))),
        ("PUT", _) => Some(status(422, "Invalid", "not a wasm file: it is empty")),
        _ => None,
    })
    .await;
    let pushed = fake.run(&["artifact", "push", &fake.file("empty.csv", "")]).await.ok();
    assert_eq!(pushed, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n");
}

#[tokio::test]
async fn a_refused_upload_is_about_the_file_and_no_manifest() {
    let fake = Fake::start(|seen| {
        (seen.method == "PUT").then(|| status(422, "Invalid", "not a component: it ends in the middle"))
    })
    .await;
    let error = fake.run(&["artifact", "push", &fake.file("bad.wasm", "\0asm")]).await.failed();
    assert!(error.contains("bad.wasm was not uploaded: not a component: it ends in the middle"), "{error}");
    assert!(!error.contains("manifest"), "{error}");
}

#[tokio::test]
async fn a_full_disk_is_told_once() {
    let message = "the server's disk is full: nothing was written; free some space and try again";
    let fake =
        Fake::start(move |seen| (seen.method == "PUT").then(|| status(507, "InternalError", message))).await;
    let error = fake.run(&["artifact", "push", &fake.file("d.csv", "a,b")]).await.failed();
    assert!(error.ends_with(&format!("d.csv was not uploaded: {message}\n")), "{error}");
}

#[tokio::test]
async fn a_component_is_shown_as_an_image() {
    let fake = Fake::start(|seen| (seen.method == "PUT").then(|| answer(201, &json!({})))).await;
    let ran = fake.run(&["artifact", "push", &fake.file("c.wasm", "\0asm")]).await;
    let digest = ran.stdout.trim();
    assert!(digest.starts_with("sha256:"), "{digest}");
    assert!(ran.stderr.contains(&format!("image: {digest}")), "{}", ran.stderr);
    let data = fake.run(&["artifact", "push", &fake.file("d.csv", "a,b")]).await;
    assert!(!data.stderr.contains("image:"), "{}", data.stderr);
}

#[tokio::test]
async fn job_reports_are_shown_when_all_is_asked_for() {
    let item = |digit: &str, kind: &str| {
        json!({"digest": format!("sha256:{}", digit.repeat(64)), "bytes": 284, "type": kind,
               "created": "2026-01-02T00:00:00Z"})
    };
    let items = [item("1", "component"), item("2", "jobReport"), item("3", "data"), item("4", "jobReport")];
    let fake = Fake::start(move |_| Some(ok(&json!({"kind": "ArtifactList", "items": items})))).await;
    let ran = fake.run(&["artifact", "list"]).await;
    assert!(ran.stderr.contains("2 job reports are not shown; --all shows everything"), "{}", ran.stderr);
    let types: Vec<_> = ran.stdout.lines().map(|line| line.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(types, ["TYPE", "component", "data"], "{}", ran.stdout);
    let all = fake.run(&["artifact", "list", "--all"]).await.ok();
    assert!(all.matches("job report").count() == 2 && all.lines().count() == 5, "{all}");
    let data: Value =
        serde_json::from_str(&fake.run(&["artifact", "list", "-o", "json"]).await.ok()).unwrap();
    assert_eq!((data["kind"].as_str(), data["items"].as_array().unwrap().len()), (Some("ArtifactList"), 2));
}

#[tokio::test]
async fn a_file_is_replaced_by_a_whole_artifact_only() {
    let content = b"what was asked for".to_vec();
    let digest = format!("sha256:{}", "1".repeat(64));
    let there = format!("/artifacts/{digest}");
    let fake = Fake::start(move |seen| match &seen.path {
        path if *path == there => Some(axum::response::Response::new(content.clone().into())),
        path if path == "/artifacts" => Some(ok(&json!({"kind": "ArtifactList", "items": []}))),
        _ => Some(status(404, "NotFound", "there is no such artifact")),
    })
    .await;
    let file = fake.file("kept.bin", "what was there");
    let missing = format!("sha256:{}", "2".repeat(64));
    fake.run(&["artifact", "get", &missing, "--out", &file]).await.failed();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "what was there");
    fake.run(&["artifact", "get", &digest, "--out", &file]).await.ok();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "what was asked for");
}
