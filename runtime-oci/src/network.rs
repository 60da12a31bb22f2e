//! The bridge network of a node: a bridge and an address range per data directory, by the CNI plugins `bridge`,
//! `host-local`, `portmap` and `loopback`.
//!
//! The protocol of the plugins: <https://www.cni.dev/docs/spec/> (version 1.0.0). [`range`] decides about the addresses.

mod range;

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use async_trait::async_trait;
use ipnet::{Ipv4Net, Ipv6Net};
use mayfly_runtime::{NetworkAttachment, NetworkError, PodNetwork, PortMapping};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    process::Command,
    sync::{Mutex, watch},
};

use self::range::StoredBridge;
pub use self::range::{BridgeOptions, PodRange};
use crate::availability::find_program;

const CNI_VERSION: &str = "1.0.0";
const INTERFACE: &str = "eth0";
/// The IPv6 subnets of these ranges are from these unique local addresses (RFC 4193), which also hold the Services'
/// range.
const RANGES_V6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfd6d, 0x6179, 0x666c, 0, 0, 0, 0, 0), 48);
const RANGE_V6_PREFIX: u8 = 64;
/// The longest wait of a pod for the node's rules for Services before its start is retried.
const SERVICE_RULES_TIMEOUT: Duration = Duration::from_secs(15);
/// The mark with which the plugin `portmap` requests that a packet gets the node's address.
const PORT_MAPPING_MARK: &str = "0x2000/0x2000";

