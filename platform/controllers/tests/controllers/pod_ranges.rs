//! The ranges of nodes' pods, against the real API.

use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
};
use mayfly_api::{ObjectKey, k8s::api::core::v1::Node};
use mayfly_controllers::NodeIpam;
use serde_json::{Value, json};

use crate::support::{ControllersHarness, until};

async fn node(client: &Client, object: Value) {
    let node: Node = serde_json::from_value(object).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &node).await.unwrap();
}

#[tokio::test]
async fn nodes_get_ranges_of_pod_addresses() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.node_ipam = Some(NodeIpam { network: "10.212.0.0/23".parse().unwrap(), prefix: 24 });
    let nodes = cluster.nodes();
    let range = |name: &str| nodes.get(&ObjectKey::cluster(name))?.spec.clone()?.pod_cidr;
    let chosen = json!({"mayfly.dev/pod-range": "10.212.1.0/24"});
    node(&cluster.client, json!({"metadata": {"name": "own", "annotations": chosen}})).await;
    node(&cluster.client, json!({"metadata": {"name": "a"}})).await;
    cluster.run_controllers();
    until(&nodes, "both have one", || range("own").is_some() && range("a").is_some()).await;
    assert_eq!(
        (range("own").unwrap(), range("a").unwrap()),
        ("10.212.1.0/24".into(), "10.212.0.0/24".into())
    );
    // The network has no third range, until a node is deleted.
    node(&cluster.client, json!({"metadata": {"name": "b"}})).await;
    until(&nodes, "it is known", || nodes.get(&ObjectKey::cluster("b")).is_some()).await;
    let api: Api<Node> = Api::all(cluster.client.clone());
    assert_eq!(api.get("b").await.unwrap().spec.and_then(|spec| spec.pod_cidr), None);
    api.delete("a", &DeleteParams::default()).await.unwrap();
    until(&nodes, "it has one", || range("b").is_some()).await;
    assert_eq!(range("b").as_deref(), Some("10.212.0.0/24"));
}
