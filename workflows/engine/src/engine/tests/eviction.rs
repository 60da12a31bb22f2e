//! Executions that only wait leave memory, and return for a timer, a token, a worker or a request.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use super::watched::Watched;
use super::*;
use crate::engine::work::Busy;

/// An execution that sleeps, and what keeps the virtual clock from jumping to its timer.
async fn evicted(world: &TestEngine, definition: serde_json::Value) -> (ExecutionArn, Busy) {
    let awake = world.engine.inner.busy();
    let arn = world.start(&machine(definition, StateMachineType::Standard), "{\"k\":1}").await;
    let running = world.engine.inner.live.by_arn(&arn).expect("in memory");
    // Effects that were under way end by themselves, and are written down.
    let rests = || {
        let cell = running.cell.lock();
        cell.durable == Some(cell.seq)
            && cell.machine.as_ref().is_some_and(mayfly_workflows_machine::Machine::only_waits)
            && running.effects.lock().is_empty()
    };
    until("it only waits", rests).await;
    let now_ms = world.engine.inner.now_ms();
    world.engine.inner.deps.clock.sleep_until(now_ms + 10_000).await;
    assert_eq!(world.engine.inner.evict_round(), 1);
    assert_eq!(world.engine.load().0, 0, "nothing is in memory");
    (arn, awake)
}

fn waits(seconds: u64) -> serde_json::Value {
    json!({"StartAt": "A", "States": {"A": {"Type": "Wait", "Seconds": seconds, "Next": "B"},
        "B": with(task("echo"), json!({"End": true}))}})
}

fn token() -> serde_json::Value {
    json!({"StartAt": "A", "States": {"A": {"Type": "Task", "End": true,
        "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken",
        "Parameters": {"FunctionName": "echo", "Payload.$": "$$.Task.Token"}}}})
}

#[tokio::test]
async fn a_timer_wakes() {
    let world = TestEngine::new().await;
    let (arn, awake) = evicted(&world, waits(3_600)).await;
    assert_eq!(world.engine.describe(&arn).await.expect("read").expect("there").status, RunStatus::Running);
    drop(awake);
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.output.as_deref(), Some("{\"k\":1}"));
    assert_eq!(ended.stop_date.expect("ended").as_second() - ended.start_date.as_second(), 3_600);
}

#[tokio::test]
async fn who_waits_is_not_told_that_what_cannot_be_read_is_not_there() {
    let watched = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let world = TestEngine::on(watched.clone(), Arc::default()).await;
    let (arn, awake) = evicted(&world, waits(3_600)).await;
    watched.refused_reads.store(1, Ordering::Release);
    let engine = world.engine.clone();
    let ends = tokio::spawn(async move { engine.wait(&arn).await });
    until("it could not be read", || watched.refused_reads.load(Ordering::Acquire) == 0).await;
    drop(awake);
    let ended = tokio::time::timeout(LONG, ends).await.expect("it ends");
    let ended = ended.expect("runs").expect("read").expect("there");
    assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("{\"k\":1}")));
    assert!(
        world
            .engine
            .wait(&ExecutionArn::from_trusted("arn:aws:states:us-east-1:000000000000:execution:m:none"))
            .await
            .expect("read")
            .is_none()
    );
}

#[tokio::test]
async fn who_stopped_waiting_keeps_nobody_awake() {
    let world = TestEngine::new().await;
    let _awake = world.engine.inner.busy();
    let arn = world.start(&machine(waits(3_600), StateMachineType::Standard), "{}").await;
    {
        let mut waits = std::pin::pin!(world.engine.wait(&arn));
        assert!(futures::poll!(&mut waits).is_pending(), "it waits for an hour");
        let running = world.engine.inner.live.by_arn(&arn).expect("in memory");
        assert_eq!(running.cell.lock().waiters.len(), 1);
    }
    let now_ms = world.engine.inner.now_ms();
    world.engine.inner.deps.clock.sleep_until(now_ms + 10_000).await;
    assert_eq!(world.engine.inner.evict_round(), 1);
}

