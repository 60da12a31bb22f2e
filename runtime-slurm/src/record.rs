//! The records on disk, from which a restarted Mayfly takes over its jobs.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use mayfly_api::ObjectKey;
use mayfly_runtime::{ContainerId, PodUid, SandboxSpec};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    output::SlurmQueueEntry,
    script::{FILE_CLAIM, FILE_EXIT},
    state::{ContainerEnd, SlurmJobId},
};

const FILE_POD: &str = "pod.json";
const FILE_RECORD: &str = "record.json";
/// The script contains the container's variables, which may be secrets.
const MODE_PRIVATE: u32 = 0o600;

/// A pod with a sandbox on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRecord {
    pub namespace: String,
    pub name: String,
    pub annotations: BTreeMap<String, String>,
}

impl PodRecord {
    pub fn of(sandbox: &SandboxSpec) -> Self {
        Self {
            namespace: sandbox.pod.namespace.clone(),
            name: sandbox.pod.name.clone(),
            annotations: sandbox.annotations.clone(),
        }
    }

    pub fn key(&self) -> ObjectKey {
        ObjectKey::new(&self.namespace, &self.name)
    }
}

/// One attempt of a container and its job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    pub container: String,
    pub attempt: u32,
    /// The container's log.
    pub log: PathBuf,
    /// The directory for the end of each output, for a job with outputs.
    pub capture: Option<PathBuf>,
    /// The name of the signal that stops the program, without `SIG`.
    pub stop_signal: String,
    /// `None`: `sbatch` was called, or is about to be, and its result is unknown.
    pub job: Option<SlurmJobId>,
    /// When the program started, once it has.
    pub started: Option<Timestamp>,
    pub end: Option<EndRecord>,
}

/// The end of a container, with its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndRecord {
    #[serde(flatten)]
    pub end: ContainerEnd,
    pub finished: Timestamp,
}

/// A pod with the records of its containers on disk.
#[derive(Debug)]
pub struct StoredPod {
    pub uid: PodUid,
    pub pod: PodRecord,
    pub jobs: Vec<JobRecord>,
}

/// The directories of pods and containers.
#[derive(Clone, Debug)]
pub struct RecordFolder {
    pods: PathBuf,
}

impl RecordFolder {
    /// `shared` is a directory that the machines of the cluster also have.
    pub fn new(shared: &Path) -> Self {
        Self { pods: shared.join("pods") }
    }

    pub fn pod(&self, uid: &PodUid) -> PathBuf {
        self.pods.join(&uid.0)
    }

    pub fn container(&self, id: &ContainerId) -> PathBuf {
        self.pod(&id.pod).join(format!("{}_{}", id.name, id.attempt))
    }

    /// Makes a pod's record durable. Blocks.
    pub fn save_pod(&self, uid: &PodUid, pod: &PodRecord) -> io::Result<()> {
        let folder = self.pod(uid);
        fs::create_dir_all(&folder)?;
        save(&folder, FILE_POD, pod)?;
        fs::File::open(&self.pods)?.sync_all()
    }

    /// Makes a container's record durable. Blocks.
    pub fn save_job(&self, uid: &PodUid, record: &JobRecord) -> io::Result<()> {
        let id = record.id(uid);
        let folder = self.container(&id);
        fs::create_dir_all(&folder)?;
        save(&folder, FILE_RECORD, record)?;
        fs::File::open(self.pod(uid))?.sync_all()
    }

