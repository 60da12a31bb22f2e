//! Watches and writers at the same time, and the effects of the limits of both.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mayfly_store::{
    BATCH_WRITES_MAX, Config, EventKind, Key, ListOptions, MemoryStorage, Range, Revision, Store, Watch,
    WatchClosed, WatchError, Write, WriteError, WriteEvent,
};

fn key(resource: &str, namespace: &str, n: usize) -> Key {
    Key::new(resource, namespace, format!("object-{n}"))
}

fn create(key: Key, value_bytes: usize) -> Write {
    Write::Create { key, value: vec![b'x'; value_bytes].into() }
}

const WRITERS: usize = 8;
const WRITES: usize = 300;

/// Writes over keys that all writers share, so that conflicts happen; returns how many were made.
async fn writer(store: Store, writer: usize) -> usize {
    let mut made = 0;
    for n in 0..WRITES {
        let resource = ["pods", "nodes"][n % 2];
        let key = key(resource, ["a", "b"][n % 3 % 2], (n * 7 + writer) % 5);
        let value = format!("{writer}-{n}").into();
        let expected = store.get(&key).map(|entry| entry.modified);
        let write = match expected {
            None => Write::Create { key, value },
            Some(_) if n % 5 == 0 => Write::Delete { key, expected },
            Some(_) => Write::Update { key, value, expected },
        };
        match store.write(write).await {
            Ok(_) => made += 1,
            Err(WriteError::Conflict { .. } | WriteError::AlreadyExists | WriteError::NotFound) => {}
            Err(error) => panic!("{error}"),
        }
    }
    made
}

/// Follows a range up to a key that is created last of all, checking that every event continues
/// from the one before it on its object; returns all but the last.
async fn follow(mut watch: Watch) -> Vec<Arc<WriteEvent>> {
    let mut last: HashMap<Key, Option<Revision>> = HashMap::new();
    let mut events: Vec<Arc<WriteEvent>> = Vec::new();
    loop {
        let event = watch.next().await.unwrap();
        assert!(events.last().is_none_or(|before| before.revision < event.revision));
        if &*event.entry.key.name == "end" {
            return events;
        }
        let previous = event.previous.as_ref().map(|previous| previous.modified);
        if let Some(last) = last.get(&event.entry.key) {
            assert_eq!(*last, previous, "an event of {} is missing", event.entry.key);
        }
        let now = (event.kind != EventKind::Deleted).then_some(event.revision);
        last.insert(event.entry.key.clone(), now);
        events.push(event);
    }
}

