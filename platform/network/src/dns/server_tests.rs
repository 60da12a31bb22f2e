use std::net::Ipv4Addr;

use mayfly_api::ObjectKey;
use simple_dns::{
    CLASS, Name, Packet, PacketFlag, QTYPE, ResourceRecord, TYPE,
    rdata::{A, OPT, RData},
};

use super::{
    super::records::{EndpointRecord, ServiceRecords, ServiceTarget},
    *,
};

/// The timeout of any wait.
const PATIENCE: Duration = Duration::from_secs(10);

fn query(name: &str, kind: TYPE, payload: Option<u16>) -> Vec<u8> {
    let mut packet = Packet::new_query(7);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = Name::new(name).unwrap();
    packet.questions.push(simple_dns::Question::new(name, QTYPE::TYPE(kind), CLASS::IN.into(), false));
    *packet.opt_mut() = payload.map(|size| OPT { opt_codes: vec![], udp_packet_size: size, version: 0 });
    packet.build_bytes_vec().unwrap()
}

/// A name server on loopback sockets that forwards to `upstream`. It stops when the guard is dropped.
async fn serve(upstream: &str) -> (SocketAddr, SocketAddr, tokio_util::sync::DropGuard, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("resolv.conf");
    std::fs::write(&file, upstream).unwrap();
    let mut zone = zone();
    zone.complete();
    let server = NameServer::new(Arc::new(RwLock::new(zone)), Forwarder::new(file));
    let (udp, tcp) = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (udp_address, tcp_address) = (udp.local_addr().unwrap(), tcp.local_addr().unwrap());
    let stop = CancellationToken::new();
    tokio::spawn(server.serve(udp, tcp, stop.clone()));
    (udp_address, tcp_address, stop.drop_guard(), folder)
}

/// A zone with Services of each kind, not yet complete.
fn zone() -> Zone {
    let mut zone = Zone::new("cluster.local");
    let endpoint = |number: u8| EndpointRecord {
        address: Ipv4Addr::from([10, 0, 0, number]).into(),
        hostname: None,
        ports: Vec::new(),
    };
    let many = ServiceTarget::Endpoints((1..=200).map(endpoint).collect());
    for (name, target) in [
        ("web", ServiceTarget::ClusterIps(vec![Ipv4Addr::new(10, 96, 0, 7).into()])),
        ("many", many),
        ("away", ServiceTarget::ExternalName("www.example.com".into())),
        ("near", ServiceTarget::ExternalName("web.shop.svc.cluster.local".into())),
        ("loop", ServiceTarget::ExternalName("loop.shop.svc.cluster.local".into())),
    ] {
        zone.set(&ObjectKey::new("shop", name), Some(ServiceRecords { target, ports: Vec::new() }));
    }
    zone
}

async fn ask_udp(server: SocketAddr, query: &[u8]) -> Vec<u8> {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(query, server).await.unwrap();
    let mut answer = vec![0; 4096];
    let (length, _) = timeout(PATIENCE, socket.recv_from(&mut answer)).await.unwrap().unwrap();
    answer.truncate(length);
    answer
}

async fn ask_tcp(server: SocketAddr, query: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server).await.unwrap();
    write_message(&mut stream, query).await.unwrap();
    timeout(PATIENCE, read_message(&mut stream)).await.unwrap().unwrap()
}

#[tokio::test]
async fn the_zone_is_served_over_both_transports() {
    let (udp, tcp, _stop, _folder) = serve("").await;
    let asked = query("Web.shop.svc.cluster.local", TYPE::A, None);
    for bytes in [ask_udp(udp, &asked).await, ask_tcp(tcp, &asked).await] {
        let answer = Packet::parse(&bytes).unwrap();
        assert_eq!((answer.id(), answer.rcode(), answer.answers.len()), (7, RCODE::NoError, 1));
        assert!(answer.has_flags(PacketFlag::RESPONSE | PacketFlag::AUTHORITATIVE_ANSWER));
        assert!(answer.has_flags(PacketFlag::RECURSION_DESIRED | PacketFlag::RECURSION_AVAILABLE));
        assert_eq!(
            answer.questions[0].qname.to_string(),
            "Web.shop.svc.cluster.local",
            "in the query's letters"
        );
        assert_eq!(answer.answers[0].rdata, RData::A(A::from(Ipv4Addr::new(10, 96, 0, 7))));
        assert_eq!(answer.answers[0].ttl, 5);
    }
    // Negative answers have the SOA record of the zone.
    for (name, code) in
        [("no.shop.svc.cluster.local", RCODE::NameError), ("shop.svc.cluster.local", RCODE::NoError)]
    {
        let bytes = ask_udp(udp, &query(name, TYPE::A, None)).await;
        let answer = Packet::parse(&bytes).unwrap();
        assert_eq!((answer.rcode(), answer.answers.len(), answer.name_servers.len()), (code, 0, 1), "{name}");
        assert!(matches!(answer.name_servers[0].rdata, RData::SOA(_)));
    }
}