    /// Removes the directory of a pod. Blocks.
    pub fn remove_pod(&self, uid: &PodUid) -> io::Result<()> {
        match fs::remove_dir_all(self.pod(uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All pods. A directory with an incomplete record belongs to a pod without a sandbox, and is skipped. Blocks.
    ///
    /// # Errors
    /// A directory or a record cannot be read; without it a job might be submitted twice.
    pub fn load(&self) -> io::Result<Vec<StoredPod>> {
        let mut pods = Vec::new();
        for folder in folders(&self.pods)? {
            let Some(pod) = read::<PodRecord>(&folder.join(FILE_POD))? else { continue };
            let mut jobs = Vec::new();
            for folder in folders(&folder)? {
                jobs.extend(read::<JobRecord>(&folder.join(FILE_RECORD))?);
            }
            let uid = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            pods.push(StoredPod { uid: PodUid(uid), pod, jobs });
        }
        Ok(pods)
    }
}

impl JobRecord {
    pub fn id(&self, pod: &PodUid) -> ContainerId {
        ContainerId { pod: pod.clone(), name: self.container.clone(), attempt: self.attempt }
    }
}

/// The job that claimed the run of a container. Blocks.
pub fn claim(folder: &Path) -> Option<SlurmJobId> {
    fs::read_to_string(folder.join(FILE_CLAIM)).ok()?.trim().parse().ok().map(SlurmJobId)
}

/// The exit code that the script wrote, and the time. Blocks.
pub fn recorded_exit(folder: &Path) -> Option<(i32, Timestamp)> {
    let path = folder.join(FILE_EXIT);
    let code = fs::read_to_string(&path).ok()?.trim().parse().ok()?;
    let at = fs::metadata(&path).ok()?.modified().ok()?;
    Some((code, at.try_into().ok()?))
}

/// Chooses the job of a container among those with its name: the one that runs the program, else the recorded one, else
/// the first. Pure.
pub fn choose(
    claimed: Option<SlurmJobId>,
    recorded: Option<SlurmJobId>,
    named: &[&SlurmQueueEntry],
) -> Option<SlurmJobId> {
    claimed.or(recorded).or_else(|| named.iter().map(|job| job.id).min())
}

/// Atomically writes a file that only its owner can read.
pub fn write_private(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let new = folder.join(format!("{name}.new"));
    let mut options = fs::OpenOptions::new();
    let mut file = options.create(true).write(true).truncate(true).mode(MODE_PRIVATE).open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&new, folder.join(name))
}

fn save<T: Serialize>(folder: &Path, name: &str, value: &T) -> io::Result<()> {
    write_private(folder, name, &serde_json::to_vec(value)?)?;
    fs::File::open(folder)?.sync_all()
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let value = serde_json::from_slice(&bytes);
    value.map(Some).map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
}

fn folders(parent: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut folders = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::SlurmState;

    #[test]
    fn records_are_read_back() {
        let shared = tempfile::tempdir().unwrap();
        let folder = RecordFolder::new(shared.path());
        assert!(folder.load().unwrap().is_empty(), "there is no folder yet");
        let uid = PodUid("u1".into());
        let pod = PodRecord {
            namespace: "n".into(),
            name: "p".into(),
            annotations: [("a".into(), "b".into())].into(),
        };
        let end = ContainerEnd { exit_code: 3, reason: "Error".into(), message: "m".into() };
        let finished: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let job = JobRecord {
            container: "main".into(),
            attempt: 1,
            log: "/log".into(),
            capture: None,
            stop_signal: "TERM".into(),
            job: Some(SlurmJobId(12)),
            started: Some(finished),
            end: Some(EndRecord { end, finished }),
        };
        // A pod whose record was incomplete when the machine failed.
        fs::create_dir_all(folder.pod(&PodUid("unfinished".into()))).unwrap();
        folder.save_pod(&uid, &pod).unwrap();
        folder.save_job(&uid, &job).unwrap();
        let stored = folder.load().unwrap();
        assert_eq!(stored.len(), 1);
        assert_eq!((&stored[0].uid, &stored[0].pod), (&uid, &pod));
        assert_eq!(stored[0].jobs, [job]);
        fs::write(folder.pod(&uid).join(FILE_POD), "{").unwrap();
        assert!(folder.load().is_err(), "a damaged record is not taken for none");
        folder.remove_pod(&uid).unwrap();
        folder.remove_pod(&uid).unwrap();
        assert!(folder.load().unwrap().is_empty());
    }

    #[test]
    fn the_job_that_runs_the_program_stands_for_the_container() {
        let job = |id| SlurmQueueEntry {
            id: SlurmJobId(id),
            name: "n".into(),
            state: SlurmState::parse("PENDING"),
            reason: String::new(),
            started_s: None,
        };
        let (five, four) = (job(5), job(4));
        let named = [&five, &four];
        let of = |id: u64| Some(SlurmJobId(id));
        assert_eq!(choose(of(5), of(4), &named), of(5));
        assert_eq!(choose(None, of(5), &named), of(5));
        assert_eq!(choose(None, None, &named), of(4));
        assert_eq!(choose(None, None, &[]), None);
    }
}
