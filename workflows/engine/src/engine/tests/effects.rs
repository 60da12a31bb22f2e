//! Queued effects, and what happens to them when no state waits for them any more.

use super::watched::Watched;
use super::*;

/// Two tasks at the same time with capacity for one: the second is queued.
async fn one_in_line() -> (TestEngine, ExecutionArn) {
    let limits = EngineLimits { effects_per_execution: 1, ..EngineLimits::default() };
    let world = TestEngine::limited(Arc::new(MemoryJournal::default()), Arc::default(), limits).await;
    let branch =
        |name: &str| json!({"StartAt": name, "States": {name: with(task(name), json!({"End": true}))}});
    let definition = json!({"StartAt": "Both", "States": {
        "Both": {"Type": "Parallel", "End": true, "Branches": [branch("never"), branch("echo")]}}});
    let arn = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    until("the first is called", || !world.functions.calls.lock().is_empty()).await;
    (world, arn)
}

/// The functions that were called, after all work has settled.
async fn called(world: &TestEngine) -> Vec<String> {
    world.settled().await;
    world.functions.calls.lock().iter().map(|(name, _)| name.clone()).collect()
}

#[tokio::test]
async fn what_stood_in_line_when_its_execution_ended_is_not_begun() {
    let (world, arn) = one_in_line().await;
    world.engine.stop(&arn, None, None).await.expect("stops");
    assert_eq!(called(&world).await, ["never"]);
    // Its place is free again, in the whole and of the execution.
    let (ended, _) = world
        .run(
            json!({"StartAt": "T", "States": {
        "T": with(task("echo"), json!({"End": true}))}}),
            "1",
        )
        .await;
    assert_eq!(ended.output.as_deref(), Some("1"));
}

#[tokio::test]
async fn what_stood_in_line_at_a_shutdown_is_not_begun() {
    let (world, _) = one_in_line().await;
    world.engine.shutdown().await;
    assert_eq!(called(&world).await, ["never"]);
}

#[tokio::test]
async fn a_defect_in_an_effect_fails_its_task_and_nothing_else() {
    let world = TestEngine::new().await;
    let caught = with(
        task("panics"),
        json!({"Catch": [{"ErrorEquals": ["States.ALL"], "Next": "Rest"}], "Next": "Rest"}),
    );
    let definition = json!({"StartAt": "P", "States": {"P": caught, "Rest": {"Type": "Pass", "End": true}}});
    let run = world.run(definition, "{}");
    let (ended, _) = tokio::time::timeout(LONG, run).await.expect("it ends");
    assert_eq!(ended.status, RunStatus::Failed, "it is States.Runtime, which States.ALL does not catch");
    let cause = ended.cause.expect("a cause");
    assert!(cause.contains("a defect of the server: as the test wants it"), "{cause}");
    let (ended, _) = world
        .run(json!({"StartAt": "D", "States": {"D": with(task("double"), json!({"End": true}))}}), "4")
        .await;
    assert_eq!(ended.output.as_deref(), Some("8"));
}

#[tokio::test]
async fn a_function_that_cannot_be_called_yet_is_called_later() {
    let limits = EngineLimits { effects: 1, ..EngineLimits::default() };
    let world = TestEngine::limited(Arc::new(MemoryJournal::default()), Arc::default(), limits).await;
    let definition = json!({"StartAt": "T", "States": {"T": with(task("late"), json!({"End": true}))}});
    let (ended, lines) = world.run(definition, "{}").await;
    assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("null")), "{lines:?}");
    let calls: Vec<u32> = world.functions.keys.lock().values().copied().collect();
    assert_eq!(calls, [4], "each try has the same key");
    let scheduled = lines.iter().filter(|line| line.ends_with("LambdaFunctionScheduled")).count();
    assert_eq!(scheduled, 1, "{lines:?}");
}

#[tokio::test]
async fn a_failure_during_a_stop_is_no_outcome() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let first = TestEngine::on(journal.clone(), Arc::default()).await;
    let definition =
        json!({"StartAt": "T", "States": {"T": with(task("interrupted"), json!({"End": true}))}});
    let arn = first.start(&machine(definition, StateMachineType::Standard), "{}").await;
    until("the function was called", || !first.functions.calls.lock().is_empty()).await;
    first.engine.begin_shutdown();
    first.functions.interrupt.notify_one();
    first.settled().await;
    let second = TestEngine::on(journal, first.functions.clone()).await;
    second.engine.resume().await.expect("resumes");
    let ended = second.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.error), (RunStatus::Succeeded, None));
}