#[tokio::test]
async fn a_token_wakes() {
    let world = TestEngine::new().await;
    let (arn, _awake) = evicted(&world, token()).await;
    let token: String = serde_json::from_str(&world.functions.calls.lock()[0].1).expect("a token");
    world.engine.send_task_heartbeat(&token).await.expect("alive");
    world.engine.send_task_success(&token, "7").await.expect("taken");
    assert_eq!(world.engine.wait(&arn).await.expect("read").expect("there").output.as_deref(), Some("7"));
    assert_eq!(world.engine.send_task_success(&token, "7").await, Err(TokenError::TimedOut));
    assert_eq!(world.functions.calls.lock().len(), 1, "the function was called once");
}

#[tokio::test]
async fn a_worker_wakes() {
    let world = TestEngine::new().await;
    let activity = "arn:aws:states:us-east-1:000000000000:activity:a";
    let definition =
        json!({"StartAt": "A", "States": {"A": {"Type": "Task", "Resource": activity, "End": true}}});
    let (arn, _awake) = evicted(&world, definition).await;
    let work = world.engine.get_activity_task(&activity_arn(activity), None).await.expect("work");
    world.engine.send_task_failure(&work.token, Some("E".to_owned()), None).await.expect("taken");
    assert_eq!(world.engine.wait(&arn).await.expect("read").expect("there").error.as_deref(), Some("E"));
}

#[tokio::test]
async fn a_stop_wakes() {
    let world = TestEngine::new().await;
    let (arn, _awake) = evicted(&world, waits(3_600)).await;
    world.engine.stop(&arn, None, None).await.expect("stops");
    assert_eq!(world.engine.describe(&arn).await.expect("read").expect("there").status, RunStatus::Aborted);
    assert_eq!(world.engine.load(), (0, 0), "its timer is gone too");
}

#[tokio::test]
async fn who_reads_it_too_late_does_not_bring_it_back() {
    let journal = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let (arn, _awake) = evicted(&world, waits(3_600)).await;
    let (has_read, read) = mpsc::channel();
    let (has_stopped, stopped) = mpsc::channel();
    *journal.read.lock() = Some(Box::new(move || {
        has_read.send(()).expect("somebody waits");
        // It cannot be stopped while it is being read: the loop continues.
        let _ = stopped.recv_timeout(Duration::from_millis(100));
    }));
    let inner = world.engine.inner.clone();
    let id = journal.execution_by_arn(&arn).expect("read").expect("there").id;
    let wakes = tokio::spawn(async move { inner.ensure_resident(id).await.map(|running| running.is_some()) });
    tokio::task::spawn_blocking(move || read.recv_timeout(LONG)).await.expect("runs").expect("read");
    world.engine.stop(&arn, None, None).await.expect("stops");
    // The reader may be done already.
    let _ = has_stopped.send(());
    wakes.await.expect("runs").expect("read");
    assert_eq!(world.engine.describe(&arn).await.expect("read").expect("there").status, RunStatus::Aborted);
    assert_eq!(world.engine.load(), (0, 0), "nothing of it is in memory");
}

#[tokio::test]
async fn a_start_with_a_sleepers_name_finds_it() {
    let world = TestEngine::new().await;
    let (arn, _awake) = evicted(&world, waits(3_600)).await;
    let name = Some(arn.last_field().to_owned());
    let again =
        StartRequest { name, ..request(&machine(waits(3_600), StateMachineType::Standard), "{\"k\":1}") };
    assert_eq!(world.engine.start_execution(again).await.expect("the same").execution_arn, arn);
}

#[tokio::test]
async fn who_waits_for_one_that_falls_asleep_again_waits_for_its_end() {
    let journal = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let (arn, awake) = evicted(&world, waits(3_600)).await;
    let (has_read, read) = mpsc::channel();
    let (may_go_on, goes_on) = mpsc::channel();
    *journal.read.lock() = Some(Box::new(move || {
        has_read.send(()).expect("somebody waits");
        goes_on.recv().expect("told");
    }));
    let (engine, wanted) = (world.engine.clone(), arn.clone());
    let ends = tokio::spawn(async move { engine.wait(&wanted).await });
    until("its records are read", || read.try_recv().is_ok()).await;
    // From here on this task does not yield: the execution is in memory again, and the waiter has not used it yet.
    may_go_on.send(()).expect("it waits");
    let begun = std::time::Instant::now();
    while world.engine.inner.live.by_arn(&arn).is_none() {
        assert!(begun.elapsed() < LONG, "it does not come into memory");
        std::thread::yield_now();
    }
    assert_eq!(world.engine.inner.evict_round(), 0, "somebody has just asked for it");
    let now_ms = world.engine.inner.now_ms();
    world.engine.inner.deps.clock.sleep_until(now_ms + 10_000).await;
    assert_eq!(world.engine.inner.evict_round(), 1);
    drop(awake);
    let ended = ends.await.expect("runs").expect("read").expect("there");
    assert_eq!(ended.status, RunStatus::Succeeded);
}

