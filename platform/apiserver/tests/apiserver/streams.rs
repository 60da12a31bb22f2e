//! `exec`, `attach`, `portforward` and logs over WebSocket: their number is limited for as long as they are open.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderValue, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::mpsc,
};

use crate::support::{Fixture, TOKEN, pod};

const PODS: &str = "/api/v1/namespaces/default/pods";

/// Asks for a WebSocket at a path, and returns the connection and the status of the response.
async fn upgrade(address: SocketAddr, path: &str) -> (BufReader<TcpStream>, u16) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut socket = BufReader::new(socket);
    let mut line = String::new();
    socket.read_line(&mut line).await.unwrap();
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
    (socket, status)
}

#[tokio::test]
async fn an_open_stream_holds_its_permit() {
    let (ended, mut ends) = mpsc::channel(8);
    // A node that accepts every upgrade and reads to the end of the stream.
    let node = move |_, mut request: http::Request<axum::body::Body>| {
        let ended = ended.clone();
        let stream = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(stream.await.unwrap());
            let _ = stream.read_to_end(&mut Vec::new()).await;
            drop(stream);
            ended.send(()).await.unwrap();
        });
        let mut response = Response::new(axum::body::Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        Box::pin(async { Ok(response) }) as futures::future::BoxFuture<'static, _>
    };
    let server = Fixture::with(|config| config.watches_max = 2, |deps| deps.nodes = Arc::new(node)).await;
    let mut object = pod("p");
    object["spec"]["nodeName"] = "n".into();
    let (code, created) = server.call("POST", PODS, object).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    let (address, _serving) = server.listen().await;
    for way in ["exec?command=ls", "attach", "portforward", "log?follow=true"] {
        let path = format!("{PODS}/p/{way}");
        let (first, status) = upgrade(address, &path).await;
        assert_eq!(status, 101, "{way}");
        let (second, status) = upgrade(address, &path).await;
        assert_eq!(status, 101, "{way}");
        let (_, status) = upgrade(address, &path).await;
        assert_eq!(status, 429, "{way}: two are open");
        drop(first);
        ends.recv().await.unwrap();
        // The node may notice the end before the server has closed the connection.
        let third = tokio::time::timeout(Duration::from_secs(20), async {
            loop {
                if let (third, 101) = upgrade(address, &path).await {
                    return third;
                }
            }
        });
        let third = third.await.unwrap_or_else(|_| panic!("{way}: one is open"));
        drop((second, third));
        ends.recv().await.unwrap();
        ends.recv().await.unwrap();
    }
    let (code, pods) = server.get(PODS).await;
    assert_eq!((code, pods["items"].as_array().map(Vec::len)), (StatusCode::OK, Some(1)));
}
