//! Ingresses: hosts and paths of Services and functions, TLS with certificates from Secrets, upgrades. Some tests use
//! curl as a real client.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, guest_or_skip, skipped, test_name, wait::until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// An address of the range of pods without root: endpoints may have no other loopback address.
const BACKEND: &str = "127.94.0.2:0";

/// A server that answers every request with a text and its path, and echoes lines once a request asks for the
/// protocol `echo`.
async fn backend(text: &'static str) -> Result<SocketAddr> {
    let listener = TcpListener::bind(BACKEND).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, text));
        }
    });
    Ok(address)
}

async fn answer(mut stream: TcpStream, text: &'static str) -> Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head)?.to_ascii_lowercase();
    if head.contains("upgrade: echo") {
        stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n")
            .await?;
        let (mut read, mut write) = stream.split();
        tokio::io::copy(&mut read, &mut write).await?;
        return Ok(());
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    stream.read_exact(&mut vec![0; length.unwrap_or("0").parse()?]).await?;
    let path = head.split(' ').nth(1).context("no path")?;
    let proto = head.lines().find_map(|line| line.strip_prefix("x-forwarded-proto: ")).unwrap_or("-");
    let body = format!("{text} {path} {proto}\n");
    let answer =
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
    stream.write_all(answer.as_bytes()).await?;
    Ok(())
}

/// Creates a Service without a selector, and its only endpoint.
async fn service(up: &Up, name: &str, endpoint: SocketAddr) -> Result<()> {
    let api = up.api()?;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"clusterIP": "None", "ports": [{"name": "http", "port": 80}]}});
    let made = api.post("/api/v1/namespaces/default/services", &service).await?;
    ensure!(made.status == 201, "{made:?}");
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"name": "http", "port": endpoint.port(), "protocol": "TCP"}],
        "endpoints": [{"addresses": [endpoint.ip().to_string()], "conditions": {"ready": true}}]});
    let made = api.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice).await?;
    ensure!(made.status == 201, "{made:?}");
    Ok(())
}

fn path(kind: &str, path: &str, service: &str) -> Value {
    json!({"path": path, "pathType": kind, "backend": {"service": {"name": service, "port": {"number": 80}}}})
}

async fn create_ingress(up: &Up, name: &str, spec: Value) -> Result<()> {
    let ingress = json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": name}, "spec": spec});
    let made = up.api()?.post("/apis/networking.k8s.io/v1/namespaces/default/ingresses", &ingress).await?;
    ensure!(made.status == 201, "{made:?}");
    Ok(())
}

/// The output of curl.
async fn curl(arguments: &[&str]) -> Result<String> {
    let output =
        tokio::process::Command::new("curl").args(["-sS", "-m", "20"]).args(arguments).output().await?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
}

/// The response that curl gets for a host name at a port of this machine.
async fn fetched(scheme: &str, host: &str, at: SocketAddr, path: &str, more: &[&str]) -> Result<String> {
    let resolve = format!("{host}:{}:{}", at.port(), at.ip());
    let url = format!("{scheme}://{host}:{}{path}", at.port());
    curl(&[&["--resolve", &resolve, &url], more].concat()).await
}

