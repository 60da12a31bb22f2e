//! Exec, attach and port-forward.
//!
//! An exec's streams are FIFOs that containerd's shim opens. They are opened here before the process starts, so that no
//! data is lost, and read after the start, when the shim has opened them, too.

use std::{
    fs, io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use containerd_client::services::v1::{
    DeleteProcessRequest, ExecProcessRequest, KillRequest, ResizePtyRequest, StartRequest, WaitRequest,
};
use mayfly_runtime::{
    ContainerId, ContainerState, ContainerStreams, PodUid, ProcessSession, RuntimeError, StreamOptions,
    TerminalSize,
    streams::{OutputStream, PortStream},
};
use nix::sys::stat::Mode;
use prost_types::Any;
use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{UnixStream, unix::pipe},
    sync::mpsc,
    task::spawn_blocking,
    time::timeout,
};

use crate::{
    client::{Containerd, failed, request},
    host::{OciHost, OciRuntime},
    layout::task_id,
    namespaces,
};

const PROCESS_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";
const SIGKILL: u32 = 9;
/// The number of terminal sizes queued for containerd.
const RESIZES_MAX: usize = 8;
/// The timeout for the log shim's greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// The size of the buffer between the log shim and an attached client, in bytes.
const ATTACH_BUFFER_BYTES: usize = 64 << 10;
/// The maximum size of a frame of the log shim, in bytes: one read of a pipe.
const FRAME_BYTES_MAX: usize = 64 << 10;

#[async_trait]
impl ContainerStreams for OciRuntime {
    async fn exec(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        options: StreamOptions,
    ) -> Result<ProcessSession, RuntimeError> {
        self.inner.running(id)?;
        Exec::start(&self.inner, id, command, options).await
    }

    async fn attach(&self, id: &ContainerId, options: StreamOptions) -> Result<ProcessSession, RuntimeError> {
        self.inner.running(id)?;
        attach(&self.inner, id, options).await
    }

    async fn connect_port(&self, uid: &PodUid, port: u16) -> Result<Box<dyn PortStream>, RuntimeError> {
        let netns = self.inner.sandbox(uid)?.netns(&self.inner.layout);
        let connect = move || {
            let stream = namespaces::connect(netns.as_deref(), port)?;
            stream.set_nonblocking(true)?;
            Ok::<_, io::Error>(stream)
        };
        let connected =
            spawn_blocking(connect).await.map_err(|error| RuntimeError::Internal(error.to_string()))?;
        let stream = connected.and_then(tokio::net::TcpStream::from_std).map_err(|error| {
            RuntimeError::Internal(format!("failed to connect to localhost:{port} inside the pod: {error}"))
        })?;
        Ok(Box::new(stream))
    }
}

impl OciHost {
    fn running(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        match self.state(id) {
            Some(ContainerState::Running { .. }) => Ok(()),
            _ => Err(RuntimeError::Invalid(format!("container {:?} is not running", id.name))),
        }
    }
}

/// The FIFOs of one session; removed on drop.
struct Fifos {
    folder: tempfile::TempDir,
}

