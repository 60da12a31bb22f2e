//! The conformance suite of all journals.

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::execution::{Digest, Payload};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::*;
use mayfly_workflows_language::execution::RunStatus;

mod faults;

/// A timeout far above the duration of any test.
const LONG: Duration = Duration::from_secs(20);

fn execution_arn(machine: &str, id: u64) -> ExecutionArn {
    ExecutionArn::from_trusted(format!("arn:execution:{machine}:{id}"))
}

fn machine_arn(machine: &str) -> StateMachineArn {
    StateMachineArn::from_trusted(format!("arn:stateMachine:{machine}"))
}

fn row(id: u64, machine: &str) -> ExecutionRow {
    ExecutionRow {
        id,
        arn: execution_arn(machine, id),
        name: id.to_string(),
        machine_arn: machine_arn(machine),
        machine: Digest::of(machine.as_bytes()),
        version_arn: id.is_multiple_of(2).then(|| machine_arn(machine).qualified(1)),
        alias_arn: None,
        map_run_arn: None,
        birth: Birth { seed: [7; 16], ..Birth::default() },
        input: Payload::from("{ \"as\": \"written\" }"),
        start_ms: 1_000 + i64::try_from(id).expect("small"),
        outcome: OutcomeRow::running(),
    }
}

fn write(journal: &dyn Journal, changes: Vec<JournalChange>) -> Result<(), JournalError> {
    let (sender, receiver) = mpsc::channel();
    let done: Done = Box::new(move |outcome| sender.send(outcome).expect("the test waits"));
    journal.write(Batch { changes, done })?;
    receiver.recv_timeout(LONG).expect("done is called")
}

