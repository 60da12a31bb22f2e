//! The bridge network of a node: a bridge and an address range per data directory, by the CNI plugins `bridge`,
//! `host-local`, `portmap` and `loopback`.
//!
//! The protocol of the plugins: <https://www.cni.dev/docs/spec/> (version 1.0.0).

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use async_trait::async_trait;
use ipnet::{Ipv4Net, Ipv6Net};
use mayfly_runtime::{NetworkAttachment, NetworkError, PodNetwork, PortMapping};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::{
    io::AsyncWriteExt as _,
    process::Command,
    sync::{Mutex, watch},
};

const CNI_VERSION: &str = "1.0.0";
const INTERFACE: &str = "eth0";
/// The ranges of pods are subnets of this network: 256 of them.
const RANGES: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 212, 0, 0), 16);
const RANGE_PREFIX: u8 = 24;
/// The IPv6 subnets of these ranges are from these unique local addresses (RFC 4193), which also hold the Services'
/// range.
const RANGES_V6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfd6d, 0x6179, 0x666c, 0, 0, 0, 0, 0), 48);
const RANGE_V6_PREFIX: u8 = 64;
/// The longest wait of a pod for the node's rules for Services before its start is retried.
const SERVICE_RULES_TIMEOUT: Duration = Duration::from_secs(15);

/// The bridge of one data directory.
pub(crate) struct BridgeNetwork {
    plugins: PathBuf,
    /// The directory of its range and its address leases.
    folder: PathBuf,
    /// The plugins change the same bridge and rules, so only one runs at a time.
    turn: Mutex<()>,
    /// Becomes true once the node's rules for Services are written; `None` if the node has none.
    service_rules: Option<watch::Receiver<bool>>,
    /// Whether pods have an IPv6 address in addition to the IPv4 one.
    dual_stack: bool,
}

/// The stored configuration of a bridge, reused after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BridgeConfig {
    bridge: String,
    #[serde(serialize_with = "write_range", deserialize_with = "read_range")]
    range: Ipv4Net,
}

fn write_range<S: serde::Serializer>(range: &Ipv4Net, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(range)
}

fn read_range<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Ipv4Net, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

/// The command of a plugin call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Add,
    Del,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
        }
    }
}

impl BridgeNetwork {
    pub(crate) fn new(
        plugins: PathBuf,
        folder: PathBuf,
        service_rules: Option<watch::Receiver<bool>>,
        dual_stack: bool,
    ) -> Self {
        Self { plugins, folder, turn: Mutex::default(), service_rules, dual_stack }
    }

    /// Waits until the node's rules for Services are written: a pod that starts earlier would not resolve names.
    async fn service_rules(&self) -> Result<(), NetworkError> {
        let Some(rules) = &self.service_rules else { return Ok(()) };
        let mut rules = rules.clone();
        match tokio::time::timeout(SERVICE_RULES_TIMEOUT, rules.wait_for(|written| *written)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(NetworkError("the node's rules for Services have not been written; see the log".into())),
        }
    }

    /// The bridge's name and range; chosen for the first pod.
    fn config(&self) -> Result<BridgeConfig, NetworkError> {
        let file = self.folder.join("bridge.json");
        if let Ok(text) = fs::read(&file) {
            return serde_json::from_slice(&text)
                .map_err(|error| NetworkError(format!("{} is damaged: {error}", file.display())));
        }
        let used = fs::read_to_string("/proc/net/route").map(|text| routes(&text)).unwrap_or_default();
        let config = choose(&self.folder.to_string_lossy(), &used)
            .ok_or_else(|| NetworkError(format!("no /{RANGE_PREFIX} of {RANGES} is free on this host")))?;
        let written = fs::create_dir_all(&self.folder).and_then(|()| {
            // A file that a crash cut off would keep all later pods of this node from starting.
            let mut part = tempfile::NamedTempFile::new_in(&self.folder)?;
            std::io::Write::write_all(&mut part, &serde_json::to_vec(&config)?)?;
            part.as_file().sync_all()?;
            part.persist(&file)?;
            Ok(())
        });
        written.map_err(|error| NetworkError(format!("cannot write {}: {error}", file.display())))?;
        Ok(config)
    }

