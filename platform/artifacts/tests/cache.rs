//! A cache of another store: fetches, uploads and eviction, with every failure of the origin.

use std::{
    collections::HashMap,
    fs, io,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{
    FutureExt as _, StreamExt as _, TryStreamExt as _,
    future::{self, BoxFuture},
    stream,
};
use mayfly_api::Digest;
use mayfly_artifacts::{
    ArtifactOrigin, Artifacts, CacheConfig, ContentStream, EngineHash, FetchError, OriginError, UnpackError,
    UploadError,
};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::sync::Semaphore;

/// An origin in memory.
#[derive(Debug, Default)]
struct MemoryOrigin {
    contents: Mutex<HashMap<Digest, Bytes>>,
    /// Every request fails with this error.
    failure: Mutex<Option<OriginError>>,
    /// How the contents are sent.
    sending: Mutex<Sending>,
    fetches: AtomicUsize,
    uploads: AtomicUsize,
    renewals: AtomicUsize,
}

#[derive(Clone, Debug, Default)]
enum Sending {
    #[default]
    Whole,
    /// After a permit of this semaphore.
    Gated(Arc<Semaphore>),
    /// With a changed byte.
    Damaged,
    /// Half of it, then an error.
    Broken,
    /// Half of it, then nothing.
    Stalled,
}

impl MemoryOrigin {
    fn add(&self, content: impl Into<Bytes>) -> Digest {
        let content = content.into();
        let digest = Digest::of(&content);
        self.contents.lock().insert(digest, content);
        digest
    }

    fn send(&self, sending: Sending) {
        *self.sending.lock() = sending;
    }

    fn fail(&self, failure: Option<OriginError>) {
        *self.failure.lock() = failure;
    }

    fn check(&self) -> Result<(), OriginError> {
        self.failure.lock().clone().map_or(Ok(()), Err)
    }

    fn fetches(&self) -> usize {
        self.fetches.load(Ordering::SeqCst)
    }
}

impl ArtifactOrigin for MemoryOrigin {
    fn fetch(&self, digest: Digest) -> BoxFuture<'_, Result<Option<ContentStream>, OriginError>> {
        async move {
            self.fetches.fetch_add(1, Ordering::SeqCst);
            self.check()?;
            let sending = self.sending.lock().clone();
            if let Sending::Gated(gate) = &sending {
                gate.acquire().await.unwrap().forget();
            }
            let Some(content) = self.contents.lock().get(&digest).cloned() else { return Ok(None) };
            let half = stream::iter([Ok(content.slice(..content.len() / 2))]);
            Ok(Some(match sending {
                Sending::Whole | Sending::Gated(_) => stream::iter([Ok(content)]).boxed(),
                Sending::Damaged => {
                    let mut damaged = content.to_vec();
                    damaged[0] ^= 1;
                    stream::iter([Ok(damaged.into())]).boxed()
                }
                Sending::Broken => {
                    half.chain(stream::iter([Err(io::ErrorKind::ConnectionReset.into())])).boxed()
                }
                Sending::Stalled => half.chain(stream::pending()).boxed(),
            }))
        }
        .boxed()
    }

    fn renew(&self, digest: Digest) -> BoxFuture<'_, Result<bool, OriginError>> {
        self.renewals.fetch_add(1, Ordering::SeqCst);
        future::ready(self.check().map(|()| self.contents.lock().contains_key(&digest))).boxed()
    }

    fn upload(
        &self,
        digest: Digest,
        bytes: u64,
        content: ContentStream,
    ) -> BoxFuture<'_, Result<(), OriginError>> {
        async move {
            self.uploads.fetch_add(1, Ordering::SeqCst);
            self.check()?;
            if matches!(&*self.sending.lock(), Sending::Stalled) {
                return future::pending().await;
            }
            let content: Vec<Bytes> = content.try_collect().await.unwrap();
            let content = Bytes::from(content.concat());
            assert_eq!((content.len() as u64, Digest::of(&content)), (bytes, digest));
            self.contents.lock().insert(digest, content);
            Ok(())
        }
        .boxed()
    }
}

fn away() -> OriginError {
    OriginError::Unavailable("connection refused".into())
}

fn cache(config: CacheConfig) -> (TempDir, Arc<MemoryOrigin>, Artifacts) {
    let directory = tempfile::tempdir().unwrap();
    let origin = Arc::new(MemoryOrigin::default());
    let artifacts = Artifacts::open_cache(directory.path(), origin.clone(), config).unwrap();
    (directory, origin, artifacts)
}

fn body(content: &'static [u8]) -> impl stream::Stream<Item = io::Result<Bytes>> {
    stream::iter([Ok(Bytes::from_static(content))])
}

