//! One suite for both proxies: the userspace proxy on loopback addresses, nftables in a network namespace that ends
//! with the test's process.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    net::SocketAddr,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use mayfly_network::{
    Backend, Frontend, RuleSet, ServicePortName, TransportProtocol, nftables::NftablesProxy,
    userspace::UserspaceProxy,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    time::timeout,
};

/// The timeout of any wait.
const PATIENCE: Duration = Duration::from_secs(20);
const NODE_PORT: u16 = 30_080;
/// The number of connections through one Service while its endpoints change, and the number of clients.
const CONNECTIONS: usize = 10_000;
const CLIENTS: usize = 20;
const CHANGE_INTERVAL: Duration = Duration::from_millis(10);

enum Proxy {
    Userspace(UserspaceProxy),
    Nftables(NftablesProxy),
}

impl Proxy {
    async fn apply(&mut self, rules: &RuleSet) {
        match self {
            Self::Userspace(proxy) => assert!(proxy.apply(rules).await.is_empty()),
            Self::Nftables(proxy) => {
                let rules = Arc::new(rules.clone());
                assert!(!proxy.apply(&rules).await.unwrap(), "nobody else changed them");
            }
        }
    }
}

/// The addresses of a scenario.
struct Addresses {
    service: SocketAddr,
    other: SocketAddr,
    node: SocketAddr,
    pods: [SocketAddr; 2],
    /// The range that contains the test's own address.
    clients: &'static str,
}

fn backend(endpoints: &[SocketAddr], affinity: Option<Duration>) -> Backend {
    let name = ["shop", "web", ""].map(str::to_owned);
    let [namespace, service, port] = name;
    let service = ServicePortName { namespace, service, port };
    let endpoints = endpoints.to_vec();
    Backend {
        service,
        endpoints,
        affinity,
        masquerade: false,
        inside_endpoints: None,
        drops: false,
        source_ranges: Vec::new(),
    }
}

fn rules(of: impl IntoIterator<Item = (Frontend, Backend)>) -> RuleSet {
    RuleSet { frontends: BTreeMap::from_iter(of), health_checks: BTreeMap::new() }
}

/// A pod: answers every TCP connection and every datagram with its own address.
async fn pod(address: SocketAddr) {
    let listener = TcpListener::bind(address).await.unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(address.to_string().as_bytes()).await;
        }
    });
    let socket = UdpSocket::bind(address).await.unwrap();
    tokio::spawn(async move {
        let mut datagram = [0; 64];
        while let Ok((_, client)) = socket.recv_from(&mut datagram).await {
            let _ = socket.send_to(address.to_string().as_bytes(), client).await;
        }
    });
}

async fn ask(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = timeout(PATIENCE, TcpStream::connect(address)).await.expect("connected or refused")?;
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer")?;
    Ok(answer)
}

/// A connected socket of the address's family.
async fn udp_client(address: SocketAddr) -> UdpSocket {
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).await.unwrap();
    socket.connect(address).await.unwrap();
    socket
}

async fn ask_udp(address: SocketAddr) -> String {
    let began = Instant::now();
    loop {
        // Datagrams may be lost while rules change.
        let socket = udp_client(address).await;
        socket.send(b"?").await.unwrap();
        let mut answer = [0; 64];
        if let Ok(Ok(bytes)) = timeout(Duration::from_millis(500), socket.recv(&mut answer)).await {
            return String::from_utf8_lossy(&answer[..bytes]).into_owned();
        }
        assert!(began.elapsed() < PATIENCE, "no answer over UDP");
    }
}

