//! Writes log files: one bounded queue and one thread for all files of a host, so that a guest that writes never waits
//! for the disk and never fills memory.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};

use super::{FILE_BYTES_MAX, LINE_BYTES_MAX, rotated};

/// Lines queued for all files. A full queue drops lines and counts them.
const QUEUE_LINES_MAX: usize = 8192;
/// Queued lines of one program: a program that writes faster than the disk loses only its own lines.
const PROGRAM_LINES_MAX: usize = QUEUE_LINES_MAX / 4;
/// The time for which lines are gathered after the first one before they are written together. A wake-up, a check of
/// the file and a write for each line cost several times as much as the line itself.
const GATHER: Duration = Duration::from_millis(5);
/// The number of files that are kept open.
const OPEN_FILES_MAX: usize = 256;
/// The time without writes after which a file is closed.
const IDLE_CLOSE: Duration = Duration::from_secs(10);

/// The program's output that a line belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

enum Message {
    Line { file: Arc<Queued>, stream: Stream, time: jiff::Timestamp, text: Bytes, partial: bool },
    Flush(SyncSender<()>),
}

/// A file, and its count of queued lines.
struct Queued {
    path: Arc<Path>,
    lines: AtomicUsize,
}

/// Writes the log files of one host. Cheap to clone; dropping the last clone ends the thread after the queue is
/// written.
#[derive(Clone)]
pub struct LogWriter {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl std::fmt::Debug for LogWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogWriter").finish_non_exhaustive()
    }
}

impl LogWriter {
    /// Starts the writing thread.
    pub fn start() -> io::Result<Self> {
        let (queue, messages) = sync_channel(QUEUE_LINES_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = dropped.clone();
        std::thread::Builder::new()
            .name("log-writer".into())
            .spawn(move || Writing::new(counter).run(&messages))?;
        Ok(Self { queue, dropped })
    }

    /// The file of one program. Obtain it once for each program and clone it, so that the queue limit is shared.
    pub fn file(&self, path: impl Into<PathBuf>) -> LogFile {
        let path: PathBuf = path.into();
        LogFile {
            writer: self.clone(),
            queued: Arc::new(Queued { path: path.into(), lines: AtomicUsize::new(0) }),
        }
    }

    /// A sink for a program with only one output.
    pub fn sink(&self, path: impl Into<PathBuf>, stream: Stream) -> LogSink {
        self.file(path).sink(stream)
    }

    /// Lines dropped so far because the disk was slower than the programs.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all lines queued so far are written. Blocks; for tests and shutdown.
    pub fn flush(&self) {
        let (done, waiting) = sync_channel(1);
        if self.queue.send(Message::Flush(done)).is_ok() {
            // An error means that the thread, and its queue with it, is gone.
            waiting.recv().ok();
        }
    }
}

/// The file that one program's outputs go to. Cheap to clone.
#[derive(Clone)]
pub struct LogFile {
    writer: LogWriter,
    queued: Arc<Queued>,
}

impl std::fmt::Debug for LogFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogFile").finish_non_exhaustive()
    }
}

impl LogFile {
    /// A sink for one output of the program.
    pub fn sink(&self, stream: Stream) -> LogSink {
        LogSink { file: self.clone(), stream, unfinished: BytesMut::new() }
    }

    /// Queues a line, unless the queue limit of this program or of all is reached.
    fn send(&self, stream: Stream, text: Bytes, partial: bool) {
        let Self { writer, queued } = self;
        let time = jiff::Timestamp::now();
        let taken = queued.lines.fetch_add(1, Ordering::Relaxed) < PROGRAM_LINES_MAX && {
            let line = Message::Line { file: queued.clone(), stream, time, text, partial };
            !matches!(writer.queue.try_send(line), Err(TrySendError::Full(_)))
        };
        if !taken {
            queued.lines.fetch_sub(1, Ordering::Relaxed);
            writer.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One output of one program: splits bytes into lines.
pub struct LogSink {
    file: LogFile,
    stream: Stream,
    unfinished: BytesMut,
}

impl std::fmt::Debug for LogSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogSink").finish_non_exhaustive()
    }
}

impl LogSink {
    /// Accepts bytes as the program wrote them. Never waits.
    pub fn write(&mut self, mut bytes: &[u8]) {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.append(&bytes[..end]);
            let line = self.unfinished.split().freeze();
            self.file.send(self.stream, line, false);
            bytes = &bytes[end + 1..];
        }
        self.append(bytes);
    }

