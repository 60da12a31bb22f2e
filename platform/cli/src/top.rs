//! `mayfly top`: the activity of functions and GPUs, from two readings of the metrics; the resources of nodes and pods,
//! from the API.

use std::{collections::BTreeMap, time::Duration};

use clap::{Args, ValueEnum};
use mayfly_api::duration::Span;
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use super::{
    failure::{ErrorCode, Failure},
    format,
    gateway::HttpClient,
    metrics::{self, Histogram, Sample},
    output,
    session::Session,
    table,
};

mod gpus;
mod nodes;
mod pods;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly top
  mayfly top functions -A --interval 5s
  mayfly top nodes
  mayfly top gpus")]
pub(crate) struct TopArgs {
    /// What to look at
    #[arg(value_enum, default_value_t = What::Functions)]
    what: What,
    /// In all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Sampling window for functions and GPUs. Latencies cover the window, or all time since the server started if no
    /// request came in it
    #[arg(long, default_value = "1s", value_name = "DURATION")]
    interval: Span,
    /// The server's admin address [default: as in the data directory]
    #[arg(long, value_name = "URL")]
    admin: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    #[value(alias = "function", alias = "fn")]
    Functions,
    #[value(alias = "node", alias = "no")]
    Nodes,
    #[value(alias = "pod", alias = "po")]
    Pods,
    #[value(alias = "gpu")]
    Gpus,
}

pub(crate) async fn run(args: TopArgs, session: &Session) -> anyhow::Result<()> {
    let own = session.namespace().await?;
    let namespace = if args.all_namespaces { None } else { Some(own.as_str()) };
    match args.what {
        What::Functions => functions(&args, namespace, session).await,
        What::Nodes => nodes::run(&args, session).await,
        What::Pods => pods::run(namespace, session).await,
        What::Gpus => gpus::run(&args, session).await,
    }
}

/// The gateway's metric names per revision, without the prefix of the server's registry.
mod name {
    pub(super) const REQUESTS: &str = "requests_total";
    pub(super) const DURATION: &str = "request_duration_seconds_bucket";
    pub(super) const COLD: &str = "cold_start_duration_seconds_count";
    pub(super) const RUNNING: &str = "requests_running";
    pub(super) const WAITING: &str = "requests_waiting";
}

/// The activity of one function.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FunctionRow {
    namespace: String,
    name: String,
    replicas: u64,
    requests_per_second: f64,
    running: f64,
    waiting: f64,
    /// The number since the server's start.
    requests: f64,
    /// The number of responses with a status of 500 and above since the server's start.
    errors: f64,
    /// The number since the server's start.
    cold_starts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_seconds: Option<f64>,
}

/// The sums over a function's revisions.
#[derive(Clone, Debug, Default)]
struct Occurrences {
    requests: f64,
    errors: f64,
    cold_starts: f64,
    running: f64,
    waiting: f64,
    durations: Histogram,
}

type Key = (String, String);

async fn functions(args: &TopArgs, namespace: Option<&str>, session: &Session) -> anyhow::Result<()> {
    let server = session.server().await?;
    let admin = admin(args, session).await?;
    let kind = session.discovery().await?.find("functions.mayfly.dev")?;
    let list = server.get(&kind.collection(namespace)).await?;
    let http = HttpClient::new();
    let before = counts(&read_metrics(&http, &admin).await?);
    let started = Instant::now();
    tokio::time::sleep(args.interval.0).await;
    let after = counts(&read_metrics(&http, &admin).await?);
    let rows: Vec<_> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|function| function_row(function, &before, &after, started.elapsed()))
        .collect();
    output::result(session.format(), &rows, || function_table(&rows, namespace.is_none()))
}

/// The admin address of the flag, otherwise that in the data directory.
async fn admin(args: &TopArgs, session: &Session) -> anyhow::Result<String> {
    let known = session.server().await?.endpoints().and_then(|endpoints| endpoints.admin.clone());
    args.admin.clone().or(known).ok_or_else(|| {
        Failure::error(
            ErrorCode::Usage,
            "the address of the server's metrics is unknown",
            "give it with --admin http://HOST:9090, or use --data-dir on the server's machine",
        )
    })
}

async fn read_metrics(http: &HttpClient, admin: &str) -> anyhow::Result<Vec<Sample>> {
    Ok(metrics::parse(&http.text(&format!("{}/metrics", admin.trim_end_matches('/'))).await?))
}

