//! Functions in Python and JavaScript in the places of any other: streams, outbound requests, reused instances, traffic
//! splits, scaling to zero, metrics; their packages, builds without a network, `mayfly dev`.

use std::{collections::HashSet, net::SocketAddr, path::Path, process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::SinkExt as _;
use http::Method;
use http_body_util::BodyExt as _;
use mayfly_e2e::{CliOutput, Up, ready_replicas, skipped, streamed, test_name, wait, wait::until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::TcpListener,
    process::ChildStderr,
};

use super::languages::{BUILD_TIMEOUT, deploy_or_skip, deployed};

/// Responds to every request with `upstream`.
async fn upstream() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { return };
                    head.push(byte);
                }
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nconnection: close\r\n\r\nupstream";
                if stream.write_all(answer).await.is_ok() {
                    // The end of a chunked body may follow: closing before it is read would reset the connection.
                    let _ = stream.read_to_end(&mut head).await;
                }
            });
        }
    });
    Ok(address)
}

async fn get_json(up: &Up, path: &str) -> Result<Value> {
    let answer = up.http().get(path).await?;
    ensure!(answer.status == 200, "{path}: {answer:?}");
    answer.json()
}

/// Calls a function with `isolation: reuse`, whose instances count their calls, this often.
async fn call_reused(up: &Up, name: &str, calls: u32) -> Result<()> {
    let mut most: u64 = 0;
    for number in 0..calls {
        let answer = get_json(up, &format!("/fn/default/{name}/")).await;
        let counted = answer.with_context(|| format!("call {number}"))?["calls"].as_u64();
        most = most.max(counted.context("no number of calls")?);
    }
    ensure!(most > 10, "no instance answered more than {most} of {calls} calls");
    Ok(())
}

const PYTHON: &str = r#"import os
import random

import mayfly

calls = 0


def handle(request: mayfly.Request):
    global calls
    calls += 1
    if request.path == "/echo":
        return mayfly.Response(chunk.upper() for chunk in request.chunks())
    if request.path == "/fetch":
        return mayfly.fetch(request.query["url"]).text()
    return {"calls": calls, "version": os.environ.get("VERSION"), "random": random.random()}
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_function_of_python_is_used_like_any_other() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("web.py");
    std::fs::write(&script, PYTHON)?;
    let up = Up::start().await?;
    let upstream = upstream().await?;
    let egress = format!("http://{upstream}");
    deploy_or_skip!(up, script, &["--isolation", "reuse", "--egress", &egress]);

    let answer = up.http().get(&format!("/fn/default/web/fetch?url={egress}/")).await?;
    ensure!(answer.status == 200 && answer.text() == "upstream", "{answer:?}");
    a_body_is_streamed(&up).await?;
    call_reused(&up, "web", 300).await?;

    let function = up.cli().get("function", "web").await?;
    let component = function["spec"]["source"]["component"].as_str().context("no component")?;
    is_split_and_scaled(&up, component).await
}

/// Each piece of the request's body is answered before the next one is sent.
async fn a_body_is_streamed(up: &Up) -> Result<()> {
    let http = up.http();
    let (mut sender, receiver) = futures::channel::mpsc::channel(1);
    let request = http.request(Method::POST, "/fn/default/web/echo");
    let mut echoed = http.open(request, streamed(receiver)).await?.into_body();
    for (piece, expected) in [("one", "ONE"), ("two", "TWO")] {
        sender.send(Bytes::from(piece)).await?;
        let frame = tokio::time::timeout(wait::PATIENCE, echoed.frame()).await?;
        let data = frame.and_then(Result::ok).and_then(|frame| frame.into_data().ok());
        ensure!(data.as_deref() == Some(expected.as_bytes()), "{data:?} for {piece}");
    }
    drop(sender);
    ensure!(echoed.collect().await?.to_bytes().is_empty(), "data after the end");
    Ok(())
}

