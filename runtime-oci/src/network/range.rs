//! The range of addresses of a node's pods: chosen by the node, or assigned by its cluster.

use std::{fs, io, net::Ipv4Addr, path::Path, time::Duration};

use ipnet::Ipv4Net;
use mayfly_runtime::NetworkError;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

/// The network of all pods of a cluster.
const CLUSTER_PODS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 212, 0, 0), 16);
/// The length of the prefix of a range that a node chooses.
const RANGE_PREFIX: u8 = 24;
/// The longest wait of a pod for its node's range before its start is retried.
const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(15);

/// The origin of the range of a node's pods.
#[derive(Clone, Debug, Default)]
pub enum PodRange {
    /// The node chooses a subnet that no route of the host overlaps, for its first pod, and keeps it.
    #[default]
    Chosen,
    /// The cluster assigns it: `spec.podCIDR` of the Node. Pods wait while it is `None`. It may change while the node
    /// has no pods.
    Assigned(watch::Receiver<Option<Ipv4Net>>),
}

/// The bridge's place in the network of a cluster.
#[derive(Clone, Debug)]
pub struct BridgeOptions {
    /// The origin of the range of pods.
    pub range: PodRange,
    /// The network of all pods of the cluster: packets between them keep their addresses, those to other destinations
    /// get the node's. Ranges are subnets of it.
    pub cluster_pods: Ipv4Net,
    /// The MTU of new pods, in bytes; `None`: that of the host's links.
    pub mtu: Option<watch::Receiver<Option<u32>>>,
}

impl Default for BridgeOptions {
    fn default() -> Self {
        Self { range: PodRange::Chosen, cluster_pods: CLUSTER_PODS, mtu: None }
    }
}

/// The stored configuration of a bridge, reused after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredBridge {
    pub(super) bridge: String,
    #[serde(serialize_with = "write_range", deserialize_with = "read_range")]
    pub(crate) range: Ipv4Net,
}

fn write_range<S: serde::Serializer>(range: &Ipv4Net, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(range)
}

fn read_range<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Ipv4Net, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

impl StoredBridge {
    /// The configuration stored in a folder, if there is one.
    pub(super) fn load(folder: &Path) -> Result<Option<Self>, NetworkError> {
        let file = folder.join("bridge.json");
        let Ok(text) = fs::read(&file) else { return Ok(None) };
        let config = serde_json::from_slice(&text);
        config.map(Some).map_err(|error| NetworkError(format!("{} is damaged: {error}", file.display())))
    }

    fn save(self, folder: &Path) -> Result<Self, NetworkError> {
        let file = folder.join("bridge.json");
        let written = fs::create_dir_all(folder).and_then(|()| {
            // A file that a crash cut off would keep all later pods of this node from starting.
            let mut part = tempfile::NamedTempFile::new_in(folder)?;
            io::Write::write_all(&mut part, &serde_json::to_vec(&self)?)?;
            part.as_file().sync_all()?;
            part.persist(&file)?;
            Ok(())
        });
        written.map_err(|error| NetworkError(format!("cannot write {}: {error}", file.display())))?;
        Ok(self)
    }

    /// The stored configuration; otherwise one whose range no route of the host overlaps.
    pub(super) fn chosen(folder: &Path, cluster_pods: Ipv4Net) -> Result<Self, NetworkError> {
        if let Some(stored) = Self::load(folder)? {
            return Ok(stored);
        }
        let used = fs::read_to_string("/proc/net/route").map(|text| routes(&text)).unwrap_or_default();
        let chosen = choose(folder, cluster_pods, &used);
        let none = || NetworkError(format!("no /{RANGE_PREFIX} of {cluster_pods} is free on this host"));
        chosen.ok_or_else(none)?.save(folder)
    }

    /// The configuration for a range that the cluster assigned. `bridge_exists` says whether a bridge has pods.
    pub(super) fn assigned(
        folder: &Path,
        cluster_pods: Ipv4Net,
        range: Ipv4Net,
        bridge_exists: impl Fn(&str) -> bool,
    ) -> Result<Self, NetworkError> {
        if !cluster_pods.contains(&range) {
            return Err(NetworkError(format!(
                "the Node's spec.podCIDR {range} is not in the cluster's network of pods {cluster_pods}"
            )));
        }
        match Self::load(folder)? {
            Some(stored) if stored.range == range => Ok(stored),
            Some(stored) if bridge_exists(&stored.bridge) => Err(NetworkError(format!(
                "the pods of this node are in {} on the bridge {}, but the Node's spec.podCIDR is {range}: remove the \
                 pods of containers from this node, and the next one gets an address of the new range",
                stored.range, stored.bridge
            ))),
            _ => Self { bridge: bridge_name(folder), range }.save(folder),
        }
    }
}