/// The bridge of one data directory.
pub(crate) struct BridgeNetwork {
    plugins: PathBuf,
    /// The directory of its range and its address leases.
    folder: PathBuf,
    /// The plugins change the same bridge and rules, so only one runs at a time. Its value: whether this process has
    /// written the rule of [`keep_addresses`].
    turn: Mutex<bool>,
    /// Becomes true once the node's rules for Services are written; `None` if the node has none.
    service_rules: Option<watch::Receiver<bool>>,
    /// Whether pods have an IPv6 address in addition to the IPv4 one.
    dual_stack: bool,
    options: BridgeOptions,
    /// The range of the node's pods, once it is known.
    range: watch::Sender<Option<Ipv4Net>>,
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
        options: BridgeOptions,
    ) -> Self {
        let known = match options.range {
            // A damaged file is reported by the next pod.
            PodRange::Chosen => StoredBridge::load(&folder).ok().flatten().map(|config| config.range),
            PodRange::Assigned(_) => None,
        };
        let range = watch::Sender::new(known);
        Self { plugins, folder, turn: Mutex::default(), service_rules, dual_stack, options, range }
    }

    /// The range of the node's pods, once it is known.
    pub(crate) fn range(&self) -> watch::Receiver<Option<Ipv4Net>> {
        self.range.subscribe()
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

    /// The bridge's name and range: chosen for the first pod, or assigned by the cluster.
    pub(crate) async fn reserve(&self) -> Result<StoredBridge, NetworkError> {
        let config = match &self.options.range {
            PodRange::Chosen => StoredBridge::chosen(&self.folder, self.options.cluster_pods),
            PodRange::Assigned(range) => {
                let range = range::assignment(range).await?;
                StoredBridge::assigned(&self.folder, self.options.cluster_pods, range, bridge_exists)
            }
        }?;
        self.range.send_if_modified(|range| range.replace(config.range) != Some(config.range));
        Ok(config)
    }

    /// The plugins' configuration of the bridge.
    fn plugin_config(&self, config: &StoredBridge) -> Value {
        let mtu = self.options.mtu.as_ref().and_then(|mtu| *mtu.borrow());
        bridge_config(config, &self.folder, self.dual_stack, mtu)
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
        self.reserve().await?;
        self.service_rules().await?;
        let mut keeps_addresses = self.turn.lock().await;
        // Again: with the last pod that was detached meanwhile, the range may have changed.
        let config = self.reserve().await?;
        let bridge = self.plugin_config(&config);
        // A repeated attachment would find its address in use.
        let _ = self.call("bridge", Verb::Del, pod, INTERFACE, &bridge).await;
        self.call("loopback", Verb::Add, pod, "lo", &loopback_config()).await?;
        let result = self.call("bridge", Verb::Add, pod, INTERFACE, &bridge).await?;
        if self.service_rules.is_some() {
            route_services(&config.bridge)?;
        }
        if !*keeps_addresses {
            *keeps_addresses = keep_addresses(&config, self.options.cluster_pods).await;
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
        let mut keeps_addresses = self.turn.lock().await;
        let Some(config) = StoredBridge::load(&self.folder)? else { return Ok(()) };
        if !pod.host_ports.is_empty() {
            let ports = portmap_config(&pod.host_ports, None);
            self.call("portmap", Verb::Del, pod, INTERFACE, &ports).await?;
        }
        self.call("bridge", Verb::Del, pod, INTERFACE, &self.plugin_config(&config)).await?;
        if remove_unused(&config.bridge).await? {
            *keeps_addresses = false;
            masquerade_again(&config, self.options.cluster_pods).await;
        }
        Ok(())
    }
}

fn bridge_exists(bridge: &str) -> bool {
    // The files of /sys/class/net belong to the network namespace in which /sys was mounted; these to the own one.
    fs::exists(format!("/proc/sys/net/ipv4/conf/{bridge}")).unwrap_or(true)
}

/// Lets packets to pods of other nodes keep the addresses of their pods, by which policies recognise them: the plugin
/// `bridge` replaces those of all packets that leave the range. The rule comes before the plugin's. Returns whether it is
/// there; without it, pods still reach each other, so a failure is only logged.
async fn keep_addresses(config: &StoredBridge, cluster_pods: Ipv4Net) -> bool {
    let rule = address_rule(config, cluster_pods);
    if iptables("-C", &rule).await.is_ok() {
        return true;
    }
    let added = iptables("-I", &rule).await;
    if let Err(error) = &added {
        tracing::warn!(
            error,
            "pods of other nodes see this node's address instead of its pods': no masquerading exception"
        );
    }
    added.is_ok()
}

/// Removes the rule of [`keep_addresses`]. A rule that is left does not matter without pods.
async fn masquerade_again(config: &StoredBridge, cluster_pods: Ipv4Net) {
    if let Err(error) = iptables("-D", &address_rule(config, cluster_pods)).await {
        tracing::debug!(error, bridge = config.bridge, "cannot remove the masquerading exception");
    }
}

/// Connections through a port of the host still get the node's address: their answers must come back through it.
fn address_rule(config: &StoredBridge, cluster_pods: Ipv4Net) -> Vec<String> {
    let (range, pods) = (config.range.to_string(), cluster_pods.to_string());
    let comment = format!("mayfly: {} keeps addresses of pods", config.bridge);
    let rule = ["-s", &range, "-d", &pods, "-m", "mark", "!", "--mark", PORT_MAPPING_MARK];
    let rule = rule.into_iter().chain(["-m", "comment", "--comment", &comment, "-j", "ACCEPT"]);
    rule.map(str::to_owned).collect()
}

/// Runs `iptables` on the chain of address translation after routing.
async fn iptables(verb: &str, rule: &[String]) -> Result<(), String> {
    let program = find_program("iptables").unwrap_or_else(|| "iptables".into());
    let mut command = Command::new(program);
    command.args(["-w", "-t", "nat", verb, "POSTROUTING"]).args(rule).kill_on_drop(true);
    let output = command.output().await.map_err(|error| format!("cannot run iptables: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

/// Lets pods on a bridge reach Service endpoints at loopback addresses of the node (functions, the DNS server). The
/// rules for Services drop packets that pods send to loopback addresses directly.
fn route_services(bridge: &str) -> Result<(), NetworkError> {
    let file = format!("/proc/sys/net/ipv4/conf/{bridge}/route_localnet");
    fs::write(&file, "1").map_err(|error| NetworkError(format!("cannot write {file}: {error}")))
}

/// Removes a bridge without pods; the attachment of the next pod creates it again. Returns whether it has no pods.
async fn remove_unused(bridge: &str) -> Result<bool, NetworkError> {
    // Not by the files of /sys/class/net: they belong to the network namespace in which /sys was mounted. The command
    // fails if there is no such bridge.
    let ports = Command::new("ip").args(["-o", "link", "show", "master", bridge]).output().await;
    if ports.is_ok_and(|ports| ports.status.success() && !ports.stdout.is_empty()) {
        return Ok(false);
    }
    let removed = Command::new("ip").args(["link", "delete", "dev", bridge]).output().await;
    let output = removed.map_err(|error| NetworkError(format!("cannot run ip: {error}")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !said.contains("Cannot find device") {
        return Err(NetworkError(format!("cannot remove the bridge {bridge}: {}", said.trim())));
    }
    Ok(true)
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

fn bridge_config(
    config: &StoredBridge,
    folder: &std::path::Path,
    dual_stack: bool,
    mtu: Option<u32>,
) -> Value {
    let (mut ranges, mut routes) =
        (vec![json!([{"subnet": config.range.to_string()}])], vec![json!({"dst": "0.0.0.0/0"})]);
    if dual_stack {
        ranges.push(json!([{"subnet": range_v6(config.range).to_string()}]));
        routes.push(json!({"dst": "::/0"}));
    }
    // The plugin's zero stands for the kernel's default.
    json!({
        "cniVersion": CNI_VERSION,
        "name": config.bridge,
        "type": "bridge",
        "mtu": mtu.unwrap_or(0),
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
    fn pods_of_both_families_have_ranges_of_both() {
        let range = "10.212.7.0/24".parse().unwrap();
        let config = StoredBridge { bridge: "mf-1".into(), range };
        let plugin = bridge_config(&config, std::path::Path::new("/d"), true, Some(1450));
        assert_eq!(plugin["mtu"], 1450);
        let ipam = plugin["ipam"].clone();
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
