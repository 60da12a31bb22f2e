//! Files that an engine derives from a content: compiled components. They can always be derived again.

use std::{
    collections::HashMap,
    fmt, fs, io,
    io::Write as _,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use mayfly_api::Digest;

use crate::{
    artifacts::Artifacts,
    files::{self, blocking},
};

/// Identifies all properties of an engine that its output depends on: version, settings, processor. 1 to 64
/// lower-case letters, digits and dashes, so that it is a safe file name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EngineHash(Arc<str>);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not an engine's hash: expected 1 to 64 lower-case letters, digits or dashes")]
pub struct InvalidEngineHash(String);

impl FromStr for EngineHash {
    type Err = InvalidEngineHash;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let safe = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if (1..=64).contains(&text.len()) && text.bytes().all(safe) {
            return Ok(Self(text.into()));
        }
        Err(InvalidEngineHash(text.chars().take(100).collect()))
    }
}

impl From<u64> for EngineHash {
    fn from(hash: u64) -> Self {
        Self(format!("{hash:016x}").into())
    }
}

impl fmt::Display for EngineHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Artifacts {
    /// The file that this engine derived from the content, if there is one.
    pub fn derived_path(&self, digest: &Digest, engine: &EngineHash) -> Option<PathBuf> {
        let path = self.derived_file(digest, engine);
        path.is_file().then_some(path)
    }

    /// Stores an engine's output for a content, and returns its path. The content must exist (else
    /// [`io::ErrorKind::NotFound`]): derived files are removed with it.
    pub async fn put_derived(
        &self,
        digest: &Digest,
        engine: &EngineHash,
        made: impl AsRef<[u8]> + Send + 'static,
    ) -> io::Result<PathBuf> {
        let (artifacts, content, path) =
            (self.clone(), self.content(digest), self.derived_file(digest, engine));
        blocking(move || {
            let directory = path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(directory)?;
            let mut file = files::temporary(directory)?;
            file.write_all(made.as_ref())?;
            let _guard = artifacts.changes.lock();
            fs::metadata(&content)?;
            files::publish(file, &path)?;
            Ok(path)
        })
        .await
    }

    /// Removes this engine's output for a content, for example a damaged one; returns whether it existed.
    pub async fn forget_derived(&self, digest: &Digest, engine: &EngineHash) -> io::Result<bool> {
        let (artifacts, path) = (self.clone(), self.derived_file(digest, engine));
        blocking(move || {
            let _guard = artifacts.changes.lock();
            files::remove(&path)
        })
        .await
    }

    /// Removes the output of other engines, such as those of earlier versions; returns the number of files.
    pub async fn remove_other_engines(&self, engine: &EngineHash) -> io::Result<usize> {
        let (directory, keep) = (self.derived(), engine.to_string());
        blocking(move || {
            let mut removed = 0;
            for other in files::entries(&directory)? {
                if other.file_name().is_some_and(|name| *name != *keep) {
                    removed += files::entries(&other)?.len();
                    fs::remove_dir_all(&other)?;
                }
            }
            Ok(removed)
        })
        .await
    }

    /// Removes the output of all engines for a content.
    pub(crate) fn remove_derived(&self, digest: &Digest) -> io::Result<()> {
        for engine in files::entries(&self.derived())? {
            files::remove(&engine.join(file_name(digest)))?;
        }
        Ok(())
    }

    /// The bytes of the files derived from each content.
    pub(crate) fn derived_bytes(&self) -> io::Result<HashMap<Digest, u64>> {
        let mut bytes = HashMap::new();
        for engine in files::entries(&self.derived())? {
            for path in files::entries(&engine)? {
                let digest = path.file_stem().and_then(|stem| digest_of(stem.to_str()?));
                if let (Some(digest), Ok(metadata)) = (digest, fs::metadata(&path)) {
                    *bytes.entry(digest).or_default() += metadata.len();
                }
            }
        }
        Ok(bytes)
    }

    /// Removes incomplete files, and those whose content was removed.
    pub(crate) fn sweep_derived(&self) -> io::Result<usize> {
        let mut swept = 0;
        for engine in files::entries(&self.derived())? {
            swept += files::sweep(&engine)?;
            for path in files::entries(&engine)? {
                let digest = path.file_stem().and_then(|stem| digest_of(stem.to_str()?));
                if digest.is_some_and(|digest| self.path(&digest).is_none()) {
                    swept += usize::from(files::remove(&path)?);
                }
            }
        }
        Ok(swept)
    }

    fn derived_file(&self, digest: &Digest, engine: &EngineHash) -> PathBuf {
        self.derived().join(&*engine.0).join(file_name(digest))
    }
}

fn file_name(digest: &Digest) -> String {
    format!("{}.cwasm", digest.hex())
}

/// The digest that a file is named after.
pub(crate) fn digest_of(hex: &str) -> Option<Digest> {
    format!("sha256:{hex}").parse().ok()
}
