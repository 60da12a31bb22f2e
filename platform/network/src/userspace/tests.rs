use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::plan::ServicePortName;

/// The timeout of any wait.
const PATIENCE: Duration = Duration::from_secs(10);

fn backend(endpoint: SocketAddr) -> Backend {
    let service = ServicePortName { namespace: String::new(), service: String::new(), port: String::new() };
    let (endpoints, source_ranges) = (vec![endpoint], Vec::new());
    Backend {
        service,
        endpoints,
        affinity: None,
        masquerade: false,
        inside_endpoints: None,
        drops: false,
        source_ranges,
    }
}

#[test]
fn clients_of_this_node_have_endpoints_of_their_own() {
    let (here, there) = (SocketAddr::from(([10, 0, 0, 1], 80)), SocketAddr::from(([10, 0, 0, 2], 80)));
    let backend = Backend { inside_endpoints: Some(vec![here, there]), ..backend(here) };
    for (from, to, expected) in [
        ("127.0.0.1", "127.0.0.1", 2),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", 2),
        ("192.0.2.1", "192.0.2.1", 2),
        ("192.0.2.9", "192.0.2.1", 1),
    ] {
        let client = FrontendClient::new(from.parse().unwrap(), to.parse().ok());
        assert_eq!(client.endpoints(&backend).len(), expected, "{from} to {to}");
    }
}

#[tokio::test]
async fn frontends_that_only_listen_take_no_places() {
    let pod = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = pod.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = pod.accept().await {
            stream.write_all(b"hi").await.unwrap();
        }
    });
    // A loopback address that only this test process uses.
    let id = std::process::id();
    let part = |number: u32| u8::try_from(number % 250 + 1).unwrap();
    let address = IpAddr::from([127, 123, part(id / 250), part(id)]);
    let addresses = [4_001, 4_002].map(|port| SocketAddr::new(address, port));
    let frontend = |address| (Frontend::Address(TransportProtocol::Tcp, address), backend(endpoint));
    let rules = RuleSet { frontends: addresses.map(frontend).into(), ..RuleSet::default() };
    let connections = Arc::new(Semaphore::new(1));
    let mut proxy = UserspaceProxy { connections, ..UserspaceProxy::new(address) };
    assert!(proxy.apply(&rules).await.is_empty());
    for address in [addresses[0], addresses[0], addresses[1], addresses[1]] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
        assert_eq!(answer, "hi", "{address}");
    }
}

#[tokio::test]
async fn a_new_udp_client_replaces_the_most_silent_one() {
    let pod = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let endpoint = pod.local_addr().unwrap();
    tokio::spawn(async move {
        let mut datagram = [0; 16];
        while let Ok((bytes, client)) = pod.recv_from(&mut datagram).await {
            pod.send_to(&datagram[..bytes], client).await.unwrap();
        }
    });
    let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let address = socket.local_addr().unwrap();
    let (_sender, backend) = watch::channel(Arc::new(backend(endpoint)));
    let clients = UdpClients::default();
    let front =
        UdpFrontend { backend, chooser: Arc::default(), socket, clients_max: 2, clients: clients.clone() };
    let stop = CancellationToken::new();
    let serving = tokio::spawn(front.run(stop.clone()));
    let mut sockets = Vec::new();
    for _ in 0..3 {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(address).await.unwrap();
        sockets.push(socket);
    }
    for number in [0, 1, 0, 2, 0, 1] {
        sockets[number].send(&[7]).await.unwrap();
        let mut answer = [0; 16];
        let answered = timeout(PATIENCE, sockets[number].recv(&mut answer)).await;
        assert_eq!(answered.expect("an answer").unwrap(), 1, "client {number}");
        assert!(clients.lock().len() <= 2);
        assert!(number != 2 || clients.lock().contains_key(&sockets[0].local_addr().unwrap()));
    }
    stop.cancel();
    serving.await.unwrap();
}

#[test]
fn source_ranges_admit_the_clients_they_contain() {
    let service = ServicePortName { namespace: String::new(), service: String::new(), port: String::new() };
    for (ranges, client, expected) in [
        (&[][..], "192.0.2.1", true),
        (&["192.0.2.0/24"], "192.0.2.1", true),
        (&["192.0.2.0/24"], "192.0.3.1", false),
        (&["192.0.2.0/24"], "::ffff:192.0.2.1", true),
        (&["192.0.2.0/24"], "2001:db8::1", false),
        (&["192.0.2.0/24", "2001:db8::/32"], "2001:db8::1", true),
        (&["0.0.0.0/0"], "203.0.113.9", true),
        (&["not a range"], "192.0.2.1", false),
    ] {
        let backend = Backend {
            service: service.clone(),
            endpoints: Vec::new(),
            affinity: None,
            masquerade: false,
            inside_endpoints: None,
            drops: false,
            source_ranges: ranges.iter().map(|range| (*range).to_owned()).collect(),
        };
        assert_eq!(admits_client(&backend, client.parse().unwrap()), expected, "{client} in {ranges:?}");
    }
}
