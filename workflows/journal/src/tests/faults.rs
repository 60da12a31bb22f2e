//! A full disk, a broken connection, a damaged log: the behaviour of a journal in a file.

use super::*;
use mayfly_workflows_language::ids::MapRunId;

#[test]
fn a_full_disk_refuses_starts_and_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.db");
    let journal = SqliteJournal::open(&path).expect("opens");
    write(&journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).expect("written");
    // Another writer locks the file, with the same effect as a full disk.
    let other = rusqlite::Connection::open(&path).expect("opens");
    other.execute_batch("BEGIN IMMEDIATE").expect("held");
    let (sender, receiver) = mpsc::channel();
    let body = b"{}".to_vec();
    let record = JournalChange::Record { execution: 1, row: RecordRow { seq: 1, at_ms: 0, body } };
    let done: Done = Box::new(move |outcome| sender.send(outcome).expect("the test waits"));
    journal.write(Batch { changes: vec![record], done }).expect("queued");
    // The first attempts wait for SQLite's own timeout; then starts are refused.
    let refused = std::iter::repeat_with(|| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        journal.write(Batch {
            changes: vec![JournalChange::Start(Box::new(row(2, "one")))],
            done: Box::new(|_| ()),
        })
    })
    .take(400)
    .any(|outcome| outcome.is_err());
    assert!(refused, "a start is refused while nothing can be written");
    assert!(receiver.try_recv().is_err(), "nothing is acknowledged");
    other.execute_batch("ROLLBACK").expect("let go");
    assert!(
        receiver.recv_timeout(LONG).expect("done is called").is_ok(),
        "what was queued is written in the end"
    );
    assert_eq!(journal.records(1, 0).expect("read").len(), 1);
}

#[test]
fn a_broken_connection_is_opened_again_and_nothing_is_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
    use rusqlite::ffi::ErrorCode::{CannotOpen, NotADatabase, ReadOnly, SystemIoFailure};
    journal.inject([SystemIoFailure, NotADatabase, CannotOpen, ReadOnly, SystemIoFailure]);
    let (sender, receiver) = mpsc::channel();
    let done: Done = Box::new(move |outcome| sender.send(outcome).expect("the test waits"));
    let start = JournalChange::Start(Box::new(row(1, "one")));
    journal.write(Batch { changes: vec![start], done }).expect("queued");
    let troubled = std::iter::repeat_with(|| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        matches!(journal.health(), Err(WriteFault::Retrying(_)))
    });
    assert!(troubled.take(1_000).any(|troubled| troubled), "who asks is told");
    assert!(receiver.recv_timeout(LONG).expect("done is called").is_ok());
    assert!(journal.health().is_ok(), "and told when it is over");
    assert_eq!(journal.open_executions().expect("read"), [1]);
}

#[test]
fn a_full_disk_refuses_starts_and_lets_all_else_wait() {
    use rusqlite::ffi::ErrorCode::DiskFull;
    let folder = tempfile::tempdir().expect("a folder");
    let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
    write(&journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).expect("written");
    // A start alone: it is refused, and the journal detects by itself that there is space again.
    journal.inject([DiskFull]);
    let refused = write(&journal, vec![JournalChange::Start(Box::new(row(2, "two")))]);
    assert!(refused.is_err(), "whoever asked is told at once");
    let until_healthy = || {
        let healthy = std::iter::repeat_with(|| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            journal.health().is_ok()
        });
        assert!(healthy.take(2_000).any(|healthy| healthy), "{:?}", journal.health());
    };
    until_healthy();
    // Batches of open executions wait, including the start of a map run's child.
    journal.inject([DiskFull; 3]);
    let record = RecordRow { seq: 1, at_ms: 0, body: b"{}".to_vec() };
    let mut child = row(3, "three");
    child.birth.parent = Some(ChildOf { execution: 1, run: MapRunId(0), index: 0, items: 1 });
    let (sender, receiver) = mpsc::channel();
    for changes in [
        vec![JournalChange::Record { execution: 1, row: record }],
        vec![JournalChange::Start(Box::new(child))],
    ] {
        let sender = sender.clone();
        let done: Done = Box::new(move |outcome| sender.send(outcome).expect("the test waits"));
        journal.write(Batch { changes, done }).expect("queued");
    }
    for _ in 0..2 {
        assert!(receiver.recv_timeout(LONG).expect("done is called").is_ok());
    }
    until_healthy();
    write(&journal, vec![JournalChange::Start(Box::new(row(4, "four")))]).expect("written");
    assert_eq!(journal.open_executions().expect("read"), [1, 3, 4]);
    assert_eq!(journal.records(1, 0).expect("read").len(), 1);
}