#[tokio::test]
async fn an_execution_that_is_needed_while_others_are_read_is_taken_up_once() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let first = TestEngine::on(journal.clone(), Arc::default()).await;
    let calls = json!({"StartAt": "T", "States": {"T": with(task("interrupted"), json!({"End": true}))}});
    let worker = "arn:aws:states:us-east-1:000000000000:activity:a";
    let waits = json!({"StartAt": "W", "States": {"W": {"Type": "Task", "Resource": worker, "End": true}}});
    let waiting = first.start(&machine(waits, StateMachineType::Standard), "{}").await;
    let calling = first.start(&machine(calls, StateMachineType::Standard), "{}").await;
    until("the function was called", || !first.functions.calls.lock().is_empty()).await;
    first.engine.begin_shutdown();
    first.functions.interrupt.notify_one();
    first.settled().await;
    let second = TestEngine::on(journal, first.functions.clone()).await;
    assert_eq!(second.engine.begin_resume().await.expect("resumes"), 2);
    let ended = second.engine.wait(&calling).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.error), (RunStatus::Succeeded, None));
    assert_eq!(second.engine.load(), (0, 0), "the other is not read yet");
    assert_eq!(second.engine.finish_resume().await.expect("resumes"), 0, "all can be read");
    assert_eq!(first.functions.calls.lock().len(), 2, "once in each life");
    assert_eq!(second.engine.load().0, 1, "the other is in memory");
    let described = second.engine.describe(&waiting).await.expect("read").expect("there");
    assert_eq!(described.status, RunStatus::Running);
}

#[tokio::test]
async fn an_execution_that_a_request_is_reading_while_others_are_read_is_taken_up() {
    let journal = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let first = TestEngine::on(journal.clone(), Arc::default()).await;
    let calls = json!({"StartAt": "T", "States": {"T": with(task("interrupted"), json!({"End": true}))}});
    let calling = first.start(&machine(calls, StateMachineType::Standard), "{}").await;
    // Read after `calling`, because it was started after it.
    let activity = "arn:aws:states:us-east-1:000000000000:activity:a";
    let waits = json!({"StartAt": "W", "States": {"W": {"Type": "Task", "Resource": activity, "End": true}}});
    first.start(&machine(waits, StateMachineType::Standard), "{}").await;
    until("the function was called", || !first.functions.calls.lock().is_empty()).await;
    first.engine.begin_shutdown();
    first.functions.interrupt.notify_one();
    first.settled().await;
    let second = TestEngine::on(journal.clone(), first.functions.clone()).await;
    assert_eq!(second.engine.begin_resume().await.expect("resumes"), 2);
    let (has_read, read) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel();
    *journal.read.lock() = Some(Box::new(move || {
        has_read.send(()).expect("the test receives");
        released.recv().expect("the test sends");
    }));
    let engine = second.engine.clone();
    let ends = tokio::spawn(async move { engine.wait(&calling).await });
    until("the request has read the records", || read.try_recv().is_ok()).await;
    let engine = second.engine.clone();
    let resumes = tokio::spawn(async move { engine.finish_resume().await });
    until("the execution after it is in memory", || second.engine.load().0 == 1).await;
    release.send(()).expect("the request waits");
    assert_eq!(resumes.await.expect("runs").expect("resumes"), 0, "all can be read");
    let ended = ends.await.expect("runs").expect("read").expect("there");
    assert_eq!((ended.status, ended.error), (RunStatus::Succeeded, None));
    assert_eq!(first.functions.calls.lock().len(), 2, "once in each life");
}

/// A service of jobs that tells of each when it has begun.
struct QuickJobs;

impl Integrations for QuickJobs {
    fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<serde_json::Value, InvokeError>> {
        Box::pin(async move {
            if let Some(submitted) = call.submitted {
                submitted.send(json!({"jobName": "j"})).await.expect("the executor listens");
            }
            Ok(json!({"exitCode": 0}))
        })
    }
}

