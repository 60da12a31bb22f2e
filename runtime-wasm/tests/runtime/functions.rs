//! Functions of the examples, called in the same way as the gateway calls them.

use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use futures::SinkExt as _;
use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use mayfly_api::function::Isolation;
use mayfly_runtime::{BodyError, CallError, FunctionHost as _, Timings};

#[tokio::test(flavor = "multi_thread")]
async fn hello_answers_cold_and_warm() {
    let hello = guest!("hello");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(hello, |_| {}).await;
    assert!(!function.is_loaded());
    let answer = call(&function, get("/")).await.unwrap();
    assert!(answer.timings.cold && !answer.timings.load.is_zero(), "{:?}", answer.timings);
    assert_eq!(text(answer).await.1, "Hello from Mayfly!\n");
    assert!(function.is_loaded());
    let answer = call(&function, get("/")).await.unwrap();
    assert!(!answer.timings.cold && answer.timings.load.is_zero());
    assert_ne!(answer.timings, Timings::default());
    assert_eq!(text(answer).await.1, "Hello from Mayfly!\n");
    function.unload();
    assert!(!function.is_loaded());
    assert_eq!(ask(&function, "/").await.1, "Hello from Mayfly!\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn components_of_both_versions_answer() {
    let (two, three) = (guest!("hello"), guest!("hello-p3"));
    let fixture = WasmHostFixture::new();
    for component in [two, three] {
        for isolation in [Isolation::Fresh, Isolation::Reuse] {
            let function = fixture.function(component.clone(), |spec| spec.isolation = isolation).await;
            for _ in 0..5 {
                assert_eq!(ask(&function, "/").await.1, "Hello from Mayfly!\n");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_bodies_and_environment_arrive() {
    let (greet, wordcount, env) = (guest!("greet"), guest!("wordcount"), guest!("env"));
    let fixture = WasmHostFixture::new();
    let greeting = vec![("GREETING".to_owned(), "Hi".to_owned())];
    let function = fixture.function(greet, |spec| spec.env = greeting.clone()).await;
    let (_, body) = text(call(&function, request("/", r#"{"name":"Ada"}"#)).await.unwrap()).await;
    assert_eq!(body, r#"{"message":"Hi, Ada!"}"#);
    let (status, body) = text(call(&function, request("/", r#"{"name":""}"#)).await.unwrap()).await;
    assert!(status == 422 && body.contains("NoName"), "{status} {body}");

    let function = fixture.function(wordcount, |_| {}).await;
    let words = "one two\n".repeat(500_000);
    let (_, body) = text(call(&function, request("/", words)).await.unwrap()).await;
    assert!(body.contains("4000000") && body.contains("1000000") && body.contains("500000"), "{body}");

    let function = fixture.function(env, |spec| spec.env = greeting).await;
    assert!(ask(&function, "/").await.1.contains(r#""GREETING":"Hi""#));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_streams_both_ways() {
    let stream = guest!("stream");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(stream, |_| {}).await;
    let (mut sender, receiver) = futures::channel::mpsc::channel::<Result<Frame<Bytes>, BodyError>>(0);
    let body = StreamBody::new(receiver).boxed_unsync();
    let asked = Request::post("/echo").header("host", "test").body(body).unwrap();
    let answer = call(&function, asked).await.unwrap();
    let mut body = answer.response.into_body();
    for piece in ["one", "two", "three"] {
        // Each piece is echoed before the next one is sent.
        sender.send(Ok(Frame::data(Bytes::from(piece)))).await.unwrap();
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), piece);
    }
    drop(sender);
    assert!(body.frame().await.is_none());
    // The first piece is sent without waiting for the rest, which would arrive after the function's timeout.
    let mut body = call(&function, get("/?chunks=2&ms=3600000")).await.unwrap().response.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "chunk 1\n");
    drop(body);
    let body = call(&function, get("/?chunks=3&ms=1")).await.unwrap().response.into_body();
    assert_eq!(body.collect().await.unwrap().to_bytes(), "chunk 1\nchunk 2\nchunk 3\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_start_anew_unless_instances_are_reused() {
    let counter = guest!("counter");
    let fixture = WasmHostFixture::new();
    let fresh = fixture.function(counter.clone(), |_| {}).await;
    let reuse = fixture.function(counter, |spec| spec.isolation = Isolation::Reuse).await;
    for count in 1..=3 {
        assert_eq!(ask(&fresh, "/").await.1, "1\n");
        assert_eq!(ask(&reuse, "/").await.1, format!("{count}\n"));
        // Waits until the instance is idle again: otherwise the next call gets a new one.
        fixture.settled().await;
    }
    reuse.unload();
    assert_eq!(ask(&reuse, "/").await.1, "1\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_output_is_written_to_the_log() {
    let logger = guest!("logger");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(logger, |_| {}).await;
    ask(&function, "/?lines=2").await;
    let log = fixture.log("f");
    assert!(log.contains("stdout F plain line 2 on stdout"), "{log}");
    assert!(log.contains("stderr F plain line 1 on stderr"), "{log}");
}

/// None of an unfinished line's text appears in the lines of the next request.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_without_an_end_is_its_requests_own() {
    let logger = guest!("logger");
    let fixture = WasmHostFixture::new();
    for isolation in [Isolation::Fresh, Isolation::Reuse] {
        let function = fixture.function(logger.clone(), |spec| spec.isolation = isolation).await;
        for part in ["one", "two"] {
            ask(&function, &format!("/?lines=0&part={isolation:?}-{part}")).await;
            fixture.settled().await;
        }
        let log = fixture.log("f");
        for part in ["one", "two"] {
            assert!(log.contains(&format!("stdout F {isolation:?}-{part}\n")), "{log}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_exits_before_answering_is_an_error() {
    let panic = guest!("panic");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(panic, |_| {}).await;
    let error = call(&function, get("/?exit=3")).await.err().unwrap();
    assert!(
        matches!(&error, CallError::Trapped(what) if what.contains("exited before it answered")),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_reported_and_logged() {
    let panic = guest!("panic");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(panic, |_| {}).await;
    let error = call(&function, get("/")).await.err().unwrap();
    assert!(matches!(&error, CallError::Trapped(what) if what.contains("unreachable")), "{error}");
    let log = fixture.log("f");
    assert!(log.contains("panicked at") && log.contains("mayfly: the function trapped"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_up_to_the_limit() {
    let hog = guest!("memory-hog");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(hog, |_| {}).await;
    let (status, body) = ask(&function, "/?mib=40").await;
    assert_eq!(status, 200, "{body}");
    let error = call(&function, get("/")).await.err().unwrap();
    assert_eq!(error, CallError::OutOfMemory { limit_bytes: 64 << 20 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_without_end_is_cut_at_its_limit() {
    let flood = guest!("flood");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(flood, |spec| spec.response_bytes_max = 10 << 20).await;
    let answer = call(&function, get("/")).await.unwrap();
    let mut body = answer.response.into_body();
    let (mut bytes, mut failed) = (0, None);
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => bytes += frame.into_data().unwrap().len(),
            Err(error) => failed = Some(error.to_string()),
        }
    }
    assert!(bytes <= 10 << 20 && bytes > 9 << 20, "{bytes}");
    assert_eq!(failed.unwrap(), CallError::ResponseTooLarge { limit_bytes: 10 << 20 }.to_string());
    eventually("the guest is gone", || fixture.instances() == 0.0).await;
    // A client that disconnects without reading the body.
    let answer = call(&function, get("/")).await.unwrap();
    assert_eq!(fixture.instances(), 1.0);
    drop(answer);
    eventually("the guest is gone", || fixture.instances() == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_covers_the_body() {
    let stream = guest!("stream");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(stream, |spec| spec.timeout = Duration::from_millis(300)).await;
    function.load().await.unwrap();
    let asked = get("/?chunks=100&ms=50");
    let answer = call_within(&function, asked, Duration::from_millis(300)).await.unwrap();
    let mut body = answer.response.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "chunk 1\n");
    // The guest ends although the client stopped reading.
    eventually("the guest is gone", || fixture.instances() == 0.0).await;
    let failed = body.collect().await.unwrap_err().to_string();
    assert_eq!(failed, "the function did not answer within its timeout of 300ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleeping_guest_costs_a_slot_and_no_thread() {
    let sleep = guest!("sleep");
    let fixture = WasmHostFixture::new();
    let function = fixture.function(sleep, |_| {}).await;
    function.load().await.unwrap();
    let started = Instant::now();
    let all: Vec<_> = (0..50)
        .map(|_| {
            let function = function.clone();
            tokio::spawn(async move { ask(&function, "/?ms=300").await.0 })
        })
        .collect();
    for one in all {
        assert_eq!(one.await.unwrap(), 200);
    }
    assert!(started.elapsed() < Duration::from_secs(5), "50 x 300 ms took {:?}", started.elapsed());
    let asleep = function.clone();
    let asleep = tokio::spawn(async move { ask(&asleep, "/?ms=60000").await });
    eventually("it sleeps", || fixture.instances() == 1.0).await;
    asleep.abort();
    eventually("it is gone", || fixture.instances() == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_given_twice_is_given_once() {
    let (twice, silent) = (guest!("twice"), guest!("silent"));
    let fixture = WasmHostFixture::new();
    let function = fixture.function(twice, |_| {}).await;
    assert_eq!(ask(&function, "/").await.1, "first\n");
    eventually("the log tells", || fixture.log("f").contains("the function trapped")).await;
    let function = fixture.function(silent, |_| {}).await;
    assert_eq!(call(&function, get("/")).await.err().unwrap(), CallError::NoAnswer);
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_output_does_not_slow_other_calls() {
    let (flood, logger) = (guest!("flood"), guest!("logger"));
    let fixture = WasmHostFixture::with(small());
    let function = fixture.function(flood, |spec| spec.log_bytes_per_second = Some(1 << 20)).await;
    function.load().await.unwrap();
    let error = call_within(&function, get("/log"), Duration::from_secs(2)).await.err().unwrap();
    assert!(matches!(error, CallError::TimedOut { .. }), "{error}");
    let bytes = fixture.log("f").len();
    assert!((1 << 20..6 << 20).contains(&bytes), "{bytes} at 1 MiB/s, in 2 s, and 1 s ahead");
    let other = fixture.upload(logger).await;
    ask(&fixture.host.prepare(spec("other", other)), "/?lines=1").await;
    assert!(fixture.log("other").contains("plain line 1 on stdout"));
}
