//! Objects that another component stores: listed, selected, paged, watched, and not written. And Workflows, whose
//! definition is taken from kubectl's last-applied annotation.

use std::sync::Arc;

use axum::body::Body;
use futures::{
    FutureExt as _, StreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use http_body_util::BodyExt as _;
use mayfly_api::Digest;
use mayfly_apiserver::{KindView, ViewChange, ViewError, ViewEvent, ViewPage, ViewQuery};
use serde_json::{Value, json};

use crate::support::{Fixture, request};

const PATH: &str = "/apis/mayfly.dev/v1/namespaces/default/executions";

/// Executions 0 to 9; the even ones run.
struct Ten;

fn execution(number: u64, phase: &str) -> Value {
    json!({
        "apiVersion": "mayfly.dev/v1", "kind": "Execution",
        "metadata": {"name": format!("w.{number}"), "namespace": "default", "uid": format!("u{number}"),
            "resourceVersion": (number + 1).to_string(), "labels": {"n": number.to_string()}},
        "spec": {"workflow": "w", "name": number.to_string()},
        "status": {"phase": phase, "startTime": "2026-11-21T10:00:00.000Z"},
    })
}

fn phase(number: u64) -> &'static str {
    if number.is_multiple_of(2) { "RUNNING" } else { "SUCCEEDED" }
}

impl KindView for Ten {
    fn get<'a>(&'a self, _: &'a str, name: &'a str) -> BoxFuture<'a, Result<Option<Value>, ViewError>> {
        let number = name.strip_prefix("w.").and_then(|text| text.parse().ok()).filter(|number| *number < 10);
        async move { Ok(number.map(|number| execution(number, phase(number)))) }.boxed()
    }

    fn list(&self, query: ViewQuery) -> BoxFuture<'_, Result<ViewPage, ViewError>> {
        async move {
            let from: u64 = match &query.after {
                None => 0,
                Some(after) => after.parse().map_err(|_| ViewError::Continue)?,
            };
            let to = (from + query.limit as u64).min(10);
            let items = (from..to).map(|number| execution(number, phase(number))).collect();
            Ok(ViewPage { items, next: (to < 10).then(|| to.to_string()), revision: 100 })
        }
        .boxed()
    }

    fn watch(
        &self,
        after: u64,
        _: bool,
    ) -> Result<BoxStream<'static, Result<ViewEvent, ViewError>>, ViewError> {
        if after < 100 {
            return Err(ViewError::Expired);
        }
        let ended = ViewChange::Modified { previous: execution(10, "RUNNING") };
        let events = [
            Ok(ViewEvent { change: ViewChange::Created, revision: 101, object: execution(10, "RUNNING") }),
            Ok(ViewEvent { change: ended, revision: 102, object: execution(10, "SUCCEEDED") }),
            Err(ViewError::Expired),
        ];
        Ok(stream::iter(events).boxed())
    }

    fn user_of<'a>(&'a self, artifact: &'a Digest) -> BoxFuture<'a, Result<Option<String>, ViewError>> {
        let answer = match *artifact {
            needed if needed == Digest::of(b"needed") => {
                Ok(Some("execution 4, which has not ended".to_owned()))
            }
            unread if unread == Digest::of(b"unread") => {
                Err(ViewError::Failed("the disk is away".to_owned()))
            }
            _ => Ok(None),
        };
        async move { answer }.boxed()
    }

    fn read_only(&self, name: &str) -> String {
        format!("{name} is only looked at")
    }
}

/// 20,000 executions, of which the first ten and the last three run. Counts the pages that were read.
#[derive(Default)]
struct Many(std::sync::atomic::AtomicUsize);

const MANY: u64 = 20_000;

impl KindView for Many {
    fn get<'a>(&'a self, _: &'a str, _: &'a str) -> BoxFuture<'a, Result<Option<Value>, ViewError>> {
        async move { Ok(None) }.boxed()
    }

    fn list(&self, query: ViewQuery) -> BoxFuture<'_, Result<ViewPage, ViewError>> {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let from: u64 = query.after.map_or(0, |after| after.parse().unwrap());
        let to = (from + query.limit as u64).min(MANY);
        let phase = |number| if (10..MANY - 3).contains(&number) { "SUCCEEDED" } else { "RUNNING" };
        let items = (from..to).map(|number| execution(number, phase(number))).collect();
        let page = ViewPage { items, next: (to < MANY).then(|| to.to_string()), revision: 100 };
        async move { Ok(page) }.boxed()
    }

    fn watch(&self, _: u64, _: bool) -> Result<BoxStream<'static, Result<ViewEvent, ViewError>>, ViewError> {
        Err(ViewError::Expired)
    }

    fn read_only(&self, name: &str) -> String {
        name.to_owned()
    }
}

