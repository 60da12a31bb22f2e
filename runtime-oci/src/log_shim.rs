//! The program that writes a container's log (`mayfly log-shim`): containerd's shim starts one per container and
//! gives it both outputs as file descriptors 3 and 4 (containerd's `binary://` log URI). It is a process of its
//! own, so that no line is lost when Mayfly or containerd end.
//!
//! containerd's shim connects no standard input if the outputs go to such a program (`NewBinaryIO` of its package
//! `process`). A container with an input and without a terminal therefore has named pipes for its outputs, and Mayfly
//! starts the program that reads them ([`start_with_pipes`]).
//!
//! In addition to the log, it stores the end of each output for jobs, and sends the live output to attached clients:
//! over a Unix socket, as frames of `stream (1 byte), length (4 bytes, big endian), bytes`. The first frame is empty;
//! from then on the client receives all output.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use mayfly_api::job_io::RESULT_BYTES_MAX;
use mayfly_runtime::logs::{LogAppender, Stream};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;

/// The configuration of the program, as JSON in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogShimConfig {
    /// The log file.
    pub log: PathBuf,
    /// The socket for attaching clients.
    pub socket: PathBuf,
    /// The folder for the end of each output.
    pub capture: Option<PathBuf>,
    /// The named pipes of both outputs; `None`: they are the file descriptors 3 and 4.
    #[serde(default)]
    pub pipes: Option<[PathBuf; 2]>,
}

/// The size of one read from a pipe, whose capacity is 64 KiB.
const READ_BYTES: usize = 64 << 10;
/// The number of chunks queued for one attached client; a client that does not read loses the rest.
const CLIENT_CHUNKS_MAX: usize = 256;
/// An empty frame of stdout.
const GREETING: [u8; 5] = [1, 0, 0, 0, 0];
/// The maximum number of clients attached to one container.
const CLIENTS_MAX: usize = 16;
/// The timeout for the container's task to open its named pipes.
const PIPES_TIMEOUT: Duration = Duration::from_secs(120);
/// The pause before a failed write of the log is repeated.
const DISK_RETRY: Duration = Duration::from_millis(200);

type AttachedClients = Arc<Mutex<Vec<SyncSender<Arc<[u8]>>>>>;

/// Runs until both outputs have ended.
///
/// # Errors
/// The configuration, the log file or the outputs cannot be opened.
pub fn run(config: &Path) -> io::Result<()> {
    // containerd's shim sends SIGTERM once the outputs have ended; the buffered rest is written first.
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::default())?;
    let config: LogShimConfig = serde_json::from_slice(&fs::read(config)?)?;
    let log = Arc::new(Mutex::new(LogAppender::open(&config.log)?));
    let clients = AttachedClients::default();
    serve(&config.socket, clients.clone());
    let is_started_by_containerd = config.pipes.is_none();
    // The descriptors are inherited; opening their path opens the same pipe again.
    let paths =
        config.pipes.unwrap_or_else(|| [3, 4].map(|descriptor| format!("/proc/self/fd/{descriptor}").into()));
    let unopened = Arc::new(AtomicUsize::new(paths.len()));
    let mut copies = Vec::new();
    for (path, stream) in paths.into_iter().zip([Stream::Stdout, Stream::Stderr]) {
        let (log, clients, unopened) = (log.clone(), clients.clone(), unopened.clone());
        let capture = config.capture.as_ref().map(|folder| folder.join(stream.name()));
        copies.push(thread::spawn(move || {
            // Blocks until the other end of a named pipe is open.
            let pipe = File::open(path);
            unopened.fetch_sub(1, Ordering::SeqCst);
            if let Ok(pipe) = pipe {
                copy(pipe, stream, &log, &clients, capture.as_deref());
            }
        }));
    }
    if is_started_by_containerd {
        // containerd waits for a byte on this descriptor before it starts the container.
        OpenOptions::new().write(true).open("/proc/self/fd/5")?.write_all(&[0])?;
    } else {
        io::stdout().write_all(&[0])?;
        io::stdout().flush()?;
        thread::spawn(move || {
            thread::sleep(PIPES_TIMEOUT);
            if unopened.load(Ordering::SeqCst) > 0 {
                // The container was never started, and Mayfly ended before it could kill this program.
                std::process::exit(1);
            }
        });
    }
    for copy in copies {
        // A panic in the thread of one output must not lose lines of the other.
        let _ = copy.join();
    }
    let _ = fs::remove_file(&config.socket);
    Ok(())
}

