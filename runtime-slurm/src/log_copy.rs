//! Copies the output files of a job into its container's log, and stores the end of each for a job with outputs.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use mayfly_api::job_io::RESULT_BYTES_MAX;
use mayfly_runtime::logs::{LogAppender, Stream};

use crate::{
    record::write_private,
    script::{FILE_STDERR, FILE_STDOUT},
};

const FILE_OFFSETS: &str = "log-offsets";
const STREAMS: [(Stream, &str); 2] = [(Stream::Stdout, FILE_STDOUT), (Stream::Stderr, FILE_STDERR)];
/// The size of one read, in bytes.
const READ_BYTES: usize = 256 << 10;

/// The state of the copy of a container's output.
#[derive(Default)]
pub(crate) enum CopyState {
    #[default]
    Idle,
    Open(LogCopy),
    /// The job has ended, and its log is complete.
    Done,
}

/// The copy of one container's output.
pub(crate) struct LogCopy {
    folder: PathBuf,
    log: LogAppender,
    /// The offsets in stdout and stderr up to which the log has the output.
    read: [u64; 2],
    /// The same offsets, up to the last complete line: another process resumes there.
    durable: [u64; 2],
}

impl CopyState {
    /// Copies the output since the last call. Blocks.
    pub(crate) fn advance(&mut self, folder: &Path, log: &Path) -> io::Result<()> {
        if matches!(self, Self::Idle) {
            *self = Self::Open(LogCopy::open(folder.to_owned(), log)?);
        }
        match self {
            Self::Open(copy) => copy.advance(),
            Self::Idle | Self::Done => Ok(()),
        }
    }

    /// Copies the rest after the job's end. On an error the next call starts over. Blocks.
    pub(crate) fn finish(&mut self, folder: &Path, log: &Path) -> io::Result<()> {
        match std::mem::take(self) {
            Self::Idle => LogCopy::open(folder.to_owned(), log)?.finish()?,
            Self::Open(copy) => copy.finish()?,
            Self::Done => {}
        }
        *self = Self::Done;
        Ok(())
    }
}

impl LogCopy {
    /// Resumes where an earlier process stopped. Lines that it wrote after it last stored the offsets are duplicated.
    /// Blocks.
    pub(crate) fn open(folder: PathBuf, log: &Path) -> io::Result<Self> {
        let noted = fs::read(folder.join(FILE_OFFSETS)).ok();
        let durable = noted.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Ok(Self { log: LogAppender::open(log)?, folder, read: durable, durable })
    }

    /// Copies the output since the last call. Blocks.
    pub(crate) fn advance(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        let before = self.durable;
        for (index, (stream, name)) in STREAMS.into_iter().enumerate() {
            let mut file = match File::open(self.folder.join(name)) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            file.seek(SeekFrom::Start(self.read[index]))?;
            loop {
                let count = file.read(&mut buffer)?;
                if count == 0 {
                    break;
                }
                let bytes = &buffer[..count];
                // After a failed write, the appender keeps the bytes in its buffer.
                let written = self.log.write(stream, bytes, Timestamp::now());
                if let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') {
                    self.durable[index] = self.read[index] + end as u64 + 1;
                }
                self.read[index] += count as u64;
                written?;
            }
        }
        if self.durable != before {
            write_private(&self.folder, FILE_OFFSETS, &serde_json::to_vec(&self.durable)?)?;
        }
        Ok(())
    }

    /// Copies the rest after the job's end. Blocks.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.advance()?;
        for (stream, _) in STREAMS {
            self.log.end(stream, Timestamp::now())?;
        }
        write_private(&self.folder, FILE_OFFSETS, &serde_json::to_vec(&self.read)?)
    }
}

/// The end of a job's stderr, as text. Blocks.
pub(crate) fn stderr_tail(folder: &Path) -> String {
    let (tail, _) = tail(&folder.join(FILE_STDERR)).unwrap_or_default();
    String::from_utf8_lossy(&tail).into_owned()
}

/// Writes the end of each output into the directory `capture`. Blocks.
pub(crate) fn capture(folder: &Path, capture: &Path) -> io::Result<()> {
    fs::create_dir_all(capture)?;
    for (_, name) in STREAMS {
        let (tail, is_truncated) = tail(&folder.join(name))?;
        fs::write(capture.join(name), tail)?;
        if is_truncated {
            fs::write(capture.join(format!("{name}.truncated")), "")?;
        }
    }
    Ok(())
}

/// The last bytes of a file, at most [`RESULT_BYTES_MAX`], and whether it has more. A missing file counts as empty.
fn tail(path: &Path) -> io::Result<(Vec<u8>, bool)> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), false)),
        Err(error) => return Err(error),
    };
    let skipped = file.metadata()?.len().saturating_sub(RESULT_BYTES_MAX as u64);
    file.seek(SeekFrom::Start(skipped))?;
    let mut tail = Vec::new();
    file.take(RESULT_BYTES_MAX as u64).read_to_end(&mut tail)?;
    Ok((tail, skipped > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(log: &Path) -> Vec<String> {
        let text = fs::read_to_string(log).unwrap();
        text.lines().map(|line| line.split_once(' ').unwrap().1.to_owned()).collect()
    }

    #[test]
    fn another_process_resumes_after_the_last_complete_line() {
        let folder = tempfile::tempdir().unwrap();
        let (log, out) = (folder.path().join("log"), folder.path().join(FILE_STDOUT));
        let mut copy = LogCopy::open(folder.path().to_owned(), &log).unwrap();
        copy.advance().unwrap();
        fs::write(&out, "one\ntw").unwrap();
        fs::write(folder.path().join(FILE_STDERR), "e\n").unwrap();
        copy.advance().unwrap();
        assert_eq!(lines(&log), ["stdout F one", "stderr F e"]);
        drop(copy);
        fs::write(&out, "one\ntwo\nlast").unwrap();
        let copy = LogCopy::open(folder.path().to_owned(), &log).unwrap();
        copy.finish().unwrap();
        let whole = ["stdout F one", "stderr F e", "stdout F two", "stdout F last"];
        assert_eq!(lines(&log), whole);
        LogCopy::open(folder.path().to_owned(), &log).unwrap().finish().unwrap();
        assert_eq!(lines(&log), whole, "a finished log is not copied again");
    }

    #[test]
    fn the_end_of_an_output_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("capture");
        fs::write(folder.path().join(FILE_STDOUT), [vec![b'a'; 10], vec![b'b'; RESULT_BYTES_MAX]].concat())
            .unwrap();
        capture(folder.path(), &kept).unwrap();
        assert_eq!(fs::read(kept.join("stdout")).unwrap(), vec![b'b'; RESULT_BYTES_MAX]);
        assert!(kept.join("stdout.truncated").exists());
        assert!(fs::read(kept.join("stderr")).unwrap().is_empty());
        assert!(!kept.join("stderr.truncated").exists());
    }
}
