//! The conformance suite of storages with several writers: each store sees the commits of all, once and in the order of
//! their revisions. Every test runs on each kind of shared storage.

use std::sync::Arc;

use futures::{FutureExt as _, future::join_all};
use mayfly_store::{
    Config, EventKind, FollowError, Key, ListOptions, OpenError, Range, Revision, SharedStorage,
    StorageBackend, Store, WatchClosed, Write, WriteError, WriteEvent,
};
use tempfile::TempDir;

fn key(resource: &str, name: impl std::fmt::Display) -> Key {
    Key::new(resource, "a", name.to_string())
}

fn create(key: Key) -> Write {
    Write::Create { key, value: "{}".into() }
}

fn update(key: Key, value: impl Into<bytes::Bytes>, expected: Option<Revision>) -> Write {
    Write::Update { key, value: value.into(), expected }
}

fn delete(key: Key) -> Write {
    Write::Delete { key, expected: None }
}

/// A shared storage with the configuration of its stores, and the folder of its file.
struct StorageFixture {
    storage: SharedStorage,
    config: Config,
    _folder: Option<TempDir>,
}

impl StorageFixture {
    fn each(config: &Config) -> [Self; 2] {
        let memory = SharedStorage::in_memory(config);
        let folder = tempfile::tempdir().unwrap();
        let on_disk = Config { path: folder.path().join("objects.db"), ..config.clone() };
        let file = SharedStorage::open(&on_disk).unwrap();
        [
            Self { storage: memory, config: config.clone(), _folder: None },
            Self { storage: file, config: on_disk, _folder: Some(folder) },
        ]
    }

    fn store(&self) -> Store {
        let (stored, backend) = self.storage.attach();
        Store::with_backend(self.config.clone(), stored, backend)
    }
}

fn in_each() -> [StorageFixture; 2] {
    StorageFixture::each(&Config::new(""))
}

/// All events of a resource after a revision, up to an object named `end`.
async fn until_end(store: &Store, resource: &str, after: Revision) -> Vec<Arc<WriteEvent>> {
    let mut watch = store.watch(Range::resource(resource), after).unwrap();
    let mut events = Vec::new();
    while events.last().is_none_or(|event: &Arc<WriteEvent>| &*event.entry.key.name != "end") {
        events.push(watch.next().await.unwrap());
    }
    events
}

