use http_body_util::Empty;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

fn upstream(port: u16, timeout: &str) -> Arc<PodUpstream> {
    let spec = serde_json::json!({"function": "f", "source": {"image": "x", "port": port},
        "limits": {"timeout": timeout, "concurrency": 1, "response": "8"}});
    PodUpstream::new(ObjectKey::new("ns", "f-00001"), &serde_json::from_value(spec).unwrap())
}

fn running(phase: &str) -> Arc<Pod> {
    let pod = serde_json::json!({"metadata": {"name": "p", "uid": "u"},
        "status": {"phase": phase, "podIP": "127.0.0.1"}});
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn request() -> Request<Body> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    Request::builder().uri("/a?b=c").header("host", "f.ns.fn.localhost").body(body).unwrap()
}

#[tokio::test]
async fn a_request_waits_for_the_pod_and_reaches_it() {
    // The port is known, but nothing listens on it yet.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let upstream = upstream(socket.local_addr().unwrap().port(), "30s");
    let deadline = Instant::now() + Duration::from_secs(30);
    let call = tokio::spawn(upstream.call(request(), deadline));
    upstream.update(&[running("Running")]);
    let listener = socket.listen(16).unwrap();
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let count = stream.read(&mut head).await.unwrap();
            // The probe connects and disconnects.
            if count > 0 {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await.unwrap();
                return String::from_utf8(head[..count].to_vec()).unwrap();
            }
        }
    });
    let answer = call.await.unwrap().unwrap();
    assert!(answer.timings.cold);
    let body = answer.response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(&body[..], b"hi");
    let head = server.await.unwrap();
    assert!(head.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("f.ns.fn.localhost"), "{head}");
}

#[tokio::test]
async fn an_answer_is_no_longer_than_its_limit() {
    for (head, is_refused) in [("content-length: 9", true), ("transfer-encoding: chunked", false)] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = upstream(listener.local_addr().unwrap().port(), "30s");
        upstream.update(&[running("Running")]);
        let body = if is_refused { "123456789" } else { "9\r\n123456789\r\n0\r\n\r\n" };
        let answer = format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}");
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                // The probe connects and disconnects.
                if stream.read(&mut [0; 4096]).await.unwrap() > 0 {
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    return stream;
                }
            }
        });
        let called = upstream.call(request(), Instant::now() + Duration::from_secs(30)).await;
        let _open = server.await.unwrap();
        match called {
            Err(refusal) => {
                assert!(is_refused && refusal.code == RefusalCode::ResponseTooLarge, "{refusal}")
            }
            Ok(answer) => {
                let error = answer.response.into_body().collect().await.unwrap_err().to_string();
                assert!(!is_refused && error.contains("limit of 8"), "{error}");
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_a_pod_refuses_goes_to_another_one_with_its_body() {
    let listener = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
    let upstream = upstream(listener.local_addr().unwrap().port(), "30s");
    let gone = PodAddress { uid: "gone".into(), ip: [127, 0, 0, 1].into() };
    let alive = PodAddress { uid: "alive".into(), ip: [127, 0, 0, 2].into() };
    {
        let mut endpoints = upstream.endpoints.lock();
        endpoints.set(vec![gone.clone(), alive.clone()]);
        for pod in [&gone, &alive] {
            endpoints.find(pod).unwrap().answers = true;
        }
        assert_eq!(endpoints.acquire(), Some(gone.clone()), "it is the first choice");
        endpoints.release(&gone);
    }
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut sent = Vec::new();
        while !sent.ends_with(b"event") {
            assert!(stream.read_buf(&mut sent).await.unwrap() > 0, "{sent:?}");
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await.unwrap();
        stream
    });
    let body = http_body_util::Full::from("event").map_err(|never| match never {}).boxed_unsync();
    let request = Request::post("/").header("content-length", "5").body(body).unwrap();
    let called = upstream.call(request, Instant::now() + Duration::from_secs(30)).await;
    assert!(called.is_ok(), "{:?}", called.err());
    let _open = server.await.unwrap();
    upstream.close();
}

/// Each connection answers its first request, and closes when the second one arrives.
#[tokio::test]
async fn a_request_whose_kept_connection_ends_is_repeated_if_that_is_safe() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = upstream(listener.local_addr().unwrap().port(), "30s");
    upstream.update(&[running("Running")]);
    let (heads, mut received) = tokio::sync::mpsc::channel(64);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let heads = heads.clone();
            tokio::spawn(async move {
                let mut head = [0; 4096];
                for is_answered in [true, false] {
                    let Ok(count @ 1..) = stream.read(&mut head).await else { return };
                    heads.send((head[..count].starts_with(b"POST"), is_answered)).await.unwrap();
                    if is_answered {
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";
                        stream.write_all(answer).await.unwrap();
                    }
                }
            });
        }
    });
    let call = async |method: http::Method| {
        let mut request = request();
        *request.method_mut() = method;
        let answer = upstream.call(request, Instant::now() + Duration::from_secs(30)).await?;
        answer.response.into_body().collect().await.unwrap();
        Ok::<_, Refusal>(())
    };
    // The pool may open another connection although there is an idle one.
    loop {
        call(http::Method::GET).await.expect("it is repeated");
        if received.recv().await == Some((false, false)) {
            break;
        }
    }
    loop {
        let called = call(http::Method::POST).await;
        let (mut is_answered, mut posts) = (true, 0);
        while let Ok((is_post, answered)) = received.try_recv() {
            posts += u32::from(is_post);
            is_answered &= answered || !is_post;
        }
        assert_eq!((posts, called.is_ok()), (1, is_answered), "it was sent once");
        if !is_answered {
            break;
        }
    }
    upstream.close();
}

#[tokio::test]
async fn a_request_without_a_pod_ends_at_its_deadline() {
    let upstream = upstream(1, "1ms");
    upstream.update(&[running("Failed")]);
    let refused = upstream.call(request(), Instant::now() + Duration::from_millis(1)).await;
    assert_eq!(refused.err().map(|refusal| refusal.code), Some(RefusalCode::QueueTimeout));
}