/// Whether neither a connection nor a datagram gets an answer.
async fn kept_out(address: SocketAddr) -> bool {
    let silence = Duration::from_millis(700);
    let tcp = async {
        let mut answer = String::new();
        let mut stream = TcpStream::connect(address).await?;
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    if let Ok(Ok(answer)) = timeout(silence, tcp).await
        && !answer.is_empty()
    {
        return false;
    }
    let socket = udp_client(address).await;
    if let Err(error) = socket.send(b"?").await {
        // The kernel reports the dropped packet to a local sender.
        return error.kind() == ErrorKind::PermissionDenied;
    }
    !matches!(timeout(silence, socket.recv(&mut [0; 64])).await, Ok(Ok(_)))
}

/// The answers of many connections.
async fn answers(address: SocketAddr) -> BTreeSet<String> {
    let mut answers = BTreeSet::new();
    for _ in 0..64 {
        answers.insert(ask(address).await.unwrap());
    }
    answers
}

async fn refused(address: SocketAddr) -> bool {
    let began = Instant::now();
    // A stopped listener closes soon, but not at once.
    while began.elapsed() < PATIENCE {
        match ask(address).await {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return true,
            _ => tokio::task::yield_now().await,
        }
    }
    false
}

fn texts(addresses: &[SocketAddr]) -> BTreeSet<String> {
    addresses.iter().map(ToString::to_string).collect()
}

async fn scenario(proxy: &mut Proxy, at: Addresses) {
    for address in at.pods {
        pod(address).await;
    }
    let (tcp, udp) = (
        Frontend::Address(TransportProtocol::Tcp, at.service),
        Frontend::Address(TransportProtocol::Udp, at.service),
    );
    let node = Frontend::NodePort(TransportProtocol::Tcp, at.node.port());
    let both = backend(&at.pods, None);

    // Cluster IP and node port, TCP and UDP.
    proxy.apply(&rules([(tcp, both.clone()), (udp, both.clone()), (node, both.clone())])).await;
    assert_eq!(answers(at.service).await, texts(&at.pods));
    assert_eq!(answers(at.node).await, texts(&at.pods));
    assert!(texts(&at.pods).contains(&ask_udp(at.service).await));

    // After the removal of an endpoint, no new connection reaches it.
    let one = backend(&at.pods[1..], None);
    proxy.apply(&rules([(tcp, one.clone()), (udp, one.clone()), (node, one.clone())])).await;
    assert_eq!(answers(at.service).await, texts(&at.pods[1..]));
    assert_eq!(answers(at.node).await, texts(&at.pods[1..]));
    assert_eq!(ask_udp(at.service).await, at.pods[1].to_string());

    udp_clients_move(proxy, &at).await;

    // Source ranges: only clients within them are served.
    let mut limited = one.clone();
    limited.source_ranges = vec!["192.0.2.0/24".to_owned(), "2001:db8::/32".to_owned()];
    proxy.apply(&rules([(tcp, limited.clone()), (udp, limited.clone())])).await;
    assert!(kept_out(at.service).await, "a client outside the range is served");
    limited.source_ranges.push(at.clients.to_owned());
    proxy.apply(&rules([(tcp, limited.clone()), (udp, limited)])).await;
    assert_eq!(ask(at.service).await.unwrap(), at.pods[1].to_string());
    assert_eq!(ask_udp(at.service).await, at.pods[1].to_string());

    // Session affinity.
    let sticky = backend(&at.pods, Some(Duration::from_secs(60)));
    proxy.apply(&rules([(tcp, sticky)])).await;
    assert_eq!(answers(at.service).await.len(), 1);

    // A Service without endpoints refuses its clients, and others are not affected.
    let other = Frontend::Address(TransportProtocol::Tcp, at.other);
    proxy.apply(&rules([(tcp, backend(&[], None)), (node, backend(&[], None)), (other, both.clone())])).await;
    assert!(refused(at.service).await, "the cluster IP");
    assert!(refused(at.node).await, "the node port");
    assert_eq!(answers(at.other).await, texts(&at.pods));

    // A node without endpoints: its own clients use those of other nodes.
    let away = Backend { drops: true, inside_endpoints: Some(at.pods.to_vec()), ..backend(&[], None) };
    proxy.apply(&rules([(tcp, away.clone()), (node, away)])).await;
    assert_eq!(answers(at.service).await, texts(&at.pods));
    assert_eq!(answers(at.node).await, texts(&at.pods));
    if let Proxy::Nftables(_) = proxy {
        proxy.apply(&rules([(tcp, Backend { drops: true, ..backend(&[], None) })])).await;
        let dropped = timeout(Duration::from_millis(500), TcpStream::connect(at.service)).await;
        assert!(dropped.is_err(), "neither answered nor refused: {dropped:?}");
    }

    // Endpoints that change all the time do not fail a single connection.
    for turn in 0..50 {
        let endpoints = if turn % 2 == 0 { &at.pods[..] } else { &at.pods[1..] };
        proxy.apply(&rules([(tcp, backend(endpoints, None))])).await;
        assert!(texts(endpoints).contains(&ask(at.service).await.unwrap()), "turn {turn}");
    }
    connections_while_endpoints_change(proxy, tcp, &at).await;
    proxy.apply(&RuleSet::default()).await;
}

/// Clients that keep sending from one port move to another endpoint when theirs is removed.
async fn udp_clients_move(proxy: &mut Proxy, at: &Addresses) {
    let udp = Frontend::Address(TransportProtocol::Udp, at.service);
    let node = Frontend::NodePort(TransportProtocol::Udp, at.node.port());
    let serve = |endpoints: &[SocketAddr]| {
        let backend = backend(endpoints, None);
        rules([(udp, backend.clone()), (node, backend)])
    };
    proxy.apply(&serve(&at.pods[..1])).await;
    let mut clients = Vec::new();
    for address in [at.service, at.node] {
        let client = udp_client(address).await;
        answered_by(&client, at.pods[0]).await;
        clients.push(client);
    }
    proxy.apply(&serve(&at.pods[1..])).await;
    for client in clients {
        answered_by(&client, at.pods[1]).await;
    }
}

/// Sends until an endpoint answers: a datagram may be lost, and an earlier answer may arrive late.
async fn answered_by(client: &UdpSocket, endpoint: SocketAddr) {
    let (began, mut answer) = (Instant::now(), [0; 64]);
    loop {
        // An error belongs to an earlier, refused datagram.
        let _ = client.send(b"?").await;
        if let Ok(Ok(bytes)) = timeout(Duration::from_millis(200), client.recv(&mut answer)).await
            && answer[..bytes] == *endpoint.to_string().as_bytes()
        {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{endpoint} does not answer");
    }
}

/// Many connections through one Service whose endpoints change all the time: none fails.
async fn connections_while_endpoints_change(proxy: &mut Proxy, service: Frontend, at: &Addresses) {
    proxy.apply(&rules([(service, backend(&at.pods, None))])).await;
    let all = texts(&at.pods);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (address, all) = (at.service, all.clone());
            tokio::spawn(async move {
                for number in 0..CONNECTIONS / CLIENTS {
                    let answer = ask(address).await;
                    assert!(answer.as_ref().is_ok_and(|from| all.contains(from)), "{number}: {answer:?}");
                }
            })
        })
        .collect();
    let mut turns = tokio::time::interval(CHANGE_INTERVAL);
    turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut turn = 0;
    while !clients.iter().all(tokio::task::JoinHandle::is_finished) {
        turns.tick().await;
        turn += 1;
        let endpoints = [&at.pods[..], &at.pods[..1], &at.pods[1..]][turn % 3];
        proxy.apply(&rules([(service, backend(endpoints, None))])).await;
    }
    for client in clients {
        client.await.unwrap();
    }
    assert!(turn > 2, "the endpoints changed while clients connected");
}

