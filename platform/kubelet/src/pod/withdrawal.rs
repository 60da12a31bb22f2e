//! A deleted pod keeps running until the node's proxy has taken it out of its Services, so that no new connection comes
//! to a container that has received its signal. Upstream leaves this to preStop hooks that sleep.

use std::{fmt, net::IpAddr, time::Duration};

use async_trait::async_trait;
use mayfly_api::k8s::api::core::v1::Pod;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{local::LocalPod, worker::Worker};

/// The longest wait: a proxy that cannot apply its rules must not keep pods.
const WITHDRAWAL_MAX: Duration = Duration::from_secs(2);
/// The time in which a server accepts the connections that were made just before.
const ACCEPTANCE: Duration = Duration::from_millis(100);

/// The endpoints of Services, as the proxy of this node uses them.
#[async_trait]
pub trait ServedEndpoints: fmt::Debug + Send + Sync {
    /// Waits until new connections through Services of the pod's namespace go to none of the addresses of a pod that
    /// ends, unless no other endpoint is ready. Returns whether there was anything to wait for.
    async fn withdrawn(&self, namespace: &str, addresses: &[IpAddr]) -> bool;
}

impl Worker {
    /// Waits until Services bring no new connections to a deleted pod, within its grace period, which is over at
    /// `ends`.
    pub(super) async fn withdrawn(&self, pod: &Pod, local: &LocalPod, ends: Instant) {
        let Some(endpoints) = &self.served_endpoints else { return };
        // Other pods have the addresses of the host's network, too.
        let shares_addresses = pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
        if shares_addresses || pod.metadata.deletion_timestamp.is_none() {
            return;
        }
        let addresses: Vec<_> = local.address.iter().chain(&local.more_addresses).copied().collect();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let until = ends.min(Instant::now() + WITHDRAWAL_MAX);
        match timeout_at(until, endpoints.withdrawn(namespace, &addresses)).await {
            Ok(false) => {}
            Ok(true) => sleep_until(ends.min(Instant::now() + ACCEPTANCE)).await,
            Err(_) => tracing::debug!(uid = %local.uid, "stopping a pod that its Services still use"),
        }
    }
}
