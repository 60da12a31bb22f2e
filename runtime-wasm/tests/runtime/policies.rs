//! NetworkPolicies for the connections of functions and of pods, with sockets of the loopback network.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use crate::{
    pods::{ANSWERS, served, serving},
    support::{text::handler, *},
};
use async_trait::async_trait;
use mayfly_api::wellknown::{LABEL_FUNCTION, LABEL_REVISION};
use mayfly_runtime::{ConnectionPolicy, OutboundRoute, PodIdentity, Runtime as _};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

type Route = Box<dyn Fn(SocketAddr, &[SocketAddr]) -> OutboundRoute + Send>;

/// Policies that a test sets, and the sides of the connections that they were asked about.
#[derive(Default)]
struct TestPolicies {
    generation: Mutex<u64>,
    admitted: Mutex<Vec<IpAddr>>,
    route: Mutex<Option<Route>>,
    clients: Mutex<Vec<PodIdentity>>,
    servers: Mutex<Vec<(PodIdentity, u16)>>,
}

impl TestPolicies {
    fn attached_to(fixture: &WasmHostFixture) -> Arc<Self> {
        let policies = Arc::<Self>::default();
        fixture.host.attach_policies(policies.clone());
        policies
    }

    fn admit(&self, clients: &[Ipv4Addr]) {
        *self.admitted.lock() = clients.iter().map(|client| IpAddr::V4(*client)).collect();
    }

    fn route_by(&self, route: impl Fn(SocketAddr, &[SocketAddr]) -> OutboundRoute + Send + 'static) {
        *self.route.lock() = Some(Box::new(route));
        *self.generation.lock() += 1;
    }
}

#[async_trait]
impl ConnectionPolicy for TestPolicies {
    fn generation(&self, _: &str) -> u64 {
        *self.generation.lock()
    }

    async fn route(&self, from: &PodIdentity, to: SocketAddr, tried: &[SocketAddr]) -> OutboundRoute {
        self.clients.lock().push(from.clone());
        self.route.lock().as_ref().map_or(OutboundRoute::To(to), |route| route(to, tried))
    }

    async fn admits(&self, to: &PodIdentity, port: u16, from: IpAddr) -> bool {
        self.servers.lock().push((to.clone(), port));
        self.admitted.lock().contains(&from)
    }
}

async fn connect(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

/// Whether a connection is closed without an answer.
async fn is_refused(mut stream: TcpStream) -> bool {
    // The pod may have closed it before.
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut [0; 15])).await;
    matches!(read.expect("neither an answer nor an end"), Ok(0) | Err(_))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_accepts_the_clients_that_policies_admit() {
    let fixture = WasmHostFixture::new();
    let policies = TestPolicies::attached_to(&fixture);
    let (pod, address) = serving(&fixture, handler(ANSWERS)).await;
    let [friend, stranger] = [Ipv4Addr::new(127, 93, 0, 1), Ipv4Addr::new(127, 93, 0, 2)];
    policies.admit(&[friend]);
    let mut open = served(connect(friend, address).await).await;
    assert!(is_refused(connect(stranger, address).await).await);
    // A change counts for the next connection; one that is open continues.
    policies.admit(&[stranger]);
    served(connect(stranger, address).await).await;
    assert!(is_refused(connect(friend, address).await).await);
    open.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut rest = [0; 4096];
    assert!(open.read(&mut rest).await.unwrap() > 0);
    let (identity, port) = policies.servers.lock()[0].clone();
    assert_eq!((identity.address, port), (Some(address.ip()), address.port()));
    assert!(identity.name.is_some_and(|name| name.starts_with("pod-")), "a pod, by its name");
    fixture.host.stop_container(&pod.spec.id, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_reach_what_policies_allow() {
    let component = guest!("proxy");
    let fixture = WasmHostFixture::new();
    let policies = TestPolicies::attached_to(&fixture);
    let (_pod, upstream) = serving(&fixture, handler(ANSWERS)).await;
    policies.admit(&[Ipv4Addr::LOCALHOST]);
    let function =
        fixture.function(component, |spec| spec.egress = vec!["http://127.0.0.1:81".parse().unwrap()]).await;
    let asked = async || ask(&function, "/?url=http://127.0.0.1:81/").await;

    // The endpoint that was chosen; another one, since the first refuses.
    let refusing = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    policies.route_by(move |_, tried| OutboundRoute::To(if tried.is_empty() { refusing } else { upstream }));
    assert_eq!(asked().await.0.as_u16(), 200);
    let client = policies.clients.lock().pop().unwrap();
    assert_eq!((client.namespace.as_str(), client.name, client.address), ("default", None, None));
    assert_eq!(client.labels[LABEL_FUNCTION], "f");
    assert_eq!(client.labels[LABEL_REVISION], "f-00001");

    // A pooled connection is not used any more when the policies have changed.
    policies.route_by(|_, _| OutboundRoute::Forbidden);
    let (status, body) = asked().await;
    assert!(status == 502 && body.contains("Denied"), "{status} {body}");
    let log = fixture.log("f");
    assert!(log.contains("NetworkPolicies do not allow the connection"), "{log}");
    policies.route_by(|_, _| OutboundRoute::NoEndpoint);
    let (status, body) = asked().await;
    assert!(status == 502 && !body.contains("Denied"), "{status} {body}");
    policies.route_by(move |_, _| OutboundRoute::To(upstream));
    assert_eq!(asked().await.0.as_u16(), 200);
    // Three endpoints at most.
    let attempts = Arc::new(Mutex::new(0));
    let counted = attempts.clone();
    policies.route_by(move |_, _| {
        *counted.lock() += 1;
        OutboundRoute::To(refusing)
    });
    assert_eq!(asked().await.0.as_u16(), 502);
    assert_eq!(*attempts.lock(), 3);
}
