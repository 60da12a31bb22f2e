//! The last bytes of a job's stdout and stderr, kept in memory and written to files when the job has ended.

use std::{
    collections::VecDeque,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use mayfly_api::job_io::{RESULT_BYTES_MAX, STDERR_BYTES_MAX};
use mayfly_runtime::logs::Stream;
use parking_lot::Mutex;

/// Both outputs of one job.
pub(crate) struct Capture {
    folder: PathBuf,
    stdout: Mutex<Tail>,
    stderr: Mutex<Tail>,
}

/// The last bytes of a stream.
struct Tail {
    bytes: VecDeque<u8>,
    max: usize,
    truncated: bool,
}

impl Tail {
    fn new(max: usize) -> Self {
        Self { bytes: VecDeque::new(), max, truncated: false }
    }

    fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(self.max)..];
        let surplus = (self.bytes.len() + kept.len()).saturating_sub(self.max);
        self.truncated |= surplus > 0 || kept.len() < bytes.len();
        self.bytes.drain(..surplus.min(self.bytes.len()));
        self.bytes.extend(kept);
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = std::fs::File::create(path)?;
        let (first, second) = self.bytes.as_slices();
        file.write_all(first)?;
        file.write_all(second)?;
        if self.truncated {
            std::fs::File::create(path.with_extension("truncated"))?;
        }
        Ok(())
    }
}

impl Capture {
    pub(crate) fn new(folder: PathBuf) -> Self {
        let (stdout, stderr) = (Tail::new(RESULT_BYTES_MAX), Tail::new(STDERR_BYTES_MAX));
        Self { folder, stdout: stdout.into(), stderr: stderr.into() }
    }

    pub(crate) fn take(&self, stream: Stream, bytes: &[u8]) {
        self.of(stream).lock().push(bytes);
    }

    fn of(&self, stream: Stream) -> &Mutex<Tail> {
        match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        }
    }

    /// Blocks while some hundred KiB are written.
    pub(crate) fn write(&self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let path = self.folder.join(stream.name());
            if let Err(error) = self.of(stream).lock().write(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot write a job's output");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_end() {
        let mut tail = Tail::new(4);
        let text = |tail: &Tail| tail.bytes.iter().map(|byte| char::from(*byte)).collect::<String>();
        tail.push(b"ab");
        tail.push(b"cd");
        assert_eq!((text(&tail).as_str(), tail.truncated), ("abcd", false));
        tail.push(b"e");
        assert_eq!((text(&tail).as_str(), tail.truncated), ("bcde", true));
        tail.push(b"123456");
        assert_eq!(text(&tail), "3456");
        let mut tail = Tail::new(4);
        tail.push(b"123456");
        assert_eq!((text(&tail).as_str(), tail.truncated), ("3456", true));
    }
}
