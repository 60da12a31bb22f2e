//! Log files: where they lie, how a line looks, how they rotate, how they are read and followed.
//!
//! A line has the CRI form, `2026-01-02T03:04:05.000000006Z stdout F text`, so that any log collector for
//! Kubernetes reads it. A function's revisions write to one file each, whichever pod or request made the
//! line; every other container writes to a file per attempt.

use std::path::{Path, PathBuf};

use crate::pod::ContainerId;

mod read;
mod write;

pub use read::{LogOptions, LogStream, read};
pub use write::{LogFile, LogSink, LogWriter, Stream};

/// A line longer than this is split, as the CRI's partial lines (`P`), in bytes.
pub const LINE_BYTES_MAX: usize = 16 << 10;
/// A file larger than this is moved aside (one older file is kept), in bytes.
pub const FILE_BYTES_MAX: u64 = 10 << 20;

/// Where log files lie under one directory.
#[derive(Clone, Debug)]
pub struct LogLayout {
    root: PathBuf,
}

impl LogLayout {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The file of one revision of a function.
    pub fn revision(&self, namespace: &str, function: &str, revision: &str) -> PathBuf {
        self.function(namespace, function).join(format!("{revision}.log"))
    }

    /// The folder of a function's files, one per revision.
    pub fn function(&self, namespace: &str, function: &str) -> PathBuf {
        self.root.join("functions").join(namespace).join(function)
    }

    /// The file of one attempt of a container.
    pub fn container(&self, id: &ContainerId) -> PathBuf {
        self.pod(&id.pod.0).join(&id.name).join(format!("{}.log", id.attempt))
    }

    /// The folder of a pod's files.
    pub fn pod(&self, uid: &str) -> PathBuf {
        self.root.join("pods").join(uid)
    }
}

/// The file that `path` is moved to when it is full.
pub(crate) fn rotated(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    PathBuf::from(name)
}
