//! Removal of a content in two steps, so that a reference that is made meanwhile keeps it.
//!
//! Checking for references and then deleting would lose a reference made in between. So a content is quarantined
//! first: lookups do not find it any more, so a client uploads it again instead of referencing it; a second check
//! finds references that were made before. A client that was told that the content exists, and references it only
//! after the second check, is covered by `seen`, the time of the decision to remove: the response "it exists" renews
//! the content's age ([`Artifacts::renew`]). A removal by an operator ignores the age: such a client then gets "not
//! found".

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use mayfly_api::Digest;

use crate::{
    artifacts::Artifacts,
    derived::digest_of,
    files::{self, blocking},
};

const ASIDE_PREFIX: &str = ".aside-";

/// The result of a removal.
#[derive(Debug)]
pub enum Removal {
    /// Lookups do not find it any more.
    Quarantined(Quarantined),
    /// It was absent.
    Missing,
    /// The content stays, because it was uploaded, or kept by [`Artifacts::renew`], in the meantime.
    Newer,
}

/// A content that lookups do not find, and that is not removed yet. When dropped, it is restored with a new age,
/// since a reference to it may exist. Dropping blocks for a moment.
#[derive(Debug)]
#[must_use = "dropped, the content is restored"]
pub struct Quarantined {
    artifacts: Artifacts,
    digest: Digest,
    /// The path in quarantine.
    path: PathBuf,
    removed: bool,
}

impl Quarantined {
    /// Removes the content and its derived files.
    pub async fn remove(mut self) -> io::Result<()> {
        blocking(move || {
            let _guard = self.artifacts.changes.lock();
            files::remove(&self.path)?;
            self.removed = true;
            // Unless it was uploaded again meanwhile.
            if self.artifacts.path(&self.digest).is_none() {
                self.artifacts.remove_derived(&self.digest)?;
                self.artifacts.remove_unpacked(&self.digest)?;
            }
            tracing::info!(digest = %self.digest, "artifact removed");
            Ok(())
        })
        .await
    }

    /// Restores the content, so that lookups find it again.
    pub async fn restore(self) {
        blocking(move || drop(self)).await;
    }
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        let _guard = self.artifacts.changes.lock();
        if let Err(error) = self.artifacts.restore_locked(&self.path, &self.digest) {
            tracing::warn!(digest = %self.digest, %error, "cannot restore a quarantined artifact or renew its age; the next start does");
        }
    }
}

impl Artifacts {
    /// Hides a content from lookups, unless it was uploaded after `seen`: its uploader is about to reference it.
    pub async fn quarantine(&self, digest: &Digest, seen: Timestamp) -> io::Result<Removal> {
        let (artifacts, digest) = (self.clone(), *digest);
        blocking(move || {
            let guard = artifacts.changes.lock();
            let path = artifacts.content(&digest);
            let modified = match fs::metadata(&path) {
                Ok(metadata) => Timestamp::try_from(metadata.modified()?).unwrap_or(Timestamp::UNIX_EPOCH),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Removal::Missing),
                Err(error) => return Err(error),
            };
            if modified > seen {
                return Ok(Removal::Newer);
            }
            let aside = artifacts.aside(&digest);
            fs::rename(path, &aside)?;
            drop(guard);
            Ok(Removal::Quarantined(Quarantined { artifacts, digest, path: aside, removed: false }))
        })
        .await
    }

    /// Removes a content and its derived files, regardless of references; returns whether it was present.
    pub async fn remove(&self, digest: &Digest) -> io::Result<bool> {
        match self.quarantine(digest, Timestamp::MAX).await? {
            Removal::Quarantined(aside) => aside.remove().await.map(|()| true),
            Removal::Missing | Removal::Newer => Ok(false),
        }
    }

    /// Restores the contents that were quarantined when the process ended.
    pub(crate) fn restore_all(&self) -> io::Result<()> {
        for path in files::entries(&self.contents())? {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_prefix(ASIDE_PREFIX));
            if let Some(digest) = name.and_then(|name| digest_of(name.split_once('.')?.0)) {
                self.restore_locked(&path, &digest)?;
            }
        }
        Ok(())
    }

    /// The caller holds `changes`, or has exclusive access.
    fn restore_locked(&self, aside: &Path, digest: &Digest) -> io::Result<()> {
        let path = self.content(digest);
        // It was uploaded again meanwhile.
        if path.is_file() {
            return files::remove(aside).map(|_| ());
        }
        fs::rename(aside, &path)?;
        files::touch(&path)
    }

    /// A free name: the same content may be quarantined twice, with an upload between. The caller holds `changes`.
    fn aside(&self, digest: &Digest) -> PathBuf {
        let name = |number: u32| self.contents().join(format!("{ASIDE_PREFIX}{}.{number}", digest.hex()));
        (0..).map(name).find(|path| !path.exists()).unwrap_or_else(|| name(0))
    }
}
