//! deploy, invoke, logs: the life of a function as seen by the server.

use std::{sync::Mutex, time::Duration};

use axum::{body::Body, response::Response};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

use crate::{
    fake::{Fake, Seen, answer, mayfly, ok, status},
    objects::interrupt,
};

const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";
/// The smallest component that claims to answer requests: an empty instance, exported as the handler.
const COMPONENT: &[u8] =
    b"\0asm\x0d\0\x01\0\x05\x03\x01\x01\0\x0b\x26\x01\0\x20wasi:http/incoming-handler@0.2.0\x05\0\0";
/// The same as a job.
const JOB: &[u8] = b"\0asm\x0d\0\x01\0\x05\x03\x01\x01\0\x0b\x18\x01\0\x12wasi:cli/run@0.2.0\x05\0\0";

/// A server with an artifact store and a function, enough to deploy to.
#[derive(Default)]
struct Platform {
    artifacts: Mutex<Vec<String>>,
    function: Mutex<Option<Value>>,
}

impl Platform {
    fn answer(&self, seen: &Seen) -> Option<Response> {
        let path = seen.path.split('?').next().unwrap();
        let mut function = self.function.lock().unwrap();
        match (seen.method.as_str(), path) {
            ("POST", path) if path.starts_with("/artifacts/") => {
                let known = self.artifacts.lock().unwrap().contains(&path.to_owned());
                known.then(|| ok(&json!({})))
            }
            ("PUT", path) if path.starts_with("/artifacts/") => {
                self.artifacts.lock().unwrap().push(path.to_owned());
                Some(answer(201, &json!({})))
            }
            ("POST", FUNCTIONS) => {
                let mut made = seen.json();
                made["metadata"]["resourceVersion"] = "1".into();
                made["metadata"]["generation"] = 1.into();
                *function = Some(made.clone());
                Some(answer(201, &made))
            }
            ("PATCH", _) => {
                let made = function.as_mut().unwrap();
                json_patch::merge(made, &seen.json());
                made["metadata"]["generation"] = 2.into();
                Some(ok(made))
            }
            ("GET", FUNCTIONS) if seen.path.contains("watch=") => Some(Response::new(Body::from(""))),
            ("GET", FUNCTIONS) => {
                let mut now = function.clone().unwrap();
                now["status"] = status_of(&now);
                let metadata = json!({"resourceVersion": "9"});
                Some(ok(&json!({"kind": "FunctionList", "metadata": metadata, "items": [now]})))
            }
            ("GET", _) if path.starts_with(FUNCTIONS) => function.as_ref().map(ok),
            _ => None,
        }
    }
}

fn status_of(function: &Value) -> Value {
    let broken = function["metadata"]["name"] == "broken";
    let (status, reason, message) = match broken {
        true => ("False", "ComponentInvalid", "it imports wasi:keyvalue/store, which this host has not"),
        false => ("True", "Ready", ""),
    };
    json!({"url": "http://gateway/fn/default/hello/", "latestRevision": "hello-00001",
           "observedGeneration": function["metadata"]["generation"], "conditions": [
               {"type": "Ready", "status": status, "reason": reason, "message": message,
                "lastTransitionTime": "2026-01-02T00:00:00Z"}]})
}

async fn platform() -> Fake {
    let platform = Platform::default();
    Fake::start(move |seen| platform.answer(seen)).await
}

