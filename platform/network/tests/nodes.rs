//! Routes between nodes, on real links: three nodes with a pod each, of which two are in one network and the third is
//! behind a router. Each node, each pod and the router have a network namespace that ends with the test's process.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use fake_api::NodeApi;
use ipnet::Ipv4Net;
use mayfly_informer::Informers;
use mayfly_network::{
    Backend, Frontend, NodeRoutes, OverlayConfig, PodRouting, RouteOwner, RuleSet, ServicePortName,
    TransportProtocol, VxlanNetwork,
    nftables::NftablesProxy,
    overlay::{
        ANNOTATION_TUNNEL, KernelState, OverlayNode, OverlayStep, TunnelEndpoint, execute, plan, removal,
    },
    policy::{PolicyTables, plan_policies},
};
use nix::sched::{CloneFlags, unshare};
use serde_json::json;
use tokio_util::sync::CancellationToken;

mod fake_api;

/// The timeout of any wait.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time in which an allowed connection would have been made.
const SILENCE: Duration = Duration::from_millis(700);
const PODS: &str = "10.212.0.0/16";
const PORT: u16 = 8080;
const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 7)), 80);
const NODE_PORT: u16 = 30_080;
/// More than fits into one packet or window.
const ANSWER_BYTES: usize = 1 << 20;

type Work = Box<dyn FnOnce() + Send>;

/// A network namespace: a thread that runs work in it.
struct Namespace {
    thread: String,
    work: mpsc::Sender<Work>,
}

impl Namespace {
    fn create() -> Self {
        let (made, is_made) = mpsc::sync_channel(1);
        let (work, queue) = mpsc::channel::<Work>();
        std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let thread = std::fs::read_link("/proc/thread-self").unwrap();
            made.send(thread.file_name().unwrap().to_string_lossy().into_owned()).unwrap();
            queue.into_iter().for_each(|work| work());
        });
        let namespace = Self { thread: is_made.recv().unwrap(), work };
        namespace.run(|| ip("link set lo up"));
        namespace
    }

    /// Runs work in the namespace; fails if the work does.
    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, is_done) = mpsc::sync_channel(1);
        self.work.send(Box::new(move || done.send(work()).unwrap())).unwrap();
        is_done.recv().expect("the work in the namespace failed")
    }

    /// Runs async work in the namespace.
    fn block_on<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        self.run(|| runtime().block_on(work))
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

