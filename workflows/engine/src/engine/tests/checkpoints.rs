//! Checkpoints: what is computed again after them is the same, and little.

use std::sync::atomic::Ordering;

use super::watched::Watched;
use super::*;
use mayfly_workflows_journal::{Batch, JournalChange, SqliteJournal};
use mayfly_workflows_machine::Machine;

/// Calls a function until it has counted up, and then one that never answers.
fn counting(rounds: u64) -> serde_json::Value {
    json!({"QueryLanguage": "JSONata", "StartAt": "Begin", "States": {
        "Begin": {"Type": "Pass", "Assign": {"n": 0, "text": "ä\u{1}\"", "sum": 0.5}, "Next": "Call"},
        "Call": {"Type": "Task", "Resource": "arn:aws:lambda:us-east-1:000000000000:function:echo",
            "Arguments": "{% $n %}", "Assign": {"n": "{% $states.result + 1 %}", "sum": "{% $sum + 1 %}"},
            "Next": "More"},
        "More": {"Type": "Choice", "Default": "Stop",
            "Choices": [{"Condition": format!("{{% $n < {rounds} %}}"), "Next": "Call"}]},
        "Stop": {"Type": "Task", "Resource": "arn:aws:lambda:us-east-1:000000000000:function:never", "End": true}}})
}

/// Runs until everything but the last call is done.
async fn counted(world: &TestEngine, rounds: u64) -> ExecutionArn {
    let arn = world.start(&machine(counting(rounds), StateMachineType::Standard), "{}").await;
    let stops = || world.functions.calls.lock().last().is_some_and(|(name, _)| name == "never");
    until("the last function is called", stops).await;
    arn
}

/// Resumes an execution of `rounds` rounds; returns the number of read records, and the duration.
async fn resumed(rounds: u64, checkpoint_records: u64) -> (u64, std::time::Duration) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.db");
    let journal: Arc<dyn Journal> = Arc::new(SqliteJournal::open(&path).expect("opens"));
    let first = TestEngine::checkpointing(journal.clone(), Arc::default(), checkpoint_records).await;
    counted(&first, rounds).await;
    first.engine.shutdown().await;
    drop(first);
    let watched = Arc::new(Watched::new(Arc::new(SqliteJournal::open(&path).expect("opens")), Some));
    let second = TestEngine::checkpointing(watched.clone(), Arc::default(), checkpoint_records).await;
    let begun = std::time::Instant::now();
    assert_eq!(second.engine.resume().await.expect("resumes"), 1);
    (watched.records_read.load(Ordering::Relaxed), begun.elapsed())
}

#[tokio::test(flavor = "multi_thread")]
async fn resuming_reads_no_more_than_what_came_after() {
    // `MAYFLY_RECORDS=100000` measures a long one.
    let rounds = std::env::var("MAYFLY_RECORDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3_500);
    let (all, whole) = resumed(rounds, u64::MAX).await;
    let (few, part) = resumed(rounds, 1_000).await;
    eprintln!(
        "{rounds} records: resumed in {whole:?} without checkpoints, in {part:?} with them ({few} records read)"
    );
    assert_eq!(all, rounds);
    assert_eq!(few, rounds % 1_000, "only what came after the last checkpoint");
}

#[tokio::test]
async fn a_checkpoint_is_the_machine() {
    let journal = Arc::new(MemoryJournal::default());
    let world = TestEngine::checkpointing(journal.clone(), Arc::default(), 7).await;
    let arn = counted(&world, 40).await;
    let row = journal.execution_by_arn(&arn).expect("read").expect("there");
    let (seq, _) = journal.checkpoint(row.id).expect("read").expect("there");
    assert_eq!(seq, 35);
    let inner = &world.engine.inner;
    let state_machine = inner.definitions.get(row.machine).expect("there");
    let (from_checkpoint, last, _) = inner.replay(&row, &state_machine, false).expect("replays");
    let (from_start, _, events) = inner.replay(&row, &state_machine, true).expect("replays");
    assert_eq!(last, 40);
    assert_eq!(format!("{from_checkpoint:?}"), format!("{from_start:?}"), "{} events", events.len());
}

#[tokio::test]
async fn a_checkpoint_keeps_the_state_that_a_redrive_resumes() {
    let journal = Arc::new(MemoryJournal::default());
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let failing =
        json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "Next": "F"}, "F": {"Type": "Fail"}}});
    let arn = world.start(&machine(failing, StateMachineType::Standard), "{}").await;
    world.engine.wait(&arn).await.expect("read").expect("there");
    let row = journal.execution_by_arn(&arn).expect("read").expect("there");
    let state_machine = world.engine.inner.definitions.get(row.machine).expect("there");
    let (failed, _, _) = world.engine.inner.replay(&row, &state_machine, false).expect("replays");
    assert!(failed.can_redrive(), "{failed:?}");
    let body = String::from_utf8(failed.checkpoint().expect("written")).expect("text");
    // Builds between two renames wrote the field under another name.
    for body in [body.clone(), body.replace("\"failed_in\"", "\"failed_snapshot\"")] {
        let facts = failed.facts().clone();
        let read = Machine::from_checkpoint(facts, state_machine.definition.clone(), body.as_bytes());
        assert_eq!(format!("{:?}", read.expect("read")), format!("{failed:?}"));
    }
    assert!(body.contains("\"failed_in\":{\"threads\""), "the stored form: {body}");
}

