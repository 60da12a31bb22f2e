//! Outbound HTTP of the proxy example, which takes the URL from its query.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::support::*;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::{body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use mayfly_runtime::HostedFunction;
use mayfly_runtime_wasm::{Config, config::EgressConfig};

/// An HTTP server on a loopback address: `/redirect` redirects, `/hang` never answers.
struct Upstream {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Upstream {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, requests) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (connecting, requesting) = (connections.clone(), requests.clone());
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connecting.fetch_add(1, Ordering::SeqCst);
                let requests = requesting.clone();
                let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                    requests.fetch_add(1, Ordering::SeqCst);
                    async move {
                        if request.uri().path() == "/hang" {
                            std::future::pending::<()>().await;
                        }
                        let host = request.headers()["host"].to_str().unwrap().to_owned();
                        Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(host))))
                    }
                });
                tokio::spawn(async move {
                    http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
                });
            }
        });
        Self { address, connections, requests }
    }
}

async fn proxy(fixture: &WasmHostFixture, component: Vec<u8>, egress: &[String]) -> Arc<dyn HostedFunction> {
    let rules = egress.iter().map(|rule| rule.parse().unwrap()).collect();
    fixture.function(component, |spec| spec.egress = rules).await
}

async fn through(function: &Arc<dyn HostedFunction>, url: &str) -> (StatusCode, String) {
    ask(function, &format!("/?url={url}")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_listed_destinations_are_reachable() {
    let component = guest!("proxy");
    let fixture = WasmHostFixture::new();
    let upstream = Upstream::start().await;
    let Upstream { address, connections, requests } = &upstream;
    let function = proxy(&fixture, component.clone(), &[format!("http://{address}")]).await;
    for _ in 0..5 {
        let (status, body) = through(&function, &format!("http://{address}/a")).await;
        assert_eq!((status.as_u16(), body), (200, address.to_string()));
    }
    assert_eq!(requests.load(Ordering::SeqCst), 5);
    assert_eq!(connections.load(Ordering::SeqCst), 1, "connections outlive instances");

    let port = address.port();
    let denied: Vec<String> = vec![
        format!("http://localhost:{port}/"),
        format!("http://127.0.0.2:{port}/"),
        format!("http://[::ffff:127.0.0.1]:{port}/"),
        format!("https://{address}/"),
        "http://169.254.169.254/latest/meta-data".into(),
        "http://example.com/".into(),
    ];
    for url in &denied {
        let (status, body) = through(&function, url).await;
        assert!(status == 502 && body.contains("Denied"), "{url}: {status} {body}");
        assert!(fixture.log("f").contains(&format!("request to {url} denied")), "{}", fixture.log("f"));
    }
    let nothing = proxy(&fixture, component, &[]).await;
    let (status, body) = through(&nothing, &format!("http://{address}/")).await;
    assert!(status == 502 && body.contains("Denied"), "{body}");
    assert_eq!(requests.load(Ordering::SeqCst), 5, "nothing else came through");
}

/// A listed name may resolve to a private address: the address decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_listed_name_does_not_reach_private_addresses() {
    let component = guest!("proxy");
    let fixture = WasmHostFixture::new();
    let upstream = Upstream::start().await;
    let port = upstream.address.port();
    // This host's own name resolves to one of its own addresses.
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_ascii_lowercase();
    let skipped = |reason: &str| {
        eprintln!("SKIPPED a_listed_name_does_not_reach_private_addresses: {name:?} {reason}");
    };
    // A loopback name is listed like an address.
    if name == "localhost" {
        return skipped("is not a name of this machine alone");
    }
    let Ok(rule) = format!("http://{name}:{port}").parse() else {
        return skipped("is no name that a rule can have");
    };
    let resolved = tokio::net::lookup_host((name.as_str(), port)).await.map(|found| found.count());
    if !resolved.is_ok_and(|count| count > 0) {
        return skipped("has no address");
    }
    let function = fixture.function(component, |spec| spec.egress = vec![rule]).await;
    let (status, body) = through(&function, &format!("http://{name}:{port}/")).await;
    assert!(status == 502 && body.contains("Denied"), "{status} {body}");
    assert_eq!(upstream.requests.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_that_fail_are_told_apart() {
    let component = guest!("proxy");
    let egress = EgressConfig { first_byte_timeout: Duration::from_millis(200), ..EgressConfig::default() };
    let fixture = WasmHostFixture::with(Config {
        egress: EgressConfig { connect_timeout: Duration::from_millis(200), ..egress },
        ..small()
    });
    let upstream = Upstream::start().await;
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let rules = [format!("http://{}", upstream.address), format!("http://{free}")];
    let function = proxy(&fixture, component, &rules).await;
    let (status, body) = through(&function, &format!("http://{free}/")).await;
    assert!(status == 502 && !body.contains("Denied"), "{status} {body}");
    let (status, body) = through(&function, &format!("http://{}/hang", upstream.address)).await;
    assert!(status.is_server_error() && !body.contains("Denied"), "{status} {body}");
}