/// Starts the program for a container whose outputs are named pipes, and waits until it accepts clients.
///
/// # Errors
/// The program cannot be started, or ended during its start.
pub(crate) async fn start_with_pipes(program: &Path, config: &Path) -> io::Result<tokio::process::Child> {
    let mut command = tokio::process::Command::new(program);
    command.arg("log-shim").arg(config);
    // In a process group of its own: it must not receive signals for Mayfly's group, such as Ctrl-C.
    command.env_clear().process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    if let Some(mut ready) = child.stdout.take() {
        ready.read_exact(&mut [0]).await?;
    }
    Ok(child)
}

/// Copies one output to the log, the clients and the capture until it ends.
fn copy(
    mut pipe: File,
    stream: Stream,
    log: &Mutex<LogAppender>,
    clients: &AttachedClients,
    capture: Option<&Path>,
) {
    let mut buffer = vec![0; READ_BYTES];
    let mut tail = OutputTail::default();
    loop {
        let read = match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let bytes = &buffer[..read];
        if capture.is_some() {
            tail.push(bytes);
        }
        broadcast(clients, stream, bytes);
        let now = jiff::Timestamp::now();
        // The container blocks while its log cannot be written.
        let mut result = locked(log).write(stream, bytes, now);
        while result.is_err() {
            thread::sleep(DISK_RETRY);
            result = locked(log).write(stream, &[], now);
        }
    }
    let _ = locked(log).end(stream, jiff::Timestamp::now());
    broadcast(clients, stream, &[]);
    if let Some(path) = capture {
        let _ = tail.save(path);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last bytes of an output.
#[derive(Default)]
struct OutputTail {
    bytes: VecDeque<u8>,
    is_truncated: bool,
}

impl OutputTail {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let over = self.bytes.len().saturating_sub(RESULT_BYTES_MAX);
        if over > 0 {
            self.bytes.drain(..over);
            self.is_truncated = true;
        }
    }

    fn save(&mut self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, self.bytes.make_contiguous())?;
        if self.is_truncated {
            let mut name = path.as_os_str().to_owned();
            name.push(".truncated");
            fs::write(name, "")?;
        }
        Ok(())
    }
}

/// Sends a chunk to all clients; an empty chunk marks the end of the output.
fn broadcast(clients: &AttachedClients, stream: Stream, bytes: &[u8]) {
    let mut clients = locked(clients);
    if clients.is_empty() {
        return;
    }
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let number = u8::from(stream == Stream::Stderr) + 1;
    let frame: Arc<[u8]> = [&[number][..], &length.to_be_bytes(), bytes].concat().into();
    clients.retain(|client| !matches!(client.try_send(frame.clone()), Err(TrySendError::Disconnected(_))));
}

/// Accepts clients in the background, each in its own thread. A container whose socket cannot be created runs, but does
/// not support attach.
fn serve(socket: &Path, clients: AttachedClients) {
    let _ = fs::remove_file(socket);
    let bound = socket.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| UnixListener::bind(socket));
    let Ok(listener) = bound else { return };
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (sender, chunks) = sync_channel::<Arc<[u8]>>(CLIENT_CHUNKS_MAX);
            // Cannot fail: the channel is empty.
            let _ = sender.try_send(Arc::from(GREETING));
            {
                let mut clients = locked(&clients);
                if clients.len() >= CLIENTS_MAX {
                    continue;
                }
                clients.push(sender);
            }
            thread::spawn(move || write_to(client, &chunks));
        }
    });
}

fn write_to(mut client: UnixStream, chunks: &std::sync::mpsc::Receiver<Arc<[u8]>>) {
    while let Ok(chunk) = chunks.recv() {
        if client.write_all(&chunk).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_keeps_the_end_and_reports_truncation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("capture/stdout");
        let mut tail = OutputTail::default();
        tail.push(b"beginning");
        tail.save(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"beginning");
        assert!(!folder.path().join("capture/stdout.truncated").exists());
        tail.push(&vec![b'x'; RESULT_BYTES_MAX]);
        tail.save(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), vec![b'x'; RESULT_BYTES_MAX]);
        assert!(folder.path().join("capture/stdout.truncated").exists());
    }
}
