//! get, apply, delete, describe, explain, top: the requests sent to the API, and the output.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::{body::Body, response::Response};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::fake::{Fake, Seen, answer, mayfly, ok, status};

const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";

fn function(name: &str, version: &str) -> Value {
    json!({"apiVersion": "mayfly.dev/v1", "kind": "Function",
           "metadata": {"name": name, "namespace": "default", "uid": "u1", "resourceVersion": version,
                        "creationTimestamp": "2026-01-02T00:00:00Z"},
           "spec": {"source": {}}, "status": {"url": "http://x/", "readyReplicas": 2}})
}

fn table(names: &[&str], token: Option<&str>) -> Value {
    let rows: Vec<_> = names
        .iter()
        .map(|name| {
            json!({"cells": [name, "True", "sha256:1"], "object": {"metadata": {
            "name": name, "namespace": "default", "resourceVersion": "7"}}})
        })
        .collect();
    json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1",
           "metadata": {"resourceVersion": "7", "continue": token.unwrap_or("")},
           "columnDefinitions": [{"name": "Name", "type": "string", "priority": 0},
                                 {"name": "Ready", "type": "string", "priority": 0},
                                 {"name": "Source", "type": "string", "priority": 1}],
           "rows": rows})
}

#[tokio::test]
async fn get_shows_the_servers_columns_over_all_pages() {
    let fake = Fake::start(|seen| {
        assert!(seen.accept.starts_with("application/json;as=Table"));
        let token = seen.path.contains("continue=more");
        Some(ok(&if token { table(&["b"], None) } else { table(&["hello"], Some("more")) }))
    })
    .await;
    let out = fake.run(&["get", "fn", "-l", "a=b"]).await.ok();
    assert_eq!(out, "NAME    READY\nhello   True\nb       True\n");
    assert_eq!(
        fake.lines(),
        [
            format!("GET {FUNCTIONS}?limit=500&labelSelector=a%3Db"),
            format!("GET {FUNCTIONS}?limit=500&labelSelector=a%3Db&continue=more"),
        ]
    );
    let wide = fake.run(&["get", "functions", "-A", "-o", "wide"]).await.ok();
    assert!(wide.starts_with("NAMESPACE   NAME    READY   SOURCE\n"), "{wide}");
    assert_eq!(
        fake.run(&["get", "function", "-o", "name"]).await.ok(),
        "function.mayfly.dev/hello\nfunction.mayfly.dev/b\n"
    );
}

#[tokio::test]
async fn get_as_data_is_exact() {
    let fake = Fake::start(|seen| match seen.path.split('?').next().unwrap() {
        path if path == format!("{FUNCTIONS}/hello") => Some(ok(&function("hello", "7"))),
        path if path == FUNCTIONS => {
            let mut item = function("hello", "7");
            item.as_object_mut().unwrap().remove("kind");
            item.as_object_mut().unwrap().remove("apiVersion");
            Some(ok(&json!({"kind": "FunctionList", "metadata": {"resourceVersion": "9"}, "items": [item]})))
        }
        _ => None,
    })
    .await;
    let one: Value =
        serde_json::from_str(&fake.run(&["get", "fn", "hello", "-o", "json"]).await.ok()).unwrap();
    assert_eq!(one, function("hello", "7"));
    let list: Value = serde_json::from_str(&fake.run(&["get", "fn", "-o", "json"]).await.ok()).unwrap();
    assert_eq!(list["items"], json!([function("hello", "7")]));
    let yaml = fake.run(&["get", "fn/hello", "-o", "yaml"]).await.ok();
    assert!(yaml.starts_with("apiVersion: mayfly.dev/v1\nkind: Function\n"), "{yaml}");
}

