//! Expressions that take seconds do not delay other executions.

use std::time::Instant;

use super::watched::Watched;
use super::*;
use crate::timers::SystemClock;
use mayfly_workflows_journal::{JournalChange, SqliteJournal};
use mayfly_workflows_machine::{EffectId, Token};

/// Longer than any answer may take that waits for no expression; far shorter than the time limit of an expression.
const PROMPT: Duration = Duration::from_millis(1500);

/// Runs until the evaluator's time limit.
const ENDLESS: &str = "{% ($f := function($n) { $n < 0 ? 0 : $f($n + 1 - 1) }; $f(1)) %}";

/// Not light, and short.
const SHORT: &str = "{% $sum($map([1..4], function($n) { $n * 2 })) %}";

/// A state machine of this name whose first state evaluates.
fn evaluates(name: &str, expression: &str, kind: StateMachineType) -> Arc<StartedMachine> {
    let definition = json!({"QueryLanguage": "JSONata", "StartAt": "E", "States": {
        "E": {"Type": "Pass", "Output": expression, "End": true}}});
    let arn = format!("arn:aws:states:us-east-1:000000000000:stateMachine:{name}");
    let arn = StateMachineArn::from_trusted(arn);
    Arc::new(StartedMachine {
        arn,
        name: name.to_owned(),
        ..StartedMachine::clone(&machine(definition, kind))
    })
}

async fn in_real_time(functions: Arc<Scripted>) -> Engine {
    let deps = EngineDeps { clock: Arc::new(SystemClock), ..deps(Arc::default()) };
    opened(Config::default(), deps, functions, Arc::new(MemoryJournal::default())).await
}

/// The number of these executions with this status.
async fn count(engine: &Engine, arns: &[ExecutionArn], status: RunStatus) -> usize {
    let mut count = 0;
    for arn in arns {
        count += usize::from(engine.describe(arn).await.expect("read").expect("there").status == status);
    }
    count
}

