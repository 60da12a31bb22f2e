//! NetworkPolicies for the connections that guests make, and for those that their pods accept.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
};

use mayfly_api::{ObjectKey, function::replica_labels};
use mayfly_runtime::{ConnectionPolicy, OutboundRoute, PodIdentity, SandboxSpec};

/// The policies of the cluster; none until its parts are created.
#[derive(Clone, Default)]
pub(crate) struct HostPolicies(Arc<OnceLock<Arc<dyn ConnectionPolicy>>>);

impl HostPolicies {
    /// Makes the cluster's policies known. Once.
    pub(crate) fn attach(&self, policies: Arc<dyn ConnectionPolicy>) {
        // A second attachment would be a second cluster in this process, which no server has.
        let _ = self.0.set(policies);
    }

    pub(crate) fn of_pod(&self, sandbox: &SandboxSpec) -> PodPolicies {
        let ObjectKey { namespace, name } = sandbox.pod.clone();
        let address = sandbox.address.filter(|_| !sandbox.host.host_network);
        self.of(PodIdentity { namespace, name: Some(name), labels: sandbox.labels.clone(), address })
    }

    /// Of a function's revision: its instances make connections for all of its pods, also while it has none.
    pub(crate) fn of_revision(&self, revision: &ObjectKey, function: &str) -> PodPolicies {
        let namespace = revision.namespace.clone();
        let labels = replica_labels(function, &revision.name);
        self.of(PodIdentity { namespace, name: None, labels, address: None })
    }

    fn of(&self, pod: PodIdentity) -> PodPolicies {
        PodPolicies { host: self.clone(), pod: pod.into() }
    }
}

/// The policies for the connections of one pod, or of one revision. Cheap to clone.
#[derive(Clone)]
pub(crate) struct PodPolicies {
    host: HostPolicies,
    pod: Arc<PodIdentity>,
}

impl PodPolicies {
    /// The number of the policies for the pod's namespace, as [`ConnectionPolicy::generation`].
    pub(crate) fn generation(&self) -> u64 {
        self.host.0.get().map_or(0, |policies| policies.generation(&self.pod.namespace))
    }

    /// The way of a connection, as [`ConnectionPolicy::route`].
    pub(crate) async fn route(&self, to: SocketAddr, tried: &[SocketAddr]) -> OutboundRoute {
        match self.host.0.get() {
            Some(policies) => policies.route(&self.pod, to, tried).await,
            None => OutboundRoute::To(to),
        }
    }

    /// Whether a connection from an address to a port of the pod is accepted.
    pub(crate) async fn admits(&self, port: u16, from: IpAddr) -> bool {
        match self.host.0.get() {
            Some(policies) => policies.admits(&self.pod, port, from).await,
            None => true,
        }
    }
}
