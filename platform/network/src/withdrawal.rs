//! Whether new connections through Services may still go to a pod that ends.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use mayfly_api::k8s::api::discovery::v1::EndpointSlice;
use tokio::sync::watch;

use crate::slices::is_reachable;

/// The namespaces and addresses of endpoints that are not about to end, by the slices that the node's proxy applied
/// last. By namespace, because an EndpointSlice can contain any address: one of another namespace must not delay a pod.
pub(crate) type LiveEndpoints = Arc<BTreeSet<(Arc<str>, IpAddr)>>;

/// The live endpoints that the node called `node` can reach: another node's loopback addresses must not delay a pod.
pub(crate) fn live_endpoints<'a>(
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: &str,
) -> LiveEndpoints {
    let live = slices.into_iter().flat_map(|slice| {
        let namespace: Arc<str> = slice.metadata.namespace.as_deref().unwrap_or_default().into();
        let endpoints = slice.endpoints.iter().filter(|endpoint| {
            let conditions = endpoint.conditions.as_ref();
            conditions.and_then(|conditions| conditions.terminating) != Some(true)
        });
        endpoints.flat_map(move |endpoint| {
            let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
            let reachable = addresses.filter(|address| is_reachable(endpoint, *address, node));
            reachable.map(|address| (namespace.clone(), address)).collect::<Vec<_>>()
        })
    });
    Arc::new(live.collect())
}

/// Follows what the node's proxy applied. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AppliedEndpoints(pub(crate) watch::Receiver<LiveEndpoints>);

impl AppliedEndpoints {
    /// Waits until the proxy has applied, in all slices of the namespace with one of these addresses, that the pod ends:
    /// from then on it gets new connections only if no other endpoint is ready. Returns whether there was anything to
    /// wait for; at once if the proxy serves nothing or has ended.
    pub async fn withdrawn(&self, namespace: &str, addresses: &[IpAddr]) -> bool {
        let mut live = self.0.clone();
        let namespace: Arc<str> = namespace.into();
        let keys: Vec<_> = addresses.iter().map(|address| (namespace.clone(), *address)).collect();
        let is_gone = |live: &LiveEndpoints| !keys.iter().any(|key| live.contains(key));
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

    fn slice(namespace: &str, endpoints: &[(&str, bool)]) -> EndpointSlice {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|(address, terminating)| {
                json!({"addresses": [address], "conditions": {"ready": !terminating, "terminating": terminating}})
            })
            .collect();
        let metadata = json!({"namespace": namespace});
        serde_json::from_value(json!({"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints}))
            .unwrap()
    }

    #[tokio::test]
    async fn a_pod_is_withdrawn_when_every_slice_says_that_it_ends() {
        let (sender, receiver) = watch::channel(LiveEndpoints::default());
        let applied = AppliedEndpoints(receiver);
        let pod = ["10.0.0.1".parse().unwrap()];
        assert!(!applied.withdrawn("shop", &pod).await, "no Service has it");
        let (live, ending) = (
            slice("shop", &[("10.0.0.1", false), ("10.0.0.2", false)]),
            slice("shop", &[("10.0.0.1", true)]),
        );
        sender.send_replace(live_endpoints([&slice("other", &[("10.0.0.1", false)])], "here"));
        assert!(!applied.withdrawn("shop", &pod).await, "a slice of another namespace");
        sender.send_replace(live_endpoints([&live, &live], "here"));
        let waiting = applied.withdrawn("shop", &pod);
        tokio::pin!(waiting);
        for slices in [[&live, &live], [&live, &ending]] {
            sender.send_replace(live_endpoints(slices, "here"));
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("a Service still uses it"),
                () = std::future::ready(()) => {}
            }
        }
        sender.send_replace(live_endpoints([&ending, &ending], "here"));
        assert!(waiting.await);
        sender.send_replace(live_endpoints([&live], "here"));
        let waiting = applied.withdrawn("shop", &pod);
        drop(sender);
        waiting.await;
    }

    #[test]
    fn loopback_addresses_of_other_nodes_are_not_live() {
        let mut slice = slice("shop", &[("127.64.0.1", false), ("10.0.0.1", false)]);
        slice.endpoints.iter_mut().for_each(|endpoint| endpoint.node_name = Some("there".into()));
        assert_eq!(live_endpoints([&slice], "here").len(), 1);
        assert_eq!(live_endpoints([&slice], "there").len(), 2);
    }
}