/// Two revisions of one component share the calls, end when idle, and are counted.
async fn is_split_and_scaled(up: &Up, component: &str) -> Result<()> {
    let spec = |version: &str| json!({"env": [{"name": "VERSION", "value": version}], "scaling": {"idleAfter": "2s"}});
    up.apply_function("split", component, spec("1")).await?;
    let mut second = spec("2");
    second["traffic"] = json!([{"revision": "split-00001", "percent": 50}, {"latest": true, "percent": 50}]);
    up.apply_function("split", component, second).await?;
    let both = |function: &Value| function["status"]["latestReadyRevision"] == "split-00002";
    up.wait_until_function("split", "has its second revision ready", both).await?;
    let (mut versions, mut numbers) = (HashSet::new(), HashSet::new());
    for _ in 0..40 {
        let answer = get_json(up, "/fn/default/split/").await?;
        versions.insert(answer["version"].to_string());
        numbers.insert(answer["random"].to_string());
    }
    ensure!(versions.len() == 2, "{versions:?}");
    // Each instance has its own random numbers, not those of the snapshot.
    ensure!(numbers.len() == 40, "{} of 40 random numbers differ", numbers.len());

    let api = up.api()?;
    until("calls bring a replica", || async {
        get_json(up, "/fn/default/split/").await?;
        let function = api.get("/apis/mayfly.dev/v1/namespaces/default/functions/split").await?.body;
        Ok((ready_replicas(&function) > 0).then_some(()))
    })
    .await?;
    up.wait_until_function("split", "has none", |function| ready_replicas(function) == 0).await?;
    get_json(up, "/fn/default/split/").await?;
    let metrics = up.admin().get("/metrics").await?.text();
    ensure!(metrics.lines().any(|line| line.starts_with("mayfly_") && line.contains("split")), "{metrics}");
    Ok(())
}

const JAVASCRIPT: &str = r#"import ms from "ms";

let calls = 0;

export async function fetch(request) {
  calls += 1;
  const url = new URL(request.url);
  if (url.pathname === "/fetch") {
    const answer = await globalThis.fetch(url.searchParams.get("url"));
    return await answer.text();
  }
  if (url.pathname === "/stream") {
    let part = 0;
    return new Response(new ReadableStream({
      pull(controller) {
        if (part === 3) controller.close();
        else controller.enqueue(new TextEncoder().encode(`part ${part++}\n`));
      },
    }));
  }
  return { calls, milliseconds: ms("2 days") };
}
"#;

