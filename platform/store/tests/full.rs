//! A full disk: writes are refused with an explanation, nothing acknowledged is lost, and writes work again later.

use std::{fs, path::Path, process::Command, sync::Arc};

use mayfly_store::{Config, Entry, Key, ListOptions, Range, Store, Write, WriteError};

fn key(n: usize) -> Key {
    Key::new("configmaps", "default", format!("object-{n:04}"))
}

fn create(n: usize) -> Write {
    Write::Create { key: key(n), value: vec![b'x'; 10_000].into() }
}

/// Writes until it is full; returns how many were acknowledged.
async fn fill(store: &Store) -> usize {
    for n in 0..10_000 {
        match store.write(create(n)).await {
            Ok(_) => {}
            Err(WriteError::Full) => return n,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("it never became full");
}

fn all(store: &Store) -> Vec<Arc<Entry>> {
    store.list(&Range::resource("configmaps"), &ListOptions::default()).unwrap().entries
}

#[tokio::test]
async fn a_file_at_its_limit_refuses_until_something_is_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config { file_bytes_max: 1 << 20, ..Config::new(directory.path().join("objects.db")) };
    let store = Store::open(config.clone()).unwrap();
    let written = fill(&store).await;
    assert!((80..105).contains(&written), "{written}");
    let revision = store.revision();
    // The refused write took no revision and is not there; all the others are.
    assert_eq!(revision.0, written as u64);
    assert_eq!(store.get(&key(written)), None);
    assert_eq!(all(&store).len(), written);
    // All or none, also where the first of them would still fit.
    let small = Write::Update { key: key(0), value: "small".into(), expected: None };
    let both = store.write_all(vec![small.clone(), create(written), create(written + 1)]).await;
    assert_eq!(both.map(|_| ()), Err(WriteError::Full));
    assert_eq!(store.get(&key(0)).unwrap().value.len(), 10_000);
    store.write(small).await.unwrap();
    for n in 0..5 {
        store.write(Write::Delete { key: key(n), expected: None }).await.unwrap();
    }
    assert_eq!(store.write(create(written)).await.unwrap().revision.0, revision.0 + 7);
    let before = all(&store);
    store.close().await;
    assert_eq!(all(&Store::open(config).unwrap()), before);
}

/// A real full disk, where mounting one is allowed: the log cannot grow either.
#[tokio::test]
async fn a_full_disk_refuses_until_there_is_space() {
    let directory = tempfile::tempdir().unwrap();
    let Some(_mounted) = SmallDisk::mount(directory.path()) else {
        return skipped(
            "a_full_disk_refuses_until_there_is_space",
            "mounting a small disk is not allowed: the file's own limit is tested instead",
        );
    };
    let ballast = directory.path().join("ballast");
    fs::write(&ballast, vec![0; 2 << 20]).unwrap();
    let store = Store::open(Config::new(directory.path().join("objects.db"))).unwrap();
    let written = fill(&store).await;
    for _ in 0..3 {
        assert_eq!(store.write(create(written)).await.map(|_| ()), Err(WriteError::Full));
    }
    assert_eq!(all(&store).len(), written);
    assert!(store.is_full());
    fs::remove_file(&ballast).unwrap();
    for n in written..written + 20 {
        store.write(create(n)).await.unwrap();
    }
    assert!(!store.is_full(), "it is over with the first that is written");
    let before = all(&store);
    store.close().await;
    let reopened = Store::open(Config::new(directory.path().join("objects.db"))).unwrap();
    assert_eq!(all(&reopened), before);
    reopened.close().await;
}

#[expect(clippy::print_stdout, reason = "the runner reads this line from the test's output")]
fn skipped(test: &str, reason: &str) {
    println!("\nSKIPPED {test}: {reason}");
}

struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(path: &'a Path) -> Option<Self> {
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=6m", "tmpfs"]).arg(path).output();
        mount.is_ok_and(|output| output.status.success()).then_some(Self(path))
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}
