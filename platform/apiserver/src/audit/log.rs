//! The file of the audit log: one JSON object a line, rotated by size.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use tokio::sync::mpsc;

/// Lines that wait for the disk. While the queue is full, requests wait: no event is lost while the disk works.
const QUEUE_LINES: usize = 1_024;
/// The size at which a file is rotated (upstream's recommendation for `--audit-log-maxsize`).
const FILE_BYTES_MAX: u64 = 100 << 20;
/// Rotated files that are kept.
const ROTATED_MAX: usize = 10;

/// A handle of the log. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct AuditLog(mpsc::Sender<String>);

impl AuditLog {
    /// Opens the file for appending and starts its writer. The writer ends when the last handle is dropped.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut file = LogFile::open(path)?;
        let (lines, mut queue) = mpsc::channel::<String>(QUEUE_LINES);
        std::thread::Builder::new().name("audit-log".into()).spawn(move || {
            while let Some(line) = queue.blocking_recv() {
                if let Err(error) = file.write(&line) {
                    tracing::error!(path = %file.path.display(), %error, "an audit event cannot be written");
                }
            }
        })?;
        Ok(Self(lines))
    }

    /// Queues a line; waits while the queue is full.
    pub(super) async fn write(&self, line: String) {
        // The writer lives as long as this handle.
        let _ = self.0.send(line).await;
    }

    /// Queues a line without waiting; if the queue is full, the line is lost, which is logged.
    pub(super) fn try_write(&self, line: String) {
        if self.0.try_send(line).is_err() {
            tracing::error!("an audit event was lost: the disk of the audit log is too slow");
        }
    }
}

struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    bytes_max: u64,
}

impl LogFile {
    fn open(path: &Path) -> io::Result<Self> {
        let file = append(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, bytes, bytes_max: FILE_BYTES_MAX })
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.bytes_max {
            self.rotate()?;
        }
        self.file.write_all(line.as_bytes())?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// Renames the file to `<name>-<time>` and starts a new one; the oldest rotated files are removed.
    fn rotate(&mut self) -> io::Result<()> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let prefix = format!("{name}-");
        let time = Timestamp::now().strftime("%Y%m%dT%H%M%S%.6f").to_string();
        fs::rename(&self.path, folder.join(format!("{prefix}{time}")))?;
        self.file = append(&self.path)?;
        self.bytes = 0;
        let mut rotated: Vec<PathBuf> = fs::read_dir(&folder)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)))
            .collect();
        // The times in the names sort like the files' ages.
        rotated.sort();
        let surplus = rotated.len().saturating_sub(ROTATED_MAX);
        rotated.drain(..surplus).try_for_each(fs::remove_file)
    }
}

/// Opens a file for appending, readable by its owner only: it may hold the contents of Secrets.
fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_rotated_and_the_oldest_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let mut file = LogFile { bytes_max: 100, ..LogFile::open(&path).unwrap() };
        for number in 0..40 {
            file.write(&format!("{number:>59}\n")).unwrap();
        }
        let names = || fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names().count(), ROTATED_MAX + 1);
        let last = fs::read_to_string(&path).unwrap();
        assert_eq!(last.trim(), "39");
        // An existing file is continued.
        let mut again = LogFile::open(&path).unwrap();
        again.write("x\n").unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("39\nx\n"));
    }
}