fn said(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A node with one pod.
struct TestNode {
    name: &'static str,
    number: u8,
    address: Ipv4Addr,
    namespace: Arc<Namespace>,
    pod: Arc<Namespace>,
    config: OverlayConfig,
}

impl TestNode {
    /// A node on the network of one of the router's bridges, which has the address `router`.
    fn create(name: &'static str, number: u8, address: &str, lan: &str, router: &str) -> Self {
        let namespace = Namespace::create();
        ip(&format!("link add up{number} type veth peer name eth0 netns {}", namespace.thread));
        ip(&format!("link set up{number} master {lan}"));
        ip(&format!("link set up{number} up"));
        let (own, to) = (address.to_owned(), router.to_owned());
        namespace.run(move || {
            ip(&format!("addr add {own} dev eth0"));
            ip("link set eth0 up");
            ip(&format!("route add default via {to}"));
            ip("link add mf-test type bridge");
            ip(&format!("addr add 10.212.{number}.1/24 dev mf-test"));
            ip("link set mf-test up");
        });
        let pod = Namespace::create();
        let thread = pod.thread.clone();
        namespace.run(move || {
            ip(&format!("link add port type veth peer name eth0 netns {thread}"));
            ip("link set port master mf-test");
            ip("link set port up");
        });
        pod.run(move || {
            ip(&format!("addr add 10.212.{number}.2/24 dev eth0"));
            ip("link set eth0 up");
            ip(&format!("route add default via 10.212.{number}.1"));
            serve();
        });
        let address = address.parse::<Ipv4Net>().unwrap().addr();
        let config = OverlayConfig {
            node: name.into(),
            pods: PODS.parse().unwrap(),
            routing: PodRouting::Auto,
            vxlan: VxlanNetwork { id: 5, port: 8472 },
            owner: RouteOwner::of("mayfly-test"),
        };
        Self { name, number, address, namespace: Arc::new(namespace), pod: Arc::new(pod), config }
    }

    fn pod_address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 212, self.number, 2)
    }

    fn pod_at(&self) -> SocketAddr {
        SocketAddr::from((self.pod_address(), PORT))
    }

    /// The node as its object says, before it has published anything.
    fn facts(&self) -> OverlayNode {
        OverlayNode {
            name: self.name.into(),
            range: Ipv4Net::new_assert(Ipv4Addr::new(10, 212, self.number, 0), 24),
            address: self.address,
            tunnel: None,
        }
    }

    /// The node with its published tunnel.
    fn published(&self) -> OverlayNode {
        let (config, own) = (self.config.clone(), self.facts());
        let planned = self.namespace.run(move || plan(&config, &own, &[], &KernelState::read().unwrap()));
        OverlayNode { tunnel: Some(planned.endpoint), ..self.facts() }
    }

    /// Plans and executes until nothing is left to do; returns the MTU of pods and all steps.
    fn reconcile(&self, peers: &[OverlayNode]) -> (Option<u32>, Vec<OverlayStep>) {
        let (config, own, peers) = (self.config.clone(), self.facts(), peers.to_vec());
        self.namespace.run(move || {
            let mut all = Vec::new();
            for _ in 0..3 {
                let planned = plan(&config, &own, &peers, &KernelState::read().unwrap());
                assert!(planned.problems.is_empty(), "{:?}", planned.problems);
                if planned.steps.is_empty() {
                    return (planned.pod_mtu, all);
                }
                let failed = execute(&planned.steps).unwrap();
                assert!(failed.is_empty(), "{failed:?}");
                all.extend(planned.steps);
            }
            panic!("steps are left after three plans: {all:?}");
        })
    }

    fn routes(&self) -> BTreeSet<String> {
        let all = self.namespace.run(|| said("ip", "route show proto 109"));
        let shown = |line: &str| line.split(" metric ").next().unwrap_or_default().trim().to_owned();
        all.lines().map(shown).collect()
    }

    fn object(&self) -> serde_json::Value {
        let range = self.facts().range.to_string();
        json!({"metadata": {"name": self.name, "annotations": {}}, "spec": {"podCIDR": range, "podCIDRs": [range]},
            "status": {"addresses": [{"type": "InternalIP", "address": self.address.to_string()}]}})
    }

    /// Follows the Nodes of an API server on a thread in the node's namespace.
    fn run_role(&self, api: &NodeApi, stop: &CancellationToken) -> JoinHandle<()> {
        let (config, api, stop) = (self.config.clone(), api.clone(), stop.clone());
        let running = async move {
            // The client has a task, which belongs to this thread's runtime.
            let client = api.client();
            let informers = Informers::create(client.clone(), stop.clone());
            NodeRoutes::create(config, &informers, client).run(stop).await;
        };
        self.namespace.run(|| std::thread::spawn(|| runtime().block_on(running)))
    }

    fn object_of_pod(&self) -> mayfly_api::k8s::api::core::v1::Pod {
        let address = self.pod_address().to_string();
        serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "name": self.name, "labels": {"of": self.name}},
            "spec": {"nodeName": self.name, "containers": [{"name": "c"}]},
            "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
        }))
        .unwrap()
    }
}

/// Answers each connection of this namespace with the client's address, and many bytes.
fn serve() {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let (own, client) = (stream.local_addr().unwrap().ip(), stream.peer_addr().unwrap().ip());
                let _ = stream.write_all(format!("{own} to {client}\n").as_bytes());
                let _ = stream.write_all(&vec![b'x'; ANSWER_BYTES]);
            });
        }
    });
}

/// Connects from the calling thread's namespace; returns the first line of the answer, once all of it has arrived.
fn ask(to: SocketAddr, patience: Duration) -> Result<String, ErrorKind> {
    let mut stream = TcpStream::connect_timeout(&to, patience).map_err(|error| error.kind())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|error| error.kind())?;
    let line = answer.iter().position(|byte| *byte == b'\n').unwrap_or_default();
    assert_eq!(answer.len(), line + 1 + ANSWER_BYTES, "the answer is complete");
    Ok(String::from_utf8_lossy(&answer[..line]).into_owned())
}

/// The pod's answer to a client.
fn answer(pod: &TestNode, client: IpAddr) -> Result<String, ErrorKind> {
    Ok(format!("{} to {client}", pod.pod_address()))
}

/// Every pod reaches every other one under its own address.
fn all_pairs(nodes: &[&TestNode]) {
    for from in nodes {
        for to in nodes {
            let at = to.pod_at();
            let answered = from.pod.run(move || ask(at, PATIENCE));
            assert_eq!(answered, answer(to, from.pod_address().into()), "{} to {}", from.name, to.name);
        }
    }
}

fn backend(endpoints: &[&TestNode], masquerade: bool) -> Backend {
    let [namespace, service, port] = ["shop", "web", ""].map(str::to_owned);
    Backend {
        service: ServicePortName { namespace, service, port },
        endpoints: endpoints.iter().map(|node| node.pod_at()).collect(),
        inside_endpoints: None,
        drops: false,
        affinity: None,
        masquerade,
        source_ranges: Vec::new(),
    }
}