#[tokio::test]
async fn services_in_userspace() {
    let at = |text: &str| text.parse().unwrap();
    let mut proxy = Proxy::Userspace(UserspaceProxy::new("127.113.0.1".parse().unwrap()));
    let node = SocketAddr::new("127.113.0.1".parse().unwrap(), NODE_PORT);
    let addresses = Addresses {
        service: at("127.113.0.7:8080"),
        other: at("127.113.0.8:8080"),
        node,
        pods: [at("127.113.1.1:8080"), at("127.113.1.2:8080")],
        clients: "127.0.0.0/8",
    };
    scenario(&mut proxy, addresses).await;
}

#[tokio::test]
async fn an_endpoint_that_refuses_is_replaced_and_a_taken_address_is_reported() {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let (service, up, down) = (at("127.113.2.7:8080"), at("127.113.2.1:8080"), at("127.113.2.2:8080"));
    pod(up).await;
    let mut proxy = UserspaceProxy::new("127.113.2.1".parse().unwrap());
    let wanted = rules([(Frontend::Address(TransportProtocol::Tcp, service), backend(&[up, down], None))]);
    let taken = TcpListener::bind(service).await.unwrap();
    let failed = proxy.apply(&wanted).await;
    assert_eq!(failed.len(), 1);
    assert!(failed[0].to_string().starts_with("shop/web cannot listen on 127.113.2.7:8080"), "{}", failed[0]);
    drop(taken);
    assert!(proxy.apply(&wanted).await.is_empty(), "tried again");
    assert_eq!(answers(service).await, texts(&[up]));
}

