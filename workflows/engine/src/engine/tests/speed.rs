//! How fast: printed, and held to a floor far below what was measured, so that
//! a change that makes it several times slower is noticed.

use std::time::Instant;

use super::*;
use crate::journal::{Birth, Digest, ExecutionRow, OutcomeRow, Payload};
use crate::machine::{Event, Output};

#[tokio::test]
async fn transitions_of_a_machine() {
    let world = World::new().await;
    let mut states = serde_json::Map::new();
    for n in 0..100 {
        states.insert(format!("S{n}"), json!({"Type": "Pass", "Next": format!("S{}", n + 1)}));
    }
    states.insert("S100".to_owned(), json!({"Type": "Succeed"}));
    let state_machine = machine(json!({"StartAt": "S0", "States": states}), Kind::Express);
    let row = ExecutionRow {
        id: 1,
        arn: "a".to_owned(),
        name: "n".to_owned(),
        machine_arn: "m".to_owned(),
        machine: Digest::of(b""),
        version_arn: None,
        alias_arn: None,
        map_run_arn: None,
        birth: Birth::default(),
        input: Payload::from(r#"{"order":17,"lines":[1,2,3]}"#),
        start_ms: 0,
        outcome: OutcomeRow::running(),
    };
    let began = Instant::now();
    let mut transitions = 0;
    for _ in 0..1_000 {
        let mut machine = world.engine.inner.machine_for(&row, &state_machine).expect("made");
        let mut out = Output::default();
        machine.apply(0, 0, Event::Start, &mut out);
        assert!(machine.outcome().is_some());
        transitions += out.transitions;
    }
    let each_second = transitions as f64 / began.elapsed().as_secs_f64();
    eprintln!("{each_second:.0} transitions/s of a machine alone");
    assert!(each_second > 20_000.0, "{each_second:.0}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn express_executions() {
    let world = World::new().await;
    let mut states = serde_json::Map::new();
    for n in 0..10 {
        states.insert(format!("S{n}"), json!({"Type": "Pass", "Next": format!("S{}", n + 1)}));
    }
    states.insert("S10".to_owned(), json!({"Type": "Succeed"}));
    let state_machine = machine(json!({"StartAt": "S0", "States": states}), Kind::Express);
    let began = Instant::now();
    let clients = (0..16).map(|_| {
        let (engine, state_machine) = (world.engine.clone(), state_machine.clone());
        tokio::spawn(async move {
            for _ in 0..200 {
                let ended = engine.start_sync(request(&state_machine, "{\"k\":1}")).await.expect("runs");
                assert_eq!(ended.status, Status::Succeeded);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("runs");
    }
    let each_second = 16.0 * 200.0 * 11.0 / began.elapsed().as_secs_f64();
    eprintln!("{each_second:.0} transitions/s of express executions, started and ended");
    assert!(each_second > 20_000.0, "{each_second:.0}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn durable_executions() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = Config { data_dir: Some(folder.path().to_owned()), ..Config::default() };
    let deps = Deps { clock: Arc::new(crate::timers::SystemClock), ..deps(Arc::default(), Arc::default()) };
    let engine = Engine::open(config, deps).await.expect("opens");
    let state_machine = machine(
        json!({"StartAt": "A", "States": {"A": with(task("echo"), json!({"End": true}))}}),
        Kind::Standard,
    );
    let began = Instant::now();
    let clients = (0..64).map(|_| {
        let (engine, state_machine) = (engine.clone(), state_machine.clone());
        tokio::spawn(async move {
            for _ in 0..40 {
                let started = engine.start_execution(request(&state_machine, "{}")).await.expect("starts");
                let ended = engine.wait(&started.execution_arn).await.expect("there");
                assert_eq!(ended.status, Status::Succeeded);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("runs");
    }
    let each_second = 64.0 * 40.0 / began.elapsed().as_secs_f64();
    eprintln!("{each_second:.0} durable executions/s of one step, 64 clients");
    assert!(each_second > 100.0, "{each_second:.0}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleepers_cost_no_task() {
    let world = World::new().await;
    let state_machine = machine(
        json!({"StartAt": "A", "States": {"A": {"Type": "Wait", "Seconds": 60, "End": true}}}),
        Kind::Standard,
    );
    // Something under way keeps the virtual clock from jumping.
    let awake = world.engine.inner.busy();
    let tasks_before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let mut last = String::new();
    for _ in 0..5_000 {
        last = world.start(&state_machine, "{}").await;
    }
    let (executions, timers) = world.engine.load();
    assert_eq!((executions, timers), (5_000, 5_000));
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(tasks <= tasks_before + 4, "{tasks} tasks");
    drop(awake);
    assert_eq!(world.engine.wait(&last).await.expect("there").status, Status::Succeeded);
}

/// Prints what 100,000 sleepers leave in memory. `cargo nextest run --run-ignored only`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes a hundred thousand executions; run it to measure"]
async fn memory_of_sleepers() {
    let resident_kib = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("there");
        line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let config = Config { data_dir: Some(folder.path().to_owned()), ..Config::default() };
    let engine = Engine::open(config, deps(Arc::default(), Arc::default())).await.expect("opens");
    let state_machine = machine(
        json!({"StartAt": "A", "States": {"A": {"Type": "Wait", "Seconds": 86_400, "End": true}}}),
        Kind::Standard,
    );
    let _awake = engine.inner.busy();
    // Twice: the allocator keeps what the first hundred thousand left, so the
    // second show whether they really did leave it.
    for round in ["first", "second"] {
        let before = resident_kib();
        let clients = (0..64).map(|_| {
            let (engine, state_machine) = (engine.clone(), state_machine.clone());
            tokio::spawn(async move {
                for _ in 0..1_563 {
                    engine.start_execution(request(&state_machine, "{}")).await.expect("starts");
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.expect("runs");
        }
        let awake = resident_kib();
        let now_ms = engine.inner.now_ms();
        engine.inner.deps.clock.sleep_until(now_ms + 10_000).await;
        let asleep = engine.inner.sleep_round();
        eprintln!("the {round} {asleep} sleepers: {before} KiB before them, {awake} KiB with them in memory");
        assert_eq!(engine.load().0, 0);
        assert!(asleep >= 100_000);
    }
}