#[tokio::test]
async fn few_of_many_are_found_in_large_pages() {
    let fixture = Fixture::new().await;
    let many = Arc::new(Many::default());
    fixture.server.attach_view("executions.mayfly.dev", many.clone());
    let mut path = format!("{PATH}?fieldSelector=status.phase%3DRUNNING&limit=12");
    let (_, page) = fixture.call("GET", &path, Value::Null).await;
    assert_eq!(names(&page).len(), 12);
    assert_eq!(names(&page)[9..], ["w.9", "w.19997", "w.19998"]);
    let pages = many.0.load(std::sync::atomic::Ordering::Relaxed);
    assert!(pages < 60, "{pages} pages were read");
    path.push_str("&continue=");
    path.push_str(page["metadata"]["continue"].as_str().unwrap());
    let (_, page) = fixture.call("GET", &path, Value::Null).await;
    assert_eq!(names(&page), ["w.19999"]);
    assert_eq!(page["metadata"]["continue"], Value::Null);
}

#[tokio::test]
async fn what_an_object_of_a_view_needs_is_not_removed() {
    let fixture = fixture().await;
    for (content, code) in [("needed", 409), ("unread", 500), ("free", 200)] {
        let path = format!("/artifacts/{}", Digest::of(content.as_bytes()));
        let upload = request("PUT", &path).header("content-type", "application/octet-stream");
        let stored = fixture.send(upload.body(content.into()).unwrap()).await;
        assert_eq!(stored.status(), 201, "{content}");
        let removed = fixture.send(request("DELETE", &path).body(Body::empty()).unwrap()).await;
        assert_eq!(removed.status(), code, "{content}");
        let told = removed.into_body().collect().await.unwrap().to_bytes();
        if content == "needed" {
            let told = String::from_utf8(told.to_vec()).unwrap();
            assert!(told.contains("is in use by execution 4, which has not ended"), "{told}");
        }
    }
}

async fn fixture() -> Fixture {
    let fixture = Fixture::new().await;
    let (status, _) = fixture.call("GET", PATH, Value::Null).await;
    assert_eq!(status, 503, "no view is attached yet");
    fixture.server.attach_view("executions.mayfly.dev", Arc::new(Ten));
    fixture
}

