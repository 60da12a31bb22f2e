//! The cluster's zone: records of Services and pods, and the answers to queries. Pure.
//!
//! Follows the specification "Kubernetes DNS-Based Service Discovery", version 1.1.0
//! (<https://github.com/kubernetes/dns/blob/master/docs/specification.md>). Names of pods (`1-2-3-4.NAMESPACE.pod`) are
//! computed from the name alone, like CoreDNS's `pods insecure`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use mayfly_api::ObjectKey;

use super::records::{EndpointRecord, PortRecord, ServiceRecords, ServiceTarget};

/// The TTL of answers, in seconds: CoreDNS's default for the cluster's zone.
pub const TTL_SECONDS: u32 = 5;
/// The version of the specification, returned for `dns-version`.
const SPECIFICATION_VERSION: &str = "1.1.0";

/// The type of the records that a query is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordType {
    A,
    Aaaa,
    Srv,
    Ptr,
    Txt,
    Soa,
    Cname,
    Any,
    /// Any type for which the zone has no records.
    Other,
}

/// A record: its owner's name, without the final dot, and its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneRecord {
    pub name: String,
    pub data: RecordData,
}

/// The data of a record. Names are without the final dot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordData {
    /// An A or AAAA record.
    Address(IpAddr),
    Srv {
        weight: u16,
        port: u16,
        target: String,
    },
    Ptr(String),
    Cname(String),
    Txt(String),
    /// The start of authority of this zone.
    Soa,
}

/// All names of a cluster.
#[derive(Debug)]
pub struct Zone {
    /// In lower case, without the final dot.
    domain: String,
    services: BTreeMap<ObjectKey, ServiceRecords>,
    /// The names of each address. Several Services may share an endpoint.
    pointers: HashMap<IpAddr, BTreeSet<String>>,
    /// Whether the zone has had the records of all Services.
    is_complete: bool,
}

/// The answer of the zone to a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZoneAnswer {
    Records {
        answers: Vec<ZoneRecord>,
        additionals: Vec<ZoneRecord>,
    },
    /// The name is an alias; the records of this target are to be appended.
    Alias(String),
    /// The name exists, but has no records of this type.
    NoData,
    /// The name does not exist (`NXDOMAIN`).
    NoName,
    /// The name is not in this zone.
    Outside,
    /// The zone is not complete yet, so the absence of records means nothing.
    Incomplete,
}

/// A host name as used by a program in the cluster, resolved by the zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostAddresses {
    /// Empty: the name has no address, or a name below the cluster's domain does not exist.
    Addresses(Vec<IpAddr>),
    /// The target of a Service of the type `ExternalName`.
    Alias(String),
}

impl Zone {
    /// An empty zone below a domain such as `cluster.local`. It answers [`ZoneAnswer::Incomplete`] instead of negatively
    /// until [`Zone::complete`].
    #[must_use]
    pub fn new(domain: &str) -> Self {
        let domain = domain.trim_end_matches('.').to_ascii_lowercase();
        Self { domain, services: BTreeMap::new(), pointers: HashMap::new(), is_complete: false }
    }

    /// Declares that the records of all Services have been set.
    pub fn complete(&mut self) {
        self.is_complete = true;
    }

    /// The domain, without the final dot.
    #[must_use]
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Sets the records of a Service; `None` removes them.
    pub fn set(&mut self, key: &ObjectKey, records: Option<ServiceRecords>) {
        if let Some(old) = self.services.remove(key) {
            for (address, name) in old.pointers(key) {
                if let Some(names) = self.pointers.get_mut(&address) {
                    names.remove(&name);
                    if names.is_empty() {
                        self.pointers.remove(&address);
                    }
                }
            }
        }
        let Some(records) = records else { return };
        for (address, name) in records.pointers(key) {
            self.pointers.entry(address).or_default().insert(name);
        }
        self.services.insert(key.clone(), records);
    }

    /// Answers a query for the records of type `kind` of `name`, which has no final dot.
    #[must_use]
    pub fn answer(&self, name: &str, kind: RecordType) -> ZoneAnswer {
        match self.known(name, kind) {
            ZoneAnswer::NoData | ZoneAnswer::NoName if !self.is_complete => ZoneAnswer::Incomplete,
            // The address of an unknown Service or pod; the host's name servers know it even less.
            ZoneAnswer::Outside if !self.is_complete && arpa_address(name).is_some() => {
                ZoneAnswer::Incomplete
            }
            answer => answer,
        }
    }