/// The names in the folder of contents, unfinished ones included.
fn contents(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory.join("sha256")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn concurrent_readers_share_one_fetch() {
    let (directory, origin, artifacts) = cache(CacheConfig::default());
    let digest = origin.add(vec![7; 3_000_000]);
    let gate = Arc::new(Semaphore::new(0));
    origin.send(Sending::Gated(gate.clone()));
    let mut readers = future::join_all((0..20).map(|_| artifacts.get(&digest)));
    assert!(futures::poll!(&mut readers).is_pending());
    gate.add_permits(20);
    for read in readers.await {
        assert_eq!(fs::read(&*read.unwrap()).unwrap(), vec![7; 3_000_000]);
    }
    artifacts.get(&digest).await.unwrap();
    assert_eq!(origin.fetches(), 1);
    assert_eq!(contents(directory.path()), [digest.hex()]);
}

#[tokio::test]
async fn a_fetch_goes_on_without_the_reader_that_began_it() {
    let (_directory, origin, artifacts) = cache(CacheConfig::default());
    let digest = origin.add("content");
    let gate = Arc::new(Semaphore::new(0));
    origin.send(Sending::Gated(gate.clone()));
    assert!(artifacts.get(&digest).now_or_never().is_none(), "it waits for the gate, and is dropped");
    assert!(artifacts.path(&digest).is_none());
    gate.add_permits(1);
    artifacts.get(&digest).await.unwrap();
    assert_eq!(origin.fetches(), 1);
}

#[tokio::test]
async fn a_damaged_or_broken_fetch_leaves_nothing_and_the_next_one_succeeds() {
    let config = CacheConfig { stall_timeout: Duration::from_millis(50), ..CacheConfig::default() };
    let (directory, origin, artifacts) = cache(config);
    let content = vec![1; 3_000_000];
    let digest = origin.add(content.clone());
    origin.send(Sending::Damaged);
    let error = artifacts.get(&digest).await.unwrap_err();
    assert!(matches!(error, FetchError::Damaged { .. }), "{error}");
    origin.send(Sending::Broken);
    let error = artifacts.get(&digest).await.unwrap_err();
    assert!(matches!(&error, FetchError::Origin { source: OriginError::Unavailable(_), .. }), "{error}");
    origin.send(Sending::Stalled);
    let error = artifacts.get(&digest).await.unwrap_err();
    assert!(error.to_string().contains("no answer for 0.05 s"), "{error}");
    assert_eq!(contents(directory.path()), [""; 0]);
    origin.send(Sending::Whole);
    assert_eq!(fs::read(&*artifacts.get(&digest).await.unwrap()).unwrap(), content);
}

#[tokio::test]
async fn an_origin_that_is_away_is_told_apart_from_one_that_lacks_the_content() {
    let (_directory, origin, artifacts) = cache(CacheConfig::default());
    let digest = Digest::of(b"content");
    let error = artifacts.get(&digest).await.unwrap_err();
    assert!(error.is_missing(), "{error}");
    origin.fail(Some(away()));
    let error = artifacts.get(&digest).await.unwrap_err();
    assert!(!error.is_missing());
    let expected = format!(
        "artifact {digest} cannot be fetched now: the server's artifact store is not available: connection refused"
    );
    assert_eq!(error.to_string(), expected);
    origin.add("content");
    origin.fail(None);
    artifacts.get(&digest).await.unwrap();
    // What is here needs no origin.
    origin.fail(Some(away()));
    artifacts.get(&digest).await.unwrap();
    assert_eq!(origin.fetches(), 3);
}

#[tokio::test]
async fn an_upload_returns_when_the_origin_has_it() {
    let (directory, origin, artifacts) = cache(CacheConfig::default());
    origin.fail(Some(away()));
    let error = artifacts.upload(None, 100, body(b"output")).await.unwrap_err();
    assert!(matches!(&error, UploadError::Origin(source) if *source == away()), "{error}");
    assert_eq!(contents(directory.path()), [""; 0]);
    origin.fail(None);
    let stored = artifacts.upload(None, 100, body(b"output")).await.unwrap();
    assert_eq!((stored.bytes, stored.existed), (6, false));
    assert_eq!(origin.contents.lock()[&stored.digest], "output");
    assert_eq!(fs::read(&*artifacts.get(&stored.digest).await.unwrap()).unwrap(), b"output");
    assert_eq!(origin.fetches(), 0);
    // A content that the origin has is renewed there instead.
    let again = artifacts.upload(None, 100, body(b"output")).await.unwrap();
    assert!(again.existed);
    assert_eq!(origin.uploads.load(Ordering::SeqCst), 1);
    assert_eq!(origin.renewals.load(Ordering::SeqCst), 3);
    assert!(artifacts.renew(&stored.digest).await.unwrap());
    assert_eq!(origin.renewals.load(Ordering::SeqCst), 4);
    // Also one that is here and not there.
    origin.contents.lock().clear();
    assert!(!artifacts.upload(None, 100, body(b"output")).await.unwrap().existed);
    assert_eq!(origin.contents.lock().len(), 1);
}

#[tokio::test]
async fn an_upload_that_the_origin_does_not_take_ends() {
    let config = CacheConfig { stall_timeout: Duration::from_millis(50), ..CacheConfig::default() };
    let (directory, origin, artifacts) = cache(config);
    origin.send(Sending::Stalled);
    let error = artifacts.upload(None, 100, body(b"output")).await.unwrap_err();
    assert!(error.to_string().contains("no answer for 0.05 s"), "{error}");
    assert_eq!(contents(directory.path()), [""; 0]);
    origin.send(Sending::Whole);
    artifacts.upload(None, 100, body(b"output")).await.unwrap();
}

#[tokio::test]
async fn above_the_limit_the_least_recently_used_contents_leave_unless_they_are_in_use() {
    let (directory, origin, artifacts) = cache(CacheConfig { bytes_max: 3_500, ..CacheConfig::default() });
    let digests: Vec<Digest> = (0..6u8).map(|n| origin.add(vec![n; 1_000])).collect();
    let pinned = artifacts.get(&digests[0]).await.unwrap();
    for digest in &digests[1..3] {
        artifacts.get(digest).await.unwrap();
    }
    // Used again, so that the third is the oldest.
    artifacts.get(&digests[1]).await.unwrap();
    let engine = EngineHash::from(1);
    let compiled = artifacts.put_derived(&digests[2], &engine, b"machine code").await.unwrap();
    artifacts.get(&digests[3]).await.unwrap();
    let present = |digests: &[Digest]| -> Vec<bool> {
        digests.iter().map(|digest| artifacts.path(digest).is_some()).collect()
    };
    assert_eq!(present(&digests), [true, true, false, true, false, false]);
    assert!(!compiled.exists(), "it goes with its content");
    let clone = pinned.clone();
    drop(pinned);
    artifacts.get(&digests[4]).await.unwrap();
    assert_eq!(present(&digests), [true, false, false, true, true, false]);
    drop(clone);
    for digest in &digests[3..] {
        artifacts.get(digest).await.unwrap();
    }
    assert_eq!(present(&digests), [false, false, false, true, true, true]);
    assert_eq!(contents(directory.path()).len(), 3, "nothing is left of the others");
    assert_eq!(origin.fetches(), 6);
    artifacts.get(&digests[0]).await.unwrap();
    assert_eq!(origin.fetches(), 7, "an evicted content is fetched again");
}

fn archive() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(5);
    header.set_mode(0o644);
    builder.append_data(&mut header, "a.txt", &b"hello"[..]).unwrap();
    builder.into_inner().unwrap()
}