fn in_memory(config: Config) -> Store {
    let (stored, backend) = MemoryStorage::default().open();
    Store::with_backend(config, stored, backend)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn live_watches_see_every_event_once_and_in_order() {
    let store = Store::in_memory();
    let all = [Range::resource("pods"), Range::resource("nodes")];
    let some = [Range::namespace("pods", "a"), Range::key(&key("pods", "b", 1))];
    let start = |range: &Range, after| tokio::spawn(follow(store.watch(range.clone(), after).unwrap()));
    let early: Vec<_> = all.iter().map(|range| start(range, Revision(0))).collect();
    let partial = [start(&some[0], Revision(0))];
    let writers: Vec<_> = (0..WRITERS).map(|n| tokio::spawn(writer(store.clone(), n))).collect();
    // A watch that begins in the middle, at the revision of a list.
    let mut late = store.watch(all[0].clone(), Revision(0)).unwrap();
    let middle = loop {
        let event = late.next().await.unwrap();
        if event.revision >= Revision(200) {
            break event.revision;
        }
    };
    let late = start(&all[0], middle);
    let mut made = 0;
    for writer in writers {
        made += writer.await.unwrap();
    }
    for (resource, namespace) in [("pods", "a"), ("nodes", "a")] {
        store.write(create(Key::new(resource, namespace, "end"), 0)).await.unwrap();
    }
    let mut events = Vec::new();
    for watch in early {
        events.push(watch.await.unwrap());
    }
    assert_eq!(events[0].len() + events[1].len(), made);
    let mut revisions: Vec<_> = events.iter().flatten().map(|event| event.revision.0).collect();
    revisions.sort_unstable();
    assert!(revisions.into_iter().eq(1..=made as u64));
    let late = late.await.unwrap();
    assert!(!late.is_empty());
    assert!(late.iter().eq(events[0].iter().filter(|event| event.revision > middle)));
    let [partial] = partial;
    assert!(partial.await.unwrap().iter().eq(events[0].iter().filter(|e| some[0].contains(&e.entry.key))));
    // One object's past, after the fact.
    let mut single = store.watch(some[1].clone(), Revision(0)).unwrap();
    for expected in events[0].iter().filter(|event| some[1].contains(&event.entry.key)) {
        assert_eq!(single.next().await.unwrap(), *expected);
    }
    assert_eq!(single.progress(), store.revision());
}

#[tokio::test]
async fn a_watch_that_is_too_slow_is_told_so() {
    let config = Config { history_events_max: 10, ..Config::new("") };
    let store = in_memory(config);
    let mut watch = store.watch(Range::resource("pods"), Revision(0)).unwrap();
    let mut other = store.watch(Range::resource("nodes"), Revision(0)).unwrap();
    for n in 0..11 {
        store.write(create(key("pods", "a", n), 1)).await.unwrap();
    }
    assert_eq!(watch.next().await, Err(WatchClosed::Lagged { oldest: Revision(1) }));
    assert_eq!(watch.progress(), Revision(0));
    let again = store.watch(Range::resource("pods"), Revision(0)).err();
    assert_eq!(again, Some(WatchError::TooOld { oldest: Revision(1) }));
    let mut watch = store.watch(Range::resource("pods"), Revision(1)).unwrap();
    assert_eq!(watch.next().await.unwrap().revision, Revision(2));
    // Events of other resources neither reach a watch nor age it, but its progress advances with them.
    assert_eq!(other.progress(), Revision(11));
    store.write(create(key("nodes", "", 1), 1)).await.unwrap();
    assert_eq!(other.next().await.unwrap().revision, Revision(12));
    store.close().await;
}

/// A watch scans a bounded number of events at a time; this batch begins within one scan and would end in the next.
#[tokio::test]
async fn a_batch_is_watched_as_a_whole() {
    const SINGLE: usize = 200;
    let store = Store::in_memory();
    for n in 0..SINGLE {
        store.write(create(key("pods", "a", n), 1)).await.unwrap();
    }
    let batch = (SINGLE..SINGLE + BATCH_WRITES_MAX).map(|n| create(key("pods", "a", n), 1)).collect();
    let batch = store.write_batch(batch).await.unwrap()[0].revision;
    let after = store.write(create(key("pods", "a", 1000), 1)).await.unwrap().revision;
    let range = Range::resource("pods");
    let mut watch = store.watch(range.clone(), Revision(0)).unwrap();
    for n in 1..SINGLE as u64 {
        assert_eq!(watch.next().await.unwrap().revision, Revision(n));
    }
    let mut in_batch = 0;
    let before = watch.next().await.unwrap().revision;
    assert_eq!((before, watch.progress()), (Revision(SINGLE as u64), before));
    while watch.progress() < batch {
        assert_eq!(watch.progress(), before, "of a part of the batch");
        assert_eq!(watch.next().await.unwrap().revision, batch);
        in_batch += 1;
    }
    assert_eq!(in_batch, BATCH_WRITES_MAX);
    assert_eq!(watch.next().await.unwrap().revision, after);

    // From each of its numbers that is not its revision, a watch gets all of it.
    for start in before.0..batch.0 {
        let mut watch = store.watch(range.clone(), Revision(start)).unwrap();
        for _ in 0..BATCH_WRITES_MAX {
            assert_eq!(watch.next().await.unwrap().revision, batch);
        }
        let past = ListOptions { at: Some(Revision(start)), ..ListOptions::default() };
        assert_eq!(store.list(&range, &past).unwrap().entries.len(), SINGLE);
    }
}

#[tokio::test]
async fn a_batch_is_bounded_and_changes_each_object_once() {
    let store = Store::in_memory();
    let rejected = Err(WriteError::BatchRejected { limit: BATCH_WRITES_MAX });
    let too_many = (0..=BATCH_WRITES_MAX).map(|n| create(key("pods", "a", n), 1)).collect();
    assert_eq!(store.write_batch(too_many).await, rejected);
    let delete = Write::Delete { key: key("pods", "a", 1), expected: None };
    assert_eq!(store.write_batch(vec![create(key("pods", "a", 1), 1), delete]).await, rejected);
    assert_eq!((store.revision(), store.stats().writes), (Revision(0), 0));
}

#[tokio::test]
async fn the_history_drops_a_batch_as_a_whole() {
    let store = in_memory(Config { history_events_max: 10, ..Config::new("") });
    let batch = (0..6).map(|n| create(key("pods", "a", n), 1)).collect();
    let batch = store.write_batch(batch).await.unwrap()[0].revision;
    for n in 6..10 {
        store.write(create(key("pods", "a", n), 1)).await.unwrap();
    }
    let range = Range::resource("pods");
    assert!(store.watch(range.clone(), Revision(0)).is_ok(), "all ten are there");
    store.write(create(key("pods", "a", 10), 1)).await.unwrap();
    assert_eq!(store.stats().history_events, 5);
    for start in 0..batch.0 {
        let refused = store.watch(range.clone(), Revision(start)).err();
        assert_eq!(refused, Some(WatchError::TooOld { oldest: batch }));
    }
    let mut watch = store.watch(range, batch).unwrap();
    for revision in batch.0 + 1..=store.revision().0 {
        assert_eq!(watch.next().await.unwrap().revision, Revision(revision));
    }

    // One that is larger than the history leaves nothing of itself.
    let batch = (20..35).map(|n| create(key("pods", "a", n), 1)).collect();
    let batch = store.write_batch(batch).await.unwrap()[0].revision;
    assert_eq!(watch.next().await, Err(WatchClosed::Lagged { oldest: batch }));
}

#[tokio::test]
async fn a_busy_resource_does_not_cost_a_quiet_one_its_past() {
    let config = Config { history_bytes_max: 100_000, ..Config::new("") };
    let store = in_memory(config);
    store.write(create(key("nodes", "", 0), 1000)).await.unwrap();
    for n in 0..200 {
        store.write(create(key("leases", "a", n), 2000)).await.unwrap();
    }
    let stats = store.stats();
    assert!((90_000..=100_000).contains(&stats.history_bytes), "{}", stats.history_bytes);
    assert_eq!((stats.objects, stats.writes), (201, 200 + 1));
    let mut nodes = store.watch(Range::resource("nodes"), Revision(0)).unwrap();
    assert_eq!(nodes.next().await.unwrap().revision, Revision(1));
    assert!(store.watch(Range::resource("leases"), Revision(0)).is_err());
    // A list of now needs no past.
    let listing = store.list(&Range::resource("leases"), &ListOptions::default()).unwrap();
    assert_eq!((listing.entries.len(), listing.remaining, listing.next), (200, 0, None));
}

#[tokio::test]
async fn too_much_at_once_is_refused_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("objects.db");
    let config = Config {
        queue_writes_max: 1,
        queue_bytes_max: 1000,
        value_bytes_max: 600,
        queue_wait_max: Duration::from_millis(20),
        ..Config::new(&path)
    };
    let store = Store::open(config).unwrap();
    let too_large = store.write(create(key("pods", "a", 0), 601)).await;
    assert_eq!(too_large, Err(WriteError::TooLarge { bytes: 601, limit: 600 }));

    // An operator's tool holds the file: the writer waits for it.
    let operator = rusqlite::Connection::open(&path).unwrap();
    operator.execute_batch("BEGIN IMMEDIATE").unwrap();
    let write = |n, bytes| {
        let store = store.clone();
        tokio::spawn(async move { store.write(create(key("pods", "a", n), bytes)).await })
    };
    let first = write(1, 300);
    // The writer has taken it once the queue is empty again and a second one stays there.
    let mut queued = Vec::new();
    for n in 2.. {
        queued.push(write(n, 0));
        tokio::task::yield_now().await;
        let latest = tokio::time::timeout(Duration::from_millis(100), queued.last_mut().unwrap()).await;
        if let Ok(latest) = latest {
            assert_eq!(latest.unwrap(), Err(WriteError::Overloaded));
            queued.pop();
            break;
        }
    }
    assert!(!queued.is_empty());
    operator.execute_batch("COMMIT").unwrap();
    first.await.unwrap().unwrap();
    for write in queued {
        write.await.unwrap().unwrap();
    }

    operator.execute_batch("BEGIN IMMEDIATE").unwrap();
    let large = write(100, 600);
    // Bytes count as well as numbers: 600 of 1000 are taken.
    let begin = tokio::time::Instant::now();
    while store.stats().queued > 0 || begin.elapsed() < Duration::from_millis(20) {
        tokio::task::yield_now().await;
    }
    assert_eq!(write(101, 500).await.unwrap(), Err(WriteError::Overloaded));
    operator.execute_batch("COMMIT").unwrap();
    large.await.unwrap().unwrap();
    write(101, 500).await.unwrap().unwrap();
    store.close().await;
}