/// A Service on node `a` whose endpoint is a pod of another node, with the address that `a` has for that node.
fn services(a: &TestNode, others: &[(&TestNode, IpAddr)]) {
    for (other, own) in others {
        let rules = Arc::new(RuleSet {
            frontends: BTreeMap::from([
                (Frontend::Address(TransportProtocol::Tcp, SERVICE), backend(&[other], false)),
                (Frontend::NodePort(TransportProtocol::Tcp, NODE_PORT), backend(&[other], true)),
            ]),
            health_checks: BTreeMap::new(),
        });
        let pods: Ipv4Net = PODS.parse().unwrap();
        let mut proxy =
            NftablesProxy::new("mayfly-test").masquerading_bridge(Some(pods)).with_pods(vec![pods.into()]);
        let mut proxy = a.namespace.block_on(async move {
            proxy.apply(&rules).await.unwrap();
            proxy
        });
        // A pod keeps its address, on which policies depend.
        let from_pod = a.pod.run(|| ask(SERVICE, PATIENCE));
        assert_eq!(from_pod, answer(other, a.pod_address().into()), "through a Service to {}", other.name);
        // The node itself and clients from outside get an address to which the answers come back through this node.
        let from_node = a.namespace.run(|| ask(SERVICE, PATIENCE));
        assert_eq!(from_node, answer(other, *own), "the node through a Service to {}", other.name);
        let from_outside = ask(SocketAddr::from((a.address, NODE_PORT)), PATIENCE);
        assert_eq!(from_outside, answer(other, *own), "from outside to {}", other.name);
        a.namespace.block_on(async move { proxy.remove().await.unwrap() });
    }
}

/// A policy of node `c` names a pod of another node.
fn policy_rules(nodes: [&TestNode; 3]) -> mayfly_network::policy::PolicyRules {
    let [a, b, c] = nodes;
    let policy = json!({"metadata": {"namespace": "shop", "name": "p"}, "spec": {
        "podSelector": {"matchLabels": {"of": "c"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"of": "a"}}}]}]}});
    let pods = [a.object_of_pod(), b.object_of_pod(), c.object_of_pod()];
    plan_policies(&[serde_json::from_value(policy).unwrap()], &pods, &[], "c")
}

/// Two networks with a router, which is the calling process's namespace.
fn make_networks() {
    assert_eq!(said("ip", "-o addr show"), "", "this test changes the network: run it in a new namespace");
    ip("link set lo up");
    for (lan, address) in [("lan1", "192.0.2.254/24"), ("lan2", "198.51.100.254/24")] {
        ip(&format!("link add {lan} type bridge"));
        ip(&format!("addr add {address} dev {lan}"));
        ip(&format!("link set {lan} up"));
    }
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
}

#[tokio::test]
#[ignore = "the child of pods_of_several_nodes, which runs it in a namespace"]
async fn nodes_scenario() {
    make_networks();
    let a = TestNode::create("a", 1, "192.0.2.1/24", "lan1", "192.0.2.254");
    let b = TestNode::create("b", 2, "192.0.2.2/24", "lan1", "192.0.2.254");
    let c = TestNode::create("c", 3, "198.51.100.3/24", "lan2", "198.51.100.254");
    let nodes = [&a, &b, &c];
    let published = nodes.map(TestNode::published);
    let others =
        |name: &str| -> Vec<_> { published.iter().filter(|node| node.name != name).cloned().collect() };
    let at = b.pod_at();
    assert!(a.pod.run(move || ask(at, SILENCE)).is_err(), "there is no route yet");

    a.namespace.run(|| ip("route add 10.212.77.0/24 via 192.0.2.254 proto 109"));
    for node in nodes {
        let (mtu, _) = node.reconcile(&others(node.name));
        assert_eq!(mtu, Some(1450), "{}", node.name);
        assert_eq!(node.reconcile(&others(node.name)).1, [], "a restart finds everything as wanted");
    }
    let foreign = "10.212.77.0/24 via 192.0.2.254 dev eth0";
    let to_b = "10.212.2.0/24 via 192.0.2.2 dev eth0";
    let expected = [to_b, "10.212.3.0/24 via 10.212.3.0 dev mayfly.5", foreign].map(str::to_owned);
    assert_eq!(a.routes(), expected.into());
    let expected = ["mayfly.5", "mayfly.5"].iter().zip([1, 2]);
    let expected = expected.map(|(device, of)| format!("10.212.{of}.0/24 via 10.212.{of}.0 dev {device}"));
    assert_eq!(c.routes(), expected.collect());
    all_pairs(&nodes);
    let at = c.pod_at();
    let from_node = a.namespace.run(move || ask(at, PATIENCE));
    assert_eq!(from_node, answer(&c, Ipv4Addr::new(10, 212, 1, 0).into()), "from the node itself");

    services(&a, &[(&b, a.address.into()), (&c, Ipv4Addr::new(10, 212, 1, 0).into())]);

    let rules = policy_rules(nodes);
    let mut tables = PolicyTables::new("mayfly-test-policy", false);
    let mut tables = c.namespace.block_on(async move {
        tables.apply(&rules).await.unwrap();
        tables
    });
    let at = c.pod_at();
    assert_eq!(a.pod.run(move || ask(at, PATIENCE)), answer(&c, a.pod_address().into()), "allowed");
    assert!(b.pod.run(move || ask(at, SILENCE)).is_err(), "forbidden");
    c.namespace.block_on(async move { tables.remove().await.unwrap() });

    // What another program deletes is repaired.
    a.namespace.run(|| ip("link delete mayfly.5"));
    a.reconcile(&others("a"));
    all_pairs(&nodes);

    // A node goes: its route and the device, but neither other routes nor those of other programs.
    a.reconcile(&published[1..2]);
    assert_eq!(a.routes(), [to_b, foreign].map(str::to_owned).into());
    assert_eq!(a.namespace.run(|| said("ip", "-o link show type vxlan")), "");
    assert!(a.pod.run(move || ask(at, SILENCE)).is_err(), "no route to a node that is gone");
    all_pairs(&[&a, &b]);

    for node in nodes {
        let config = node.config.clone();
        let failed =
            node.namespace.run(move || execute(&removal(&config, &KernelState::read().unwrap())).unwrap());
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(node.namespace.run(|| said("ip", "-o link show type vxlan")), "", "{}", node.name);
    }
    assert_eq!(a.routes(), [foreign.to_owned()].into());
    assert!(b.routes().is_empty() && c.routes().is_empty());
}