    /// Completes an unfinished line, so that the next output starts a new one.
    pub fn end_line(&mut self) {
        if !self.unfinished.is_empty() {
            let line = self.unfinished.split().freeze();
            self.file.send(self.stream, line, false);
        }
    }

    fn append(&mut self, mut bytes: &[u8]) {
        while self.unfinished.len() + bytes.len() > LINE_BYTES_MAX {
            let room = LINE_BYTES_MAX - self.unfinished.len();
            self.unfinished.extend_from_slice(&bytes[..room]);
            bytes = &bytes[room..];
            let part = self.unfinished.split().freeze();
            self.file.send(self.stream, part, true);
        }
        self.unfinished.extend_from_slice(bytes);
    }
}

impl Drop for LogSink {
    fn drop(&mut self) {
        self.end_line();
    }
}

struct Writing {
    open: HashMap<Arc<Path>, OpenFile>,
    dropped: Arc<AtomicU64>,
    dropped_told: u64,
    failing: bool,
}

struct OpenFile {
    file: File,
    bytes: u64,
    used: Instant,
    buffer: Vec<u8>,
}

impl Writing {
    fn new(dropped: Arc<AtomicU64>) -> Self {
        Self { open: HashMap::new(), dropped, dropped_told: 0, failing: false }
    }