    /// The answer according to the present records.
    fn known(&self, name: &str, kind: RecordType) -> ZoneAnswer {
        let lower = name.to_ascii_lowercase();
        let Some(relative) = self.relative(&lower) else { return self.reverse(name, kind) };
        let labels: Vec<&str> = relative.split('.').filter(|label| !label.is_empty()).collect();
        let query = ZoneQuery { zone: self, name, kind };
        match *labels.as_slice() {
            [] if kind == RecordType::Soa => query.data([RecordData::Soa]),
            ["dns-version"] if kind == RecordType::Txt => {
                query.data([RecordData::Txt(SPECIFICATION_VERSION.to_owned())])
            }
            [] | ["dns-version" | "svc" | "pod"] => ZoneAnswer::NoData,
            [namespace, "svc"] if self.has_namespace(namespace) => ZoneAnswer::NoData,
            // Names below it exist, whatever the namespace.
            [_, "pod"] => ZoneAnswer::NoData,
            [ref before @ .., service, namespace, "svc"] => {
                let key = ObjectKey::new(namespace, service);
                match self.services.get(&key) {
                    Some(records) => query.of_service(&key, records, before),
                    None => ZoneAnswer::NoName,
                }
            }
            [address, _, "pod"] => match pod_address(address) {
                Some(address) => query.addresses([address]),
                None => ZoneAnswer::NoName,
            },
            _ => ZoneAnswer::NoName,
        }
    }

    /// The part of a lower-case name in front of the domain; `None` if it is not below the domain.
    fn relative<'a>(&self, name: &'a str) -> Option<&'a str> {
        let before = name.strip_suffix(&self.domain)?;
        (before.is_empty() || before.ends_with('.')).then_some(before)
    }

    /// Resolves a host name as used by a program in the cluster: a name below the cluster's domain, a name ending in
    /// `.svc`, or `SERVICE.NAMESPACE` of an existing Service. `None`: not a name of the cluster.
    #[must_use]
    pub fn resolve(&self, host: &str) -> Option<HostAddresses> {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let dots = host.matches('.').count();
        let (name, is_cluster_name) = if self.relative(&host).is_some() {
            (host, true)
        } else if dots > 1 && host.ends_with(".svc") {
            (self.name(&host), true)
        } else if dots == 1 {
            (self.name(&format!("{host}.svc")), false)
        } else {
            return None;
        };
        let mut found = Vec::new();
        for kind in [RecordType::A, RecordType::Aaaa] {
            match self.known(&name, kind) {
                ZoneAnswer::Records { answers, .. } => {
                    let address = |record: &ZoneRecord| match record.data {
                        RecordData::Address(address) => Some(address),
                        _ => None,
                    };
                    found.extend(answers.iter().filter_map(address));
                }
                ZoneAnswer::Alias(target) => return Some(HostAddresses::Alias(target)),
                ZoneAnswer::NoName | ZoneAnswer::Outside if !is_cluster_name => return None,
                ZoneAnswer::NoData | ZoneAnswer::NoName | ZoneAnswer::Outside | ZoneAnswer::Incomplete => {}
            }
        }
        Some(HostAddresses::Addresses(found))
    }

    fn has_namespace(&self, namespace: &str) -> bool {
        let first = ObjectKey::new(namespace, "");
        self.services.range(first..).next().is_some_and(|(key, _)| key.namespace == namespace)
    }

    /// Answers a reverse query. Addresses that the zone does not know are outside of it.
    fn reverse(&self, name: &str, kind: RecordType) -> ZoneAnswer {
        let Some(names) = arpa_address(name).and_then(|address| self.pointers.get(&address)) else {
            return ZoneAnswer::Outside;
        };
        if !matches!(kind, RecordType::Ptr | RecordType::Any) {
            return ZoneAnswer::NoData;
        }
        ZoneQuery { zone: self, name, kind }.data(names.iter().map(|of| RecordData::Ptr(self.name(of))))
    }

    /// The absolute name of a name below the domain.
    fn name(&self, relative: &str) -> String {
        format!("{relative}.{}", self.domain)
    }
}

/// A query that is being answered.
struct ZoneQuery<'a> {
    zone: &'a Zone,
    name: &'a str,
    kind: RecordType,
}