/// Runs the test with this name in a new network namespace, which ends with it; returns an error if that is not
/// possible.
fn in_namespace(test: &str) -> Result<(), String> {
    for program in ["nft", "ip"] {
        let found = Command::new(program).arg("-V").output();
        found.map_err(|error| format!("the program {program} cannot be run: {error}"))?;
    }
    let usable = Command::new("unshare").args(["-n", "nft", "list", "tables"]).output();
    let usable = usable.map_err(|error| format!("the program unshare cannot be run: {error}"))?;
    if !usable.status.success() {
        return Err(String::from_utf8_lossy(&usable.stderr).trim().to_owned());
    }
    let mut inside = Command::new("unshare");
    inside.arg("-n").arg(std::env::current_exe().unwrap());
    let status = inside.args(["--exact", test, "--ignored", "--nocapture"]).status().unwrap();
    assert!(status.success(), "{test} failed in its namespace");
    Ok(())
}

#[test]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn services_in_nftables() {
    if let Err(reason) = in_namespace("nftables_scenario") {
        println!("SKIPPED services_in_nftables: {reason}");
    }
}

fn has_ipv6() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|text| text.trim() == "0")
}

/// Creates addresses in the namespace. Fails outside of a new namespace: the host already has the addresses.
fn make_addresses() {
    let ip = |arguments: &str| {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    };
    let addresses = Command::new("ip").args(["-o", "addr", "show"]).output().unwrap();
    let addresses = String::from_utf8_lossy(&addresses.stdout).into_owned();
    assert!(addresses.is_empty(), "this test changes packet filter rules: it runs in a new namespace only");
    ip("link set lo up");
    ip("link add pods type veth peer name outside");
    for address in ["10.0.0.1/24", "10.0.0.2/24", "10.0.0.9/24"] {
        ip(&format!("addr add {address} dev pods"));
    }
    ip("link set pods up");
    ip("link set outside up");
    if has_ipv6() {
        for address in ["fd00::1/64", "fd00::2/64", "fd00::9/64"] {
            ip(&format!("-6 addr add {address} dev pods nodad"));
        }
        ip("-6 route add fd00:10:96::/112 dev pods");
    }
    ip("route add 10.96.0.0/16 dev pods");
}

