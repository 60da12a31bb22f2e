//! `mayfly top pods`: the nodes of pods, their usage (from `metrics.k8s.io`, as for kubectl) and their requests.

use std::collections::BTreeMap;

use jiff::Timestamp;
use mayfly_api::{
    k8s::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity},
    quantity,
    resources::Amounts,
    wellknown::LABEL_FUNCTION,
};
use serde::Serialize;
use serde_json::Value;

use crate::{
    format, output,
    server::{Server, segment},
    session::Session,
    table,
};

/// A pod's node, usage and requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodRow {
    namespace: String,
    name: String,
    function: String,
    node: String,
    phase: String,
    restarts: i64,
    /// The usage; empty for a pod that is not running.
    #[serde(flatten)]
    usage: Usage,
    cpu_requested_millis: u64,
    memory_requested_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    started: Option<String>,
}

/// The usage of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Usage {
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_millis: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
}

/// Usage by namespace and name.
type Usages = BTreeMap<(String, String), Usage>;

pub(super) async fn run(namespace: Option<&str>, session: &Session) -> anyhow::Result<()> {
    let server = session.server().await?;
    let usages = measured(server, namespace).await;
    let client = server.client().clone();
    let api: kube::Api<Pod> = match namespace {
        Some(namespace) => kube::Api::namespaced(client, namespace),
        None => kube::Api::all(client),
    };
    let pods = api.list(&kube::api::ListParams::default()).await?.items;
    let rows: Vec<_> = pods.iter().map(|pod| pod_row(pod, &usages)).collect();
    output::result(session.format(), &rows, || pod_table(&rows, namespace, Timestamp::now()))
}

/// Missing measurements are not an error, since the other columns come from the API.
async fn measured(server: &Server, namespace: Option<&str>) -> Usages {
    let within =
        namespace.map_or_else(String::new, |namespace| format!("/namespaces/{}", segment(namespace)));
    match server.get(&format!("/apis/metrics.k8s.io/v1beta1{within}/pods")).await {
        Ok(list) => usages(&list),
        Err(error) => {
            output::note(format_args!("cannot read the usage of pods: {error}"));
            Usages::new()
        }
    }
}

/// The sums over each pod's containers.
fn usages(list: &Value) -> Usages {
    let items = list["items"].as_array().into_iter().flatten();
    let of = |item: &Value| {
        let mut usage = Usage::default();
        for container in item["containers"].as_array().into_iter().flatten() {
            let amount = |name: &str| container["usage"][name].as_str().map(|text| Quantity(text.to_owned()));
            if let Some(millis) = amount("cpu").and_then(|cores| quantity::millis(&cores).ok()) {
                *usage.cpu_millis.get_or_insert(0) += millis;
            }
            if let Some(bytes) = amount("memory").and_then(|bytes| quantity::whole(&bytes).ok()) {
                *usage.memory_bytes.get_or_insert(0) += bytes;
            }
        }
        usage
    };
    let text = |item: &Value, field: &str| item["metadata"][field].as_str().unwrap_or("").to_owned();
    items.map(|item| ((text(item, "namespace"), text(item, "name")), of(item))).collect()
}

fn pod_row(pod: &Pod, usages: &Usages) -> PodRow {
    let (spec, status) = (pod.spec.clone().unwrap_or_default(), pod.status.clone().unwrap_or_default());
    let requested = Amounts::of_pod(&spec);
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let key =
        (pod.metadata.namespace.clone().unwrap_or_default(), pod.metadata.name.clone().unwrap_or_default());
    PodRow {
        usage: usages.get(&key).copied().unwrap_or_default(),
        namespace: key.0,
        name: key.1,
        function: labels.get(LABEL_FUNCTION).cloned().unwrap_or_default(),
        node: spec.node_name.unwrap_or_default(),
        phase: status.phase.unwrap_or_else(|| "Pending".into()),
        restarts: containers.iter().map(|container| i64::from(container.restart_count)).sum(),
        cpu_requested_millis: requested.get("cpu"),
        memory_requested_bytes: requested.get("memory"),
        started: status.start_time.map(|time| time.0.to_string()),
    }
}

const TITLES: [&str; 10] = [
    "NAME",
    "FUNCTION",
    "NODE",
    "PHASE",
    "RESTARTS",
    "CPU",
    "MEMORY",
    "CPU REQUESTED",
    "MEMORY REQUESTED",
    "RUNS FOR",
];

fn pod_table(rows: &[PodRow], namespace: Option<&str>, now: Timestamp) -> String {
    if rows.is_empty() {
        return "no pods\n".into();
    }
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let mut titles = TITLES.to_vec();
    if namespace.is_none() {
        titles.insert(0, "NAMESPACE");
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let runs = row.started.as_deref().map_or_else(|| "-".into(), |at| format::age(Some(at), now));
            let mut cells = vec![
                row.name.clone(),
                or_dash(&row.function),
                or_dash(&row.node),
                row.phase.clone(),
                row.restarts.to_string(),
                row.usage.cpu_millis.map_or_else(|| "-".into(), |millis| format!("{millis}m")),
                row.usage.memory_bytes.map_or_else(|| "-".into(), format::bytes),
                format!("{}m", row.cpu_requested_millis),
                format::bytes(row.memory_requested_bytes),
                runs,
            ];
            if namespace.is_none() {
                cells.insert(0, row.namespace.clone());
            }
            cells
        })
        .collect();
    table::render(&titles, &cells)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_used_is_not_what_was_asked_for() {
        let pod = |name: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "default"}, "status": {"phase": "Running"},
                "spec": {"containers": [
                    {"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "64Mi"}}}]}
            }))
            .unwrap()
        };
        let list = json!({"items": [{"metadata": {"name": "a", "namespace": "default"}, "containers": [
            {"name": "c", "usage": {"memory": "1024Ki"}},
            {"name": "d", "usage": {"cpu": "1500000n", "memory": "1024Ki"}}]}]});
        let usages = usages(&list);
        let rows = [pod_row(&pod("a"), &usages), pod_row(&pod("b"), &usages)];
        assert_eq!(rows[0].usage, Usage { cpu_millis: Some(2), memory_bytes: Some(2 << 20) });
        let shown = pod_table(&rows, Some("default"), Timestamp::UNIX_EPOCH);
        let cells = |line: usize| shown.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(cells(1), ["a", "-", "-", "Running", "0", "2m", "2", "MiB", "250m", "64", "MiB", "-"]);
        assert_eq!(cells(2), ["b", "-", "-", "Running", "0", "-", "-", "250m", "64", "MiB", "-"]);
    }
}