    async fn call(
        &self,
        plugin: &str,
        command: Verb,
        pod: &NetworkAttachment,
        interface: &str,
        config: &Value,
    ) -> Result<Value, NetworkError> {
        let failed =
            |error: std::io::Error| NetworkError(format!("cannot run the CNI plugin {plugin}: {error}"));
        let netns = pod.netns.as_ref().filter(|path| crate::namespaces::is_pinned(path));
        let mut process = Command::new(self.plugins.join(plugin));
        process
            .env("CNI_COMMAND", command.name())
            .env("CNI_CONTAINERID", &pod.uid.0)
            .env("CNI_NETNS", netns.map(|path| path.as_os_str()).unwrap_or_default())
            .env("CNI_IFNAME", interface)
            .env("CNI_PATH", &self.plugins)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = process.spawn().map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(config.to_string().as_bytes()).await.map_err(failed)?;
        }
        let output = child.wait_with_output().await.map_err(failed)?;
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if output.status.success() {
            return Ok(answer);
        }
        let said = answer["msg"].as_str().map(str::to_owned);
        let said = said.unwrap_or_else(|| String::from_utf8_lossy(&output.stderr).trim().to_owned());
        Err(NetworkError(format!("the CNI plugin {plugin} failed: {said}")))
    }
}

#[async_trait]
impl PodNetwork for BridgeNetwork {
    fn assigns_addresses(&self) -> bool {
        true
    }

    async fn attach(&self, pod: &NetworkAttachment) -> Result<Vec<IpAddr>, NetworkError> {
        let config = self.config()?;
        self.service_rules().await?;
        let _turn = self.turn.lock().await;
        let bridge = bridge_config(&config, &self.folder, self.dual_stack);
        // A repeated attachment would find its address in use.
        let _ = self.call("bridge", Verb::Del, pod, INTERFACE, &bridge).await;
        self.call("loopback", Verb::Add, pod, "lo", &loopback_config()).await?;
        let result = self.call("bridge", Verb::Add, pod, INTERFACE, &bridge).await?;
        if self.service_rules.is_some() {
            route_services(&config.bridge)?;
        }
        if !pod.host_ports.is_empty() {
            let ports = portmap_config(&pod.host_ports, Some(&result));
            self.call("portmap", Verb::Add, pod, INTERFACE, &ports).await?;
        }
        let addresses = addresses(&result);
        match addresses.is_empty() {
            true => Err(NetworkError("the CNI plugin bridge gave the pod no address".into())),
            false => Ok(addresses),
        }
    }

    async fn detach(&self, pod: &NetworkAttachment) -> Result<(), NetworkError> {
        if !self.folder.join("bridge.json").exists() {
            return Ok(());
        }
        let config = self.config()?;
        let _turn = self.turn.lock().await;
        if !pod.host_ports.is_empty() {
            let ports = portmap_config(&pod.host_ports, None);
            self.call("portmap", Verb::Del, pod, INTERFACE, &ports).await?;
        }
        self.call(
            "bridge",
            Verb::Del,
            pod,
            INTERFACE,
            &bridge_config(&config, &self.folder, self.dual_stack),
        )
        .await?;
        remove_unused(&config.bridge).await
    }
}

/// Lets pods on a bridge reach Service endpoints at loopback addresses of the node (functions, the DNS server). The
/// rules for Services drop packets that pods send to loopback addresses directly.
fn route_services(bridge: &str) -> Result<(), NetworkError> {
    let file = format!("/proc/sys/net/ipv4/conf/{bridge}/route_localnet");
    fs::write(&file, "1").map_err(|error| NetworkError(format!("cannot write {file}: {error}")))
}

