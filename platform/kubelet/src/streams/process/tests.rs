//! Sessions against a client on the other end of a pipe.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use serde_json::json;
use tokio::{io::DuplexStream, task::JoinHandle};

use super::{
    super::spdy::client::{SpdyTestConnection, initial_window},
    *,
};

/// The bytes of a pipe.
const PIPE_BYTES: usize = 4096;

/// The test's ends of a process.
struct Process {
    stdin: DuplexStream,
    stdout: DuplexStream,
    stderr: DuplexStream,
    sizes: mpsc::Receiver<TerminalSize>,
    exit: oneshot::Sender<Result<i32, RuntimeError>>,
}

fn process() -> (ProcessSession, Process) {
    let [(stdin, own_stdin), (stdout, own_stdout), (stderr, own_stderr)] =
        [(); 3].map(|()| tokio::io::duplex(PIPE_BYTES));
    let (resize, sizes) = mpsc::channel(1);
    let (exit, exited) = oneshot::channel();
    let session = ProcessSession {
        stdin: Some(Box::pin(stdin)),
        stdout: Some(Box::pin(stdout)),
        stderr: Some(Box::pin(stderr)),
        resize: Some(resize),
        exit: Box::pin(async { exited.await.unwrap() }),
    };
    (session, Process { stdin: own_stdin, stdout: own_stdout, stderr: own_stderr, sizes, exit })
}

const ALL: StreamOptions = StreamOptions { stdin: true, stdout: true, stderr: true, tty: false };

fn start(
    protocol: &'static str,
    options: StreamOptions,
    opened: Result<ProcessSession, RuntimeError>,
) -> (SpdyTestConnection, JoinHandle<()>) {
    let (server, client) = tokio::io::duplex(PIPE_BYTES);
    let running = tokio::spawn(run(server, protocol, options, async { opened }));
    (SpdyTestConnection::new(client), running)
}