fn conformance(journal: &dyn Journal) {
    assert_eq!(journal.last_execution().expect("read"), 0);
    for id in 1..=5 {
        let machine = if id == 3 { "other" } else { "one" };
        write(journal, vec![JournalChange::Start(Box::new(row(id, machine)))]).expect("written");
    }
    let large = "x".repeat(PART_BYTES_MIN);
    let mut changes = Vec::new();
    let output = stored(&Payload::from(large.as_str()), &mut changes);
    assert_eq!(changes.len(), 1, "a large payload is a part");
    let ended = OutcomeRow {
        status: RunStatus::Succeeded,
        stop_ms: Some(9),
        output: Some(output.clone()),
        redrive_count: 2,
        redrive_ms: Some(8),
        ..OutcomeRow::running()
    };
    changes.push(JournalChange::Outcome { execution: 2, row: Box::new(ended.clone()) });
    for seq in 1..=3 {
        let body = format!("record {seq}").into_bytes();
        changes.push(JournalChange::Record { execution: 2, row: RecordRow { seq, at_ms: 5, body } });
    }
    changes.push(JournalChange::MapRun { arn: MapRunArn::from_trusted("arn:mapRun:x"), execution: 2 });
    let machine = Digest::of(b"machine");
    changes.push(JournalChange::Machine { digest: machine, body: b"machine"[..].into() });
    changes.push(JournalChange::Machine { digest: machine, body: b"machine"[..].into() });
    write(journal, changes).expect("written");

    assert_eq!(journal.last_execution().expect("read"), 5);
    let second = journal.execution_by_arn(&execution_arn("one", 2)).expect("read").expect("there");
    assert_eq!(second.outcome, ended);
    assert_eq!(second.input, Payload::from("{ \"as\": \"written\" }"));
    assert_eq!(journal.execution(2).expect("read"), Some(second));
    assert_eq!(
        loaded(output.clone(), journal).expect("read").text().map(|text| text.len()),
        Some(PART_BYTES_MIN)
    );
    let later = journal.records(2, 1).expect("read");
    assert_eq!(later.iter().map(|row| row.seq).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(journal.map_run(&MapRunArn::from_trusted("arn:mapRun:x")).expect("read"), Some(2));
    assert_eq!(journal.machine(&machine).expect("read").as_deref(), Some(&b"machine"[..]));
    assert_eq!(journal.open_executions().expect("read"), [1, 3, 4, 5]);
    open_executions_together(journal);
    lists(journal);
    checkpoints(journal);
    artifacts(journal);
    removals(journal, &output);

    let twice = write(journal, vec![JournalChange::Start(Box::new(row(1, "one")))]);
    assert!(twice.is_err(), "an ARN is given once");
    journal.close();
    assert!(write(journal, Vec::new()).is_err(), "a closed journal takes nothing");
}

/// Open executions are read together: those that have ended or do not exist are omitted.
fn open_executions_together(journal: &dyn Journal) {
    let record = |seq| {
        let row = RecordRow { seq, at_ms: 5, body: format!("record {seq}").into_bytes() };
        JournalChange::Record { execution: 3, row }
    };
    let checkpoint = JournalChange::Checkpoint { execution: 3, seq: 1, body: b"state".to_vec() };
    write(journal, vec![record(1), checkpoint, record(2)]).expect("written");
    let arns = journal.open_arns(&[5, 2, 3, 99]).expect("read");
    assert_eq!(arns, [(5, execution_arn("one", 5)), (3, execution_arn("other", 3))]);
    let read = journal.open_with_records(&[5, 2, 3, 99]).expect("read");
    let row = |id| journal.execution(id).expect("read").expect("there");
    let none = StoredExecution { row: row(5), checkpoint: None, records: Vec::new() };
    let body = b"record 2".to_vec();
    let records = vec![RecordRow { seq: 2, at_ms: 5, body }];
    let some = StoredExecution { row: row(3), checkpoint: Some((1, b"state".to_vec())), records };
    assert_eq!(read, [none, some]);
}

/// An artifact's digest as text, and the digest.
fn artifact(name: &str) -> (String, Digest) {
    let digest = Digest::of(name.as_bytes());
    (format!("{{\"file\":\"{digest}\"}}"), digest)
}

/// Artifacts that an open execution references are in use: by its input, a record, a large payload, its definition.
fn artifacts(journal: &dyn Journal) {
    let user = |name: &str| journal.user_of(&artifact(name).1).expect("read");
    let outcome = |execution, status, stop_ms| JournalChange::Outcome {
        execution,
        row: Box::new(OutcomeRow { status, stop_ms, ..OutcomeRow::running() }),
    };
    assert_eq!(user("input"), None);
    let started = ExecutionRow { input: Payload::from(artifact("input").0.as_str()), ..row(7, "names") };
    let definition = JournalChange::Machine {
        digest: started.machine,
        body: artifact("definition").0.into_bytes().into(),
    };
    write(journal, vec![definition, JournalChange::Start(Box::new(started))]).expect("written");
    let mut changes = Vec::new();
    let large = format!("{}{}", "x".repeat(PART_BYTES_MIN), artifact("large").0);
    stored(&Payload::from(large.as_str()), &mut changes);
    let body = artifact("record").0.replace('"', "\\\"").into_bytes();
    changes.push(JournalChange::Record { execution: 7, row: RecordRow { seq: 1, at_ms: 1, body } });
    write(journal, changes).expect("written");
    let named = ["input", "record", "large", "definition"];
    for name in named {
        assert_eq!(user(name), Some(execution_arn("names", 7)), "{name}");
    }
    assert_eq!(user("another"), None);
    write(journal, vec![outcome(7, RunStatus::Failed, Some(60))]).expect("written");
    assert_eq!(named.map(user), [const { None }; 4], "it has ended");
    write(journal, vec![outcome(7, RunStatus::Running, None)]).expect("written");
    assert!(named.map(user).iter().all(Option::is_some), "it was taken up again");
    write(journal, vec![outcome(7, RunStatus::Failed, Some(60))]).expect("written");
    write(journal, vec![JournalChange::Remove { execution: 7 }]).expect("written");
    assert_eq!(named.map(user), [const { None }; 4], "it is forgotten");
}

fn checkpoints(journal: &dyn Journal) {
    let checkpoint =
        |seq, text: &str| JournalChange::Checkpoint { execution: 4, seq, body: text.as_bytes().to_vec() };
    write(journal, vec![checkpoint(3, "three")]).expect("written");
    write(journal, vec![checkpoint(6, "six")]).expect("written");
    assert_eq!(journal.checkpoint(4).expect("read"), Some((6, b"six".to_vec())), "the newest is kept");
    assert_eq!(journal.checkpoint(5).expect("read"), None);
    let ended = OutcomeRow { status: RunStatus::Failed, stop_ms: Some(50), ..OutcomeRow::running() };
    write(journal, vec![JournalChange::Outcome { execution: 4, row: Box::new(ended) }]).expect("written");
    assert_eq!(journal.checkpoint(4).expect("read"), None, "an ended execution needs none");
}

/// The second execution has ended at 9 and has a map run, the fourth has ended at 50.
fn removals(journal: &dyn Journal, output: &Payload) {
    assert_eq!(journal.ended_before(9, 10).expect("read"), [] as [u64; 0]);
    assert_eq!(journal.ended_before(51, 10).expect("read"), [2, 4]);
    assert_eq!(journal.ended_before(51, 1).expect("read"), [2]);
    // The first one runs and has the same payload as the second; the sixth is a child of the third's map run.
    let mut changes = Vec::new();
    let shared = stored(&Payload::from("x".repeat(PART_BYTES_MIN).as_str()), &mut changes);
    assert_eq!(&shared, output);
    changes.push(JournalChange::Record {
        execution: 1,
        row: RecordRow { seq: 1, at_ms: 1, body: b"{}".to_vec() },
    });
    write(journal, changes).expect("written");
    let ended = OutcomeRow { status: RunStatus::Succeeded, stop_ms: Some(7), ..OutcomeRow::running() };
    let child =
        ExecutionRow { map_run_arn: Some(MapRunArn::from_trusted("arn:mapRun:open")), ..row(6, "child") };
    let run = JournalChange::MapRun { arn: MapRunArn::from_trusted("arn:mapRun:open"), execution: 3 };
    write(journal, vec![run, JournalChange::Start(Box::new(child))]).expect("written");
    write(journal, vec![JournalChange::Outcome { execution: 6, row: Box::new(ended) }]).expect("written");
    assert_eq!(journal.ended_before(51, 10).expect("read"), [2, 4], "a child waits for its parent");

    write(journal, vec![JournalChange::Remove { execution: 2 }]).expect("written");
    assert_eq!(journal.execution(2).expect("read"), None);
    assert_eq!(journal.execution_by_arn(&execution_arn("one", 2)).expect("read"), None);
    assert!(journal.records(2, 0).expect("read").is_empty());
    assert_eq!(journal.map_run(&MapRunArn::from_trusted("arn:mapRun:x")).expect("read"), None);
    assert!(loaded(output.clone(), journal).is_ok(), "the first still has its payload");
}

fn lists(journal: &dyn Journal) {
    let ask = |owner, status, redriven, before, limit| {
        let rows = journal.list(&ListRows { owner, status, redriven, before, limit }).expect("read");
        rows.into_iter().map(|row| row.id).collect::<Vec<_>>()
    };
    let one = || ExecutionOwner::StateMachine(machine_arn("one"));
    assert_eq!(ask(one(), None, None, None, 10), [5, 4, 2, 1]);
    assert_eq!(ask(one(), None, None, Some(4), 1), [2]);
    assert_eq!(ask(one(), Some(RunStatus::Running), None, None, 10), [5, 4, 1]);
    assert_eq!(ask(one(), None, Some(true), None, 10), [2]);
    assert_eq!(ask(one(), None, Some(false), None, 10), [5, 4, 1]);
    assert_eq!(ask(ExecutionOwner::Version(machine_arn("one").qualified(1)), None, None, None, 10), [4, 2]);
}

#[test]
fn memory() {
    conformance(&MemoryJournal::default());
}

#[test]
fn sqlite() {
    let folder = tempfile::tempdir().expect("a folder");
    conformance(&SqliteJournal::open(&folder.path().join("journal.db")).expect("opens"));
}

#[test]
fn what_was_acknowledged_is_there_after_opening_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.db");
    let first = SqliteJournal::open(&path).expect("opens");
    write(&first, vec![JournalChange::Start(Box::new(row(1, "one")))]).expect("written");
    // Never closed: the second journal opens the same file, as after a kill.
    let second = SqliteJournal::open(&path).expect("opens");
    assert_eq!(second.open_executions().expect("read"), [1]);
}

