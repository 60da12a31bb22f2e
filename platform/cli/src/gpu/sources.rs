//! The sources of a GPU job: files, or one folder.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use bytes::Bytes;
use mayfly_api::{Digest, job_io::ArtifactRef};

use crate::{
    artifact,
    failure::{ErrorCode, Failure},
    output,
    server::Server,
    upload,
};

/// The files that are copied into the container.
#[derive(Debug)]
pub(super) enum Sources {
    /// Files by name.
    Files(BTreeMap<String, PathBuf>),
    Folder {
        name: String,
        path: PathBuf,
    },
}

/// Inspects the sources.
///
/// # Errors
/// A path that does not exist, several folders, or two files of one name.
pub(super) fn read(paths: &[PathBuf]) -> anyhow::Result<Sources> {
    if let [path] = paths
        && path.is_dir()
    {
        // `.` itself has no name.
        let whole = path.canonicalize().with_context(|| format!("cannot read {}", path.display()))?;
        return Ok(Sources::Folder { name: name_of(&whole)?, path: whole });
    }
    let mut files = BTreeMap::new();
    for path in paths {
        let found = fs::metadata(path).map_err(|error| {
            Failure::error(
                ErrorCode::FileError,
                format!("cannot read {}: {error}", path.display()),
                "name a file, or one folder",
            )
        })?;
        if found.is_dir() {
            let todo = "put all sources into one folder and name that";
            return Err(Failure::error(
                ErrorCode::Usage,
                format!("{} is a folder, but there are other sources", path.display()),
                todo,
            ));
        }
        if let Some(other) = files.insert(name_of(path)?, path.clone()) {
            let both = format!("{} and {} have the same name", other.display(), path.display());
            return Err(Failure::error(ErrorCode::Usage, both, "put them into one folder and name that"));
        }
    }
    Ok(Sources::Files(files))
}

fn name_of(path: &Path) -> anyhow::Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned).with_context(|| format!("{} has no name that is text", path.display()))
}

impl Sources {
    /// The name of the folder, or that of the first file without its extension.
    pub(super) fn stem(&self) -> String {
        match self {
            Self::Folder { name, .. } => name.clone(),
            Self::Files(files) => {
                let first = files.keys().next().map_or("job", String::as_str);
                first.rsplit_once('.').map_or(first, |(stem, _)| stem).to_owned()
            }
        }
    }

    /// The folder, relative to the root of the sources, in which the command runs.
    pub(super) fn folder(&self) -> String {
        match self {
            Self::Folder { name, .. } => name.clone(),
            Self::Files(_) => String::new(),
        }
    }

    /// The default command for the sources.
    ///
    /// # Errors
    /// The sources are of no known type.
    pub(super) fn command(&self) -> anyhow::Result<Vec<String>> {
        let todo = "give a command: mayfly gpu run SOURCE -- COMMAND";
        let command = match self {
            Self::Folder { path, .. } if path.join("Makefile").is_file() => "make run".to_owned(),
            Self::Folder { path, .. } => {
                return Err(Failure::error(
                    ErrorCode::FileError,
                    format!("{} has no Makefile", path.display()),
                    todo,
                ));
            }
            Self::Files(files) => {
                let mut names = files.keys();
                let (Some(name), None) = (names.next(), names.next()) else {
                    return Err(Failure::error(
                        ErrorCode::Usage,
                        "it is not clear which of several files to run",
                        todo,
                    ));
                };
                match name.rsplit_once('.').map(|(_, extension)| extension) {
                    Some("cu") => format!("nvcc -O2 -o /tmp/job {name} && exec /tmp/job"),
                    Some("py") => format!("exec python3 {name}"),
                    Some("sh") => format!("exec sh {name}"),
                    _ if !self.executables().is_empty() => format!("exec ./{name}"),
                    _ => {
                        let what = format!("{name} is neither .cu, .py, .sh nor executable");
                        return Err(Failure::error(ErrorCode::Usage, what, todo));
                    }
                }
            }
        };
        Ok(vec!["sh".to_owned(), "-c".to_owned(), command])
    }