impl Fifos {
    fn create(parent: &Path, options: StreamOptions) -> io::Result<Self> {
        fs::create_dir_all(parent)?;
        let fifos = Self { folder: tempfile::Builder::new().prefix("x").tempdir_in(parent)? };
        let wanted = [
            ("stdin", options.stdin),
            ("stdout", options.stdout),
            ("stderr", options.stderr && !options.tty),
        ];
        for (name, _) in wanted.iter().filter(|(_, wanted)| *wanted) {
            nix::unistd::mkfifo(&fifos.path(name), Mode::S_IRUSR | Mode::S_IWUSR)?;
        }
        Ok(fifos)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The path as containerd expects it; empty for an unused stream.
    fn text(&self, name: &str) -> String {
        let path = self.path(name);
        if path.exists() { path.to_string_lossy().into_owned() } else { String::new() }
    }

    fn receiver(&self, name: &str) -> io::Result<Option<pipe::Receiver>> {
        let path = self.path(name);
        path.exists().then(|| pipe::OpenOptions::new().open_receiver(path)).transpose()
    }

    /// Opened for both directions: a FIFO without a reader cannot be opened for writing only.
    fn sender(&self, name: &str) -> io::Result<Option<pipe::Sender>> {
        let path = self.path(name);
        path.exists().then(|| pipe::OpenOptions::new().read_write(true).open_sender(path)).transpose()
    }
}

/// A process in a container, killed with its session.
struct Exec {
    inner: Arc<OciHost>,
    client: Containerd,
    container: ContainerId,
    id: String,
    is_over: bool,
    _fifos: Fifos,
}

impl Exec {
    async fn start(
        inner: &Arc<OciHost>,
        container: &ContainerId,
        command: Vec<String>,
        options: StreamOptions,
    ) -> Result<ProcessSession, RuntimeError> {
        let client = inner.client().await?;
        let parent = inner.layout.exec();
        let fifos = inner.blocking(move || Fifos::create(&parent, options)).await?;
        let id = fifos
            .folder
            .path()
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let no_fifo = |error: io::Error| RuntimeError::Internal(format!("cannot open a FIFO: {error}"));
        let stdin = fifos.sender("stdin").map_err(no_fifo)?;
        let stdout = fifos.receiver("stdout").map_err(no_fifo)?;
        let stderr = fifos.receiver("stderr").map_err(no_fifo)?;
        let value = process(&client, container, command, options.tty).await?;
        let message = ExecProcessRequest {
            container_id: task_id(container),
            exec_id: id.clone(),
            stdin: fifos.text("stdin"),
            stdout: fifos.text("stdout"),
            stderr: fifos.text("stderr"),
            terminal: options.tty,
            spec: Some(Any { type_url: PROCESS_TYPE.into(), value }),
        };
        client.tasks().exec(request(message)).await.map_err(failed("cannot exec in container"))?;
        let mut exec = Self {
            inner: inner.clone(),
            client: client.clone(),
            container: container.clone(),
            id,
            is_over: false,
            _fifos: fifos,
        };
        let start = StartRequest { container_id: task_id(container), exec_id: exec.id.clone() };
        if let Err(status) = client.tasks().start(request(start)).await {
            exec.delete().await;
            return Err(RuntimeError::Invalid(format!("cannot exec in container: {}", status.message())));
        }
        let resize = options.tty.then(|| resizer(client.clone(), container, &exec.id));
        let stdin = stdin.map(|fifo| {
            let input = ClosingInput {
                fifo: Some(fifo),
                close: Some(Close {
                    inner: inner.clone(),
                    client,
                    container: container.clone(),
                    id: exec.id.clone(),
                }),
            };
            Box::pin(input) as Pin<Box<dyn AsyncWrite + Send>>
        });
        let boxed = |fifo: Option<pipe::Receiver>| fifo.map(|fifo| Box::pin(fifo) as OutputStream);
        let (stdout, stderr) = (boxed(stdout), boxed(stderr));
        Ok(ProcessSession { stdin, stdout, stderr, resize, exit: Box::pin(exec.exit()) })
    }

    async fn exit(mut self) -> Result<i32, RuntimeError> {
        let message = WaitRequest { container_id: task_id(&self.container), exec_id: self.id.clone() };
        let waited = self.client.tasks().wait(request(message)).await;
        let answer = waited.map_err(failed("wait for a process"))?.into_inner();
        self.delete().await;
        Ok(i32::try_from(answer.exit_status).unwrap_or(137))
    }

