//! Invalid uploads: each is rejected with a clear message and the right status, and nothing is stored.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures::StreamExt;
use http::Method;
use mayfly_e2e::{ApiAnswer, Start, Up, digest_of, full, guest_or_skip, streamed};
use serde_json::Value;

const CORE_MODULE: &[u8] = b"\0asm\x01\0\0\0";

/// A program (wasi:cli/run) with an import that no host has.
const UNKNOWN_IMPORT: &str = r#"(component
    (import "acme:sky/rain@1.0.0" (instance (export "fall" (func))))
    (core module $m (func (export "run") (result i32) i32.const 0))
    (core instance $i (instantiate $m))
    (func $run (result (result)) (canon lift (core func $i "run")))
    (instance $program (export "run" (func $run)))
    (export "wasi:cli/run@0.2.0" (instance $program)))"#;

async fn put(up: &Up, content: impl Into<Bytes>, digest: &str) -> Result<ApiAnswer> {
    let path = format!("/artifacts/{digest}");
    up.api()?.call(Method::PUT, &path, "application/wasm", full(content)).await
}

/// Uploads content under its digest; expects the status and all words in the message, and that nothing is stored.
async fn refused(up: &Up, content: Vec<u8>, status: u16, words: &[&str]) -> Result<()> {
    let digest = digest_of(&content);
    let answer = put(up, content, &digest).await?;
    ensure!(answer.status == status, "{answer:?}");
    for word in words {
        ensure!(answer.message().contains(word), "{word:?} is not in {answer:?}");
    }
    ensure!(answer.body["kind"] == "Status", "{answer:?}");
    nothing_kept(up).await
}

