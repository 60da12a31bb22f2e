//! Ports with small limits, attacked by clients that make no progress.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_accept::{AcceptPort, Config, ConnectionMetrics, ProgressBody};
use prometheus_client::registry::Registry;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

/// The timeout of any wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// A port that is being served.
struct Served {
    address: SocketAddr,
    metrics: Arc<Registry>,
    stop: CancellationToken,
    server: JoinHandle<()>,
}

/// An endless body, like that of a watch without events.
struct Endless {
    sent: bool,
    _unread: Option<ProgressBody>,
}

impl Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if std::mem::replace(&mut self.sent, true) {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"event\n")))))
    }
}

/// `/watch` has an endless response, `/unread` too, without reading the request's body; other requests are answered
/// after their body was read.
async fn answer(
    request: Request<ProgressBody>,
) -> Result<Response<Either<Full<Bytes>, Endless>>, Infallible> {
    if request.uri().path() == "/watch" {
        return Ok(Response::new(Either::Right(Endless { sent: false, _unread: None })));
    }
    if request.uri().path() == "/unread" {
        let _unread = Some(request.into_body());
        return Ok(Response::new(Either::Right(Endless { sent: false, _unread })));
    }
    let text = match request.into_body().collect().await {
        Ok(_) => "answered".to_owned(),
        Err(error) => error.to_string(),
    };
    Ok(Response::new(Either::Left(Full::from(text))))
}

impl Served {
    async fn start(config: Config, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        // On all addresses, so that clients can choose a loopback address.
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], listener.local_addr().unwrap().port()));
        let mut registry = Registry::default();
        let port = AcceptPort::new("test", config, &ConnectionMetrics::register(&mut registry));
        let stop = CancellationToken::new();
        let until = stop.clone();
        let server = tokio::spawn(async move { port.serve(listener, tls, service_fn(answer), until).await });
        Self { address, metrics: Arc::new(registry), stop, server }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A connection from another address of this machine.
    async fn connect_from(&self, client: &str) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(client.parse().unwrap(), 0)).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    async fn send(&self, request: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    fn count(&self, metric: &str) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.metrics).unwrap();
        let line = text.lines().find(|line| line.starts_with(metric));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
    }

    async fn stop(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.server).await.unwrap().unwrap();
    }
}

/// Reads until the server closes the connection.
async fn read_all(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    // A reset counts as an end, too.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut text)).await.expect("the server closes the connection");
    String::from_utf8_lossy(&text).into_owned()
}

/// Reads the beginning of a response.
async fn read_some(stream: &mut TcpStream) -> String {
    let mut bytes = vec![0; 4096];
    let read = timeout(PATIENCE, stream.read(&mut bytes)).await.expect("a response").unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

const REQUEST: &str = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

fn limited(total: usize, per_client: usize) -> Config {
    Config { connections_per_client_max: per_client, ..Config::with_connections(total) }
}

fn impatient() -> Config {
    let short = Duration::from_millis(200);
    Config {
        handshake_timeout: short,
        head_timeout: short,
        idle_timeout: 2 * short,
        stall_timeout: short,
        drain_timeout: short,
        ..Config::with_connections(100)
    }
}

fn tls() -> Arc<rustls::ServerConfig> {
    let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let private = rustls::pki_types::PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    Arc::new(config.with_single_cert(vec![key.cert.der().clone()], private).unwrap())
}

#[tokio::test]
async fn silent_connections_make_room_for_requests() {
    let served = Served::start(limited(8, 8), None).await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(served.connect().await);
    }
    for _ in 0..20 {
        assert!(read_all(served.send(REQUEST).await).await.ends_with("answered"));
        silent.push(served.connect().await);
    }
    assert_eq!(served.count("mayfly_connections_refused_total"), 0);
    assert!(served.count("mayfly_connections_closed_total{port=\"test\",reason=\"replaced\"}") > 40);
    assert!(served.count("mayfly_connections{port=\"test\"}") <= 8 + 2);
    served.stop().await;
}

