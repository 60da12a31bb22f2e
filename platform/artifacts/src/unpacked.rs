//! Archives whose files are served to instances: a tar archive is unpacked once, into a folder named after its digest.

use std::{
    fs::{self, File},
    io,
    path::{Component, Path, PathBuf},
};

use mayfly_api::Digest;
use tar::EntryType;

use crate::{
    artifacts::Artifacts,
    cache::{FetchError, PinnedPath},
    derived::digest_of,
    files::{self, blocking},
};

/// Files and folders of one archive.
const ENTRIES_MAX: usize = 10_000;
/// Bytes of all files of one archive.
const BYTES_MAX: u64 = 256 << 20;
const UNPACKING_PREFIX: &str = ".unpacking-";

/// The reason for which an archive's files cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("archive {0} is not in the artifact store: deploy the function again")]
    Missing(Digest),
    /// The archive is refused for its content.
    #[error("archive {digest} cannot be unpacked: {why}")]
    Refused { digest: Digest, why: String },
    #[error("cannot unpack archive {digest}: {source}")]
    Io { digest: Digest, source: io::Error },
    /// It exists perhaps, but cannot be fetched now.
    #[error(transparent)]
    NotFetched(FetchError),
}

impl Artifacts {
    /// The folder with the files of a tar archive, which is fetched and unpacked at the first call. It has regular
    /// files and folders only; callers must not write to it.
    pub async fn unpacked(&self, digest: &Digest) -> Result<PinnedPath, UnpackError> {
        let pin = self.pin(digest);
        let folder = self.unpacked_folder(digest);
        let is_there = blocking({
            let folder = folder.clone();
            move || folder.is_dir()
        });
        if !is_there.await {
            let archive = self.get(digest).await.map_err(|error| match error {
                FetchError::Missing(digest) => UnpackError::Missing(digest),
                error => UnpackError::NotFetched(error),
            })?;
            let (artifacts, digest, folder) = (self.clone(), *digest, folder.clone());
            blocking(move || {
                // Held to the end: the caller may be gone.
                let _archive = archive;
                artifacts.unpack(&digest, &folder)
            })
            .await?;
        }
        Ok(PinnedPath::new(folder, pin))
    }

    /// Unpacks beside the final place, so that a folder of that name is always complete.
    fn unpack(&self, digest: &Digest, folder: &Path) -> Result<(), UnpackError> {
        let failed = |source| UnpackError::Io { digest: *digest, source };
        let archive = match File::open(self.content(digest)) {
            Ok(archive) => archive,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(UnpackError::Missing(*digest));
            }
            Err(error) => return Err(failed(error)),
        };
        let folders = self.unpacked_folders();
        fs::create_dir_all(&folders).map_err(failed)?;
        let draft = tempfile::Builder::new().prefix(UNPACKING_PREFIX).tempdir_in(&folders).map_err(failed)?;
        let refused = |why| UnpackError::Refused { digest: *digest, why };
        write_entries(io::BufReader::new(archive), draft.path()).map_err(|error| match error {
            EntryError::Refused(why) => refused(why),
            EntryError::Io(source) => failed(source),
        })?;
        let _guard = self.changes.lock();
        if self.path(digest).is_none() {
            return Err(UnpackError::Missing(*digest));
        }
        match fs::rename(draft.path(), folder) {
            // A concurrent call has unpacked it.
            Err(_) if folder.is_dir() => Ok(()),
            renamed => renamed.map_err(failed),
        }
    }

    /// Removes the files of an archive that was removed.
    pub(crate) fn remove_unpacked(&self, digest: &Digest) -> io::Result<()> {
        match fs::remove_dir_all(self.unpacked_folder(digest)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub(crate) fn is_unpacked(&self, digest: &Digest) -> bool {
        self.unpacked_folder(digest).is_dir()
    }

    /// Hides the folder of an archive, fast, and returns the path under which it is to be removed.
    pub(crate) fn discard_unpacked(&self, digest: &Digest) -> Option<PathBuf> {
        let hidden = self.unpacked_folders().join(format!("{UNPACKING_PREFIX}{}", digest.hex()));
        match fs::rename(self.unpacked_folder(digest), &hidden) {
            Ok(()) => Some(hidden),
            // Not unpacked; or an earlier removal failed, and the files stay until the next open.
            Err(_) => None,
        }
    }

    /// Removes incomplete folders, and those whose archive was removed.
    pub(crate) fn sweep_unpacked(&self) -> io::Result<usize> {
        let mut swept = 0;
        for path in files::entries(&self.unpacked_folders())? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let digest = digest_of(name);
            let is_orphan = digest.is_some_and(|digest| self.path(&digest).is_none());
            if is_orphan || name.starts_with(UNPACKING_PREFIX) {
                fs::remove_dir_all(&path)?;
                swept += 1;
            }
        }
        Ok(swept)
    }

    fn unpacked_folder(&self, digest: &Digest) -> PathBuf {
        self.unpacked_folders().join(digest.hex())
    }
}

