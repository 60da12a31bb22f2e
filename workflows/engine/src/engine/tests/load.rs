//! Many at once: all come to their end, and those that sleep cost no task.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn express_executions() {
    let world = TestEngine::new().await;
    let mut states = serde_json::Map::new();
    for n in 0..10 {
        states.insert(format!("S{n}"), json!({"Type": "Pass", "Next": format!("S{}", n + 1)}));
    }
    states.insert("S10".to_owned(), json!({"Type": "Succeed"}));
    let state_machine = machine(json!({"StartAt": "S0", "States": states}), StateMachineType::Express);
    let clients = (0..16).map(|_| {
        let (engine, state_machine) = (world.engine.clone(), state_machine.clone());
        tokio::spawn(async move {
            for _ in 0..200 {
                let ended = engine.start_sync(request(&state_machine, "{\"k\":1}")).await.expect("runs");
                assert_eq!(ended.status, RunStatus::Succeeded);
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
    let deps = EngineDeps { clock: Arc::new(crate::timers::SystemClock), ..deps(Arc::default()) };
    let opened = Engine::open(config, deps).await.expect("opens");
    let engine = opened.start(Arc::<Scripted>::default(), Arc::new(NoIntegrations));
    let state_machine = machine(
        json!({"StartAt": "A", "States": {"A": with(task("echo"), json!({"End": true}))}}),
        StateMachineType::Standard,
    );
    let clients = (0..64).map(|_| {
        let (engine, state_machine) = (engine.clone(), state_machine.clone());
        tokio::spawn(async move {
            for _ in 0..40 {
                let started = engine.start_execution(request(&state_machine, "{}")).await.expect("starts");
                let ended = engine.wait(&started.execution_arn).await.expect("read").expect("there");
                assert_eq!(ended.status, RunStatus::Succeeded);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("runs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleepers_cost_no_task() {
    let world = TestEngine::new().await;
    let state_machine = machine(
        json!({"StartAt": "A", "States": {"A": {"Type": "Wait", "Seconds": 60, "End": true}}}),
        StateMachineType::Standard,
    );
    // Something under way keeps the virtual clock from jumping.
    let awake = world.engine.inner.busy();
    let tasks_before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let mut last = None;
    for _ in 0..5_000 {
        last = Some(world.start(&state_machine, "{}").await);
    }
    let (executions, timers) = world.engine.load();
    assert_eq!((executions, timers), (5_000, 5_000));
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(tasks <= tasks_before + 4, "{tasks} tasks");
    drop(awake);
    assert_eq!(
        world.engine.wait(&last.expect("one was started")).await.expect("read").expect("there").status,
        RunStatus::Succeeded
    );
}

fn each_of(items: serde_json::Value) -> serde_json::Value {
    json!({"StartAt": "M", "States": {"M": {"Type": "Map", "End": true, "Items": items, "QueryLanguage": "JSONata",
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}}}}})
}

#[tokio::test]
async fn children_wait_for_a_place_and_do_not_fail_for_want_of_one() {
    // The parent has the only place.
    let limits = EngineLimits { open_executions: 1, ..EngineLimits::default() };
    let world = TestEngine::limited(Arc::new(MemoryJournal::default()), Arc::default(), limits).await;
    let (ended, _) = world.run(each_of(json!([1, 2, 3, 4])), "{}").await;
    assert_eq!((ended.output.as_deref(), ended.cause), (Some("[1,2,3,4]"), None));
    assert_eq!(world.engine.inner.open.count(), 0);
    // A caller from outside gets the error.
    let holder = machine(
        json!({"StartAt": "A", "States": {"A": {"Type": "Wait", "Seconds": 9, "End": true}}}),
        StateMachineType::Standard,
    );
    let _still = world.engine.inner.busy();
    world.start(&holder, "{}").await;
    let refused = world.engine.start_execution(request(&holder, "{}")).await;
    assert!(matches!(refused, Err(StartError::TooMany { limit: 1 })), "{refused:?}");
}

#[tokio::test]
async fn a_child_refused_by_a_shutdown_begins_after_it() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let engine: Arc<std::sync::OnceLock<Engine>> = Arc::default();
    let closes = engine.clone();
    // The engine closes between the parent's start and the children's.
    let watched = super::watched::Watched::new(journal.clone(), move |batch| {
        if let Some(engine) = closes.get() {
            engine.inner.shutdown.close();
        }
        Some(batch)
    });
    let first = TestEngine::on(Arc::new(watched), Arc::default()).await;
    assert!(engine.set(first.engine.clone()).is_ok());
    let arn = first.start(&machine(each_of(json!([1, 2])), StateMachineType::Standard), "{}").await;
    first.settled().await;
    let second = TestEngine::on(journal, Arc::default()).await;
    second.engine.resume().await.expect("resumes");
    let ended = second.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!((ended.output.as_deref(), ended.cause), (Some("[1,2]"), None));
}

#[tokio::test]
async fn a_map_run_is_updated_before_its_execution_is_resumed() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let mut definition = each_of(json!([1, 2, 3]));
    definition["States"]["M"]["MaxConcurrency"] = json!(1);
    definition["States"]["M"]["ItemProcessor"]["States"]["A"] = with(task("never"), json!({"End": true}));
    let first = TestEngine::on(journal.clone(), Arc::default()).await;
    let arn = first.start(&machine(definition, StateMachineType::Standard), "{}").await;
    let running = |runs: Option<Vec<MapRunDescription>>| {
        let run = runs.and_then(|mut runs| runs.pop());
        run.map(|run| (run.map_run_arn, run.max_concurrency, run.execution_counts.running))
    };
    let runs = first.engine.list_map_runs(&arn).await.expect("read");
    let (run, max_concurrency, running_children) = running(runs).expect("one");
    assert_eq!((max_concurrency, running_children), (1, 1));
    first.engine.begin_shutdown();

    let second = TestEngine::on(journal, Arc::default()).await;
    second.engine.begin_resume().await.expect("read");
    let update = MapRunUpdate { max_concurrency: Some(3), ..MapRunUpdate::default() };
    second.engine.update_map_run(&run, update).await.expect("updated");
    second.engine.finish_resume().await.expect("resumes");
    let runs = second.engine.list_map_runs(&arn).await.expect("read");
    assert_eq!(running(runs), Some((run, 3, 3)));
}
