//! Asynchronous invocations: queued durably, retried, sent to a destination after the last failure, started by
//! triggers.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use mayfly_e2e::{Start, Up, full, guest_or_skip, wait::until};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::workflows;

/// A server that records every request and responds with 200.
struct Recorder {
    url: String,
    requests: Arc<Mutex<Vec<Recorded>>>,
    server: tokio::task::JoinHandle<()>,
}

#[derive(Clone, Debug)]
struct Recorded {
    path: String,
    body: String,
}

impl Recorder {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let requests = Arc::<Mutex<Vec<Recorded>>>::default();
        let recorded = requests.clone();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let recorded = recorded.clone();
                let service = hyper::service::service_fn(move |request| record(request, recorded.clone()));
                tokio::spawn(async move {
                    // A connection that the server under test drops is not an error.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Ok(Self { url, requests, server })
    }

    fn requests(&self) -> Vec<Recorded> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn record(
    request: Request<Incoming>,
    recorded: Arc<Mutex<Vec<Recorded>>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let path = request.uri().to_string();
    let body = request.into_body().collect().await?.to_bytes();
    let body = String::from_utf8_lossy(&body).into_owned();
    recorded.lock().unwrap_or_else(PoisonError::into_inner).push(Recorded { path, body });
    Ok(Response::new(Full::new(Bytes::from_static(b"recorded"))))
}

/// Queues a request to a function; returns the response's status and the invocation's id.
async fn enqueue(up: &Up, path: &str, headers: &[(&str, &str)], body: &str) -> Result<(u16, String)> {
    let http = up.http();
    let mut request = http.request(Method::POST, path).header("mayfly-invocation", "async");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = http.call(request, full(body.to_owned())).await?;
    let id = answer.header("mayfly-invocation-id").to_owned();
    if answer.status == 202 {
        ensure!(answer.json()?["invocation"] == id.as_str() && !id.is_empty(), "{answer:?}");
    }
    Ok((answer.status.as_u16(), id))
}

/// The invocations of a function in one page.
async fn listed(up: &Up, function: &str, query: &str) -> Result<Vec<Value>> {
    let answer = up.workflows().get(&format!("/invocations/default/{function}{query}")).await?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(answer.json()?["items"].as_array().context("no items")?.clone())
}

/// Waits until an invocation has ended; returns its description.
async fn ended(up: &Up, function: &str, id: &str) -> Result<Value> {
    until(&format!("invocation {id} of {function} ends"), async || {
        let answer = up.workflows().get(&format!("/invocations/default/{function}/{id}")).await?;
        ensure!(answer.status == 200, "{answer:?}");
        let found = answer.json()?;
        Ok((found["status"] != "RUNNING").then_some(found))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invocation_is_queued_and_carried_out() -> Result<()> {
    guest_or_skip!("greet");
    let up = Up::start().await?;
    up.deploy("greet", "greet", &[]).await?;

    let id = up.cli().ok(&["invoke", "greet", "--async", "-d", r#"{"name":"Ada"}"#]).await?;
    let id = id.trim();
    let found = ended(&up, "greet", id).await?;
    ensure!(found["status"] == "SUCCEEDED" && found["attempts"] == 1, "{found}");
    ensure!(found["request"]["body"] == r#"{"name":"Ada"}"#, "{found}");
    let shown = up.cli().ok(&["invocations", "describe", "greet", id]).await?;
    ensure!(shown.contains("Status:    SUCCEEDED") && shown.contains("TaskSucceeded"), "{shown}");
    for arguments in
        [&["invocations", "list"][..], &["invocations", "list", "greet", "--status", "succeeded"]]
    {
        let shown = up.cli().ok(arguments).await?;
        ensure!(shown.contains(id) && shown.contains("greet"), "{arguments:?}: {shown}");
    }
    // Invocations are not listed as executions.
    let executions = up.api()?.get("/apis/mayfly.dev/v1/executions").await?;
    ensure!(executions.body["items"].as_array().is_some_and(Vec::is_empty), "{}", executions.body);

    // The same key identifies the same invocation.
    let key = [("idempotency-key", "order-7")];
    let (_, first) = enqueue(&up, "/fn/default/greet/", &key, r#"{"name":"Bob"}"#).await?;
    let (status, second) = enqueue(&up, "/fn/default/greet/", &key, r#"{"name":"Bob"}"#).await?;
    ensure!(status == 202 && first == second, "{status}: {first} and {second}");
    ended(&up, "greet", &first).await?;
    ensure!(listed(&up, "greet", "").await?.len() == 2);

    let (status, _) = enqueue(&up, "/fn/default/absent/", &[], "{}").await?;
    ensure!(status == 404, "{status}");
    let (status, _) = enqueue(&up, "/fn/default/greet/", &[], &"x".repeat((256 << 10) + 1)).await?;
    ensure!(status == 413, "{status}");
    let http = up.http();
    let request = http.request(Method::POST, "/fn/default/greet/").header("mayfly-invocation", "later");
    let answer = http.call(request, full("{}")).await?;
    ensure!(answer.status == 400 && answer.text().contains("`async` or `sync`"), "{answer:?}");
    let said = up.cli().fails(&["invocations", "describe", "greet", "absent"]).await?;
    ensure!(said.contains("there is no invocation \"absent\""), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_event_ends_at_its_destination() -> Result<()> {
    guest_or_skip!("greet");
    let recorder = Recorder::start().await?;
    let up = Up::start().await?;
    let component = up.upload("greet").await?;
    let dead = workflows::create(
        &up,
        "dead",
        "STANDARD",
        json!({
        "StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}}),
    )
    .await?;
    let rules = |to: Value| json!({"asyncInvocation": {"maximumRetryAttempts": 1, "onFailure": to}});
    up.apply_function("to-url", &component, rules(json!({"url": format!("{}/dead", recorder.url)}))).await?;
    up.apply_function("to-workflow", &component, rules(json!({"workflow": "dead"}))).await?;
    up.apply_function("to-nowhere", &component, rules(Value::Null)).await?;

    // The guest rejects an empty name with a typed error.
    let (_, id) = enqueue(&up, "/fn/default/to-url/", &[], r#"{"name":""}"#).await?;
    let found = ended(&up, "to-url", &id).await?;
    ensure!(found["status"] == "FAILED" && found["error"] == "NoName", "{found}");
    // The delivery to the destination is not an attempt.
    ensure!(found["attempts"] == 2, "{found}");
    let requests = recorder.requests();
    ensure!(requests.len() == 1 && requests[0].path == "/dead", "{requests:?}");
    let record: Value = serde_json::from_str(&requests[0].body)?;
    ensure!(record["requestContext"]["requestId"] == id.as_str(), "{record}");
    ensure!(record["requestPayload"] == json!({"name": ""}), "{record}");
    ensure!(record["responsePayload"]["errorMessage"] == "a person needs a name", "{record}");

    // A body that is not JSON is delivered as text.
    let (_, id) = enqueue(&up, "/fn/default/to-workflow/", &[], "no JSON").await?;
    ended(&up, "to-workflow", &id).await?;
    let started = workflows::call(&up, "ListExecutions", json!({"stateMachineArn": dead})).await?;
    let execution = started["executions"][0]["executionArn"].as_str().context("no execution")?.to_owned();
    let told = workflows::ended(&up, &execution).await?;
    let record: Value = serde_json::from_str(told["input"].as_str().context("no input")?)?;
    ensure!(record["requestPayload"] == "no JSON", "{record}");

    let (_, id) = enqueue(&up, "/fn/default/to-nowhere/", &[], r#"{"name":""}"#).await?;
    let found = ended(&up, "to-nowhere", &id).await?;
    ensure!(found["status"] == "FAILED" && found["attempts"] == 2, "{found}");

    // An invocation may be queued again, with the same idempotency key, and removed.
    let again = up.cli().ok(&["invocations", "retry", "to-nowhere", &id]).await?;
    ensure!(again.trim() != id, "{again}");
    let found = ended(&up, "to-nowhere", again.trim()).await?;
    let headers = found["request"]["headers"].as_array().context("no headers")?;
    ensure!(headers.contains(&json!(["idempotency-key", id])), "{found}");
    let said = up.cli().ok(&["invocations", "purge", "to-nowhere"]).await?;
    ensure!(said == "2 invocations removed\n", "{said}");
    ensure!(listed(&up, "to-nowhere", "").await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_event_reaches_its_destination_and_credentials_are_not_shown() -> Result<()> {
    guest_or_skip!("greet");
    let recorder = Recorder::start().await?;
    let up = Up::start().await?;
    let component = up.upload("greet").await?;
    let pass = json!({"StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}});
    let dead = workflows::create(&up, "dead", "STANDARD", pass).await?;
    let rules = |to: Value| json!({"asyncInvocation": {"maximumRetryAttempts": 0, "onFailure": to}});
    up.apply_function("to-url", &component, rules(json!({"url": format!("{}/dead", recorder.url)}))).await?;
    up.apply_function("to-workflow", &component, rules(json!({"workflow": "dead"}))).await?;

    let pad = "x".repeat(250 << 10);
    let body = json!({"name": "", "pad": pad}).to_string();
    let secrets = [("authorization", "Bearer s3cret"), ("cookie", "session=s3cret"), ("x-shown", "seen")];
    let (status, id) = enqueue(&up, "/fn/default/to-url/", &secrets, &body).await?;
    ensure!(status == 202, "{status}");
    let found = ended(&up, "to-url", &id).await?;
    ensure!(found["error"] == "NoName", "{}", found["error"]);
    let shown = found.to_string();
    ensure!(!shown.contains("s3cret") && shown.contains("(redacted)") && shown.contains("seen"));
    let told = up.cli().ok(&["invocations", "describe", "to-url", &id, "-o", "json"]).await?;
    ensure!(!told.contains("s3cret"), "a credential is shown");
    let requests = recorder.requests();
    let record: Value = serde_json::from_str(&requests.first().context("no delivery")?.body)?;
    ensure!(record["requestPayload"]["pad"] == pad.as_str(), "{}", record["requestContext"]);

    // Text in which every character is escaped in JSON: too large for a workflow's input, so it is truncated.
    let (_, id) = enqueue(&up, "/fn/default/to-workflow/", &[], &"\"".repeat(200 << 10)).await?;
    ended(&up, "to-workflow", &id).await?;
    let started = workflows::call(&up, "ListExecutions", json!({"stateMachineArn": dead})).await?;
    let execution = started["executions"][0]["executionArn"].as_str().context("no execution")?.to_owned();
    let told = workflows::ended(&up, &execution).await?;
    let record: Value = serde_json::from_str(told["input"].as_str().context("no input")?)?;
    ensure!(record["requestPayloadOmitted"] == true && record["requestPayload"].is_null(), "{record}");
    ensure!(record["requestContext"]["requestId"] == id.as_str(), "{record}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_became_too_old_ends_at_another_function() -> Result<()> {
    guest_or_skip!("greet");
    guest_or_skip!("proxy");
    let recorder = Recorder::start().await?;
    let up = Up::start().await?;
    // The destination reports that it was called.
    let upstream = format!("UPSTREAM={}/dead", recorder.url);
    up.deploy("proxy", "dead", &["--egress", &recorder.url, "--env", &upstream]).await?;
    let component = up.upload("greet").await?;
    let rules = json!({"maximumRetryAttempts": 100, "retryDelay": "1s", "maximumEventAge": "2s",
        "onFailure": {"function": "dead"}});
    up.apply_function("greet", &component, json!({"asyncInvocation": rules})).await?;

    let (_, id) = enqueue(&up, "/fn/default/greet/", &[], r#"{"name":""}"#).await?;
    let found = ended(&up, "greet", &id).await?;
    ensure!(found["status"] == "FAILED" && found["error"] == "Mayfly.EventAgeExceeded", "{found}");
    // Far fewer than the retries that are allowed.
    ensure!(found["attempts"].as_u64().is_some_and(|attempts| attempts < 10), "{found}");
    let requests = recorder.requests();
    ensure!(requests.len() == 1 && requests[0].path == "/dead", "{requests:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_of_a_deleted_function_ends_at_its_destination() -> Result<()> {
    guest_or_skip!("greet");
    let recorder = Recorder::start().await?;
    let up = Up::start().await?;
    let component = up.upload("greet").await?;
    let rules = json!({"maximumRetryAttempts": 1, "retryDelay": "5s",
        "onFailure": {"url": format!("{}/dead", recorder.url)}});
    up.apply_function("greet", &component, json!({"asyncInvocation": rules})).await?;

    let (_, id) = enqueue(&up, "/fn/default/greet/", &[], r#"{"name":""}"#).await?;
    until("the first attempt has failed", || async {
        let history = up.cli().ok(&["invocations", "describe", "greet", &id]).await?;
        Ok(history.contains("TaskFailed").then_some(()))
    })
    .await?;
    up.cli().ok(&["delete", "function", "greet"]).await?;
    let found = ended(&up, "greet", &id).await?;
    ensure!(found["error"] == "Lambda.ResourceNotFoundException", "{found}");
    let requests = recorder.requests();
    let record: Value = serde_json::from_str(&requests.first().context("no delivery")?.body)?;
    ensure!(record["requestContext"]["requestId"] == id.as_str(), "{record}");
    let message = record["responsePayload"]["errorMessage"].as_str().unwrap_or_default();
    ensure!(message.starts_with("Function not found"), "{record}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_invocation_is_lost_by_a_kill() -> Result<()> {
    guest_or_skip!("proxy");
    const CLIENTS: usize = 16;
    const WANTED: usize = 10_000;
    let recorder = Recorder::start().await?;
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = Start::default().in_folder(&data).ready().await?;
    up.deploy("proxy", "proxy", &["--egress", &recorder.url]).await?;

    let mut up = Some(up);
    let mut acknowledged = Vec::new();
    for round in 0..3 {
        let server = match up.take() {
            Some(up) => up,
            None => Start::default().in_folder(&data).ready().await?,
        };
        let server = Arc::new(server);
        let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (server, url, count) = (server.clone(), recorder.url.clone(), count.clone());
                tokio::spawn(async move {
                    let mut acknowledged = Vec::new();
                    for number in 0.. {
                        let name = format!("{round}-{client}-{number}");
                        let path = format!("/fn/default/proxy/?url={url}/{name}");
                        match enqueue(&server, &path, &[], "").await {
                            Ok((202, _)) => acknowledged.push(format!("/{name}")),
                            _ => break,
                        }
                        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                    acknowledged
                })
            })
            .collect();
        until("enough is queued", || {
            let enough = count.load(std::sync::atomic::Ordering::Relaxed) >= WANTED / 3;
            async move { Ok(enough.then_some(())) }
        })
        .await?;
        server.signal(rustix::process::Signal::KILL)?;
        for client in clients {
            acknowledged.extend(client.await?);
        }
        drop(server);
    }
    ensure!(acknowledged.len() >= WANTED / 3 * 3, "{} were acknowledged", acknowledged.len());

    let up = Start::default().in_folder(&data).ready().await?;
    until("every acknowledged invocation reached the function", async || {
        let reached: HashSet<String> = recorder.requests().into_iter().map(|request| request.path).collect();
        Ok(acknowledged.iter().all(|path| reached.contains(path)).then_some(()))
    })
    .await?;
    until("no invocation is left", async || {
        Ok(listed(&up, "proxy", "?status=RUNNING").await?.is_empty().then_some(()))
    })
    .await?;
    ensure!(listed(&up, "proxy", "?status=FAILED").await?.is_empty());
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_workflows_and_triggers_are_invocations() -> Result<()> {
    guest_or_skip!("greet");
    let up = Up::start().await?;
    let component = up.upload("greet").await?;
    let triggers = json!([
        {"name": "tick", "schedule": {"cron": "* * * * * *"}, "input": {"name": "Tick"}},
        {"name": "paid", "event": {"pattern": {"source": ["shop"]}}, "input": {"name": "Paid"}},
    ]);
    up.apply_function("greet", &component, json!({"triggers": triggers})).await?;
    let requested = async |body: &str| {
        until(&format!("an invocation with {body} succeeded"), async || {
            for found in listed(&up, "greet", "?status=SUCCEEDED").await? {
                let id = found["id"].as_str().context("no id")?;
                let found = ended(&up, "greet", id).await?;
                if found["request"]["body"] == body {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        })
        .await
    };
    requested(r#"{"name":"Tick"}"#).await?;
    up.wait_until_function("greet", "shows its triggers", |function| {
        let triggers = &function["status"]["triggers"];
        triggers[0]["name"] == "tick" && triggers[0]["lastExecution"].is_string()
    })
    .await?;

    let http = up.workflows();
    let event = json!({"specversion": "1.0", "id": "e1", "source": "shop", "type": "paid", "data": {}});
    let request =
        http.request(Method::POST, "/events").header("content-type", "application/cloudevents+json");
    let answer = http.call(request, full(event.to_string())).await?;
    ensure!(answer.status == 202, "{answer:?}");
    requested(r#"{"name":"Paid"}"#).await?;

    let machine = workflows::create(
        &up,
        "caller",
        "STANDARD",
        json!({"StartAt": "A", "States": {"A": {
        "Type": "Task", "Resource": "arn:aws:states:::lambda:invoke", "End": true,
        "Parameters": {"FunctionName": "greet", "InvocationType": "Event", "Payload": {"name": "Eve"}}}}}),
    )
    .await?;
    let execution = workflows::start(&up, &machine, json!({})).await?;
    let told = workflows::ended(&up, &execution).await?;
    let output: Value = serde_json::from_str(told["output"].as_str().with_context(|| format!("{told}"))?)?;
    ensure!(output["StatusCode"] == 202, "{output}");
    requested(r#"{"name":"Eve"}"#).await?;
    Ok(())
}
