//! Scaling to zero and back.

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Up, guest_or_skip, ready_replicas, wait};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_function_goes_to_zero_and_a_call_brings_it_back() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &["--idle-after", "2s"]).await?;
    let (http, api) = (up.http(), up.api()?);
    for _ in 0..2 {
        // Called in each attempt, so that it does not become idle before its replica is observed.
        let answered = wait::until("a call brings a replica", || async {
            let answer = http.get("/fn/default/hello/").await?;
            let answer = (answer.status.as_u16(), answer.text());
            let function = api.get("/apis/mayfly.dev/v1/namespaces/default/functions/hello").await?.body;
            let is_there = ready_replicas(&function) == 1 && pods(&up).await? == ["Running"];
            Ok((is_there || answer.0 != 200).then_some(answer))
        })
        .await?;
        assert_eq!(answered, (200, "Hello from Mayfly!\n".to_owned()));
        up.wait_until_function("hello", "has none", |function| ready_replicas(function) == 0).await?;
        wait::until("its pods are gone", || async { Ok(self::pods(&up).await?.is_empty().then_some(())) })
            .await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minimum_is_kept_without_any_request() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &["--min", "2", "--idle-after", "1s"]).await?;
    up.wait_until_function("hello", "has two replicas", |function| ready_replicas(function) == 2).await?;
    up.deploy("hello", "hello", &["--min", "0"]).await?;
    up.wait_until_function("hello", "has none", |function| ready_replicas(function) == 0).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn load_raises_replicas_up_to_the_maximum() -> Result<()> {
    guest_or_skip!("sleep");
    let up = Up::start().await?;
    up.deploy("sleep", "sleep", &["--target", "1", "--max", "3", "--concurrency", "100"]).await?;
    let http = up.http();
    let calls = tokio::spawn(async move {
        let call = |_| {
            let http = http.clone();
            async move { http.get("/fn/default/sleep/?ms=20000").await }
        };
        futures::future::join_all((0..12).map(call)).await
    });
    up.wait_until_function("sleep", "has three replicas", |function| ready_replicas(function) == 3).await?;
    calls.abort();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn more_calls_than_there_is_room_for_are_queued_then_refused_with_a_hint() -> Result<()> {
    guest_or_skip!("sleep");
    let up = Up::start().await?;
    let component = up.upload("sleep").await?;
    let limits = json!({"limits": {"concurrency": 1, "timeout": "2s"}, "scaling": {"max": 1}});
    up.apply_function("sleep", &component, limits).await?;
    let http = up.http();
    // Loaded first, so that only the guest's time counts; and with a known duration, so that no call is started that
    // cannot finish in time.
    wait::until("sleep answers", || async {
        Ok((http.get("/fn/default/sleep/?ms=300").await?.status == 200).then_some(()))
    })
    .await?;
    let calls = (0..12).map(|_| {
        let http = http.clone();
        async move { http.get("/fn/default/sleep/?ms=300").await }
    });
    let answers: Vec<_> = futures::future::join_all(calls).await.into_iter().collect::<Result<_>>()?;
    let (good, bad): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 200);
    // Within two seconds at least two and fewer than twelve sequential calls of 300 ms can finish.
    ensure!(good.len() >= 2 && !bad.is_empty(), "{} answered, {} refused", good.len(), bad.len());
    let mut without_a_turn = 0;
    for refused in bad {
        let error = &refused.json()?["error"];
        ensure!(error["hint"].is_string(), "{refused:?}");
        // On a busy machine the last call may have started too late.
        if refused.status == 504 {
            ensure!(error["code"] == "timed_out", "{refused:?}");
            continue;
        }
        ensure!(refused.status == 503 && error["code"] == "queue_timeout", "{refused:?}");
        let seconds: u64 = refused.header("retry-after").parse().with_context(|| format!("{refused:?}"))?;
        ensure!((1..=60).contains(&seconds), "{refused:?}");
        without_a_turn += 1;
    }
    ensure!(without_a_turn > 0, "all {} had their turn", answers.len());
    Ok(())
}

/// The phases of all pods.
async fn pods(up: &Up) -> Result<Vec<String>> {
    let list = up.api()?.get("/api/v1/namespaces/default/pods").await?;
    let items = list.body["items"].as_array().cloned().unwrap_or_default();
    let alive = items.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(alive.map(|pod| pod["status"]["phase"].as_str().unwrap_or_default().to_owned()).collect())
}