impl ZoneQuery<'_> {
    /// `before`: the labels in front of the Service's name.
    fn of_service(&self, key: &ObjectKey, records: &ServiceRecords, before: &[&str]) -> ZoneAnswer {
        match (&records.target, before) {
            (ServiceTarget::ExternalName(target), []) => {
                ZoneAnswer::Alias(target.trim_end_matches('.').to_owned())
            }
            (ServiceTarget::ExternalName(_), _) => ZoneAnswer::NoName,
            // As in CoreDNS: programs look for their peers by the Service's name alone.
            (_, []) if self.kind == RecordType::Srv => self.ports(key, records, |_| true),
            (ServiceTarget::ClusterIps(addresses), []) => self.addresses(addresses.iter().copied()),
            (ServiceTarget::Endpoints(endpoints), []) => {
                self.addresses(endpoints.iter().map(|endpoint| endpoint.address))
            }
            (_, [protocol]) if protocol.starts_with('_') => {
                let has = records.ports().any(|(_, of, _)| format!("_{of}") == **protocol);
                if has { ZoneAnswer::NoData } else { ZoneAnswer::NoName }
            }
            (_, [port, protocol]) => self.service_port(key, records, port, protocol),
            (ServiceTarget::Endpoints(endpoints), [hostname]) => {
                let named = endpoints.iter().filter(|endpoint| endpoint.label() == **hostname);
                let named: Vec<_> = named.map(|endpoint| endpoint.address).collect();
                if named.is_empty() { ZoneAnswer::NoName } else { self.addresses(named) }
            }
            _ => ZoneAnswer::NoName,
        }
    }

    /// `_port._protocol.service`: one SRV record for a cluster IP, one for each endpoint of a headless Service, with
    /// the targets' addresses as additional records.
    fn service_port(
        &self,
        key: &ObjectKey,
        records: &ServiceRecords,
        port: &str,
        protocol: &str,
    ) -> ZoneAnswer {
        let (Some(port), Some(protocol)) = (port.strip_prefix('_'), protocol.strip_prefix('_')) else {
            return ZoneAnswer::NoName;
        };
        if !records.ports().any(|(name, of, _)| !name.is_empty() && name == port && of == protocol) {
            return ZoneAnswer::NoName;
        }
        if !matches!(self.kind, RecordType::Srv | RecordType::Any) {
            return ZoneAnswer::NoData;
        }
        self.ports(key, records, |of| of.name == port && of.protocol == protocol)
    }

    /// The SRV records of the ports that `is_asked` accepts.
    fn ports(
        &self,
        key: &ObjectKey,
        records: &ServiceRecords,
        is_asked: impl Fn(&PortRecord) -> bool,
    ) -> ZoneAnswer {
        let service = self.zone.name(&format!("{}.{}.svc", key.name, key.namespace));
        let asked = |ports: &[PortRecord]| -> Vec<u16> {
            ports.iter().filter(|of| is_asked(of)).map(|of| of.number).collect()
        };
        let targets: Vec<(String, Vec<u16>, Vec<IpAddr>)> = match &records.target {
            ServiceTarget::ClusterIps(addresses) => {
                vec![(service, asked(&records.ports), addresses.clone())]
            }
            ServiceTarget::Endpoints(endpoints) => {
                let target = |endpoint: &EndpointRecord| {
                    let name = format!("{}.{service}", endpoint.label());
                    (name, asked(&endpoint.ports), vec![endpoint.address])
                };
                endpoints.iter().map(target).collect()
            }
            ServiceTarget::ExternalName(_) => return ZoneAnswer::NoName,
        };
        // Equal priority and equal weights.
        let count: usize = targets.iter().map(|(_, ports, _)| ports.len()).sum();
        let weight = 100 / u16::try_from(count.clamp(1, 100)).unwrap_or(100);
        let (mut answers, mut additionals) = (Vec::new(), Vec::new());
        for (target, ports, addresses) in targets {
            if ports.is_empty() {
                continue;
            }
            let record = |address| ZoneRecord { name: target.clone(), data: RecordData::Address(address) };
            additionals.extend(addresses.into_iter().map(record));
            answers.extend(ports.into_iter().map(|port| ZoneRecord {
                name: self.name.to_owned(),
                data: RecordData::Srv { weight, port, target: target.clone() },
            }));
        }
        if answers.is_empty() { ZoneAnswer::NoData } else { ZoneAnswer::Records { answers, additionals } }
    }

    /// The addresses of the requested family.
    fn addresses(&self, addresses: impl IntoIterator<Item = IpAddr>) -> ZoneAnswer {
        let of_kind = addresses.into_iter().filter(|address| match self.kind {
            RecordType::A => address.is_ipv4(),
            RecordType::Aaaa => address.is_ipv6(),
            kind => kind == RecordType::Any,
        });
        self.data(of_kind.map(RecordData::Address))
    }

    fn data(&self, data: impl IntoIterator<Item = RecordData>) -> ZoneAnswer {
        let record = |data| ZoneRecord { name: self.name.to_owned(), data };
        let answers: Vec<_> = data.into_iter().map(record).collect();
        if answers.is_empty() {
            return ZoneAnswer::NoData;
        }
        ZoneAnswer::Records { answers, additionals: Vec::new() }
    }
}

/// The address of a pod label such as `10-0-0-1` or `fd00--1`.
fn pod_address(label: &str) -> Option<IpAddr> {
    label.replace('-', ".").parse().or_else(|_| label.replace('-', ":").parse()).ok()
}

/// The address of a name below `in-addr.arpa` or `ip6.arpa`.
fn arpa_address(name: &str) -> Option<IpAddr> {
    let name = name.to_ascii_lowercase();
    if let Some(octets) = name.strip_suffix(".in-addr.arpa") {
        let octets: Vec<&str> = octets.rsplit('.').collect();
        return octets.join(".").parse().ok().filter(IpAddr::is_ipv4);
    }
    let digits: String = name.strip_suffix(".ip6.arpa")?.rsplit('.').collect();
    let bits = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())??;
    Some(IpAddr::V6(bits.into()))
}

#[cfg(test)]
#[path = "zone_tests.rs"]
mod tests;
