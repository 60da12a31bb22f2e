//! The data file: kept across restarts, opened by one process only, left as it is when it is damaged.

use std::{fs, os::unix::fs::FileExt as _, path::Path};

use mayfly_sqlite::DatabaseError;
use mayfly_store::{
    Config, Key, ListError, ListOptions, OpenError, Range, Revision, Store, WatchClosed, WatchError, Write,
    WriteError,
};

fn key(name: &str) -> Key {
    Key::new("pods", "default", name)
}

fn create(name: &str, value: impl Into<bytes::Bytes>) -> Write {
    Write::Create { key: key(name), value: value.into() }
}

fn delete(name: &str) -> Write {
    Write::Delete { key: key(name), expected: None }
}

fn open(directory: &Path) -> Result<Store, OpenError> {
    Store::open(Config::new(directory.join("objects.db")))
}

/// Every file of a directory with its content, but those that SQLite makes to read and the lock.
fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut contents = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let content = fs::read(&path).unwrap();
        let scratch = name.ends_with(".lock") || name.ends_with("-shm") || content.is_empty();
        if !scratch {
            contents.push((name, content));
        }
    }
    contents.sort();
    contents
}

#[tokio::test]
async fn a_restart_keeps_objects_and_revision_and_forgets_the_history() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    assert_eq!(store.revision(), Revision(0));
    let first = store.write(create("first", "1")).await.unwrap();
    store.write(create("second", "2")).await.unwrap();
    let update = Write::Update { key: key("first"), value: "3".into(), expected: Some(first.revision) };
    let updated = store.write(update).await.unwrap();
    assert_eq!((updated.revision, updated.entry.created), (Revision(3), Revision(1)));
    let before = store.write(delete("second")).await.unwrap();
    assert_eq!((before.revision, before.entry.modified), (Revision(4), Revision(2)));
    store.close().await;
    assert!(matches!(store.write(create("late", "")).await, Err(WriteError::Closed)));
    assert_eq!(store.get(&key("first")).unwrap().value, "3");
    let names: Vec<_> = contents(directory.path()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["objects.db"], "the log is folded in");

    let store = open(directory.path()).unwrap();
    // The newest write was a delete: its revision is not given out again.
    assert_eq!(store.revision(), Revision(4));
    assert_eq!(store.get(&key("first")).unwrap(), updated.entry);
    assert_eq!(store.get(&key("second")), None);
    let range = Range::resource("pods");
    let oldest = Revision(4);
    assert_eq!(store.watch(range.clone(), Revision(3)).err(), Some(WatchError::TooOld { oldest }));
    let past = ListOptions { at: Some(Revision(3)), ..ListOptions::default() };
    assert_eq!(store.list(&range, &past), Err(ListError::Expired { oldest }));
    assert_eq!(store.list(&Range::resource("unheard-of"), &past), Err(ListError::Expired { oldest }));
    let future = ListOptions { at: Some(Revision(9)), ..ListOptions::default() };
    assert_eq!(store.list(&range, &future), Err(ListError::Future { current: oldest }));
    assert_eq!(store.watch(range.clone(), Revision(5)).err(), Some(WatchError::Future { current: oldest }));

    let mut watch = store.watch(range, Revision(4)).unwrap();
    assert_eq!(store.write(create("second", "4")).await.unwrap().revision, Revision(5));
    assert_eq!(watch.next().await.unwrap().revision, Revision(5));
    let waiting = tokio::spawn(async move { watch.next().await });
    store.close().await;
    assert_eq!(waiting.await.unwrap(), Err(WatchClosed::Closed));
}

#[tokio::test]
async fn a_second_opener_is_told_who_has_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    let Err(error) = open(directory.path()) else { panic!("opened twice") };
    assert!(matches!(&error, OpenError::InUse { pid: Some(pid), .. } if *pid == std::process::id()));
    assert!(error.to_string().contains("in use by another process (pid "), "{error}");
    store.write(create("unharmed", "")).await.unwrap();
    store.close().await;
    assert!(open(directory.path()).unwrap().get(&key("unharmed")).is_some());
}