#[tokio::test]
async fn deploy_uploads_once_and_waits_until_ready() {
    let fake = platform().await;
    let file = fake.file("hello.wasm", COMPONENT);
    let first = fake.run(&["deploy", &file, "--env", "A=1", "--min", "1"]).await;
    assert!(first.stderr.contains("uploaded 53 B as sha256:"), "{}", first.stderr);
    let out = first.ok();
    assert!(
        out.starts_with("function hello is ready (hello-00001)\n  http://gateway/fn/default/hello/\n"),
        "{out}"
    );
    let put = fake.seen().into_iter().find(|seen| seen.method == "PUT").unwrap();
    assert_eq!((put.body.as_slice(), put.content_type.as_str()), (COMPONENT, "application/wasm"));
    assert_eq!(put.authorization, "Bearer secret");
    let made = fake.seen().into_iter().find(|seen| seen.method == "POST" && seen.path.starts_with("/apis"));
    let made = made.unwrap();
    let digest = put.path.strip_prefix("/artifacts/").unwrap();
    assert_eq!(
        made.json()["spec"],
        json!({"source": {"component": digest}, "env": [{"name": "A", "value": "1"}], "scaling": {"min": 1}})
    );

    let again = fake.run(&["deploy", &file, "--env", "B=2", "-o", "json"]).await;
    assert!(again.stderr.contains("is on the server already"), "{}", again.stderr);
    let deployed: Value = serde_json::from_str(&again.ok()).unwrap();
    assert_eq!((&deployed["component"], &deployed["ready"]), (&json!(digest), &json!(true)));
    let patch = fake.seen().into_iter().find(|seen| seen.method == "PATCH").unwrap();
    assert_eq!(patch.content_type, "application/merge-patch+json");
    assert!(patch.path.ends_with("/hello?fieldManager=mayfly&fieldValidation=Strict"), "{}", patch.path);
    let expected = json!({"metadata": {"resourceVersion": "1"}, "spec": {"source": {"component": digest},
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}});
    assert_eq!(patch.json(), expected);
    assert_eq!(fake.seen().iter().filter(|seen| seen.method == "PUT").count(), 1);
}

#[tokio::test]
async fn a_component_that_cannot_run_is_told_with_its_reason() {
    let fake = platform().await;
    let file = fake.file("broken.wasm", COMPONENT);
    let error = fake.run(&["deploy", &file]).await.failed();
    assert!(error.contains("function broken cannot run: it imports wasi:keyvalue/store"), "{error}");
    assert!(error.contains("mayfly describe function broken"), "{error}");
}

#[tokio::test]
async fn what_is_no_component_is_never_sent() {
    let fake = platform().await;
    for (name, content, expected) in [
        ("core.wasm", &b"\0asm\x01\0\0\0"[..], "it exports nothing"),
        ("damaged.wasm", b"\0asm\x01\0\0\0\x07\x64", "is a core module that cannot be made a component"),
        ("script.wasm", b"#!/bin/sh", "not a wasm file"),
        ("job.wasm", JOB, "is a job (wasi:cli/run@0.2), it answers no requests"),
        ("Bad Name!.wasm", COMPONENT, "cannot be a function's name"),
    ] {
        let error = fake.run(&["deploy", &fake.file(name, content)]).await.failed();
        assert!(error.contains(expected), "{error}");
    }
    let missing = fake.run(&["deploy", "nowhere.wasm"]).await.failed();
    assert!(missing.contains("cannot read nowhere.wasm"), "{missing}");
    assert_eq!(fake.lines(), Vec::<String>::new());
}

#[tokio::test]
async fn a_refused_upload_says_why() {
    let fake = Fake::start(|seen| match seen.method.as_str() {
        "PUT" => Some(status(413, "RequestEntityTooLarge", "the artifact is larger than 64Mi")),
        _ => None,
    })
    .await;
    let file = fake.file("hello.wasm", COMPONENT);
    let error = fake.run(&["deploy", &file]).await.failed();
    assert!(error.starts_with("error: the artifact is larger than 64Mi\n"), "{error}");
}