    async fn delete(&mut self) {
        self.is_over = true;
        let message =
            DeleteProcessRequest { container_id: task_id(&self.container), exec_id: self.id.clone() };
        if let Err(error) = self.client.tasks().delete_process(request(message)).await {
            tracing::debug!(container = %self.container, %error, "cannot remove an exec's process");
        }
    }
}

/// Dropping the session kills its process.
impl Drop for Exec {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (client, container, id) = (self.client.clone(), self.container.clone(), self.id.clone());
        let inner = self.inner.clone();
        tokio::spawn(async move {
            let container_id = task_id(&container);
            let kill = KillRequest {
                container_id: container_id.clone(),
                exec_id: id.clone(),
                signal: SIGKILL,
                all: false,
            };
            let _ = client.tasks().kill(request(kill)).await;
            let wait = WaitRequest { container_id: container_id.clone(), exec_id: id.clone() };
            let _ = client.tasks().wait(request(wait)).await;
            let _ = client
                .tasks()
                .delete_process(request(DeleteProcessRequest { container_id, exec_id: id }))
                .await;
            drop(inner);
        });
    }
}

/// The process of the container's specification, with another command.
async fn process(
    client: &Containerd,
    id: &ContainerId,
    command: Vec<String>,
    tty: bool,
) -> Result<Vec<u8>, RuntimeError> {
    let message = containerd_client::services::v1::GetContainerRequest { id: task_id(id) };
    let found = client.containers().get(request(message)).await.map_err(failed("look up a container"))?;
    let spec = found.into_inner().container.and_then(|container| container.spec).unwrap_or_default();
    let mut spec: serde_json::Value = serde_json::from_slice(&spec.value).map_err(|error| {
        RuntimeError::Internal(format!("a container's specification is damaged: {error}"))
    })?;
    let mut process = spec["process"].take();
    process["args"] = command.into();
    process["terminal"] = tty.into();
    if tty
        && let Some(env) = process["env"].as_array_mut()
        && !env.iter().any(|line| line.as_str().is_some_and(|line| line.starts_with("TERM=")))
    {
        env.push("TERM=xterm".into());
    }
    serde_json::to_vec(&process).map_err(|error| RuntimeError::Internal(error.to_string()))
}

/// Forwards terminal sizes to a process; an empty `exec` is the container's own process.
fn resizer(client: Containerd, container: &ContainerId, exec: &str) -> mpsc::Sender<TerminalSize> {
    let (sender, mut sizes) = mpsc::channel::<TerminalSize>(RESIZES_MAX);
    let (container_id, exec_id) = (task_id(container), exec.to_owned());
    tokio::spawn(async move {
        while let Some(size) = sizes.recv().await {
            let message = ResizePtyRequest {
                container_id: container_id.clone(),
                exec_id: exec_id.clone(),
                width: size.width.into(),
                height: size.height.into(),
            };
            // A process that has ended has no terminal.
            let _ = client.tasks().resize_pty(request(message)).await;
        }
    });
    sender
}

/// Closes the input of a process in containerd, whose shim also holds the FIFO open.
struct Close {
    inner: Arc<OciHost>,
    client: Containerd,
    container: ContainerId,
    id: String,
}

impl Close {
    fn spawn(self) {
        tokio::spawn(async move {
            self.inner.close_input(&self.client, &self.container, &self.id).await;
        });
    }
}

/// The input of a process; forwards its end on shutdown and on drop.
struct ClosingInput {
    fifo: Option<pipe::Sender>,
    close: Option<Close>,
}

impl ClosingInput {
    fn end(&mut self) {
        self.fifo = None;
        if let Some(close) = self.close.take() {
            close.spawn();
        }
    }
}

impl Drop for ClosingInput {
    fn drop(&mut self) {
        self.end();
    }
}

impl AsyncWrite for ClosingInput {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.fifo {
            Some(fifo) => Pin::new(fifo).poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end();
        Poll::Ready(Ok(()))
    }
}