#[tokio::test]
async fn what_is_not_there_is_said_once() {
    let fake = Fake::start(|seen| match seen.path.contains("/functions?") {
        true => Some(ok(&table(&[], None))),
        false => Some(status(404, "NotFound", "functions.mayfly.dev \"x\" not found")),
    })
    .await;
    let empty = fake.run(&["get", "functions"]).await;
    assert_eq!((empty.code, empty.stdout.as_str()), (0, ""));
    assert_eq!(empty.stderr, "no functions in namespace default\n");
    let error = fake.run(&["get", "function", "x"]).await.failed();
    assert_eq!(
        error,
        "error: functions.mayfly.dev \"x\" not found in namespace default\n  see what there is: mayfly get functions -A\n"
    );
    // Programs get the same with a code.
    let coded: Value =
        serde_json::from_str(&fake.run(&["get", "function", "x", "-o", "json"]).await.failed()).unwrap();
    let expected = json!({"code": "not_found", "message": "functions.mayfly.dev \"x\" not found in namespace default",
        "hint": "see what there is: mayfly get functions -A"});
    assert_eq!(coded, json!({"error": expected}));
    assert_eq!(fake.run(&["get", "function", "x", "--ignore-not-found"]).await.ok(), "");
    let unknown = fake.run(&["get", "functionz"]).await.failed();
    assert!(
        unknown.contains("no kind \"functionz\"\n  it has: nodes, pods, configmaps, functions"),
        "{unknown}"
    );
}

#[tokio::test]
async fn watch_goes_on_where_the_server_ended_it() {
    static WATCHES: AtomicUsize = AtomicUsize::new(0);
    let fake = Fake::start(|seen| {
        if !seen.path.contains("watch=true") {
            return Some(ok(&table(&["hello"], None)));
        }
        let event = |name: &str, version: &str| {
            let mut table = table(&[name], None);
            table["rows"][0]["object"]["metadata"]["resourceVersion"] = version.into();
            table.as_object_mut().unwrap().remove("columnDefinitions");
            json!({"type": "MODIFIED", "object": table}).to_string() + "\n"
        };
        Some(match WATCHES.fetch_add(1, Ordering::SeqCst) {
            0 => Response::new(Body::from(event("first", "8"))),
            _ => Response::new(Body::from(event("second", "9"))),
        })
    })
    .await;
    let mut command = mayfly(&fake.path(""));
    command.args(["get", "fn", "--watch"]).env("MAYFLY_DATA_DIR", fake.path("data"));
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut shown = Vec::new();
    while shown.len() < 4 {
        shown.push(lines.next_line().await.unwrap().unwrap());
    }
    assert_eq!(shown, ["NAME    READY", "hello   True", "first   True", "second   True"]);
    interrupt(&child);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let watches: Vec<_> = fake.lines().into_iter().filter(|line| line.contains("watch=true")).collect();
    assert!(
        watches[0].contains("resourceVersion=7") && watches[1].contains("resourceVersion=8"),
        "{watches:?}"
    );
}

#[tokio::test]
async fn one_object_is_watched_from_its_lists_version_and_again_when_that_is_forgotten() {
    static WATCHES: AtomicUsize = AtomicUsize::new(0);
    let fake = Fake::start(|seen| {
        if !seen.path.contains("watch=true") {
            // The object's own resourceVersion is one that the server does not know any more after a restart.
            let object = |path: &str| path == format!("{FUNCTIONS}/hello");
            return Some(ok(&table(&["hello"], None))).filter(|_| !object(&seen.path));
        }
        let expired = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
        Some(match WATCHES.fetch_add(1, Ordering::SeqCst) {
            0 => status(410, "Expired", "too old resource version"),
            1 => Response::new(Body::from(json!({"type": "ERROR", "object": expired}).to_string() + "\n")),
            _ => {
                Response::new(Body::from_stream(futures::stream::pending::<Result<String, std::io::Error>>()))
            }
        })
    })
    .await;
    let mut command = mayfly(&fake.path(""));
    command.args(["get", "fn", "hello", "--watch"]).env("MAYFLY_DATA_DIR", fake.path("data"));
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut shown = Vec::new();
    while shown.len() < 4 {
        shown.push(lines.next_line().await.unwrap().expect("it goes on"));
    }
    assert_eq!(shown, ["NAME    READY", "hello   True", "hello   True", "hello   True"]);
    child.kill().await.unwrap();
    let lists = fake.lines().into_iter().filter(|line| !line.contains("watch=true"));
    assert!(lists.into_iter().all(|line| line.contains("fieldSelector=metadata.name%3Dhello")));
}

