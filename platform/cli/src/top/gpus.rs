//! `mayfly top gpus`: the nodes' GPUs, their usage and that of the pods on them, from two readings of the metrics.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use tokio::time::Instant;

use super::{TopArgs, admin, read_metrics};
use crate::{format, gateway::HttpClient, metrics::Sample, output, session::Session, table};

/// A GPU, and its users.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct GpuRow {
    node: String,
    index: u64,
    /// The position of a MIG instance on its GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<u64>,
    uuid: String,
    model: String,
    /// The usage between the two readings; `None` for a device that does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    use_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_used_bytes: Option<f64>,
    memory_bytes: f64,
    memory_allocated_bytes: f64,
    core_allocated_percent: f64,
    containers: Vec<ContainerRow>,
}

/// The usage of a GPU by a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerRow {
    namespace: String,
    pod: String,
    container: String,
    /// `None` on a MIG instance, of which the driver reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    use_percent: Option<f64>,
    /// The guaranteed share; 100 for a whole GPU.
    core_percent: f64,
    memory_used_bytes: f64,
    memory_limit_bytes: f64,
    gpu_seconds: f64,
    /// The number of launches delayed by its quota since it started.
    throttled: f64,
}

pub(super) async fn run(args: &TopArgs, session: &Session) -> anyhow::Result<()> {
    let admin = admin(args, session).await?;
    let http = HttpClient::new();
    let before = read_metrics(&http, &admin).await?;
    let started = Instant::now();
    tokio::time::sleep(args.interval.0).await;
    let after = read_metrics(&http, &admin).await?;
    let rows = rows(&before, &after, started.elapsed());
    output::result(session.format(), &rows, || gpu_table(&rows))
}

const PREFIX: &str = "mayfly_gpu_";

/// The values of counters named `…busy_seconds_total`, by their labels.
fn busy(samples: &[Sample]) -> BTreeMap<(&str, &BTreeMap<String, String>), f64> {
    let counters = samples.iter().filter(|sample| sample.name.ends_with("busy_seconds_total"));
    counters.map(|sample| ((sample.name.as_str(), &sample.labels), sample.value)).collect()
}

fn rows(before: &[Sample], after: &[Sample], took: Duration) -> Vec<GpuRow> {
    let before = busy(before);
    let percent = |sample: &Sample| {
        // A container without an earlier sample has used all of its time since then.
        let then = before.get(&(sample.name.as_str(), &sample.labels)).copied().unwrap_or(0.0);
        ((sample.value - then).max(0.0) / took.as_secs_f64().max(0.001) * 100.0).min(100.0)
    };
    type Who = (String, String, String);
    let mut gpus: BTreeMap<(String, String), (GpuRow, BTreeMap<Who, ContainerRow>)> = BTreeMap::new();
    for sample in after {
        let Some(name) = sample.name.strip_prefix(PREFIX) else { continue };
        let label = |name: &str| sample.label(name).to_owned();
        // Metrics of a node, such as its violations.
        if label("gpu").is_empty() {
            continue;
        }
        let (row, users) = gpus.entry((label("node"), label("gpu"))).or_default();
        let Some(name) = name.strip_prefix("container_") else {
            (row.index, row.instance) = position(sample.label("index"));
            (row.node, row.uuid, row.model) = (label("node"), label("gpu"), label("model"));
            match name {
                "memory_bytes" => row.memory_bytes = sample.value,
                "memory_used_bytes" => row.memory_used_bytes = Some(sample.value),
                "memory_allocated_bytes" => row.memory_allocated_bytes = sample.value,
                "core_allocated_percent" => row.core_allocated_percent = sample.value,
                "busy_seconds_total" => row.use_percent = Some(percent(sample)),
                _ => {}
            }
            continue;
        };
        let who = (label("namespace"), label("pod"), label("container"));
        let user = users.entry(who.clone()).or_default();
        (user.namespace, user.pod, user.container) = who;
        match name {
            "core_percent" => user.core_percent = sample.value,
            "memory_used_bytes" => user.memory_used_bytes = sample.value,
            "memory_limit_bytes" => user.memory_limit_bytes = sample.value,
            "throttled_total" => user.throttled = sample.value,
            "busy_seconds_total" => {
                user.gpu_seconds = sample.value;
                user.use_percent = Some(percent(sample));
            }
            _ => {}
        }
    }
    let mut rows: Vec<GpuRow> = gpus
        .into_values()
        .map(|(row, users)| GpuRow { containers: users.into_values().collect(), ..row })
        .collect();
    rows.sort_by(|a, b| (&a.node, a.index, a.instance).cmp(&(&b.node, b.index, b.instance)));
    rows
}

/// The index of a GPU, and of a MIG instance on it, from a label such as `1` or `1:2`.
fn position(label: &str) -> (u64, Option<u64>) {
    let (gpu, instance) =
        label.split_once(':').map_or((label, None), |(gpu, instance)| (gpu, Some(instance)));
    (gpu.parse().unwrap_or(0), instance.and_then(|number| number.parse().ok()))
}