/// Waits a second, then evaluates for ever. State names end in `name`.
fn endless(name: &str) -> serde_json::Value {
    let (wait, spin) = (format!("Wait{name}"), format!("Spin{name}"));
    json!({"StartAt": wait, "States": {
        wait.as_str(): {"Type": "Wait", "Seconds": 1, "Next": spin},
        spin.as_str(): {"Type": "Pass", "Output": ENDLESS, "End": true}}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_expressions_do_not_delay_other_executions() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal: Arc<dyn Journal> =
        Arc::new(SqliteJournal::open(&folder.path().join("journal.db")).expect("a journal"));
    let deps = EngineDeps { clock: Arc::new(SystemClock), ..deps(Arc::default()) };
    let engine = opened(Config::default(), deps, Arc::default(), journal).await;
    let alone = with(endless(""), json!({"QueryLanguage": "JSONata"}));
    let alone = machine(alone, StateMachineType::Standard);
    // Two branches each: the second event of an execution comes while the first one's expression runs.
    let both = json!({"QueryLanguage": "JSONata", "StartAt": "P", "States": {"P": {"Type": "Parallel", "End": true,
        "Branches": [endless("A"), endless("B")]}}});
    let both = machine(both, StateMachineType::Standard);
    let mut runaways = Vec::new();
    for machine in [&alone, &both].into_iter().cycle().take(6) {
        runaways.push(engine.start_execution(request(machine, "{}")).await.expect("starts").execution_arn);
    }
    let wait = json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 2, "End": true}}});
    let wait = machine(wait, StateMachineType::Standard);
    // The timer of an execution with JSONata is delivered by the threads that also deliver those of the runaways.
    let evaluates = json!({"QueryLanguage": "JSONata", "StartAt": "W", "States": {
        "W": {"Type": "Wait", "Seconds": 2, "Next": "E"},
        "E": {"Type": "Pass", "Output": "{% 40 + 2 %}", "End": true}}});
    let evaluates = machine(evaluates, StateMachineType::Standard);
    let began = Instant::now();
    let mut waiting = Vec::new();
    for machine in [&wait, &evaluates] {
        waiting.push(engine.start_execution(request(machine, "{}")).await.expect("starts").execution_arn);
    }
    for arn in &waiting {
        let ended = engine.wait(arn).await.expect("read").expect("there");
        assert_eq!(ended.status, RunStatus::Succeeded);
        let late = began.elapsed().saturating_sub(Duration::from_secs(2));
        assert!(late < PROMPT, "a timer was {late:?} late");
    }

    // Starts are answered, and descriptions, also of executions whose expressions are being evaluated.
    let began = Instant::now();
    let pass = json!({"StartAt": "S", "States": {"S": {"Type": "Succeed"}}});
    let pass = machine(pass, StateMachineType::Standard);
    let started = engine.start_execution(request(&pass, "{}")).await.expect("starts").execution_arn;
    engine.wait(&started).await.expect("read").expect("there");
    assert!(began.elapsed() < PROMPT, "a start took {:?}", began.elapsed());
    for arn in &runaways {
        let began = Instant::now();
        engine.describe(arn).await.expect("read").expect("there");
        assert!(began.elapsed() < PROMPT, "a description took {:?}", began.elapsed());
    }
    for arn in &runaways {
        let ended = engine.wait(arn).await.expect("read").expect("there");
        assert_eq!(ended.status, RunStatus::Failed);
        assert_eq!(ended.error.as_deref(), Some("States.QueryEvaluationError"));
    }
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_expression_does_not_delay_evicted_executions_of_the_same_instant() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let deps = EngineDeps { clock: Arc::new(SystemClock), ..deps(Arc::default()) };
    let limits = EngineLimits { idle_in_memory: Duration::ZERO, ..EngineLimits::default() };
    let engine = opened(Config { limits, ..Config::default() }, deps, Arc::default(), journal).await;
    // Timestamps count in whole seconds.
    let due_ms = (engine.inner.now_ms() / 1_000 + 4) * 1_000;
    let waits = |next: serde_json::Value| {
        let wait = format!("{{% $fromMillis({due_ms}) %}}");
        let definition = json!({"QueryLanguage": "JSONata", "StartAt": "W", "States": {
            "W": {"Type": "Wait", "Timestamp": wait, "Next": "N"}, "N": next}});
        machine(definition, StateMachineType::Standard)
    };
    // Timers of one instant are delivered in the order of the starts.
    let endless = waits(json!({"Type": "Pass", "Output": ENDLESS, "End": true}));
    engine.start_execution(request(&endless, "{}")).await.expect("starts");
    let short = waits(json!({"Type": "Succeed"}));
    let mut others = Vec::new();
    for _ in 0..50 {
        others.push(engine.start_execution(request(&short, "{}")).await.expect("starts").execution_arn);
    }
    until("all are evicted", || {
        engine.inner.evict_round();
        engine.load() == (0, 51)
    })
    .await;
    for arn in &others {
        let ended = engine.wait(arn).await.expect("read").expect("there");
        assert_eq!(ended.status, RunStatus::Succeeded);
        let late_ms = ended.stop_date.expect("ended").as_millisecond() - due_ms;
        assert!(u128::try_from(late_ms).expect("late") < PROMPT.as_millis(), "{late_ms} ms late");
    }
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runaway_expressions_delay_neither_starts_nor_timers_nor_other_state_machines() {
    let engine = in_real_time(Arc::default()).await;
    let standard = StateMachineType::Standard;
    let (endless, other) = (evaluates("endless", ENDLESS, standard), evaluates("other", SHORT, standard));
    let wait = json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 1, "End": true}}});
    let wait = machine(wait, standard);
    let (mut runaways, mut starts) = (Vec::new(), Vec::new());
    for _ in 0..50 {
        let began = Instant::now();
        runaways.push(engine.start_execution(request(&endless, "{}")).await.expect("starts").execution_arn);
        starts.push(began.elapsed());
    }
    // The starts were answered before the first evaluation ended.
    assert_eq!(count(&engine, &runaways, RunStatus::Running).await, 50);
    starts.sort_unstable();
    assert!(starts[25] < PROMPT, "a start took {:?}", starts[25]);

    let waits = engine.start_execution(request(&wait, "{}")).await.expect("starts").execution_arn;
    let short = engine.start_execution(request(&other, "{}")).await.expect("starts").execution_arn;
    let ended = engine.wait(&waits).await.expect("read").expect("there");
    let took_ms = ended.stop_date.expect("ended").as_millisecond() - ended.start_date.as_millisecond();
    assert!(u128::try_from(took_ms).expect("later") < 1_000 + PROMPT.as_millis(), "{took_ms} ms");
    let mut descriptions = Vec::new();
    for arn in &runaways {
        let began = Instant::now();
        engine.describe(arn).await.expect("read").expect("there");
        descriptions.push(began.elapsed());
    }
    descriptions.sort_unstable();
    assert!(descriptions[25] < PROMPT, "a description took {:?}", descriptions[25]);

    // The other state machine's expression had its turn between the runaways.
    let ended = engine.wait(&short).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("20")));
    let running = count(&engine, &runaways, RunStatus::Running).await;
    assert!(running >= 40, "only {running} runaways were left");

    // Those without a turn are stopped at once, while others are evaluated.
    let mut stops: futures::stream::FuturesUnordered<_> =
        runaways.iter().map(|arn| engine.stop(arn, None, None)).collect();
    for _ in 0..25 {
        stops.next().await.expect("there").expect("stops");
    }
    assert!(
        count(&engine, &runaways, RunStatus::Running).await > 0,
        "the first stops wait for no evaluation"
    );
    while let Some(stopped) = stops.next().await {
        stopped.expect("stops");
    }
    let mut failed = 0;
    for arn in &runaways {
        // A stop of an execution that has just failed may be answered before the failure is durable.
        let ended = engine.wait(arn).await.expect("read").expect("there");
        if ended.status != RunStatus::Aborted {
            assert_eq!(ended.status, RunStatus::Failed);
            assert_eq!(ended.error.as_deref(), Some("States.QueryEvaluationError"));
            failed += 1;
        }
    }
    assert!((1..=25).contains(&failed), "{failed} failed");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_for_an_evaluation_holds_no_thread() {
    let functions: Arc<Scripted> = Arc::default();
    let engine = in_real_time(functions.clone()).await;
    let standard = StateMachineType::Standard;
    // More starts, and more heartbeats, than the runtime has threads that may block.
    let many = 600;
    let endless = evaluates("endless", ENDLESS, standard);
    let mut runaways = Vec::new();
    for _ in 0..many {
        runaways.push(engine.start_execution(request(&endless, "{}")).await.expect("starts").execution_arn);
    }
    let token = json!({"StartAt": "T", "States": {"T": {"Type": "Task", "End": true, "HeartbeatSeconds": 100,
        "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken",
        "Arguments": {"FunctionName": "echo", "Payload": "{% $states.context.Task.Token %}"}}}});
    let spin = json!({"StartAt": "W", "States": {
        "W": {"Type": "Wait", "Seconds": 1, "Next": "S"},
        "S": {"Type": "Pass", "Output": ENDLESS, "End": true}}});
    let both = json!({"QueryLanguage": "JSONata", "StartAt": "P", "States": {
        "P": {"Type": "Parallel", "Branches": [token, spin], "End": true}}});
    let evaluated = engine.start_execution(request(&machine(both, standard), "{}")).await.expect("starts");
    let running = engine.inner.live.by_arn(&evaluated.execution_arn).expect("in memory");
    until("the function has the token", || !functions.calls.lock().is_empty()).await;
    // Other events take the machine for an instant.
    let mut looks = 0;
    let evaluates = || {
        looks = if running.cell.lock().machine.is_none() { looks + 1 } else { 0 };
        looks > 100
    };
    until("the expression is evaluated", evaluates).await;
    let token: String = serde_json::from_str(&functions.calls.lock()[0].1).expect("a string");
    let heartbeats = (0..many).map(|_| {
        let (engine, token) = (engine.clone(), token.clone());
        tokio::spawn(async move { engine.send_task_heartbeat(&token).await })
    });
    let heartbeats: Vec<_> = heartbeats.collect();
    until("all wait", || running.cell.lock().looks.len() == many).await;
    // An execution with an effect and a read of the journal needs a thread that may block.
    let echo = json!({"StartAt": "A", "States": {"A": with(task("echo"), json!({"End": true}))}});
    let echo = engine.start_execution(request(&machine(echo, standard), "{}")).await.expect("starts");
    let ended = engine.wait(&echo.execution_arn).await.expect("read").expect("there");
    assert_eq!(ended.status, RunStatus::Succeeded);
    engine.events(&echo.execution_arn).await.expect("read").expect("there");
    assert!(heartbeats.iter().all(|heartbeat| !heartbeat.is_finished()), "they wait for the evaluation");
    // The expression fails the state that has the token.
    for heartbeat in heartbeats {
        assert_eq!(heartbeat.await.expect("no panic"), Err(TokenError::TimedOut));
    }
    let stops = runaways.iter().map(|arn| engine.stop(arn, None, None));
    futures::future::try_join_all(stops).await.expect("stop");
    engine.shutdown().await;
}