fn has_curl() -> bool {
    std::process::Command::new("curl").arg("--version").output().is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_and_paths_lead_to_services_and_functions() -> Result<()> {
    guest_or_skip!("hello");
    if !has_curl() {
        skipped(test_name!(), "no curl");
        return Ok(());
    }
    let up = Up::start().await?;
    service(&up, "web", backend("web").await?).await?;
    service(&up, "cart", backend("cart").await?).await?;
    up.deploy("hello", "hello", &[]).await?;
    let at = up.address("http");
    let hello = up.http().get("/fn/default/hello").await?.text();
    let function = json!({"path": "/hello", "pathType": "Exact",
        "backend": {"resource": {"apiGroup": "mayfly.dev", "kind": "Function", "name": "hello"}}});
    let paths = [
        path("Prefix", "/", "web"),
        path("Prefix", "/cart", "cart"),
        function,
        path("Prefix", "/gone", "gone"),
    ];
    let rules = [
        json!({"host": "shop.example.com", "http": {"paths": paths}}),
        json!({"host": "*.example.com", "http": {"paths": [path("Prefix", "/", "cart")]}}),
    ];
    create_ingress(&up, "shop", json!({"rules": rules})).await?;
    until("the Ingress is served", || async {
        Ok((fetched("http", "shop.example.com", at, "/", &[]).await? == "web / http\n").then_some(()))
    })
    .await?;
    for (host, path, expected) in [
        ("shop.example.com", "/x?y=1", "web /x?y=1 http\n"),
        ("shop.example.com", "/cart/1", "cart /cart/1 http\n"),
        ("shop.example.com", "/cartoon", "web /cartoon http\n"),
        ("shop.example.com", "/hello", hello.as_str()),
        ("other.example.com", "/", "cart / http\n"),
    ] {
        let text = fetched("http", host, at, path, &[]).await?;
        ensure!(text == expected, "{host}{path}: {text:?}");
    }
    let missing =
        fetched("http", "shop.example.com", at, "/gone", &["-o", "/dev/null", "-w", "%{http_code}"]).await?;
    ensure!(missing == "503", "{missing}");
    // Functions keep their own routes, and unknown hosts have none.
    ensure!(up.http().get("/fn/default/hello").await?.text() == hello);
    let nobody = fetched("http", "example.org", at, "/", &["-o", "/dev/null", "-w", "%{http_code}"]).await?;
    ensure!(nobody == "404", "{nobody}");
    until("the status names the address", || async {
        let ingress = up.api()?.get("/apis/networking.k8s.io/v1/namespaces/default/ingresses/shop").await?;
        let said = ingress.body["status"]["loadBalancer"]["ingress"][0]["ip"] == at.ip().to_string();
        Ok(said.then_some(()))
    })
    .await?;
    // An upgraded connection works in both directions.
    let mut stream = TcpStream::connect(at).await?;
    let head = "GET /ws HTTP/1.1\r\nhost: shop.example.com\r\nconnection: Upgrade\r\nupgrade: echo\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await?);
    }
    ensure!(answer.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&answer));
    // Data that looks like a status line.
    for text in ["HTTP/1.1 404 x\n", "second\n"] {
        stream.write_all(text.as_bytes()).await?;
        let mut echoed = vec![0; text.len()];
        stream.read_exact(&mut echoed).await?;
        ensure!(echoed == text.as_bytes(), "{echoed:?}");
    }
    drop(stream);
    // A default backend gets all other requests.
    create_ingress(
        &up,
        "rest",
        json!({"defaultBackend": {"service": {"name": "cart", "port": {"name": "http"}}}}),
    )
    .await?;
    until("the default backend answers", || async {
        Ok((fetched("http", "example.org", at, "/z", &[]).await? == "cart /z http\n").then_some(()))
    })
    .await?;
    up.stop().await
}

/// A Secret with a new certificate for a host; returns both.
fn secret(host: &str) -> Result<(Value, String)> {
    let made = rcgen::generate_simple_self_signed([host.to_owned()])?;
    let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "shop-tls"},
        "type": "kubernetes.io/tls", "stringData": {"tls.crt": certificate, "tls.key": key}});
    Ok((secret, certificate))
}