fn names(list: &Value) -> Vec<&str> {
    list["items"].as_array().unwrap().iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_view_is_listed_in_pages_and_selected() {
    let fixture = fixture().await;
    let (_, one) = fixture.call("GET", &format!("{PATH}/w.3"), Value::Null).await;
    assert_eq!(
        (&one["status"]["phase"], &one["metadata"]["resourceVersion"]),
        (&json!("SUCCEEDED"), &json!("4"))
    );
    assert_eq!(fixture.call("GET", &format!("{PATH}/w.11"), Value::Null).await.0, 404);
    let (_, all) = fixture.call("GET", PATH, Value::Null).await;
    assert_eq!((names(&all).len(), &all["metadata"]["resourceVersion"]), (10, &json!("100")));
    // Pages are full although the view does not evaluate selectors.
    let selected = format!("{PATH}?fieldSelector=status.phase%3DRUNNING&limit=2");
    let (_, first) = fixture.call("GET", &selected, Value::Null).await;
    assert_eq!(names(&first), ["w.0", "w.2"]);
    let next = first["metadata"]["continue"].as_str().unwrap();
    let (_, second) = fixture.call("GET", &format!("{selected}&continue={next}"), Value::Null).await;
    assert_eq!(names(&second), ["w.4", "w.6"]);
    let (_, labelled) = fixture.call("GET", &format!("{PATH}?labelSelector=n+in+(1,2)"), Value::Null).await;
    assert_eq!(names(&labelled), ["w.1", "w.2"]);
    for wrong in ["continue=%21", "fieldSelector=spec.nothing%3D1"] {
        assert_eq!(fixture.call("GET", &format!("{PATH}?{wrong}"), Value::Null).await.0, 400, "{wrong}");
    }
}

#[tokio::test]
async fn a_view_is_watched() {
    let fixture = fixture().await;
    let watch = async |query: &str| {
        let uri = format!("{PATH}?watch=1&{query}");
        let response = fixture.send(request("GET", &uri).body(Body::empty()).unwrap()).await;
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let lines = std::str::from_utf8(&body).unwrap().lines().map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            let object = &line["object"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            format!(
                "{} {} {}",
                text(&line["type"]),
                text(&object["metadata"]["name"]),
                text(&object["status"]["phase"])
            )
        });
        lines.map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    let all = watch("resourceVersion=100").await;
    assert_eq!(all[..2], ["ADDED w.10 RUNNING", "MODIFIED w.10 SUCCEEDED"]);
    assert!(all[2].starts_with("ERROR"), "{all:?}");
    let running = watch("resourceVersion=100&fieldSelector=status.phase%3DRUNNING").await;
    assert_eq!(running[..2], ["ADDED w.10 RUNNING", "DELETED w.10 RUNNING"]);
    let ended = watch("resourceVersion=100&fieldSelector=status.phase%3DSUCCEEDED").await;
    assert_eq!(ended[0], "ADDED w.10 SUCCEEDED");
    let initial = watch("").await;
    assert_eq!((initial.len(), initial[0].as_str()), (13, "ADDED w.0 RUNNING"));
    let streaming = "resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let listed = watch(&format!("sendInitialEvents=true&{streaming}")).await;
    assert_eq!((listed.len(), listed[10].as_str()), (14, "BOOKMARK"), "{listed:?}");
    let from_now = watch(&format!("sendInitialEvents=false&{streaming}")).await;
    assert_eq!(from_now[..2], all[..2]);
    let (status, told) =
        fixture.call("GET", &format!("{PATH}?watch=1&sendInitialEvents=true"), Value::Null).await;
    assert_eq!(status, 422, "as for the store's kinds: {told}");
    let (status, told) = fixture.call("GET", &format!("{PATH}?watch=1&resourceVersion=7"), Value::Null).await;
    assert_eq!((status.as_u16(), &told["reason"]), (410, &json!("Expired")));
}

#[tokio::test]
async fn a_view_is_not_written() {
    let fixture = fixture().await;
    let object = execution(1, "RUNNING");
    for (method, path) in
        [("POST", PATH.to_owned()), ("PUT", format!("{PATH}/w.1")), ("DELETE", format!("{PATH}/w.1"))]
    {
        let (status, told) = fixture.call(method, &path, object.clone()).await;
        assert_eq!(status, 405, "{method}");
        assert!(told["message"].as_str().unwrap().ends_with("is only looked at"), "{told}");
    }
    let (_, listed) = fixture.call("GET", "/apis/mayfly.dev/v1", Value::Null).await;
    let resources = listed["resources"].as_array().unwrap();
    let verbs = resources.iter().find(|resource| resource["name"] == "executions").unwrap()["verbs"].clone();
    assert_eq!(verbs, json!(["get", "list", "watch"]));
}

#[tokio::test]
async fn a_workflows_definition_is_what_was_applied() {
    const WORKFLOWS: &str = "/apis/mayfly.dev/v1/namespaces/default/workflows";
    const NOTE: &str = "kubectl.kubernetes.io/last-applied-configuration";
    let fixture = Fixture::new().await;
    let step = |fields: Value| {
        let mut step = json!({"Type": "Pass", "End": true});
        json_patch::merge(&mut step, &fields);
        if fields.get("ResultPath").is_some() {
            step["ResultPath"] = Value::Null;
        }
        json!({"StartAt": "A", "States": {"A": step}})
    };
    let object = |definition: Value| json!({"metadata": {"name": "w"}, "spec": {"definition": definition}});
    let (status, told) = fixture.call("POST", WORKFLOWS, object(step(json!({"Comment": "c"})))).await;
    assert_eq!((status.as_u16(), &told["spec"]["type"]), (201, &json!("STANDARD")), "{told}");
    // The patch drops the null and keeps the comment; the annotation has neither dropped nor kept anything.
    let applied = step(json!({"ResultPath": null}));
    let mut patch = object(applied.clone());
    patch["metadata"]["annotations"] = json!({NOTE: object(applied.clone()).to_string()});
    let path = format!("{WORKFLOWS}/w");
    let merge = "application/merge-patch+json";
    let (status, told) = fixture.call_as("PATCH", &path, merge, patch.to_string()).await;
    assert_eq!((status.as_u16(), &told["spec"]["definition"]), (200, &applied), "{told}");
    // A created object is taken from the annotation, too.
    let mut created = object(step(json!({})));
    created["metadata"] = json!({"name": "n", "annotations": {NOTE: object(applied.clone()).to_string()}});
    let (_, told) = fixture.call("POST", WORKFLOWS, created).await;
    assert_eq!(told["spec"]["definition"], applied);
    // A later patch that does not change the annotation is applied as a patch.
    let change = json!({"spec": {"definition": {"States": {"A": {"Comment": "d"}}}}});
    let (_, told) = fixture.call_as("PATCH", &path, merge, change.to_string()).await;
    let state = &told["spec"]["definition"]["States"]["A"];
    assert_eq!((&state["Comment"], state.get("ResultPath")), (&json!("d"), Some(&Value::Null)));
    // All errors of a definition are reported, with their place and code.
    let broken = json!({"StartAt": "X", "States": {"A": {"Type": "Pass", "Next": "B"}}});
    let (status, told) = fixture
        .call("POST", WORKFLOWS, json!({"metadata": {"name": "x"}, "spec": {"definition": broken}}))
        .await;
    let causes = told["details"]["causes"].as_array().unwrap();
    assert!(
        status == 422 && causes.len() > 1 && causes.iter().all(|c| c["field"] == "spec.definition"),
        "{told}"
    );
    // A misspelt field of an optional part is not overlooked.
    let misspelt = json!([{"name": "t", "schedule": {"cron": "* * * * *", "timezone": "Europe/Berlin"}}]);
    let mut object = object(step(json!({})));
    object["metadata"]["name"] = "y".into();
    object["spec"]["triggers"] = misspelt;
    let (status, told) = fixture.call("POST", &format!("{WORKFLOWS}?fieldValidation=Strict"), object).await;
    let message = told["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("spec.triggers[0].schedule.timezone"), "{told}");
}