#[tokio::test]
async fn an_archive_is_fetched_and_its_files_stay_while_they_are_in_use() {
    let (directory, origin, artifacts) = cache(CacheConfig { bytes_max: 0, ..CacheConfig::default() });
    let digest = Digest::of(&archive());
    assert!(matches!(artifacts.unpacked(&digest).await, Err(UnpackError::Missing(_))));
    origin.fail(Some(away()));
    let error = artifacts.unpacked(&digest).await.unwrap_err();
    assert!(matches!(&error, UnpackError::NotFetched(_)) && error.to_string().contains("refused"), "{error}");
    origin.fail(None);
    origin.add(archive());
    let folder = artifacts.unpacked(&digest).await.unwrap();
    assert_eq!(artifacts.evict().await.unwrap(), 0);
    assert_eq!(fs::read(folder.join("a.txt")).unwrap(), b"hello");
    let path = folder.to_path_buf();
    drop(folder);
    assert_eq!(artifacts.evict().await.unwrap(), 1);
    assert!(!path.exists());
    assert_eq!(fs::read_dir(directory.path().join("unpacked")).unwrap().count(), 0);
}

/// Contents are read, used and evicted at the same time: a path that was handed out always has its content.
#[tokio::test(flavor = "multi_thread")]
async fn a_content_in_use_is_never_evicted() {
    let (_directory, origin, artifacts) = cache(CacheConfig { bytes_max: 1_000, ..CacheConfig::default() });
    let digests: Vec<Digest> = (0..4u8).map(|n| origin.add(vec![n; 1_000])).collect();
    let readers = (0..8).map(|reader| {
        let (artifacts, digests) = (artifacts.clone(), digests.clone());
        tokio::spawn(async move {
            for round in 0..50 {
                let at = (reader + round) % digests.len();
                let read = artifacts.get(&digests[at]).await.unwrap();
                tokio::task::yield_now().await;
                assert_eq!(fs::read(&*read).unwrap(), vec![u8::try_from(at).unwrap(); 1_000]);
                artifacts.evict().await.unwrap();
            }
        })
    });
    for reader in future::join_all(readers).await {
        reader.unwrap();
    }
    assert!(origin.fetches() > digests.len(), "contents were evicted meanwhile");
}

