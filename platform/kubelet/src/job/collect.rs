//! After a job's end: its outputs are stored in the artifact store.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use futures::stream;
use mayfly_api::{
    Digest,
    env::EnvSources,
    job_io::{
        ARTIFACTS, ArtifactRef, ArtifactTarget, Collected, NAMES_MAX, Outputs, PARAMETER_BYTES_MAX, is_name,
        value_of,
    },
    k8s::{api::core::v1::Pod, jiff::Timestamp},
};
use mayfly_artifacts::{OriginError, Stored, UploadError};
use mayfly_runtime::PodUid;
use serde_json::Value;
use tokio_util::io::ReaderStream;

use super::{JobFiles, PodFolder, TransferError, blocking, io_message, tree};

/// The pod's status reason when an output could not be sent to its destination.
pub(crate) const UNSENT: &str = "ArtifactNotSent";

/// The exit of the container.
pub(crate) struct ContainerResult {
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) started: Timestamp,
    pub(crate) finished: Timestamp,
    /// The GPU time of the pod; `None`: it had no GPU.
    pub(crate) gpu_time: Option<Duration>,
}

/// The contents of a pod's folder.
struct PodOutputs {
    result: Value,
    result_truncated: bool,
    stderr: String,
    parameters: BTreeMap<String, Value>,
    /// Name, path, whether it is a folder.
    artifacts: Vec<(String, PathBuf, bool)>,
    problems: Vec<String>,
}

/// Stores all outputs of a pod, and sends those with a destination if the container succeeded. Outputs that cannot be
/// stored are listed in the outputs' problems.
///
/// # Errors
/// A message: nothing can be stored now (for example, the disk is full). The files are kept for another attempt.
pub(crate) async fn collect(
    files: &JobFiles,
    pod: &Pod,
    uid: &PodUid,
    mut ended: ContainerResult,
    secrets: &(impl EnvSources + Sync),
) -> Result<Collected, String> {
    let folder = files.of(uid);
    let mut found = blocking({
        let folder = folder.clone();
        move || find(&folder)
    })
    .await?;
    let mut artifacts = BTreeMap::new();
    for (name, path, directory) in std::mem::take(&mut found.artifacts) {
        match store(files, &folder, &path, directory).await {
            Ok(stored) => {
                let bytes = Some(stored.bytes);
                artifacts.insert(name, ArtifactRef { digest: stored.digest, directory, bytes });
            }
            Err(ArtifactStoreError::Transient(why)) => return Err(why),
            Err(ArtifactStoreError::Permanent(why)) => {
                found.problems.push(format!("artifact {name:?} was not kept: {why}"))
            }
        }
    }
    let mut unsent = None;
    if ended.exit_code == 0
        && let Err(why) = send(files, pod, &folder, &artifacts, secrets).await
    {
        found.problems.push(why.clone());
        (ended.reason, ended.message) = (UNSENT.to_owned(), why.clone());
        unsent = Some(why);
    }
    let named: Vec<Digest> = artifacts.values().map(|artifact| artifact.digest).collect();
    let outputs = Outputs {
        exit_code: ended.exit_code,
        oom_killed: ended.reason == "OOMKilled",
        reason: ended.reason,
        message: ended.message,
        started: ended.started,
        finished: ended.finished,
        wall_ms: i64::try_from(ended.finished.duration_since(ended.started).as_millis()).unwrap_or(i64::MAX),
        gpu_ms: ended.gpu_time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        result: found.result,
        result_truncated: found.result_truncated,
        stderr: found.stderr,
        parameters: found.parameters,
        artifacts,
        problems: found.problems,
    };
    let document = serde_json::to_vec(&outputs).map_err(|error| error.to_string())?;
    let content = stream::iter([Ok::<_, std::io::Error>(Bytes::from(document))]);
    let stored = files.artifacts.upload(None, u64::MAX, content).await.map_err(|error| error.to_string())?;
    Ok(Collected { document: stored.digest, artifacts: named, unsent })
}

/// Sends the stored artifacts that have a destination.
async fn send(
    files: &JobFiles,
    pod: &Pod,
    folder: &PodFolder,
    artifacts: &BTreeMap<String, ArtifactRef>,
    secrets: &(impl EnvSources + Sync),
) -> Result<(), String> {
    let path = folder.targets();
    let read = move || match fs::read(&path) {
        Ok(json) => serde_json::from_slice(&json).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(io_message("read", &path, &error)),
    };
    let targets: BTreeMap<String, ArtifactTarget> = blocking(read).await??;
    if targets.is_empty() {
        return Ok(());
    }
    let remote = files.remote(pod, secrets).map_err(TransferError::message)?;
    for (name, target) in &targets {
        let Some(artifact) = artifacts.get(name) else {
            return Err(format!("the artifact {name:?} cannot be sent: the job did not write it"));
        };
        let file = files.get(&artifact.digest).await?;
        let sent = remote.send(name, target, &file, &artifact.digest.hex()).await;
        sent.map_err(TransferError::message)?;
    }
    Ok(())
}

