//! Appends to one log file for a writer that may block on the disk: no line is lost.

use std::{
    fs::{File, OpenOptions, rename},
    io::{self, Write as _},
    path::PathBuf,
};

use super::{FILE_BYTES_MAX, LINE_BYTES_MAX, Stream, rotated};

/// The log file of one container, written by a separate process.
pub struct LogAppender {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// The unfinished lines of stdout and stderr.
    unfinished: [Vec<u8>; 2],
    buffer: Vec<u8>,
}

impl std::fmt::Debug for LogAppender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogAppender").field("path", &self.path).finish_non_exhaustive()
    }
}

impl LogAppender {
    /// Opens or creates the file, and its folder. Blocks.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path: PathBuf = path.into();
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = open(&path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path, file, bytes, unfinished: Default::default(), buffer: Vec::new() })
    }

    /// Appends bytes as the program wrote them; writes complete lines. Blocks.
    ///
    /// # Errors
    /// For example, the disk is full. The lines stay in memory and are written with the next ones.
    pub fn write(&mut self, stream: Stream, mut bytes: &[u8], now: jiff::Timestamp) -> io::Result<()> {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.extend(stream, &bytes[..end], now);
            self.push_line(stream, 'F', now);
            bytes = &bytes[end + 1..];
        }
        self.extend(stream, bytes, now);
        self.flush()
    }

    /// Writes the last line of a stream that ended without a newline. Blocks.
    pub fn end(&mut self, stream: Stream, now: jiff::Timestamp) -> io::Result<()> {
        if !self.unfinished[index(stream)].is_empty() {
            self.push_line(stream, 'F', now);
        }
        self.flush()
    }

    fn extend(&mut self, stream: Stream, mut bytes: &[u8], now: jiff::Timestamp) {
        loop {
            let unfinished = &mut self.unfinished[index(stream)];
            let room = LINE_BYTES_MAX - unfinished.len();
            if bytes.len() <= room {
                return unfinished.extend_from_slice(bytes);
            }
            unfinished.extend_from_slice(&bytes[..room]);
            bytes = &bytes[room..];
            self.push_line(stream, 'P', now);
        }
    }

    fn push_line(&mut self, stream: Stream, tag: char, now: jiff::Timestamp) {
        let text = &mut self.unfinished[index(stream)];
        // Writing to memory cannot fail.
        let _ = write!(self.buffer, "{now:.9} {} {tag} ", stream.name());
        self.buffer.append(text);
        self.buffer.push(b'\n');
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        // What a full disk still took is not written twice.
        while !self.buffer.is_empty() {
            match self.file.write(&self.buffer) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.buffer.drain(..written);
                    self.bytes += written as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.bytes > FILE_BYTES_MAX {
            match rename(&self.path, rotated(&self.path)) {
                // It was moved before, but the new file could not be opened (the disk was full).
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => result?,
            }
            self.file = open(&self.path)?;
            self.bytes = 0;
        }
        Ok(())
    }
}

fn index(stream: Stream) -> usize {
    match stream {
        Stream::Stdout => 0,
        Stream::Stderr => 1,
    }
}

fn open(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_two_streams_stay_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pod/0.log");
        let mut log = LogAppender::open(&path).unwrap();
        let now: jiff::Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        log.write(Stream::Stdout, b"a\nb", now).unwrap();
        log.write(Stream::Stderr, b"e\n", now).unwrap();
        log.write(Stream::Stdout, b"c\n", now).unwrap();
        log.write(Stream::Stdout, b"last", now).unwrap();
        log.end(Stream::Stdout, now).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let at = "2026-01-02T03:04:05.000000000Z";
        let expected = format!("{at} stdout F a\n{at} stderr F e\n{at} stdout F bc\n{at} stdout F last\n");
        assert_eq!(text, expected);
    }

    #[test]
    fn long_lines_are_split_and_full_files_are_moved_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0.log");
        let mut log = LogAppender::open(&path).unwrap();
        let now = jiff::Timestamp::UNIX_EPOCH;
        log.write(Stream::Stdout, &vec![b'x'; LINE_BYTES_MAX + 1], now).unwrap();
        log.end(Stream::Stdout, now).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let tags: Vec<_> = text.lines().map(|line| line.split(' ').nth(2).unwrap()).collect();
        assert_eq!(tags, ["P", "F"]);
        let line = [vec![b'y'; 1023], vec![b'\n']].concat();
        for _ in 0..FILE_BYTES_MAX / 1024 + 1 {
            log.write(Stream::Stderr, &line, now).unwrap();
        }
        assert!(rotated(&path).exists());
        assert!(std::fs::metadata(&path).unwrap().len() < FILE_BYTES_MAX);
        // A file that was moved without a new one in its place.
        std::fs::rename(&path, rotated(&path)).unwrap();
        for _ in 0..FILE_BYTES_MAX / 1024 + 1 {
            log.write(Stream::Stderr, &line, now).unwrap();
        }
        assert!(path.exists());
    }
}