/// A file with 200 objects on many pages.
async fn filled(directory: &Path) {
    let store = open(directory).unwrap();
    let objects = (0..200).map(|n| create(&format!("pod-{n}"), vec![b'a'; 600])).collect();
    store.write_all(objects).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn a_damaged_file_is_refused_and_left_alone() {
    type Wreck = fn(&Path);
    let wreck: &[(&str, Wreck)] = &[
        ("not a database", |file| {
            fs::write(file, "this is not a database, but quite a long text".repeat(50)).unwrap()
        }),
        ("a few bytes", |file| fs::write(file, "x").unwrap()),
        ("cut off", |file| {
            let half = fs::metadata(file).unwrap().len() / 2;
            fs::OpenOptions::new().write(true).open(file).unwrap().set_len(half).unwrap();
        }),
        ("header overwritten", |file| overwrite(file, 0, &[0xff; 64])),
        ("page overwritten", |file| overwrite(file, 8192, &[0xa5; 4096])),
        ("one byte of a value", |file| {
            let content = fs::read(file).unwrap();
            let at = content.windows(100).rposition(|window| window == [b'a'; 100]).unwrap();
            overwrite(file, at as u64 + 50, b"b");
        }),
        ("emptied, but for the log", |file| {
            fs::write(file.with_file_name("objects.db-wal"), "some log").unwrap();
            fs::write(file, "").unwrap();
        }),
        ("gone, but for the log", |file| {
            fs::write(file.with_file_name("objects.db-wal"), "some log").unwrap();
            fs::remove_file(file).unwrap();
        }),
    ];
    for (what, wreck) in wreck {
        let directory = tempfile::tempdir().unwrap();
        filled(directory.path()).await;
        wreck(&directory.path().join("objects.db"));
        let before = contents(directory.path());
        for _ in 0..2 {
            match open(directory.path()) {
                Err(error @ OpenError::Database(DatabaseError::Damaged { .. })) => {
                    let message = error.to_string();
                    assert!(
                        message.contains("objects.db is damaged (") && message.contains("backup"),
                        "{message}"
                    );
                }
                Err(error) => panic!("{what}: {error}"),
                Ok(_) => panic!("{what}: opened"),
            }
            assert!(contents(directory.path()) == before, "{what}: the files changed");
        }
    }
}

/// The files as a kill leaves them, in a folder of their own, without those that SQLite recreates.
fn as_killed(directory: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for (name, content) in contents(directory) {
        fs::write(copy.path().join(name), content).unwrap();
    }
    copy
}

const PAGE_BYTES: u64 = 4096;
const FRAME_BYTES: u64 = 24 + PAGE_BYTES;

#[tokio::test]
async fn damage_within_the_log_is_refused_and_its_torn_tail_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    for n in 0..20 {
        store.write(create(&format!("pod-{n}"), vec![b'a'; 1500])).await.unwrap();
    }
    let earlier = as_killed(directory.path());
    let log = |directory: &Path| directory.join("objects.db-wal");
    let earlier_bytes = fs::metadata(log(earlier.path())).unwrap().len();
    for n in 20..40 {
        store.write(create(&format!("pod-{n}"), vec![b'a'; 1500])).await.unwrap();
    }
    let bytes = fs::metadata(log(directory.path())).unwrap().len();
    let frames = (bytes - 32) / FRAME_BYTES;

    let whole = as_killed(directory.path());
    assert_eq!(open(whole.path()).unwrap().revision(), Revision(40), "killed, and nothing is damaged");
    // Every part of a frame's header and a byte of its page, of frames at the beginning, in the middle, at the end.
    let mut places = vec![1, 10, 17, 25];
    for frame in [0, frames / 2, frames - 1] {
        places.extend([0, 6, 9, 18, 24 + 100].map(|at| 32 + frame * FRAME_BYTES + at));
    }
    for place in places {
        let copy = as_killed(directory.path());
        let mut byte = [0];
        let file = fs::File::open(log(copy.path())).unwrap();
        file.read_exact_at(&mut byte, place).unwrap();
        overwrite(&log(copy.path()), place, &[byte[0] ^ 0x40]);
        refused(copy.path(), place);
    }
    let copy = as_killed(directory.path());
    fs::OpenOptions::new().write(true).open(log(copy.path())).unwrap().set_len(bytes / 2).unwrap();
    refused(copy.path(), bytes / 2);

    // A group in progress: begun, never acknowledged, torn at any byte.
    let copy = as_killed(directory.path());
    let mut torn = fs::read(log(copy.path())).unwrap();
    let begun = torn[torn.len() - 2 * usize::try_from(FRAME_BYTES).unwrap()..].to_vec();
    torn.extend(&begun[..begun.len() - 100]);
    fs::write(log(copy.path()), torn).unwrap();
    let store = open(copy.path()).unwrap();
    assert_eq!(store.revision(), Revision(40));
    store.write(create("after", "")).await.unwrap();
    store.close().await;
    let names: Vec<_> = contents(copy.path()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["objects.db"], "nothing is left to remember");

    // After a loss of power: the mark on the disk is an earlier one, and the newest frames were never written.
    let copy = as_killed(directory.path());
    fs::copy(earlier.path().join("objects.db-mark"), copy.path().join("objects.db-mark")).unwrap();
    overwrite(&log(copy.path()), earlier_bytes + 2000, &[0; 4096]);
    assert_eq!(open(copy.path()).unwrap().revision(), Revision(20));

    // A backup of the data file alone is accepted, although the mark is of another log.
    let copy = as_killed(directory.path());
    let backup = tempfile::tempdir().unwrap();
    filled(backup.path()).await;
    fs::remove_file(log(copy.path())).unwrap();
    fs::copy(backup.path().join("objects.db"), copy.path().join("objects.db")).unwrap();
    assert_eq!(open(copy.path()).unwrap().revision(), Revision(200));
}

