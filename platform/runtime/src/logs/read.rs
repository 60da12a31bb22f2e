//! Reads and follows logs with the options of `kubectl logs`; several logs can be merged.

use std::{collections::HashMap, io, path::PathBuf};

use bytes::Bytes;
use futures::{
    future,
    stream::{self, AbortHandle, BoxStream, SelectAll, StreamExt as _},
};

use super::file::{Line, Past, follow_from_start};

/// The options of `kubectl logs` (the query of `pods/{name}/log`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogOptions {
    pub follow: bool,
    pub timestamps: bool,
    /// Only the last `tail_lines` lines.
    pub tail_lines: Option<usize>,
    /// Only lines at or after this time.
    pub since: Option<jiff::Timestamp>,
    /// Stop after this number of bytes.
    pub limit_bytes: Option<u64>,
}

/// Lines, as bytes with their line ends.
pub type LogStream = BoxStream<'static, io::Result<Bytes>>;

/// Reads a log file and its rotated part. A missing file counts as empty; when following, it is read once it appears.
pub async fn read(path: PathBuf, options: LogOptions) -> io::Result<LogStream> {
    Ok(LogReader::open(vec![path], options).await?.into_stream())
}

/// Merges several logs: existing lines by time, then, when following, new lines as they are written.
///
/// Memory holds one buffer and one line of each file, regardless of the sizes of the files and of the request.
pub struct LogReader {
    options: LogOptions,
    past: Vec<Past>,
    /// The next line of each of `past`. Empty before the first read.
    heads: Vec<Option<Line>>,
    /// The index of the file of the last returned line: the rest of a partial line must follow it directly.
    told: Option<usize>,
    /// The number of bytes that may still be returned.
    left_bytes: Option<u64>,
    /// The followed files, after all existing lines were returned.
    live: Option<Live>,
}

impl std::fmt::Debug for LogReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogReader").finish_non_exhaustive()
    }
}

struct Live {
    lines: SelectAll<LogStream>,
    /// The handle that stops the task of each file.
    ends: HashMap<PathBuf, AbortHandle>,
}

impl LogReader {
    /// Positions each log at its first requested line; a missing file counts as empty and can be followed.
    pub async fn open(paths: Vec<PathBuf>, options: LogOptions) -> io::Result<Self> {
        let mut past = Vec::with_capacity(paths.len());
        for path in paths {
            past.push(Past::open(path, options.clone()).await?);
        }
        let left_bytes = options.limit_bytes;
        let mut reader = Self { options, past, heads: Vec::new(), told: None, left_bytes, live: None };
        if let Some(most) = reader.options.tail_lines {
            let mut lines = 0;
            for past in &mut reader.past {
                lines += past.keep_last(most).await?;
            }
            for _ in most..lines {
                reader.next_past().await?;
            }
        }
        Ok(reader)
    }

