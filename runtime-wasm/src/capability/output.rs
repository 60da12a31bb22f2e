//! A guest's stdout and stderr: written line by line to its log, at a bounded rate.
//!
//! A function that writes faster than its rate is not slowed: excess lines are dropped and counted, and a line in the
//! log reports the count, before the next output or at the end of the call, whichever comes first. A job is throttled instead, because its output is its result.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use mayfly_runtime::logs::{LogFile, LogSink, LogWriter, Stream};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::{
    io::AsyncWrite,
    time::{Instant, Sleep},
};
use wasmtime_wasi::{
    cli::{IsTerminal, StdoutStream},
    p2::{OutputStream, Pollable, StreamResult},
};

use super::capture::Capture;

/// Bytes a guest may pass in one write.
const WRITE_BYTES_MAX: usize = 64 << 10;
/// The cost of a line in addition to its own bytes: timestamp and stream name in the file, and the processing.
const LINE_BYTES: usize = 64;
/// Messages of the host in a program's log, in bytes per second; excess lines are dropped. A guest that fails
/// repeatedly can cause any number of them.
const NOTES_BYTES_PER_SECOND: u64 = 64 << 10;
/// How far a guest may write ahead of its rate before it waits.
const BURST: Duration = Duration::from_secs(1);

/// The log of one program.
#[derive(Clone)]
pub(crate) struct ProgramLog(Arc<Inner>);

/// The treatment of output beyond the rate limit.
#[derive(Clone)]
pub(crate) enum OverflowPolicy {
    /// The program waits.
    Wait,
    /// Lines are dropped and counted.
    Drop(Counter),
}

struct Inner {
    overflow: OverflowPolicy,
    /// Lines dropped since the log last reported them.
    dropped: AtomicU64,
    file: LogFile,
    limiter: RateLimiter,
    notes: RateLimiter,
    capture: Option<Capture>,
}

impl ProgramLog {
    /// The log of a function, which never waits for it.
    pub(crate) fn new(writer: &LogWriter, path: PathBuf, bytes_per_second: u64, dropped: &Counter) -> Self {
        Self::with(writer, path, bytes_per_second, OverflowPolicy::Drop(dropped.clone()), None)
    }

    /// The log of a job, with a capture of its last output.
    pub(crate) fn capturing(
        writer: &LogWriter,
        path: PathBuf,
        bytes_per_second: u64,
        capture: Option<Capture>,
    ) -> Self {
        Self::with(writer, path, bytes_per_second, OverflowPolicy::Wait, capture)
    }

    fn with(
        writer: &LogWriter,
        path: PathBuf,
        bytes_per_second: u64,
        overflow: OverflowPolicy,
        capture: Option<Capture>,
    ) -> Self {
        let (file, limiter) = (writer.file(path), RateLimiter::new(bytes_per_second));
        let (notes, dropped) = (RateLimiter::new(NOTES_BYTES_PER_SECOND), AtomicU64::new(0));
        Self(Arc::new(Inner { overflow, dropped, file, limiter, notes, capture }))
    }

    /// Writes the captured output to its files. Blocks briefly.
    pub(crate) fn write_capture(&self) {
        if let Some(capture) = &self.0.capture {
            capture.write();
        }
    }

    /// One output of one instance. Instances do not share a sink, so their lines do not mix.
    pub(crate) fn output(&self, stream: Stream) -> GuestOutput {
        GuestOutput(Arc::new(OutputInner { log: self.clone(), stream, sink: OnceLock::new() }))
    }

    /// Whether to drop output now. Output that is written after a drop is preceded by the report of dropped lines.
    fn drops(&self, lines: usize) -> bool {
        let OverflowPolicy::Drop(counter) = &self.0.overflow else { return false };
        if self.0.limiter.wait_until().is_some() {
            counter.inc_by(lines as u64);
            self.0.dropped.fetch_add(lines as u64, Ordering::Relaxed);
            return true;
        }
        self.report_dropped();
        false
    }

    /// Writes the number of lines dropped since the last report, if there are any. While the host exceeds its own rate
    /// they remain counted for a later report.
    fn report_dropped(&self) {
        if self.0.dropped.load(Ordering::Relaxed) == 0 || self.0.notes.wait_until().is_some() {
            return;
        }
        let dropped = self.0.dropped.swap(0, Ordering::Relaxed);
        // Another instance may have reported them meanwhile.
        if dropped > 0 {
            let rate = self.0.limiter.bytes_per_second;
            self.log_host_message(&format!(
                "{dropped} lines were dropped: the function wrote more than {rate} bytes a second"
            ));
        }
    }