/// Builds with registries that do not answer.
async fn build_offline(up: &Up, script: &Path) -> Result<CliOutput> {
    let nowhere = "http://127.0.0.1:9/";
    let mut command = up.cli().command(&["build", &script.to_string_lossy()])?;
    command.envs([
        ("npm_config_registry", nowhere),
        ("npm_config_fetch_retries", "0"),
        ("PIP_INDEX_URL", nowhere),
        ("PIP_EXTRA_INDEX_URL", ""),
        ("PIP_RETRIES", "0"),
        ("PIP_NO_CACHE_DIR", "1"),
    ]);
    let output =
        tokio::time::timeout(BUILD_TIMEOUT, command.output()).await.context("the build did not end")??;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(CliOutput { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_of_javascript_is_used_like_any_other() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("site.js");
    std::fs::write(&script, JAVASCRIPT)?;
    std::fs::write(folder.path().join("package.json"), r#"{"dependencies": {"ms": "2.1.3"}}"#)?;
    let up = Up::start().await?;
    let upstream = upstream().await?;
    let egress = format!("http://{upstream}");
    deploy_or_skip!(up, script, &["--isolation", "reuse", "--egress", &egress]);

    // The package is part of the function.
    let answer = get_json(&up, "/fn/default/site/").await?;
    ensure!(answer["milliseconds"] == 172_800_000, "{answer}");
    let answer = up.http().get(&format!("/fn/default/site/fetch?url={egress}/")).await?;
    ensure!(answer.status == 200 && answer.text() == "upstream", "{answer:?}");
    let answer = up.http().get("/fn/default/site/stream").await?;
    ensure!(answer.text() == "part 0\npart 1\npart 2\n", "{answer:?}");

    // More calls than the host allows handles, of which each request needs some.
    call_reused(&up, "site", 3_000).await?;
    let metrics = up.admin().get("/metrics").await?.text();
    let recycled = metrics.lines().find(|line| line.starts_with("mayfly_wasm_instances_recycled_total"));
    ensure!(recycled.is_some_and(|line| line.ends_with(" 0")), "handles are retained: {recycled:?}");

    // A second build needs no network, and says what it used.
    std::fs::write(&script, format!("{JAVASCRIPT}\n// Changed.\n"))?;
    let built = build_offline(&up, &script).await?;
    ensure!(built.code == Some(0) && built.stderr.contains("using componentize-js "), "{built:?}");
    // The registry is really absent.
    std::fs::remove_dir_all(folder.path().join("node_modules"))?;
    std::fs::remove_file(folder.path().join("package-lock.json"))?;
    std::fs::write(folder.path().join("package.json"), r#"{"dependencies": {"left-pad": "1.3.0"}}"#)?;
    let failed = build_offline(&up, &script).await?;
    ensure!(failed.code == Some(1) && failed.stderr.contains("npm cannot install"), "{failed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_build_of_python_needs_no_network() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("handler.py");
    let source = "import humanize\n\n\ndef handle(event):\n    return humanize.intcomma(1000)\n";
    std::fs::write(&script, source)?;
    std::fs::write(folder.path().join("requirements.txt"), "humanize==4.9.0\n")?;
    let up = Up::start().await?;
    deploy_or_skip!(up, script, &["--no-wait"]);
    std::fs::write(&script, format!("{source}\n# Changed.\n"))?;
    let built = build_offline(&up, &script).await?;
    ensure!(built.code == Some(0) && built.stderr.contains("using componentize-py "), "{built:?}");
    std::fs::write(folder.path().join("requirements.txt"), "humanize==4.8.0\n")?;
    let failed = build_offline(&up, &script).await?;
    ensure!(failed.code == Some(1) && failed.stderr.contains("requirements.txt: "), "{failed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_never_loads_ends_its_build() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let up = Up::start().await?;
    for (file, endless) in [
        ("handler.py", "while True:\n    pass\n\n\ndef handle(event):\n    return 1\n"),
        ("handler.js", "for (;;);\nexport const handle = () => 1;\n"),
    ] {
        let script = folder.path().join(file);
        // The toolchain is installed without a limit of time.
        std::fs::write(&script, endless.replace("while True", "while False").replace("for (;;);", ""))?;
        deploy_or_skip!(up, script, &["--no-wait"]);
        std::fs::write(&script, endless)?;
        let mut command = up.cli().command(&["build", &script.to_string_lossy(), "--build-timeout", "2s"])?;
        let ended = tokio::time::timeout(BUILD_TIMEOUT, command.output()).await;
        let ended = ended.with_context(|| format!("the build of {file} did not end"))??;
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.code() == Some(1), "{said}");
        for part in [&*format!("{file} was not loaded within 2"), "--build-timeout"] {
            ensure!(said.contains(part), "{part} is not in: {said}");
        }
    }
    Ok(())
}

/// Reads the messages of `mayfly dev` until one has this text.
async fn until_said(messages: &mut Lines<BufReader<ChildStderr>>, text: &str) -> Result<()> {
    let reading = async {
        while let Some(line) = messages.next_line().await? {
            if line.contains(text) {
                return Ok(());
            }
        }
        anyhow::bail!("mayfly dev ended")
    };
    tokio::time::timeout(BUILD_TIMEOUT, reading).await.with_context(|| format!("not said: {text}"))?
}

#[tokio::test(flavor = "multi_thread")]
async fn every_save_of_a_script_is_deployed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("handler.py");
    let source = |result: &str| format!("def handle(event):\n    return {result}\n");
    std::fs::write(&script, source("'first'"))?;
    let up = Up::start().await?;
    deploy_or_skip!(up, script, &[]);

    let mut dev = up.cli().command(&["dev", &script.to_string_lossy(), "--wait-timeout", "300s"])?;
    let mut dev = dev.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut messages = BufReader::new(dev.stderr.take().context("no stderr")?).lines();
    until_said(&mut messages, " answers at ").await?;
    // The file's error is reported with its line, and the function stays as it was.
    std::fs::write(&script, source("("))?;
    until_said(&mut messages, "File \"handler.py\", line 2").await?;
    until_said(&mut messages, "waiting for the next save").await?;
    ensure!(up.http().post("/fn/default/handler/", "{}").await?.text() == "\"first\"");
    // A save cancels a build that does not end.
    std::fs::write(&script, format!("while True:\n    pass\n{}", source("0")))?;
    until_said(&mut messages, "loading handler.py ").await?;
    std::fs::write(&script, source("'second'"))?;
    until_said(&mut messages, "building again").await?;
    until_said(&mut messages, " answers at ").await?;
    // The route to the new revision follows within moments.
    until("what was saved answers", || async {
        let answer = up.http().post("/fn/default/handler/", "{}").await?;
        Ok((answer.text() == "\"second\"").then_some(()))
    })
    .await?;
    tokio::time::timeout(Duration::from_secs(10), dev.kill()).await??;
    Ok(())
}
