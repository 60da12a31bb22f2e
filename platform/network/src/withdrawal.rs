//! Whether new connections through Services may still go to a pod that ends.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use mayfly_api::k8s::api::discovery::v1::EndpointSlice;
use tokio::sync::watch;

/// The addresses of endpoints that are not about to end, by the slices that the node's proxy applied last.
pub(crate) type LiveEndpoints = Arc<BTreeSet<IpAddr>>;

pub(crate) fn live_endpoints<'a>(slices: impl IntoIterator<Item = &'a EndpointSlice>) -> LiveEndpoints {
    let endpoints = slices.into_iter().flat_map(|slice| &slice.endpoints).filter(|endpoint| {
        let conditions = endpoint.conditions.as_ref();
        conditions.and_then(|conditions| conditions.terminating) != Some(true)
    });
    let addresses = endpoints.flat_map(|endpoint| &endpoint.addresses);
    Arc::new(addresses.filter_map(|address| address.parse().ok()).collect())
}

/// Follows what the node's proxy applied. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AppliedEndpoints(pub(crate) watch::Receiver<LiveEndpoints>);

impl AppliedEndpoints {
    /// Waits until the proxy has applied, in all slices with one of these addresses, that the pod ends: from then on new
    /// connections go to it only where no other endpoint is ready. Returns whether there was anything to wait for; at
    /// once, where the proxy serves nothing or has ended.
    pub async fn withdrawn(&self, addresses: &[IpAddr]) -> bool {
        let mut live = self.0.clone();
        let is_gone = |live: &LiveEndpoints| !addresses.iter().any(|address| live.contains(address));
        if is_gone(&live.borrow_and_update()) {
            return false;
        }
        let _ = live.wait_for(is_gone).await;
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(endpoints: &[(&str, bool)]) -> EndpointSlice {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|(address, terminating)| {
                json!({"addresses": [address], "conditions": {"ready": !terminating, "terminating": terminating}})
            })
            .collect();
        serde_json::from_value(json!({"addressType": "IPv4", "endpoints": endpoints})).unwrap()
    }

    #[tokio::test]
    async fn a_pod_is_withdrawn_when_every_slice_says_that_it_ends() {
        let (sender, receiver) = watch::channel(LiveEndpoints::default());
        let applied = AppliedEndpoints(receiver);
        let pod = ["10.0.0.1".parse().unwrap()];
        assert!(!applied.withdrawn(&pod).await, "no Service has it");
        let (live, ending) =
            (slice(&[("10.0.0.1", false), ("10.0.0.2", false)]), slice(&[("10.0.0.1", true)]));
        sender.send_replace(live_endpoints([&live, &live]));
        let waiting = applied.withdrawn(&pod);
        tokio::pin!(waiting);
        for slices in [[&live, &live], [&live, &ending]] {
            sender.send_replace(live_endpoints(slices));
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("a Service still uses it"),
                () = std::future::ready(()) => {}
            }
        }
        sender.send_replace(live_endpoints([&ending, &ending]));
        assert!(waiting.await);
        sender.send_replace(live_endpoints([&live]));
        let waiting = applied.withdrawn(&pod);
        drop(sender);
        waiting.await;
    }
}
