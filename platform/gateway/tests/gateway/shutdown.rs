//! Ports, draining and cancellation.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_gateway::{Config, Drained, Gateway, GatewayCreateError, GatewayDeps, GatewayRole};
use mayfly_informer::{EnvObjects, Informers};
use mayfly_runtime::simulated::SimulatedFunctions;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;

use crate::support::{
    FakeApi, TestGateway, config, eventually,
    host::{ScriptedHost, text},
};

#[tokio::test]
async fn a_port_in_use_is_named() {
    let api = FakeApi::default();
    let world = TestGateway::new(api.clone(), Duration::ZERO).await;
    let stop = CancellationToken::new();
    let informers = Informers::create(api.client(), stop.clone());
    let deps = GatewayDeps {
        functions: informers.of(),
        revisions: informers.of(),
        role: GatewayRole::Single,
        pods: informers.of(),
        services: informers.of(),
        slices: informers.of(),
        ingresses: informers.of(),
        https: None,
        env: EnvObjects::create(&informers),
        host: Arc::new(SimulatedFunctions::default()),
        client: api.client(),
        requests: tokio::runtime::Handle::current(),
        stop,
    };
    let config = Config { listen: world.address, ..config() };
    let Err(error) = Gateway::create(config, deps, &mut Registry::default()) else {
        panic!("two on one port")
    };
    assert!(matches!(&error, GatewayCreateError::Listen { address, .. } if *address == world.address));
    assert!(error.to_string().contains(&world.address.to_string()), "{error}");
}

/// A host that answers when `turns` has a permit.
fn held(turns: Arc<Semaphore>) -> Arc<ScriptedHost> {
    ScriptedHost::new(move |_, _| {
        let turns = turns.clone();
        async move {
            turns.acquire().await.unwrap().forget();
            Ok(Response::new(text("done")))
        }
    })
}

async fn world(config: Config, turns: &Arc<Semaphore>) -> (TestGateway, Arc<ScriptedHost>) {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let host = held(turns.clone());
    (TestGateway::with(api, config, Arc::default(), Some(host.clone())).await, host)
}

async fn running(host: &ScriptedHost, count: usize) {
    eventually(|| async { host.running.load(std::sync::atomic::Ordering::SeqCst) == count }).await;
}

#[tokio::test]
async fn requests_in_flight_finish() {
    let turns = Arc::new(Semaphore::new(0));
    let (world, host) = world(config(), &turns).await;
    let address = world.address;
    let idle = TcpStream::connect(address).await.unwrap();
    let mut h1 = TcpStream::connect(address).await.unwrap();
    h1.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let h2 = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(h2)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::get("http://a/fn/ns/hello").body(Empty::<Bytes>::new()).unwrap();
    let asking = tokio::spawn(sender.send_request(request));
    running(&host, 2).await;

    let stopping = tokio::spawn(world.shut_down());
    // New connections are refused.
    eventually(|| async { TcpStream::connect(address).await.is_err() }).await;
    turns.add_permits(2);
    let mut answer = String::new();
    h1.read_to_string(&mut answer).await.unwrap();
    assert!(answer.to_ascii_lowercase().contains("connection: close"), "{answer}");
    assert!(answer.ends_with("done"), "{answer}");
    let body = asking.await.unwrap().unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "done");
    // GOAWAY ended the connection cleanly.
    connection.await.unwrap().unwrap();
    assert_eq!(stopping.await.unwrap(), Drained::Clean);
    drop(idle);
}

#[tokio::test]
async fn what_does_not_finish_is_cut() {
    let turns = Arc::new(Semaphore::new(0));
    let config = Config { drain_timeout: Duration::from_millis(100), ..config() };
    let (world, host) = world(config, &turns).await;
    let mut h1 = TcpStream::connect(world.address).await.unwrap();
    h1.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let h2 = TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(h2)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://a/fn/ns/hello").body(Empty::<Bytes>::new()).unwrap();
    let asking = tokio::spawn(sender.send_request(request));
    running(&host, 2).await;
    assert_eq!(world.shut_down().await, Drained::Cut);
    // The guests were cancelled with their requests.
    running(&host, 0).await;
    assert!(asking.await.unwrap().is_err());
    let mut rest = String::new();
    h1.read_to_string(&mut rest).await.unwrap_or_default();
    assert_eq!(rest, "");
}
