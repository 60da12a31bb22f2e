//! The facts about a cluster's network on which its nodes agree: its server writes them, a node that joins uses them in
//! place of its own choices.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    path::Path,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    k8s::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta},
    wellknown::NAMESPACE_SYSTEM,
};
use sha2::{Digest as _, Sha256};

use crate::overlay::{PodRouting, RouteOwner, VxlanNetwork};

/// The ConfigMap with the facts, in the namespace `kube-system`.
pub const CLUSTER_FACTS_NAME: &str = "mayfly-network";
const FIELD_MANAGER: &str = "mayfly-network";

const SERVICE_NETWORK: &str = "serviceNetwork";
const SERVICE_NETWORK_V6: &str = "serviceNetworkV6";
const POD_NETWORK: &str = "podNetwork";
const DNS_ADDRESS: &str = "dnsAddress";
const DOMAIN: &str = "domain";
const POD_ROUTING: &str = "podRouting";
const VXLAN_ID: &str = "vxlanId";
const VXLAN_PORT: &str = "vxlanPort";

/// The largest VXLAN network identifier: it has 24 bits.
const VXLAN_ID_MAX: u32 = (1 << 24) - 1;

/// The network of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterFacts {
    /// The network of cluster IPs.
    pub service_network: Ipv4Net,
    /// The network of their IPv6 addresses.
    pub service_network_v6: Option<Ipv6Net>,
    /// The network of which each node's pods get a subnet.
    pub pod_network: Ipv4Net,
    /// The cluster IP of the name server; `None`: pods use the name servers of their host.
    pub dns_address: Option<IpAddr>,
    /// The domain of the cluster's names.
    pub domain: String,
    /// How packets reach pods of other nodes.
    pub routing: PodRouting,
    pub vxlan: VxlanNetwork,
}

/// The facts cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the ConfigMap {NAMESPACE_SYSTEM}/{CLUSTER_FACTS_NAME} {0}; the cluster's server writes it when it starts"
)]
pub struct ClusterFactsError(String);

/// The facts cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FetchFactsError {
    #[error("cannot read the ConfigMap {NAMESPACE_SYSTEM}/{CLUSTER_FACTS_NAME}: {0}")]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Facts(#[from] ClusterFactsError),
}

