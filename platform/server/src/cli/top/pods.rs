//! `mayfly top pods`: where pods are and what they asked for, from the API.

use jiff::Timestamp;
use mayfly_api::{k8s::api::core::v1::Pod, resources::Amounts, wellknown::LABEL_FUNCTION};
use serde::Serialize;

use crate::cli::{format, output, session::Session, table};

/// Where a pod is, and what it asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodRow {
    namespace: String,
    name: String,
    function: String,
    node: String,
    phase: String,
    restarts: i64,
    cpu_requested_millis: u64,
    memory_requested_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    started: Option<String>,
}

pub(super) async fn run(namespace: Option<&str>, session: &Session) -> anyhow::Result<()> {
    let client = session.server().await?.client().clone();
    let api: kube::Api<Pod> = match namespace {
        Some(namespace) => kube::Api::namespaced(client, namespace),
        None => kube::Api::all(client),
    };
    let pods = api.list(&kube::api::ListParams::default()).await?.items;
    let rows: Vec<_> = pods.iter().map(pod_row).collect();
    output::result(session.format(), &rows, || pod_table(&rows, namespace, Timestamp::now()))
}

fn pod_row(pod: &Pod) -> PodRow {
    let (spec, status) = (pod.spec.clone().unwrap_or_default(), pod.status.clone().unwrap_or_default());
    let requested = Amounts::of_pod(&spec);
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    PodRow {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        function: labels.get(LABEL_FUNCTION).cloned().unwrap_or_default(),
        node: spec.node_name.unwrap_or_default(),
        phase: status.phase.unwrap_or_else(|| "Pending".into()),
        restarts: containers.iter().map(|container| i64::from(container.restart_count)).sum(),
        cpu_requested_millis: requested.get("cpu"),
        memory_requested_bytes: requested.get("memory"),
        started: status.start_time.map(|time| time.0.to_string()),
    }
}

fn pod_table(rows: &[PodRow], namespace: Option<&str>, now: Timestamp) -> String {
    if rows.is_empty() {
        return "no pods\n".into();
    }
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let mut titles = vec!["NAME", "FUNCTION", "NODE", "PHASE", "RESTARTS", "CPU", "MEMORY", "RUNS FOR"];
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