    /// The names of single files that are executable here. A folder's archive has the permissions of its files.
    pub(super) fn executables(&self) -> Vec<String> {
        let Self::Files(files) = self else { return Vec::new() };
        let is_executable =
            |path: &Path| fs::metadata(path).is_ok_and(|m| m.permissions().mode() & 0o100 != 0);
        files.iter().filter(|(_, path)| is_executable(path)).map(|(name, _)| name.clone()).collect()
    }

    /// Uploads the sources.
    ///
    /// # Errors
    /// A file cannot be read, or the server refuses it.
    pub(super) async fn push(&self, server: &Server) -> anyhow::Result<BTreeMap<String, ArtifactRef>> {
        let mut pushed = BTreeMap::new();
        match self {
            Self::Files(files) => {
                for (name, path) in files {
                    let digest = artifact::push(server, path).await?;
                    pushed.insert(name.clone(), ArtifactRef { digest, directory: false, bytes: None });
                }
            }
            Self::Folder { name, path } => {
                let content = Bytes::from(archive(path)?);
                let digest = Digest::of(&content);
                upload::upload(server, &digest, content).await?;
                output::note(format_args!("{} uploaded", path.display()));
                pushed.insert(name.clone(), ArtifactRef { digest, directory: true, bytes: None });
            }
        }
        Ok(pushed)
    }
}

/// A folder as a tar: entries sorted by name, without times, owners, links and hidden files, so that equal folders have
/// equal digests.
fn archive(folder: &Path) -> anyhow::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    builder.mode(tar::HeaderMode::Deterministic);
    append(&mut builder, folder, Path::new(""))?;
    Ok(builder.into_inner()?)
}

fn append(builder: &mut tar::Builder<Vec<u8>>, folder: &Path, below: &Path) -> anyhow::Result<()> {
    let unreadable = || format!("cannot read {}", folder.display());
    let mut entries: Vec<_> =
        fs::read_dir(folder).with_context(unreadable)?.collect::<Result<_, _>>().with_context(unreadable)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (name, path) = (entry.file_name(), entry.path());
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let kind = entry.file_type().with_context(unreadable)?;
        let inside = below.join(&name);
        if kind.is_dir() {
            builder.append_dir(&inside, &path)?;
            append(builder, &path, &inside)?;
        } else if kind.is_file() {
            builder
                .append_path_with_name(&path, &inside)
                .with_context(|| format!("cannot read {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_tell_how_they_are_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            fs::write(&path, name).unwrap();
            path
        };
        let (cuda, other) = (file("job.cu"), file("data.bin"));
        let read = |paths: &[PathBuf]| super::read(paths).unwrap();
        assert_eq!(
            read(std::slice::from_ref(&cuda)).command().unwrap()[2],
            "nvcc -O2 -o /tmp/job job.cu && exec /tmp/job"
        );
        assert_eq!(read(&[cuda.clone(), other.clone()]).stem(), "data");
        read(&[cuda.clone(), other.clone()]).command().expect_err("which of them?");
        read(&[other]).command().expect_err("data");
        let whole = read(&[folder.path().to_owned()]);
        whole.command().expect_err("no Makefile");
        file("Makefile");
        assert_eq!(whole.command().unwrap()[2], "make run");
        super::read(&[cuda, folder.path().to_owned()]).expect_err("a folder beside a file");
        super::read(&[folder.path().join("none")]).expect_err("missing");
    }

    #[test]
    fn equal_folders_are_equal_archives() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for (folder, names) in folders.iter().zip([["a", "b/c"], ["b/c", "a"]]) {
            fs::create_dir(folder.path().join("b")).unwrap();
            for name in names {
                fs::write(folder.path().join(name), name).unwrap();
            }
            fs::write(folder.path().join(".git"), folder.path().to_str().unwrap()).unwrap();
        }
        let archives = folders.map(|folder| archive(folder.path()).unwrap());
        assert!(archives[0] == archives[1]);
        let mut read = tar::Archive::new(&archives[0][..]);
        let names: Vec<_> =
            read.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned()).collect();
        assert_eq!(names, [Path::new("a"), Path::new("b"), Path::new("b/c")]);
    }
}
