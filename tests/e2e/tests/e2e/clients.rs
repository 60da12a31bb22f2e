//! Misbehaving clients, and streamed bodies.

use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures::StreamExt;
use http::Method;
use http_body_util::BodyExt;
use mayfly_e2e::{CompleteResponse, Http, Up, full, guest_or_skip, streamed, wait};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

const MIB: usize = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_streams_while_it_is_made() -> Result<()> {
    guest_or_skip!("stream");
    let up = Up::start().await?;
    up.deploy("stream", "stream", &[]).await?;
    let http = up.http();
    let path = "/fn/default/stream/?chunks=5&ms=300";
    let mut body = http.open(http.request(Method::GET, path), full("")).await?.into_body();
    let started = Instant::now();
    let mut first = None;
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame?.data_ref() {
            first.get_or_insert(started.elapsed());
            text.extend_from_slice(data);
        }
    }
    let whole = started.elapsed();
    assert_eq!(String::from_utf8(text)?, "chunk 1\nchunk 2\nchunk 3\nchunk 4\nchunk 5\n");
    ensure!(first.is_some_and(|first| first + Duration::from_millis(600) < whole), "{first:?} of {whole:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_echoed_while_it_is_sent() -> Result<()> {
    guest_or_skip!("stream");
    let up = Up::start().await?;
    up.deploy("stream", "stream", &[]).await?;
    for http in [up.http(), up.http().h2c()] {
        let (sender, receiver) = futures::channel::mpsc::channel(1);
        let mut sender = sender;
        let request = http.request(Method::POST, "/fn/default/stream/echo");
        let mut echoed = http.open(request, streamed(receiver)).await?.into_body();
        for piece in ["one", "two", "three"] {
            futures::SinkExt::send(&mut sender, Bytes::from(piece)).await?;
            // The next one is sent after this one was echoed.
            let frame = tokio::time::timeout(wait::PATIENCE, echoed.frame()).await?;
            let data = frame.and_then(Result::ok).and_then(|frame| frame.into_data().ok());
            assert_eq!(data.as_deref(), Some(piece.as_bytes()));
        }
        drop(sender);
        // No more data, and a regular end.
        ensure!(echoed.collect().await?.to_bytes().is_empty());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn http_2_without_tls_works_with_many_streams() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    let http = up.http().h2c();
    let answers = futures::future::try_join_all((0..100).map(|_| http.get("/fn/default/hello/"))).await?;
    ensure!(answers.iter().all(|answer| answer.text() == "Hello from Mayfly!\n"));
    Ok(())
}

/// Both versions of the interface behave equally for a client.
#[tokio::test(flavor = "multi_thread")]
async fn a_function_of_wasi_http_0_3_answers_over_both_protocols_fresh_and_reused() -> Result<()> {
    guest_or_skip!("hello-p3");
    let up = Up::start().await?;
    for isolation in ["fresh", "reuse"] {
        up.deploy("hello-p3", isolation, &["--isolation", isolation]).await?;
    }
    for http in [up.http(), up.http().h2c()] {
        for isolation in ["fresh", "reuse"] {
            let path = format!("/fn/default/{isolation}/");
            let mut kept = 0;
            for _ in 0..20 {
                let timing = hello(&http, &path).await?.header("server-timing").to_owned();
                ensure!(timing.contains("instantiate;dur="), "{path}: {timing:?}");
                kept += usize::from(timing.contains("instantiate;dur=0.000"));
            }
            let is_expected = (kept > 0) == (isolation == "reuse");
            ensure!(is_expected, "{path}: {kept} of 20 answered by an instance that was there");
            futures::future::try_join_all((0..50).map(|_| hello(&http, &path))).await?;
        }
    }
    Ok(())
}

async fn hello(http: &Http, path: &str) -> Result<CompleteResponse> {
    let answer = http.get(path).await?;
    ensure!(answer.status == 200 && answer.text() == "Hello from Mayfly!\n", "{path}: {answer:?}");
    ensure!(answer.header("content-type") == "text/plain; charset=utf-8", "{path}: {answer:?}");
    Ok(answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_body_is_streamed_in_bounded_memory() -> Result<()> {
    guest_or_skip!("wordcount");
    let up = Up::start().await?;
    up.deploy("wordcount", "wordcount", &["--timeout", "120s"]).await?;
    let http = up.http();
    http.post("/fn/default/wordcount/", "warm it up").await?;
    let before = up.resident_bytes()?;
    let piece = Bytes::from("four words a line\n".repeat(MIB / 18));
    let (pieces, bytes) = (128, piece.len() as u64 * 128);
    let body = streamed(futures::stream::iter(0..pieces).map(move |_| piece.clone()));
    let answer = http.call(http.request(Method::POST, "/fn/default/wordcount/"), body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    let count = answer.json()?;
    ensure!(count["bytes"] == bytes && count["words"] == bytes / 18 * 4, "{count} for {bytes} bytes");
    let grown = up.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 96 << 20, "{grown} bytes more after {bytes} were streamed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gigabyte_is_refused_past_the_limit_in_bounded_memory() -> Result<()> {
    guest_or_skip!("wordcount");
    let up = Up::start().await?;
    up.deploy("wordcount", "wordcount", &["--timeout", "120s"]).await?;
    let before = up.resident_bytes()?;
    let http = up.http();
    // With content-length: rejected before the body is sent.
    let mut announced = TcpStream::connect(http.address()).await?;
    let head = format!(
        "POST /fn/default/wordcount/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\n\
         content-length: {}\r\n\r\n",
        1_u64 << 30
    );
    announced.write_all(head.as_bytes()).await?;
    let mut told = String::new();
    tokio::time::timeout(wait::PATIENCE, announced.read_to_string(&mut told)).await??;
    ensure!(told.starts_with("HTTP/1.1 413 ") && told.contains("\"request_too_large\""), "{told}");
    // Without content-length: aborted while the body is received.
    let pieces = || streamed(futures::stream::repeat(Bytes::from(vec![b'x'; MIB])).take(1024));
    let (path, h2c) = ("/fn/default/wordcount/", http.h2c());
    let answer = h2c.call(h2c.request(Method::POST, path), pieces()).await?;
    ensure!(answer.status == 413 && answer.json()?["error"]["code"] == "request_too_large", "{answer:?}");
    // Over HTTP/1.1 a client that is still sending may see the closed connection instead of the response.
    if let Ok(answer) = http.call(http.request(Method::POST, path), pieces()).await {
        ensure!(answer.status == 413, "{answer:?}");
    }
    wait::until("all three were refused for that", || async {
        let metrics = up.admin().get("/metrics").await?.text();
        let line = r#"mayfly_gateway_refusals_total{code="request_too_large"} 3"#;
        Ok(metrics.lines().any(|known| known == line).then_some(()))
    })
    .await?;
    let grown = up.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 96 << 20, "{grown} bytes more");
    let next = http.post("/fn/default/wordcount/", "still well").await?;
    ensure!(next.json()?["words"] == 2, "{next:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_client_hangs_up_the_guest_is_ended() -> Result<()> {
    guest_or_skip!("sleep");
    let up = Up::start().await?;
    let flags = ["--timeout", "300s", "--concurrency", "1", "--max", "1"];
    up.deploy("sleep", "sleep", &flags).await?;
    up.http().get("/fn/default/sleep/?ms=1").await?;
    // The only slot is used by a call whose client has disconnected.
    let mut gone = TcpStream::connect(up.http().address()).await?;
    gone.write_all(b"GET /fn/default/sleep/?ms=250000 HTTP/1.1\r\nhost: x\r\n\r\n").await?;
    let http = up.http();
    let mut waiting = wait::until("a second call has to wait", || async {
        let http = http.clone();
        let mut call = tokio::spawn(async move { http.get("/fn/default/sleep/?ms=1").await });
        let answered = tokio::time::timeout(Duration::from_millis(500), &mut call).await.is_ok();
        Ok((!answered).then_some(call))
    })
    .await?;
    drop(gone);
    let started = Instant::now();
    let answer = tokio::time::timeout(wait::PATIENCE, &mut waiting).await???;
    ensure!(answer.status == 200, "{answer:?}");
    ensure!(
        started.elapsed() < Duration::from_secs(60),
        "the place was not given back: {:?}",
        started.elapsed()
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_senders_do_not_keep_others_from_being_answered() -> Result<()> {
    guest_or_skip!("wordcount");
    let up = Up::start().await?;
    up.deploy("wordcount", "wordcount", &["--concurrency", "100"]).await?;
    let address = up.http().address();
    let mut slow = Vec::new();
    for n in 0..64 {
        let mut socket = TcpStream::connect(address).await?;
        let head = match n % 2 {
            // An incomplete head, and no body.
            0 => "POST /fn/default/wordcount/ HTTP/1.1\r\nhost: x\r\ncontent-le".to_owned(),
            _ => "POST /fn/default/wordcount/ HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf "
                .to_owned(),
        };
        socket.write_all(head.as_bytes()).await?;
        slow.push(socket);
    }
    let started = Instant::now();
    let answer = up.http().post("/fn/default/wordcount/", "two words").await?;
    ensure!(answer.json()?["words"] == 2, "{answer:?}");
    ensure!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    // Requests with a half-sent body are answered once the rest arrives.
    let late = &mut slow[1];
    late.write_all(b"late.").await?;
    let mut text = vec![0; 4096];
    let read = tokio::time::timeout(wait::PATIENCE, late.read(&mut text)).await??;
    let text = String::from_utf8_lossy(&text[..read]).into_owned();
    ensure!(text.starts_with("HTTP/1.1 200"), "{text}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_http_is_refused_and_harms_nobody() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    // The content-length of the third one is ignored (RFC 9112, 6.3): a complete request, without a route.
    let heads = [
        ("\u{16}\u{3}\u{1}\u{2}\0 no TLS here\r\n\r\n".to_owned(), "400", "bad_request"),
        (format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(200_000)), "431", "head_too_large"),
        (
            "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\
             transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
                .to_owned(),
            "404",
            "not_found",
        ),
    ];
    for (head, status, code) in heads {
        let mut socket = TcpStream::connect(up.http().address()).await?;
        // All of it is read, also if its beginning was enough. (A client that closes the connection here counts as
        // disconnected.)
        socket.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        tokio::time::timeout(wait::PATIENCE, socket.read_to_end(&mut answer)).await??;
        let answer = String::from_utf8_lossy(&answer);
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer:?}");
        ensure!(answer.contains(&format!("\"{code}\"")), "{code}: {answer:?}");
        ensure!(up.http().get("/fn/default/hello/").await?.status == 200);
    }
    Ok(())
}
