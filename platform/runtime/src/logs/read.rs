//! Reading and following log files, with the options of `kubectl logs`.

use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::{
    fs::File,
    io::{AsyncBufReadExt as _, BufReader},
};

use super::rotated;

/// How often a followed file is looked at.
const FOLLOW_POLL: Duration = Duration::from_millis(100);

/// What `kubectl logs` can ask for (the query of `pods/{name}/log`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogOptions {
    pub follow: bool,
    pub timestamps: bool,
    /// Only the last so many lines.
    pub tail_lines: Option<usize>,
    /// Only lines at or after this time.
    pub since: Option<jiff::Timestamp>,
    /// Stop after so many bytes.
    pub limit_bytes: Option<u64>,
}

/// Lines, as bytes with their line ends.
pub type LogStream = BoxStream<'static, io::Result<Bytes>>;

/// Reads a log file (and the older part that was moved aside). A file that does not exist yet is empty;
/// followed, it is waited for.
pub async fn read(path: PathBuf, options: LogOptions) -> io::Result<LogStream> {
    let mut backlog = VecDeque::new();
    let mut reader = None;
    for (part, current) in [(rotated(&path), false), (path.clone(), true)] {
        let Some(mut lines) = Lines::open(&part).await? else { continue };
        while let Some(line) = lines.next().await? {
            if let Some(text) = shown(&line, &options) {
                backlog.push_back(text);
                if options.tail_lines.is_some_and(|most| backlog.len() > most) {
                    backlog.pop_front();
                }
            }
        }
        if current {
            reader = Some(lines);
        }
    }
    let follow = options.follow;
    let limit = options.limit_bytes;
    let past = stream::iter(backlog.into_iter().map(Ok));
    let lines = if follow {
        let waited_for = reader.is_none();
        past.chain(Follow { path, reader, waited_for, seen: !waited_for, options }.stream()).boxed()
    } else {
        past.boxed()
    };
    Ok(match limit {
        Some(limit) => limited(lines, limit),
        None => lines,
    })
}

fn limited(lines: LogStream, limit: u64) -> LogStream {
    lines
        .scan(limit, |left, line| {
            let line = line.map(|line| {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(line.len());
                *left -= take as u64;
                line.slice(..take)
            });
            let end = matches!(&line, Ok(line) if line.is_empty());
            std::future::ready((!end).then_some(line))
        })
        .boxed()
}

/// What a stored line looks like to the reader: the text, with or without its time; `None` when it is too
/// old. A partial line is joined with its rest by leaving out the line end.
fn shown(line: &[u8], options: &LogOptions) -> Option<Bytes> {
    let mut fields = line.splitn(4, |b| *b == b' ');
    let (Some(time), Some(_stream), Some(tag), Some(text)) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Some(Bytes::copy_from_slice(line));
    };
    if let Some(since) = options.since {
        let parsed = std::str::from_utf8(time).ok().and_then(|time| time.parse::<jiff::Timestamp>().ok());
        if parsed.is_some_and(|time| time < since) {
            return None;
        }
    }
    let mut out = BytesMut::with_capacity(line.len());
    if options.timestamps {
        out.extend_from_slice(time);
        out.extend_from_slice(b" ");
    }
    let text = if tag == b"P" { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
    out.extend_from_slice(text);
    Some(out.freeze())
}

/// Whole lines of one file; an unfinished last line waits for its end.
struct Lines {
    reader: BufReader<File>,
    unfinished: Vec<u8>,
    read_bytes: u64,
    inode: u64,
}