enum EntryError {
    Refused(String),
    Io(io::Error),
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Writes an archive's files below a folder. Links, devices and paths that lead out of it are refused.
fn write_entries(archive: impl io::Read, folder: &Path) -> Result<(), EntryError> {
    let mut archive = tar::Archive::new(archive);
    let not_tar = |error: io::Error| EntryError::Refused(format!("it is not a tar archive ({error})"));
    let (mut count, mut bytes) = (0usize, 0u64);
    for entry in archive.entries().map_err(not_tar)? {
        let mut entry = entry.map_err(not_tar)?;
        let path = entry.path().map_err(not_tar)?.into_owned();
        let shown = path.display().to_string();
        count += 1;
        bytes = bytes.saturating_add(entry.size());
        if count > ENTRIES_MAX || bytes > BYTES_MAX {
            let megabytes = BYTES_MAX >> 20;
            return Err(EntryError::Refused(format!(
                "it has more than {ENTRIES_MAX} files or {megabytes} MiB of them"
            )));
        }
        let is_inside =
            path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if !is_inside {
            return Err(EntryError::Refused(format!("{shown:?} leads out of it")));
        }
        let target = folder.join(&path);
        match entry.header().entry_type() {
            EntryType::Directory => fs::create_dir_all(&target)?,
            EntryType::Regular => {
                fs::create_dir_all(target.parent().unwrap_or(folder))?;
                let written = io::copy(&mut entry, &mut File::create(&target)?)?;
                if written != entry.size() {
                    return Err(EntryError::Refused(format!("it ends within {shown:?}")));
                }
            }
            _ => return Err(EntryError::Refused(format!("{shown:?} is neither a file nor a folder"))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, kind, content) in entries {
            let mut header = tar::Header::new_ustar();
            // Writes the raw bytes, because the builder's own check would refuse paths that lead out.
            header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            builder.append(&header, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    async fn stored(artifacts: &Artifacts, content: Vec<u8>) -> Digest {
        let digest = Digest::of(&content);
        let chunks = futures::stream::iter([Ok::<_, io::Error>(bytes::Bytes::from(content))]);
        artifacts.upload(Some(digest), u64::MAX, chunks).await.unwrap();
        digest
    }

    #[tokio::test]
    async fn an_archive_is_unpacked_once_and_goes_with_its_content() {
        let directory = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(directory.path()).unwrap();
        let content = archive(&[
            ("static", EntryType::Directory, b""),
            ("static/a.txt", EntryType::Regular, b"hello"),
            ("deep/er/b.bin", EntryType::Regular, &[0; 4096]),
        ]);
        let digest = stored(&artifacts, content).await;
        let folder = artifacts.unpacked(&digest).await.unwrap();
        assert_eq!(fs::read_to_string(folder.join("static/a.txt")).unwrap(), "hello");
        assert_eq!(fs::metadata(folder.join("deep/er/b.bin")).unwrap().len(), 4096);
        assert_eq!(*artifacts.unpacked(&digest).await.unwrap(), *folder);
        fs::create_dir(artifacts.unpacked_folders().join(".unpacking-x")).unwrap();
        drop(artifacts);
        let artifacts = Artifacts::open(directory.path()).unwrap();
        assert_eq!(fs::read_dir(artifacts.unpacked_folders()).unwrap().count(), 1, "leftovers are swept");
        assert!(artifacts.remove(&digest).await.unwrap());
        assert!(!folder.exists());
        assert!(matches!(artifacts.unpacked(&digest).await, Err(UnpackError::Missing(_))));
    }

    #[tokio::test]
    async fn what_could_reach_other_files_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(directory.path()).unwrap();
        for (entries, expected) in [
            (&[("../out", EntryType::Regular, &b"x"[..])], "leads out of it"),
            (&[("/etc/passwd", EntryType::Regular, b"x")], "leads out of it"),
            (&[("a/../../out", EntryType::Regular, b"x")], "leads out of it"),
            (&[("link", EntryType::Symlink, b"")], "neither a file nor a folder"),
            (&[("link", EntryType::Link, b"")], "neither a file nor a folder"),
            (&[("device", EntryType::Block, b"")], "neither a file nor a folder"),
        ] {
            let digest = stored(&artifacts, archive(entries)).await;
            let error = artifacts.unpacked(&digest).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{entries:?}: {error}");
        }
        let digest = stored(&artifacts, b"no archive at all, but longer than a block of it".repeat(32)).await;
        let error = artifacts.unpacked(&digest).await.unwrap_err().to_string();
        assert!(error.contains("not a tar archive"), "{error}");
        assert!(fs::read_dir(artifacts.unpacked_folders()).unwrap().next().is_none(), "nothing is left");
    }
}
