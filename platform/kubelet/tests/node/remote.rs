//! A node in another process than the API: its address, outages of the API, and restarts.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures::StreamExt as _;
use http::Request;
use kube::{Api, Client, api::DeleteParams, client::Body};
use mayfly_api::k8s::api::core::v1::{Node, NodeStatus, Pod};
use mayfly_apiserver::User;
use mayfly_informer::Informers;
use mayfly_kubelet::{Config, Kubelet};
use mayfly_runtime::{ContainerId, ContainerState, PodUid, Runtime as _};
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt as _;

use crate::harness::{KubeletHarness, is_true, phase, state};

/// The network between a node and the API.
#[derive(Clone)]
struct Network {
    is_down: watch::Sender<bool>,
    /// The number of requests during outages.
    refused: Arc<AtomicUsize>,
}

impl Network {
    fn new() -> Self {
        Self { is_down: watch::Sender::new(false), refused: Arc::default() }
    }

    /// A client whose requests fail and whose watches end while the network is down.
    fn client(&self, cluster: &KubeletHarness) -> Client {
        let (network, service) = (self.clone(), cluster.api.service::<Body>());
        let service = tower::service_fn(move |mut request: Request<Body>| {
            let (network, service) = (network.clone(), service.clone());
            async move {
                let mut is_down = network.is_down.subscribe();
                if *is_down.borrow() {
                    network.refused.fetch_add(1, Ordering::Relaxed);
                    return Err(io::Error::from(io::ErrorKind::ConnectionRefused));
                }
                request.extensions_mut().insert(User::in_process("test"));
                let response = service.oneshot(request).await.unwrap_or_else(|never| match never {});
                Ok(response.map(|body| {
                    let lost = Box::pin(async move { is_down.wait_for(|is_down| *is_down).await.is_ok() });
                    axum::body::Body::from_stream(body.into_data_stream().take_until(lost))
                }))
            }
        });
        Client::new(service, "default")
    }

    /// Waits until the node has tried to reach the API several times.
    async fn tried(&self, cluster: &KubeletHarness) {
        let before = self.refused.load(Ordering::Relaxed);
        let what = "the node tries to reach the API";
        cluster.eventually(what, async || self.refused.load(Ordering::Relaxed) > before + 10).await;
    }
}

/// A process of the node.
struct NodeProcess {
    stop: DropGuard,
    kubelet: JoinHandle<()>,
}

impl NodeProcess {
    fn start(cluster: &KubeletHarness, client: Client, config: Config) -> Self {
        let stop = CancellationToken::new();
        let informers = Informers::create(client.clone(), stop.clone());
        let kubelet = Kubelet::create(config, client, &informers, vec![cluster.runtime.clone()]);
        Self { kubelet: tokio::spawn(kubelet.run(stop.clone())), stop: stop.drop_guard() }
    }

    async fn stop(self) {
        drop(self.stop);
        self.kubelet.await.unwrap();
    }
}

fn config(cluster: &KubeletHarness) -> Config {
    Config::of_this_machine("n1", cluster.logs.clone(), "v0")
}

fn uid(pod: &Pod) -> PodUid {
    PodUid(pod.metadata.uid.clone().unwrap())
}

/// The attempts of the pod's container that run.
fn running(cluster: &KubeletHarness, pod: &Pod) -> Vec<u32> {
    let containers = cluster.runtime.containers(&uid(pod));
    let running = containers.iter().filter(|(_, state)| matches!(state, ContainerState::Running { .. }));
    running.map(|(id, _)| id.attempt).collect()
}

/// The reported port; zero if there is none (as upstream shows it).
fn agent_port(status: &NodeStatus) -> i32 {
    let endpoint = status.daemon_endpoints.as_ref().and_then(|ports| ports.kubelet_endpoint.as_ref());
    endpoint.map_or(0, |endpoint| endpoint.port)
}