/// Requests that change a pod, which all writers share, and create a node of their own. Those that meet another
/// writer's change are refused; returns the number of the others.
async fn write_shared(store: Store, writer: usize) -> usize {
    const ROUNDS: usize = 60;
    let mut pods = 0;
    for round in 0..ROUNDS {
        let pod = key("pods", (round * 7 + writer) % 5);
        let value = format!("{writer}-{round}");
        let expected = store.get(&pod).map(|entry| entry.modified);
        let pod = match expected {
            None => create(pod),
            Some(_) if round % 5 == 0 => Write::Delete { key: pod, expected },
            Some(_) => update(pod, value.clone(), expected),
        };
        let writes = vec![pod, create(key("nodes", &value))];
        let written = match round % 3 {
            0 => store.write_batch(writes).await,
            _ => store.write_all(writes).await,
        };
        match written {
            Ok(_) => pods += 1,
            Err(WriteError::Conflict { .. } | WriteError::AlreadyExists | WriteError::NotFound) => {}
            Err(error) => panic!("{error}"),
        }
    }
    pods
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_store_sees_the_commits_of_all_once_and_in_order() {
    for fixture in in_each() {
        let stores = [fixture.store(), fixture.store(), fixture.store()];
        let watching = stores.clone().map(|store| {
            tokio::spawn(async move {
                let pods = until_end(&store, "pods", Revision(0)).await;
                (pods, until_end(&store, "nodes", Revision(0)).await)
            })
        });
        let writers = (0..6).map(|n| tokio::spawn(write_shared(stores[n % 3].clone(), n)));
        let mut pods = 0;
        for made in join_all(writers).await {
            pods += made.unwrap();
        }
        let ends = vec![create(key("pods", "end")), create(key("nodes", "end"))];
        let last = stores[1].write_batch(ends).await.unwrap()[0].revision;

        let mut seen = Vec::new();
        for watched in watching {
            seen.push(watched.await.unwrap());
        }
        let (of_pods, of_nodes) = &seen[0];
        assert!(pods > 6, "each writer makes some");
        assert_eq!((of_pods.len(), of_nodes.len()), (pods + 1, pods + 1));
        for events in [of_pods, of_nodes] {
            assert!(events.is_sorted_by(|one, next| one.revision < next.revision));
        }
        for event in of_pods {
            let same = |other: &&Arc<WriteEvent>| other.entry.key == event.entry.key;
            let before = of_pods.iter().filter(same).rev().find(|other| other.revision < event.revision);
            let before = before.filter(|before| before.kind != EventKind::Deleted);
            assert_eq!(event.previous.as_ref(), before.map(|before| &before.entry), "an event is missing");
        }
        assert!(seen.iter().all(|other| *other == seen[0]), "the stores differ");
        for store in &stores {
            assert_eq!(store.revision(), last);
            for resource in ["pods", "nodes"] {
                let list = |store: &Store| store.list(&Range::resource(resource), &ListOptions::default());
                assert_eq!(list(store), list(&stores[0]));
            }
        }
    }
}

#[tokio::test]
async fn a_write_is_checked_against_the_acknowledged_writes_of_other_stores() {
    for fixture in in_each() {
        let (one, other) = (fixture.store(), fixture.store());
        let pod = || key("pods", "x");
        let created = one.write(create(pod())).await.unwrap().revision;
        assert_eq!(other.write(create(pod())).await, Err(WriteError::AlreadyExists));
        let updated = other.write(update(pod(), "2", Some(created))).await.unwrap().revision;
        assert_eq!(updated.0, created.0 + 1);
        let stale = one.write(update(pod(), "3", Some(created))).await;
        assert_eq!(stale, Err(WriteError::Conflict { current: updated }));
        assert_eq!(one.get(&pod()).unwrap().value, "2", "it has followed before it refused");
        one.write(delete(pod())).await.unwrap();
        assert_eq!(other.write(delete(pod())).await, Err(WriteError::NotFound));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_updates_are_not_lost() {
    const CLIENTS: usize = 4;
    const UPDATES: usize = 25;
    for fixture in in_each() {
        let stores = [fixture.store(), fixture.store()];
        stores[0].write(Write::Create { key: key("counters", "x"), value: "0".into() }).await.unwrap();
        let count = |store: &Store| {
            let entry = store.get(&key("counters", "x"))?;
            let count: usize = std::str::from_utf8(&entry.value).unwrap().parse().unwrap();
            Some((count, entry.modified))
        };
        let clients = (0..CLIENTS).map(|client| {
            let store = stores[client % 2].clone();
            async move {
                let mut made = 0;
                while made < UPDATES {
                    let (value, expected) = count(&store).unwrap_or_default();
                    let next = update(key("counters", "x"), (value + 1).to_string(), Some(expected));
                    match store.write(next).await {
                        Ok(_) => made += 1,
                        Err(WriteError::Conflict { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        for client in join_all(clients.map(tokio::spawn)).await {
            client.unwrap();
        }
        // A write that changes nothing else makes both up to date.
        for store in stores {
            store.write(delete(key("counters", "absent"))).await.unwrap_err();
            assert_eq!(count(&store).unwrap().0, CLIENTS * UPDATES);
        }
    }
}

/// Three single writes, two at once with a revision each, three in one revision, and two more.
async fn write_some(store: &Store) -> Vec<(String, Revision)> {
    let mut written = Vec::new();
    for name in ["a", "b", "c"] {
        written.push(store.write(create(key("pods", name))).await.unwrap());
    }
    let two = vec![create(key("pods", "d")), delete(key("pods", "a"))];
    written.extend(store.write_all(two).await.unwrap());
    let three = vec![create(key("pods", "e")), update(key("pods", "b"), "2", None), delete(key("pods", "c"))];
    written.extend(store.write_batch(three).await.unwrap());
    for name in ["a", "end"] {
        written.push(store.write(create(key("pods", name))).await.unwrap());
    }
    written.into_iter().map(|written| (written.entry.key.name.to_string(), written.revision)).collect()
}

fn names(events: &[Arc<WriteEvent>]) -> Vec<(String, Revision)> {
    events.iter().map(|event| (event.entry.key.name.to_string(), event.revision)).collect()
}

#[tokio::test]
async fn following_and_watching_resume_at_every_revision() {
    for fixture in in_each() {
        let (_, mut backend) = fixture.storage.attach();
        let (one, other) = (fixture.store(), fixture.store());
        let written = write_some(&one).await;
        let revisions: Vec<_> = written.iter().map(|(_, revision)| revision.0).collect();
        assert_eq!(revisions, [1, 2, 3, 4, 5, 8, 8, 8, 9, 10]);
        assert_eq!(names(&until_end(&other, "pods", Revision(0)).await), written);
        for from in (0..=10).map(Revision) {
            let expected: Vec<_> = written.iter().filter(|(_, revision)| *revision > from).cloned().collect();
            assert_eq!(names(&backend.follow(from).unwrap()), expected, "from {from}");
            if from < Revision(10) {
                assert_eq!(names(&until_end(&other, "pods", from).await), expected, "from {from}");
            }
        }
    }
}

#[tokio::test]
async fn the_events_of_a_revision_become_visible_together() {
    for fixture in in_each() {
        let (one, other) = (fixture.store(), fixture.store());
        let mut pods = other.watch(Range::resource("pods"), Revision(0)).unwrap();
        for n in 0..50 {
            let three = ["pods", "nodes", "leases"].map(|resource| create(key(resource, n)));
            let revision = one.write_batch(three.into()).await.unwrap()[2].revision;
            let event = pods.next().await.unwrap();
            assert_eq!((event.revision, pods.progress()), (revision, revision));
            for resource in ["nodes", "leases"] {
                assert_eq!(other.get(&key(resource, n)).unwrap().modified, revision);
            }
            assert_eq!(other.revision(), revision);
        }
    }
}

#[tokio::test]
async fn a_follower_that_is_too_old_is_refused() {
    let config = Config { history_events_max: 8, ..Config::new("") };
    for fixture in StorageFixture::each(&config) {
        let (late, late_backend) = fixture.storage.attach();
        let (_, mut backend) = fixture.storage.attach();
        let one = fixture.store();
        let batch = (0..5).map(|n| create(key("pods", n))).collect();
        let batch = one.write_batch(batch).await.unwrap()[0].revision;
        for n in 5..8 {
            one.write(create(key("pods", n))).await.unwrap();
        }
        assert_eq!(backend.follow(Revision(0)).unwrap().len(), 8, "all of it");
        one.write(create(key("pods", 8))).await.unwrap();
        // The ninth event costs the whole batch its place.
        let compacted = FollowError::Compacted { oldest: batch };
        for from in 0..batch.0 {
            assert_eq!(backend.follow(Revision(from)), Err(compacted));
        }
        let kept: Vec<_> = backend.follow(batch).unwrap().iter().map(|event| event.revision.0).collect();
        assert_eq!(kept, [6, 7, 8, 9]);

        // A store that started with that revision does not serve an old state: it closes.
        let store = Store::with_backend(config.clone(), late, late_backend);
        let mut watch = store.watch(Range::resource("pods"), Revision(0)).unwrap();
        assert_eq!(watch.next().await, Err(WatchClosed::Closed));
        let Err(WriteError::Failed(why)) = store.write(create(key("pods", "x"))).await else {
            panic!("written");
        };
        assert!(
            why.contains("it starts after revision 5") && why.contains("start the server again"),
            "{why}"
        );
        assert_eq!(store.failure(), Some(why));
        // The others go on.
        one.write(create(key("pods", "x"))).await.unwrap();
    }
}

#[tokio::test]
async fn a_store_gets_what_was_committed_while_it_started() {
    for fixture in in_each() {
        let (stored, backend) = fixture.storage.attach();
        let written = write_some(&fixture.store()).await;
        let late = Store::with_backend(fixture.config.clone(), stored, backend);
        assert_eq!(names(&until_end(&late, "pods", Revision(0)).await), written);
        // One that started later has the state, and no history before it.
        let last = fixture.store();
        assert_eq!(last.revision(), Revision(10));
        assert!(last.watch(Range::resource("pods"), Revision(9)).is_err());
        let list = |store: &Store| store.list(&Range::resource("pods"), &ListOptions::default()).unwrap();
        assert_eq!(list(&last), list(&late));
    }
}

#[tokio::test]
async fn a_commit_on_an_older_state_is_refused() {
    for fixture in in_each() {
        let store = fixture.store();
        let (_, mut backend): (_, Box<dyn StorageBackend>) = fixture.storage.attach();
        write_some(&store).await;
        let event = backend.follow(Revision(9)).unwrap();
        let refused = backend.commit(Revision(9), &event);
        assert!(refused.is_err_and(|error| error.to_string().contains("committed revision 10")));
        assert_eq!(backend.follow(Revision(10)), Ok(Vec::new()));
    }
}

#[tokio::test]
async fn a_file_is_shared_within_one_process_and_closed_with_its_last_store() {
    let [_, StorageFixture { storage, config, _folder }] = in_each();
    let attach = || {
        let (stored, backend) = storage.attach();
        Store::with_backend(config.clone(), stored, backend)
    };
    let (one, other) = (attach(), attach());
    let mut watch = other.watch(Range::resource("pods"), Revision(0)).unwrap();
    one.write(create(key("pods", "x"))).await.unwrap();
    assert!(matches!(Store::open(config.clone()), Err(OpenError::InUse { .. })));
    one.close().await;
    assert_eq!(watch.next().await.unwrap().revision, Revision(1), "it was committed before");
    assert!(watch.next().now_or_never().is_none(), "the other store is open");
    other.write(create(key("pods", "y"))).await.unwrap();
    let names = |store: &Store| {
        let listing = store.list(&Range::resource("pods"), &ListOptions::default()).unwrap();
        listing.entries.iter().map(|entry| entry.key.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!((names(&one), names(&other)), (vec!["x".into()], vec!["x".into(), "y".into()]));
    other.close().await;
    drop(storage);
    let reopened = Store::open(config).unwrap();
    assert_eq!((names(&reopened), reopened.revision()), (vec!["x".into(), "y".into()], Revision(2)));
}