#[tokio::test]
async fn a_name_beside_a_selector_is_refused() {
    let fake = Fake::start(|_| Some(ok(&function("hello", "7")))).await;
    for line in [
        &["delete", "fn", "hello", "-l", "tier=canary"][..],
        &["delete", "fn/hello", "--all"],
        &["get", "fn", "hello", "-l", "tier=canary"],
        &["get", "fn", "hello", "--field-selector", "metadata.name=x"],
    ] {
        let error = fake.run(line).await.failed();
        assert!(error.contains("hello was named, and -") && error.contains("leave out the name"), "{error}");
    }
    assert!(fake.lines().is_empty(), "{:?}", fake.lines());
}

/// Sends Ctrl-C (SIGINT).
pub(crate) fn interrupt(child: &tokio::process::Child) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

const MANIFEST: &str = "\
apiVersion: mayfly.dev/v1
kind: Function
metadata: {name: hello}
spec: {source: {component: x}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: other, resourceVersion: '3', uid: u, managedFields: []}
data: {a: b}
";

#[tokio::test]
async fn apply_says_what_became_of_each_object() {
    let fake = Fake::start(|seen| {
        let is_patch = seen.method == "PATCH";
        match seen.path.contains("/configmaps/") {
            true => Some(ok(&json!({"metadata": {"name": "settings", "resourceVersion": "4"}}))),
            false if is_patch => Some(answer(201, &function("hello", "5"))),
            false => None,
        }
    })
    .await;
    let file = fake.file("app.yaml", MANIFEST);
    let out = fake.run(&["apply", "-f", &file]).await.ok();
    assert_eq!(out, "function.mayfly.dev/hello created\nconfigmap/settings unchanged\n");
    let patches: Vec<_> = fake.seen().into_iter().filter(|seen| seen.method == "PATCH").collect();
    let query = "?fieldManager=mayfly&fieldValidation=Strict";
    assert_eq!(patches[0].path, format!("{FUNCTIONS}/hello{query}"));
    assert_eq!(patches[0].content_type, "application/apply-patch+yaml");
    assert_eq!(patches[0].json()["metadata"], json!({"name": "hello", "namespace": "default"}));
    assert_eq!(patches[1].path, format!("/api/v1/namespaces/other/configmaps/settings{query}"));
    assert_eq!(patches[1].json()["metadata"], json!({"name": "settings", "namespace": "other"}));
    let piped =
        fake.run_with(&["apply", "-f", "-", "--dry-run", "--force-conflicts"], MANIFEST.as_bytes()).await;
    assert!(piped.ok().starts_with("function.mayfly.dev/hello created (dry run)\n"));
    assert!(fake.lines().last().unwrap().ends_with("&force=true&dryRun=All"));
}

#[tokio::test]
async fn a_refused_object_does_not_stop_the_others() {
    let fake = Fake::start(|seen| match (seen.method.as_str(), seen.path.contains("/configmaps/")) {
        ("PATCH", true) => Some(answer(201, &json!({"metadata": {"name": "settings"}}))),
        ("PATCH", false) => {
            Some(status(422, "Invalid", "Function \"hello\" is invalid: spec.source.component: not a digest"))
        }
        _ => None,
    })
    .await;
    let ran = fake.run(&["apply", "-f", &fake.file("app.yaml", MANIFEST)]).await;
    assert_eq!(ran.stdout, "configmap/settings created\n");
    let error = ran.failed();
    assert!(
        error.contains("app.yaml, document 1: Function \"hello\" is invalid: spec.source.component"),
        "{error}"
    );
    assert!(error.contains("error: 1 of 2 objects were not applied: hello\n"), "{error}");
    let other = fake.run(&["apply", "-n", "third", "-f", &fake.path("app.yaml").display().to_string()]).await;
    assert!(other.failed().contains("names the namespace \"other\", the command \"third\""));
}

