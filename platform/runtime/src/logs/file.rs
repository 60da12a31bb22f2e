//! One log file with its rotated part: the existing lines, and those that follow.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::stream::{self, StreamExt as _};
use tokio::{
    fs::File,
    io::{AsyncBufReadExt as _, AsyncSeekExt as _, BufReader},
};

use super::{
    read::{LogOptions, LogStream},
    rotated,
};

/// The interval of reads of a followed file.
const FOLLOW_POLL: Duration = Duration::from_millis(100);

/// A parsed line of a log file.
pub(super) struct Line {
    /// The line's timestamp in a sortable form; empty if the line has none.
    pub(super) at: Bytes,
    text: Bytes,
    /// Whether it continues the previous line, which was split because of its length.
    pub(super) continues: bool,
}

impl Line {
    fn parse(stored: Vec<u8>, continues: bool) -> (Self, bool) {
        let stored = Bytes::from(stored);
        let mut fields = stored.splitn(4, |byte| *byte == b' ');
        let (Some(at), Some(_stream), Some(tag), Some(text)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return (Self { at: Bytes::new(), text: stored, continues: false }, false);
        };
        let is_partial = tag == b"P";
        let text = if is_partial { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
        let (at, text) = (stored.slice_ref(at), stored.slice_ref(text));
        (Self { at, text, continues }, is_partial)
    }

    fn is_before(&self, since: jiff::Timestamp) -> bool {
        let at = std::str::from_utf8(&self.at).ok().and_then(|at| at.parse::<jiff::Timestamp>().ok());
        at.is_some_and(|at| at < since)
    }

    /// The text of the line, with its timestamp if requested.
    pub(super) fn into_text(self, options: &LogOptions) -> Bytes {
        if !options.timestamps || self.continues || self.at.is_empty() {
            return self.text;
        }
        let mut shown = BytesMut::with_capacity(self.at.len() + 1 + self.text.len());
        for part in [&self.at[..], b" ", &self.text] {
            shown.extend_from_slice(part);
        }
        shown.freeze()
    }
}

/// Reads whole lines of one file; an incomplete last line is returned once it is complete.
struct Lines {
    reader: BufReader<File>,
    unfinished: Vec<u8>,
    /// Whether the previous line was a part of a longer one.
    was_partial: bool,
    read_bytes: u64,
    /// The size of the file when it was opened.
    opened_bytes: u64,
    inode: u64,
}

impl Lines {
    async fn open(path: &Path) -> io::Result<Option<Self>> {
        use std::os::unix::fs::MetadataExt as _;
        let file = match File::open(path).await {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata().await?;
        Ok(Some(Self {
            reader: BufReader::new(file),
            unfinished: Vec::new(),
            was_partial: false,
            read_bytes: 0,
            opened_bytes: metadata.len(),
            inode: metadata.ino(),
        }))
    }

    /// Cancel-safe.
    async fn next(&mut self) -> io::Result<Option<Line>> {
        let read = self.reader.read_until(b'\n', &mut self.unfinished).await?;
        self.read_bytes += read as u64;
        if !self.unfinished.ends_with(b"\n") {
            return Ok(None);
        }
        let (line, is_partial) = Line::parse(std::mem::take(&mut self.unfinished), self.was_partial);
        self.was_partial = is_partial;
        Ok(Some(line))
    }

    async fn rewind(&mut self) -> io::Result<()> {
        self.reader.rewind().await?;
        self.unfinished.clear();
        (self.was_partial, self.read_bytes) = (false, 0);
        Ok(())
    }

    /// Whether the path now refers to another file, because this one was rotated or removed.
    async fn replaced(&self, path: &Path) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        match tokio::fs::metadata(path).await {
            Ok(now) => now.ino() != self.inode || now.len() < self.read_bytes,
            Err(_) => true,
        }
    }
}

/// Reads the lines that a log has when it is opened, oldest first. Memory holds one buffer of the file, not all lines.
pub(super) struct Past {
    path: PathBuf,
    options: LogOptions,
    /// The rotated part, then the file itself.
    parts: [Option<Lines>; 2],
    /// The index of the part that is being read.
    at: usize,
}

impl Past {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a log; a missing file counts as empty.
    pub(super) async fn open(path: PathBuf, options: LogOptions) -> io::Result<Self> {
        // In this order no line is missed if the file is rotated in between.
        let current = Lines::open(&path).await?;
        let older = Lines::open(&rotated(&path)).await?;
        let is_same = |older: &Lines| current.as_ref().is_some_and(|current| current.inode == older.inode);
        let older = older.filter(|older| !is_same(older));
        Ok(Self { path, options, parts: [older, current], at: 0 })
    }

    /// The next requested line; `None` after the last line that existed when the log was opened. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<Option<Line>> {
        while let Some(part) = self.parts.get_mut(self.at) {
            let mut was_partial = false;
            if let Some(lines) = part {
                while lines.read_bytes < lines.opened_bytes
                    && let Some(line) = lines.next().await?
                {
                    if !self.options.since.is_some_and(|since| line.is_before(since)) {
                        return Ok(Some(line));
                    }
                }
                was_partial = lines.was_partial;
            }
            self.at += 1;
            if let Some(Some(next)) = self.parts.get_mut(self.at) {
                next.was_partial = was_partial;
            }
        }
        Ok(None)
    }

    /// Skips all but the last `most` lines, and returns the number of remaining ones.
    pub(super) async fn keep_last(&mut self, most: usize) -> io::Result<usize> {
        let mut lines = 0;
        while self.next().await?.is_some() {
            lines += 1;
        }
        let kept = most.min(lines);
        if kept > 0 {
            for part in self.parts.iter_mut().flatten() {
                part.rewind().await?;
            }
            self.at = 0;
            for _ in kept..lines {
                self.next().await?;
            }
        }
        Ok(kept)
    }

    /// Follows the log after its existing lines, which must have been read; never ends.
    pub(super) fn follow(self) -> LogStream {
        let Self { path, options, parts: [older, reader], .. } = self;
        let seen = older.is_some() || reader.is_some();
        Follow { path, reader, waited_for: !seen, seen, options }.stream()
    }
}

/// Reads a log from its beginning and follows it; never ends.
pub(super) fn follow_from_start(path: PathBuf, options: LogOptions) -> LogStream {
    Follow { path, reader: None, waited_for: true, seen: false, options }.stream()
}

struct Follow {
    path: PathBuf,
    reader: Option<Lines>,
    /// Whether the file did not exist when opened: when it appears, it may already have been rotated once.
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
                // Checked before reading, so that lines written before a rotation are read first.
                let replaced = lines.replaced(&self.path).await;
                while let Some(line) = lines.next().await? {
                    if !self.options.since.is_some_and(|since| line.is_before(since)) {
                        return Ok(line.into_text(&self.options));
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
