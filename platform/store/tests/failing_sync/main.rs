//! A disk that fails during a sync: the affected writes are not acknowledged, nothing is written afterwards, and
//! acknowledged writes are present at the next start. And a disk whose quota is used up for a time.
//!
//! The test runs this very binary again as a child, with a preloaded library that lets a sync fail on request, or
//! every write (`failing_sync.c`).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use mayfly_store::{Config, Key, Store, Write, WriteError};

const PATH: &str = "STORE_SYNC_TEST_PATH";
const ENDS: &str = "STORE_SYNC_TEST_ENDS";
const ORDER: &str = "FAIL_SYNC";
const FILE: &str = "FAIL_SYNC_OF";
const QUOTA: &str = "QUOTA_USED_UP";

fn key(name: &str) -> Key {
    Key::new("pods", "default", name)
}

fn create(name: &str) -> Write {
    Write::Create { key: key(name), value: vec![b'a'; 3000].into() }
}

/// The library, or the reason why there is none.
fn library(folder: &Path) -> Result<PathBuf, String> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/failing_sync/failing_sync.c");
    let library = folder.join("failing_sync.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl");
    match compiler.output() {
        Ok(output) if output.status.success() => Ok(library),
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => Err(format!("no C compiler ({error})")),
    }
}

/// Runs a child of this binary; `file` is the end of the name of the file whose sync fails.
fn run(child: &str, folder: &Path, library: &Path, file: &str, ends: &str) {
    let status = Command::new(env::current_exe().unwrap())
        .args(["--exact", child, "--ignored", "--test-threads", "1"])
        .env("LD_PRELOAD", library)
        .env(PATH, folder.join("objects.db"))
        .env(ENDS, ends)
        .env(ORDER, folder.join("order"))
        .env(FILE, file)
        .env(QUOTA, folder.join("quota"))
        .stdout(Stdio::null())
        .status()
        .unwrap();
    // Killed by itself where it has to end without closing anything.
    assert_eq!(status.success(), ends == "closed", "{child}: {status}");
    assert!(!folder.join("order").exists(), "{child}: no sync failed");
}

#[expect(clippy::print_stdout, reason = "the runner reads this line from the test's output")]
fn skipped(test: &str, reason: &str) {
    println!("\nSKIPPED {test}: {reason}");
}

/// Makes the next sync fail.
fn order() {
    fs::write(env::var_os(ORDER).unwrap(), "").unwrap();
}

/// Ends as the parent wants it: in order, or as a kill does.
async fn end(store: Store) {
    if env::var(ENDS).unwrap() == "closed" {
        store.close().await;
    } else {
        std::process::abort();
    }
}

fn block_on(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work);
}

#[test]
#[ignore = "the child of a_sync_that_fails_is_the_end_of_writing"]
fn child_whose_log_fails() {
    let Some(path) = env::var_os(PATH) else { return };
    block_on(async {
        let store = Store::open(Config::new(path)).unwrap();
        store.write(create("a")).await.unwrap();
        store.write(create("b")).await.unwrap();
        assert_eq!(store.failure(), None);
        order();
        for name in ["lost", "later", "later still"] {
            let Err(WriteError::Failed(why)) = store.write(create(name)).await else { panic!("{name}") };
            assert!(why.contains("disk I/O error") && why.contains("until the next start"), "{why}");
            assert_eq!(store.failure(), Some(why));
            assert_eq!(store.get(&key(name)), None);
        }
        assert_eq!((store.revision().0, store.get(&key("b")).is_some()), (2, true));
        end(store).await;
    });
}

#[test]
fn a_sync_that_fails_is_the_end_of_writing() {
    let folder = tempfile::tempdir().unwrap();
    let library = match library(folder.path()) {
        Ok(library) => library,
        Err(reason) => return skipped("a_sync_that_fails_is_the_end_of_writing", &reason),
    };
    for ends in ["closed", "killed"] {
        let folder = tempfile::tempdir().unwrap();
        run("child_whose_log_fails", folder.path(), &library, "objects.db-wal", ends);
        block_on(async {
            let store = Store::open(Config::new(folder.path().join("objects.db"))).unwrap();
            let there = ["a", "b", "lost", "later"].map(|name| store.get(&key(name)).is_some());
            assert_eq!(there, [true, true, false, false], "{ends}");
            assert_eq!((store.revision().0, store.failure()), (2, None));
            store.write(create("lost")).await.unwrap();
            store.close().await;
        });
    }
}

#[test]
#[ignore = "the child of a_fold_that_fails_loses_nothing"]
fn child_whose_data_file_fails() {
    let Some(path) = env::var_os(PATH) else { return };
    block_on(async {
        let store = Store::open(Config { log_bytes_max: 60_000, ..Config::new(path) }).unwrap();
        order();
        for n in 0..60 {
            store.write(create(&format!("pod-{n}"))).await.unwrap();
        }
        assert_eq!(store.failure(), None);
        end(store).await;
    });
}

/// The log keeps data whose checkpoint failed, and the next checkpoint writes all of it again.
#[test]
fn a_fold_that_fails_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let library = match library(folder.path()) {
        Ok(library) => library,
        Err(reason) => return skipped("a_fold_that_fails_loses_nothing", &reason),
    };
    for ends in ["closed", "killed"] {
        let folder = tempfile::tempdir().unwrap();
        run("child_whose_data_file_fails", folder.path(), &library, "objects.db", ends);
        let store = Store::open(Config::new(folder.path().join("objects.db"))).unwrap();
        assert_eq!((store.revision().0, store.stats().objects), (60, 60), "{ends}");
    }
}

#[test]
#[ignore = "the child of a_quota_that_is_used_up_is_a_full_disk"]
fn child_whose_quota_is_used_up() {
    let Some(path) = env::var_os(PATH) else { return };
    block_on(async {
        let store = Store::open(Config::new(path)).unwrap();
        store.write(create("a")).await.unwrap();
        let quota = env::var_os(QUOTA).unwrap();
        fs::File::create(&quota).unwrap();
        for _ in 0..2 {
            assert_eq!(store.write(create("refused")).await.map(|_| ()), Err(WriteError::Full));
        }
        assert!(store.is_full() && store.failure().is_none());
        fs::remove_file(&quota).unwrap();
        store.write(create("b")).await.unwrap();
        assert!(!store.is_full());
        end(store).await;
    });
}

#[test]
fn a_quota_that_is_used_up_is_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let library = match library(folder.path()) {
        Ok(library) => library,
        Err(reason) => return skipped("a_quota_that_is_used_up_is_a_full_disk", &reason),
    };
    for ends in ["closed", "killed"] {
        let folder = tempfile::tempdir().unwrap();
        run("child_whose_quota_is_used_up", folder.path(), &library, "no file's", ends);
        let store = Store::open(Config::new(folder.path().join("objects.db"))).unwrap();
        let there = ["a", "refused", "b"].map(|name| store.get(&key(name)).is_some());
        assert_eq!(there, [true, false, true], "{ends}");
        assert!(!folder.path().join("objects.db-room").exists());
    }
}
