//! NetworkPolicies in the kernel: nine pods, network namespaces on one bridge, send datagrams to each other under each
//! policy; those that arrive are compared with the policy. Everything is in a namespace that ends with the test's
//! process.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use mayfly_network::policy::{PolicyRules, PolicyTables};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

use policy_cases::{Allowed, MatrixPod, PORTS, cases, rules};

mod policy_cases;

/// The timeout of any wait.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of policy replacements under traffic, and of datagrams in flight at a time.
const POLICY_CHANGES: usize = 200;
const BATCH: usize = 20;
const TCP_PORT: u16 = 80;
const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 254);
/// Whether rules of the IP layer see packets between the ports of a bridge.
const BRIDGE_FILTER: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";

/// A pod: its sockets live in a separate network namespace, which ends with them.
struct TestPod {
    pod: MatrixPod,
    servers: Vec<UdpSocket>,
    client: UdpSocket,
    tcp: TcpListener,
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// A network namespace on the bridge, with a pod's sockets in it.
fn make_pod(number: usize, pod: MatrixPod) -> TestPod {
    let address = pod.address;
    let (made, is_made) = mpsc::sync_channel(1);
    let (connected, is_connected) = mpsc::sync_channel(1);
    let inside = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let thread = std::fs::read_link("/proc/thread-self").unwrap();
        made.send(thread.file_name().unwrap().to_string_lossy().into_owned()).unwrap();
        is_connected.recv().unwrap();
        ip("link set lo up");
        ip(&format!("addr add {address}/24 dev eth{number}"));
        ip(&format!("link set eth{number} up"));
        let bind = |port| {
            let socket = UdpSocket::bind((address, port)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let servers = PORTS.map(bind).into();
        let tcp = TcpListener::bind((address, TCP_PORT)).unwrap();
        TestPod { pod, servers, client: bind(0), tcp }
    });
    let thread = is_made.recv().unwrap();
    ip(&format!("link add port{number} type veth peer name eth{number}"));
    ip(&format!("link set eth{number} netns {thread}"));
    ip(&format!("link set port{number} master br0"));
    ip(&format!("link set port{number} up"));
    connected.send(()).unwrap();
    inside.join().unwrap()
}

struct PodMatrix {
    pods: Vec<TestPod>,
    host: UdpSocket,
}

impl PodMatrix {
    fn create() -> Self {
        let links = Command::new("ip").args(["-o", "addr", "show"]).output().unwrap();
        assert!(links.stdout.is_empty(), "this test changes the network: it runs in a new namespace only");
        ip("link set lo up");
        ip("link add br0 type bridge");
        ip(&format!("addr add {HOST}/24 dev br0"));
        ip("link set br0 up");
        let pods = MatrixPod::all().into_iter().enumerate().map(|(number, pod)| make_pod(number, pod));
        Self { pods: pods.collect(), host: UdpSocket::bind((HOST, 0)).unwrap() }
    }

    /// Sends one datagram from each pod to each port of each pod, and returns those that arrived before the host's own.
    fn round(&self, number: u32) -> BTreeSet<String> {
        for from in &self.pods {
            for to in &self.pods {
                for port in PORTS {
                    let text = format!("{number} {} -> {}:{port}", from.pod.id(), to.pod.id());
                    // The kernel may report a dropped packet to the sender.
                    let _ = from.client.send_to(text.as_bytes(), (to.pod.address, port));
                }
            }
        }
        let mut arrived = BTreeSet::new();
        for to in &self.pods {
            for server in &to.servers {
                let end = format!("{number} end");
                self.host.send_to(end.as_bytes(), server.local_addr().unwrap()).unwrap();
                let began = Instant::now();
                let mut datagram = [0; 128];
                loop {
                    match server.recv(&mut datagram) {
                        Ok(bytes) if datagram[..bytes] == *end.as_bytes() => break,
                        Ok(bytes) => {
                            let text = String::from_utf8_lossy(&datagram[..bytes]);
                            // A late datagram of an earlier round is checked as well.
                            let (_, pair) = text.split_once(' ').unwrap();
                            if pair != "end" {
                                arrived.insert(pair.to_owned());
                            }
                        }
                        Err(_) => {
                            assert!(began.elapsed() < PATIENCE, "the host does not reach {}", to.pod.id());
                            std::thread::yield_now();
                        }
                    }
                }
            }
        }
        arrived
    }

    /// Probes every pair: all expected datagrams arrive within two rounds, and no other ever does.
    fn probe(&self, policy: &str, is_allowed: Allowed) {
        let mut expected = BTreeSet::new();
        for from in &self.pods {
            for to in &self.pods {
                for port in PORTS {
                    // A pod can always reach itself.
                    if from.pod.address == to.pod.address || is_allowed(&from.pod, &to.pod, port) {
                        expected.insert(format!("{} -> {}:{port}", from.pod.id(), to.pod.id()));
                    }
                }
            }
        }
        let (began, mut complete) = (Instant::now(), 0);
        for number in 0.. {
            let arrived = self.round(number);
            let wrong: Vec<_> = arrived.difference(&expected).collect();
            assert!(wrong.is_empty(), "{policy}: {wrong:?} arrived, though the policy forbids it");
            complete += u32::from(arrived == expected);
            if complete == 2 {
                return;
            }
            let missing: Vec<_> = expected.difference(&arrived).collect();
            assert!(began.elapsed() < PATIENCE, "{policy}: {missing:?} did not arrive");
        }
    }