/// Waits for the range that the cluster assigns.
pub(super) async fn assignment(range: &watch::Receiver<Option<Ipv4Net>>) -> Result<Ipv4Net, NetworkError> {
    let mut range = range.clone();
    let assigned = tokio::time::timeout(ASSIGNMENT_TIMEOUT, range.wait_for(Option::is_some)).await;
    let assigned = assigned.ok().and_then(|assigned| *assigned.ok()?);
    assigned.ok_or_else(|| {
        let none = "the cluster has not assigned a range of pod addresses (spec.podCIDR of the Node) to this node yet";
        NetworkError(none.into())
    })
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
fn choose(folder: &Path, cluster_pods: Ipv4Net, used: &[Ipv4Net]) -> Option<StoredBridge> {
    let ranges: Vec<Ipv4Net> = cluster_pods.subnets(RANGE_PREFIX).ok()?.collect();
    let first = usize::from(digest(folder)[0]);
    let overlaps = |range: &Ipv4Net| used.iter().any(|other| other.contains(range) || range.contains(other));
    let candidates = (0..ranges.len()).filter_map(|step| ranges.get((first + step) % ranges.len()).copied());
    let range = candidates.into_iter().find(|range| !overlaps(range))?;
    Some(StoredBridge { bridge: bridge_name(folder), range })
}

fn digest(folder: &Path) -> [u8; 32] {
    Sha256::digest(folder.to_string_lossy().as_bytes()).into()
}

/// The name of a data directory's bridge. The rules for Services (`platform/network`) recognise bridges of pods by the
/// beginning of the name.
fn bridge_name(folder: &Path) -> String {
    format!("mf-{}", hex::encode(&digest(folder)[1..5]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_the_host_uses_is_left_alone() {
        let choose = |used: &[Ipv4Net]| choose(Path::new("/data"), CLUSTER_PODS, used);
        let free = choose(&[]).unwrap();
        assert_eq!(free, choose(&[]).unwrap(), "the same folder gets the same range");
        assert!(CLUSTER_PODS.contains(&free.range) && free.bridge.len() < 16, "{free:?}");
        let next = choose(&[free.range]).unwrap();
        assert_ne!(next.range, free.range);
        assert_eq!(choose(&["10.0.0.0/8".parse().unwrap()]), None);
    }

    #[test]
    fn routes_are_read_from_the_kernels_table() {
        let text = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                    eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                    eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        assert_eq!(routes(text), ["192.168.0.0/24".parse::<Ipv4Net>().unwrap()]);
    }

    #[test]
    fn an_assigned_range_may_change_while_the_node_has_no_bridge() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = ("10.212.7.0/24".parse().unwrap(), "10.212.8.0/24".parse().unwrap());
        let assigned = |range, exists| StoredBridge::assigned(folder.path(), CLUSTER_PODS, range, |_| exists);
        let config = assigned(first, false).unwrap();
        assert_eq!(config.range, first);
        assert_eq!(assigned(first, true).as_ref(), Ok(&config), "after a restart");
        let error = assigned(second, true).unwrap_err().0;
        assert!(error.contains("10.212.7.0/24") && error.contains("10.212.8.0/24"), "{error}");
        assert_eq!(StoredBridge::load(folder.path()), Ok(Some(config.clone())));
        assert_eq!(assigned(second, false), Ok(StoredBridge { range: second, ..config.clone() }));
        let error = assigned("10.96.0.0/24".parse().unwrap(), false).unwrap_err().0;
        assert!(error.contains("10.212.0.0/16"), "{error}");
        // A range that the node chose before it joined a cluster is kept by one that chooses.
        let chosen = StoredBridge::chosen(folder.path(), CLUSTER_PODS).unwrap();
        assert_eq!(chosen, StoredBridge { range: second, ..config });
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_waits_for_the_range_and_fails_with_the_reason() {
        let (sender, receiver) = watch::channel(None);
        let error = assignment(&receiver).await.unwrap_err().0;
        assert!(error.contains("spec.podCIDR"), "{error}");
        let waiting = tokio::spawn(async move { assignment(&receiver).await });
        tokio::task::yield_now().await;
        let range = "10.212.7.0/24".parse().unwrap();
        sender.send_replace(Some(range));
        assert_eq!(waiting.await.unwrap(), Ok(range));
    }
}
