//! Cluster DNS: names of Services and pods; other names are forwarded to the host's name servers.
//!
//! [`zone`] answers for the cluster, purely; [`ClusterNames`] updates a zone from the cluster's objects, and resolves
//! names for code in this process; [`ClusterDns`] serves it to pods as the Service `kube-system/kube-dns`, whose
//! endpoint is an address of this node.

pub mod forward;
pub mod records;
mod role;
pub mod server;
mod shares;
pub mod wire;
pub mod zone;

pub use role::{ClusterDns, ClusterNames, DnsConfig};
pub use zone::HostAddresses;
