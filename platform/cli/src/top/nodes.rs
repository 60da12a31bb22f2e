//! `mayfly top nodes`: the capacity of nodes and the requests of their pods, from the API; the usage of a single
//! node's host, from its metrics.

use mayfly_api::{
    k8s::api::core::v1::{Node, Pod},
    resources::Amounts,
};
use serde::Serialize;

use super::{TopArgs, admin, read_metrics};
use crate::{format, gateway::HttpClient, metrics::Sample, output, session::Session, table};

/// The capacity of a node, and the requests of its pods.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeRow {
    name: String,
    ready: bool,
    pods: u64,
    pods_max: u64,
    cpu_requested_millis: u64,
    cpu_millis: u64,
    memory_requested_bytes: u64,
    memory_bytes: u64,
    /// The current usage; known only for the node whose process has the admin address.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    host: Option<HostGauges>,
}

/// The usage of one process's wasm host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct HostGauges {
    instances: f64,
    components: f64,
    instance_memory_bytes: f64,
}

impl HostGauges {
    fn read(samples: &[Sample]) -> Option<Self> {
        let gauge = |name: &str| {
            let known =
                |sample: &&Sample| sample.name.split_once("wasm_").is_some_and(|(_, own)| own == name);
            samples.iter().find(known).map(|sample| sample.value)
        };
        Some(Self {
            instances: gauge("instances")?,
            components: gauge("components_loaded")?,
            instance_memory_bytes: gauge("memory_used_bytes")?,
        })
    }
}

pub(super) async fn run(args: &TopArgs, session: &Session) -> anyhow::Result<()> {
    let client = session.server().await?.client();
    let gauges = gauges(args, session).await;
    let all = kube::api::ListParams::default();
    let nodes = kube::Api::<Node>::all(client.clone()).list(&all).await?.items;
    let pods = kube::Api::<Pod>::all(client.clone()).list(&all).await?.items;
    let mut rows: Vec<_> = nodes.iter().map(|node| node_row(node, &pods)).collect();
    // With several nodes, the metrics cannot be attributed to one of them.
    if let [only] = rows.as_mut_slice() {
        only.host = gauges;
    }
    output::result(session.format(), &rows, || node_table(&rows))
}

/// Missing metrics are not an error, since most columns come from the API.
async fn gauges(args: &TopArgs, session: &Session) -> Option<HostGauges> {
    let admin = admin(args, session).await.ok()?;
    match read_metrics(&HttpClient::new(), &admin).await {
        Ok(samples) => HostGauges::read(&samples),
        Err(error) => {
            output::note(format_args!("no metrics: {error:#}"));
            None
        }
    }
}

/// Whether a pod holds the resources that it requested.
fn holds(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}

fn node_row(node: &Node, pods: &[Pod]) -> NodeRow {
    let name = node.metadata.name.clone().unwrap_or_default();
    let mut requested = Amounts::default();
    let mut count = 0;
    for spec in pods.iter().filter(|pod| holds(pod)).filter_map(|pod| pod.spec.as_ref()) {
        if spec.node_name.as_ref() == Some(&name) {
            requested.add(&Amounts::of_pod(spec));
            count += 1;
        }
    }
    let status = node.status.as_ref();
    let offered = status.and_then(|status| status.allocatable.as_ref()).map(Amounts::from_quantities);
    let offered = offered.unwrap_or_default();
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    NodeRow {
        ready: conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        pods: count,
        pods_max: offered.get("pods"),
        cpu_requested_millis: requested.get("cpu"),
        cpu_millis: offered.get("cpu"),
        memory_requested_bytes: requested.get("memory"),
        memory_bytes: offered.get("memory"),
        host: None,
        name,
    }
}

fn node_table(rows: &[NodeRow]) -> String {
    if rows.is_empty() {
        return "no nodes\n".into();
    }
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a gauge of whole bytes"
            )]
            let memory = row.host.map(|host| format::bytes(host.instance_memory_bytes as u64));
            vec![
                row.name.clone(),
                if row.ready { "True".into() } else { "False".into() },
                format!("{}/{}", row.pods, row.pods_max),
                format!("{}m/{}m", row.cpu_requested_millis, row.cpu_millis),
                format!("{}/{}", format::bytes(row.memory_requested_bytes), format::bytes(row.memory_bytes)),
                or_dash(row.host.map(|host| host.components.to_string())),
                or_dash(row.host.map(|host| host.instances.to_string())),
                or_dash(memory),
            ]
        })
        .collect();
    table::render(&TITLES, &cells)
}

const TITLES: [&str; 8] = [
    "NAME",
    "READY",
    "PODS",
    "CPU REQUESTED",
    "MEMORY REQUESTED",
    "COMPONENTS",
    "INSTANCES",
    "INSTANCE MEMORY",
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::metrics;

    #[test]
    fn a_node_adds_up_what_its_pods_asked_for() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n1"},
            "status": {"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "110"},
                       "conditions": [{"type": "Ready", "status": "True"}]}
        }))
        .unwrap();
        let pod = |node: &str, phase: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "p"}, "status": {"phase": phase},
                "spec": {"nodeName": node, "containers": [
                    {"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "64Mi"}}}]}
            }))
            .unwrap()
        };
        let pods = [pod("n1", "Running"), pod("n1", "Succeeded"), pod("n2", "Running"), pod("n1", "Pending")];
        let row = node_row(&node, &pods);
        assert_eq!((row.pods, row.pods_max, row.ready), (2, 110, true));
        assert_eq!((row.cpu_requested_millis, row.cpu_millis), (500, 2000));
        let text = "mayfly_wasm_instances 3\nmayfly_wasm_components_loaded 2\nmayfly_wasm_memory_used_bytes 2097152\n";
        let host = HostGauges::read(&metrics::parse(text));
        let shown = node_table(&[NodeRow { host, ..row.clone() }]);
        assert!(shown.contains("128 MiB/4 GiB      2            3           2 MiB"), "{shown}");
        assert!(node_table(&[row]).contains("128 MiB/4 GiB      -            -           -"));
    }
}