async fn nothing_kept(up: &Up) -> Result<()> {
    let list = up.api()?.get("/artifacts").await?;
    ensure!(list.body["items"] == Value::Array(Vec::new()), "something was kept: {list:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_wasm_is_refused() -> Result<()> {
    let up = Up::start().await?;
    refused(&up, b"#!/bin/sh\necho no\n".to_vec(), 422, &["wasm"]).await?;
    refused(&up, Vec::new(), 422, &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_core_module_is_refused_with_the_way_to_a_component() -> Result<()> {
    let up = Up::start().await?;
    refused(&up, CORE_MODULE.to_vec(), 422, &["core module", "component"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_import_is_named() -> Result<()> {
    let up = Up::start().await?;
    refused(&up, wat::parse_str(UNKNOWN_IMPORT)?, 422, &["acme:sky/rain@1.0.0"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_of_no_known_world_is_refused() -> Result<()> {
    let up = Up::start().await?;
    refused(&up, wat::parse_str("(component)")?, 422, &["wasi:http"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_component_is_refused() -> Result<()> {
    let hello = guest_or_skip!("hello");
    let up = Up::start().await?;
    let mut content = std::fs::read(hello)?;
    content.truncate(content.len() / 2);
    refused(&up, content, 422, &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_is_no_function_and_its_author_is_told() -> Result<()> {
    let job = guest_or_skip!("job");
    let up = Up::start().await?;
    let told = up.cli().fails(&["deploy", &job.to_string_lossy()]).await?;
    ensure!(told.contains("answers no requests") && told.contains("Pod"), "{told}");
    // The API accepts a job as an artifact, but not as the component of a function.
    let digest = up.upload("job").await?;
    let path = "/apis/mayfly.dev/v1/namespaces/default/functions";
    up.api()?.post(path, &mayfly_e2e::function("job", &digest, serde_json::json!({}))).await?;
    let refused = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array();
        let ready = conditions.into_iter().flatten().find(|condition| condition["type"] == "Ready");
        ready.is_some_and(|ready| ready["status"] == "False" && ready["message"] != "")
    };
    up.wait_until_function("job", "says that it cannot answer", refused).await?;
    let answer = up.http().get("/fn/default/job/").await?;
    ensure!(answer.status == 503 && answer.json()?["error"]["hint"].is_string(), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_digest_that_does_not_match_is_refused() -> Result<()> {
    let hello = guest_or_skip!("hello");
    let up = Up::start().await?;
    let (announced, content) = (digest_of(b"something else"), std::fs::read(hello)?);
    let actual = digest_of(&content);
    let answer = put(&up, content, &announced).await?;
    ensure!(answer.status == 422, "{answer:?}");
    ensure!(answer.message().contains(&announced) && answer.message().contains(&actual), "{answer:?}");
    nothing_kept(&up).await?;
    let answer = put(&up, "x", "sha256:12").await?;
    ensure!(answer.status == 400, "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_past_the_limit_is_cut_off() -> Result<()> {
    let up = Up::start().await?;
    let before = up.resident_bytes()?;
    // 80 MB, in chunks of 1 MB; the limit is 64 MiB. The rest is read and discarded, so that the client gets the
    // response instead of a connection error.
    let piece = Bytes::from(vec![0; 1_000_000]);
    let pieces = futures::stream::iter(0..80).map(move |_| piece.clone());
    let path = format!("/artifacts/{}", digest_of(b"whatever"));
    let told = up.api()?.call(Method::PUT, &path, "application/wasm", streamed(pieces)).await?;
    let larger = format!("larger than the {} bytes allowed", 64 << 20);
    ensure!(told.status == 413 && told.message().contains(&larger), "{told:?}");
    let grown = up.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 48 << 20, "the upload was held in memory: {grown} bytes more");
    nothing_kept(&up).await?;
    ensure!(up.api()?.get("/readyz").await?.status == 200);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_is_the_operators_and_is_told() -> Result<()> {
    let up = Start::default().with(&["--artifact-limit", "64Ki"]).ready().await?;
    refused(&up, vec![0; 100_000], 413, &["65536"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_refuses_before_it_sends() -> Result<()> {
    let up = Up::start().await?;
    let folder = tempfile::tempdir()?;
    for (name, content, expect) in
        [("text.wasm", &b"hello"[..], "not a wasm file"), ("core.wasm", CORE_MODULE, "it exports nothing")]
    {
        let file = folder.path().join(name);
        std::fs::write(&file, content)?;
        let told = up.cli().fails(&["deploy", &file.to_string_lossy()]).await?;
        ensure!(told.contains(expect), "{name}: {told}");
    }
    let told = up.cli().fails(&["deploy", "/nowhere/at/all.wasm"]).await?;
    ensure!(told.contains("/nowhere/at/all.wasm"), "{told}");
    nothing_kept(&up).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_in_use_stays_and_one_that_nobody_names_can_go() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    let function = up.cli().get("function", "hello").await?;
    let digest = function["spec"]["source"]["component"].as_str().unwrap_or_default().to_owned();
    let path = format!("/artifacts/{digest}");
    let kept = up.api()?.delete(&path).await?;
    ensure!(kept.status == 409 && kept.message().contains("hello"), "{kept:?}");
    up.cli().ok(&["delete", "function", "hello"]).await?;
    mayfly_e2e::wait::until("the artifact can be deleted, or was collected", || async {
        let answer = up.api()?.delete(&path).await?;
        Ok(matches!(answer.status, 200 | 404).then_some(()))
    })
    .await?;
    nothing_kept(&up).await
}

/// Runs the server's compiler on a component; `memory_bytes_max` is its memory limit.
async fn compile(up: &Up, component: &[u8], memory_bytes_max: &str) -> Result<mayfly_e2e::CliOutput> {
    let reserved = (4_u64 << 30).to_string();
    up.cli().with_stdin(&["compile", "sync", &reserved, "2", memory_bytes_max], component).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_compiler_ends_alone_by_what_it_cannot_compile() -> Result<()> {
    let hello = std::fs::read(guest_or_skip!("hello"))?;
    let up = Up::start().await?;
    let done = compile(&up, &hello, "1000000000").await?;
    ensure!(done.code == Some(0) && done.stderr.is_empty(), "{:?} {}", done.code, done.stderr);
    let refused = compile(&up, b"no wasm", "1000000000").await?;
    ensure!(refused.code == Some(3) && !refused.stderr.is_empty(), "{refused:?}");
    let starved = compile(&up, &hello, "8000000").await?;
    ensure!(!matches!(starved.code, Some(0 | 3)), "not the component's fault: {starved:?}");
    let by_hand = up.cli().fails(&["compile", "hello.wasm"]).await?;
    ensure!(by_hand.contains("for internal use"), "{by_hand}");
    Ok(())
}

/// The folder of the server's artifacts: `…/sha256`, below the data directory.
fn contents_folder(data: &Path, digest: &str) -> Result<PathBuf> {
    let hex = digest.trim_start_matches("sha256:");
    let found = walk(data)?.into_iter().find(|path| path.file_name().is_some_and(|name| name == hex));
    let content = found.with_context(|| format!("no file {hex} below {}", data.display()))?;
    Ok(content.parent().context("a file has a folder")?.to_owned())
}

/// All files and folders below a folder.
fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(walk(&path)?);
        }
        found.push(path);
    }
    Ok(found)
}

/// Damages the store in three ways; errors in responses and objects must not contain paths of the server.
#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_artifact_store_name_no_path_of_the_host() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    let data = up.data().to_string_lossy().into_owned();
    let digest = up.upload("hello").await?;
    let contents = contents_folder(up.data(), &digest)?;
    let content = contents.join(digest.trim_start_matches("sha256:"));
    let path = format!("/artifacts/{digest}");

    // Content that cannot be read.
    std::fs::remove_file(&content)?;
    std::fs::create_dir(&content)?;
    let function = mayfly_e2e::function("hello", &digest, serde_json::json!({}));
    let created = up.api()?.post("/apis/mayfly.dev/v1/namespaces/default/functions", &function).await?;
    ensure!(created.status == 201, "{created:?}");
    let is_told = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array();
        conditions.into_iter().flatten().any(|it| it["status"] == "False" && it["message"] != "")
    };
    let object = up.wait_until_function("hello", "says that it is not ready", is_told).await?;
    ensure!(!object.to_string().contains(&data), "{object}");
    let answer = up.http().get("/fn/default/hello/").await?;
    ensure!(answer.status.is_server_error() && !answer.text().contains(&data), "{answer:?}");
    let read = up.api()?.get(&path).await?;
    ensure!(read.status >= 400 && !format!("{read:?}").contains(&data), "{read:?}");

    // A folder that cannot be written.
    std::fs::remove_dir(&content)?;
    std::fs::remove_dir_all(&contents)?;
    std::fs::write(&contents, "no folder")?;
    let bytes = std::fs::read(mayfly_e2e::guest("hello").map_err(anyhow::Error::msg)?)?;
    let refused = put(&up, bytes, &digest).await?;
    ensure!(refused.status == 500 && !format!("{refused:?}").contains(&data), "{refused:?}");
    ensure!(refused.message().contains("see the server's log"), "{refused:?}");
    let list = up.api()?.get("/artifacts").await?;
    ensure!(list.status >= 400 && !format!("{list:?}").contains(&data), "{list:?}");
    Ok(())
}