impl Lines {
    async fn open(path: &Path) -> io::Result<Option<Self>> {
        use std::os::unix::fs::MetadataExt as _;
        match File::open(path).await {
            Ok(file) => {
                let inode = file.metadata().await?.ino();
                Ok(Some(Self { reader: BufReader::new(file), unfinished: Vec::new(), read_bytes: 0, inode }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let read = self.reader.read_until(b'\n', &mut self.unfinished).await?;
        self.read_bytes += read as u64;
        if self.unfinished.ends_with(b"\n") {
            return Ok(Some(std::mem::take(&mut self.unfinished)));
        }
        Ok(None)
    }

    /// Whether the path now names another file, because this one was moved aside or removed.
    async fn replaced(&self, path: &Path) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        match tokio::fs::metadata(path).await {
            Ok(now) => now.ino() != self.inode || now.len() < self.read_bytes,
            Err(_) => true,
        }
    }
}

struct Follow {
    path: PathBuf,
    reader: Option<Lines>,
    /// Nothing was there yet: when the file appears, it may already have been moved aside once.
    waited_for: bool,
    seen: bool,
    options: LogOptions,
}

impl Follow {
    fn stream(self) -> LogStream {
        stream::try_unfold(self, |mut follow| async move {
            let line = follow.next().await?;
            Ok(Some((line, follow)))
        })
        .boxed()
    }

    async fn next(&mut self) -> io::Result<Bytes> {
        loop {
            if let Some(lines) = &mut self.reader {
                // Looked at before reading: lines written before a rotation are read first.
                let replaced = lines.replaced(&self.path).await;
                while let Some(line) = lines.next().await? {
                    if let Some(text) = shown(&line, &self.options) {
                        return Ok(text);
                    }
                }
                if replaced {
                    self.reader = None;
                }
            }
            if self.reader.is_none() {
                if std::mem::take(&mut self.waited_for) {
                    self.reader = Lines::open(&rotated(&self.path)).await?;
                }
                if self.reader.is_none() {
                    self.reader = Lines::open(&self.path).await?;
                    self.waited_for |= self.reader.is_none() && !self.seen;
                }
                if self.reader.is_some() {
                    self.seen = true;
                    continue;
                }
            }
            tokio::time::sleep(FOLLOW_POLL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs::{FILE_BYTES_MAX, LINE_BYTES_MAX, LogWriter, Stream};

    async fn text(path: &Path, options: LogOptions) -> String {
        let lines: Vec<_> = read(path.into(), options).await.unwrap().collect().await;
        lines.into_iter().map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap()).collect()
    }

    #[tokio::test]
    async fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.log");
        let writer = LogWriter::start().unwrap();
        let mut sink = writer.sink(&path, Stream::Stdout);
        sink.write(b"one\ntw");
        sink.write(b"o\n\nlast");
        drop(sink);
        writer.sink(&path, Stream::Stderr).write(&[b'x'; LINE_BYTES_MAX + 5]);
        writer.flush();
        let expected = format!("one\ntwo\n\nlast\n{}\n", "x".repeat(LINE_BYTES_MAX + 5));
        assert_eq!(text(&path, LogOptions::default()).await, expected);
        let tail = LogOptions { tail_lines: Some(4), limit_bytes: Some(6), ..Default::default() };
        assert_eq!(text(&path, tail).await, "\nlast\n");
        let stamped = text(&path, LogOptions { timestamps: true, ..Default::default() }).await;
        let (time, rest) = stamped.split_once(' ').unwrap();
        assert!(rest.starts_with("one\n"));
        let first: jiff::Timestamp = time.parse().unwrap();
        let later =
            LogOptions { since: Some(first + jiff::SignedDuration::from_secs(60)), ..Default::default() };
        assert_eq!(text(&path, later).await, "");
    }

    #[tokio::test]
    async fn following_survives_rotation_and_waits_for_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.log");
        let mut lines = read(path.clone(), LogOptions { follow: true, ..Default::default() }).await.unwrap();
        let writer = LogWriter::start().unwrap();
        let count = usize::try_from(FILE_BYTES_MAX).unwrap() / 10_000 + 50;
        let writing = tokio::task::spawn_blocking(move || {
            let mut sink = writer.sink(&path, Stream::Stdout);
            for number in 0..count {
                sink.write(format!("{number} {}\n", "y".repeat(10_000)).as_bytes());
                if number % 100 == 0 {
                    writer.flush();
                }
            }
            writer.flush();
            path
        });
        for number in 0..count {
            let line = lines.next().await.unwrap().unwrap();
            assert!(line.starts_with(format!("{number} ").as_bytes()), "line {number}");
        }
        let path = writing.await.unwrap();
        assert!(rotated(&path).exists());
        assert_eq!(writer_dropped_nothing(&path).await, count);
    }

    async fn writer_dropped_nothing(path: &Path) -> usize {
        text(path, LogOptions::default()).await.lines().count()
    }
}
