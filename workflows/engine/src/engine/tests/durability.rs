//! Killed at every record: the outcome and the history are the same, and no
//! effect is missing.

use std::sync::atomic::{AtomicBool, Ordering};

use super::watched::Watched;
use super::*;
use mayfly_workflows_journal::{JournalChange, JournalError, MemoryJournal};

/// A journal that accepts `left` batches with records and then none, as of a killed process.
fn killed(journal: Arc<dyn Journal>, left: u64, dead: Arc<tokio::sync::Notify>) -> Watched {
    let left = Mutex::new(left);
    Watched::new(journal, move |batch| {
        let mut left = left.lock();
        if *left == 0 {
            dead.notify_one();
            // Never acknowledged: the start has no answer.
            std::mem::forget(batch.done);
            return None;
        }
        *left -= 1;
        Some(batch)
    })
}

fn long_way() -> serde_json::Value {
    let double = || with(task("double"), json!({"End": true}));
    let branch = |state: serde_json::Value| json!({"StartAt": state["n"], "States": {state["n"].as_str().expect("named"): state["s"]}});
    json!({"StartAt": "One", "States": {
        "One": with(task("double"), json!({"Next": "Rest"})),
        "Rest": {"Type": "Wait", "Seconds": 30, "Next": "Both"},
        "Both": {"Type": "Parallel", "Next": "Each", "Branches": [
            branch(json!({"n": "L", "s": double()})), branch(json!({"n": "R", "s": double()}))]},
        "Each": {"Type": "Map", "MaxConcurrency": 1, "Next": "Far",
            "ItemProcessor": {"StartAt": "E", "States": {"E": double()}}},
        "Far": {"Type": "Map", "MaxConcurrency": 1, "Next": "Try", "ItemProcessor": {
            "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "F", "States": {"F": with(task("double"), json!({"End": true}))}}},
        "Try": with(task("fail"), json!({"End": true,
            "Retry": [{"ErrorEquals": ["Broken"], "MaxAttempts": 1}],
            "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": null, "Next": "Last"}]})),
        "Last": {"Type": "Pass", "End": true}}})
}

/// A journal in memory for each kill; asked twice for the same kill, the same journal.
fn in_memory() -> impl Fn(u64) -> Arc<dyn Journal> {
    let journals: Mutex<Vec<Arc<dyn Journal>>> = Mutex::default();
    move |left| {
        let mut journals = journals.lock();
        let at = usize::try_from(left).expect("few") - 1;
        if journals.len() == at {
            journals.push(Arc::new(MemoryJournal::default()));
        }
        journals[at].clone()
    }
}

/// One file for each kill, opened again by the next process.
fn in_files(folder: &std::path::Path) -> impl Fn(u64) -> Arc<dyn Journal> {
    let before: Mutex<Option<Arc<dyn Journal>>> = Mutex::default();
    move |left| {
        // The batches that the first process wrote are on disk; it writes no more.
        if let Some(before) = before.lock().take() {
            before.close();
        }
        let path = folder.join(format!("{left}.db"));
        let journal: Arc<dyn Journal> =
            Arc::new(mayfly_workflows_journal::SqliteJournal::open(&path).expect("opens"));
        *before.lock() = Some(journal.clone());
        journal
    }
}

#[tokio::test]
async fn killed_at_every_record_of_a_journal_in_memory() {
    killed_at_every_record(u64::MAX, in_memory()).await;
}

#[tokio::test]
async fn killed_at_every_record_of_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    killed_at_every_record(u64::MAX, in_files(folder.path())).await;
}

#[tokio::test]
async fn killed_at_every_record_with_a_checkpoint_after_each() {
    killed_at_every_record(1, in_memory()).await;
}

#[tokio::test]
async fn killed_at_every_record_of_a_file_with_checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    killed_at_every_record(3, in_files(folder.path())).await;
}

