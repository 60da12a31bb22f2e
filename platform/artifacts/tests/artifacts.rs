//! The artifact store through its public interface, with every failure of an upload.

use std::{fs, io, path::Path, process::Command, time::Duration};

use bytes::Bytes;
use futures::stream;
use jiff::Timestamp;
use mayfly_api::Digest;
use mayfly_artifacts::{Artifacts, EngineHash, Quarantined, Removal, Stored, UploadError};
use tempfile::TempDir;

const LIMIT: u64 = 10 << 20;

fn area() -> (TempDir, Artifacts) {
    let directory = tempfile::tempdir().unwrap();
    let artifacts = Artifacts::open(directory.path()).unwrap();
    (directory, artifacts)
}

/// A content in chunks of 1000 bytes, as a body would come.
fn body(content: &[u8]) -> impl stream::Stream<Item = io::Result<Bytes>> + use<> {
    let chunks: Vec<_> = content.chunks(1000).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
    stream::iter(chunks)
}

async fn upload(artifacts: &Artifacts, content: &[u8]) -> Result<Stored, UploadError> {
    artifacts.upload(None, LIMIT, body(content)).await
}

/// Every file below a directory.
fn files(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => found.push(path.display().to_string()),
        }
    }
    found
}

#[tokio::test]
async fn a_content_is_found_by_its_digest_and_stored_once() {
    let (directory, artifacts) = area();
    let content: Vec<u8> = (0..3_000_000u32).flat_map(|n| n.to_le_bytes()).take(2_500_000).collect();
    let digest = Digest::of(&content);
    assert!(artifacts.path(&digest).is_none());
    let stored = artifacts.upload(Some(digest), LIMIT, body(&content)).await.unwrap();
    assert_eq!(stored, Stored { digest, bytes: 2_500_000, existed: false });
    let again = upload(&artifacts, &content).await.unwrap();
    assert_eq!(again, Stored { existed: true, ..stored });
    assert_eq!(fs::read(artifacts.path(&digest).unwrap()).unwrap(), content);
    assert_eq!(files(directory.path()).len(), 1);

    let reopened = Artifacts::open(directory.path()).unwrap();
    let list = reopened.list().await.unwrap();
    assert_eq!(list.len(), 1);
    assert_eq!((list[0].digest, list[0].bytes), (digest, 2_500_000));
    let age = Timestamp::now().duration_since(list[0].created);
    assert!(age < jiff::SignedDuration::from_mins(5), "{age}");
}

#[tokio::test]
async fn an_empty_content_is_a_content() {
    let (_directory, artifacts) = area();
    let stored = upload(&artifacts, b"").await.unwrap();
    assert_eq!(stored, Stored { digest: Digest::of(b""), bytes: 0, existed: false });
}

#[tokio::test]
async fn another_digest_than_announced_is_refused() {
    let (directory, artifacts) = area();
    let expected = Digest::of(b"announced");
    let error = artifacts.upload(Some(expected), LIMIT, body(b"sent")).await.unwrap_err();
    let actual = Digest::of(b"sent");
    assert!(
        matches!(&error, UploadError::DigestMismatch { expected: e, actual: a } if (*e, *a) == (expected, actual))
    );
    assert!(
        error.to_string().contains(&expected.to_string()) && error.to_string().contains(&actual.to_string())
    );
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test]
async fn the_limit_is_exact_and_ends_the_upload_at_once() {
    let (directory, artifacts) = area();
    let endless = stream::repeat_with(|| Ok::<_, io::Error>(Bytes::from_static(&[7; 4096])));
    let error = artifacts.upload(None, 100_000, endless).await.unwrap_err();
    assert!(matches!(error, UploadError::TooLarge { limit: 100_000 }));
    assert_eq!(files(directory.path()), [""; 0]);
    assert!(artifacts.upload(None, 4999, body(&[1; 5000])).await.is_err());
    assert_eq!(artifacts.upload(None, 5000, body(&[1; 5000])).await.unwrap().bytes, 5000);
}