#[tokio::test]
async fn invoke_posts_the_event_and_prints_the_answer() {
    let fake = Fake::start(|seen| match seen.path.as_str() {
        "/fn/default/greet/" => Some(
            Response::builder()
                .header("server-timing", "queue;dur=0")
                .body(Body::from(format!("{} {}", seen.content_type, String::from_utf8_lossy(&seen.body))))
                .unwrap(),
        ),
        "/fn/default/greet/fail" => {
            Some(answer(400, &json!({"errorType": "NameMissing", "errorMessage": "say who you are"})))
        }
        "/fn/default/greet/slow" => Some(answer(
            504,
            &json!({"error": {"code": "timed_out", "message": "too slow", "hint": "raise it"}}),
        )),
        "/fn/default/greet/page" => {
            Some(Response::builder().status(404).body(Body::from("no such page")).unwrap())
        }
        _ => None,
    })
    .await;
    let sent = |line: &[&str]| -> Vec<String> {
        ["invoke", "greet"].iter().chain(line).map(|word| (*word).to_owned()).collect()
    };
    let run = |line: Vec<String>| {
        let fake = &fake;
        async move { fake.run(&line.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    assert_eq!(run(sent(&["-d", "{\"a\":1}"])).await.ok(), "application/json {\"a\":1}");
    assert_eq!(run(sent(&[])).await.ok(), "application/json {}");
    let file = format!("@{}", fake.file("event.json", "[1]"));
    assert_eq!(run(sent(&["-d", &file])).await.ok(), "application/json [1]");
    let piped = fake.run_with(&["invoke", "greet", "-d", "-", "-v"], b"7").await;
    assert!(piped.stderr.contains("200 OK in") && piped.stderr.contains("server-timing: queue;dur=0"));
    assert_eq!(piped.ok(), "application/json 7");

    let failed = run(sent(&["--path", "/fail"])).await;
    assert_eq!(failed.stdout, "");
    assert_eq!(
        failed.failed(),
        "error: NameMissing: say who you are\n  function greet answered 400 Bad Request\n"
    );
    assert_eq!(
        run(sent(&["--path", "slow"])).await.failed(),
        "error: too slow (504 Gateway Timeout, timed_out)\n  raise it\n"
    );
    let page = run(sent(&["-X", "GET", "--path", "/page"])).await;
    assert_eq!(page.stdout, "no such page\n");
    assert_eq!(page.failed(), "error: function greet answered 404 Not Found\n");
    let not_json = run(sent(&["-d", "name=Ada"])).await.failed();
    assert!(not_json.contains("the event is not JSON"), "{not_json}");
}

#[tokio::test]
async fn logs_are_copied_as_they_are() {
    let fake = Fake::start(|seen| {
        let log = format!("{FUNCTIONS}/hello/log");
        (seen.path.starts_with(&log)).then(|| Response::new(Body::from("one\ntwo\nhalf")))
    })
    .await;
    let line = ["logs", "hello", "--tail", "3", "--since", "10m", "--revision", "hello-00001"];
    assert_eq!(fake.run(&line).await.ok(), "one\ntwo\nhalf");
    let query = "tailLines=3&sinceSeconds=600&revision=hello-00001";
    assert_eq!(fake.lines(), [format!("GET {FUNCTIONS}/hello/log?{query}")]);
    let error = fake.run(&["logs", "other"]).await.failed();
    assert!(error.contains("not found"), "{error}");
}

#[tokio::test]
async fn a_followed_log_that_the_server_closes_is_an_error() {
    let fake = Fake::start(|seen| match seen.path.as_str() {
        path if path.contains("/log?follow=true") => Some(Response::new(Body::from("one\n"))),
        path if path == format!("{FUNCTIONS}/hello") => {
            Some(ok(&json!({"kind": "Function", "metadata": {}})))
        }
        "/api/v1/namespaces/default/pods/job" => {
            Some(ok(&json!({"kind": "Pod", "metadata": {}, "status": {"phase": "Succeeded"}})))
        }
        _ => None,
    })
    .await;
    let closed = fake.run(&["logs", "hello", "-f"]).await;
    assert_eq!(closed.stdout, "one\n");
    assert!(closed.failed().starts_with("error: the server closed the log of hello\n"));
    // A pod that has ended, and a deleted function, have no more lines.
    assert_eq!(fake.run(&["logs", "pod/job", "-f"]).await.ok(), "one\n");
    assert_eq!(fake.run(&["logs", "deleted", "-f"]).await.ok(), "one\n");
    assert_eq!(fake.run(&["logs", "hello", "-f", "--revision", "hello-00001"]).await.ok(), "one\n");
}

#[tokio::test]
async fn a_server_is_asked_before_a_project_is_built() {
    let fake = Fake::start(|seen| {
        (seen.path == "/api/v1/namespaces/nosuch").then(|| {
            let details = json!({"kind": "namespaces", "name": "nosuch"});
            let message = "namespaces \"nosuch\" not found";
            answer(
                404,
                &json!({"kind": "Status", "status": "Failure", "message": message, "reason": "NotFound",
                        "details": details, "code": 404}),
            )
        })
    })
    .await;
    std::fs::create_dir(fake.path("project")).unwrap();
    fake.file("project/Cargo.toml", "[package]\nname = \"p\"\n");
    let error = fake.run(&["deploy", "project", "-n", "nosuch"]).await.failed();
    assert_eq!(
        error,
        "error: namespaces \"nosuch\" not found\n  see what there is: mayfly get namespaces; make it with: kubectl \
         create namespace nosuch\n"
    );
    assert_eq!(fake.lines(), ["GET /api/v1/namespaces/nosuch"]);
}

#[tokio::test]
async fn dev_says_that_it_asks_a_missing_server_again() {
    let fake = platform().await;
    std::fs::create_dir(fake.path("project")).unwrap();
    fake.file("project/Cargo.toml", "[package]\nname = \"p\"\n");
    // A port that was free just now.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = mayfly(&fake.path(""));
    let url = format!("http://127.0.0.1:{port}");
    command.args(["dev", "project", "--server", &url]).env("MAYFLY_DATA_DIR", fake.path("data"));
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut expect = async |part: &str| loop {
        let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("{part:?} was not said"));
        assert!(!line.starts_with("using "), "it builds");
        if line.contains(part) {
            break;
        }
    };
    expect("error: no Mayfly server answers").await;
    expect("trying again every 2").await;
    interrupt(&child);
    expect("nothing was deployed").await;
    assert_eq!(child.wait().await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn dev_shows_what_is_wrong_and_waits_for_the_next_save() {
    let fake = platform().await;
    std::fs::create_dir(fake.path("project")).unwrap();
    let none = fake.run(&["dev", "project"]).await.failed();
    assert!(none.contains("is not a project"), "{none}");

    fake.file("project/Cargo.toml", "[package]\nname = \"p\"\n");
    fake.file("project/function.yaml", "kind: Pod\n");
    let mut command = mayfly(&fake.path(""));
    command.args(["dev", "project"]).env("MAYFLY_DATA_DIR", fake.path("data"));
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut expect = async |part: &str| loop {
        let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("{part:?} was not said"));
        if line.contains(part) {
            break;
        }
    };
    expect("must be a Function").await;
    expect("waiting for the next save").await;
    fake.file("project/function.yaml", "kind: [\n");
    expect("is not one YAML document").await;
    expect("waiting for the next save").await;
    interrupt(&child);
    expect("nothing was deployed").await;
    assert_eq!(child.wait().await.unwrap().code(), Some(0));
    assert_eq!(fake.lines(), Vec::<String>::new());
}

/// A user who did not intend to use stdin sees that the command waits for it.
#[tokio::test]
async fn an_interrupt_ends_a_command_that_reads_stdin() {
    let fake = Fake::start(|_| None).await;
    for line in [&["invoke", "greet", "-d", "-"][..], &["apply", "-f", "-"]] {
        let mut command = mayfly(&fake.path(""));
        let mut child = command.args(line).env("MAYFLY_DATA_DIR", fake.path("data")).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"{").await.unwrap();
        let reads = async {
            while rustix::io::ioctl_fionread(&stdin).unwrap() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reads).await.expect("it reads stdin");
        interrupt(&child);
        let ended = tokio::time::timeout(Duration::from_secs(20), child.wait()).await;
        assert_eq!(ended.expect("it ends").unwrap().code(), Some(130), "{line:?}");
    }
}