#[tokio::test]
async fn a_damaged_checkpoint_is_left_aside() {
    let journal = Arc::new(MemoryJournal::default());
    let world = TestEngine::checkpointing(journal.clone(), Arc::default(), 7).await;
    let arn = counted(&world, 20).await;
    let row = journal.execution_by_arn(&arn).expect("read").expect("there");
    let damaged = JournalChange::Checkpoint { execution: row.id, seq: 14, body: b"{\"form\":1".to_vec() };
    journal.write(Batch { changes: vec![damaged], done: Box::new(|_| ()) }).expect("written");
    let state_machine = world.engine.inner.definitions.get(row.machine).expect("there");
    let (_, last, _) = world.engine.inner.replay(&row, &state_machine, false).expect("replays");
    assert_eq!(last, 20, "all records are read");
}

#[tokio::test]
async fn old_executions_are_forgotten_and_their_names_free() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.db");
    let journal: Arc<dyn Journal> = Arc::new(SqliteJournal::open(&path).expect("opens"));
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let large = format!("\"{}\"", "x".repeat(5_000));
    let passing = machine(
        json!({"StartAt": "A", "States": {"A": with(task("echo"), json!({"End": true}))}}),
        StateMachineType::Standard,
    );
    let old = world.start(&passing, &large).await;
    world.engine.wait(&old).await.expect("read").expect("there");
    let digest = mayfly_workflows_language::execution::Digest::of(large.as_bytes());
    // Ninety days pass, with an execution that still runs and one that ends only now.
    let waiting = machine(
        json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 7_776_060, "End": true}}}),
        StateMachineType::Standard,
    );
    let awake = world.engine.inner.busy();
    let late = world.start(&waiting, "{}").await;
    assert_eq!(world.engine.delete_expired().await.expect("written"), 0, "nothing is old yet");
    drop(awake);
    world.engine.wait(&late).await.expect("read").expect("there");
    assert!(journal.part(&digest).expect("read").is_some());
    assert_eq!(world.engine.delete_expired().await.expect("written"), 1);
    assert!(world.engine.describe(&old).await.expect("read").is_none());
    assert!(world.engine.describe(&late).await.expect("read").is_some());
    assert!(journal.part(&digest).expect("read").is_none(), "its payload went with it");
    let definition = world.engine.inner.definitions.digest_of(&passing);
    assert!(journal.machine(&definition).expect("read").is_none(), "so did its definition");
    let kept = world.engine.inner.definitions.digest_of(&waiting);
    assert!(journal.machine(&kept).expect("read").is_some(), "one that another has stays");
    // After a new start it is written again: the next process that opens the journal finds it.
    let again = world.start(&passing, "2").await;
    world.engine.wait(&again).await.expect("read").expect("there");
    assert!(journal.machine(&definition).expect("read").is_some());
}

#[tokio::test]
async fn what_is_being_taken_up_again_is_not_forgotten() {
    let journal = Arc::new(Watched::new(Arc::new(MemoryJournal::default()), Some));
    let limits = EngineLimits { retention: std::time::Duration::from_secs(60), ..EngineLimits::default() };
    let world = TestEngine::limited(journal.clone(), Arc::default(), limits).await;
    let never = machine(
        json!({"StartAt": "A", "States": {"A": with(task("never"), json!({"End": true}))}}),
        StateMachineType::Standard,
    );
    let arn = world.start(&never, "{}").await;
    world.engine.stop(&arn, None, None).await.expect("stops");
    let now_ms = world.engine.inner.now_ms();
    world.engine.inner.deps.clock.sleep_until(now_ms + 120_000).await;
    let (has_read, read) = std::sync::mpsc::channel();
    let (may_go_on, goes_on) = std::sync::mpsc::channel();
    *journal.read.lock() = Some(Box::new(move || {
        has_read.send(()).expect("somebody waits");
        goes_on.recv().expect("told");
    }));
    let (engine, wanted) = (world.engine.clone(), arn.clone());
    let redriven = tokio::spawn(async move { engine.redrive(&wanted, None).await });
    until("its records are read", || read.try_recv().is_ok()).await;
    let engine = world.engine.clone();
    let forgets = tokio::spawn(async move { engine.delete_expired().await });
    // A waiting writer blocks new readers.
    let waits = || world.engine.inner.retention_lock.try_read().is_err();
    until("forgetting waits for what is taken up", waits).await;
    may_go_on.send(()).expect("it waits");
    redriven.await.expect("runs").expect("goes on");
    assert_eq!(forgets.await.expect("runs").expect("written"), 0);
    assert_eq!(
        journal.execution_by_arn(&arn).expect("read").expect("it is kept").outcome.status,
        RunStatus::Running
    );
}
