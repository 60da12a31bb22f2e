//! Writers wait for the disk in groups; readers never wait.

use std::{path::Path, pin::pin, sync::Arc};

use futures::FutureExt as _;
use mayfly_store::{Config, Entry, EventKind, Key, ListOptions, Range, Revision, Store, Watch, Write};

const WRITERS: usize = 64;
const WRITES: usize = 50;

fn key(writer: usize, n: usize) -> Key {
    Key::new("pods", "a", format!("object-{writer}-{n}"))
}

fn create(key: Key) -> Write {
    Write::Create { key, value: "value".into() }
}

fn open(directory: &Path) -> Store {
    Store::open(Config::new(directory.join("objects.db"))).unwrap()
}

/// Another program that holds the file: no commit ends before it releases it.
fn hold(directory: &Path) -> rusqlite::Connection {
    let operator = rusqlite::Connection::open(directory.join("objects.db")).unwrap();
    operator.execute_batch("BEGIN IMMEDIATE").unwrap();
    operator
}

#[tokio::test]
async fn writes_that_come_during_a_commit_share_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let operator = hold(directory.path());
    let mut writes: Vec<_> =
        (0..WRITERS).map(|writer| Box::pin(store.write(create(key(writer, 0))))).collect();
    for write in &mut writes {
        assert_eq!(write.as_mut().now_or_never(), None, "it was written while another held the file");
        // A task that does much at once is made to wait by tokio, and then nothing is queued.
        tokio::task::yield_now().await;
    }
    assert_eq!((store.stats().writes, store.stats().commits), (0, 0));
    operator.execute_batch("COMMIT").unwrap();
    for write in writes {
        write.await.unwrap();
    }
    let stats = store.stats();
    assert_eq!(stats.writes, WRITERS as u64);
    // One group that the writer had taken when the file was held, and one of all others.
    assert!(stats.commits <= 2, "{} commits", stats.commits);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_at_the_same_time_share_commits_by_themselves() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let spawn = |writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..WRITES {
                store.write(create(key(writer, n))).await.unwrap();
            }
        })
    };
    let writers: Vec<_> = (0..WRITERS).map(spawn).collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let stats = store.stats();
    assert_eq!(stats.writes, (WRITERS * WRITES) as u64);
    // Groups of all of them would be 50 commits; how close the result comes depends on the machine.
    assert!(stats.commits * 4 <= stats.writes, "{} commits of {} writes", stats.commits, stats.writes);
    store.close().await;
}

/// A store with two objects, the first of which was changed.
async fn written(directory: &Path) -> Store {
    let store = open(directory);
    let update = Write::Update { key: key(1, 0), value: "newer".into(), expected: None };
    for write in [create(key(1, 0)), create(key(2, 0)), update] {
        store.write(write).await.unwrap();
    }
    store
}

/// Checks the state through each way of reading.
fn check_reads(store: &Store, watch: &mut Watch) {
    let name = |entry: &Arc<Entry>| entry.key.name.to_string();
    let (one, two) = (key(1, 0), key(2, 0));
    assert_eq!(store.revision(), Revision(3));
    assert_eq!(store.get(&one).unwrap().value, "newer");
    assert_eq!(store.get(&two).unwrap().modified, Revision(2));
    assert_eq!(store.get(&key(3, 0)), None, "it is not written yet");
    let now = store.list(&Range::resource("pods"), &ListOptions::default()).unwrap();
    assert_eq!(now.entries.iter().map(name).collect::<Vec<_>>(), [&*one.name, &*two.name]);
    let past = ListOptions { at: Some(Revision(1)), ..ListOptions::default() };
    let past = store.list(&Range::resource("pods"), &past).unwrap().entries;
    assert_eq!((past.len(), &past[0].value[..]), (1, &b"value"[..]));
    // A watch that existed before, and one that begins now.
    let mut late = store.watch(Range::resource("pods"), Revision(2)).unwrap();
    for watch in [watch, &mut late] {
        let event = watch.next().now_or_never().expect("what happened is known").unwrap();
        assert_eq!((event.revision, event.kind), (Revision(3), EventKind::Modified));
    }
}

#[tokio::test]
async fn reads_wait_neither_for_the_disk_nor_for_a_write() {
    let directory = tempfile::tempdir().unwrap();
    let store = written(directory.path()).await;
    let operator = hold(directory.path());
    let mut stuck = pin!(store.write(create(key(3, 0))));
    assert_eq!(stuck.as_mut().now_or_never(), None);
    // The writer has taken it, and waits for the file.
    while store.stats().queued > 0 {
        tokio::task::yield_now().await;
    }
    let mut watch = store.watch(Range::resource("pods"), Revision(2)).unwrap();
    check_reads(&store, &mut watch);
    assert_eq!(watch.next().now_or_never(), None, "what is not written yet has not happened");
    assert_eq!(stuck.as_mut().now_or_never(), None, "the reads were made while it waited");
    operator.execute_batch("COMMIT").unwrap();
    assert_eq!(stuck.await.unwrap().revision, Revision(4));
    assert_eq!(watch.next().await.unwrap().revision, Revision(4));
    store.close().await;
}

#[tokio::test]
async fn reads_are_answered_when_the_file_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let store = written(directory.path()).await;
    let mut watch = store.watch(Range::resource("pods"), Revision(2)).unwrap();
    // Closed first, so that no write goes to the removed file.
    store.close().await;
    directory.close().unwrap();
    check_reads(&store, &mut watch);
}