#[tokio::test]
async fn a_start_that_is_durable_is_evaluated_after_a_crash() {
    let short = evaluates("short", SHORT, StateMachineType::Standard);
    let whole = TestEngine::new().await;
    let arn = whole.start(&short, "{}").await;
    whole.engine.wait(&arn).await.expect("read").expect("there");
    let expected = whole.lines(&arn).await;

    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    // Only the start is written.
    let batches = std::sync::atomic::AtomicUsize::new(0);
    let killed = Watched::new(journal.clone(), move |batch| {
        if batches.fetch_add(1, std::sync::atomic::Ordering::AcqRel) == 0 {
            return Some(batch);
        }
        std::mem::forget(batch.done);
        None
    });
    let first = TestEngine::on(Arc::new(killed), Arc::default()).await;
    let arn = first.start(&short, "{}").await;
    assert_eq!(first.lines(&arn).await.len(), 1, "no state was entered");
    let second = TestEngine::on(journal, Arc::default()).await;
    second.engine.resume().await.expect("resumes");
    let ended = second.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("20")));
    assert_eq!(second.lines(&arn).await, expected);
}

#[tokio::test]
async fn a_synchronous_execution_returns_the_value_of_an_expression_that_may_take_long() {
    let world = TestEngine::new().await;
    let short = evaluates("short", SHORT, StateMachineType::Express);
    let ended = world.engine.start_sync(request(&short, "{}")).await.expect("runs");
    assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("20")));
}

