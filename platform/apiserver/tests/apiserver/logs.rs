//! Logs: the requests to the nodes, and what the client receives of their responses.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use axum::body::Body;
use bytes::Bytes;
use futures::StreamExt;
use http::{Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::support::{Fixture, function, json_of, pod, request};

const FUNCTION_LOG: &str = "/apis/mayfly.dev/v1/namespaces/default/functions/f/log";

async fn with_nodes(names: &[&str]) -> Fixture {
    let server = Fixture::with(
        |_| {},
        |deps| {
            deps.nodes = Arc::new(|node, request| {
                Box::pin(async move {
                    let mut response = Response::new(Body::from(format!("{node}: {}\n", request.uri())));
                    match node.as_str() {
                        "gone" => return Err("connection refused".into()),
                        "without" => {
                            response = Response::new(Body::from("no log of this function here"));
                            *response.status_mut() = StatusCode::NOT_FOUND;
                        }
                        _ => {}
                    }
                    Ok(response)
                })
            });
        },
    )
    .await;
    for name in names {
        server.call("POST", "/api/v1/nodes", json!({"metadata": {"name": name}})).await;
    }
    server.call("POST", "/apis/mayfly.dev/v1/namespaces/default/functions", function("f")).await;
    server
}

async fn text(server: &Fixture, path: &str) -> (StatusCode, String) {
    let response = server.send(request("GET", path).body(Body::empty()).unwrap()).await;
    let code = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (code, String::from_utf8(bytes.to_vec()).unwrap())
}

#[tokio::test]
async fn a_functions_log_comes_from_every_node_that_has_one() {
    let one = with_nodes(&["a"]).await;
    let expected = "a: /functionLogs/default/f?tailLines=3\n";
    assert_eq!(text(&one, &format!("{FUNCTION_LOG}?tailLines=3")).await, (StatusCode::OK, expected.into()));
    let several = with_nodes(&["a", "b", "gone", "without"]).await;
    let (code, lines) = text(&several, FUNCTION_LOG).await;
    let mut lines: Vec<_> = lines.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        (code, lines),
        (StatusCode::OK, vec!["a: /functionLogs/default/f", "b: /functionLogs/default/f"])
    );
}

#[tokio::test]
async fn errors_of_nodes_are_told() {
    for (nodes, path, code, words) in [
        (&["without"][..], FUNCTION_LOG, 404, "no log of this function here"),
        (&["gone"], FUNCTION_LOG, 503, "node \"gone\" cannot be reached for its logs: connection refused"),
        (&[], FUNCTION_LOG, 503, "there is no node"),
        (
            &["a"],
            "/apis/mayfly.dev/v1/namespaces/default/functions/g/log",
            404,
            "functions.mayfly.dev \"g\" not found",
        ),
        (&["a"], "/apis/mayfly.dev/v1/namespaces/default/functions/f/log?tailLines=x", 422, "tailLines"),
        (&["a"], "/api/v1/nodes/a/log", 404, "could not find the requested resource"),
    ] {
        let server = with_nodes(nodes).await;
        let (found, status) = server.get(path).await;
        let message = status["message"].as_str().unwrap_or("");
        assert!(found.as_u16() == code && message.contains(words), "{path}: {found} {status}");
    }
}

#[tokio::test]
async fn a_reader_that_goes_ends_the_request_to_the_node() {
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    let server = Fixture::with(
        |_| {},
        move |deps| {
            deps.nodes = Arc::new(move |_, _| {
                let flag = Flag(Arc::clone(&flag));
                Box::pin(async move {
                    let lines = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from("line\n"))]);
                    let endless = lines.chain(futures::stream::pending()).map(move |line| {
                        let _ = &flag;
                        line
                    });
                    Ok(Response::new(Body::from_stream(endless)))
                })
            });
        },
    )
    .await;
    let pods = "/api/v1/namespaces/default/pods";
    server.call("POST", pods, pod("p")).await;
    server.call("POST", &format!("{pods}/p/binding"), json!({"target": {"name": "n"}})).await;
    let response =
        server.send(request("GET", &format!("{pods}/p/log?follow=true")).body(Body::empty()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::OK);
    let mut body = response.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "line\n");
    assert!(!ended.load(Ordering::SeqCst));
    drop(body);
    assert!(ended.load(Ordering::SeqCst));
    let (_, status) =
        json_of(server.send(request("POST", &format!("{pods}/p/log")).body(Body::empty()).unwrap()).await)
            .await;
    assert_eq!(status["code"], Value::from(405));
}