/// Opens the streams of a session as kubectl does: 1 error, 3 stdin, 5 stdout, 7 stderr.
async fn open_all(client: &mut SpdyTestConnection) {
    for (stream, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr")] {
        client.open(stream, kind).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_has_its_streams_and_an_outcome() {
    let (session, mut process) = process();
    let (mut client, running) = start(V4, ALL, Ok(session));
    open_all(&mut client).await;
    client.send(spdy::ping(1)).await;
    assert_eq!(client.frame().await, Some(Frame::Ping { id: 1 }));
    client.send(spdy::data(3, b"in", false)).await;
    client.send(spdy::data(3, b"put", true)).await;
    let mut input = String::new();
    process.stdin.read_to_string(&mut input).await.unwrap();
    assert_eq!(input, "input");
    process.stdout.write_all(b"out").await.unwrap();
    process.stderr.write_all(b"err").await.unwrap();
    drop((process.stdout, process.stderr));
    process.exit.send(Ok(7)).unwrap();
    let ended = client.until_go_away().await;
    assert_eq!((&ended[&3][..], &ended[&5][..], &ended[&7][..]), (&b""[..], &b"out"[..], &b"err"[..]));
    let status: Value = serde_json::from_slice(&ended[&1]).unwrap();
    assert_eq!(status["details"]["causes"][0], json!({"reason": "ExitCode", "message": "7"}));
    // Further input is discarded, and the client closes the connection.
    client.send(spdy::data(3, &[0; 10_000], false)).await;
    assert!(!running.is_finished());
    drop(client);
    running.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn older_versions_have_a_message_of_an_error() {
    for (protocol, code, expected) in
        [(V3, 0, ""), ("channel.k8s.io", 3, "command terminated with non-zero exit code: exit status 3")]
    {
        let (session, process) = process();
        let (mut client, _running) = start(protocol, ALL, Ok(session));
        open_all(&mut client).await;
        drop((process.stdout, process.stderr));
        process.exit.send(Ok(code)).unwrap();
        assert_eq!(String::from_utf8_lossy(&client.until_go_away().await[&1]), expected);
    }
    let failed = RuntimeError::Internal("no such program".into());
    let (mut client, _running) = start("v2.channel.k8s.io", ALL, Err(failed));
    open_all(&mut client).await;
    let ended = client.until_go_away().await;
    assert!(String::from_utf8_lossy(&ended[&1]).contains("no such program"), "{ended:?}");
    assert_eq!(ended.len(), 4, "all streams end: {ended:?}");
}

#[tokio::test(start_paused = true)]
async fn a_terminal_has_one_output_and_sizes() {
    let (session, mut process) = process();
    let (mut client, _running) = start(V4, StreamOptions { tty: true, ..ALL }, Ok(session));
    for (stream, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr"), (9, "resize")] {
        client.open(stream, kind).await;
    }
    assert_eq!(client.frame().await, Some(Frame::Reset { stream: 7 }));
    let sizes = b"{\"Width\":80,\"Height\":24}\n{\"Width\":100,\"Height\":30}\n";
    client.send(spdy::data(9, &sizes[..20], false)).await;
    client.send(spdy::data(9, &sizes[20..], false)).await;
    let last = TerminalSize { width: 100, height: 30 };
    let resized = async { while process.sizes.recv().await.unwrap() != last {} };
    timeout(Duration::from_secs(60), resized).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn streams_that_are_not_expected_are_refused() {
    let options = StreamOptions { stdout: true, ..StreamOptions::default() };
    let (session, _process) = process();
    let (mut client, _running) = start("v2.channel.k8s.io", options, Ok(session));
    for (stream, kind) in
        [(1, "error"), (3, "stdin"), (5, "resize"), (7, "error"), (6, "stdout"), (7, "stdout")]
    {
        client.open(stream, kind).await;
    }
    for stream in [3, 5, 7, 6, 7] {
        assert_eq!(client.frame().await, Some(Frame::Reset { stream }));
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_has_30_seconds_to_open_its_streams() {
    let (session, _process) = process();
    let (mut client, running) = start(V4, ALL, Ok(session));
    let begun = tokio::time::Instant::now();
    client.open(1, "error").await;
    assert_eq!(client.frame().await, None);
    assert!((OPENING_TIMEOUT..OPENING_TIMEOUT + Duration::from_secs(1)).contains(&begun.elapsed()));
    running.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_process_ends_with_its_client() {
    let (session, process) = process();
    let (mut client, running) = start(V4, ALL, Ok(session));
    open_all(&mut client).await;
    let block = spdy::data(3, &[0; 1024], false);
    let filling = async {
        loop {
            client.send(block.clone()).await;
        }
    };
    // The process takes no input, so the client's disconnection is queued behind unread data.
    assert!(timeout(Duration::from_secs(1), filling).await.is_err());
    drop(client);
    timeout(Duration::from_secs(20), running).await.unwrap().unwrap();
    assert!(process.exit.is_closed(), "the session was dropped");
}

/// An endless output that counts the bytes read from it.
struct Endless(Arc<AtomicUsize>);

impl AsyncRead for Endless {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        self.0.fetch_add(buffer.remaining(), Ordering::Relaxed);
        let length = buffer.remaining();
        buffer.initialize_unfilled();
        buffer.advance(length);
        std::task::Poll::Ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_holds_its_process_back() {
    for announces_windows in [false, true] {
        let (mut session, _process) = process();
        let read = Arc::new(AtomicUsize::new(0));
        session.stdout = Some(Box::pin(Endless(read.clone())));
        let (mut client, _running) = start(V4, ALL, Ok(session));
        if announces_windows {
            client.send(initial_window(10_000)).await;
        }
        open_all(&mut client).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let held = read.load(Ordering::Relaxed);
        assert!(held > 0 && held <= (FRAMES_MAX + 3) * spdy::DATA_BYTES_MAX, "{held}");
        let mut received = 0;
        if announces_windows {
            // Drains all output that the window allows; no more arrives until the window is opened.
            let silence = Duration::from_secs(1);
            while let Ok(frame) = timeout(silence, client.frame()).await {
                let Some(Frame::Data { stream: 5, bytes, fin: false }) = frame else { panic!("{frame:?}") };
                received += bytes.len();
            }
            assert_eq!(received, 10_000);
            client.send(spdy::consumed(5, 500)).await;
        }
        while received < 10_500 {
            let frame = client.frame().await;
            let Some(Frame::Data { stream: 5, bytes, fin: false }) = frame else { panic!("{frame:?}") };
            received += bytes.len();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_window_of_a_clients_input_is_opened_again() {
    let (session, mut process) = process();
    let (mut client, _running) = start(V4, ALL, Ok(session));
    client.send(initial_window(1 << 20)).await;
    open_all(&mut client).await;
    client.send(spdy::data(3, b"input", false)).await;
    let mut input = [0; 5];
    process.stdin.read_exact(&mut input).await.unwrap();
    assert_eq!(client.frame().await, Some(Frame::WindowUpdate { stream: 3, bytes: 5 }));
    assert_eq!(client.frame().await, Some(Frame::WindowUpdate { stream: 0, bytes: 5 }));
}
