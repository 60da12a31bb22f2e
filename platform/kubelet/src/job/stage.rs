//! Before a job starts: writes its inputs as files. Blocks, except for fetching from other servers.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
};

use mayfly_api::{
    Digest,
    env::EnvSources,
    job_io::{ArtifactSource, InputArtifact, Inputs, InputsSource, text_of},
};
use mayfly_artifacts::PinnedPath;
use serde_json::Value;

use super::{
    JobFiles, PodFolder, blocking, io_message,
    remote::{Remote, TransferError},
    tree,
};

/// The artifacts of the store among the inputs.
pub(super) type StoredInputs = HashMap<Digest, PinnedPath>;

/// Creates the folders of a pod's outputs. Returns whether the inputs are staged already.
pub(super) fn begin(folder: &PodFolder, afresh: bool) -> Result<bool, String> {
    if afresh {
        // Outputs of a failed attempt must not become those of the next.
        for path in [folder.out(), folder.capture()] {
            remove(&path)?;
        }
    }
    for path in [folder.artifacts(), folder.capture()] {
        fs::create_dir_all(&path).map_err(|error| io_message("make", &path, &error))?;
    }
    Ok(folder.inputs().exists())
}

/// Reads the inputs that are in the annotation or in the store.
pub(super) async fn load(files: &JobFiles, source: InputsSource) -> Result<Inputs, String> {
    match source {
        InputsSource::Inline(inputs) => Ok(*inputs),
        InputsSource::Stored(digest) => {
            let path = files.get(&digest).await?;
            let read = move || {
                let json = fs::read(&path).map_err(|error| io_message("read", &path, &error))?;
                Inputs::parse(&json).map_err(|why| format!("{digest}: {why}"))
            };
            blocking(read).await?
        }
    }
}

/// Makes the artifacts of the store available on this node.
pub(super) async fn stored(files: &JobFiles, inputs: &Inputs) -> Result<StoredInputs, TransferError> {
    let mut stored = HashMap::new();
    for (name, artifact) in &inputs.artifacts {
        if let Ok(ArtifactSource::Stored(digest)) = artifact.source() {
            let path = files.get(&digest).await;
            let path = path.map_err(|why| TransferError::Transient(format!("artifact {name:?}: {why}")))?;
            stored.insert(digest, path);
        }
    }
    Ok(stored)
}

/// Fetches the artifacts that come from other places into the pod's folder.
pub(super) async fn fetch(
    remote: &Remote<'_, impl EnvSources + Sync>,
    folder: &PodFolder,
    inputs: &Inputs,
) -> Result<(), TransferError> {
    let fetched = folder.fetched();
    let empty = move || {
        remove(&fetched)?;
        fs::create_dir_all(&fetched).map_err(|error| io_message("make", &fetched, &error))
    };
    blocking(empty).await.and_then(|made| made).map_err(TransferError::Transient)?;
    for (name, artifact) in &inputs.artifacts {
        remote.fetch(name, artifact, &folder.fetched().join(name)).await?;
    }
    Ok(())
}

/// Writes the inputs as files.
pub(super) fn stage(
    files: &JobFiles,
    folder: &PodFolder,
    wanted: Inputs,
    stored: &StoredInputs,
) -> Result<(), String> {
    // Written under another name first, so that a folder with the final name is complete.
    let (inputs, draft) = (folder.inputs(), folder.path().join("in.draft"));
    remove(&draft)?;
    fs::create_dir_all(&draft).map_err(|error| io_message("make", &draft, &error))?;
    for (name, value) in &wanted.parameters {
        write(&draft.join(name), text_of(value).as_bytes())?;
    }
    for (name, artifact) in &wanted.artifacts {
        place(files, (folder, stored), name, artifact, &draft.join(name))?;
    }
    if !wanted.targets.is_empty() {
        // Kept in the pod's folder, since the inputs may be gone from the store when the job has ended.
        let targets = serde_json::to_vec(&wanted.targets).map_err(|error| error.to_string())?;
        write(&folder.targets(), &targets)?;
    }
    let stdin = Value::Object(wanted.parameters.into_iter().collect());
    write(&folder.stdin(), stdin.to_string().as_bytes())?;
    fs::rename(&draft, &inputs).map_err(|error| io_message("make", &inputs, &error))?;
    remove(&folder.fetched())
}

fn place(
    files: &JobFiles,
    (folder, stored): (&PodFolder, &StoredInputs),
    name: &str,
    artifact: &InputArtifact,
    to: &Path,
) -> Result<(), String> {
    let unpacked = |from: &Path| {
        tree::unpack(from, to, files.artifact_bytes_max)
            .map_err(|error| format!("artifact {name:?} cannot be unpacked: {error}"))
    };
    let moved = |from: PathBuf| fs::rename(&from, to).map_err(|error| io_message("write", to, &error));
    let stored =
        |digest: Digest| stored.get(&digest).ok_or_else(|| format!("artifact {digest} was not fetched"));
    match artifact.source().map_err(|why| format!("artifact {name:?}: {why}"))? {
        ArtifactSource::Stored(digest) if artifact.directory => unpacked(stored(digest)?),
        ArtifactSource::Stored(digest) => {
            let from = stored(digest)?;
            if fs::hard_link(from, to).is_err() {
                // The store is on another file system, or the file system has no hard links.
                fs::copy(from, to).map_err(|error| io_message("write", to, &error))?;
            }
            Ok(())
        }
        ArtifactSource::Raw(text) => write(to, text.as_bytes()),
        ArtifactSource::Http(_) | ArtifactSource::S3(_) if artifact.directory => {
            unpacked(&folder.fetched().join(name))
        }
        ArtifactSource::Http(_) | ArtifactSource::S3(_) | ArtifactSource::Git(_) => {
            moved(folder.fetched().join(name))
        }
    }
}

fn write(path: &Path, content: &[u8]) -> Result<(), String> {
    fs::write(path, content).map_err(|error| io_message("write", path, &error))
}

/// Removes a file or a folder; succeeds if there is none.
pub(super) fn remove(path: &Path) -> Result<(), String> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_message("remove", path, &error)),
        _ => Ok(()),
    }
}