#[tokio::test]
async fn a_refused_manifest_is_told_by_its_file_its_object_and_the_reason() {
    let fake = Fake::start(|seen| {
        let why = "strict decoding error: unknown field \"spec.limits.timeuot\"";
        let message = format!("Function in version \"v1\" cannot be handled as a Function: {why}");
        (seen.method == "PATCH").then(|| status(400, "BadRequest", &message))
    })
    .await;
    let one = MANIFEST.split("---").next().unwrap();
    let file = fake.file("app.yaml", one);
    assert_eq!(
        fake.run(&["apply", "-f", &file]).await.failed(),
        format!(
            "error: {file}: function/hello: unknown field \"spec.limits.timeuot\"\n  correct the manifest; mayfly \
             explain function shows the fields\n"
        )
    );
    let two = fake.file("two.yaml", format!("{one}---\n{}", one.replace("hello", "other")));
    let error = fake.run(&["apply", "-f", &two]).await.failed();
    assert!(
        error.contains(&format!(
            "error: {two}, document 2: function/other: unknown field \"spec.limits.timeuot\"\n"
        )),
        "{error}"
    );
}

#[tokio::test]
async fn delete_waits_until_the_object_is_gone() {
    static GETS: AtomicUsize = AtomicUsize::new(0);
    let fake = Fake::start(|seen| match seen.method.as_str() {
        "DELETE" => Some(ok(&function("hello", "8"))),
        _ if GETS.fetch_add(1, Ordering::SeqCst) < 2 => Some(ok(&function("hello", "8"))),
        _ => None,
    })
    .await;
    assert_eq!(fake.run(&["delete", "function", "hello"]).await.ok(), "function.mayfly.dev/hello deleted\n");
    let one = format!("{FUNCTIONS}/hello");
    assert_eq!(
        fake.lines(),
        [format!("DELETE {one}"), format!("GET {one}"), format!("GET {one}"), format!("GET {one}")]
    );
    assert_eq!(fake.seen()[0].json()["propagationPolicy"], "Background");
    let error = fake.run(&["delete", "function"]).await.failed();
    assert!(error.contains("which functions?"), "{error}");
}

#[tokio::test]
async fn delete_of_what_is_missing() {
    let fake = Fake::start(|_| None).await;
    assert!(fake.run(&["delete", "pod", "x"]).await.failed().contains("not found"));
    assert_eq!(fake.run(&["delete", "pod", "x", "--ignore-not-found"]).await.ok(), "");
}

#[tokio::test]
async fn what_cannot_be_deleted_does_not_stop_the_others() {
    let fake = Fake::start(|seen| match (seen.method.as_str(), seen.path.contains("/configmaps/")) {
        ("DELETE", true) => Some(ok(&json!({"metadata": {"name": "settings"}}))),
        _ => None,
    })
    .await;
    let text = format!("apiVersion: v2\nkind: Strange\nmetadata: {{name: odd}}\n---\n{MANIFEST}");
    let ran = fake.run(&["delete", "--no-wait", "-f", &fake.file("app.yaml", &text)]).await;
    assert_eq!(ran.stdout, "configmap/settings deleted\n");
    let error = ran.failed();
    assert!(error.contains("app.yaml, document 1: the server has no kind \"Strange\""), "{error}");
    assert!(error.contains("error: 2 of 3 objects were not deleted: odd, hello\n"), "{error}");
    let two =
        fake.run(&["delete", "--no-wait", "configmap/settings", "function/hello", "configmap/other"]).await;
    assert_eq!(two.stdout, "configmap/settings deleted\nconfigmap/other deleted\n");
    assert!(two.failed().contains("1 of 3 objects were not deleted: hello"));
}

