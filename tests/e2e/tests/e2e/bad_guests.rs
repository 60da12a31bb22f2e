//! Misbehaving functions: their callers get errors with the cause, and other functions continue to work.

use std::time::Duration;

use anyhow::{Result, ensure};
use http::Method;
use mayfly_e2e::{CompleteResponse, Http, Up, full, guest_or_skip};
use serde_json::json;
use tokio::time::Instant;

/// A server with hello as the neighbour, and a misbehaving function.
async fn beside_hello(bad: &str, flags: &[&str]) -> Result<Up> {
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    up.deploy(bad, bad, flags).await?;
    neighbour_is_well(&up.http()).await?;
    Ok(up)
}

async fn neighbour_is_well(http: &Http) -> Result<()> {
    let answer = http.get("/fn/default/hello/").await?;
    ensure!(answer.status == 200 && answer.text() == "Hello from Mayfly!\n", "{answer:?}");
    Ok(())
}

/// Checks that the response is the gateway's error with this status and code, and a remedy.
fn check(answer: &CompleteResponse, status: u16, code: &str) -> Result<()> {
    ensure!(answer.status == status, "{answer:?}");
    let error = &answer.json()?["error"];
    ensure!(error["code"] == code, "{answer:?}");
    for field in ["message", "hint", "requestId"] {
        ensure!(error[field].as_str().is_some_and(|text| !text.is_empty()), "no {field} in {answer:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_is_a_502_and_its_message_is_in_the_log() -> Result<()> {
    guest_or_skip!("panic");
    let up = beside_hello("panic", &[]).await?;
    for _ in 0..3 {
        check(&up.http().get("/fn/default/panic/").await?, 502, "trapped")?;
    }
    neighbour_is_well(&up.http()).await?;
    mayfly_e2e::wait::until("the panic's message is in the log", || async {
        let log = up.cli().ok(&["logs", "panic"]).await?;
        Ok(log.contains("this function panics on every call").then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_spins_is_ended_at_its_timeout_while_neighbours_answer() -> Result<()> {
    guest_or_skip!("spin");
    let up = beside_hello("spin", &["--timeout", "1s"]).await?;
    let http = up.http();
    let spinning = {
        let http = http.clone();
        // More calls than there are cores.
        tokio::spawn(async move {
            futures::future::try_join_all((0..6).map(|_| http.get("/fn/default/spin/"))).await
        })
    };
    let started = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut calls = 0;
    while !spinning.is_finished() {
        let call = Instant::now();
        neighbour_is_well(&http).await?;
        slowest = slowest.max(call.elapsed());
        calls += 1;
    }
    let took = started.elapsed();
    for answer in spinning.await?? {
        check(&answer, 504, "timed_out")?;
    }
    ensure!(took >= Duration::from_millis(900) && took < Duration::from_secs(20), "ended after {took:?}");
    ensure!(calls >= 3 && slowest < Duration::from_secs(5), "{calls} calls, the slowest took {slowest:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_eats_memory_meets_its_limit() -> Result<()> {
    guest_or_skip!("memory-hog");
    let up = beside_hello("memory-hog", &["--memory", "32Mi"]).await?;
    check(&up.http().get("/fn/default/memory-hog/").await?, 502, "out_of_memory")?;
    check(&up.http().get("/fn/default/memory-hog/?mib=40").await?, 502, "out_of_memory")?;
    let within = up.http().get("/fn/default/memory-hog/?mib=16").await?;
    ensure!(within.text() == "holding 16 MiB\n", "{within:?}");
    neighbour_is_well(&up.http()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_returns_without_answering_is_a_502() -> Result<()> {
    guest_or_skip!("silent");
    let up = beside_hello("silent", &[]).await?;
    check(&up.http().get("/fn/default/silent/").await?, 502, "no_answer")?;
    neighbour_is_well(&up.http()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_answers_twice_is_held_to_its_first_answer() -> Result<()> {
    guest_or_skip!("twice");
    let up = beside_hello("twice", &[]).await?;
    // The second answer is a trap, when the first one is already complete; unless a tick of the host's clock, at which
    // the guest yields, fell between the two: then the connection may be closed early. It is never another answer.
    let http = up.http();
    let mut whole = 0;
    for _ in 0..5 {
        if let Ok(answer) = http.call(http.request(Method::GET, "/fn/default/twice/"), full("")).await {
            ensure!(answer.status == 200 && answer.text() == "first\n", "{answer:?}");
            whole += 1;
        }
    }
    ensure!(whole > 0, "no answer came whole");
    mayfly_e2e::wait::until("the log tells of the second answer", || async {
        let log = up.cli().ok(&["logs", "twice"]).await?;
        Ok(log.contains("the function trapped").then_some(()))
    })
    .await?;
    neighbour_is_well(&http).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_never_answers_is_ended_at_its_timeout() -> Result<()> {
    guest_or_skip!("sleep");
    let up = beside_hello("sleep", &["--timeout", "500ms"]).await?;
    let started = Instant::now();
    check(&up.http().get("/fn/default/sleep/?ms=600000").await?, 504, "timed_out")?;
    ensure!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    neighbour_is_well(&up.http()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_body_is_cut_at_the_limit_in_bounded_memory() -> Result<()> {
    guest_or_skip!("flood");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    let component = up.upload("flood").await?;
    up.apply_function("flood", &component, json!({"limits": {"response": "16Mi"}})).await?;
    let before = up.resident_bytes()?;
    let http = up.http();
    let response = http.open(http.request(Method::GET, "/fn/default/flood/"), full("")).await?;
    ensure!(response.status() == 200, "{response:?}");
    let mut body = response.into_body();
    let mut received = 0_u64;
    let broke_off = loop {
        use http_body_util::BodyExt;
        match body.frame().await {
            Some(Ok(frame)) => received += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) => break true,
            None => break false,
        }
    };
    // An aborted body must not look complete.
    ensure!(broke_off, "the body ended as if it were whole, after {received} bytes");
    ensure!((1 << 20..=16 << 20).contains(&received), "{received} bytes");
    let grown = up.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 128 << 20, "{grown} bytes more");
    neighbour_is_well(&http).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_log_neither_fills_the_disk_nor_the_memory() -> Result<()> {
    guest_or_skip!("flood");
    let up = beside_hello("flood", &["--timeout", "3s"]).await?;
    let before = up.resident_bytes()?;
    let answer = up.http().get("/fn/default/flood/log").await?;
    ensure!(answer.status == 504, "{answer:?}");
    let grown = up.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 128 << 20, "{grown} bytes more");
    let written = folder_bytes(&up.data().join("logs"));
    ensure!(written < 256 << 20, "{written} bytes of logs");
    neighbour_is_well(&up.http()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_instance_sees_what_another_left_behind() -> Result<()> {
    guest_or_skip!("dirty");
    let up = Up::start().await?;
    up.deploy("dirty", "victim", &["--memory", "16Mi"]).await?;
    up.deploy("dirty", "spy", &["--memory", "16Mi"]).await?;
    let http = up.http();
    for _ in 0..20 {
        let filled = http.get("/fn/default/victim/fill").await?;
        ensure!(filled.json()?["filledBytes"].as_u64().is_some_and(|bytes| bytes > 8 << 20), "{filled:?}");
        for name in ["victim", "spy"] {
            let probed = http.get(&format!("/fn/default/{name}/probe")).await?.json()?;
            ensure!(
                probed["hits"] == 0 && probed["scannedBytes"].as_u64().is_some_and(|b| b > 8 << 20),
                "{probed}"
            );
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn fresh_instances_forget_and_reused_ones_remember() -> Result<()> {
    guest_or_skip!("counter");
    let up = Up::start().await?;
    up.deploy("counter", "fresh", &[]).await?;
    up.deploy("counter", "reuse", &["--isolation", "reuse"]).await?;
    let http = up.http();
    let mut highest = 0;
    for _ in 0..20 {
        assert_eq!(http.get("/fn/default/fresh/").await?.text(), "1\n");
        highest = highest.max(http.get("/fn/default/reuse/").await?.text().trim().parse::<u64>()?);
    }
    ensure!(highest > 1, "no instance was reused");
    Ok(())
}

fn folder_bytes(folder: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => folder_bytes(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}