    /// The next line; `None` at the end, which followed logs never reach. Cancel-safe.
    pub async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if self.left_bytes == Some(0) {
            return None;
        }
        let next = self.next_line().await?;
        Some(next.map(|mut line| {
            if let Some(left) = &mut self.left_bytes {
                line.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= line.len() as u64;
            }
            line
        }))
    }

    async fn next_line(&mut self) -> Option<io::Result<Bytes>> {
        if self.live.is_none() {
            match self.next_past().await {
                Ok(Some(line)) => return Some(Ok(line.into_text(&self.options))),
                Ok(None) if self.options.follow => self.live = Some(Live::of(std::mem::take(&mut self.past))),
                Ok(None) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        match self.live.as_mut()?.lines.next().await {
            Some(line) => Some(line),
            // There is nothing to follow now, but there may be later.
            None => future::pending().await,
        }
    }

    /// The oldest of the logs' next lines.
    async fn next_past(&mut self) -> io::Result<Option<Line>> {
        // Read one at a time, so that a result is kept if this is cancelled in between.
        while self.heads.len() < self.past.len() {
            let head = self.past[self.heads.len()].next().await?;
            self.heads.push(head);
        }
        let continues = |at: &usize| matches!(self.heads.get(*at), Some(Some(line)) if line.continues);
        let oldest = || {
            let lines = self.heads.iter().enumerate().filter_map(|(at, line)| Some((&line.as_ref()?.at, at)));
            lines.min().map(|(_, at)| at)
        };
        let Some(at) = self.told.filter(continues).or_else(oldest) else { return Ok(None) };
        let following = self.past[at].next().await?;
        self.told = Some(at);
        Ok(std::mem::replace(&mut self.heads[at], following))
    }

    /// Whether all existing lines were returned, so that each further line is a new one.
    pub fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Replaces the followed files after all existing lines were returned. New files are read from their beginning.
    pub fn follow_only(&mut self, paths: Vec<PathBuf>) {
        let Some(live) = &mut self.live else { return };
        live.ends.retain(|path, end| {
            let stays = paths.contains(path);
            if !stays {
                end.abort();
            }
            stays
        });
        for path in paths {
            if !live.ends.contains_key(&path) {
                live.add(path.clone(), follow_from_start(path, self.options.clone()));
            }
        }
    }

    pub fn into_stream(self) -> LogStream {
        let lines = stream::unfold(self, |mut reader| async move {
            let line = reader.next().await?;
            Some((line, reader))
        });
        lines.boxed()
    }
}

impl Live {
    fn of(past: Vec<Past>) -> Self {
        let mut live = Self { lines: SelectAll::new(), ends: HashMap::new() };
        for past in past {
            live.add(past.path().to_owned(), past.follow());
        }
        live
    }

    fn add(&mut self, path: PathBuf, lines: LogStream) {
        let (lines, end) = stream::abortable(lines);
        self.lines.push(lines.boxed());
        self.ends.insert(path, end);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::logs::{FILE_BYTES_MAX, LINE_BYTES_MAX, LogWriter, Stream, rotated};

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

    /// Three logs with alternating lines, the first with a rotated part.
    fn three(folder: &Path) -> Vec<PathBuf> {
        let line = |second: usize, tag: &str, text: &str| {
            format!("2026-01-01T00:00:{second:02}.000000000Z stdout {tag} {text}\n")
        };
        let [a, b, c] = ["a.log", "b.log", "c.log"].map(|name| folder.join(name));
        std::fs::write(rotated(&a), line(0, "F", "a0") + &line(3, "P", "a3 begins,")).unwrap();
        std::fs::write(&a, line(5, "F", "and ends") + &line(6, "F", "a6")).unwrap();
        // Lines of one log keep their order even if the clock was set back.
        std::fs::write(&b, line(1, "F", "b1") + &line(4, "F", "b4") + &line(2, "F", "b2")).unwrap();
        vec![a, b, c]
    }

    #[tokio::test]
    async fn several_logs_are_one_in_the_order_of_time() {
        let folder = tempfile::tempdir().unwrap();
        let paths = three(folder.path());
        let read = async |options: LogOptions| -> String {
            let lines = LogReader::open(paths.clone(), options).await.unwrap().into_stream();
            let lines: Vec<_> = lines.collect().await;
            lines.into_iter().map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap()).collect()
        };
        let all = "a0\nb1\na3 begins,and ends\nb4\nb2\na6\n";
        assert_eq!(read(LogOptions::default()).await, all);
        for (tail_lines, expected) in
            [(0, ""), (1, "a6\n"), (2, "and ends\na6\n"), (4, &all[16..]), (100, all)]
        {
            let options = LogOptions { tail_lines: Some(tail_lines), ..LogOptions::default() };
            assert_eq!(read(options).await, expected, "{tail_lines}");
        }
        let since = LogOptions { since: "2026-01-01T00:00:04Z".parse().ok(), ..LogOptions::default() };
        assert_eq!(read(since).await, "b4\nand ends\na6\n");
        let few = LogOptions { limit_bytes: Some(7), ..LogOptions::default() };
        assert_eq!(read(few).await, &all[..7]);
        let stamped =
            read(LogOptions { timestamps: true, tail_lines: Some(2), ..LogOptions::default() }).await;
        assert_eq!(stamped, "and ends\n2026-01-01T00:00:06.000000000Z a6\n");
    }

    #[tokio::test]
    async fn who_follows_may_change_what() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a.log", "b.log"].map(|name| folder.path().join(name));
        let writer = LogWriter::start().unwrap();
        let write = |path: &Path, line: &str| {
            writer.sink(path, Stream::Stdout).write(line.as_bytes());
            writer.flush();
        };
        write(&a, "a1\n");
        let follow = LogOptions { follow: true, ..LogOptions::default() };
        let mut log = LogReader::open(vec![a.clone()], follow).await.unwrap();
        assert_eq!(log.next().await.unwrap().unwrap(), "a1\n");
        write(&a, "a2\n");
        assert_eq!(log.next().await.unwrap().unwrap(), "a2\n");
        write(&b, "b1\n");
        log.follow_only(vec![b.clone()]);
        assert_eq!(log.next().await.unwrap().unwrap(), "b1\n");
        write(&a, "a3\n");
        write(&b, "b2\n");
        assert_eq!(log.next().await.unwrap().unwrap(), "b2\n");
        log.follow_only(Vec::new());
        write(&b, "b3\n");
        assert!(future::poll_immediate(std::pin::pin!(log.next())).await.is_none(), "nothing is followed");
        assert!(log.is_live());
    }
}
