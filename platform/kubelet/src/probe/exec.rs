//! Runs a command in a container and collects its output, for probes and lifecycle hooks.

use std::time::Duration;

use mayfly_runtime::{ContainerId, Runtime, StreamOptions, streams::OutputStream};
use tokio::io::AsyncReadExt as _;

/// Bytes of output that are kept (upstream's `maxReadLength`); the rest is read and dropped, so that the command does
/// not block on a full pipe.
const OUTPUT_BYTES_MAX: usize = 10 << 10;
/// The time for which outputs are read after the command's end: a background process of the command may keep them open.
const DRAIN: Duration = Duration::from_millis(500);

/// The result of a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommandOutput {
    pub(crate) exit_code: i32,
    /// Both outputs, standard output first.
    pub(crate) text: String,
}

/// Runs a command to its end. Dropping the future kills it.
///
/// # Errors
/// A message: the runtime has no commands, or the container does not run.
pub(crate) async fn output(
    runtime: &dyn Runtime,
    id: &ContainerId,
    command: Vec<String>,
) -> Result<CommandOutput, String> {
    let Some(streams) = runtime.streams() else {
        return Err(format!("pods of runtime class {:?} run no commands", runtime.class()));
    };
    let options = StreamOptions { stdin: false, stdout: true, stderr: true, tty: false };
    let session = streams.exec(id, command, options).await.map_err(|error| error.to_string())?;
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let read = async {
        tokio::join!(collect(session.stdout, &mut out), collect(session.stderr, &mut err));
    };
    let mut read = Box::pin(read);
    let mut exit = session.exit;
    let exit_code = tokio::select! {
        biased;
        code = &mut exit => {
            // Later output is ignored: the exit code is the result.
            let _ = tokio::time::timeout(DRAIN, &mut read).await;
            code
        }
        () = &mut read => exit.await,
    };
    drop(read);
    let exit_code = exit_code.map_err(|error| error.to_string())?;
    out.extend_from_slice(&err);
    out.truncate(OUTPUT_BYTES_MAX);
    Ok(CommandOutput { exit_code, text: String::from_utf8_lossy(&out).into_owned() })
}

async fn collect(stream: Option<OutputStream>, into: &mut Vec<u8>) {
    let Some(mut stream) = stream else { return };
    // A read error ends the output like its end does.
    let _ = (&mut stream).take(OUTPUT_BYTES_MAX as u64).read_to_end(into).await;
    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
}