/// Opening reports the damage, and changes nothing.
fn refused(directory: &Path, place: u64) {
    let before = contents(directory);
    for _ in 0..2 {
        match open(directory) {
            Err(error @ OpenError::Database(DatabaseError::Damaged { .. })) => {
                let message = error.to_string();
                assert!(message.contains("log had ") && message.contains("backup"), "{place}: {message}");
            }
            Err(error) => panic!("{place}: {error}"),
            Ok(store) => panic!("{place}: opened at {}", store.revision()),
        }
        assert!(contents(directory) == before, "{place}: the files changed");
    }
}

#[tokio::test]
async fn a_file_changed_behind_its_back_stops_the_writing() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    store.write_all(vec![create("a", "1"), create("b", "1")]).await.unwrap();
    let connection = rusqlite::Connection::open(directory.path().join("objects.db")).unwrap();
    connection.execute("DELETE FROM objects WHERE name = 'a'", []).unwrap();
    for name in ["a", "b"] {
        let update = Write::Update { key: key(name), value: "2".into(), expected: None };
        let Err(WriteError::Failed(why)) = store.write(update).await else { panic!("written") };
        assert!(
            why.contains("pods/default/a is not in the file") && why.contains("until the next start"),
            "{why}"
        );
    }
    // Reads go on, and the next start uses the content of the file.
    assert_eq!(store.get(&key("b")).unwrap().value, "1");
    store.close().await;
    let store = open(directory.path()).unwrap();
    assert_eq!((store.get(&key("a")), store.revision()), (None, Revision(2)));
    store.write(create("a", "2")).await.unwrap();
}

fn overwrite(file: &Path, at: u64, bytes: &[u8]) {
    fs::OpenOptions::new().write(true).open(file).unwrap().write_all_at(bytes, at).unwrap();
}

#[tokio::test]
async fn a_foreign_or_newer_file_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path()).await;
    let sql = |sql: &str| {
        let connection = rusqlite::Connection::open(directory.path().join("objects.db")).unwrap();
        connection.execute_batch(sql).unwrap();
    };
    sql("PRAGMA user_version = 2");
    let before = contents(directory.path());
    assert!(matches!(
        open(directory.path()),
        Err(OpenError::Database(DatabaseError::Version { found: 2, known: 1, .. }))
    ));
    assert!(contents(directory.path()) == before);
    sql("PRAGMA user_version = 1; PRAGMA application_id = 7");
    let before = contents(directory.path());
    assert!(matches!(open(directory.path()), Err(OpenError::Database(DatabaseError::Foreign { .. }))));
    assert!(contents(directory.path()) == before);
}

#[tokio::test]
async fn an_operator_can_look_inside_while_it_runs() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    store.write(create("seen", r#"{"kind":"Pod"}"#)).await.unwrap();
    let connection = rusqlite::Connection::open(directory.path().join("objects.db")).unwrap();
    let row: (String, i64, Vec<u8>) = connection
        .query_row("SELECT name, modified, value FROM objects", [], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })
        .unwrap();
    assert_eq!(row, ("seen".into(), 1, br#"{"kind":"Pod"}"#.to_vec()));
    store.write(create("still-written", "")).await.unwrap();
}
