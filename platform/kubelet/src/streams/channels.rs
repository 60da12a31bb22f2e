//! Exec and attach: a process's streams as channels of one WebSocket (`v4.channel.k8s.io`, `v5.channel.k8s.io`).
//!
//! Each message begins with its channel: 0 stdin, 1 stdout, 2 stderr, 3 the outcome as a `Status`, 4 sizes of the
//! terminal as JSON, and from version 5 on 255, which closes the channel that its second byte names.

use std::{pin::pin, time::Duration};

use futures::{SinkExt as _, StreamExt as _, stream::SplitStream};
use mayfly_runtime::{ProcessSession, RuntimeError, TerminalSize, streams::OutputStream};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
};
use tokio_tungstenite::tungstenite::{
    Bytes, Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::upgrade::WebSocket;

/// In the order of preference.
pub(super) const PROTOCOLS: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;
/// The size of one message of output, in bytes.
const CHUNK_BYTES: usize = 32 << 10;
/// Messages queued for a slow client; beyond these, the process blocks.
const MESSAGES_MAX: usize = 16;
/// The time in which a client has to close the connection after the end of its session.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A terminal size in the client's JSON form.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Size {
    pub(super) width: u16,
    pub(super) height: u16,
}

/// The last message of a session. Clients treat a close frame without the normal code as a broken connection, and
/// then drop the exit code before it.
pub(super) fn end() -> Message {
    Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: Default::default() }))
}

/// Runs a session until the process ends or the client disconnects.
pub(super) async fn run(socket: WebSocket, protocol: &str, opened: Result<ProcessSession, RuntimeError>) {
    let (mut sink, source) = socket.split();
    let session = match opened {
        Ok(session) => session,
        Err(error) => {
            let _ = sink.send(message(ERROR, failure(&error).to_string().as_bytes())).await;
            let _ = sink.send(end()).await;
            return;
        }
    };
    let (sender, mut messages) = mpsc::channel::<Message>(MESSAGES_MAX);
    let ProcessSession { stdin, stdout, stderr, resize, exit } = session;
    let write = async {
        while let Some(message) = messages.recv().await {
            sink.send(message).await?;
        }
        sink.send(end()).await
    };
    let output = async move {
        tokio::join!(pump(stdout, STDOUT, &sender), pump(stderr, STDERR, &sender));
        let status = match exit.await {
            Ok(code) => outcome(code),
            Err(error) => failure(&error),
        };
        let _ = sender.send(message(ERROR, status.to_string().as_bytes())).await;
    };
    let mut input = pin!(input(source, protocol, stdin, resize));
    tokio::select! {
        // The client disconnected.
        () = &mut input => return,
        _ = async { tokio::join!(output, write) } => {}
    }
    // Closing a connection with unread data resets it, and the client may lose what was sent last. The client closes
    // the connection in response to the close frame.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, input).await;
}

/// Copies an output to its channel until it ends.
async fn pump(stream: Option<OutputStream>, channel: u8, messages: &mpsc::Sender<Message>) {
    let Some(mut stream) = stream else { return };
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(read) = stream.read(&mut buffer).await {
        if read == 0 || messages.send(message(channel, &buffer[..read])).await.is_err() {
            return;
        }
    }
}

/// Reads the client's messages until it disconnects.
async fn input(
    mut source: SplitStream<WebSocket>,
    protocol: &str,
    mut stdin: Option<mayfly_runtime::streams::InputStream>,
    resize: Option<mpsc::Sender<TerminalSize>>,
) {
    let can_close = protocol == PROTOCOLS[0];
    while let Some(Ok(received)) = source.next().await {
        let bytes = match received {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text.as_str().to_owned()),
            Message::Close(_) => return,
            _ => continue,
        };
        let Some((channel, bytes)) = bytes.split_first() else { continue };
        match *channel {
            STDIN => {
                if let Some(input) = &mut stdin
                    && input.write_all(bytes).await.is_err()
                {
                    // The process reads no more; the end of its outputs ends the session.
                    stdin = None;
                }
            }
            RESIZE => {
                if let (Some(resize), Ok(size)) = (&resize, serde_json::from_slice::<Size>(bytes)) {
                    // A dropped size is superseded by a newer one.
                    let _ = resize.try_send(TerminalSize { width: size.width, height: size.height });
                }
            }
            CLOSE if can_close && bytes.first() == Some(&STDIN) => {
                if let Some(mut input) = stdin.take() {
                    let _ = input.shutdown().await;
                }
            }
            _ => {}
        }
    }
}

fn message(channel: u8, bytes: &[u8]) -> Message {
    let mut content = Vec::with_capacity(1 + bytes.len());
    content.push(channel);
    content.extend_from_slice(bytes);
    Message::Binary(content.into())
}

/// The exit of the process as upstream's `Status` (`k8s.io/apimachinery/pkg/util/remotecommand`).
pub(super) fn outcome(exit_code: i32) -> Value {
    if exit_code == 0 {
        return json!({"metadata": {}, "status": "Success"});
    }
    json!({
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": format!("command terminated with non-zero exit code: exit status {exit_code}"),
        "details": {"causes": [{"reason": "ExitCode", "message": exit_code.to_string()}]},
    })
}

/// The `Status` of a process that could not be run.
pub(super) fn failure(error: &RuntimeError) -> Value {
    json!({"metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500, "message": error.to_string()})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_is_upstreams_status() {
        assert_eq!(outcome(0)["status"], "Success");
        let failed = outcome(3);
        assert_eq!(failed["reason"], "NonZeroExitCode");
        assert_eq!(failed["details"]["causes"][0], json!({"reason": "ExitCode", "message": "3"}));
    }

    #[test]
    fn a_message_begins_with_its_channel() {
        assert_eq!(message(STDOUT, b"a"), Message::Binary(Bytes::from_static(b"\x01a")));
    }
}
