//! Log files: their paths, the line format, rotation, reading and following.
//!
//! Lines have the CRI format, `2026-01-02T03:04:05.000000006Z stdout F text`, so that any log collector for Kubernetes
//! can read them. A function's revisions write to one file each, for all pods and requests; every other container
//! writes to a file per attempt.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::pod::{ContainerId, PodUid};

mod append;
mod file;
mod read;
mod write;

pub use append::LogAppender;
pub use read::{LogOptions, LogReader, LogStream, read};
pub use write::{LogFile, LogSink, LogWriter, Stream};

/// The length above which a line is split into partial lines (`P`) of the CRI format, in bytes.
pub const LINE_BYTES_MAX: usize = 16 << 10;
/// The size above which a file is rotated (one older file is kept), in bytes.
pub const FILE_BYTES_MAX: u64 = 10 << 20;

/// The layout of log files in one directory.
#[derive(Clone, Debug)]
pub struct LogLayout {
    root: PathBuf,
}

impl LogLayout {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder of all logs.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The file of one revision of a function.
    pub fn revision(&self, namespace: &str, function: &str, revision: &str) -> PathBuf {
        self.function(namespace, function).join(format!("{revision}.log"))
    }

    /// The folder of a function's files, one per revision.
    fn function(&self, namespace: &str, function: &str) -> PathBuf {
        self.functions().join(namespace).join(function)
    }

    fn functions(&self) -> PathBuf {
        self.root.join("functions")
    }

    /// The revisions that have a log. Blocks.
    pub fn revisions(&self) -> Vec<RevisionLog> {
        let mut logs = Vec::new();
        for namespace in names(&self.functions()) {
            for function in names(&self.functions().join(&namespace)) {
                for file in names(&self.function(&namespace, &function)) {
                    let log = file.strip_suffix(ROTATED).unwrap_or(&file).strip_suffix(".log");
                    logs.extend(log.map(|revision| RevisionLog {
                        namespace: namespace.clone(),
                        function: function.clone(),
                        revision: revision.to_owned(),
                    }));
                }
            }
        }
        logs
    }

    /// Removes a revision's log, and folders above it that become empty. Blocks.
    pub fn remove_revision(&self, log: &RevisionLog) -> io::Result<()> {
        let path = self.revision(&log.namespace, &log.function, &log.revision);
        for file in [rotated(&path), path] {
            remove_file(&file)?;
        }
        let function = self.function(&log.namespace, &log.function);
        // Fails if the folder still contains logs of other revisions.
        let _ =
            fs::remove_dir(&function).and_then(|()| fs::remove_dir(self.functions().join(&log.namespace)));
        Ok(())
    }

    /// The file of one attempt of a container.
    pub fn container(&self, id: &ContainerId) -> PathBuf {
        self.attempts(&id.pod, &id.name).join(format!("{}.log", id.attempt))
    }

    /// The folder of the files of all attempts of a container.
    pub fn attempts(&self, pod: &PodUid, container: &str) -> PathBuf {
        self.pod(&pod.0).join(container)
    }

    /// Removes the log of one attempt, if there is one. Blocks.
    pub fn remove_container(&self, id: &ContainerId) -> io::Result<()> {
        let path = self.container(id);
        for file in [rotated(&path), path] {
            remove_file(&file)?;
        }
        Ok(())
    }

    /// The folder of a pod's files.
    fn pod(&self, uid: &str) -> PathBuf {
        self.pods().join(uid)
    }

    fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    /// The pods that have logs. Blocks.
    pub fn pod_uids(&self) -> Vec<PodUid> {
        names(&self.pods()).into_iter().map(PodUid).collect()
    }

    /// Removes a pod's logs, if there are any. Blocks.
    pub fn remove_pod(&self, uid: &PodUid) -> io::Result<()> {
        match fs::remove_dir_all(self.pod(&uid.0)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The function and the revision that a log belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RevisionLog {
    pub namespace: String,
    pub function: String,
    pub revision: String,
}

/// Whether a log has any file. Blocks.
pub fn exists(path: &Path) -> bool {
    path.exists() || rotated(path).exists()
}

/// The suffix of a rotated log file.
const ROTATED: &str = ".1";

/// The path to which a full file is moved.
pub(crate) fn rotated(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ROTATED);
    PathBuf::from(name)
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The names in a folder; empty if it does not exist.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
