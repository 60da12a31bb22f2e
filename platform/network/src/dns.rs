//! Cluster DNS: names of Services and pods, and of everything else by the host's name servers.
//!
//! [`zone`] answers for the cluster, purely; [`ClusterNames`] keeps a zone as the cluster's objects are, and gives
//! programs of this process the addresses of a name; [`ClusterDns`] serves it to pods as the Service
//! `kube-system/kube-dns`, whose endpoint is an address of this node.

pub mod forward;
pub mod records;
mod role;
pub mod server;
pub mod wire;
pub mod zone;

pub use role::{ClusterDns, ClusterNames, DnsConfig};
pub use zone::HostAddresses;