    /// Writes a message of the host, unless the host exceeds its own rate.
    pub(crate) fn log_host_message(&self, text: &str) {
        if self.0.notes.wait_until().is_some() {
            return;
        }
        self.0.notes.take(text.len() + LINE_BYTES);
        let mut sink = self.0.file.sink(Stream::Stderr);
        sink.write(b"mayfly: ");
        sink.write(text.as_bytes());
        sink.write(b"\n");
    }
}

/// A rate limit: the time until which the written bytes are accounted for, in nanoseconds after `start`.
struct RateLimiter {
    start: Instant,
    paid_until: AtomicU64,
    bytes_per_second: u64,
}

impl RateLimiter {
    fn new(bytes_per_second: u64) -> Self {
        Self {
            start: Instant::now(),
            paid_until: AtomicU64::new(0),
            bytes_per_second: bytes_per_second.max(1),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn take(&self, bytes: usize) {
        let cost = (bytes as u64).saturating_mul(1_000_000_000) / self.bytes_per_second;
        let now = self.now();
        let pay = |until: u64| Some(until.max(now).saturating_add(cost));
        self.paid_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).ok();
    }

    /// The time of the next permitted write, unless that is now.
    fn wait_until(&self) -> Option<Instant> {
        let ahead = self.paid_until.load(Ordering::Relaxed).saturating_sub(self.now());
        let ahead = Duration::from_nanos(ahead);
        (ahead > BURST).then(|| Instant::now() + (ahead - BURST))
    }
}

/// One output of one instance.
#[derive(Clone)]
pub(crate) struct GuestOutput(Arc<OutputInner>);

struct OutputInner {
    log: ProgramLog,
    stream: Stream,
    sink: OnceLock<Mutex<LogSink>>,
}

/// An instance that is not reused, or that is dropped within a call, ends its output here.
impl Drop for OutputInner {
    fn drop(&mut self) {
        // The sink ends its open line before the report.
        self.sink.take();
        self.log.report_dropped();
    }
}

impl GuestOutput {
    fn limiter(&self) -> &RateLimiter {
        &self.0.log.0.limiter
    }

    /// The time of the next permitted write, if the program has to wait for it.
    fn wait_until(&self) -> Option<Instant> {
        match self.0.log.0.overflow {
            OverflowPolicy::Wait => self.limiter().wait_until(),
            OverflowPolicy::Drop(_) => None,
        }
    }

    /// Ends the output of a request: another one may write here next.
    pub(crate) fn end_request(&self) {
        if let Some(sink) = self.0.sink.get() {
            sink.lock().end_line();
        }
        self.0.log.report_dropped();
    }

    fn append(&self, bytes: &[u8]) {
        let inner = &*self.0;
        let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
        if inner.log.drops(lines) {
            return;
        }
        let sink = || Mutex::new(inner.log.0.file.sink(inner.stream));
        inner.sink.get_or_init(sink).lock().write(bytes);
        if let Some(capture) = &inner.log.0.capture {
            capture.take(inner.stream, bytes);
        }
        self.limiter().take(bytes.len() + lines * LINE_BYTES);
    }
}

impl IsTerminal for GuestOutput {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for GuestOutput {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(AsyncOutput { output: self.clone(), waiting: None })
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

impl OutputStream for GuestOutput {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.append(&bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(if self.wait_until().is_some() { 0 } else { WRITE_BYTES_MAX })
    }
}

#[async_trait::async_trait]
impl Pollable for GuestOutput {
    async fn ready(&mut self) {
        while let Some(moment) = self.wait_until() {
            tokio::time::sleep_until(moment).await;
        }
    }
}

/// The output stream for components of 0.3.
struct AsyncOutput {
    output: GuestOutput,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl AsyncWrite for AsyncOutput {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.as_mut().poll(cx));
                self.waiting = None;
            }
            match self.output.wait_until() {
                Some(moment) => self.waiting = Some(Box::pin(tokio::time::sleep_until(moment))),
                None => break,
            }
        }
        let taken = bytes.len().min(WRITE_BYTES_MAX);
        self.output.append(&bytes[..taken]);
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(path: &std::path::Path, bytes_per_second: u64) -> (LogWriter, ProgramLog) {
        let writer = LogWriter::start().unwrap();
        let log = ProgramLog::capturing(&writer, path.to_owned(), bytes_per_second, None);
        (writer, log)
    }