#[tokio::test]
#[ignore = "the child of services_in_nftables, which runs it in a namespace"]
#[expect(clippy::print_stdout, reason = "the times are for the reader of a run with --nocapture")]
async fn nftables_scenario() {
    make_addresses();
    let at = |text: &str| text.parse().unwrap();
    let addresses = Addresses {
        service: at("10.96.0.7:80"),
        other: at("10.96.0.8:80"),
        node: SocketAddr::new("10.0.0.9".parse().unwrap(), NODE_PORT),
        pods: [at("10.0.0.1:8080"), at("10.0.0.2:8080")],
        clients: "10.0.0.0/24",
    };
    let mut proxy = Proxy::Nftables(NftablesProxy::new("mayfly-test"));
    scenario(&mut proxy, addresses).await;
    if has_ipv6() {
        let addresses = Addresses {
            service: at("[fd00:10:96::7]:80"),
            other: at("[fd00:10:96::8]:80"),
            node: SocketAddr::new("fd00::9".parse().unwrap(), NODE_PORT),
            pods: [at("[fd00::1]:8080"), at("[fd00::2]:8080")],
            clients: "fd00::/64",
        };
        scenario(&mut proxy, addresses).await;
    } else {
        println!("the kernel has no IPv6: its part is left out");
    }

    let (service, endpoint) = (at("10.96.0.7:80"), at("10.0.0.1:8080"));
    damage_is_repaired(service, endpoint).await;
    let pods = "10.0.0.0/24".parse().unwrap();
    let mut proxy = NftablesProxy::new("mayfly-test").masquerading_bridge(Some(pods));

    // Many Services: written at once, then one is changed.
    let many = |services: u16, endpoints: &[SocketAddr]| {
        let frontends = (0..services).map(|number| {
            let [high, low] = number.to_be_bytes();
            let address = SocketAddr::from(([10, 96, high + 1, low], 80));
            (Frontend::Address(TransportProtocol::Tcp, address), backend(&[endpoint], None))
        });
        let mut all = rules(frontends);
        all.frontends.insert(Frontend::Address(TransportProtocol::Tcp, service), backend(endpoints, None));
        Arc::new(all)
    };
    let began = Instant::now();
    proxy.apply(&many(10_000, &[endpoint])).await.unwrap();
    let all = began.elapsed();
    let began = Instant::now();
    proxy.apply(&many(10_000, &[at("10.0.0.2:8080")])).await.unwrap();
    println!("10,000 services: {all:?}, one change among them: {:?}", began.elapsed());
    assert_eq!(ask(service).await.unwrap(), "10.0.0.2:8080");
    assert_eq!(ask(at("10.96.40.15:80")).await.unwrap(), endpoint.to_string());

    // All are deleted at once, and none of their chains stays in the kernel.
    let nothing = Arc::new(RuleSet::default());
    let began = Instant::now();
    proxy.apply(&nothing).await.unwrap();
    println!("10,000 services deleted: {:?}", began.elapsed());
    let unreachable = timeout(Duration::from_millis(300), TcpStream::connect(service)).await;
    assert!(!matches!(unreachable, Ok(Ok(_))), "a deleted service answers");
    let chains = || {
        let listed = Command::new("nft").args(["list", "table", "ip", "mayfly-test"]).output().unwrap();
        String::from_utf8_lossy(&listed.stdout).matches("\n\tchain ").count()
    };
    while chains() > 10 {
        assert!(began.elapsed() < PATIENCE, "{} chains are left", chains());
        proxy.apply(&nothing).await.unwrap();
    }
    proxy.remove().await.unwrap();
    let tables = Command::new("nft").args(["list", "tables"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&tables.stdout).matches("mayfly").count(), 0);
}

/// Rules that another program removed are restored, with the next change and without any.
async fn damage_is_repaired(service: SocketAddr, endpoint: SocketAddr) {
    let wanted = |affinity| {
        Arc::new(rules([(
            Frontend::Address(TransportProtocol::Tcp, service),
            backend(&[endpoint], affinity),
        )]))
    };
    let mut proxy = NftablesProxy::new("mayfly-test");
    let same = wanted(None);
    proxy.apply(&same).await.unwrap();
    assert!(!proxy.apply(&same).await.unwrap(), "nothing was changed");
    for (damage, next) in [
        ("flush ruleset", &same),
        ("delete table ip6 mayfly-test", &same),
        ("flush table ip mayfly-test", &same),
        ("flush map ip mayfly-test service-ips", &same),
        ("flush chain ip mayfly-test nat-output", &same),
        ("flush ruleset", &wanted(Some(PATIENCE))),
    ] {
        assert!(Command::new("nft").args(damage.split(' ')).status().unwrap().success(), "{damage}");
        assert!(proxy.apply(next).await.unwrap(), "{damage} is noticed");
        assert_eq!(ask(service).await.unwrap(), endpoint.to_string(), "after {damage}");
    }
    // A change to another program's tables needs no repair.
    assert!(Command::new("nft").args(["add", "table", "ip", "other"]).status().unwrap().success());
    assert!(!proxy.apply(&wanted(Some(PATIENCE))).await.unwrap());
    assert!(Command::new("nft").args(["delete", "table", "ip", "other"]).status().unwrap().success());
}