    fn run(mut self, messages: &Receiver<Message>) {
        loop {
            let first = match messages.recv_timeout(IDLE_CLOSE) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => {
                    self.open.retain(|_, file| file.used.elapsed() < IDLE_CLOSE);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            // More lines arrive in the queue meanwhile. Not for a flush, whose caller is waiting.
            if matches!(first, Message::Line { .. }) {
                std::thread::sleep(GATHER);
            }
            // Takes all queued lines, then writes once per file.
            let mut flushed = Vec::new();
            for message in std::iter::once(first).chain(messages.try_iter().take(QUEUE_LINES_MAX)) {
                match message {
                    Message::Line { file, stream, time, text, partial } => {
                        file.lines.fetch_sub(1, Ordering::Relaxed);
                        let result = self.append(&file.path, stream, time, &text, partial);
                        self.note(&file.path, result);
                    }
                    Message::Flush(done) => flushed.push(done),
                }
            }
            self.write_buffers();
            for done in flushed {
                done.send(()).ok();
            }
        }
    }

    fn append(
        &mut self,
        path: &Arc<Path>,
        stream: Stream,
        time: jiff::Timestamp,
        text: &[u8],
        partial: bool,
    ) -> io::Result<()> {
        if !self.open.contains_key(path) {
            if self.open.len() >= OPEN_FILES_MAX {
                self.write_buffers();
                self.open.clear();
            }
            self.open.insert(path.clone(), OpenFile::open(path)?);
        }
        let Some(file) = self.open.get_mut(path) else { return Ok(()) };
        let tag = if partial { 'P' } else { 'F' };
        write!(file.buffer, "{time:.9} {} {tag} ", stream.name())?;
        file.buffer.extend_from_slice(text);
        file.buffer.push(b'\n');
        file.used = Instant::now();
        if file.buffer.len() as u64 + file.bytes > FILE_BYTES_MAX {
            file.write_buffer(path)?;
            std::fs::rename(path, rotated(path))?;
            self.open.remove(path);
        }
        Ok(())
    }

    fn write_buffers(&mut self) {
        let mut failed = None;
        for (path, file) in &mut self.open {
            if let Err(error) = file.write_buffer(path) {
                file.buffer.clear();
                failed = Some((path.clone(), error));
            }
        }
        match failed {
            Some((path, error)) => self.note(&path, Err(error)),
            None => self.failing = false,
        }
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped > self.dropped_told {
            tracing::warn!(lines = dropped - self.dropped_told, "log lines dropped: the disk is too slow");
            self.dropped_told = dropped;
        }
    }

    /// Logs once that a file cannot be written, instead of once for each line.
    fn note(&mut self, path: &Path, result: io::Result<()>) {
        if let Err(error) = result
            && !std::mem::replace(&mut self.failing, true)
        {
            tracing::error!(path = %path.display(), %error, "cannot write log file; lines are lost until it can be written");
        }
    }
}

impl OpenFile {
    fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { file, bytes, used: Instant::now(), buffer: Vec::new() })
    }

    fn write_buffer(&mut self, path: &Path) -> io::Result<()> {
        use std::os::unix::fs::MetadataExt as _;
        if self.buffer.is_empty() {
            return Ok(());
        }
        // The file was removed together with its container: a later container of the same name gets a new file.
        if self.file.metadata()?.nlink() == 0 {
            let anew = Self::open(path)?;
            (self.file, self.bytes) = (anew.file, anew.bytes);
        }
        self.file.write_all(&self.buffer)?;
        self.bytes += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs::{LogLayout, RevisionLog};

    /// A function that is created again under its name has the same path: its lines must not go to the removed file.
    #[test]
    fn a_log_that_was_removed_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let layout = LogLayout::new(folder.path());
        let log = RevisionLog { namespace: "ns".into(), function: "f".into(), revision: "f-00001".into() };
        let path = layout.revision("ns", "f", "f-00001");
        let writer = LogWriter::start().unwrap();
        let mut sink = writer.sink(&path, Stream::Stdout);
        sink.write(b"old\n");
        writer.flush();
        std::fs::write(rotated(&path), "older\n").unwrap();
        assert!(layout.revisions().iter().all(|known| *known == log) && !layout.revisions().is_empty());
        layout.remove_revision(&log).unwrap();
        assert_eq!(std::fs::read_dir(folder.path().join("functions")).unwrap().count(), 0);
        assert_eq!(layout.revisions(), []);
        sink.write(b"new\n");
        writer.flush();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with(" stdout F new\n") && text.lines().count() == 1, "{text}");
        layout.remove_revision(&log).unwrap();
        layout.remove_revision(&log).unwrap();
    }

    /// The log file is a pipe without a reader: the thread blocks until one opens it.
    #[test]
    fn who_writes_too_fast_loses_its_own_lines_only() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let made = std::process::Command::new("mkfifo").arg(at("stuck")).status().unwrap();
        assert!(made.success());
        let writer = LogWriter::start().unwrap();
        writer.sink(at("stuck"), Stream::Stdout).write(b"waits\n");
        let loud = writer.file(at("loud"));
        for stream in [Stream::Stdout, Stream::Stderr] {
            loud.sink(stream).write(&b"line\n".repeat(QUEUE_LINES_MAX));
        }
        assert_eq!(writer.dropped(), (2 * QUEUE_LINES_MAX - PROGRAM_LINES_MAX) as u64);
        writer.sink(at("quiet"), Stream::Stdout).write(b"heard\n");
        let reader = File::open(at("stuck")).unwrap();
        writer.flush();
        let lines = |name: &str| std::fs::read_to_string(at(name)).unwrap().lines().count();
        assert_eq!((lines("loud"), lines("quiet")), (PROGRAM_LINES_MAX, 1));
        loud.sink(Stream::Stdout).write(b"again\n");
        writer.flush();
        assert_eq!(lines("loud"), PROGRAM_LINES_MAX + 1, "its place in the queue is free again");
        drop(reader);
    }
}