#[tokio::test]
async fn requests_under_way_are_not_replaced_and_refusals_are_counted() {
    let served = Served::start(limited(3, 3), None).await;
    let mut watches = Vec::new();
    for _ in 0..3 {
        let mut watch = served.send("GET /watch HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(read_some(&mut watch).await.contains("200 OK"));
        watches.push(watch);
    }
    assert_eq!(read_all(served.send(REQUEST).await).await, "");
    assert_eq!(served.count("mayfly_connections_refused_total"), 1);
    watches.pop();
    // The server detects a client's disconnection at its next read or write.
    let began = Instant::now();
    while !read_all(served.send(REQUEST).await).await.ends_with("answered") {
        assert!(began.elapsed() < PATIENCE, "a place is free again");
    }
}

#[tokio::test]
async fn one_client_address_leaves_room_for_others() {
    let served = Served::start(limited(6, 3), None).await;
    let mut watches = Vec::new();
    for _ in 0..3 {
        let mut watch = served.send("GET /watch HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(read_some(&mut watch).await.contains("200 OK"));
        watches.push(watch);
    }
    assert_eq!(read_all(served.send(REQUEST).await).await, "", "the share of 127.0.0.1 is used up");
    assert_eq!(served.count("mayfly_connections_refused_total{port=\"test\",reason=\"client\"}"), 1);
    let mut other = served.connect_from("127.0.0.2").await;
    other.write_all(REQUEST.as_bytes()).await.unwrap();
    assert!(read_all(other).await.ends_with("answered"));
}

#[tokio::test]
async fn silence_and_half_sent_heads_are_ended() {
    let served = Served::start(impatient(), None).await;
    for beginning in ["", "G", "GET / HTTP/1.1\r\nhost: a\r\n", "PRI * HTTP/2.0\r\n"] {
        assert_eq!(read_all(served.send(beginning).await).await, "", "{beginning:?}");
    }
    assert_eq!(served.count("mayfly_connections_closed_total{port=\"test\",reason=\"head-timeout\"}"), 4);
    // An idle connection outlives the timeout of a head, and a head that starts then has its own timeout.
    let mut kept = served.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(read_some(&mut kept).await.ends_with("answered"));
    kept.write_all(b"GET /again HT").await.unwrap();
    assert_eq!(read_all(kept).await, "");
    let mut kept = served.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(read_some(&mut kept).await.ends_with("answered"));
    assert_eq!(read_all(kept).await, "");
    assert_eq!(served.count("mayfly_connections_closed_total{port=\"test\",reason=\"idle-timeout\"}"), 1);
    served.stop().await;
}

#[tokio::test]
async fn slow_handshakes_and_silence_after_them_are_ended() {
    let served = Served::start(impatient(), Some(tls())).await;
    assert_eq!(read_all(served.connect().await).await, "");
    assert_eq!(read_all(served.send("\x16\x03\x01").await).await, "");
    let handshakes = "mayfly_connections_closed_total{port=\"test\",reason=\"handshake-timeout\"}";
    assert_eq!(served.count(handshakes), 2);

    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider);
    let client = client.with_safe_default_protocol_versions().unwrap();
    let verifier = Arc::new(AnyCertificate);
    let client = client.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
    let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let mut stream = connector.connect(name, served.connect().await).await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("the server closes the connection");
    assert_eq!(served.count("mayfly_connections_closed_total{port=\"test\",reason=\"head-timeout\"}"), 1);
    let plain = read_all(served.send(REQUEST).await).await;
    assert!(plain.contains("Client sent an HTTP request to an HTTPS server."), "{plain}");
}

#[tokio::test]
async fn a_watch_outlives_all_timeouts_and_a_stalled_body_does_not() {
    let served = Served::start(impatient(), None).await;
    let mut watch = served.send("GET /watch HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(read_some(&mut watch).await.contains("200 OK"));
    let stalled = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 9\r\n\r\nhalf";
    let stalled = read_all(served.send(stalled).await).await;
    assert!(stalled.ends_with("the rest of the request's body did not arrive in time"), "{stalled}");
    // Longer than any of the timeouts.
    let mut more = [0; 64];
    let waiting = async {
        loop {
            assert_ne!(watch.read(&mut more).await.unwrap(), 0, "the watch was cut");
        }
    };
    let more: Result<(), _> = timeout(Duration::from_secs(1), waiting).await;
    assert!(more.is_err(), "the watch stays open");
    served.stop.cancel();
    timeout(PATIENCE, served.server).await.expect("the watch is cut after the drain timeout").unwrap();
}

#[tokio::test]
async fn a_half_sent_head_does_not_delay_stopping() {
    let served = Served::start(Config::with_connections(10), None).await;
    let _half = served.send("GET / HTTP/1.1\r\nhost").await;
    let mut kept = served.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(read_some(&mut kept).await.ends_with("answered"));
    let began = Instant::now();
    served.stop().await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn unread_bodies_delay_no_other_request_of_the_connection() {
    let mut config = Config::with_connections(10);
    config.h2_stream_window_bytes = Some(64 << 10);
    let served = Served::start(config, None).await;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(served.connect().await))
            .await
            .unwrap();
    tokio::spawn(connection);
    let mut unread = Vec::new();
    // Together more than the window of a connection by default.
    for _ in 0..32 {
        let body = Full::<Bytes>::from(vec![0; 256 << 10]);
        let request = Request::post("http://host/unread").body(body).unwrap();
        let response = sender.send_request(request).await.unwrap();
        let mut body = response.into_body();
        body.frame().await.unwrap().unwrap();
        unread.push(body);
    }
    let request = Request::post("http://host/read").body(Full::from(vec![0; 1 << 20])).unwrap();
    let response = timeout(PATIENCE, sender.send_request(request)).await.expect("not delayed").unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "answered");
}

#[tokio::test]
async fn a_flood_of_pings_is_ended() {
    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let served = Served::start(Config::with_connections(10), None).await;
    let stream = served.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    let (mut receive, mut send) = stream.into_split();
    let reading = tokio::spawn(async move {
        let mut answers = Vec::new();
        let _ = receive.read_to_end(&mut answers).await;
    });
    let pings = PING.repeat(1000);
    let flood = async { while send.write_all(&pings).await.is_ok() {} };
    timeout(PATIENCE, flood).await.expect("the server ends the connection");
    timeout(PATIENCE, reading).await.unwrap().unwrap();
    let floods = "mayfly_connections_closed_total{port=\"test\",reason=\"protocol-flood\"}";
    let began = Instant::now();
    while served.count(floods) != 1 {
        assert!(began.elapsed() < PATIENCE, "it is counted");
        tokio::task::yield_now().await;
    }
    assert!(read_all(served.send(REQUEST).await).await.ends_with("answered"));
}

/// Accepts the test's own certificate.
#[derive(Debug)]
struct AnyCertificate;

impl rustls::client::danger::ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
