//! Measures the cluster's name server: queries over UDP for names of Services, of which there are 10, 1,000 and 10,000.
//! Server and clients share the process. Prints one line of JSON.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use mayfly_api::ObjectKey;
use mayfly_network::dns::{
    forward::Forwarder,
    records::{ServiceRecords, ServiceTarget},
    server::{self, NameServer},
    zone::Zone,
};
use parking_lot::RwLock;
use serde_json::{Value, json};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, Question, RCODE, TYPE};
use tokio::net::UdpSocket;
use tokio_util::sync::CancellationToken;

const SERVICES: [u32; 3] = [10, 1000, 10_000];
/// The number of clients. Each has its own socket and sends a query after the answer to the previous one.
const CLIENTS: u32 = 16;
const ANSWER_BYTES_MAX: usize = 1232;
/// A query without an answer within this time counts as lost.
const TIMEOUT: Duration = Duration::from_secs(5);

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn zone(services: u32) -> Zone {
    let mut zone = Zone::new("cluster.local");
    for number in 0..services {
        let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 0, 1)) + number);
        let target = ServiceTarget::ClusterIps(vec![address.into()]);
        let key = ObjectKey::new("bench", format!("service-{number}"));
        zone.set(&key, Some(ServiceRecords { target, ports: Vec::new() }));
    }
    zone.complete();
    zone
}

fn query(number: u32) -> Result<Vec<u8>, Failure> {
    let mut packet = Packet::new_query(u16::try_from(number % 0xffff)?);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = format!("service-{number}.bench.svc.cluster.local");
    let question = Question::new(Name::new(&name)?, QTYPE::TYPE(TYPE::A), CLASS::IN.into(), false);
    packet.questions.push(question.into_owned());
    Ok(packet.build_bytes_vec()?)
}

/// Sends queries until `until`; returns their durations.
async fn ask(address: SocketAddr, queries: Arc<[Vec<u8>]>, until: Instant) -> Result<Vec<Duration>, Failure> {
    let socket = UdpSocket::bind("127.0.0.1:0").await?;
    socket.connect(address).await?;
    let (mut answer, mut times) = ([0; ANSWER_BYTES_MAX], Vec::new());
    for query in queries.iter().cycle() {
        let began = Instant::now();
        if began > until {
            break;
        }
        socket.send(query).await?;
        let length = tokio::time::timeout(TIMEOUT, socket.recv(&mut answer)).await??;
        times.push(began.elapsed());
        let packet = Packet::parse(&answer[..length])?;
        if packet.rcode() != RCODE::NoError || packet.answers.len() != 1 {
            return Err(format!("the answer is {packet:?}").into());
        }
    }
    Ok(times)
}

async fn with_services(services: u32, seconds: u64) -> Result<Value, Failure> {
    let stop = CancellationToken::new();
    let server = NameServer::new(Arc::new(RwLock::new(zone(services))), Forwarder::new("/dev/null"));
    let (udp, tcp) = server::bind("127.0.0.1:0".parse()?).await?;
    let address = udp.local_addr()?;
    let served = tokio::spawn(server.serve(udp, tcp, stop.clone()));
    let queries: Arc<[Vec<u8>]> = (0..services).map(query).collect::<Result<_, _>>()?;
    let duration = Duration::from_secs(seconds);
    let until = Instant::now() + duration;
    let clients: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(ask(address, queries.clone(), until))).collect();
    let mut times = Vec::new();
    for client in clients {
        times.extend(client.await??);
    }
    stop.cancel();
    served.await?;
    times.sort_unstable();
    let at = |percent: usize| {
        let time = times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
        time.map(|time| time.as_secs_f64() * 1e3)
    };
    #[expect(clippy::cast_precision_loss, reason = "a count of answers")]
    let rate = times.len() as f64 / duration.as_secs_f64();
    Ok(json!({"services": services, "answersPerSecond": rate, "p50Ms": at(50), "p99Ms": at(99)}))
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the figures")]
async fn main() -> Result<(), Failure> {
    let seconds = std::env::args().nth(1).map_or(Ok(5), |text| text.parse())?;
    let mut figures = Vec::new();
    for services in SERVICES {
        figures.push(with_services(services, seconds).await?);
    }
    println!("{}", Value::Array(figures));
    Ok(())
}
