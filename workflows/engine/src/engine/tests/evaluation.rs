//! Expressions that take seconds do not delay other executions.

use std::time::Instant;

use super::*;
use crate::timers::SystemClock;
use mayfly_workflows_journal::SqliteJournal;

/// Longer than any answer may take that waits for no expression; far shorter than the time limit of an expression.
const PROMPT: Duration = Duration::from_millis(1500);

/// Runs until the evaluator's time limit.
const ENDLESS: &str = "{% ($f := function($n) { $n < 0 ? 0 : $f($n + 1 - 1) }; $f(1)) %}";

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
    let deps = EngineDeps { clock: Arc::new(SystemClock), ..deps(Arc::default(), Arc::default()) };
    let engine = opened(Config::default(), deps, journal).await;
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
    let deps = EngineDeps { clock: Arc::new(SystemClock), ..deps(Arc::default(), Arc::default()) };
    let limits = EngineLimits { idle_in_memory: Duration::ZERO, ..EngineLimits::default() };
    let engine = opened(Config { limits, ..Config::default() }, deps, journal).await;
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