async fn killed_at_every_record(checkpoint_records: u64, journal: impl Fn(u64) -> Arc<dyn Journal>) {
    let whole = TestEngine::new().await;
    let machine = machine(long_way(), StateMachineType::Standard);
    let arn = whole.start(&machine, "1").await;
    let expected = whole.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(expected.output.as_deref(), Some("[16,16]"), "{:?}", expected.cause);
    let expected_lines = whole.lines(&arn).await;

    let mut kills = 0;
    for left in 1.. {
        let first_journal = journal(left);
        let dead = Arc::new(tokio::sync::Notify::new());
        let killed = killed(first_journal.clone(), left, dead.clone());
        let first = TestEngine::checkpointing(Arc::new(killed), Arc::default(), checkpoint_records).await;
        let arn = first.start(&machine, "1").await;
        let survived = tokio::select! {
            () = dead.notified() => false,
            _ = first.engine.wait(&arn) => true,
        };
        let functions = first.functions.clone();
        drop(first);
        if survived {
            break;
        }
        kills += 1;
        let second = TestEngine::checkpointing(journal(left), functions.clone(), checkpoint_records).await;
        second.engine.resume().await.expect("resumes");
        let ended = second.engine.wait(&arn).await.expect("read").expect("there");
        assert_eq!((ended.status, &ended.output), (expected.status, &expected.output), "killed after {left}");
        assert_eq!(second.lines(&arn).await, expected_lines, "killed after {left}");
        let keys = functions.keys.lock();
        assert_eq!(keys.len(), 1 + 2 + 2 + 2 + 2, "killed after {left}: as many effects as without the kill");
    }
    assert!(kills > 10, "{kills} kills");
}

#[tokio::test]
async fn a_batch_that_is_refused_is_not_acknowledged() {
    let journal = Arc::new(MemoryJournal::default());
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    journal.close();
    let definition = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}});
    let refused =
        world.engine.start_execution(request(&machine(definition, StateMachineType::Standard), "{}")).await;
    assert!(matches!(refused, Err(StartError::Journal(_))));
    assert_eq!(world.engine.load().0, 0, "nothing stays behind");
}

