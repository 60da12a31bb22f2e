//! Inputs and outputs of jobs: the node's side of the contract `mayfly_api::job_io`.
//!
//! ```text
//! DIR/<pod uid>/fetched/<name>        artifacts from other places, until they are staged
//! DIR/<pod uid>/in/<name>             staged before the first container starts; read only
//! DIR/<pod uid>/out/<name>            the container's; collected after its end, whatever that was
//! DIR/<pod uid>/out/artifacts/<name>
//! DIR/<pod uid>/stdin                 all parameters as one JSON object
//! DIR/<pod uid>/targets               the destinations of outputs, as JSON, if there are some
//! DIR/<pod uid>/capture/{stdout,stderr}   written by the host
//! ```
//! A pod's folder is removed when its outputs are recorded on its object, or when the object is gone.

mod collect;
mod remote;
mod stage;
mod tree;

use std::{
    collections::HashSet,
    fmt, io,
    path::{Path, PathBuf},
};

use mayfly_api::{
    Digest,
    env::EnvSources,
    job_io::{
        ANNOTATION_INPUTS, ANNOTATION_OUTPUTS, ARTIFACTS, Collected, FOLDER_IN, FOLDER_OUT, InputsSource,
    },
    k8s::api::core::v1::Pod,
};
use mayfly_artifacts::{Artifacts, FetchError, PinnedPath};
use mayfly_runtime::{ContainerFiles, Mount, PodUid};

pub(crate) use collect::{ContainerResult, UNSENT, collect};
pub(crate) use remote::{Remote, TransferError};

/// The folders of jobs' inputs and outputs.
#[derive(Clone)]
pub struct JobFiles {
    pub artifacts: Artifacts,
    /// The parent of the pods' folders.
    pub folder: PathBuf,
    /// The largest artifact that is collected, and the largest folder that is unpacked, in bytes.
    pub artifact_bytes_max: u64,
    /// The maximum size of one pod's outputs on the node's disk, in bytes; a pod that exceeds it is ended.
    pub out_bytes_max: u64,
    /// Protocols of Git repositories besides `http` and `https`: `ssh` with the keys of the node's user, `file` with
    /// the repositories on its disk.
    pub git_protocols: Vec<String>,
}

impl fmt::Debug for JobFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobFiles").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl JobFiles {
    /// The default: 1 GiB.
    pub const ARTIFACT_BYTES_MAX_DEFAULT: u64 = 1 << 30;

    /// Fits a few of the largest artifacts: 4 GiB.
    pub const OUT_BYTES_MAX_DEFAULT: u64 = 4 << 30;

    pub fn new(artifacts: Artifacts, folder: impl Into<PathBuf>) -> Self {
        Self {
            artifacts,
            folder: folder.into(),
            artifact_bytes_max: Self::ARTIFACT_BYTES_MAX_DEFAULT,
            out_bytes_max: Self::OUT_BYTES_MAX_DEFAULT,
            git_protocols: Vec::new(),
        }
    }

    /// The uids of pods whose outputs exceed `out_bytes_max`.
    pub(crate) async fn too_large(&self) -> HashSet<String> {
        let (folder, max) = (self.folder.clone(), self.out_bytes_max);
        let look = move || {
            let pods = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            let large = pods.filter(|pod| tree::bytes(&PodFolder(pod.path()).out()) > max);
            large.map(|pod| pod.file_name().to_string_lossy().into_owned()).collect()
        };
        blocking(look).await.unwrap_or_default()
    }

    pub(crate) fn of(&self, uid: &PodUid) -> PodFolder {
        PodFolder(self.folder.join(&uid.0))
    }

    /// Creates the pod's folder with its inputs; existing files are kept. `afresh` removes the outputs of an earlier
    /// attempt of the container.
    ///
    /// `secrets` are those of the pod's namespace, for artifacts from other places.
    ///
    /// # Errors
    /// A message for the pod's status: an input that is not in the store or cannot be fetched, a full disk.
    pub(crate) async fn stage(
        &self,
        pod: &Pod,
        uid: &PodUid,
        afresh: bool,
        secrets: &(impl EnvSources + Sync),
    ) -> Result<ContainerFiles, TransferError> {
        let source = inputs_of(pod).map_err(TransferError::Transient)?;
        let folder = self.of(uid);
        let begun = blocking(move || stage::begin(&folder, afresh)).await;
        if !begun.and_then(|begun| begun).map_err(TransferError::Transient)? {
            let inputs = stage::load(self, source).await.map_err(TransferError::Transient)?;
            let stored = stage::stored(self, &inputs).await?;
            let remote = self.remote(pod, secrets)?;
            stage::fetch(&remote, &self.of(uid), &inputs).await?;
            let (files, folder) = (self.clone(), self.of(uid));
            let staged = blocking(move || stage::stage(&files, &folder, inputs, &stored)).await;
            staged.and_then(|staged| staged).map_err(TransferError::Transient)?;
        }
        Ok(self.of(uid).container_files())
    }

    fn remote<'a, S: EnvSources + Sync>(
        &'a self,
        pod: &'a Pod,
        secrets: &'a S,
    ) -> Result<Remote<'a, S>, TransferError> {
        Remote::new(pod, secrets, self.artifact_bytes_max, &self.git_protocols)
    }

    /// Removes a pod's folder, if there is one.
    pub(crate) async fn remove(&self, uid: &PodUid) {
        let folder = self.of(uid).0;
        let removed = blocking(move || stage::remove(&folder)).await;
        if let Ok(Err(error)) | Err(error) = removed {
            tracing::warn!(pod = %uid, error, "cannot remove a job's folder");
        }
    }

    /// Removes the folders of pods that are not in `known()`. `known` is called after the folders were listed, so that
    /// a folder created meanwhile is not taken for a leftover.
    pub(crate) async fn sweep(&self, known: impl FnOnce() -> HashSet<String>) {
        let folder = self.folder.clone();
        let list = move || -> Vec<String> {
            let pods = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            pods.map(|pod| pod.file_name().to_string_lossy().into_owned()).collect()
        };
        let listed = blocking(list).await.unwrap_or_default();
        let known = known();
        for name in listed.into_iter().filter(|name| !known.contains(name)) {
            self.remove(&PodUid(name)).await;
        }
    }

    /// An artifact of the store; on a joined node fetched from the server.
    ///
    /// # Errors
    /// A message. A retry may succeed, also for a missing artifact: it may still be pushed.
    async fn get(&self, digest: &Digest) -> Result<PinnedPath, String> {
        self.artifacts.get(digest).await.map_err(|error| match error {
            FetchError::Missing(digest) => format!("artifact {digest} is not in the store: push it"),
            error => error.to_string(),
        })
    }
}