#[test]
fn a_file_of_another_form_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.db");
    let before = rusqlite::Connection::open(&path).expect("opens");
    before.execute_batch("CREATE TABLE records (body); INSERT INTO records VALUES ('kept')").expect("made");
    let refused = SqliteJournal::open(&path).expect_err("refused").to_string();
    assert!(refused.contains("not one of Mayfly's"), "{refused}");
    let kept: String = before.query_row("SELECT body FROM records", [], |row| row.get(0)).expect("read");
    assert_eq!(kept, "kept");
}

#[test]
fn batches_that_meet_share_a_commit() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
    let (sender, receiver) = mpsc::channel();
    for id in 1..=2_000 {
        let sender = sender.clone();
        let done: Done = Box::new(move |outcome| sender.send(outcome.map(|()| id)).expect("the test waits"));
        journal
            .write(Batch { changes: vec![JournalChange::Start(Box::new(row(id, "one")))], done })
            .expect("queued");
    }
    let ids: Vec<u64> = receiver.iter().take(2_000).map(|outcome| outcome.expect("written")).collect();
    assert!(ids.is_sorted(), "acknowledged in the order in which they came");
    assert_eq!(journal.last_execution().expect("read"), 2_000);
}

#[test]
fn a_payload_goes_with_the_last_that_has_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
    let mut digests = Vec::new();
    for id in 1..=2 {
        let mut changes = Vec::new();
        let input = stored(&Payload::from("x".repeat(PART_BYTES_MIN).as_str()), &mut changes);
        let Payload::Part { part } = input else { panic!("it is large") };
        digests.push(part);
        let outcome = OutcomeRow { status: RunStatus::Failed, ..OutcomeRow::running() };
        changes.push(JournalChange::Start(Box::new(ExecutionRow { input, outcome, ..row(id, "one") })));
        write(&journal, changes).expect("written");
    }
    write(&journal, vec![JournalChange::Remove { execution: 1 }]).expect("written");
    assert!(journal.part(&digests[0]).expect("read").is_some());
    write(&journal, vec![JournalChange::Remove { execution: 2 }]).expect("written");
    assert!(journal.part(&digests[0]).expect("read").is_none());
}