async fn attach(
    inner: &Arc<OciHost>,
    id: &ContainerId,
    options: StreamOptions,
) -> Result<ProcessSession, RuntimeError> {
    let client = inner.client().await?;
    let record = inner.containers.lock().get(id).map(|container| container.record.clone());
    let record = record.ok_or_else(|| RuntimeError::NoSandbox(id.pod.clone()))?;
    let socket = inner.layout.attach_socket(id);
    let mut stream = UnixStream::connect(&socket).await.map_err(|error| {
        RuntimeError::Internal(format!("cannot attach to container {:?}: {error}", id.name))
    })?;
    // Input to which the process responds at once must not reach it before this client receives outputs. The log shim
    // of an earlier version sends no greeting.
    let first = match timeout(GREETING_TIMEOUT, frame_header(&mut stream)).await {
        Ok(header) => Some(header.map_err(|error| {
            RuntimeError::Internal(format!("cannot attach to container {:?}: {error}", id.name))
        })?),
        Err(_) => None,
    };
    let stdin = if options.stdin && record.stdin {
        let fifo = inner.layout.container(id).join("stdin");
        let sender = pipe::OpenOptions::new().read_write(true).open_sender(fifo);
        let sender = sender.map_err(|error| {
            RuntimeError::Internal(format!("cannot open the input of a container: {error}"))
        })?;
        let close = record.stdin_once.then(|| Close {
            inner: inner.clone(),
            client: client.clone(),
            container: id.clone(),
            id: String::new(),
        });
        Some(Box::pin(ClosingInput { fifo: Some(sender), close }) as Pin<Box<dyn AsyncWrite + Send>>)
    } else {
        None
    };
    let (out_writer, stdout) = tokio::io::duplex(ATTACH_BUFFER_BYTES);
    let (err_writer, stderr) = tokio::io::duplex(ATTACH_BUFFER_BYTES);
    let wanted = [options.stdout, options.stderr && !record.tty];
    tokio::spawn(async move {
        let _ = split(stream, first, [out_writer, err_writer], wanted).await;
    });
    let resize = record.tty.then(|| resizer(client, id, ""));
    let exit = exit_of(inner.clone(), id.clone());
    Ok(ProcessSession {
        stdin,
        stdout: wanted[0].then(|| Box::pin(stdout) as OutputStream),
        stderr: wanted[1].then(|| Box::pin(stderr) as OutputStream),
        resize,
        exit: Box::pin(exit),
    })
}

/// Reads the header of a frame of the log shim: the stream and the length in bytes.
async fn frame_header(stream: &mut UnixStream) -> io::Result<(u8, u32)> {
    Ok((stream.read_u8().await?, stream.read_u32().await?))
}

/// Demultiplexes the log shim's frames until it ends. `first` is the header of the first frame, if already read.
async fn split(
    mut stream: UnixStream,
    mut first: Option<(u8, u32)>,
    mut outputs: [tokio::io::DuplexStream; 2],
    wanted: [bool; 2],
) -> io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let (number, length) = match first.take() {
            Some(header) => header,
            None => frame_header(&mut stream).await?,
        };
        let length = usize::try_from(length).map_err(io::Error::other)?;
        if length > FRAME_BYTES_MAX {
            return Err(io::Error::other("a frame is too long"));
        }
        bytes.resize(length, 0);
        stream.read_exact(&mut bytes).await?;
        let at = usize::from(number == 2);
        if wanted[at] {
            outputs[at].write_all(&bytes).await?;
        }
    }
}

/// The exit code of a container; waits for its end.
async fn exit_of(inner: Arc<OciHost>, id: ContainerId) -> Result<i32, RuntimeError> {
    let mut changes = inner.changes();
    loop {
        match inner.state(&id) {
            Some(ContainerState::Running { .. } | ContainerState::Waiting { .. }) => {}
            Some(ContainerState::Exited { exit_code, .. }) => return Ok(exit_code),
            None => return Err(RuntimeError::NoSandbox(id.pod)),
        }
        if changes.changed().await.is_err() {
            return Err(RuntimeError::Internal("the runtime has ended".into()));
        }
    }
}