/// The folder of one pod.
#[derive(Clone, Debug)]
pub(crate) struct PodFolder(PathBuf);

impl PodFolder {
    fn path(&self) -> &Path {
        &self.0
    }
    fn inputs(&self) -> PathBuf {
        self.0.join("in")
    }
    fn targets(&self) -> PathBuf {
        self.0.join("targets")
    }
    fn fetched(&self) -> PathBuf {
        self.0.join("fetched")
    }
    fn out(&self) -> PathBuf {
        self.0.join("out")
    }
    fn artifacts(&self) -> PathBuf {
        self.out().join(ARTIFACTS)
    }
    fn stdin(&self) -> PathBuf {
        self.0.join("stdin")
    }
    fn capture(&self) -> PathBuf {
        self.0.join("capture")
    }

    fn container_files(&self) -> ContainerFiles {
        let mount = |host, guest: &str, read_only| Mount {
            host,
            guest: guest.to_owned(),
            read_only,
            ..Mount::default()
        };
        ContainerFiles {
            mounts: vec![mount(self.inputs(), FOLDER_IN, true), mount(self.out(), FOLDER_OUT, false)],
            stdin: self.stdin(),
            capture: self.capture(),
        }
    }
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// The location of a job's inputs.
fn inputs_of(pod: &Pod) -> Result<InputsSource, String> {
    let text = annotation(pod, ANNOTATION_INPUTS).unwrap_or_default();
    InputsSource::parse(text).map_err(|why| format!("{ANNOTATION_INPUTS}: {why}"))
}

/// Whether the pod has inputs or outputs under this contract.
pub(crate) fn is_job(pod: &Pod) -> bool {
    annotation(pod, ANNOTATION_INPUTS).is_some()
}

/// Whether the pod's outputs are named on its object.
pub(crate) fn is_collected(pod: &Pod) -> bool {
    annotation(pod, ANNOTATION_OUTPUTS).is_some()
}

/// The error of an artifact that did not reach its target, with which the pod fails, once its outputs are collected.
pub(crate) fn unsent(pod: &Pod) -> Option<String> {
    serde_json::from_str::<Collected>(annotation(pod, ANNOTATION_OUTPUTS)?).ok()?.unsent
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())
}

/// The message for a failed file operation.
fn io_message(what: &str, path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "the node's disk is full".to_owned(),
        _ => format!("cannot {what} {}: {error}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_leaves_too_much_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let jobs = JobFiles { out_bytes_max: 20_000, ..JobFiles::new(artifacts, folder.path().join("jobs")) };
        assert!(jobs.too_large().await.is_empty(), "there is not even a folder");
        for (pod, bytes) in [("small", 1_000), ("large", 30_000)] {
            let artifacts = jobs.of(&PodUid(pod.into())).artifacts();
            std::fs::create_dir_all(&artifacts).unwrap();
            std::fs::write(artifacts.join("file"), vec![0; bytes]).unwrap();
        }
        assert_eq!(jobs.too_large().await, HashSet::from(["large".to_owned()]));
    }

    #[tokio::test]
    async fn the_folder_of_a_pod_that_comes_while_strangers_are_swept_stays() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let jobs = JobFiles::new(artifacts, folder.path().join("jobs"));
        let make = |uid: &str| std::fs::create_dir_all(jobs.of(&PodUid(uid.into())).out()).unwrap();
        make("known");
        make("stranger");
        let known = || {
            make("new");
            HashSet::from(["known".to_owned()])
        };
        jobs.sweep(known).await;
        let mut left: Vec<_> = std::fs::read_dir(&jobs.folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["known", "new"]);
    }
}