/// A container's pod that is bound to a node.
fn bound_pod(node: &str) -> serde_json::Value {
    json!({"metadata": {"namespace": "shop", "name": "web"},
        "spec": {"nodeName": node, "containers": [{"name": "c"}]}})
}

/// Waits until a pod gets an answer from another one.
fn until_answered(from: &TestNode, to: &TestNode) {
    let began = Instant::now();
    let at = to.pod_at();
    while from.pod.run(move || ask(at, SILENCE)) != answer(to, from.pod_address().into()) {
        assert!(began.elapsed() < PATIENCE, "{} does not reach {}", from.name, to.name);
    }
}

#[tokio::test]
#[ignore = "the child of routes_follow_the_nodes, which runs it in a namespace"]
async fn role_scenario() {
    make_networks();
    let a = TestNode::create("a", 1, "192.0.2.1/24", "lan1", "192.0.2.254");
    let c = TestNode::create("c", 3, "198.51.100.3/24", "lan2", "198.51.100.254");
    let api = NodeApi::default();
    for node in [&a, &c] {
        api.put("nodes", node.object());
    }
    api.put("pods", bound_pod("a"));
    let start = || {
        let stop = CancellationToken::new();
        (stop.clone(), [&a, &c].map(|node| node.run_role(&api, &stop)))
    };
    let end = |stop: CancellationToken, roles: [JoinHandle<()>; 2]| {
        stop.cancel();
        roles.into_iter().for_each(|role| role.join().unwrap());
    };
    // Each node publishes its tunnel, and uses that of the other.
    let (stop, roles) = start();
    until_answered(&a, &c);
    let annotations = api.get("nodes", "a").unwrap()["metadata"]["annotations"].clone();
    let published =
        TunnelEndpoint::from_annotation(annotations[ANNOTATION_TUNNEL].as_str().unwrap()).unwrap();
    assert_eq!(Some(published), a.published().tunnel);

    // A node with pods of containers keeps its routes, which the next run takes over.
    end(stop, roles);
    assert_eq!((a.routes().len(), c.routes().len()), (1, 0));
    let (stop, roles) = start();
    until_answered(&a, &c);

    // A node goes.
    api.delete("nodes", "c");
    let began = Instant::now();
    while !a.routes().is_empty() {
        assert!(began.elapsed() < PATIENCE, "the route to a deleted node is left");
    }
    end(stop, roles);
    let links = a.namespace.run(|| said("ip", "-o link show type vxlan"));
    assert_eq!(links, "", "nothing needs the device");
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

/// What the tests need in a network namespace.
const NEEDED: &str = "nft add table ip t; ip link add lan type bridge; ip link add one type veth peer name other; \
        ip link add tunnel type vxlan id 1 dstport 8472; echo 1 > /proc/sys/net/ipv4/ip_forward";

#[test]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn pods_of_several_nodes() {
    if let Err(reason) = in_namespace("nodes_scenario", NEEDED) {
        println!("SKIPPED pods_of_several_nodes: {reason}");
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn routes_follow_the_nodes() {
    if let Err(reason) = in_namespace("role_scenario", NEEDED) {
        println!("SKIPPED routes_follow_the_nodes: {reason}");
    }
}
