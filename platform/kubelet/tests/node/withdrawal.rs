//! Deleted pods run until the node's proxy has taken them out of their Services.

use std::{net::IpAddr, sync::Arc};

use async_trait::async_trait;
use kube::api::DeleteParams;
use mayfly_kubelet::ServedEndpoints;
use mayfly_runtime::{ContainerState, PodUid, Runtime as _};
use serde_json::json;
use tokio::sync::watch;

use crate::harness::{KubeletHarness, phase};

/// A proxy that uses all endpoints until a test says otherwise.
#[derive(Debug, Default)]
struct Proxy {
    /// The addresses that the node asked for last.
    asked: watch::Sender<Vec<IpAddr>>,
    withdrawn: watch::Sender<bool>,
}

#[async_trait]
impl ServedEndpoints for Proxy {
    async fn withdrawn(&self, _: &str, addresses: &[IpAddr]) -> bool {
        self.asked.send_replace(addresses.to_vec());
        let _ = self.withdrawn.subscribe().wait_for(|is| *is).await;
        true
    }
}

async fn node_with(proxy: &Arc<Proxy>) -> KubeletHarness {
    let cluster = KubeletHarness::stopped().await;
    cluster.run_serving(proxy.clone());
    cluster.create("web", json!({"terminationGracePeriodSeconds": 3600}), json!({})).await;
    cluster.until("web", "running", |pod| phase(pod) == "Running").await;
    cluster
}

#[tokio::test]
async fn a_deleted_pod_runs_until_its_services_have_let_it_go() {
    let proxy = Arc::<Proxy>::default();
    let cluster = node_with(&proxy).await;
    let pod = cluster.pods().get("web").await.unwrap();
    let uid = PodUid(pod.metadata.uid.unwrap());
    let address: IpAddr = pod.status.unwrap().pod_ip.unwrap().parse().unwrap();
    cluster.pods().delete("web", &DeleteParams::default()).await.unwrap();
    let mut asked = proxy.asked.subscribe();
    let asked = asked.wait_for(|addresses| !addresses.is_empty()).await.unwrap().clone();
    assert_eq!(asked, [address]);
    let states = cluster.runtime.containers(&uid);
    assert!(matches!(states[0].1, ContainerState::Running { .. }), "{states:?}");
    proxy.withdrawn.send_replace(true);
    cluster.gone("web").await;
}

#[tokio::test]
async fn a_proxy_that_lets_nothing_go_keeps_no_pod() {
    let proxy = Arc::<Proxy>::default();
    let cluster = node_with(&proxy).await;
    cluster.pods().delete("web", &DeleteParams::default()).await.unwrap();
    cluster.gone("web").await;
    assert!(!*proxy.withdrawn.borrow());
}