#[tokio::test]
async fn a_broken_stream_leaves_nothing() {
    let (directory, artifacts) = area();
    let broken = stream::iter([
        Ok(Bytes::from(vec![1; 2 << 20])),
        Err(io::Error::new(io::ErrorKind::ConnectionReset, "peer hung up")),
    ]);
    let error = artifacts.upload(None, LIMIT, broken).await.unwrap_err();
    assert!(matches!(&error, UploadError::Stream(_)));
    assert!(error.to_string().contains("peer hung up"));
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_nothing() {
    let (directory, artifacts) = area();
    let (mut sender, receiver) = futures::channel::mpsc::channel::<io::Result<Bytes>>(0);
    let upload = tokio::spawn({
        let artifacts = artifacts.clone();
        async move { artifacts.upload(None, LIMIT, receiver).await }
    });
    // The second is taken only once the first, which fills the buffer, is in the file.
    for _ in 0..3 {
        futures::SinkExt::send(&mut sender, Ok(Bytes::from(vec![1; 2 << 20]))).await.unwrap();
    }
    assert_eq!(files(directory.path()).len(), 1);
    upload.abort();
    assert!(upload.await.unwrap_err().is_cancelled());
    // A write in progress ends on its own thread, and removes the file.
    tokio::time::timeout(Duration::from_secs(10), async {
        while !files(directory.path()).is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the temporary file is removed");
}

#[tokio::test]
async fn leftovers_of_a_crash_are_swept_at_open() {
    let (directory, artifacts) = area();
    let digest = upload(&artifacts, b"kept").await.unwrap().digest;
    let gone = Digest::of(b"gone");
    let engine: EngineHash = "engine-1".parse().unwrap();
    let made = artifacts.put_derived(&digest, &engine, b"made".to_vec()).await.unwrap();
    let orphan = made.with_file_name(format!("{}.cwasm", gone.hex()));
    let half = directory.path().join("sha256/.upload-abc123");
    let half_made = made.with_file_name(".upload-def456");
    for leftover in [&orphan, &half, &half_made] {
        fs::write(leftover, "left").unwrap();
    }
    let reopened = Artifacts::open(directory.path()).unwrap();
    for leftover in [&orphan, &half, &half_made] {
        assert!(!leftover.exists(), "{leftover:?}");
    }
    assert_eq!(reopened.path(&digest).map(|path| fs::read(path).unwrap()), Some(b"kept".to_vec()));
    assert_eq!(reopened.derived_path(&digest, &engine), Some(made));
}

#[tokio::test]
async fn a_content_that_was_cut_is_mended_by_an_upload() {
    let (_directory, artifacts) = area();
    let digest = upload(&artifacts, b"precious content").await.unwrap().digest;
    let path = artifacts.path(&digest).unwrap();
    fs::write(&path, "prec").unwrap();
    let mended = upload(&artifacts, b"precious content").await.unwrap();
    assert!(!mended.existed);
    assert_eq!(fs::read(&path).unwrap(), b"precious content");
    let error = artifacts.open_content(&Digest::of(b"never stored")).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[tokio::test]
async fn what_is_derived_goes_with_its_source() {
    let (directory, artifacts) = area();
    let digest = upload(&artifacts, b"component").await.unwrap().digest;
    let (old, new) = (EngineHash::from(1), EngineHash::from(2));
    for engine in [&old, &new] {
        assert_eq!(artifacts.derived_path(&digest, engine), None);
        let path = artifacts.put_derived(&digest, engine, engine.to_string().into_bytes()).await.unwrap();
        assert_eq!(artifacts.derived_path(&digest, engine), Some(path.clone()));
        assert_eq!(fs::read_to_string(path).unwrap(), engine.to_string());
    }
    assert_eq!(artifacts.remove_other_engines(&new).await.unwrap(), 1);
    assert_eq!(artifacts.derived_path(&digest, &old), None);
    assert!(artifacts.derived_path(&digest, &new).is_some());

    assert!(artifacts.remove(&digest).await.unwrap());
    assert!(!artifacts.remove(&digest).await.unwrap());
    assert_eq!(artifacts.derived_path(&digest, &new), None);
    let late = artifacts.put_derived(&digest, &new, b"late".to_vec()).await.unwrap_err();
    assert_eq!(late.kind(), io::ErrorKind::NotFound);
    assert_eq!(files(directory.path()), [""; 0]);
}

#[test]
fn engine_hashes_are_safe_file_names() {
    for good in ["0", "abc-123", &"f".repeat(64)] {
        assert_eq!(good.parse::<EngineHash>().unwrap().to_string(), good);
    }
    for bad in ["", "..", "a/b", "A", "a.b", &"f".repeat(65)] {
        assert!(bad.parse::<EngineHash>().is_err(), "{bad}");
    }
    assert_eq!(EngineHash::from(255).to_string(), "00000000000000ff");
}

#[test]
fn no_space_is_told_apart_from_other_failures() {
    for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
        assert!(matches!(UploadError::from(io::Error::from(kind)), UploadError::Full));
    }
    let other = io::Error::from(io::ErrorKind::PermissionDenied);
    assert!(matches!(UploadError::from(other), UploadError::Io(_)));
}

/// A real full disk, where mounting one is allowed.
#[tokio::test]
async fn a_full_disk_refuses_and_recovers() {
    let directory = tempfile::tempdir().unwrap();
    let Some(_mounted) = SmallDisk::mount(directory.path()) else {
        return skipped(
            "a_full_disk_refuses_and_recovers",
            "mounting a small disk is not allowed: the error's mapping is tested by itself",
        );
    };
    let artifacts = Artifacts::open(directory.path()).unwrap();
    let small = upload(&artifacts, &[1; 100_000]).await.unwrap().digest;
    assert!(matches!(upload(&artifacts, &[2; 2_000_000]).await, Err(UploadError::Full)));
    assert_eq!(files(directory.path()).len(), 1);
    assert_eq!(fs::read(artifacts.path(&small).unwrap()).unwrap(), [1; 100_000]);
    upload(&artifacts, &[3; 200_000]).await.unwrap();
}

#[expect(clippy::print_stdout, reason = "the runner reads this line from the test's output")]
fn skipped(test: &str, reason: &str) {
    println!("\nSKIPPED {test}: {reason}");
}

struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(path: &'a Path) -> Option<Self> {
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(path).output();
        mount.is_ok_and(|output| output.status.success()).then_some(Self(path))
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}

async fn quarantine(artifacts: &Artifacts, digest: &Digest) -> Quarantined {
    match artifacts.quarantine(digest, Timestamp::MAX).await.unwrap() {
        Removal::Quarantined(aside) => aside,
        Removal::Missing | Removal::Newer => panic!("{digest} is there, and as old as it may be"),
    }
}

#[tokio::test]
async fn a_content_that_is_set_aside_is_gone_unless_it_is_put_back() {
    let (directory, artifacts) = area();
    let digest = upload(&artifacts, b"wanted").await.unwrap().digest;
    let engine = EngineHash::from(1);
    let made = artifacts.put_derived(&digest, &engine, b"made".to_vec()).await.unwrap();
    let aside = quarantine(&artifacts, &digest).await;
    assert_eq!(artifacts.path(&digest), None);
    assert!(
        !artifacts.renew(&digest).await.unwrap(),
        "a client that wants to reference it is told to upload it"
    );
    assert_eq!(artifacts.list().await.unwrap(), []);
    assert!(matches!(artifacts.quarantine(&digest, Timestamp::MAX).await.unwrap(), Removal::Missing));
    aside.restore().await;
    assert_eq!(fs::read(artifacts.path(&digest).unwrap()).unwrap(), b"wanted");
    assert_eq!(artifacts.derived_path(&digest, &engine), Some(made));
    let age = Timestamp::now().duration_since(artifacts.list().await.unwrap()[0].created);
    assert!(age < jiff::SignedDuration::from_mins(5), "{age}");
    quarantine(&artifacts, &digest).await.remove().await.unwrap();
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test]
async fn an_upload_is_kept_whatever_becomes_of_what_was_set_aside() {
    let (directory, artifacts) = area();
    let digest = upload(&artifacts, b"wanted").await.unwrap().digest;
    let first = quarantine(&artifacts, &digest).await;
    assert!(!upload(&artifacts, b"wanted").await.unwrap().existed);
    let second = quarantine(&artifacts, &digest).await;
    assert!(!upload(&artifacts, b"wanted").await.unwrap().existed);
    first.remove().await.unwrap();
    second.restore().await;
    assert_eq!(fs::read(artifacts.path(&digest).unwrap()).unwrap(), b"wanted");
    assert_eq!(files(directory.path()).len(), 1);
}

/// The process ended before it was known whether a reference exists.
#[tokio::test]
async fn a_content_that_was_set_aside_is_there_after_the_next_start() {
    let (directory, artifacts) = area();
    let digest = upload(&artifacts, b"wanted").await.unwrap().digest;
    let path = artifacts.path(&digest).unwrap();
    fs::rename(&path, path.with_file_name(format!(".aside-{}.0", digest.hex()))).unwrap();
    let reopened = Artifacts::open(directory.path()).unwrap();
    assert_eq!(reopened.path(&digest).map(|path| fs::read(path).unwrap()), Some(b"wanted".to_vec()));
}

#[tokio::test]
async fn a_content_that_is_renewed_is_as_if_just_uploaded() {
    let (_directory, artifacts) = area();
    let digest = upload(&artifacts, b"kept").await.unwrap().digest;
    let old = std::time::SystemTime::from(Timestamp::from_second(1).unwrap());
    let file = fs::File::options().append(true).open(artifacts.path(&digest).unwrap()).unwrap();
    file.set_modified(old).unwrap();
    let seen = artifacts.list().await.unwrap()[0].created;
    assert!(artifacts.renew(&digest).await.unwrap());
    assert!(matches!(artifacts.quarantine(&digest, seen).await.unwrap(), Removal::Newer));
    assert_eq!(fs::read(artifacts.path(&digest).unwrap()).unwrap(), b"kept");
    assert!(!artifacts.renew(&Digest::of(b"absent")).await.unwrap());
    assert_eq!(artifacts.list().await.unwrap().len(), 1);
}