    fn rules(&self, specs: &[Value]) -> PolicyRules {
        let pods: Vec<_> = self.pods.iter().map(|pod| pod.pod).collect();
        rules(&pods, specs)
    }

    async fn apply(&self, tables: &mut PolicyTables, specs: &[Value]) {
        assert!(!tables.apply(&self.rules(specs)).await.unwrap());
    }
}

/// An open connection continues under a policy that forbids new ones; packets of new ones are dropped.
async fn open_connections_continue(cluster: &PodMatrix, tables: &mut PolicyTables) {
    let (server, client) = (&cluster.pods[0], &cluster.pods[1]);
    cluster.apply(tables, &[json!({"podSelector": {}, "ingress": [{"ports": [{"port": TCP_PORT}]}]})]).await;
    let at = SocketAddr::from((server.pod.address, TCP_PORT));
    // The host's connection is the control: policies do not apply to the node's own traffic.
    let mut open = TcpStream::connect_timeout(&at, PATIENCE).unwrap();
    let (mut accepted, _) = server.tcp.accept().unwrap();
    cluster.apply(tables, &[json!({"podSelector": {}})]).await;
    accepted.write_all(b"still here").unwrap();
    drop(accepted);
    let mut answer = String::new();
    open.set_read_timeout(Some(PATIENCE)).unwrap();
    open.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "still here");

    // A UDP flow that was answered continues in both directions. (The kernel tracks connections only while rules use
    // it, so there is a policy from the start.)
    cluster.apply(tables, &[json!({"podSelector": {}, "ingress": [{}]})]).await;
    let mut datagram = [0; 64];
    let mut exchange = |what: &str, from: &UdpSocket, to: &UdpSocket| {
        let began = Instant::now();
        loop {
            from.send_to(what.as_bytes(), to.local_addr().unwrap()).unwrap();
            if let Ok(bytes) = to.recv(&mut datagram)
                && datagram[..bytes] == *what.as_bytes()
            {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{what} did not arrive");
            std::thread::yield_now();
        }
    };
    exchange("question", &client.client, &server.servers[0]);
    exchange("answer", &server.servers[0], &client.client);
    cluster.apply(tables, &[json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})]).await;
    exchange("next question", &client.client, &server.servers[0]);
    exchange("next answer", &server.servers[0], &client.client);
}

/// While policies replace each other, datagrams that all of them allow always arrive, and datagrams that all of them
/// forbid never do.
async fn verdicts_hold_while_policies_change(cluster: &PodMatrix, tables: &mut PolicyTables) {
    let (a, b) = (json!({"matchLabels": {"pod": "a"}}), json!({"matchLabels": {"pod": "b"}}));
    let (x, y) = (json!({"matchLabels": {"ns": "x"}}), json!({"matchLabels": {"ns": "y"}}));
    let ingress = |rule: Value| json!({"podSelector": a, "ingress": [rule]});
    let policies = [
        ingress(json!({"from": [{"podSelector": b}]})),
        ingress(json!({"from": [{"podSelector": {}}, {"namespaceSelector": y}], "ports": [
            {"port": 80, "endPort": 90, "protocol": "UDP"}]})),
        ingress(json!({"from": [{"namespaceSelector": x, "podSelector": b}], "ports": [
            {"port": "main", "protocol": "UDP"}]})),
        ingress(json!({"from": [{"ipBlock": {"cidr": "10.9.0.0/29", "except": ["10.9.0.3/32"]}}]})),
    ];
    let other_pods: Vec<_> = cluster.pods.iter().map(|pod| pod.pod).take(4).collect();

    cluster.apply(tables, &policies[..1]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let traffic = {
        let to = SocketAddr::from((cluster.pods[0].pod.address, PORTS[0]));
        let receiver = cluster.pods[0].servers[0].try_clone().unwrap();
        let [allowed, forbidden] = [1, 8].map(|of: usize| cluster.pods[of].client.try_clone().unwrap());
        let stop = stop.clone();
        std::thread::spawn(move || send_while(&stop, &allowed, &forbidden, &receiver, to))
    };
    for turn in 0..POLICY_CHANGES {
        if turn % 5 == 4 {
            // The pods of a peer are added and removed.
            let others = rules(&other_pods, &policies[turn % policies.len()..][..1]);
            assert!(!tables.apply(&others).await.unwrap());
        }
        cluster.apply(tables, &policies[turn % policies.len()..][..1]).await;
    }
    stop.store(true, Ordering::Relaxed);
    let sent = traffic.join().unwrap();
    assert!(sent > POLICY_CHANGES, "{sent} datagrams were sent during the changes");
}

/// Sends datagrams that must arrive and others that must not, until `stop`; returns the number of the former.
fn send_while(
    stop: &AtomicBool,
    allowed: &UdpSocket,
    forbidden: &UdpSocket,
    receiver: &UdpSocket,
    to: SocketAddr,
) -> usize {
    let (mut sent, mut datagram) = (0, [0; 128]);
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..BATCH {
            // The kernel may report a dropped packet to the sender.
            let _ = forbidden.send_to(b"churn forbidden", to);
            allowed.send_to(b"churn allowed", to).unwrap();
        }
        let (began, mut arrived) = (Instant::now(), 0);
        while arrived < BATCH {
            match receiver.recv(&mut datagram) {
                Ok(bytes) => {
                    assert_ne!(&datagram[..bytes], b"churn forbidden", "after {sent} datagrams");
                    arrived += usize::from(datagram[..bytes] == *b"churn allowed");
                }
                Err(_) => {
                    let lost = BATCH - arrived;
                    assert!(began.elapsed() < PATIENCE / 12, "{lost} datagrams were dropped after {sent}");
                    std::thread::yield_now();
                }
            }
        }
        sent += BATCH;
    }
    sent
}

