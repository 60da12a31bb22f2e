//! A connection that speaks only SPDY: its frames as bytes, in both directions.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::Stream;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    sync::mpsc,
    time::MissedTickBehavior,
};

use super::ping;

/// The pause between pings. They detect a client that disconnected while nothing is read from it because the process
/// takes no input.
const PING_EVERY: Duration = Duration::from_secs(5);
/// The size of one read, in bytes.
const READ_BYTES: usize = 32 << 10;

/// The bytes received from the client, until it disconnects.
pub(crate) fn received(reader: impl AsyncRead + Unpin + Send) -> impl Stream<Item = Bytes> + Send {
    futures::stream::unfold(reader, |mut reader| async move {
        let mut piece = BytesMut::with_capacity(READ_BYTES);
        match reader.read_buf(&mut piece).await {
            Ok(0) | Err(_) => None,
            Ok(_) => Some((piece.freeze(), reader)),
        }
    })
}

/// Sends the frames of a queue and pings between them, until the queue is closed or the client has disconnected.
pub(crate) async fn send(
    mut writer: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Bytes>,
) -> std::io::Result<()> {
    let mut pings = tokio::time::interval_at(tokio::time::Instant::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Pings of a server have even numbers.
    let mut next_ping: u32 = 2;
    loop {
        let frame = tokio::select! {
            biased;
            frame = queue.recv() => frame,
            _ = pings.tick() => {
                let frame = ping(next_ping);
                next_ping = next_ping.checked_add(2).unwrap_or(2);
                Some(frame)
            }
        };
        let Some(frame) = frame else { return writer.shutdown().await };
        writer.write_all(&frame).await?;
        if queue.is_empty() {
            writer.flush().await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_gone_is_noticed_by_a_ping() {
        let (server, mut client) = tokio::io::duplex(1024);
        let (_sender, queue) = mpsc::channel(1);
        let sending = tokio::spawn(send(server, queue));
        let mut frame = [0; 12];
        client.read_exact(&mut frame).await.unwrap();
        assert_eq!(frame, *ping(2));
        client.read_exact(&mut frame).await.unwrap();
        assert_eq!(frame, *ping(4));
        drop(client);
        assert!(sending.await.unwrap().is_err());
    }
}
