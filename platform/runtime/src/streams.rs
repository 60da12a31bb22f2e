//! Streams into a running container: exec, attach, port-forward. An optional capability of a [`Runtime`].
//!
//! [`Runtime`]: crate::Runtime

use std::pin::Pin;

use async_trait::async_trait;
use futures::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};

use crate::pod::{ContainerId, PodUid, RuntimeError};

/// The output of a process.
pub type OutputStream = Pin<Box<dyn AsyncRead + Send>>;
/// The input of a process. Shutting it down signals end of file.
pub type InputStream = Pin<Box<dyn AsyncWrite + Send>>;

/// A connection to a port of a pod.
pub trait PortStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> PortStream for T {}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub width: u16,
    pub height: u16,
}

/// The streams of a process that a client requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    /// Whether the process has a terminal; stdout then carries both outputs.
    pub tty: bool,
}

/// The streams of a process, while it runs. Dropping the session leaves an attached container running and kills
/// the process of an exec.
pub struct ProcessSession {
    pub stdin: Option<InputStream>,
    pub stdout: Option<OutputStream>,
    pub stderr: Option<OutputStream>,
    /// Accepts new sizes of the terminal; `None` without a terminal.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The exit code, as in a shell. For an attached container, it resolves when the container has ended.
    pub exit: BoxFuture<'static, Result<i32, RuntimeError>>,
}

impl std::fmt::Debug for ProcessSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessSession").finish_non_exhaustive()
    }
}

/// The streams of a runtime's containers.
#[async_trait]
pub trait ContainerStreams: Send + Sync {
    /// Starts another process in a running container.
    async fn exec(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        options: StreamOptions,
    ) -> Result<ProcessSession, RuntimeError>;

    /// Attaches to the streams of the container's own process.
    async fn attach(&self, id: &ContainerId, options: StreamOptions) -> Result<ProcessSession, RuntimeError>;

    /// Connects to a TCP port on the pod's loopback address.
    async fn connect_port(&self, uid: &PodUid, port: u16) -> Result<Box<dyn PortStream>, RuntimeError>;
}
