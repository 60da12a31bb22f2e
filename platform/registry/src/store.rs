//! Repositories on disk: which manifests they have, and their tags. Blocks; see [`RegistryStore::run`].

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use mayfly_api::Digest;
use mayfly_artifacts::Artifacts;
use parking_lot::Mutex;

use crate::names::RepositoryName;

/// The registry's files. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RegistryStore {
    folder: Arc<Path>,
    pub(crate) contents: Artifacts,
    /// Held while a manifest is added, and while the collection decides and removes.
    pub(crate) changes: Arc<Mutex<()>>,
}

/// A manifest as a repository has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ManifestEntry {
    pub(crate) digest: Digest,
    pub(crate) media_type: String,
}

impl RegistryStore {
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        let contents = Artifacts::open(folder.join("content")).map_err(io::Error::other)?;
        let store = Self { folder: folder.into(), contents, changes: Arc::default() };
        fs::create_dir_all(store.repositories())?;
        match fs::remove_dir_all(store.uploads()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::create_dir_all(store.uploads())?;
        Ok(store)
    }

    /// Runs work where it may block.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let store = self.clone();
        tokio::task::spawn_blocking(move || work(&store)).await.map_err(io::Error::other)?
    }

    pub(crate) fn uploads(&self) -> PathBuf {
        self.folder.join("uploads")
    }

    fn repositories(&self) -> PathBuf {
        self.folder.join("repositories")
    }

    fn repository(&self, name: &RepositoryName) -> PathBuf {
        self.repositories().join(name.folder())
    }

    pub(crate) fn names(&self) -> io::Result<Vec<RepositoryName>> {
        let folders = file_names(&self.repositories())?;
        let mut names: Vec<_> =
            folders.iter().filter_map(|folder| RepositoryName::of_folder(folder)).collect();
        names.sort();
        Ok(names)
    }

    pub(crate) fn has(&self, name: &RepositoryName) -> bool {
        self.repository(name).is_dir()
    }

    /// The tags in order, with their digests.
    pub(crate) fn tags(&self, name: &RepositoryName) -> io::Result<Vec<(String, Digest)>> {
        let mut tags = Vec::new();
        for tag in file_names(&self.repository(name).join("tags"))? {
            if let Some(digest) = self.tag(name, &tag)? {
                tags.push((tag, digest));
            }
        }
        tags.sort();
        Ok(tags)
    }

    pub(crate) fn tag(&self, name: &RepositoryName, tag: &str) -> io::Result<Option<Digest>> {
        let text = read_if_there(&self.repository(name).join("tags").join(tag))?;
        Ok(text.and_then(|text| text.trim().parse().ok()))
    }

    pub(crate) fn manifest(
        &self,
        name: &RepositoryName,
        digest: Digest,
    ) -> io::Result<Option<ManifestEntry>> {
        let media_type = read_if_there(&self.repository(name).join("manifests").join(digest.hex()))?;
        Ok(media_type.map(|media_type| ManifestEntry { digest, media_type }))
    }

    pub(crate) fn manifests(&self, name: &RepositoryName) -> io::Result<Vec<ManifestEntry>> {
        let mut manifests = Vec::new();
        for hex in file_names(&self.repository(name).join("manifests"))? {
            let Ok(digest) = format!("sha256:{hex}").parse() else { continue };
            manifests.extend(self.manifest(name, digest)?);
        }
        Ok(manifests)
    }

    /// The time since which a repository has a manifest.
    pub(crate) fn manifest_since(
        &self,
        name: &RepositoryName,
        digest: Digest,
    ) -> io::Result<jiff::Timestamp> {
        let path = self.repository(name).join("manifests").join(digest.hex());
        jiff::Timestamp::try_from(fs::metadata(path)?.modified()?).map_err(io::Error::other)
    }

    /// Adds a stored content to a repository, durably; the tag is written last, so that it never refers to a missing
    /// manifest.
    pub(crate) fn add_manifest(
        &self,
        name: &RepositoryName,
        entry: &ManifestEntry,
        tag: Option<&str>,
    ) -> io::Result<()> {
        let folder = self.repository(name);
        write(&folder.join("manifests"), &entry.digest.hex(), &entry.media_type)?;
        match tag {
            Some(tag) => write(&folder.join("tags"), tag, &entry.digest.to_string()),
            None => Ok(()),
        }
    }

    pub(crate) fn remove_tag(&self, name: &RepositoryName, tag: &str) -> io::Result<bool> {
        let removed = remove(&self.repository(name).join("tags").join(tag));
        self.forget_if_empty(name);
        removed
    }

    /// Removes a manifest and the tags that name it.
    pub(crate) fn remove_manifest(&self, name: &RepositoryName, digest: Digest) -> io::Result<bool> {
        for (tag, named) in self.tags(name)? {
            if named == digest {
                remove(&self.repository(name).join("tags").join(tag))?;
            }
        }
        let removed = remove(&self.repository(name).join("manifests").join(digest.hex()));
        self.forget_if_empty(name);
        removed
    }

    /// Removes a repository's folders if they are empty: a repository exists as long as it has contents.
    fn forget_if_empty(&self, name: &RepositoryName) {
        let folder = self.repository(name);
        for folder in [folder.join("tags"), folder.join("manifests"), folder] {
            let _ = fs::remove_dir(folder);
        }
    }

    pub(crate) fn read(&self, digest: &Digest) -> io::Result<Option<Vec<u8>>> {
        match self.contents.path(digest).map(fs::read) {
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Some(Err(error)) => Err(error),
            None => Ok(None),
        }
    }
}

/// Writes a small file atomically and durably.
fn write(folder: &Path, name: &str, text: &str) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let temporary = folder.join(format!(".{name}.{}", uuid::Uuid::new_v4()));
    let mut file = fs::File::create(&temporary)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    match written.and_then(|()| fs::rename(&temporary, folder.join(name))) {
        Ok(()) => fs::File::open(folder)?.sync_all(),
        Err(error) => {
            let _ = fs::remove_file(&temporary);
            Err(error)
        }
    }
}

fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn read_if_there(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names of the complete files in a folder; none when there is no folder.
fn file_names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string().ok().filter(|name| !name.starts_with('.')));
    }
    Ok(names)
}
