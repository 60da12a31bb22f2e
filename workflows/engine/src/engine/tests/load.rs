//! Many at once: all come to their end, and those that sleep cost no task.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn express_executions() {
    let world = World::new().await;
    let mut states = serde_json::Map::new();
    for n in 0..10 {
        states.insert(format!("S{n}"), json!({"Type": "Pass", "Next": format!("S{}", n + 1)}));
    }
    states.insert("S10".to_owned(), json!({"Type": "Succeed"}));
    let state_machine = machine(json!({"StartAt": "S0", "States": states}), Kind::Express);
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