#[test]
fn the_folder_of_a_store_does_not_become_a_cache() {
    let directory = tempfile::tempdir().unwrap();
    drop(Artifacts::open(directory.path()).unwrap());
    let open =
        || Artifacts::open_cache(directory.path(), Arc::<MemoryOrigin>::default(), CacheConfig::default());
    open().unwrap();
    fs::remove_file(directory.path().join("cache")).unwrap();
    fs::write(directory.path().join("sha256").join(Digest::of(b"x").hex()), "x").unwrap();
    let error = open().unwrap_err().to_string();
    assert!(error.contains("choose another folder"), "{error}");
}

const KILLED_IN: &str = "MAYFLY_TEST_CACHE";

/// The process that [`a_process_killed_during_a_fetch_leaves_no_partial_content`] kills.
#[tokio::test]
#[ignore = "the child of a_process_killed_during_a_fetch_leaves_no_partial_content"]
async fn fetch_without_end() {
    let Some(directory) = std::env::var_os(KILLED_IN) else { return };
    let origin = Arc::new(MemoryOrigin::default());
    let digest = origin.add(vec![5; 8 << 20]);
    origin.send(Sending::Stalled);
    let artifacts = Artifacts::open_cache(directory, origin, CacheConfig::default()).unwrap();
    artifacts.get(&digest).await.unwrap();
}

#[tokio::test]
async fn a_process_killed_during_a_fetch_leaves_no_partial_content() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fetch_without_end", "--ignored"])
        .env(KILLED_IN, directory.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let is_partial = || {
        let entries = fs::read_dir(directory.path().join("sha256")).into_iter().flatten();
        entries.flatten().any(|entry| entry.metadata().is_ok_and(|metadata| metadata.len() >= 4 << 20))
    };
    tokio::time::timeout(Duration::from_secs(60), async {
        while !is_partial() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(contents(directory.path()).len(), 1);
    let origin = Arc::new(MemoryOrigin::default());
    let digest = origin.add(vec![5; 8 << 20]);
    let artifacts = Artifacts::open_cache(directory.path(), origin.clone(), CacheConfig::default()).unwrap();
    assert_eq!(contents(directory.path()), [""; 0], "the partial file is swept");
    assert_eq!(fs::read(&*artifacts.get(&digest).await.unwrap()).unwrap(), vec![5; 8 << 20]);
    // A crash after the rename costs nothing.
    drop(artifacts);
    origin.fail(Some(away()));
    let artifacts = Artifacts::open_cache(directory.path(), origin, CacheConfig::default()).unwrap();
    artifacts.get(&digest).await.unwrap();
}

/// A real full disk, where mounting one is allowed.
#[tokio::test]
async fn on_a_full_disk_older_contents_make_space() {
    let directory = tempfile::tempdir().unwrap();
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(directory.path()).output();
    if !mount.is_ok_and(|output| output.status.success()) {
        return skipped("on_a_full_disk_older_contents_make_space", "mounting a small disk is not allowed");
    }
    let _unmount = Unmount(directory.path());
    let origin = Arc::new(MemoryOrigin::default());
    let artifacts = Artifacts::open_cache(directory.path(), origin.clone(), CacheConfig::default()).unwrap();
    let [old, new, large] =
        [(1, 400_000), (2, 400_000), (3, 2_000_000)].map(|(byte, length)| origin.add(vec![byte; length]));
    artifacts.get(&old).await.unwrap();
    artifacts.get(&new).await.unwrap();
    let third = origin.add(vec![4; 500_000]);
    let third = artifacts.get(&third).await.unwrap();
    assert_eq!(fs::metadata(&*third).unwrap().len(), 500_000);
    assert!(artifacts.path(&old).is_none(), "it was the oldest");
    let error = artifacts.get(&large).await.unwrap_err();
    assert!(matches!(error, FetchError::Full { .. }), "{error}");
    assert_eq!(contents(directory.path()).len(), 1, "only the pinned one");
}

#[expect(clippy::print_stdout, reason = "the runner reads this line from the test's output")]
fn skipped(test: &str, reason: &str) {
    println!("\nSKIPPED {test}: {reason}");
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}