/// Why an artifact was not stored.
enum ArtifactStoreError {
    /// The store may have space later.
    Transient(String),
    /// A retry would fail the same way.
    Permanent(String),
}

impl From<UploadError> for ArtifactStoreError {
    fn from(error: UploadError) -> Self {
        match error {
            UploadError::Origin(OriginError::TooLarge(_)) => Self::Permanent(error.to_string()),
            // The server may be away, or refuse until its permissions are repaired: the outputs stay here until then.
            UploadError::Full
            | UploadError::Io(_)
            | UploadError::Origin(OriginError::Unavailable(_) | OriginError::Refused(_)) => {
                Self::Transient(error.to_string())
            }
            UploadError::DigestMismatch { .. } | UploadError::TooLarge { .. } | UploadError::Stream(_) => {
                Self::Permanent(error.to_string())
            }
        }
    }
}

async fn store(
    files: &JobFiles,
    folder: &PodFolder,
    path: &Path,
    directory: bool,
) -> Result<Stored, ArtifactStoreError> {
    let max = files.artifact_bytes_max;
    let from = if directory {
        let (tar, tree) = (folder.path().join("tar"), path.to_owned());
        let pack = move || {
            let packed = fs::File::create(&tar).and_then(|file| tree::pack(&tree, file, max));
            packed.map(|()| tar).map_err(|error| match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    ArtifactStoreError::Transient("the node's disk is full".into())
                }
                _ => ArtifactStoreError::Permanent(error.to_string()),
            })
        };
        blocking(pack).await.map_err(ArtifactStoreError::Transient)??
    } else {
        path.to_owned()
    };
    let opened = tokio::fs::File::open(&from).await;
    let file = opened.map_err(|error| ArtifactStoreError::Permanent(io_message("read", &from, &error)))?;
    // A tar file has headers besides its content, so `max` does not apply to its size.
    let limit = if directory { u64::MAX } else { max };
    Ok(files.artifacts.upload(None, limit, ReaderStream::new(file)).await?)
}

/// Reads a pod's folder after its processes have ended. Blocks.
fn find(folder: &PodFolder) -> PodOutputs {
    let read = |name: &str| fs::read(folder.capture().join(name)).unwrap_or_default();
    let mut found = PodOutputs {
        result: value_of(&read("stdout")),
        result_truncated: folder.capture().join("stdout.truncated").exists(),
        stderr: String::from_utf8_lossy(&read("stderr")).into_owned(),
        parameters: BTreeMap::new(),
        artifacts: Vec::new(),
        problems: Vec::new(),
    };
    for (name, path) in entries(&folder.out(), &mut found.problems) {
        if name == ARTIFACTS {
            continue;
        }
        match parameter(&path) {
            Ok(value) => drop(found.parameters.insert(name, value)),
            Err(why) => found.problems.push(format!("parameter {name:?} was not taken: {why}")),
        }
    }
    for (name, path) in entries(&folder.artifacts(), &mut found.problems) {
        // Symbolic links are not followed: they could point anywhere on the node.
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => found.artifacts.push((name, path, true)),
            Ok(metadata) if metadata.is_file() => found.artifacts.push((name, path, false)),
            _ => found
                .problems
                .push(format!("artifact {name:?} was not kept: it is neither a file nor a folder")),
        }
    }
    found
}

fn parameter(path: &Path) -> Result<Value, String> {
    let metadata = fs::symlink_metadata(path).map_err(|error| io_message("read", path, &error))?;
    if !metadata.is_file() {
        return Err(format!("it is not a file; folders belong in {ARTIFACTS}/"));
    }
    if metadata.len() > PARAMETER_BYTES_MAX {
        return Err(format!(
            "it has {} bytes, more than {PARAMETER_BYTES_MAX}; write it as an artifact instead",
            metadata.len()
        ));
    }
    fs::read(path).map(|bytes| value_of(&bytes)).map_err(|error| io_message("read", path, &error))
}

/// Names and paths of a folder, sorted.
fn entries(folder: &Path, problems: &mut Vec<String>) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_name(&name) {
            found.push((name, entry.path()));
        } else {
            problems.push(format!("{name:?} was not taken: it is not a valid output name"));
        }
    }
    found.sort();
    if found.len() > NAMES_MAX {
        problems.push(format!("only the first {NAMES_MAX} outputs of {} were taken", found.len()));
        found.truncate(NAMES_MAX);
    }
    found
}