#[tokio::test]
async fn a_node_reports_where_its_agent_is() {
    let cluster = KubeletHarness::stopped().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let status = async |what: &str, holds: fn(&NodeStatus) -> bool| {
        cluster.find(what, async || nodes.get_opt("n1").await.unwrap()?.status.filter(holds)).await
    };
    let remote = Config { address: "10.1.0.7".parse().unwrap(), agent_port: Some(10250), ..config(&cluster) };
    let node = NodeProcess::start(&cluster, cluster.client.clone(), remote);
    let reported = status("the port is reported", |status| agent_port(status) != 0).await;
    let addresses =
        json!([{"type": "InternalIP", "address": "10.1.0.7"}, {"type": "Hostname", "address": "n1"}]);
    assert_eq!(json!(reported.addresses), addresses);
    assert_eq!(agent_port(&reported), 10250);
    cluster.create("a", json!({}), json!({})).await;
    let pod = cluster.until("a", "ready", |pod| is_true(pod, "Ready")).await.status.unwrap();
    assert_eq!(
        (pod.host_ip.as_deref(), json!(pod.host_ips)),
        (Some("10.1.0.7"), json!([{"ip": "10.1.0.7"}]))
    );
    node.stop().await;

    let _node = NodeProcess::start(&cluster, cluster.client.clone(), config(&cluster));
    let reported = status("the port is removed", |status| agent_port(status) == 0).await;
    assert_eq!(json!(reported.addresses)[0]["address"], "127.0.0.1");
}

#[tokio::test]
async fn a_node_keeps_its_pods_during_an_outage_of_the_api_and_catches_up() {
    let cluster = KubeletHarness::stopped().await;
    let network = Network::new();
    let _node = NodeProcess::start(&cluster, network.client(&cluster), config(&cluster));
    let mut pods = Vec::new();
    for name in ["kept", "crashing", "deleted"] {
        cluster.create(name, json!({}), json!({})).await;
        pods.push(cluster.until(name, "ready", |pod| is_true(pod, "Ready")).await);
    }
    let [kept, crashing, deleted] = &pods[..] else { unreachable!() };

    network.is_down.send_replace(true);
    network.tried(&cluster).await;
    cluster.runtime.exit(&ContainerId { pod: uid(crashing), name: "main".into(), attempt: 0 }, 1);
    cluster.eventually("the container is restarted", async || running(&cluster, crashing) == [1]).await;
    cluster.create("new", json!({}), json!({})).await;
    cluster.pods().delete("deleted", &DeleteParams::default()).await.unwrap();
    network.tried(&cluster).await;
    for pod in [kept, deleted] {
        assert_eq!(running(&cluster, pod), [0]);
    }
    let known = cluster.pods().get("crashing").await.unwrap();
    assert_eq!(state(&known)[0]["restartCount"], 0, "the node cannot write");

    network.is_down.send_replace(false);
    cluster.until("new", "ready", |pod| is_true(pod, "Ready")).await;
    cluster.gone("deleted").await;
    cluster.until("crashing", "restarted", |pod| state(pod)[0]["restartCount"] == 1).await;
    let known = cluster.pods().get("kept").await.unwrap();
    assert_eq!(phase(&known), "Running");
    assert_eq!(known.status, kept.status);
    assert_eq!(running(&cluster, kept), [0]);
}

#[tokio::test]
async fn a_restarted_node_adopts_its_pods_also_while_the_api_is_unreachable() {
    let cluster = KubeletHarness::stopped().await;
    let network = Network::new();
    let node = NodeProcess::start(&cluster, network.client(&cluster), config(&cluster));
    cluster.create("kept", json!({}), json!({})).await;
    let kept = cluster.until("kept", "ready", |pod| is_true(pod, "Ready")).await;
    node.stop().await;
    assert_eq!(running(&cluster, &kept), [0], "containers are left running");

    network.is_down.send_replace(true);
    let _node = NodeProcess::start(&cluster, network.client(&cluster), config(&cluster));
    network.tried(&cluster).await;
    assert_eq!(running(&cluster, &kept), [0]);
    network.is_down.send_replace(false);
    cluster.create("new", json!({}), json!({})).await;
    let new = cluster.until("new", "ready", |pod| is_true(pod, "Ready")).await;
    let known = cluster.pods().get("kept").await.unwrap();
    assert_eq!(running(&cluster, &kept), [0]);
    assert_eq!(state(&known)[0]["restartCount"], 0);
    let address = |pod: &Pod| pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    assert_eq!(address(&known), address(&kept));
    assert_ne!(address(&new), address(&kept));
}