#[tokio::test]
async fn answers_keep_to_the_clients_limit() {
    let (udp, tcp, _stop, _folder) = serve("").await;
    for (payload, limit) in [(None, 512), (Some(4096), 1232)] {
        let asked = query("many.shop.svc.cluster.local", TYPE::A, payload);
        let short = ask_udp(udp, &asked).await;
        assert!(short.len() <= limit && Packet::parse(&short).unwrap().has_flags(PacketFlag::TRUNCATION));
        // Another address would take 16 bytes.
        assert!(short.len() + 16 > limit, "{} of {limit} bytes are used", short.len());
        let whole = ask_tcp(tcp, &asked).await;
        assert_eq!(Packet::parse(&whole).unwrap().answers.len(), 200);
    }
}

#[tokio::test]
async fn a_client_with_many_connections_leaves_some_to_others() {
    let (_udp, tcp, _stop, _folder) = serve("").await;
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS_MAX + 8 {
        held.push(TcpStream::connect(tcp).await.unwrap());
    }
    let other = tokio::net::TcpSocket::new_v4().unwrap();
    other.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut stream = other.connect(tcp).await.unwrap();
    write_message(&mut stream, &query("web.shop.svc.cluster.local", TYPE::A, None)).await.unwrap();
    // Before the idle connections of the other client are closed.
    let answer = timeout(CONNECTION_IDLE / 2, read_message(&mut stream)).await.unwrap().unwrap();
    assert_eq!(Packet::parse(&answer).unwrap().answers.len(), 1);
}

#[tokio::test]
async fn aliases_are_followed() {
    let (udp, _tcp, _stop, _folder) = serve("").await;
    let bytes = ask_udp(udp, &query("near.shop.svc.cluster.local", TYPE::A, None)).await;
    let answer = Packet::parse(&bytes).unwrap();
    assert!(
        matches!(answer.answers[0].rdata, RData::CNAME(_)) && matches!(answer.answers[1].rdata, RData::A(_))
    );
    let bytes = ask_udp(udp, &query("loop.shop.svc.cluster.local", TYPE::A, None)).await;
    assert_eq!(Packet::parse(&bytes).unwrap().rcode(), RCODE::ServerFailure);
}

