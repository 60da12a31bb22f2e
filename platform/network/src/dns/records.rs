//! Derives the DNS records of a Service from it and its EndpointSlices. Pure.

use std::{collections::BTreeSet, net::IpAddr};

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::Service,
        discovery::v1::{EndpointPort, EndpointSlice},
    },
};

use crate::slices::is_reachable;

/// The value of `clusterIP` of a headless Service.
const HEADLESS: &str = "None";

/// The targets of a Service's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceTarget {
    ClusterIps(Vec<IpAddr>),
    /// Headless: the ready endpoints.
    Endpoints(Vec<EndpointRecord>),
    ExternalName(String),
}

/// A port with its name (empty: unnamed), and its protocol in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortRecord {
    pub name: String,
    pub protocol: String,
    pub number: u16,
}

/// A ready endpoint of a headless Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndpointRecord {
    pub address: IpAddr,
    pub hostname: Option<String>,
    pub ports: Vec<PortRecord>,
}

impl EndpointRecord {
    /// The endpoint's label below its Service's name: its hostname, otherwise its address with dashes (as in CoreDNS).
    #[must_use]
    pub fn label(&self) -> String {
        self.hostname.clone().unwrap_or_else(|| self.address.to_string().replace(['.', ':'], "-"))
    }
}

/// The records of one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRecords {
    pub target: ServiceTarget,
    /// The Service's own ports.
    pub ports: Vec<PortRecord>,
}

impl ServiceRecords {
    /// Derives the records from a Service and its EndpointSlices. With `node`, only endpoints that the node of this name
    /// can reach have records: the loopback addresses of other nodes do not.
    #[must_use]
    pub fn of<'a>(
        service: &Service,
        slices: impl IntoIterator<Item = &'a EndpointSlice>,
        node: Option<&str>,
    ) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        let ports =
            spec.ports.iter().flatten().filter_map(|port| {
                port_record(port.name.as_deref(), port.protocol.as_deref(), Some(port.port))
            });
        let ports = ports.collect();
        let target = if spec.type_.as_deref() == Some("ExternalName") {
            ServiceTarget::ExternalName(spec.external_name.clone()?)
        } else if spec.cluster_ip.as_deref() == Some(HEADLESS) {
            let all: BTreeSet<_> = slices.into_iter().flat_map(|slice| endpoints(slice, node)).collect();
            ServiceTarget::Endpoints(all.into_iter().collect())
        } else {
            let all = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
            let all: BTreeSet<IpAddr> = all.filter_map(|address| address.parse().ok()).collect();
            ServiceTarget::ClusterIps(all.into_iter().collect())
        };
        Some(Self { target, ports })
    }

    /// The ports with names; for a headless Service this includes ports that only endpoints have.
    pub(super) fn ports(&self) -> impl Iterator<Item = (&str, &str, u16)> {
        let of_endpoints = match &self.target {
            ServiceTarget::Endpoints(endpoints) => endpoints.as_slice(),
            _ => &[],
        };
        let ports = self.ports.iter().chain(of_endpoints.iter().flat_map(|endpoint| &endpoint.ports));
        ports.map(|port| (port.name.as_str(), port.protocol.as_str(), port.number))
    }

    /// The addresses with their names, relative to the cluster's domain.
    pub(super) fn pointers(&self, key: &ObjectKey) -> Vec<(IpAddr, String)> {
        let service = format!("{}.{}.svc", key.name, key.namespace);
        match &self.target {
            ServiceTarget::ClusterIps(addresses) => {
                addresses.iter().map(|address| (*address, service.clone())).collect()
            }
            ServiceTarget::Endpoints(endpoints) => {
                let name = |endpoint: &EndpointRecord| format!("{}.{service}", endpoint.label());
                endpoints.iter().map(|endpoint| (endpoint.address, name(endpoint))).collect()
            }
            ServiceTarget::ExternalName(_) => Vec::new(),
        }
    }
}

fn port_record(name: Option<&str>, protocol: Option<&str>, number: Option<i32>) -> Option<PortRecord> {
    Some(PortRecord {
        name: name.unwrap_or_default().to_lowercase(),
        protocol: protocol.unwrap_or("TCP").to_lowercase(),
        number: u16::try_from(number?).ok()?,
    })
}

/// The ready endpoints of a slice. The EndpointSlice controller marks all endpoints of a Service with
/// `publishNotReadyAddresses` as ready.
fn endpoints(slice: &EndpointSlice, node: Option<&str>) -> Vec<EndpointRecord> {
    let record = |port: &EndpointPort| port_record(port.name.as_deref(), port.protocol.as_deref(), port.port);
    let ports: Vec<_> = slice.ports.iter().flatten().filter_map(record).collect();
    let ready = slice.endpoints.iter().filter(|endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    });
    let all = ready.flat_map(|endpoint| {
        let hostname = endpoint.hostname.clone().filter(|name| !name.is_empty());
        let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
        let addresses =
            addresses.filter(move |address| node.is_none_or(|node| is_reachable(endpoint, *address, node)));
        let ports = &ports;
        addresses.map(move |address| EndpointRecord {
            address,
            hostname: hostname.clone(),
            ports: ports.clone(),
        })
    });
    all.collect()
}