#[tokio::test]
async fn describe_brings_the_events() {
    let fake = Fake::start(|seen| {
        if seen.path.contains("/events") {
            let event = |uid: &str, message: &str| {
                json!({"involvedObject": {"name": "hello", "uid": uid}, "type": "Normal", "reason": "Made",
                       "message": message, "lastTimestamp": "2026-01-02T00:00:00Z"})
            };
            return Some(ok(&json!({"items": [event("u1", "mine"), event("u0", "of an earlier one")]})));
        }
        Some(ok(&function("hello", "7")))
    })
    .await;
    let out = fake.run(&["describe", "fn/hello"]).await.ok();
    assert!(out.starts_with("Name:  hello\nNamespace:  default\nKind:  Function (mayfly.dev/v1)\n"), "{out}");
    assert!(out.contains("Ready Replicas:  2") && out.contains("mine") && !out.contains("earlier"), "{out}");
}

#[tokio::test]
async fn explain_reads_the_servers_schemas() {
    let fake = Fake::start(|seen: &Seen| match seen.path.as_str() {
        "/openapi/v3" => Some(ok(&json!({"paths": {"apis/mayfly.dev/v1":
            {"serverRelativeURL": "/openapi/v3/apis/mayfly.dev/v1?hash=1"}}}))),
        "/openapi/v3/apis/mayfly.dev/v1?hash=1" => Some(ok(&json!({"components": {"schemas": {"F": {
            "description": "A function.", "type": "object",
            "x-kubernetes-group-version-kind": [{"group": "mayfly.dev", "version": "v1", "kind": "Function"}],
            "properties": {"spec": {"type": "object", "description": "The wish."}}}}}}))),
        _ => None,
    })
    .await;
    let out = fake.run(&["explain", "fn.spec"]).await.ok();
    assert!(out.contains("FIELD: spec <Object>\n\nDESCRIPTION:\n    The wish.\n"), "{out}");
    assert!(fake.run(&["explain", "fn.sepc"]).await.failed().contains("Function has: spec"));
}

#[tokio::test]
async fn top_reads_the_metrics() {
    let fake = Fake::start(|seen| match seen.path.as_str() {
        "/metrics" => Some(Response::new(Body::from(
            "mayfly_gateway_requests_total{namespace=\"default\",function=\"hello\",revision=\"r\",code=\"2xx\"} 41\n",
        ))),
        FUNCTIONS => Some(ok(&json!({"items": [function("hello", "7")]}))),
        _ => None,
    })
    .await;
    let line = ["top", "functions", "--interval", "10ms", "-o", "json"];
    let rows: Value = serde_json::from_str(&fake.run(&line).await.ok()).unwrap();
    assert_eq!(
        (&rows[0]["name"], &rows[0]["requests"], &rows[0]["replicas"]),
        (&json!("hello"), &json!(41.0), &json!(2))
    );
}

#[tokio::test]
async fn artifacts_by_the_beginning_of_their_digest() {
    let digest = "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let fake = Fake::start(move |seen| match seen.method.as_str() {
        "DELETE" => Some(ok(&json!({"kind": "Status", "status": "Success"}))),
        _ => Some(ok(
            &json!({"items": [{"digest": digest, "bytes": 2048, "created": "2026-01-02T00:00:00Z"}]}),
        )),
    })
    .await;
    let out = fake.run(&["artifact", "list"]).await.ok();
    assert!(out.contains(digest) && out.contains("2 KiB"), "{out}");
    assert_eq!(fake.run(&["artifact", "delete", "2cf24d"]).await.ok(), format!("{digest} deleted\n"));
    assert_eq!(fake.lines().last().unwrap(), &format!("DELETE /artifacts/{digest}"));
}

#[tokio::test]
async fn a_part_of_what_is_too_large_is_not_applied() {
    let fake = Fake::start(|_| None).await;
    let mut manifests = b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\n".to_vec();
    manifests.resize((32 << 20) + 1, b'#');
    let error = fake.run_with(&["apply", "-f", "-"], &manifests).await.failed();
    assert!(error.contains("cannot read stdin: it has more than 32 MiB"), "{error}");
    assert!(fake.lines().iter().all(|line| line.starts_with("GET ")), "{:?}", fake.lines());
}