/// The caller may have stopped waiting: the name and the place among open executions are free again.
#[tokio::test]
async fn a_start_that_is_refused_leaves_nothing_behind() {
    let (held, refuse) = (Arc::new(Mutex::new(None)), Arc::new(AtomicBool::new(true)));
    let (hold, is_refusing) = (held.clone(), refuse.clone());
    let watched = Watched::new(Arc::new(MemoryJournal::default()), move |batch| {
        if !is_refusing.load(Ordering::Acquire) {
            return Some(batch);
        }
        *hold.lock() = Some(batch.done);
        None
    });
    let limits = EngineLimits { open_executions: 1, ..EngineLimits::default() };
    let world = TestEngine::limited(Arc::new(watched), Arc::default(), limits).await;
    let passes = machine(
        json!({"StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}}),
        StateMachineType::Standard,
    );
    let named = || StartRequest { name: Some("n".to_owned()), ..request(&passes, "{}") };
    {
        let mut start = std::pin::pin!(world.engine.start_execution(named()));
        tokio::select! {
            ended = &mut start => panic!("nothing is durable yet: {ended:?}"),
            () = until("the start is written", || held.lock().is_some()) => {}
        }
    }
    let done = held.lock().take().expect("the start was written");
    done(Err(JournalError::Full));
    refuse.store(false, Ordering::Release);
    let again = tokio::time::timeout(LONG, world.engine.start_execution(named())).await;
    let arn = again
        .expect("it does not wait for the first")
        .expect("there is room, and the name is free")
        .execution_arn;
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.status, RunStatus::Succeeded);
}

#[tokio::test]
async fn payloads_are_stored_once() {
    let parts: Arc<Mutex<Vec<mayfly_workflows_language::execution::Digest>>> = Arc::default();
    let seen = parts.clone();
    let journal = Watched::new(Arc::new(MemoryJournal::default()), move |batch| {
        let digests = batch.changes.iter().filter_map(|change| match change {
            JournalChange::Part { digest, .. } => Some(*digest),
            _ => None,
        });
        seen.lock().extend(digests);
        Some(batch)
    });
    let world = TestEngine::on(Arc::new(journal), Arc::default()).await;
    let text = format!("\"{}\"", "x".repeat(5_000));
    let definition = json!({"StartAt": "A", "States": {
        "A": with(task("echo"), json!({"Next": "B"})), "B": with(task("echo"), json!({"End": true}))}});
    let (ended, _) = world.run(definition, &text).await;
    assert_eq!(ended.output.as_deref(), Some(text.as_str()));
    let parts = parts.lock();
    assert!(parts.len() > 1);
    assert!(parts.iter().all(|digest| *digest == parts[0]), "input, results and output are one part");
}

#[tokio::test]
async fn the_same_start_again_is_not_acknowledged_before_the_first() {
    let inner: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let held: Arc<Mutex<Vec<mayfly_workflows_journal::Batch>>> = Arc::default();
    let holds = held.clone();
    let journal = Watched::new(inner.clone(), move |batch| {
        holds.lock().push(batch);
        None
    });
    let world = TestEngine::on(Arc::new(journal), Arc::default()).await;
    let waits = json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 60, "End": true}}});
    let machine = machine(waits, StateMachineType::Standard);
    let start = |name: &str| {
        let (engine, name) = (world.engine.clone(), Some(name.to_owned()));
        let request = StartRequest { name, ..request(&machine, "{}") };
        tokio::spawn(async move { engine.start_execution(request).await })
    };
    let _still = world.engine.inner.busy();
    for (name, is_written) in [("written", true), ("lost", false)] {
        let first = start(name);
        until("the start is written", || !held.lock().is_empty()).await;
        let second = start(name);
        let arn = format!("arn:aws:states:us-east-1:000000000000:execution:m:{name}");
        let arn = ExecutionArn::from_trusted(arn);
        let running = world.engine.inner.live.by_arn(&arn).expect("it is in memory");
        until("the second waits for the first", || running.cell.lock().begun.len() == 1).await;
        assert!(!second.is_finished() && !first.is_finished(), "nothing is durable yet");
        let batch = held.lock().pop().expect("held");
        match is_written {
            true => inner.write(batch).expect("written"),
            false => (batch.done)(Err(mayfly_workflows_journal::JournalError::Full)),
        }
        let (first, second) = (first.await.expect("runs"), second.await.expect("runs"));
        if is_written {
            assert_eq!(first.expect("starts").execution_arn, second.expect("the same").execution_arn);
        } else {
            assert!(matches!((first, second), (Err(StartError::Journal(_)), Err(StartError::Journal(_)))));
        }
    }
}

/// Computed again on a machine that is faster, slower or just as slow, an execution is the same.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_clock_ended_is_not_evaluated_again() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let for_ever = "{% ($f := function($x) { $f($x + 1) }; $f(1)) %}";
    let caught = json!([{"ErrorEquals": ["States.QueryEvaluationError"], "Next": "Last"}]);
    let definition = |field: &str| {
        let mut calls = json!({"Type": "Task", "End": true, "Catch": caught,
            "Resource": "arn:aws:lambda:us-east-1:000000000000:function:echo"});
        calls[field] = json!(for_ever);
        let last = json!({"Type": "Pass", "Output": "{% 40 + 2 %}", "End": true});
        json!({"QueryLanguage": "JSONata", "StartAt": "A", "States": {"A": calls, "Last": last}})
    };
    // One in its first step, one when a function has answered.
    let ends = ["Arguments", "Output"].map(|field| async {
        let arn = world.start(&machine(definition(field), StateMachineType::Standard), "{}").await;
        let ended = world.engine.wait(&arn).await.expect("read").expect("there");
        assert_eq!((ended.status, ended.output.as_deref()), (RunStatus::Succeeded, Some("42")));
        arn
    });
    for arn in futures::future::join_all(ends).await {
        // A replay has no time limit: an endless expression that is evaluated again does not end.
        let lines = tokio::time::timeout(LONG, world.lines(&arn)).await.expect("it is not evaluated again");
        assert!(lines.iter().any(|line| line.ends_with("EvaluationFailed")), "{lines:?}");
        assert!(lines.last().is_some_and(|line| line.ends_with("ExecutionSucceeded")), "{lines:?}");
    }
}