#[tokio::test]
async fn who_lets_go_late_lets_go_of_his_own() {
    let world = TestEngine::new().await;
    let _awake = world.engine.inner.busy();
    let arn = world.start(&machine(waits(3_600), StateMachineType::Standard), "{}").await;
    let before = world.engine.inner.live.by_arn(&arn).expect("in memory");
    world.engine.stop(&arn, None, None).await.expect("stops");
    world.engine.redrive(&arn, None).await.expect("goes on");
    world.engine.inner.live.release(&before);
    let after = world.engine.inner.live.by_id(before.id).expect("in memory");
    assert!(world.engine.inner.live.by_arn(&arn).is_some_and(|there| Arc::ptr_eq(&there, &after)));
}

#[tokio::test]
async fn work_comes_back_when_it_could_not_be_given_out() {
    let journal = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let activity = "arn:aws:states:us-east-1:000000000000:activity:a";
    let definition =
        json!({"StartAt": "A", "States": {"A": {"Type": "Task", "Resource": activity, "End": true}}});
    let (arn, _awake) = evicted(&world, definition).await;
    // The sleeper cannot be read at first, and one worker leaves while it is being read.
    journal.refused_reads.store(1, Ordering::Relaxed);
    let (has_read, read) = mpsc::channel();
    let (may_go_on, goes_on) = mpsc::channel();
    *journal.read.lock() = Some(Box::new(move || {
        has_read.send(()).expect("somebody waits");
        goes_on.recv().expect("told");
    }));
    let engine = world.engine.clone();
    let leaves = tokio::spawn(async move { engine.get_activity_task(&activity_arn(activity), None).await });
    until("its records are read", || read.try_recv().is_ok()).await;
    leaves.abort();
    assert!(leaves.await.is_err(), "it left before it had the work");
    may_go_on.send(()).expect("it waits");
    let activity = activity_arn(activity);
    let asks = world.engine.get_activity_task(&activity, None);
    let work = tokio::time::timeout(LONG, asks).await.expect("in time").expect("work");
    world.engine.send_task_success(&work.token, "7").await.expect("taken");
    assert_eq!(world.engine.wait(&arn).await.expect("read").expect("there").output.as_deref(), Some("7"));
}

#[tokio::test]
async fn a_timer_whose_sleeper_cannot_be_read_comes_again() {
    let journal = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let (arn, awake) = evicted(&world, waits(3_600)).await;
    journal.refused_reads.store(2, Ordering::Relaxed);
    drop(awake);
    let ended =
        || journal.execution_by_arn(&arn).expect("read").expect("there").outcome.status != RunStatus::Running;
    until("it is woken by its timer alone", ended).await;
}

#[tokio::test]
async fn executions_whose_timers_are_due_together_are_read_together() {
    let watched = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let world = TestEngine::on(watched.clone(), Arc::default()).await;
    let awake = world.engine.inner.busy();
    let at = json!({"Type": "Wait", "Timestamp": "2024-06-01T00:00:00Z", "End": true});
    let definition = json!({"StartAt": "A", "States": {"A": at}});
    let machine = machine(definition, StateMachineType::Standard);
    let mut arns = Vec::new();
    for _ in 0..100 {
        arns.push(world.start(&machine, "{}").await);
    }
    let now_ms = world.engine.inner.now_ms();
    world.engine.inner.deps.clock.sleep_until(now_ms + 10_000).await;
    assert_eq!(world.engine.inner.evict_round(), 100);
    drop(awake);
    for arn in arns {
        let ended = world.engine.wait(&arn).await.expect("read").expect("there");
        assert_eq!(ended.status, RunStatus::Succeeded);
    }
    // 32 at a time.
    assert_eq!(watched.groups_read.load(Ordering::Relaxed), 4);
}