/// All cases, with bridge-port traffic filtered either in the IP layer or in the bridge layer.
async fn scenario(is_filtered: bool) {
    let cluster = PodMatrix::create();
    let set = std::fs::write(BRIDGE_FILTER, if is_filtered { "1" } else { "0" });
    // Without the module `br_netfilter`, rules of the IP layer never see packets between bridge ports.
    assert!(set.is_ok() || !is_filtered, "{BRIDGE_FILTER}: {set:?}");
    let mut tables = PolicyTables::new("mayfly-test-policy", !is_filtered);
    for (policy, specs, is_allowed) in cases() {
        cluster.apply(&mut tables, &specs).await;
        cluster.probe(policy, is_allowed);
    }
    verdicts_hold_while_policies_change(&cluster, &mut tables).await;
    open_connections_continue(&cluster, &mut tables).await;

    // Rules that another program removed are restored.
    assert!(Command::new("nft").args(["flush", "ruleset"]).status().unwrap().success());
    let deny = cluster.rules(&[json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})]);
    assert!(tables.apply(&deny).await.unwrap(), "it is noticed");
    // Tables without an isolated pod are removed once no packet is in them.
    let began = Instant::now();
    let tables_left = || Command::new("nft").args(["list", "tables"]).output().unwrap().stdout;
    while !tables_left().is_empty() {
        assert!(began.elapsed() < PATIENCE, "the tables are left");
        tables.apply(&cluster.rules(&[])).await.unwrap();
        std::thread::yield_now();
    }
    assert!(!tables.apply(&deny).await.unwrap());
    tables.remove().await.unwrap();
    let left = Command::new("nft").args(["list", "tables"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "nothing is left");
}

#[tokio::test]
#[ignore = "the child of policies_in_the_ip_layer, which runs it in a namespace"]
async fn ip_layer_scenario() {
    scenario(true).await;
}

#[tokio::test]
#[ignore = "the child of policies_in_the_bridge_layer, which runs it in a namespace"]
async fn bridge_layer_scenario() {
    scenario(false).await;
}

/// Runs a test of this file in a network namespace; returns an error if the commands in `needed` do not work there.
fn in_namespace(test: &str, needed: &str) -> Result<(), String> {
    let tried = Command::new("unshare").args(["-n", "sh", "-ec", needed]).output();
    let tried = tried.map_err(|error| format!("the program unshare cannot be run: {error}"))?;
    if !tried.status.success() {
        return Err(String::from_utf8_lossy(&tried.stderr).trim().replace('\n', "; "));
    }
    let mut inside = Command::new("unshare");
    inside.arg("-n").arg(std::env::current_exe().unwrap());
    let status = inside.args(["--exact", test, "--ignored", "--nocapture"]).status().unwrap();
    assert!(status.success(), "{test} failed in its namespace");
    Ok(())
}

#[test]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn policies_in_the_ip_layer() {
    let needed = format!("nft add table inet t; ip link add br0 type bridge; echo 1 > {BRIDGE_FILTER}");
    if let Err(reason) = in_namespace("ip_layer_scenario", &needed) {
        println!("SKIPPED policies_in_the_ip_layer: {reason}");
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn policies_in_the_bridge_layer() {
    let needed = "ip link add br0 type bridge; nft add table bridge t; \
        nft add chain bridge t c '{ type filter hook forward priority 0; }'; \
        nft add rule bridge t c ct state established accept";
    if let Err(reason) = in_namespace("bridge_layer_scenario", needed) {
        println!("SKIPPED policies_in_the_bridge_layer: {reason}");
    }
}