#[tokio::test]
async fn a_job_that_has_begun_is_told() {
    let (functions, files): (Arc<Scripted>, Arc<Files>) = Default::default();
    let deps = EngineDeps {
        supports_integration: |resource| resource == "arn:aws:states:::job:run.sync",
        ..deps(files.clone())
    };
    let journal = Arc::new(MemoryJournal::default());
    let opened = Engine::with_journal(Config::default(), deps, journal).await.expect("opens");
    let engine = opened.start(functions.clone(), Arc::new(QuickJobs));
    let world = TestEngine { engine, functions, files };
    let definition = json!({"StartAt": "A", "States": {"A": {
        "Type": "Task", "Resource": "arn:aws:states:::job:run.sync",
        "Parameters": {"Component": "c"}, "End": true}}});
    let (ended, lines) = world.run(definition, "{}").await;
    assert_eq!(ended.output.as_deref(), Some(r#"{"exitCode":0}"#));
    assert_eq!(
        lines[2..6],
        ["3 2 TaskScheduled", "4 3 TaskStarted", "5 4 TaskSubmitted", "6 5 TaskSucceeded"]
    );
}

/// Integrations are made from the engine that they are given to; an execution that was started before waits for them.
#[tokio::test]
async fn tasks_wait_until_the_engine_is_started() {
    let functions: Arc<Scripted> = Arc::default();
    let deps = deps(Arc::default());
    let journal = Arc::new(MemoryJournal::default());
    let opened = Engine::with_journal(Config::default(), deps, journal).await.expect("opens");
    let definition = json!({"StartAt": "T", "States": {"T": with(task("echo"), json!({"End": true}))}});
    let machine = machine(definition, StateMachineType::Standard);
    let started = opened.engine().start_execution(request(&machine, "7")).await.expect("starts");
    assert!(functions.calls.lock().is_empty(), "no task is performed");
    let engine = opened.start(functions, Arc::new(NoIntegrations));
    let ended = engine.wait(&started.execution_arn).await.expect("read").expect("there");
    assert_eq!(ended.output.as_deref(), Some("7"));
}

/// Integrations may hold the engine, which must not keep both of them for ever.
#[tokio::test]
async fn a_shutdown_lets_go_of_integrations_that_hold_the_engine() {
    struct Holder(#[expect(dead_code, reason = "held, not used")] Engine);

    impl Integrations for Holder {
        fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<serde_json::Value, InvokeError>> {
            panic!("{} is not called", call.resource);
        }
    }

    let deps = deps(Arc::default());
    let journal = Arc::new(MemoryJournal::default());
    let opened = Engine::with_journal(Config::default(), deps, journal).await.expect("opens");
    let holder = Arc::new(Holder(opened.engine().clone()));
    let held = Arc::downgrade(&holder);
    let engine = opened.start(Arc::<Scripted>::default(), holder);
    assert!(held.upgrade().is_some());
    engine.shutdown().await;
    until("the integrations are dropped", || held.upgrade().is_none()).await;
}

/// Work that a worker took before a crash is not handed out again. Its heartbeats end it, and the state can retry it.
#[tokio::test]
async fn work_that_was_taken_before_a_crash_owes_its_heartbeats() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let first = TestEngine::on(journal.clone(), Arc::default()).await;
    // The clock of the process that crashes stands still.
    let _awake = first.engine.inner.busy();
    let activity = "arn:aws:states:us-east-1:000000000000:activity:a";
    let state = json!({"Type": "Task", "Resource": activity, "End": true, "TimeoutSeconds": 600,
        "HeartbeatSeconds": 9});
    let definition = json!({"StartAt": "A", "States": {"A": state}});
    let arn = first.start(&machine(definition, StateMachineType::Standard), "{}").await;
    first.engine.get_activity_task(&activity_arn(activity), None).await.expect("work");
    let second = TestEngine::on(journal, Arc::default()).await;
    second.engine.resume().await.expect("resumes");
    let ended = second.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.error.as_deref(), Some("States.Timeout"));
    let lasted = ended.stop_date.expect("ended").as_second() - ended.start_date.as_second();
    assert!((9..600).contains(&lasted), "{lasted} s");
}