    #[tokio::test(start_paused = true)]
    async fn a_talkative_guest_waits_for_its_rate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.log");
        let (_, log) = log(&path, 1000);
        let mut output = log.output(Stream::Stdout);
        assert_eq!(output.check_write().unwrap(), WRITE_BYTES_MAX);
        output.write(Bytes::from(vec![b'x'; 3000])).unwrap();
        assert_eq!(output.check_write().unwrap(), 0, "3 s of its rate are written, 1 s may be");
        let before = Instant::now();
        output.ready().await;
        assert!((1900..2100).contains(&before.elapsed().as_millis()), "{:?}", before.elapsed());
        assert_eq!(output.check_write().unwrap(), WRITE_BYTES_MAX);
    }
    #[tokio::test(start_paused = true)]
    async fn a_line_costs_more_than_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let (_, log) = log(&folder.path().join("f.log"), 1000);
        let mut output = log.output(Stream::Stdout);
        output.write(Bytes::from(vec![b'\n'; 10])).unwrap();
        assert_eq!(output.check_write().unwrap(), WRITE_BYTES_MAX);
        output.write(Bytes::from(vec![b'\n'; 10])).unwrap();
        assert_eq!(output.check_write().unwrap(), 0, "20 bytes, and 20 lines");
    }

    #[tokio::test(start_paused = true)]
    async fn a_talkative_function_loses_lines_and_its_log_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.log");
        let (writer, dropped) = (LogWriter::start().unwrap(), Counter::default());
        let log = ProgramLog::new(&writer, path.clone(), 1000, &dropped);
        let mut output = log.output(Stream::Stdout);
        for _ in 0..100 {
            assert_eq!(output.check_write().unwrap(), WRITE_BYTES_MAX, "it never waits");
            output.write(Bytes::from_static(b"a line\n")).unwrap();
        }
        // 71 bytes each: 15 until the rate of a second is exceeded.
        assert_eq!(dropped.get(), 85);
        tokio::time::advance(Duration::from_secs(5)).await;
        output.write(Bytes::from_static(b"the last line\n")).unwrap();
        writer.flush();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 17, "{text}");
        assert!(
            lines[15].contains("85 lines were dropped") && lines[16].ends_with("the last line"),
            "{text}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_lines_are_reported_at_the_end_of_a_call() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.log");
        let (writer, dropped) = (LogWriter::start().unwrap(), Counter::default());
        let log = ProgramLog::new(&writer, path.clone(), 1000, &dropped);
        let reports = || {
            writer.flush();
            std::fs::read_to_string(&path).unwrap().matches("lines were dropped").count()
        };
        let too_much = |output: &mut GuestOutput| {
            (0..100).for_each(|_| output.write(Bytes::from_static(b"a line\n")).unwrap());
        };
        // A reused instance.
        let mut reused = log.output(Stream::Stdout);
        too_much(&mut reused);
        assert_eq!(reports(), 0);
        reused.end_request();
        assert_eq!(reports(), 1);
        reused.end_request();
        assert_eq!(reports(), 1, "each line is reported once");
        // An instance that ends with its call; a line that it has not ended does not mix with the report.
        tokio::time::advance(Duration::from_secs(10)).await;
        let mut fresh = log.output(Stream::Stderr);
        fresh.write(Bytes::from_static(b"open")).unwrap();
        too_much(&mut fresh);
        drop((reused, fresh));
        assert_eq!(reports(), 2);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().last().unwrap().contains("mayfly: "), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn notes_are_paced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.log");
        let (writer, log) = log(&path, 1000);
        let noted = |count: usize| {
            (0..count).for_each(|_| log.log_host_message(&"x".repeat(960)));
            writer.flush();
            std::fs::read_to_string(&path).unwrap().lines().count()
        };
        assert_eq!(noted(1000), 65, "64 KiB, and the one that goes beyond");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(noted(1), 66);
    }
}
