//! Functions that are container images: their pods are servers on loopback addresses.

use std::net::Ipv4Addr;

use http::StatusCode;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::support::{FakeApi, PODS, TestGateway};

fn pod(name: &str, revision: &str, ip: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "uid": format!("uid-{name}"), "labels": {"mayfly.dev/revision": revision}},
        "status": {"phase": "Running", "podIP": ip}})
}

/// Answers every request with `name`, each on its own connection.
fn serve(listener: TcpListener, name: &'static str) {
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4096];
            if matches!(stream.read(&mut head).await, Ok(count) if count > 0) {
                let length = name.len();
                let text =
                    format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{name}");
                let _ = stream.write_all(text.as_bytes()).await;
            }
        }
    });
}

#[tokio::test]
async fn an_image_answers_from_its_pods() {
    let api = FakeApi::default();
    let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = first.local_addr().unwrap().port();
    let spec = json!({"source": {"image": "app:local", "port": port}, "limits": {"timeout": "20s"}});
    api.function("web", spec);
    let world = TestGateway::new(api.clone(), std::time::Duration::ZERO).await;

    // The request arrives first, then the autoscaler requests a pod, and the pod starts.
    let (answer, ()) = tokio::join!(world.get("/fn/ns/web/"), async {
        api.written("web-00001=1").await;
        serve(first, "one");
        api.put(PODS, pod("one", "web-00001", "127.0.0.1"));
    });
    assert_eq!(answer, (StatusCode::OK, "one".into()));

    // Another pod takes over when the first one is removed.
    let second = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), port)).await.unwrap();
    serve(second, "two");
    api.put(PODS, pod("two", "web-00001", "127.0.0.2"));
    api.delete(PODS, "one");
    world.until("/fn/ns/web/", |status, body| status == StatusCode::OK && body == "two").await;
}
