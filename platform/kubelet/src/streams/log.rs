//! A container's log as messages of a WebSocket.
//!
//! ```text
//! ""  (the stream has begun)  lines…  close (1000)
//! ```
//! The messages are binary, or with the protocol `base64.binary.k8s.io` texts in base64. The client's messages are
//! ignored. (Behaviour: upstream `wsstream.Reader`.)

use axum::{extract::Request, response::Response};
use base64::Engine as _;
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use mayfly_runtime::logs::LogStream;
use tokio_tungstenite::tungstenite::Message;

use super::{
    HttpRefusal, PodStreams, channels,
    upgrade::{Protocols, Upgraded, WebSocket, upgrade},
};

const BASE64: &str = "base64.binary.k8s.io";
const PROTOCOLS: Protocols = Protocols { websocket: &["binary.k8s.io", BASE64, ""], spdy: &[] };

/// Switches to a WebSocket, and sends the log until it ends or the client disconnects.
pub(crate) fn respond(
    streams: &PodStreams,
    request: Request,
    lines: LogStream,
) -> Result<Response, HttpRefusal> {
    let permit = streams.permit()?;
    upgrade(request, &PROTOCOLS, move |connection| async move {
        let _permit = permit;
        if let Upgraded::WebSocket(socket, protocol) = connection {
            send(*socket, protocol, lines).await;
        }
    })
}

async fn send(socket: WebSocket, protocol: &str, mut lines: LogStream) {
    let message = |bytes: Bytes| match protocol {
        BASE64 => Message::text(base64::engine::general_purpose::STANDARD.encode(bytes)),
        _ => Message::Binary(bytes),
    };
    let (mut sink, mut source) = socket.split();
    let output = async {
        sink.send(message(Bytes::new())).await?;
        while let Some(line) = lines.next().await {
            let Ok(line) = line else { break };
            sink.send(message(line)).await?;
        }
        sink.send(channels::end()).await
    };
    let input = async { while source.next().await.is_some_and(|received| received.is_ok()) {} };
    tokio::select! {
        // A client that disconnects is no failure.
        _ = output => {}
        () = input => {}
    }
}