/// A task that waits for a token, and then evaluates this expression.
fn token_then(expression: &str) -> serde_json::Value {
    json!({"QueryLanguage": "JSONata", "StartAt": "T", "States": {"T": {"Type": "Task", "End": true,
        "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken", "Output": expression,
        "Arguments": {"FunctionName": "echo", "Payload": {"token": "{% $states.context.Task.Token %}"}}}}})
}

/// The token of the execution's task, as soon as the task waits for it.
async fn token_of(engine: &Engine, arn: &ExecutionArn) -> String {
    let submitted = async {
        loop {
            let events = engine.events(arn).await.expect("read").expect("there");
            if events.iter().any(|event| event.kind == "TaskSubmitted") {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, submitted).await.expect("the task waits");
    let running = engine.inner.live.by_arn(arn).expect("in memory");
    let (id, seed) = {
        let cell = running.lock();
        (cell.row.id, cell.row.birth.seed)
    };
    // The first number is the effect's: the execution has no timer.
    Token::new(id, EffectId(1), &seed).to_text()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_and_a_redrive_are_answered_before_what_they_evaluate() {
    let engine = in_real_time(Arc::default()).await;
    let definition = machine(token_then(ENDLESS), StateMachineType::Standard);
    let arn = engine.start_execution(request(&definition, "{}")).await.expect("starts").execution_arn;
    let token = token_of(&engine, &arn).await;
    engine.send_task_success(&token, "1").await.expect("accepted");
    let status = engine.describe(&arn).await.expect("read").expect("there").status;
    assert_eq!(status, RunStatus::Running, "the evaluation has not ended");
    assert_eq!(engine.send_task_success(&token, "1").await, Err(TokenError::TimedOut), "it has ended");
    assert_eq!(engine.send_task_heartbeat(&token).await, Err(TokenError::TimedOut));
    let ended = engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.error.as_deref(), Some("States.QueryEvaluationError"));

    let spins = evaluates("spins", ENDLESS, StateMachineType::Standard);
    let arn = engine.start_execution(request(&spins, "{}")).await.expect("starts").execution_arn;
    engine.wait(&arn).await.expect("read").expect("there");
    engine.redrive(&arn, None).await.expect("redriven");
    let redriven = engine.describe(&arn).await.expect("read").expect("there");
    assert_eq!((redriven.status, redriven.redrive_count), (RunStatus::Running, 1));
    let ended = engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.status, RunStatus::Failed);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_report_that_is_durable_is_evaluated_after_a_crash() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    // Nothing is written after the report.
    let reported = std::sync::atomic::AtomicBool::new(false);
    let killed = Watched::new(journal.clone(), move |batch| {
        if reported.load(std::sync::atomic::Ordering::Acquire) {
            std::mem::forget(batch.done);
            return None;
        }
        let is_report = |change: &JournalChange| match change {
            JournalChange::Record { row, .. } => row.body.starts_with(b"{\"t\":\"reported\""),
            _ => false,
        };
        reported.store(batch.changes.iter().any(is_report), std::sync::atomic::Ordering::Release);
        Some(batch)
    });
    let definition = token_then("{% $sum($map([1..4], function($n) { $n * $states.result })) %}");
    let definition = machine(definition, StateMachineType::Standard);
    let first = TestEngine::on(Arc::new(killed), Arc::default()).await;
    let arn = first.start(&definition, "{}").await;
    let token = token_of(&first.engine, &arn).await;
    first.engine.send_task_success(&token, "3").await.expect("accepted");

    let second = TestEngine::on(journal, Arc::default()).await;
    second.engine.begin_resume().await.expect("read");
    let again = second.engine.send_task_success(&token, "4").await;
    assert_eq!(again, Err(TokenError::TimedOut), "the first report stays");
    second.engine.finish_resume().await.expect("resumes");
    let ended = second.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("30")));
}
