//! Measures Services in the kernel: writing many of them, changing one, the first packet of a connection, and requests
//! through a cluster IP compared with the pod's own address. Runs in a new network namespace (`unshare --net
//! service_load`) and prints JSON.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use mayfly_network::{
    Backend, Frontend, RuleSet, ServicePortName, TransportProtocol, nftables::NftablesProxy,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const SERVICES: [u32; 3] = [10, 1000, 10_000];
const ENDPOINTS_OF_SERVICE: u32 = 3;
const CHANGES: usize = 30;
const CONNECTIONS: usize = 2000;
const CLIENTS: usize = 16;
/// The size of a request and of its answer, in bytes.
const MESSAGE_BYTES: usize = 256;
const TABLE: &str = "mayfly-bench";

fn pod() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 8080))
}

/// The cluster IP of the measured Service: the highest address of all.
fn service() -> SocketAddr {
    SocketAddr::from(([10, 111, 255, 254], 80))
}

/// Creates addresses in the namespace. Fails outside of a new namespace: the host already has the addresses.
fn make_addresses() -> Result<(), String> {
    let output =
        Command::new("ip").args(["-o", "addr", "show"]).output().map_err(|error| error.to_string())?;
    if !output.stdout.is_empty() {
        return Err("this changes packet filter rules: run it by `unshare --net`, as root".into());
    }
    for arguments in [
        "link set lo up",
        "link add pods type veth peer name outside",
        "addr add 10.0.0.1/24 dev pods",
        "link set pods up",
        "link set outside up",
        "route add 10.96.0.0/12 dev pods",
    ] {
        let status = Command::new("ip").args(arguments.split(' ')).status();
        if !status.is_ok_and(|status| status.success()) {
            return Err(format!("ip {arguments} failed"));
        }
    }
    Ok(())
}

/// `services` Services with three endpoints each, none of which exists, and the measured Service, whose backend is the
/// pod. `turn` varies the first Service.
fn rules(services: u32, turn: usize) -> Arc<RuleSet> {
    let backend = |name: u32, endpoints: Vec<SocketAddr>| Backend {
        service: ServicePortName {
            namespace: "bench".to_owned(),
            service: format!("service-{name}"),
            port: String::new(),
        },
        endpoints,
        affinity: None,
        masquerade: false,
        inside_endpoints: None,
        drops: false,
        source_ranges: Vec::new(),
    };
    let address = |base: [u8; 4], number: u32, port: u16| {
        SocketAddr::from((Ipv4Addr::from(u32::from_be_bytes(base) + number), port))
    };
    let mut frontends = BTreeMap::new();
    for number in 0..services {
        let first = number * ENDPOINTS_OF_SERVICE;
        let skipped = u32::from(number == 0 && turn % 2 == 1);
        let endpoints = (first + skipped..first + ENDPOINTS_OF_SERVICE)
            .map(|endpoint| address([10, 128, 0, 1], endpoint, 8080))
            .collect();
        let at = address([10, 96, 0, 1], number, 80);
        frontends.insert(Frontend::Address(TransportProtocol::Tcp, at), backend(number, endpoints));
    }
    frontends.insert(Frontend::Address(TransportProtocol::Tcp, service()), backend(services, vec![pod()]));
    Arc::new(RuleSet { frontends, health_checks: BTreeMap::new() })
}

/// A pod that answers each message with one of the same size.
async fn serve() -> std::io::Result<()> {
    let listener = TcpListener::bind(pod()).await?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.set_nodelay(true);
                let mut message = [0; MESSAGE_BYTES];
                while stream.read_exact(&mut message).await.is_ok() {
                    if stream.write_all(&message).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    Ok(())
}

fn percentiles(mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let at = |percent: usize| {
        let time = times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
        time.map(|time| time.as_secs_f64() * 1e3)
    };
    json!({"p50Ms": at(50), "p99Ms": at(99), "maxMs": at(100)})
}

/// The durations of new connections; the first packet of each passes through the rules.
async fn connections(to: SocketAddr) -> std::io::Result<Value> {
    let mut times = Vec::new();
    for _ in 0..CONNECTIONS {
        let began = Instant::now();
        let stream = TcpStream::connect(to).await?;
        times.push(began.elapsed());
        // Skips the TIME_WAIT state, in which closed connections would use up the ports.
        stream.set_zero_linger()?;
    }
    Ok(percentiles(times))
}

/// Requests per second over persistent connections.
async fn requests(to: SocketAddr, duration: Duration) -> std::io::Result<Value> {
    let until = Instant::now() + duration;
    let client = move || async move {
        let mut stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        let (mut message, mut times) = ([7; MESSAGE_BYTES], Vec::new());
        while Instant::now() < until {
            let began = Instant::now();
            stream.write_all(&message).await?;
            stream.read_exact(&mut message).await?;
            times.push(began.elapsed());
        }
        std::io::Result::Ok(times)
    };
    let clients: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(client())).collect();
    let mut times = Vec::new();
    for client in clients {
        times.extend(client.await.map_err(std::io::Error::other)??);
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of requests")]
    let rate = times.len() as f64 / duration.as_secs_f64();
    let mut figures = percentiles(times);
    figures["requestsPerSecond"] = json!(rate);
    Ok(figures)
}

async fn with_services(services: u32) -> Result<Value, Box<dyn std::error::Error>> {
    let mut proxy = NftablesProxy::new(TABLE);
    let began = Instant::now();
    proxy.apply(&rules(services, 0)).await?;
    let all = began.elapsed().as_secs_f64() * 1e3;
    let mut changes = Vec::new();
    for turn in 1..=CHANGES {
        let next = rules(services, turn);
        let began = Instant::now();
        proxy.apply(&next).await?;
        changes.push(began.elapsed());
    }
    let first_packets = json!({"service": connections(service()).await?, "pod": connections(pod()).await?});
    let began = Instant::now();
    proxy.apply(&Arc::new(RuleSet::default())).await?;
    let deleted = began.elapsed().as_secs_f64() * 1e3;
    proxy.remove().await?;
    Ok(json!({"services": services, "writtenMs": all, "change": percentiles(changes),
        "connection": first_packets, "deletedMs": deleted}))
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the figures")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).map_or(Ok(5), |text| text.parse())?;
    make_addresses()?;
    serve().await?;
    let mut by_count = Vec::new();
    for services in SERVICES {
        by_count.push(with_services(services).await?);
    }
    let mut proxy = NftablesProxy::new(TABLE);
    proxy.apply(&rules(1000, 0)).await?;
    let duration = Duration::from_secs(seconds);
    let throughput =
        json!({"service": requests(service(), duration).await?, "pod": requests(pod(), duration).await?});
    proxy.remove().await?;
    println!("{}", json!({"services": by_count, "throughput": throughput}));
    Ok(())
}
