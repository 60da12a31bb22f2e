//! Request bodies that are not read, or not yet: responses arrive, and the bodies of other requests are received.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::join_all;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

use crate::support::{
    FakeApi, TestGateway, config,
    host::{ScriptedHost, text},
};

/// More than the socket buffers hold.
const UPLOAD_BYTES: usize = 16 << 20;

#[tokio::test]
async fn an_answer_arrives_though_nobody_reads_the_request() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let host = ScriptedHost::new(|_, _| async { Ok(Response::new(text("not read"))) });
    let world = TestGateway::with(api, config(), Arc::default(), Some(host)).await;
    for (path, expect) in
        [("/fn/ns/hello", "HTTP/1.1 200 OK\r\n"), ("/fn/ns/none", "HTTP/1.1 404 Not Found\r\n")]
    {
        let (mut reader, mut writer) = TcpStream::connect(world.address).await.unwrap().into_split();
        // Like a client that sends everything before it reads a response.
        let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {UPLOAD_BYTES}\r\n\r\n");
        writer.write_all(head.as_bytes()).await.unwrap();
        writer.write_all(&vec![0; UPLOAD_BYTES]).await.expect("all of it is taken");
        let next = "GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        writer.write_all(next.as_bytes()).await.unwrap();
        let mut line = String::new();
        let mut answers = BufReader::new(&mut reader);
        answers.read_line(&mut line).await.unwrap();
        assert_eq!(line, expect);
        let mut rest = String::new();
        answers.read_to_string(&mut rest).await.unwrap();
        assert!(rest.contains("HTTP/1.1 200 OK\r\n") && rest.ends_with("not read"), "{path}: {rest}");
    }
}

#[tokio::test]
async fn uploads_that_wait_for_their_turn_do_not_stop_the_one_that_has_it() {
    let api = FakeApi::default();
    api.function("hello", json!({"limits": {"concurrency": 1}, "scaling": {"max": 1}}));
    let host = ScriptedHost::new(|_, request| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        Ok(Response::new(text(body.len().to_string())))
    });
    let world = TestGateway::with(api, config(), Arc::default(), Some(host)).await;
    let stream = TcpStream::connect(world.address).await.unwrap();
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let uploads = (0..8).map(|_| {
        let mut sender = sender.clone();
        async move {
            let body = Full::new(Bytes::from(vec![0; 1 << 20]));
            let answer = sender.send_request(Request::post("http://a/fn/ns/hello").body(body).unwrap()).await;
            answer.unwrap().into_body().collect().await.unwrap().to_bytes()
        }
    });
    let answers = tokio::time::timeout(Duration::from_secs(20), join_all(uploads)).await.expect("none stops");
    assert!(answers.iter().all(|answer| *answer == "1048576"), "{answers:?}");
    drop(sender);
    let _ = connection.await;
}