impl ClusterFacts {
    /// The object in which the server publishes the facts.
    #[must_use]
    pub fn to_config_map(&self) -> ConfigMap {
        let mut data: BTreeMap<String, String> = [
            (SERVICE_NETWORK, self.service_network.to_string()),
            (POD_NETWORK, self.pod_network.to_string()),
            (DOMAIN, self.domain.clone()),
            (POD_ROUTING, self.routing.name().to_owned()),
            (VXLAN_ID, self.vxlan.id.to_string()),
            (VXLAN_PORT, self.vxlan.port.to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let optional = [
            (SERVICE_NETWORK_V6, self.service_network_v6.map(|network| network.to_string())),
            (DNS_ADDRESS, self.dns_address.map(|address| address.to_string())),
        ];
        data.extend(optional.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        let metadata = ObjectMeta {
            name: Some(CLUSTER_FACTS_NAME.to_owned()),
            namespace: Some(NAMESPACE_SYSTEM.to_owned()),
            ..ObjectMeta::default()
        };
        ConfigMap { metadata, data: Some(data), ..ConfigMap::default() }
    }

    /// Reads the facts. Keys that this version does not know are ignored.
    ///
    /// # Errors
    /// A key is missing or has an invalid value; the text names it.
    pub fn from_config_map(object: &ConfigMap) -> Result<Self, ClusterFactsError> {
        let none = BTreeMap::new();
        let facts = FactReader(object.data.as_ref().unwrap_or(&none));
        let vxlan = VxlanNetwork { id: facts.required(VXLAN_ID)?, port: facts.required(VXLAN_PORT)? };
        if vxlan.id > VXLAN_ID_MAX || vxlan.port == 0 {
            return Err(ClusterFactsError(format!("has an invalid {VXLAN_ID} or {VXLAN_PORT}")));
        }
        Ok(Self {
            service_network: facts.required(SERVICE_NETWORK)?,
            service_network_v6: facts.optional(SERVICE_NETWORK_V6)?,
            pod_network: facts.required(POD_NETWORK)?,
            dns_address: facts.optional(DNS_ADDRESS)?,
            domain: facts.required(DOMAIN)?,
            routing: facts.required(POD_ROUTING)?,
            vxlan,
        })
    }

    /// Writes the facts, on the server.
    ///
    /// # Errors
    /// The API refuses the object or cannot be reached.
    pub async fn publish(&self, client: kube::Client) -> Result<(), kube::Error> {
        let objects: Api<ConfigMap> = Api::namespaced(client, NAMESPACE_SYSTEM);
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        objects.patch(CLUSTER_FACTS_NAME, &parameters, &Patch::Apply(&self.to_config_map())).await.map(drop)
    }

    /// Reads the facts, on a node that joins.
    ///
    /// # Errors
    /// The API cannot be reached, the node may not read the object, or the facts are not there or invalid.
    pub async fn fetch(client: kube::Client) -> Result<Self, FetchFactsError> {
        let objects: Api<ConfigMap> = Api::namespaced(client, NAMESPACE_SYSTEM);
        let object = objects.get_opt(CLUSTER_FACTS_NAME).await?;
        let object = object.ok_or_else(|| ClusterFactsError("does not exist".into()))?;
        Ok(Self::from_config_map(&object)?)
    }

    /// Whether cluster IPs are loopback addresses, which the userspace proxy serves on every node: the server runs
    /// without root.
    #[must_use]
    pub fn has_loopback_services(&self) -> bool {
        self.service_network.network().is_loopback()
    }

    /// The networks of pods, for [`ProxyMode::Nftables`](crate::ProxyMode::Nftables).
    #[must_use]
    pub fn pod_networks(&self) -> Vec<IpNet> {
        vec![self.pod_network.into()]
    }
}

/// Reads the keys of the object.
struct FactReader<'a>(&'a BTreeMap<String, String>);

impl FactReader<'_> {
    fn optional<T: std::str::FromStr<Err: std::fmt::Display>>(
        &self,
        key: &str,
    ) -> Result<Option<T>, ClusterFactsError> {
        let Some(text) = self.0.get(key).filter(|text| !text.is_empty()) else { return Ok(None) };
        let parsed = text.parse().map(Some);
        parsed.map_err(|error| ClusterFactsError(format!("has an invalid {key} {text:?}: {error}")))
    }

    fn required<T: std::str::FromStr<Err: std::fmt::Display>>(
        &self,
        key: &str,
    ) -> Result<T, ClusterFactsError> {
        self.optional(key)?.ok_or_else(|| ClusterFactsError(format!("has no {key}")))
    }
}

/// The VXLAN network of the cluster whose Services have this network: servers of one machine use different ones.
#[must_use]
pub fn vxlan_of(service_network: Ipv4Addr) -> VxlanNetwork {
    let digest = Sha256::digest(service_network.octets());
    let [_, first, second, third] = *digest.first_chunk::<4>().unwrap_or(&[0; 4]);
    VxlanNetwork { id: u32::from_be_bytes([0, first, second, third]).max(1), ..VxlanNetwork::default() }
}

/// The name of the nftables tables of a node that joined a cluster, and the owner of its routes. Two nodes of one machine
/// have different ones, as their data directories differ; after a crash, a node finds its own again.
#[must_use]
pub fn joined_tables(node: &str, data_dir: &Path) -> (String, RouteOwner) {
    let digest = Sha256::digest([node.as_bytes(), &[0], data_dir.as_os_str().as_encoded_bytes()].concat());
    let table = format!("mayfly-node-{}", hex::encode(&digest[..4]));
    let owner = RouteOwner::of(&table);
    (table, owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> ClusterFacts {
        ClusterFacts {
            service_network: "10.96.64.0/18".parse().unwrap(),
            service_network_v6: None,
            pod_network: "10.212.0.0/16".parse().unwrap(),
            dns_address: Some("10.96.64.10".parse().unwrap()),
            domain: "cluster.local".into(),
            routing: PodRouting::Auto,
            vxlan: VxlanNetwork { id: 5, port: 8472 },
        }
    }

    #[test]
    fn facts_are_read_as_written() {
        let dual_stack = Some("fd6d:6179:666c:1::/112".parse().unwrap());
        let other = ClusterFacts { service_network_v6: dual_stack, dns_address: None, ..facts() };
        for facts in [facts(), ClusterFacts { routing: PodRouting::Vxlan, ..other }] {
            assert_eq!(ClusterFacts::from_config_map(&facts.to_config_map()), Ok(facts));
        }
    }

    #[test]
    fn an_error_names_the_key() {
        for (key, value, expected) in [
            (SERVICE_NETWORK, None, "has no serviceNetwork;"),
            (POD_NETWORK, Some("10.212.0.0"), "invalid podNetwork \"10.212.0.0\""),
            (DNS_ADDRESS, Some("dns"), "invalid dnsAddress \"dns\""),
            (POD_ROUTING, Some("magic"), "not one of auto, direct and vxlan"),
            (VXLAN_ID, Some("16777216"), "invalid vxlanId"),
            (VXLAN_PORT, Some("0"), "vxlanPort"),
            (VXLAN_PORT, Some("65536"), "invalid vxlanPort \"65536\""),
            (DOMAIN, Some(""), "has no domain;"),
        ] {
            let mut object = facts().to_config_map();
            let data = object.data.as_mut().unwrap();
            drop(data.remove(key));
            data.extend(value.map(|value| (key.to_owned(), value.to_owned())));
            let error = ClusterFacts::from_config_map(&object).unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains("kube-system/mayfly-network"),
                "{key}: {error}"
            );
        }
    }

    #[test]
    fn names_on_one_machine_differ() {
        let (table, owner) = joined_tables("a", Path::new("/d"));
        assert_eq!(joined_tables("a", Path::new("/d")), (table.clone(), owner));
        for (node, folder) in [("b", "/d"), ("a", "/e"), ("a/d", "")] {
            let other = joined_tables(node, Path::new(folder));
            assert_ne!((other.0, other.1), (table.clone(), owner));
        }
        let [first, second] = [[10, 96, 0, 0], [10, 96, 64, 0]].map(|network| vxlan_of(network.into()));
        assert!(first != second && first.device().len() < 16 && first.id <= VXLAN_ID_MAX, "{first:?}");
    }
}