fn counts(samples: &[Sample]) -> BTreeMap<Key, Occurrences> {
    let mut all: BTreeMap<Key, Occurrences> = BTreeMap::new();
    for sample in samples.iter().filter(|sample| sample.labels.contains_key("function")) {
        let Some((_, name)) = sample.name.split_once("gateway_") else { continue };
        let key = (sample.label("namespace").to_owned(), sample.label("function").to_owned());
        let counts = all.entry(key).or_default();
        match name {
            name::REQUESTS => {
                counts.requests += sample.value;
                if sample.label("code") == "5xx" {
                    counts.errors += sample.value;
                }
            }
            name::COLD => counts.cold_starts += sample.value,
            name::RUNNING => counts.running += sample.value,
            name::WAITING => counts.waiting += sample.value,
            name::DURATION => {
                let bound = sample.label("le");
                let bound =
                    if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap_or(f64::INFINITY) };
                counts.durations.add(bound, sample.value);
            }
            _ => {}
        }
    }
    all
}

fn function_row(
    function: &Value,
    before: &BTreeMap<Key, Occurrences>,
    after: &BTreeMap<Key, Occurrences>,
    took: Duration,
) -> FunctionRow {
    let text = |field: &str| function["metadata"][field].as_str().unwrap_or("").to_owned();
    let (namespace, name) = (text("namespace"), text("name"));
    let key = (namespace, name);
    let (then, now) =
        (before.get(&key).cloned().unwrap_or_default(), after.get(&key).cloned().unwrap_or_default());
    let recent = now.durations.since(&then.durations);
    let durations = if recent.count() > 0.0 { &recent } else { &now.durations };
    FunctionRow {
        replicas: function["status"]["readyReplicas"].as_u64().unwrap_or(0),
        requests_per_second: (now.requests - then.requests).max(0.0) / took.as_secs_f64().max(0.001),
        running: now.running,
        waiting: now.waiting,
        requests: now.requests,
        errors: now.errors,
        cold_starts: now.cold_starts,
        p50_seconds: durations.quantile(0.5),
        p99_seconds: durations.quantile(0.99),
        namespace: key.0,
        name: key.1,
    }
}

fn function_table(rows: &[FunctionRow], with_namespace: bool) -> String {
    if rows.is_empty() {
        return "no functions\n".into();
    }
    let seconds = |value: Option<f64>| value.map_or_else(|| "-".into(), format::seconds);
    let mut titles =
        vec!["NAME", "REPLICAS", "REQ/S", "RUNNING", "WAITING", "REQUESTS", "ERRORS", "COLD", "P50", "P99"];
    if with_namespace {
        titles.insert(0, "NAMESPACE");
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let mut cells = vec![
                row.name.clone(),
                row.replicas.to_string(),
                format!("{:.1}", row.requests_per_second),
                row.running.to_string(),
                row.waiting.to_string(),
                row.requests.to_string(),
                row.errors.to_string(),
                row.cold_starts.to_string(),
                seconds(row.p50_seconds),
                seconds(row.p99_seconds),
            ];
            if with_namespace {
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

    fn reading(ok: u32, fast: u32) -> BTreeMap<Key, Occurrences> {
        let labels = "namespace=\"default\",function=\"hello\",revision=\"hello-00001\"";
        let text = format!(
            "mayfly_gateway_requests_total{{{labels},code=\"2xx\"}} {ok}\n\
             mayfly_gateway_requests_total{{{labels},code=\"5xx\"}} 2\n\
             mayfly_gateway_request_duration_seconds_bucket{{le=\"0.001\",{labels}}} {fast}\n\
             mayfly_gateway_request_duration_seconds_bucket{{le=\"+Inf\",{labels}}} {fast}\n\
             mayfly_gateway_cold_start_duration_seconds_count{{{labels}}} 3\n\
             mayfly_gateway_requests_running{{{labels}}} 4\n\
             mayfly_gateway_refusals_total{{code=\"not_found\"}} 9\n"
        );
        counts(&metrics::parse(&text))
    }

    #[test]
    fn rates_come_from_two_readings() {
        let function =
            json!({"metadata": {"namespace": "default", "name": "hello"}, "status": {"readyReplicas": 1}});
        let took = Duration::from_secs(2);
        let row = function_row(&function, &reading(10, 12), &reading(30, 32), took);
        assert_eq!((row.requests_per_second, row.requests, row.errors), (10.0, 32.0, 2.0));
        assert_eq!((row.running, row.waiting, row.cold_starts, row.replicas), (4.0, 0.0, 3.0, 1));
        assert_eq!(row.p50_seconds, Some(0.0005));
        let quiet = function_row(&function, &reading(30, 32), &reading(30, 32), took);
        assert_eq!((quiet.requests_per_second, quiet.p50_seconds), (0.0, Some(0.0005)));
        let unknown = json!({"metadata": {"namespace": "default", "name": "other"}});
        assert_eq!(function_row(&unknown, &reading(1, 1), &reading(2, 2), took).p99_seconds, None);
        let text = function_table(&[row], false);
        assert!(text.starts_with("NAME    REPLICAS   REQ/S"), "{text}");
        assert!(text.contains("hello   1          10.0"), "{text}");
    }
}