/// A server that reads a request's head and its body of 5 bytes, if it has one; it closes every second connection without
/// an answer, and answers the others with the number of requests that it has read.
async fn unreliable_backend() -> Result<SocketAddr> {
    let listener = TcpListener::bind(BACKEND).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        let mut read = 0;
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await?);
            }
            if head.starts_with(b"POST") {
                stream.read_exact(&mut [0; 5]).await?;
            }
            read += 1;
            if read % 2 == 0 {
                let text = read.to_string();
                let answer = format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
                    text.len()
                );
                stream.write_all(answer.as_bytes()).await?;
            }
        }
        std::io::Result::Ok(())
    });
    Ok(address)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_repeated_where_that_does_no_harm() -> Result<()> {
    let up = Up::start().await?;
    let unreliable = unreliable_backend().await?;
    service(&up, "unreliable", unreliable).await?;
    // One endpoint of the second Service refuses connections.
    let live = backend("live").await?;
    service(&up, "half", live).await?;
    let refusing = TcpListener::bind(BACKEND).await?.local_addr()?;
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "refusing", "labels": {"kubernetes.io/service-name": "half"}},
        "ports": [{"name": "http", "port": refusing.port(), "protocol": "TCP"}],
        "endpoints": [{"addresses": [refusing.ip().to_string()], "conditions": {"ready": true}}]});
    let made = up.api()?.post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice).await?;
    ensure!(made.status == 201, "{made:?}");
    let rule = |host: &str, of: &str| json!({"host": host, "http": {"paths": [path("Prefix", "/", of)]}});
    let rules = json!({"rules": [rule("unreliable.test", "unreliable"), rule("half.test", "half")]});
    create_ingress(&up, "all", rules).await?;
    let http = up.http();
    let request = |method: http::Method, host: &str| http.request(method, "/").header("host", host);
    let sent = async |method: http::Method, host: &str, body: &'static str| {
        let answer = http.call(request(method, host), mayfly_e2e::full(body)).await?;
        anyhow::Ok((answer.status.as_u16(), answer.text()))
    };
    until("the Ingress is served", || async {
        Ok((sent(http::Method::GET, "half.test", "").await?.0 == 200).then_some(()))
    })
    .await?;
    // A request that was not sent to an endpoint goes to the next one, with its body.
    for _ in 0..8 {
        let (status, text) = sent(http::Method::POST, "half.test", "hello").await?;
        ensure!(status == 200 && text.starts_with("live / "), "{status} {text}");
    }
    // A request whose connection failed is retried if its method is safe.
    ensure!(sent(http::Method::GET, "unreliable.test", "").await? == (200, "2".into()));
    let (status, text) = sent(http::Method::POST, "unreliable.test", "hello").await?;
    ensure!(status == 502, "it may have been carried out: {status} {text}");
    ensure!(sent(http::Method::GET, "unreliable.test", "").await? == (200, "4".into()), "it was sent once");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_come_from_secrets_and_change_without_a_restart() -> Result<()> {
    if !has_curl() {
        skipped(test_name!(), "no curl");
        return Ok(());
    }
    let up = Start::default().with(&["--https-listen", "127.0.0.1:0"]).ready().await?;
    let at = up.address("https");
    service(&up, "web", backend("web").await?).await?;
    let host = "shop.example.com";
    let (first, certificate) = secret(host)?;
    let secrets = "/api/v1/namespaces/default/secrets";
    let made = up.api()?.post(secrets, &first).await?;
    ensure!(made.status == 201, "{made:?}");
    let rules = [json!({"host": host, "http": {"paths": [path("Prefix", "/", "web")]}})];
    create_ingress(
        &up,
        "shop",
        json!({"rules": rules, "tls": [{"hosts": [host], "secretName": "shop-tls"}]}),
    )
    .await?;
    let file = tempfile::NamedTempFile::new()?;
    let path_of_file = file.path().to_string_lossy().into_owned();
    std::fs::write(file.path(), certificate)?;
    let trusting = ["--cacert", path_of_file.as_str()];
    until("the host has its certificate", || async {
        Ok((fetched("https", host, at, "/a", &trusting).await? == "web /a https\n").then_some(()))
    })
    .await?;
    // The server offers HTTP/2 and HTTP/1.1.
    for (flag, version) in [("--http2", "2"), ("--http1.1", "1.1")] {
        let arguments = [trusting[0], trusting[1], flag, "-o", "/dev/null", "-w", "%{http_version}"];
        let said = fetched("https", host, at, "/", &arguments).await?;
        ensure!(said == version, "{said}");
    }
    // Other names get another certificate.
    let other = fetched("https", "other.example.com", at, "/", &trusting).await?;
    ensure!(other.contains("curl:"), "{other}");
    // A new certificate is used by the next handshake.
    let gone = up.api()?.delete(&format!("{secrets}/shop-tls")).await?;
    ensure!(gone.status == 200, "{gone:?}");
    let (second, certificate) = secret(host)?;
    let made = up.api()?.post(secrets, &second).await?;
    ensure!(made.status == 201, "{made:?}");
    std::fs::write(file.path(), certificate)?;
    until("the host has its new certificate", || async {
        Ok((fetched("https", host, at, "/b", &trusting).await? == "web /b https\n").then_some(()))
    })
    .await?;
    up.stop().await
}