#[tokio::test]
async fn what_is_no_query_is_refused_or_dropped() {
    let (udp, _tcp, _stop, _folder) = serve("").await;
    let good = query("web.shop.svc.cluster.local", TYPE::A, None);
    let changed = |at: usize, to: u8| {
        let mut query = good.clone();
        query[at] = to;
        query
    };
    for (message, code) in [
        (changed(2, 0x28), RCODE::NotImplemented),
        (changed(5, 2), RCODE::FormatError),
        (changed(12, 0xc0), RCODE::FormatError),
        (changed(good.len() - 1, 3), RCODE::Refused),
        // Unknown types have no records.
        (changed(good.len() - 4, 0xfe), RCODE::NoError),
        // No name server to forward to.
        (query("example.com", TYPE::A, None), RCODE::ServerFailure),
    ] {
        let answer = ask_udp(udp, &message).await;
        assert_eq!(answer[..2], message[..2]);
        assert_eq!(answer[3] & 0xf, code as u8, "{code:?}");
        assert_eq!(answer[6..8], [0, 0], "no answers");
    }
    // An answer and a truncated message get no reply: the next reply belongs to the next query.
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for message in [changed(2, 0x80), vec![1, 2, 3], good.clone()] {
        socket.send_to(&message, udp).await.unwrap();
    }
    let mut answer = [0; 512];
    let (length, _) = timeout(PATIENCE, socket.recv_from(&mut answer)).await.unwrap().unwrap();
    assert_eq!(Packet::parse(&answer[..length]).unwrap().answers.len(), 1);
    assert_eq!(socket.try_recv(&mut answer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// A name server on port 53 of a loopback address that answers every query with one address, and counts queries.
async fn upstream(address: &str) -> io::Result<tokio::sync::watch::Receiver<u32>> {
    let socket = UdpSocket::bind((address, 53)).await?;
    let (count, counted) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        let mut datagram = [0; 512];
        while let Ok((length, client)) = socket.recv_from(&mut datagram).await {
            let query = Packet::parse(&datagram[..length]).unwrap();
            let mut answer = Packet::new_reply(query.id());
            answer.questions.clone_from(&query.questions);
            let name = query.questions[0].qname.clone();
            answer.answers.push(ResourceRecord::new(
                name,
                CLASS::IN,
                60,
                RData::A(A::from(Ipv4Addr::new(192, 0, 2, 1))),
            ));
            let bytes = answer.build_bytes_vec().unwrap();
            count.send_modify(|count| *count += 1);
            let _ = socket.send_to(&bytes, client).await;
        }
    });
    Ok(counted)
}

#[tokio::test]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
async fn other_names_are_forwarded_and_kept() {
    // A loopback address that only this test process uses.
    let id = std::process::id();
    let address = format!("127.121.{}.{}", id / 250 % 250, id % 250 + 1);
    let counted = match upstream(&address).await {
        Ok(counted) => counted,
        Err(error) => return println!("SKIPPED other_names_are_forwarded_and_kept: port 53: {error}"),
    };
    let (udp, _tcp, _stop, _folder) = serve(&format!("nameserver {address}\n")).await;
    for (name, asked) in [("Example.com", 1), ("example.COM", 1), ("other.example.com", 2)] {
        let bytes = ask_udp(udp, &query(name, TYPE::A, None)).await;
        let answer = Packet::parse(&bytes).unwrap();
        assert_eq!((answer.id(), answer.answers.len()), (7, 1));
        assert_eq!(answer.questions[0].qname.to_string(), name);
        assert_eq!(*counted.borrow(), asked, "{name}");
    }
    // A server that does not answer is asked once only.
    let silent = UdpSocket::bind((format!("127.122.{}.{}", id / 250 % 250, id % 250 + 1).as_str(), 53)).await;
    let silent = silent.unwrap();
    let both = format!("nameserver {}\nnameserver {address}\n", silent.local_addr().unwrap().ip());
    let (second, _tcp, _stop, _folder) = serve(&both).await;
    for name in ["a.example.com", "b.example.com", "c.example.com"] {
        let bytes = ask_udp(second, &query(name, TYPE::A, None)).await;
        assert_eq!(Packet::parse(&bytes).unwrap().answers.len(), 1, "{name}");
    }
    let mut datagram = [0; 512];
    silent.try_recv(&mut datagram).unwrap();
    assert_eq!(silent.try_recv(&mut datagram).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let bytes = ask_udp(udp, &query("away.shop.svc.cluster.local", TYPE::A, None)).await;
    let answer = Packet::parse(&bytes).unwrap();
    assert_eq!(answer.questions[0].qname.to_string(), "away.shop.svc.cluster.local");
    assert!(
        matches!(answer.answers[0].rdata, RData::CNAME(_)) && matches!(answer.answers[1].rdata, RData::A(_))
    );
}

#[tokio::test(start_paused = true)]
async fn no_name_is_denied_before_the_zone_is_complete() {
    let zone = Arc::new(RwLock::new(zone()));
    let (complete, is_complete) = watch::channel(false);
    let server = NameServer::new(zone.clone(), Forwarder::new("/dev/null")).after(is_complete);
    let (udp, tcp) = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = udp.local_addr().unwrap();
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(address).await.unwrap();
    let late = query("late.shop.svc.cluster.local", TYPE::A, None);
    client.send(&late).await.unwrap();
    tokio::spawn(server.serve(udp, tcp, stop));
    // A query that arrives before is answered afterwards, from the complete zone.
    let mut answer = [0; 512];
    let early = timeout(RECORDS_WAIT_MAX / 2, client.recv(&mut answer)).await;
    assert!(early.is_err(), "answered before the zone was complete");
    let target = ServiceTarget::ClusterIps(vec![Ipv4Addr::new(10, 96, 0, 8).into()]);
    zone.write().set(&ObjectKey::new("shop", "late"), Some(ServiceRecords { target, ports: Vec::new() }));
    zone.write().complete();
    complete.send_replace(true);
    let length = client.recv(&mut answer).await.unwrap();
    assert_eq!(Packet::parse(&answer[..length]).unwrap().answers.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn names_fail_while_the_zone_stays_incomplete() {
    let (_complete, is_complete) = watch::channel(false);
    let server =
        NameServer::new(Arc::new(RwLock::new(zone())), Forwarder::new("/dev/null")).after(is_complete);
    let (udp, tcp) = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = udp.local_addr().unwrap();
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    tokio::spawn(server.serve(udp, tcp, stop));
    for (name, code) in [
        ("late.shop.svc.cluster.local", RCODE::ServerFailure),
        ("web.shop.svc.cluster.local", RCODE::NoError),
    ] {
        let bytes = ask_udp(address, &query(name, TYPE::A, None)).await;
        assert_eq!(Packet::parse(&bytes).unwrap().rcode(), code, "{name}");
    }
}