/// Writes more batches than the queue may hold, while a callback blocks the writer.
fn nobody_waits(journal: Arc<dyn Journal>) {
    let cell = Arc::new(parking_lot::Mutex::new(()));
    let held = cell.lock();
    let (sender, receiver) = mpsc::channel();
    let (writing, of_first, last) = (journal.clone(), cell.clone(), sender.clone());
    std::thread::spawn(move || {
        let empty = |done: Done| Batch { changes: Vec::new(), done };
        let (begins, begun) = mpsc::channel();
        let first: Done = Box::new(move |_| {
            begins.send(()).expect("the writer waits");
            drop(of_first.lock());
        });
        writing.write(empty(first)).expect("taken");
        begun.recv_timeout(LONG).expect("told");
        for _ in 0..=QUEUE_BATCHES_MAX {
            writing.write(empty(Box::new(|_| ()))).expect("taken");
        }
        let start = vec![JournalChange::Start(Box::new(row(1, "one")))];
        let refused = writing.write(Batch { changes: start, done: Box::new(|_| ()) });
        sender.send(refused.is_err()).expect("the test waits");
        writing
            .write(empty(Box::new(move |outcome| last.send(outcome.is_ok()).expect("the test waits"))))
            .expect("taken");
    });
    let patience = std::time::Duration::from_secs(60);
    assert_eq!(receiver.recv_timeout(patience), Ok(true), "a start is refused, and nothing waits");
    drop(held);
    assert_eq!(receiver.recv_timeout(patience), Ok(true), "all are told");
    assert!(
        write(&*journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).is_ok(),
        "starts are taken again"
    );
}

#[test]
fn who_writes_never_waits_for_who_is_told() {
    nobody_waits(Arc::new(MemoryJournal::default()));
    let folder = tempfile::tempdir().expect("a folder");
    nobody_waits(Arc::new(SqliteJournal::open(&folder.path().join("journal.db")).expect("opens")));
}

/// An execution that was redriven after it was listed as old is kept.
fn what_runs_is_kept(journal: &dyn Journal) {
    write(journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).expect("written");
    write(journal, vec![JournalChange::Remove { execution: 1 }]).expect("written");
    assert!(journal.execution(1).expect("read").is_some());
    let ended = OutcomeRow { status: RunStatus::Failed, stop_ms: Some(9), ..OutcomeRow::running() };
    let outcome = JournalChange::Outcome { execution: 1, row: Box::new(ended) };
    write(journal, vec![outcome, JournalChange::Remove { execution: 1 }]).expect("written");
    assert!(journal.execution(1).expect("read").is_none());
}

#[test]
fn an_execution_that_runs_is_not_removed() {
    what_runs_is_kept(&MemoryJournal::default());
    let folder = tempfile::tempdir().expect("a folder");
    what_runs_is_kept(&SqliteJournal::open(&folder.path().join("journal.db")).expect("opens"));
}