fn gpu_table(rows: &[GpuRow]) -> String {
    if rows.is_empty() {
        return "no GPUs\n".into();
    }
    let titles = ["NODE", "GPU", "MODEL", "POD", "CONTAINER", "USE", "MEMORY", "SHARE", "THROTTLED"];
    let mut cells = Vec::new();
    let percent = |value: f64| format!("{value:.0}%");
    for row in rows {
        let of_gpu = |text: &[String; 6]| {
            let index = match row.instance {
                Some(instance) => format!("{}:{instance}", row.index),
                None => row.index.to_string(),
            };
            [vec![row.node.clone(), index, row.model.clone()], text.to_vec()].concat()
        };
        let dash = || "-".to_owned();
        let memory = row.memory_used_bytes.map_or_else(dash, bytes);
        cells.push(of_gpu(&[
            dash(),
            dash(),
            row.use_percent.map_or_else(dash, percent),
            format!("{memory} / {}", bytes(row.memory_bytes)),
            percent(row.core_allocated_percent),
            dash(),
        ]));
        for used in &row.containers {
            cells.push(of_gpu(&[
                format!("{}/{}", used.namespace, used.pod),
                used.container.clone(),
                used.use_percent.map_or_else(dash, percent),
                format!("{} / {}", bytes(used.memory_used_bytes), bytes(used.memory_limit_bytes)),
                percent(used.core_percent),
                used.throttled.to_string(),
            ]));
        }
    }
    table::render(&titles, &cells)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a gauge of whole bytes")]
fn bytes(value: f64) -> String {
    format::bytes(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::parse;

    fn reading(busy: f64, of_pod: f64) -> Vec<Sample> {
        let gpu = "node=\"n\",gpu=\"GPU-1\",index=\"1\",model=\"NVIDIA H200\"";
        let pod = "node=\"n\",gpu=\"GPU-1\",namespace=\"default\",pod=\"train\",container=\"c\"";
        let idle = gpu.replace('1', "0");
        parse(&format!(
            "mayfly_gpu_memory_bytes{{{gpu}}} 1073741824\nmayfly_gpu_memory_used_bytes{{{gpu}}} 1024\n\
             mayfly_gpu_memory_bytes{{{idle}}} 1073741824\n\
             mayfly_gpu_core_allocated_percent{{{gpu}}} 50\nmayfly_gpu_busy_seconds_total{{{gpu}}} {busy}\n\
             mayfly_gpu_container_core_percent{{{pod}}} 50\n\
             mayfly_gpu_container_memory_used_bytes{{{pod}}} 512\n\
             mayfly_gpu_container_memory_limit_bytes{{{pod}}} 8589934592\n\
             mayfly_gpu_container_throttled_total{{{pod}}} 7\n\
             mayfly_gpu_violations_total{{node=\"n\",kind=\"memory\"}} 1\n\
             mayfly_gpu_container_busy_seconds_total{{{pod}}} {of_pod}\n"
        ))
    }

    #[test]
    fn use_comes_from_two_readings() {
        let rows = rows(&reading(10.0, 1.0), &reading(11.2, 1.8), Duration::from_secs(2));
        let shown: Vec<_> = rows.iter().map(|row| (row.index, row.use_percent.map(f64::round))).collect();
        assert_eq!(shown, [(0, None), (1, Some(60.0))]);
        let user = &rows[1].containers[0];
        assert_eq!(
            (user.use_percent.map(f64::round), user.core_percent, user.throttled),
            (Some(40.0), 50.0, 7.0)
        );
        let table = gpu_table(&rows);
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        let last = ["n", "1", "NVIDIA H200", "default/train", "c", "40%", "512 B / 8 GiB", "50%", "7"];
        assert_eq!(lines[3], last, "{table}");
        assert_eq!(lines[1][5..7], ["-", "- / 1 GiB"], "{table}");
        assert_eq!(gpu_table(&[]), "no GPUs\n");
    }

    #[test]
    fn instances_follow_their_gpu_and_have_no_use() {
        let gpu = |uuid: &str, index: &str| {
            format!(
                "mayfly_gpu_memory_bytes{{node=\"n\",gpu=\"{uuid}\",index=\"{index}\",model=\"m\"}} 1024\n"
            )
        };
        let user = "mayfly_gpu_container_core_percent{node=\"n\",gpu=\"MIG-b\",namespace=\"d\",pod=\"p\",container=\"c\"} 100\n";
        let all = [gpu("GPU-c", "2"), gpu("MIG-a", "1:10"), gpu("MIG-b", "1:2"), user.into()].concat();
        let rows = rows(&[], &parse(&all), Duration::from_secs(1));
        let table = gpu_table(&rows);
        let shown =
            table.lines().skip(1).map(|line| line.split_whitespace().take(6).collect::<Vec<_>>().join(" "));
        let expected = ["n 1:2 m - - -", "n 1:2 m d/p c -", "n 1:10 m - - -", "n 2 m - - -"];
        assert_eq!(shown.collect::<Vec<_>>(), expected, "{table}");
    }
}