/// Removes a bridge without pods; the attachment of the next pod creates it again.
async fn remove_unused(bridge: &str) -> Result<(), NetworkError> {
    let ports = std::fs::read_dir(format!("/sys/class/net/{bridge}/brif"));
    if ports.is_ok_and(|mut ports| ports.next().is_some()) {
        return Ok(());
    }
    let removed = Command::new("ip").args(["link", "delete", "dev", bridge]).output().await;
    let output = removed.map_err(|error| NetworkError(format!("cannot run ip: {error}")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !said.contains("Cannot find device") {
        return Err(NetworkError(format!("cannot remove the bridge {bridge}: {}", said.trim())));
    }
    Ok(())
}

/// The ranges of the host's routes, from `/proc/net/route`.
fn routes(text: &str) -> Vec<Ipv4Net> {
    let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter_map(|row| {
        let number = |at: usize| u32::from_str_radix(row.get(at)?, 16).ok();
        // The number is in the machine's byte order.
        let address = Ipv4Addr::from(number(1)?.swap_bytes());
        let mask = number(7)?.swap_bytes();
        Ipv4Net::new(address, u8::try_from(mask.leading_ones()).ok()?).ok()
    })
    // The default route covers all addresses and reserves none.
    .filter(|range| range.prefix_len() > 0)
    .collect()
}

/// A range that no route of the host overlaps. The search starts at a position that depends on the data directory, so
/// that two servers on one host rarely compete.
fn choose(folder: &str, used: &[Ipv4Net]) -> Option<BridgeConfig> {
    let hash = Sha256::digest(folder);
    let ranges: Vec<Ipv4Net> = RANGES.subnets(RANGE_PREFIX).ok()?.collect();
    let first = usize::from(hash[0]);
    let overlaps = |range: &Ipv4Net| used.iter().any(|other| other.contains(range) || range.contains(other));
    let candidates = (0..ranges.len()).filter_map(|step| ranges.get((first + step) % ranges.len()).copied());
    let range = candidates.into_iter().find(|range| !overlaps(range))?;
    Some(BridgeConfig { bridge: format!("mf-{}", hex::encode(&hash[1..5])), range })
}

fn loopback_config() -> Value {
    json!({"cniVersion": CNI_VERSION, "name": "mayfly-lo", "type": "loopback"})
}

/// The IPv6 range that belongs to an IPv4 range: `10.212.X.0/24` and `fd6d:6179:666c:d4X::/64`.
fn range_v6(range: Ipv4Net) -> Ipv6Net {
    let [_, second, third, _] = range.network().octets();
    let mut segments = RANGES_V6.network().segments();
    segments[3] = u16::from_be_bytes([second, third]);
    Ipv6Net::new_assert(segments.into(), RANGE_V6_PREFIX)
}

fn bridge_config(config: &BridgeConfig, folder: &std::path::Path, dual_stack: bool) -> Value {
    let (mut ranges, mut routes) =
        (vec![json!([{"subnet": config.range.to_string()}])], vec![json!({"dst": "0.0.0.0/0"})]);
    if dual_stack {
        ranges.push(json!([{"subnet": range_v6(config.range).to_string()}]));
        routes.push(json!({"dst": "::/0"}));
    }
    json!({
        "cniVersion": CNI_VERSION,
        "name": config.bridge,
        "type": "bridge",
        "bridge": config.bridge,
        "isGateway": true,
        "ipMasq": true,
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "dataDir": folder.join("leases"),
            "ranges": ranges,
            "routes": routes,
        },
    })
}

fn portmap_config(ports: &[PortMapping], previous: Option<&Value>) -> Value {
    let mappings: Vec<Value> = ports
        .iter()
        .map(|port| {
            let address = port.address.map(|address| address.to_string()).unwrap_or_default();
            json!({"hostPort": port.host, "containerPort": port.container, "protocol": port.protocol,
                "hostIP": address})
        })
        .collect();
    let mut config: BTreeMap<&str, Value> = [
        ("cniVersion", json!(CNI_VERSION)),
        ("name", json!("mayfly-ports")),
        ("type", json!("portmap")),
        ("capabilities", json!({"portMappings": true})),
        ("runtimeConfig", json!({"portMappings": mappings})),
    ]
    .into();
    config.extend(previous.map(|result| ("prevResult", result.clone())));
    json!(config)
}

fn addresses(result: &Value) -> Vec<IpAddr> {
    let ips = result["ips"].as_array().into_iter().flatten();
    ips.filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_the_host_uses_is_left_alone() {
        let free = choose("/data", &[]).unwrap();
        assert_eq!(free, choose("/data", &[]).unwrap(), "the same folder gets the same range");
        assert!(RANGES.contains(&free.range) && free.bridge.len() < 16, "{free:?}");
        let next = choose("/data", &[free.range]).unwrap();
        assert_ne!(next.range, free.range);
        assert_eq!(choose("/data", &["10.0.0.0/8".parse().unwrap()]), None);
    }

    #[test]
    fn routes_are_read_from_the_kernels_table() {
        let text = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                    eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                    eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        assert_eq!(routes(text), ["192.168.0.0/24".parse::<Ipv4Net>().unwrap()]);
    }

    #[test]
    fn pods_of_both_families_have_ranges_of_both() {
        let range = "10.212.7.0/24".parse().unwrap();
        let config = BridgeConfig { bridge: "mf-1".into(), range };
        let ipam = bridge_config(&config, std::path::Path::new("/d"), true)["ipam"].clone();
        let ranges = json!([[{"subnet": "10.212.7.0/24"}], [{"subnet": "fd6d:6179:666c:d407::/64"}]]);
        assert_eq!(ipam["ranges"], ranges);
        assert_eq!(ipam["routes"], json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]));
    }

    #[test]
    fn a_plugins_answer_names_the_addresses() {
        let answer = json!({"ips": [{"address": "10.212.3.7/24", "gateway": "10.212.3.1"}]});
        assert_eq!(addresses(&answer), ["10.212.3.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(addresses(&json!({})), Vec::<IpAddr>::new());
    }
}