/// A stop may come before the start is acknowledged: after a refused start nothing of the execution is written.
#[test]
fn what_comes_behind_a_refused_start_is_refused_with_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal: Arc<dyn Journal> = {
        let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
        journal.inject([rusqlite::ffi::ErrorCode::DiskFull]);
        Arc::new(journal)
    };
    let record = |execution| {
        let row = RecordRow { seq: 1, at_ms: 0, body: b"{}".to_vec() };
        vec![JournalChange::Record { execution, row }]
    };
    let (sender, receiver) = mpsc::channel();
    let (behind, told) = (journal.clone(), sender.clone());
    let done: Done = Box::new(move |outcome| {
        for execution in [2, 7] {
            let told = told.clone();
            let done: Done =
                Box::new(move |outcome| told.send((execution, outcome.is_ok())).expect("the test waits"));
            behind.write(Batch { changes: record(execution), done }).expect("queued");
        }
        sender.send((0, outcome.is_ok())).expect("the test waits");
    });
    journal
        .write(Batch { changes: vec![JournalChange::Start(Box::new(row(2, "two")))], done })
        .expect("queued");
    let mut told: Vec<_> = receiver.iter().take(3).collect();
    told.sort_unstable();
    assert_eq!(told, [(0, false), (2, false), (7, true)]);
    assert_eq!(journal.records(2, 0).expect("read").len(), 0);
    journal.close();
}

#[test]
fn an_error_that_does_not_pass_is_told_to_everybody() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.db");
    let journal = SqliteJournal::open(&path).expect("opens");
    write(&journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).expect("written");
    journal.inject([rusqlite::ffi::ErrorCode::TooBig]);
    let record = |seq| {
        let row = RecordRow { seq, at_ms: 0, body: b"{}".to_vec() };
        vec![JournalChange::Record { execution: 1, row }]
    };
    assert!(write(&journal, record(1)).is_err());
    assert!(matches!(journal.health(), Err(WriteFault::Failed(_))));
    assert!(write(&journal, record(2)).is_err(), "nothing is acknowledged behind the gap");
    journal.close();
    let again = SqliteJournal::open(&path).expect("opens");
    assert_eq!(again.records(1, 0).expect("read").len(), 0);
    assert!(write(&again, record(1)).is_ok(), "opened again it goes on");
}

#[test]
fn damage_within_the_log_is_refused() {
    use std::os::unix::fs::FileExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
    for id in 1..=5 {
        write(&journal, vec![JournalChange::Start(Box::new(row(id, &id.to_string())))]).expect("written");
    }
    // The files as after a kill: the log is not checkpointed.
    let killed = || {
        let copy = tempfile::tempdir().expect("a folder");
        for name in ["journal.db", "journal.db-wal", "journal.db-mark"] {
            std::fs::copy(folder.path().join(name), copy.path().join(name)).expect("copied");
        }
        copy
    };
    let whole = killed();
    let again = SqliteJournal::open(&whole.path().join("journal.db")).expect("opens");
    assert_eq!(again.open_executions().expect("read").len(), 5);
    let damaged = killed();
    let log = damaged.path().join("journal.db-wal");
    let middle = std::fs::metadata(&log).expect("the log").len() / 2;
    let file = std::fs::OpenOptions::new().write(true).open(&log).expect("the log");
    file.write_all_at(&[0xa5; 16], middle).expect("written");
    let before = std::fs::read(&log).expect("the log");
    let Err(error) = SqliteJournal::open(&damaged.path().join("journal.db")) else { panic!("opened") };
    assert!(error.to_string().contains("journal.db is damaged (its write-ahead log had"), "{error}");
    assert!(before == std::fs::read(&log).expect("the log"), "left as it is");
    // A file that cannot be read may be undamaged: the message does not say to move it away.
    let unreadable = killed();
    let mark = unreadable.path().join("journal.db-mark");
    std::fs::remove_file(&mark).expect("removed");
    std::fs::create_dir(&mark).expect("made");
    let Err(error) = SqliteJournal::open(&unreadable.path().join("journal.db")) else { panic!("opened") };
    let error = error.to_string();
    assert!(error.contains("journal.db-mark cannot be opened") && !error.contains("damaged"), "{error}");
    let other = folder.path().join("other.db");
    std::fs::write(&other, "quite a long text, and no database".repeat(100)).expect("written");
    let Err(error) = SqliteJournal::open(&other) else { panic!("opened") };
    assert!(error.to_string().contains("other.db is damaged (file is not a database)"), "{error}");
}

#[test]
fn a_start_that_is_refused_fails_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal = SqliteJournal::open(&folder.path().join("journal.db")).expect("opens");
    write(&journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).expect("written");
    assert!(
        write(&journal, vec![JournalChange::Start(Box::new(row(1, "one")))]).is_err(),
        "an ARN is given once"
    );
    assert!(journal.health().is_ok());
    write(&journal, vec![JournalChange::Start(Box::new(row(2, "one")))]).expect("others go on");
}
