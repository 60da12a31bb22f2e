//! Logs over WebSocket, through the API server.

use base64::Engine as _;
use futures::StreamExt as _;
use mayfly_runtime::{
    ContainerId, PodUid,
    logs::{LogWriter, Stream},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        protocol::{Role, frame::coding::CloseCode},
    },
};

use crate::{
    harness::{KubeletHarness, is_true},
    streams::serve,
};

const LOG: &str = "/api/v1/namespaces/default/pods/talk/log";

/// The head of the response to a request for a WebSocket, and the connection after it.
async fn request(server: &str, path: &str, protocols: Option<&str>) -> (String, TcpStream) {
    let address = server.trim_start_matches("http://");
    let mut connection = TcpStream::connect(address).await.unwrap();
    let protocols = protocols.map_or_else(String::new, |list| format!("Sec-WebSocket-Protocol: {list}\r\n"));
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{protocols}\r\n"
    );
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.unwrap());
    }
    (String::from_utf8(head).unwrap().to_lowercase(), connection)
}

/// A log that is open over WebSocket.
struct LogSocket(WebSocketStream<TcpStream>);

impl LogSocket {
    async fn open(server: &str, query: &str, protocols: Option<&str>) -> (String, Self) {
        let (head, connection) = request(server, &format!("{LOG}{query}"), protocols).await;
        assert!(head.starts_with("http/1.1 101"), "{head}");
        (head, Self(WebSocketStream::from_raw_socket(connection, Role::Client, None).await))
    }

    /// The decoded content of the next message; `None` for a normal close.
    async fn next(&mut self, is_base64: bool) -> Option<Vec<u8>> {
        match (self.0.next().await?.unwrap(), is_base64) {
            (Message::Binary(bytes), false) => Some(bytes.to_vec()),
            (Message::Text(text), true) => {
                Some(base64::engine::general_purpose::STANDARD.decode(text.as_str()).unwrap())
            }
            (Message::Close(frame), _) => {
                assert_eq!(frame.map(|frame| frame.code), Some(CloseCode::Normal));
                None
            }
            (other, _) => panic!("{other:?}"),
        }
    }

    /// Reads messages until they contain this text in all.
    async fn reads(&mut self, expected: &str, is_base64: bool) {
        let mut read = Vec::new();
        while read.len() < expected.len() {
            read.extend(self.next(is_base64).await.expect("more of the log"));
        }
        assert_eq!(String::from_utf8(read).unwrap(), expected);
    }
}

#[tokio::test]
async fn logs_are_messages_of_a_websocket() {
    let cluster = KubeletHarness::start().await;
    let pod = cluster.create("talk", json!({}), json!({})).await;
    let id = ContainerId { pod: PodUid(pod.metadata.uid.unwrap()), name: "main".into(), attempt: 0 };
    cluster.until("talk", "ready", |pod| is_true(pod, "Ready")).await;
    let writer = LogWriter::start().unwrap();
    let mut sink = writer.sink(cluster.logs.container(&id), Stream::Stdout);
    sink.write(b"one\ntwo\n");
    writer.flush();
    let text = async || {
        Some(cluster.get("/containerLogs/default/talk/main").await.1).filter(|text| text == "one\ntwo\n")
    };
    cluster.find("the lines are written", text).await;
    let server = serve(&cluster).await;
    for (protocols, chosen) in [
        (Some("binary.k8s.io"), Some("binary.k8s.io")),
        (Some("v9.example, base64.binary.k8s.io, binary.k8s.io"), Some("base64.binary.k8s.io")),
        (None, None),
    ] {
        let (head, mut log) = LogSocket::open(&server, "", protocols).await;
        let named = head.lines().find_map(|line| line.strip_prefix("sec-websocket-protocol: "));
        assert_eq!(named, chosen, "{head}");
        let is_base64 = chosen == Some("base64.binary.k8s.io");
        assert_eq!(log.next(is_base64).await, Some(Vec::new()), "the stream has begun");
        log.reads("one\ntwo\n", is_base64).await;
        assert_eq!(log.next(is_base64).await, None, "the log is not followed");
    }
    let (_, mut followed) = LogSocket::open(&server, "?follow=true&tailLines=1", None).await;
    followed.reads("two\n", false).await;
    sink.write(b"three\n");
    writer.flush();
    followed.reads("three\n", false).await;
    let (head, _) = request(&server, LOG, Some("v4.channel.k8s.io")).await;
    assert!(head.starts_with("http/1.1 403"), "{head}");
    for (path, code) in
        [("/api/v1/namespaces/default/pods/none/log", 404), (&format!("{LOG}?container=x"), 400)]
    {
        let (head, _) = request(&server, path, Some("binary.k8s.io")).await;
        assert!(head.starts_with(&format!("http/1.1 {code}")), "an error is an ordinary response: {head}");
    }
}
